"""A TorchRL actor as a policy: gradients are those of TorchRL's own losses."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    set_interaction_type,
)
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.modules import (
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import A2CLoss, ClipPPOLoss, ReinforceLoss

import kondo
from kondo.integrations.torchrl import ActorPolicy, _version
from tolerances import assert_close

ROWS, KEPT = 50, 10
DISCRETE = {"categorical": Categorical, "one-hot": OneHotCategorical}
CONTINUOUS = {"normal": IndependentNormal, "tanh": TanhNormal}


def make_actor(kind, dtype=torch.float64):
    width = 3 if kind in DISCRETE else 4
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, width)).to(dtype)
    outputs = ["logits"]
    if kind in CONTINUOUS:
        net, outputs = nn.Sequential(net, NormalParamExtractor()), ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], outputs),
        in_keys=outputs,
        distribution_class=(DISCRETE | CONTINUOUS)[kind],
        return_log_prob=True,
    )


@torch.no_grad()
def collect(actor, dtype=torch.float64):
    """Return on-policy rows, as a collector leaves them after GAE, and a little stale."""
    data = TensorDict(observation=torch.randn(ROWS, 4, dtype=dtype), batch_size=[ROWS])
    with set_interaction_type(InteractionType.RANDOM):
        data = actor(data)
    data["action_log_prob"] += 0.3 * torch.randn(ROWS, dtype=dtype)
    data["advantage"] = torch.randn(ROWS, 1, dtype=dtype)
    data["value_target"] = torch.randn(ROWS, 1, dtype=dtype)
    return data


def torchrl_loss(name, actor, dtype):
    """Return TorchRL's loss and the entry of its actor part."""
    critic = ValueOperator(nn.Linear(4, 1).to(dtype), in_keys=["observation"])
    if name == "ppo":
        return ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_bonus=False), "loss_objective"
    if name == "a2c":
        return A2CLoss(actor, critic, entropy_bonus=False), "loss_objective"
    return ReinforceLoss(actor, critic), "loss_actor"


def step(name, actor, data, **options):
    """Take the same step with kondo; return the report."""
    losses = {"loss": kondo.losses.pg}
    if name == "ppo":
        losses = {
            "loss": partial(kondo.losses.ppo, clip=0.2),
            "loss_inputs": {"old_log_probs": data["action_log_prob"]},
        }
    advantages = data["advantage"].squeeze(-1)
    return kondo.backward(ActorPolicy(actor), data, advantages, **losses, **options)


def gradients(actor):
    found = [parameter.grad.clone() for parameter in actor.parameters()]
    actor.zero_grad(set_to_none=True)
    return found


def surprisal(kind, actor, data):
    """Return -log pi, or, for densities, how far below the mode of the normal, by formulas."""
    with torch.no_grad():
        dist = actor.get_dist(data.clone())
        if kind in DISCRETE:
            return -dist.log_prob(data["action"])
        loc, scale = data["loc"], data["scale"]
        normal = torch.atanh(data["action"]) if kind == "tanh" else data["action"]
        return ((normal - loc) / scale).square().sum(-1) / 2


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("loss", ["ppo", "reinforce", "a2c"])
@pytest.mark.parametrize("kind", [*DISCRETE, *CONTINUOUS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_is_torchrls_gradient_bit_for_bit(loss, kind, dtype):
    actor = make_actor(kind, dtype)
    data = collect(actor, dtype)
    module, entry = torchrl_loss(loss, actor, dtype)
    module(data.clone())[entry].backward()
    expected = gradients(actor)
    step(loss, actor, data)
    assert all(map(torch.equal, gradients(actor), expected))


@pytest.mark.parametrize("loss", ["ppo", "reinforce", "a2c"])
@pytest.mark.parametrize("kind", [*DISCRETE, *CONTINUOUS])
def test_gated_is_torchrls_gradient_with_skipped_advantages_zeroed(loss, kind):
    actor = make_actor(kind)
    data = collect(actor)
    report = step(loss, actor, data, gate=kondo.Gate(rate=KEPT / ROWS))
    found = gradients(actor)
    assert report.rows_trained == KEPT
    delight = surprisal(kind, actor, data) * data["advantage"].squeeze(-1)
    keep = torch.zeros(ROWS, dtype=torch.bool)
    keep[delight.topk(KEPT).indices] = True
    zeroed = data.clone()
    zeroed["advantage"] = torch.where(keep[:, None], data["advantage"], 0.0)
    module, entry = torchrl_loss(loss, actor, torch.float64)
    module(zeroed)[entry].backward()
    for mine, theirs in zip(found, gradients(actor), strict=True):
        assert_close(mine, theirs)


def test_an_unbiased_gate_weighs_by_one_over_its_probability():
    """By |U| alone, without saturation: p = K |U| / sum |U|, and the weight is 1 / p."""
    actor = make_actor("categorical")
    data = collect(actor)
    size = data["advantage"].squeeze(-1).abs().clamp(0.5, 1.5)
    data["advantage"] = (size * torch.randn(ROWS).sign()).unsqueeze(-1)
    gate = kondo.UnbiasedGate(rate=KEPT / ROWS, signal=kondo.signals.advantage)
    draws = torch.Generator().manual_seed(1)
    seen = []
    original = gate.choose

    def watch(*arguments):
        seen.append(original(*arguments))
        return seen[-1]

    gate.choose = watch
    report = step("ppo", actor, data, gate=gate, options=kondo.Options(generator=draws))
    found = gradients(actor)
    assert report.rows_screened == 0
    weight = torch.where(seen[0].keep, size.sum() / (KEPT * size), 0.0)
    weighted = data.clone()
    weighted["advantage"] = data["advantage"] * weight.unsqueeze(-1)
    module, entry = torchrl_loss("ppo", actor, torch.float64)
    module(weighted)[entry].backward()
    for mine, theirs in zip(found, gradients(actor), strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("kind", [*DISCRETE, *CONTINUOUS])
def test_a_step_runs_the_actor_once_for_all_rows_and_once_for_the_kept(kind):
    actor = make_actor(kind)
    data = collect(actor)
    seen = []
    actor[0].module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    step("ppo", actor, data, gate=kondo.Gate(rate=KEPT / ROWS))
    assert seen == [ROWS, KEPT]


@pytest.mark.parametrize("kind", [*DISCRETE, *CONTINUOUS])
def test_the_rollouts_screen_keeps_what_a_forward_keeps(kind):
    actor = make_actor(kind)
    data = collect(actor)
    with torch.no_grad():
        known = ActorPolicy(actor).screen(data)
    free = step("ppo", actor, data, gate=kondo.Gate(rate=0.2), screen=known)
    found = gradients(actor)
    exact = step("ppo", actor, data, gate=kondo.Gate(rate=0.2))
    assert (free.rows_screened, exact.rows_screened) == (0, ROWS)
    assert free.price == exact.price
    assert all(map(torch.equal, found, gradients(actor)))


def test_the_screen_of_a_tanh_normal_is_measured_before_the_transform():
    actor = make_actor("tanh")
    data = collect(actor)
    with torch.no_grad():
        log_probs, at_mode = ActorPolicy(actor).screen(data)
    before = Normal(data["loc"], data["scale"])
    assert_close(log_probs, before.log_prob(torch.atanh(data["action"])).sum(-1), torch.float32)
    assert_close(at_mode, before.log_prob(data["loc"]).sum(-1))


def test_the_tensordict_is_left_as_it_was():
    actor = make_actor("categorical")
    data = collect(actor)
    del data["logits"]
    keys, before = sorted(data.keys()), data.clone()
    step("ppo", actor, data, gate=kondo.Gate(rate=0.2))
    assert sorted(data.keys()) == keys
    assert (data == before).all()


def test_an_empty_selection_leaves_gradients_alone():
    actor = make_actor("categorical")
    data = collect(actor)
    data["advantage"].zero_()
    report = step("ppo", actor, data, gate=kondo.Gate(rate=0.2))
    assert report.empty
    assert all(parameter.grad is None for parameter in actor.parameters())


def _composite():
    module = TensorDictModule(
        nn.Linear(4, 3).double(), ["observation"], [("params", "a", "logits")]
    )
    return ProbabilisticActor(
        module,
        in_keys=["params"],
        out_keys=["action"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": Categorical}},
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, d, u: (ActorPolicy(a), d.reshape(5, 10), u.reshape(5, 10)), "reshape"),
        (lambda a, d, u: (ActorPolicy(a), d, u.unsqueeze(-1)), "squeeze"),
        (lambda a, d, u: (ActorPolicy(a), d.exclude("action"), u), "action_key"),
        (lambda a, d, u: (ActorPolicy(a), d.to_dict(), u), "TensorDict"),
        (lambda a, d, u: (ActorPolicy(_composite()), d, u), "Composite"),
        (lambda a, d, u: (ActorPolicy(nn.Linear(4, 3)), d, u), "get_dist"),
    ],
)
def test_what_cannot_be_right_is_refused(change, message):
    actor = make_actor("categorical")
    data = collect(actor)
    with pytest.raises(ValueError, match=message):
        kondo.backward(
            *change(actor, data, data["advantage"].squeeze(-1)), gate=kondo.Gate(rate=0.2)
        )


@pytest.mark.parametrize("version", [None, "0.13.2", "0.15.0", "1.0"])
def test_other_versions_are_refused(version):
    with pytest.raises(ImportError, match="kondo\\[torchrl\\]"):
        _version.TORCHRL.check(version)


def test_versions_of_the_range_are_accepted():
    for version in ("0.14.0", "0.14.1", "0.14.2+cpu"):
        _version.TORCHRL.check(version)


@pytest.mark.parametrize("kind", [*DISCRETE, *CONTINUOUS])
def test_check_passes_actors_and_finds_probabilities_that_do_not_sum_to_one(kind, monkeypatch):
    actor = make_actor(kind)
    data = collect(actor)
    advantages = data["advantage"].squeeze(-1)
    kondo.check(ActorPolicy(actor), data, advantages)
    if kind == "categorical":
        plain = Categorical.log_prob
        monkeypatch.setattr(Categorical, "log_prob", lambda self, a: plain(self, a) - 0.5)
        with pytest.raises(kondo.CheckError, match=r"sum to 0.607"):
            kondo.check(ActorPolicy(actor), data, advantages)
