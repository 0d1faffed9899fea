"""PPO on CartPole-v1 with TorchRL's collector, actor, GAE and losses; 10% of rows differentiated.

Install, in a checkout:  pip install '.[torchrl]' gymnasium
Run:                     python examples/torchrl_ppo.py [--gate unbiased:0.1] [--iterations 12]

`ClipPPOLoss` trains the critic, on all rows. `kondo.backward` replaces its actor part and
differentiates the rows that the gate keeps. With `--gate dense` these are all rows, and the
gradient equals that of `ClipPPOLoss` bit for bit.

Expect the return to rise from 20 to above 100. Seed 0 prints, after 28 s of CPU time (other CPUs
give other digits):

    iteration   1  return   20.1
    iteration   4  return   26.2
    iteration   8  return   89.2
    iteration  12  return  187.3
    differentiated 7,488 of 73,728 rows (10.2%)
"""

import argparse
from collections import deque
from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import kondo
from kondo.integrations.torchrl import ActorPolicy

FRAMES, EPOCHS, MINIBATCH, CLIP = 1024, 6, 256, 0.2


def network(outputs: int) -> nn.Sequential:
    """Return a small network over CartPole's four numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class Learner:
    """Actor, critic, and the step that trains them on a minibatch."""

    def __init__(self, gate: str):
        logits = TensorDictModule(network(2), ["observation"], ["logits"])
        self.actor = ProbabilisticActor(
            logits, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
        )
        self.critic = ValueOperator(network(1), in_keys=["observation"])
        self.advantage = GAE(gamma=0.99, lmbda=0.95, value_network=self.critic)
        # An entropy bonus would need a forward and a backward of every row.
        self.loss = ClipPPOLoss(self.actor, self.critic, clip_epsilon=CLIP, entropy_bonus=False)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)
        self.policy, self.gate = ActorPolicy(self.actor), kondo.parse_gate(gate)
        self.seen = self.trained = 0

    def step(self, rows: TensorDict) -> None:
        """Train on a minibatch: the critic on all rows, the actor on those that are kept."""
        self.optimizer.zero_grad()
        # Was: losses = self.loss(rows)
        #      (losses["loss_objective"] + losses["loss_critic"]).backward()
        self.loss.loss_critic(rows)[0].mean().backward()
        report = kondo.backward(
            self.policy,
            rows,
            rows["advantage"].squeeze(-1),
            gate=self.gate,
            # The collector's log-probs tell the gate what it needs: no forward of skipped rows.
            screen=None if self.gate is None else rows["action_log_prob"],
            loss=partial(kondo.losses.ppo, clip=CLIP),
            loss_inputs={"old_log_probs": rows["action_log_prob"]},
        )
        nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
        # The critic has a gradient on every minibatch. Without it: `if not report.empty:`.
        self.optimizer.step()
        self.seen, self.trained = self.seen + report.rows_seen, self.trained + report.rows_trained

    def train(self, batch: TensorDict) -> None:
        """Train on what was collected, for some epochs."""
        for _ in range(EPOCHS):
            with torch.no_grad():
                self.advantage(batch)
            rows = batch.reshape(-1)
            # Centred only: a gate by delight must not see one divided by a standard deviation.
            rows["advantage"] = rows["advantage"] - rows["advantage"].mean()
            if not self.seen:  # can rows be dropped from this policy?
                kondo.check(self.policy, rows, rows["advantage"].squeeze(-1))
            for chosen in torch.randperm(len(rows)).split(MINIBATCH):
                self.step(rows[chosen])


def main() -> None:
    """Train, and print what it cost."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--gate", default="unbiased:0.1", help="as for kondo.parse_gate")
    options.add_argument("--iterations", type=int, default=12)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()

    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)  # networks this small gain nothing from more
    learner = Learner(chosen.gate)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=False), RewardSum())
    env.set_seed(chosen.seed)
    collector = Collector(
        env,
        learner.actor,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * chosen.iterations,
        auto_register_policy_transforms=False,  # for recurrent policies
    )
    returns: deque[float] = deque(maxlen=20)
    for iteration, batch in enumerate(collector, 1):
        ended = batch["next", "done"].squeeze(-1)
        returns.extend(batch["next", "episode_reward"][ended].flatten().tolist())
        learner.train(batch)
        if iteration % 4 == 0 or iteration in (1, chosen.iterations):
            recent = torch.tensor(list(returns)).mean()
            print(f"iteration {iteration:3}  return {recent:6.1f}", flush=True)
    collector.shutdown()
    share = learner.trained / learner.seen
    print(f"differentiated {learner.trained:,} of {learner.seen:,} rows ({share:.1%})")


if __name__ == "__main__":
    main()
