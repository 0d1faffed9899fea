"""What a rank does in `test_ranks.py`: a PPO step of a TorchRL actor on its part of the rows."""

from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import kondo
from kondo.integrations.torchrl import ActorPolicy


def make(rows=40):
    """Return an actor and rows, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        actor = ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=OneHotCategorical,
        )
        data = TensorDict(
            observation=torch.randn(rows, 4).double(),
            action=nn.functional.one_hot(torch.randint(3, (rows,)), 3),
            action_log_prob=torch.rand(rows).double().log(),
            advantage=torch.randn(rows, 1).double(),
            batch_size=[rows],
        )
    return actor, data


def step(group, splits, spec):
    """Give this rank's rows; return the gradients and what was counted."""
    actor, data = make()
    end = sum(splits[: group.rank() + 1])
    own = data[end - splits[group.rank()] : end]
    report = kondo.backward(
        ActorPolicy(actor),
        own,
        own["advantage"].squeeze(-1),
        gate=kondo.parse_gate(spec),
        loss=partial(kondo.losses.ppo, clip=0.2),
        loss_inputs={"old_log_probs": own["action_log_prob"]},
        group=group,
        options=kondo.Options(all_reduce=True, generator=torch.Generator().manual_seed(0)),
    )
    return {"grads": [p.grad for p in actor.parameters()], "kept": report.kept}
