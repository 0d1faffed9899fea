"""By default the mean gradient over all draws is that of TRL's own trainer."""

import itertools
import math

import pytest
import torch

import kondo
from integrations.trl.recording import number_rows, record
from integrations.trl.test_selection import Forwards
from integrations.trl.tiny import move_reference, policy, reward, trainer
from kondo.integrations.trl.selection import loss_advantages
from oracles.grpo import gradient_sizes
from oracles.sampling import probabilities, smallest_count
from tolerances import assert_close

UNITS = ["sequence", "token"]


def decision(step, name):
    """What the trainer decided, in the order of the generated rows: [n, T]."""
    rows = torch.cat([part["row_id"] for part in step["slices"]])
    return torch.cat([part[name] for part in step["slices"]])[rows.argsort()]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "options",
    [
        {"kondo_gate": "unbiased:0.5"},
        {"kondo_gate": "noise:1.5"},
        {"kondo_gate": "unbiased:0.5", "scale_rewards": "none"},
        {"kondo_gate": "unbiased:0.5", "temperature": 0.7},
    ],
    ids=str,
)
def test_chances_are_in_proportion_to_the_gradient(tmp_path, monkeypatch, unit, options):
    outputs = number_rows(monkeypatch)
    model = policy()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    gated = trainer(tmp_path, model=model, kondo_unit=unit, max_steps=1, **options)
    (step,) = record(gated)
    model.load_state_dict(start)
    # TRL's own advantage, whatever it is divided by: it is the one in the gradient.
    sizes = gradient_sizes(model, outputs[0], unit, temperature=gated.args.temperature)
    mask = outputs[0]["completion_mask"].bool()
    values = sizes[mask] if unit == "token" else sizes
    wanted = round(0.5 * values.numel())
    if "noise" in options["kondo_gate"]:
        wanted = smallest_count(values.tolist(), 1.5)
    chance = torch.tensor(probabilities(values.tolist(), wanted))
    keep, weight = (decision(step, f"kondo_{name}") for name in ("keep", "weight"))
    if unit == "token":
        kept, found = keep[mask], weight[mask]
    else:
        kept, found = keep.any(1), weight.amax(1)
        assert torch.equal(keep, kept.unsqueeze(1) & mask)
    assert 0 < wanted < values.numel()
    assert int(kept.sum()) == wanted
    assert_close(found, torch.where(kept, 1 / chance, 0.0))


class Forced(kondo.UnbiasedGate):
    """Keeps the units it is told to keep, with the weights a draw would have given them."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units, self.chance = list(units), None

    def choose(self, values, mask, generator=None):
        self.chance = super().choose(values, mask, generator).probability.double()
        keep = torch.tensor([unit in self.units for unit in range(len(values))])
        keep &= self.chance > 0
        weight = torch.where(keep, 1 / self.chance, 0.0).to(values.dtype)
        return kondo.Choice.of(keep, mask)._replace(weight=weight)


def partly_equal(completion_ids, **kwargs):
    """The first group's rewards are equal: it has no advantage, but a KL."""
    return [0.1] * 2 + reward(completion_ids[2:])


def stale(output):
    """Old log-probs of another policy: some ratios are clipped, for advantages of both signs."""
    if "old_per_token_logps" in output:
        old = output["old_per_token_logps"]
        place = torch.arange(old.numel()).view(old.shape)
        output["old_per_token_logps"] = (old + 0.4 * torch.sin(place)).clamp(max=0.0)
    return output


CASES = {
    "off policy": {"loss_type": "dapo", "num_iterations": 2},
    "sequence ratios": {
        "loss_type": "grpo",
        "num_iterations": 2,
        "importance_sampling_level": "sequence",
    },
    "KL": {"loss_type": "grpo", "beta": 0.3, "num_iterations": 2},
    "plain KL": {"loss_type": "dr_grpo", "beta": 0.3, "use_bias_correction_kl": False},
}
FOUR_ROWS = {
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "max_steps": 1,
    "max_grad_norm": 0.0,
}


def first_gradient(tmp_path, options, gate=None, **more):
    """The gradient of the first optimizer step, flat; nothing where the step was empty."""
    policy().save_pretrained(tmp_path / "model")
    settings = FOUR_ROWS | options | more
    if gate is not None:
        settings["kondo_gate"] = "unbiased:0.5"
    made = trainer(
        tmp_path,
        model=str(tmp_path / "model"),
        base=gate is None,
        reward_funcs=partly_equal,
        **settings,
    )
    if made.beta:
        move_reference(made)
    if gate is not None:
        made.gate = gate
    (step,) = record(made)
    zero = [torch.zeros(0)]
    return torch.cat(zero + [grad.flatten() for grad in step["grads"].values()]).double()


@pytest.mark.parametrize("case", CASES)
def test_the_mean_gradient_over_all_draws_is_trl_s(tmp_path, monkeypatch, case):
    """Every set of 4 rows, drawn one by one, with its probability."""
    number_rows(monkeypatch, stale)
    dense, mean, total = first_gradient(tmp_path, CASES[case]), 0.0, 0.0
    for units in itertools.chain.from_iterable(
        itertools.combinations(range(4), size) for size in range(5)
    ):
        gate = Forced(units, rate=0.25)
        gradient = first_gradient(tmp_path, CASES[case], gate)
        assert sum(gate.chance > 0) == (4 if "beta" in CASES[case] else 2)
        probability = math.prod(
            float(p if unit in units else 1 - p) for unit, p in enumerate(gate.chance)
        )
        total += probability
        if gradient.numel():
            mean = mean + probability * gradient
    assert total == pytest.approx(1)
    assert float(dense.abs().max()) > 0.01
    assert_close(mean, dense, torch.float32)


def test_the_mean_gradient_over_tokens_is_trl_s(tmp_path, monkeypatch):
    """The gradient is a sum over tokens: each alone, times its chance, adds up to all."""
    number_rows(monkeypatch, stale)
    options = CASES["off policy"] | {"beta": 0.3, "max_completion_length": 2}
    dense, mean = first_gradient(tmp_path, options), 0.0
    for token in range(8):
        gate = Forced([token], rate=0.25)
        gradient = first_gradient(tmp_path, options, gate, kondo_unit="token")
        if gradient.numel():
            mean = mean + float(gate.chance[token]) * gradient
    assert float(dense.abs().max()) > 0.01
    assert_close(mean, dense, torch.float32)


class Args:
    beta, use_bias_correction_kl = 0.2, True
    multi_objective_aggregation = "sum_then_normalize"


@pytest.mark.parametrize("corrected", [True, False])
def test_the_kl_counts_as_an_advantage(corrected):
    log_probs = torch.tensor([[-0.5, -2.0], [-1.0, -0.1]]).double().requires_grad_()
    ref, advantages = torch.tensor([[-1.0, -0.4], [-1.0, -3.0]]).double(), torch.tensor([0.7, -0.2])
    ratio = (log_probs - log_probs.detach()).exp()
    gap = ref - log_probs
    kl = (gap.exp() - gap - 1) * (ratio if corrected else 1)
    loss = -ratio * advantages.unsqueeze(1) + 0.2 * kl
    (expected,) = torch.autograd.grad(-loss.sum(), log_probs)
    args = Args()
    args.use_bias_correction_kl = corrected
    output = {"advantages": advantages, "ref_per_token_logps": ref}
    assert_close(loss_advantages(output, advantages, log_probs.detach(), args), expected)


def test_equal_rewards_have_no_advantage_whatever_rounding_left():
    args = Args()
    args.beta = 0.0
    output = {"advantages": torch.tensor([3e-4, 3e-4, 1.0, -1.0])}
    centred = torch.tensor([0.0, 0.0, 0.5, -0.5])
    assert loss_advantages(output, centred, None, args).tolist() == [0.0, 0.0, 1.0, -1.0]


def test_the_signal_advantage_needs_no_screen(tmp_path):
    model = policy()
    seen = Forwards(model)
    gated = trainer(
        tmp_path, model=model, kondo_check=False, kondo_gate="unbiased:0.25,signal=advantage"
    )
    gated.train()
    assert seen.shapes[False] == []
    assert [rows for rows, _ in seen.shapes[True]] == [2, 2, 2]


def test_a_gate_that_cannot_see_the_kl_is_refused(tmp_path):
    policy().save_pretrained(tmp_path / "model")
    gated = trainer(tmp_path, model=str(tmp_path / "model"), kondo_gate="unbiased:0.25", beta=0.1)
    with pytest.raises(ValueError, match=r"beta must be 0.0 with the gate UnbiasedGate"):
        gated.gate = kondo.UnbiasedGate(rate=0.25, signal=kondo.signals.advantage)
