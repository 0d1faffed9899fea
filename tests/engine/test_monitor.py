"""The warning about gates by delight: when a run shows their failure, once, and never else."""

import dataclasses
import gc
import math
import warnings

import pytest
import torch

import kondo
from kondo.core import quantiles
from kondo.engine.monitor import _RUNS, Trend, monitor
from kondo.engine.selection import Counts

ROWS, TOKENS, CHOICES = 512, 6, 8


class Table(torch.nn.Module):
    """One distribution per place; what is drawn has nothing to do with the reward."""

    def __init__(self):
        super().__init__()
        start = torch.zeros(TOKENS, CHOICES)
        start[:, 0] = 4.0
        self.logits = torch.nn.Parameter(start)

    def log_prob(self, tokens):
        log_probs = self.logits.log_softmax(-1).expand(len(tokens), -1, -1)
        return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def train(gate, steps=60):
    """Train on a reward by the toss of a coin, shared by all tokens of a row; return entropies."""
    generator = torch.Generator().manual_seed(0)
    model, found = Table(), []
    optimiser = torch.optim.SGD(model.parameters(), lr=60.0)
    for _ in range(steps):
        probs = model.logits.detach().softmax(-1)
        tokens = torch.multinomial(probs, ROWS, replacement=True, generator=generator).T
        coins = torch.rand(ROWS, generator=generator).round() - 0.5
        optimiser.zero_grad()
        report = kondo.backward(
            model.log_prob,
            tokens,
            coins,
            gate=gate,
            unit="sequence",
            options=kondo.Options(generator=generator),
        )
        optimiser.step()
        found.append(report.diagnostics["entropy"])
    return found


def test_a_gate_by_delight_that_makes_the_policy_random_is_named_once():
    with pytest.warns(
        RuntimeWarning, match=r"entropy rose from .* under Gate\(rate=0.1\)"
    ) as caught:
        entropies = train(kondo.Gate(rate=0.1))
    assert entropies[-1] > 2 * entropies[0]
    assert len([w for w in caught if "UnbiasedGate" in str(w.message)]) == 1
    assert caught[0].filename == __file__


@dataclasses.dataclass
class Unhashable(kondo.BaseGate):
    """A gate by delight with a value of its own, and so without a hash."""

    count: int = 5

    def choose(self, values, mask, generator=None):
        keep, _ = quantiles.highest(values, mask & (values != 0), self.count)
        return kondo.Choice.of(keep, mask)


@kondo.adapters.register(Unhashable)
class DrawsNothing(kondo.adapters.Adapter):
    draws = False


class Unknown(Unhashable):
    """A gate of which nobody knows that it draws nothing."""


@pytest.mark.parametrize(
    "gate",
    [
        kondo.UnbiasedGate(rate=0.3),
        kondo.Gate(rate=1.0),
        kondo.Gate(rate=0.1, signal=kondo.signals.abs_advantage),
        Unknown(count=50),
    ],
)
def test_other_gates_are_not_warned_about(gate):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(gate, steps=40)


def test_gates_are_told_apart_by_identity():
    with pytest.raises(TypeError):
        hash(Unhashable())
    with pytest.warns(RuntimeWarning, match="entropy rose"):
        train(Unhashable(count=50))
    with warnings.catch_warnings():  # an equal gate is another run
        warnings.simplefilter("error")
        train(Unhashable(count=50), steps=15)


def test_what_is_known_of_a_run_ends_with_its_gate():
    before = len(_RUNS)
    gate = kondo.Gate(rate=0.1)
    train(gate, steps=2)
    assert len(_RUNS) == before + 1
    del gate
    gc.collect()
    assert len(_RUNS) == before


def counts(entropy):
    """Return what a step with this entropy counted."""
    numbers = dict.fromkeys(Counts._fields, 0) | {"units": 100, "units_kept": 10}
    return Counts(**numbers | {"surprised": 1, "surprisal": entropy})


def test_rising_entropy_is_fine_while_the_reward_rises():
    gate, other = kondo.Gate(rate=0.1), kondo.Gate(rate=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(60):
            monitor(gate, counts(1 + 0.1 * step), reward=float(step))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(60):
            monitor(other, counts(1 + 0.1 * step))
    assert ["entropy rose" in str(each.message) for each in caught] == [True]


def test_the_entropy_is_the_mean_surprisal_of_what_counts():
    log_probs = torch.log(torch.rand(7, 3, generator=torch.Generator().manual_seed(0)))
    mask = torch.ones(7, 3, dtype=torch.bool)
    mask[2, 1:] = False
    weights = torch.ones(1, requires_grad=True)
    report = kondo.backward(
        lambda rows: rows * weights,
        log_probs,
        torch.linspace(-1, 1, 7),
        gate=kondo.Gate(rate=0.5),
        mask=mask,
        unit="token",
    )
    assert report.diagnostics["entropy"] == pytest.approx(float(-log_probs[mask].mean()), rel=1e-6)


def test_a_trend_is_not_noise():
    generator = torch.Generator().manual_seed(0)
    flat, rising, falling = Trend(), Trend(), Trend()
    for step in range(300):
        noise = float(torch.randn(1, generator=generator))
        flat.observe(5 + noise)
        rising.observe(5 + 0.1 * step + noise)
        falling.observe(5 - 0.1 * step + noise)
    assert rising.rose(20)
    assert not flat.rose(20)
    assert not falling.rose(20)
    assert not rising.stayed
    assert not falling.stayed
    assert falling.fell
    assert not rising.fell
    flat.observe(math.nan)
    assert flat.steps == 300


def stay(entropies, units, **options):
    """Return the messages of a run with these entropies."""
    gate = kondo.Gate(rate=0.1)
    rewards = options.pop("rewards", [math.nan] * len(entropies))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for entropy, reward in zip(entropies, rewards, strict=True):
            seen = counts(entropy)._replace(units=units)
            monitor(gate, seen, reward=reward, **options)
    return [str(each.message) for each in caught]


def test_an_entropy_that_stays_where_it_began_is_named_once():
    (said,) = stay([0.69 - 0.0005 * step for step in range(60)], 3200)
    assert "entropy stayed at 0.679 nats, where it began, in 32 steps of 102,400 units" in said


def test_an_entropy_that_stays_is_not_named_without_a_reason():
    flat, falling = [0.69] * 60, [0.69 * 0.99**step for step in range(60)]
    assert stay(falling, 3200) == []
    assert stay(flat, 1600) == []  # too few units to tell
    assert stay(flat[:29], 10_000) == []  # too few steps
    assert stay([0.3] * 5 + [0.4] * 15 + [0.3] * 40, 3200) == []  # it made a discovery
    assert stay(flat, 3200, rewards=range(60)) == []  # it learns
    assert stay(flat, 3200, density=True) == []  # its deviation may be fixed
    assert len(stay(flat, 3200, rewards=[0] * 60)) == 1


def test_the_entropy_of_a_density_has_no_share_by_which_it_rises():
    up = [0.05 + 0.005 * step for step in range(80)]
    assert stay(up, 100, density=True) == []
    assert "entropy rose" in stay(up, 100)[0]
    assert "entropy rose" in stay([4 * entropy for entropy in up], 100, density=True)[0]


# Advantages without a baseline.


def steps(gate, advantages, count=100, **options):
    """Make this many steps of a linear policy with the given advantages."""
    model = torch.nn.Linear(2, 3)
    rows = (torch.ones(len(advantages), 2), torch.zeros(len(advantages), 1, dtype=torch.int64))

    def log_prob(given):
        states, actions = given
        taken = model(states).log_softmax(-1).gather(1, actions)
        return taken.squeeze(1) if advantages.ndim == 1 else taken.expand(-1, advantages.shape[1])

    for _ in range(count):
        kondo.backward(log_prob, rows, advantages, gate=gate, **options)


ONE_SIGN = {
    "rewards of 0 and 1": torch.tensor([0.0, 1.0, 0.0, 1.0]),
    "costs": torch.tensor([-3.0, -2.0, -1.0, 0.0]),
    "a share of 0.04 of the other sign": torch.tensor([0.96, -0.04]),
}


@pytest.mark.parametrize("advantages", ONE_SIGN.values(), ids=list(ONE_SIGN))
@pytest.mark.parametrize("make", [kondo.Gate, kondo.UnbiasedGate], ids=["delight", "unbiased"])
def test_advantages_of_one_sign_are_named_once(make, advantages):
    gate = make(rate=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(gate, advantages, count=99)
    with pytest.warns(RuntimeWarning, match=r"not centred.*batch_mean\(rewards\)") as caught:
        steps(gate, advantages, count=3)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_first_batch_without_a_negative_advantage_is_named_at_once():
    advantages, gate = ONE_SIGN["rewards of 0 and 1"], kondo.UnbiasedGate(rate=0.5)
    with pytest.warns(RuntimeWarning, match=r"not centred: all 16 in the first step") as caught:
        steps(gate, advantages.repeat(4), count=1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():  # and not again
        warnings.simplefilter("error")
        steps(gate, advantages.repeat(4))


@pytest.mark.parametrize(
    "advantages",
    [
        torch.ones(15),
        torch.tensor([1.0] * 63 + [-0.01]),
        torch.full((64,), -0.5),
        torch.zeros(64),
        torch.full((64,), 6e-8),
    ],
    ids=["too few rows", "one negative", "nothing succeeds", "nothing to learn", "rounding"],
)
def test_other_first_batches_are_not_warned_about(advantages):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(kondo.UnbiasedGate(rate=0.5), advantages, count=1)


def test_what_a_gate_elsewhere_has_sent_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(kondo.Choice.of(torch.ones(64, dtype=torch.bool)), torch.ones(64), count=2)


NOT_NAMED = {
    "centred": torch.tensor([-0.5, 0.5]),
    "mostly one sign": torch.tensor([0.9, 0.9, 0.9, -0.9]),
    "nothing to learn": torch.zeros(4),
    "what rounding leaves of equal rewards": torch.full((4,), 6e-8),
}


@pytest.mark.parametrize("advantages", NOT_NAMED.values(), ids=list(NOT_NAMED))
def test_other_advantages_are_not_warned_about(advantages):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(kondo.UnbiasedGate(rate=0.5), advantages)


def test_a_critic_that_starts_at_nothing_has_fifty_steps_to_learn():
    gate = kondo.UnbiasedGate(rate=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(gate, ONE_SIGN["rewards of 0 and 1"], count=50)
        steps(gate, NOT_NAMED["centred"], count=50)


def test_one_row_a_step_is_judged_over_steps():
    gate = kondo.UnbiasedGate(rate=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(100):
            steps(gate, torch.tensor([1.0 if number % 2 else -1.0]), count=1)


@pytest.mark.parametrize("hidden", [-5.0, float("nan")])
def test_masked_elements_neither_cause_the_warning_nor_hide_it(hidden):
    mask = torch.tensor([[True, False], [True, False]])
    centred, one_sign = torch.tensor([[1.0, hidden], [-1.0, hidden]]), torch.ones(2, 2)
    one_sign[:, 1] = hidden
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(kondo.UnbiasedGate(rate=0.5), centred, mask=mask, unit="token")
    with pytest.warns(RuntimeWarning, match="not centred"):
        steps(kondo.UnbiasedGate(rate=0.5), one_sign, mask=mask, unit="token")


def test_signals_that_do_not_read_advantages_are_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(kondo.Gate(rate=0.5, signal=kondo.signals.surprisal), torch.ones(4))
