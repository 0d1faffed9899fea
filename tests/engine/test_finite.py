"""NaN and infinity in what loss and gate bring: refused in kept units, harmless elsewhere."""

import math

import pytest
import torch

import kondo
from steps import run_step
from tolerances import assert_close

BROKEN = [math.nan, math.inf, -math.inf]
N, T = 12, 3


class Keep(kondo.BaseGate):
    """Keeps the units that it is given, whatever they are worth."""

    signal = staticmethod(kondo.signals.advantage)

    def __init__(self, units, weight=None):
        self.units, self.weight = units, weight

    def choose(self, values, mask, generator=None):
        keep = torch.zeros_like(mask)
        keep[self.units] = True
        choice = kondo.Choice.of(keep & mask, mask)
        return choice if self.weight is None else choice._replace(weight=self.weight)


class Problem:
    """One weight per element, whose gradient shows what was differentiated."""

    def __init__(self, *shape):
        self.weight = torch.linspace(0.5, 1.5, math.prod(shape)).reshape(shape).requires_grad_()

    def step(self, gate, inputs, **options):
        options = {"loss": kondo.losses.ppo, "loss_inputs": inputs} | options
        batch, advantages = torch.arange(N), torch.ones(N)
        run_step(lambda rows: -self.weight[rows].square(), batch, advantages, gate=gate, **options)
        return self.weight.grad


def old_log_probs(*shape):
    return {"old_log_probs": torch.full(shape, -0.1)}  # ratios below 1 are not clipped


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_broken_loss_input_is_named_before_anything_is_differentiated(broken, micro_batch):
    problem, inputs = Problem(N), old_log_probs(N)
    inputs["old_log_probs"][9] = broken  # in the last micro-batch
    message = rf"loss_inputs\['old_log_probs'\] must be finite .* got {broken} in unit 9 \(1 in all"
    with pytest.raises(ValueError, match=message):
        problem.step(Keep([1, 4, 9]), inputs, micro_batch=micro_batch)
    assert problem.weight.grad is None


@pytest.mark.parametrize(
    ("shape", "where", "unit"), [((N, T), (9, 2), r"\(9, 2\)"), ((N,), 9, "9"), ((N, 1), 9, "")]
)
def test_a_broken_input_of_tokens_or_rows_is_named(shape, where, unit):
    problem, inputs = Problem(N, T), {"other": torch.ones(shape)}
    inputs["other"][where] = math.nan
    with pytest.raises(ValueError, match=rf"loss_inputs\['other'\] must be finite .* unit {unit}"):
        problem.step(
            Keep([5, 29]),  # tokens (1, 2) and (9, 2)
            inputs,
            unit="token",
            loss=lambda log_probs, advantages, other: -log_probs * other.reshape(2, -1),
        )
    assert problem.weight.grad is None


def test_an_input_in_a_column_is_judged_with_its_sample():
    column = torch.ones(N, 1)
    column[4] = math.nan

    def loss(log_probs, advantages, other):
        return -log_probs * other.squeeze(1)

    grad = Problem(N).step(Keep([1, 9]), {"other": column}, loss=loss)
    assert int((grad != 0).sum()) == 2
    problem = Problem(N)
    with pytest.raises(ValueError, match=r"loss_inputs\['other'\] must be finite .* unit \(4, 0\)"):
        problem.step(Keep([1, 4]), {"other": column}, loss=loss)
    assert problem.weight.grad is None


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_loss_inputs_of_what_is_not_kept_are_harmless(broken):
    clean, dirty = old_log_probs(N, T), old_log_probs(N, T)
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[9, 0] = False
    kept = torch.zeros(N, T, dtype=torch.bool)
    kept[1, 2] = kept[9, 2] = True
    dirty["old_log_probs"][~kept] = broken
    grads = [
        Problem(N, T).step(Keep([5, 29]), inputs, unit="token", mask=mask, micro_batch=1)
        for inputs in (clean, dirty)
    ]
    assert torch.equal(*grads)
    assert int((grads[0] != 0).sum()) == 2


def test_inputs_of_integers_are_not_judged():
    grad = Problem(N).step(
        Keep([3]),
        {"group": torch.arange(N)},
        loss=lambda log_probs, advantages, group: -log_probs * group,
    )
    assert bool(grad[3] != 0)


def test_an_input_of_another_shape_is_judged_by_the_loss():
    def loss(log_probs, advantages, table):
        return -log_probs * table[:, 0]

    table = torch.ones(N, 5)
    table[:, 1] = -math.inf  # which the loss does not use
    table[4, 0] = math.nan
    problem = Problem(N)
    assert bool(problem.step(Keep([3, 7]), {"table": table}, loss=loss).isfinite().all())
    problem = Problem(N)
    with pytest.raises(ValueError, match=r"loss must be finite .* unit 4 .* loss_inputs \['table'"):
        problem.step(Keep([4]), {"table": table}, loss=loss)
    assert problem.weight.grad is None


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_weight_is_named(broken):
    weight = torch.ones(N)
    weight[4] = broken
    problem = Problem(N)
    message = rf"gate must return finite weights for kept units, got {broken} in unit 4 \(1 in all"
    with pytest.raises(ValueError, match=message):
        problem.step(Keep([1, 4], weight), old_log_probs(N))
    assert problem.weight.grad is None


@pytest.mark.parametrize("unit", ["sample", "token"])
def test_a_broken_weight_of_a_skipped_unit_is_harmless(unit):
    shape = (N,) if unit == "sample" else (N, T)
    weight = torch.full((math.prod(shape),), math.nan)
    weight[[1, 5]] = 1.0
    given = old_log_probs(*shape)
    grads = [Problem(*shape).step(Keep([1, 5], w), given, unit=unit) for w in (weight, None)]
    assert torch.equal(*grads)


def test_broken_log_probs_are_named_by_their_unit_of_the_batch():
    weight = torch.ones(N, requires_grad=True)
    holes = torch.zeros(N)
    holes[9] = math.nan
    with pytest.raises(ValueError, match=r"log_prob\(rows\) must be finite .* in unit 9 "):
        run_step(
            lambda rows: -weight[rows] + holes[rows],
            torch.arange(N),
            torch.ones(N),
            gate=Keep([1, 4, 9]),
            screen=-torch.ones(N),
            micro_batch=2,
        )


def leaky(weight, states):
    """A policy of [n, T] states whose NaN is multiplied with a gradient of 0 on its way back."""
    return lambda rows: -(states[rows] * weight).square()


def masked_states(broken):
    states, mask = torch.linspace(0.5, 1.5, N * T).reshape(N, T), torch.ones(N, T).bool()
    states[9, 1], mask[9, 1] = broken, False
    return states, mask


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_nan_that_leaks_from_a_masked_token_inside_the_policy_is_named(broken, micro_batch):
    states, mask = masked_states(broken)
    weight = torch.ones((), requires_grad=True)
    other = torch.ones(T, requires_grad=True)
    with pytest.raises(ValueError, match=r"must have a finite gradient, got NaN.* unit \(9, 1\)"):
        run_step(
            lambda rows: leaky(weight * other, states)(rows),
            torch.arange(N),
            torch.ones(N),
            gate=Keep([1, 4, 9]),
            mask=mask,
            unit="sequence",
            micro_batch=micro_batch,
        )
    assert not weight._backward_hooks  # none is left behind


@pytest.mark.parametrize("kept", [[1, 4], [1, 9]])
def test_what_is_not_finite_but_does_not_leak_is_harmless(kept):
    states, mask = masked_states(1.0)
    holes = torch.where(mask, 0.0, torch.tensor(-math.inf))
    holes[9, 1] = math.nan
    grads = []
    for add in (holes, torch.zeros(N, T)):
        weight = torch.ones((), requires_grad=True)
        run_step(
            lambda rows, add=add, weight=weight: leaky(weight, states)(rows) + add[rows],
            torch.arange(N),
            torch.ones(N),
            gate=Keep(kept),
            mask=mask,
            unit="sequence",
        )
        grads.append(weight.grad)
    assert torch.equal(*grads)


def test_nan_that_would_leak_from_a_skipped_row_is_harmless():
    states, mask = masked_states(math.nan)
    weight = torch.ones((), requires_grad=True)
    gate = Keep([1, 4])
    run_step(
        leaky(weight, states), torch.arange(N), torch.ones(N), gate=gate, mask=mask, unit="sequence"
    )
    assert bool(weight.grad.isfinite())


@pytest.mark.parametrize("broken_call", [1, 2])
def test_an_error_in_a_micro_batch_leaves_what_those_before_it_added(broken_call):
    problem, calls = Problem(N), []

    def log_prob(rows):
        calls.append(rows)
        if len(calls) == broken_call:
            raise FloatingPointError
        return -problem.weight[rows].square()

    problem.weight.grad = torch.ones(N)
    rows, advantages = torch.arange(N), torch.ones(N)
    with pytest.raises(FloatingPointError):
        run_step(log_prob, rows, advantages, gate=Keep([1, 4, 9]), micro_batch=1)
    # pg of log pi = -w^2 with U = 1: the gradient is 2 w / N.
    expected = torch.ones(N)
    if broken_call == 2:
        expected[1] += 2 * problem.weight.detach()[1] / N
    assert_close(problem.weight.grad, expected)
