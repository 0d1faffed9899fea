"""kondo.signals: rivals of delight behind delight's interface."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from core.strategies import junk, permutations, units
from oracles import core as oracle
from tolerances import assert_close

INF, NAN = math.inf, math.nan
advantage_of_rows = kondo.signals.known_of(kondo.signals.advantage).of_sequences

FUNCTIONS = {
    "delight": kondo.delight,
    "abs_delight": kondo.signals.abs_delight,
    "gradient_norm": kondo.signals.gradient_norm,
    "advantage": kondo.signals.advantage,
    "abs_advantage": kondo.signals.abs_advantage,
    "surprisal": kondo.signals.surprisal,
    "additive": partial(kondo.signals.additive, alpha=0.25),
    "uniform": kondo.signals.uniform,
}
ORACLES = {
    "delight": oracle.delight,
    "abs_delight": lambda log_prob, advantage: abs(oracle.delight(log_prob, advantage)),
    "gradient_norm": lambda log_prob, advantage: abs(advantage) * (1 - math.exp(log_prob)),
    "advantage": lambda log_prob, advantage: advantage,
    "abs_advantage": lambda log_prob, advantage: abs(advantage),
    "surprisal": lambda log_prob, advantage: oracle.surprisal(log_prob),
    "additive": lambda log_prob, advantage: 0.25 * advantage + 0.75 * oracle.surprisal(log_prob),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # U = (2, -1), l = (1, 3) by row and token.
        ("advantage", [[2.0, 2.0], [-1.0, -1.0]]),
        ("abs_advantage", [[2.0, 2.0], [1.0, 1.0]]),
        ("abs_delight", [[2.0, 6.0], [1.0, 3.0]]),
        ("surprisal", [[1.0, 3.0], [1.0, 3.0]]),
        # 0.25 * 2 + 0.75 * 1 = 1.25, 0.5 + 2.25 = 2.75, -0.25 + 0.75 = 0.5, -0.25 + 2.25 = 2.
        ("additive", [[1.25, 2.75], [0.5, 2.0]]),
    ],
)
def test_literals(name, expected, device):
    log_probs = torch.tensor([[-1.0, -3.0], [-1.0, -3.0]], device=device)
    signal = FUNCTIONS[name](log_probs, torch.tensor([2.0, -1.0], device=device))
    assert_close(signal, torch.tensor(expected))
    assert signal.device.type == device.type


@pytest.mark.parametrize("name", ORACLES)
@given(unit=units())
def test_against_the_oracle(name, unit):
    log_probs, advantages, mask = unit
    rows = zip(log_probs.tolist(), advantages.tolist(), mask.tolist(), strict=True)
    expected = [ORACLES[name](lp, u) if counts else 0.0 for lp, u, counts in rows]
    signal = FUNCTIONS[name](log_probs, advantages, mask=mask)
    assert_close(signal, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ORACLES)
@given(unit=units(), data=st.data())
def test_permuting_units_permutes_signals(name, unit, data):
    order = data.draw(permutations(unit[0].numel()))
    log_probs, advantages, mask = (t[order] for t in unit)
    permuted = FUNCTIONS[name](log_probs, advantages, mask=mask)
    assert torch.equal(permuted, FUNCTIONS[name](*unit[:2], mask=unit[2])[order])


@pytest.mark.parametrize("name", ORACLES)
@given(unit=units(), bad_log_prob=junk, bad_advantage=junk)
def test_masked_entries_do_not_matter(name, unit, bad_log_prob, bad_advantage):
    log_probs, advantages, mask = unit
    dirty = FUNCTIONS[name](
        torch.where(mask, log_probs, bad_log_prob),
        torch.where(mask, advantages, bad_advantage),
        mask=mask,
    )
    clean = FUNCTIONS[name](log_probs, advantages, mask=mask)
    assert torch.equal(dirty, clean)
    assert not clean[~mask].any()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_detached_and_at_least_float32(name, dtype):
    log_probs = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0], dtype=dtype, requires_grad=True)
    signal = FUNCTIONS[name](log_probs, advantages)
    assert not signal.requires_grad
    assert signal.dtype == torch.float32
    signal.add_(1)  # its own storage
    assert advantages.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_probs": torch.tensor([1, 2])}, "log_probs must be floating point"),
        ({"advantages": torch.ones(3)}, r"advantages must have shape \[2\]"),
        ({"mask": torch.ones(2)}, "mask must be a bool tensor"),
    ],
)
def test_bad_input_is_named(name, arguments, message):
    good = {"log_probs": torch.tensor([-1.0, -2.0]), "advantages": torch.ones(2)}
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name](**(good | arguments))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, NAN])
def test_additive_alpha_lies_between_its_ends(alpha):
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\]"):
        kondo.signals.additive(torch.zeros(1), torch.zeros(1), alpha=alpha)


@given(units())
def test_the_ends_of_additive_are_advantage_and_surprisal(unit):
    log_probs, advantages, mask = unit
    one = kondo.signals.additive(log_probs, advantages, alpha=1.0, mask=mask)
    assert torch.equal(one, kondo.signals.advantage(log_probs, advantages, mask=mask))
    none = kondo.signals.additive(log_probs, advantages, alpha=0.0, mask=mask)
    assert torch.equal(none, kondo.signals.surprisal(log_probs, advantages, mask=mask))


def test_no_share_of_an_infinite_surprisal_is_nothing():
    # 0 x inf = 0, as everywhere: with alpha = 1 the surprisal has no say.
    impossible, advantages = torch.tensor([-INF, -INF]), torch.tensor([2.0, -1.0])
    signal = kondo.signals.additive(impossible, advantages, alpha=1.0)
    assert signal.tolist() == [2.0, -1.0]
    assert kondo.signals.additive(impossible, advantages, alpha=0.5).tolist() == [INF, INF]


def test_uniform_draws_from_zero_excluded_to_one(device):
    generator = torch.Generator().manual_seed(3)
    log_probs = torch.full((1000, 7), -1.0, device=device)
    draw = kondo.signals.uniform(log_probs, torch.zeros(1000, device=device), generator=generator)
    assert draw.device.type == device.type
    assert ((draw > 0) & (draw <= 1)).all()
    # The mean of n uniforms has standard deviation 1 / sqrt(12 n).
    assert abs(draw.mean().item() - 0.5) < 5 / math.sqrt(12 * draw.numel())
    again = torch.Generator().manual_seed(3)
    assert torch.equal(draw, kondo.signals.uniform(log_probs, log_probs, generator=again))


def test_uniform_never_draws_zero_which_would_mean_worthless():
    # torch.rand gives exactly 0 once in 2^24 draws; seed 34 does so at its 298,484th.
    units, generator = torch.zeros(300_000), torch.Generator().manual_seed(34)
    assert (kondo.signals.uniform(units, units, generator=generator) > 0).all()


def test_uniform_draws_nothing_where_nothing_counts():
    mask = torch.tensor([True, False, True])
    draw = kondo.signals.uniform(torch.tensor([-1.0, NAN, -1.0]), torch.ones(3), mask=mask)
    assert (draw > 0).tolist() == mask.tolist()


# One advantage per sequence.

RAGGED = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def test_the_advantage_of_a_sequence_does_not_grow_with_its_length(device):
    log_probs, mask = torch.full((3, 3), -1.0, device=device), RAGGED.to(device)
    advantages = torch.tensor([0.5, -2.0, 7.0], device=device)
    expected = torch.tensor([0.5, -2.0, 0.0])  # the last has nothing that counts
    for given_as in (advantages, advantages[:, None], advantages[:, None].expand(3, 3)):
        found = advantage_of_rows(log_probs, given_as, mask=mask)
        assert torch.equal(found.cpu(), expected)
        assert found.device.type == device.type
    every = advantage_of_rows(log_probs, advantages)
    assert torch.equal(every, advantages)
    by_row = advantage_of_rows(log_probs, advantages, mask=mask.any(1))
    assert torch.equal(by_row.cpu(), expected)


def test_what_a_sequence_does_not_count_has_no_say_in_its_advantage():
    advantages = torch.where(RAGGED, torch.tensor([[0.5], [-2.0], [1.0]]), NAN)
    log_probs = torch.where(RAGGED, -1.0, NAN)
    found = advantage_of_rows(log_probs, advantages, mask=RAGGED)
    assert found.tolist() == [0.5, -2.0, 0.0]
    advantages[1, 0] = NAN  # one that counts is for a gate to refuse
    found = advantage_of_rows(log_probs, advantages, mask=RAGGED)
    assert found.isnan().tolist() == [False, True, False]


def test_a_sequence_has_one_advantage():
    advantages = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.5]])
    log_probs = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"same at all tokens .* got 0.0 and 2.0 in unit 1; "):
        advantage_of_rows(log_probs, advantages)
    advantage_of_rows(log_probs, advantages, mask=RAGGED)
    with pytest.raises(ValueError, match="log_probs must be floating point"):
        advantage_of_rows(log_probs.long(), advantages[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_advantage_of_a_sequence_is_detached_and_at_least_float32(dtype):
    advantages = torch.tensor([1.0, -2.0], dtype=dtype, requires_grad=True)
    found = advantage_of_rows(torch.zeros(2, 3), advantages)
    assert not found.requires_grad
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_gate_takes_any_signal():
    # Surprisal ranks the failure first, delight the success.
    log_probs, advantages = torch.tensor([-1.0, -3.0]), torch.tensor([2.0, -1.0])
    gate = kondo.Gate(rate=0.5)
    assert gate(kondo.delight(log_probs, advantages)).keep.tolist() == [True, False]
    surprise = kondo.signals.surprisal(log_probs, advantages)
    assert gate(surprise).keep.tolist() == [False, True]


def test_a_rows_advantage_does_not_depend_on_where_its_tokens_stand():
    log_probs, advantages = torch.full((3, 4), -1.0), torch.tensor([0.5, -0.25, 0.75])
    for mask in (torch.arange(4) < 2, torch.arange(4) >= 2, torch.arange(4) == 3):
        mask = mask.expand(3, 4).clone()
        mask[1] = False
        found = advantage_of_rows(log_probs, advantages, mask=mask)
        assert found.tolist() == [0.5, 0.0, 0.75]
        wide = advantages[:, None].expand(3, 4)
        again = advantage_of_rows(log_probs, wide, mask=mask)
        assert again.tolist() == found.tolist()
    nothing = advantage_of_rows(log_probs[:, :0], advantages)
    assert nothing.tolist() == [0.0, 0.0, 0.0]


# The norm of the gradient.


def true_norms(logits, actions, advantages):
    """Return the norms [N] of the gradients of U log pi(a) with respect to the logits."""
    logits = logits.clone().requires_grad_()
    log_probs = logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    rows = advantages if log_probs.ndim == 1 else advantages.unsqueeze(-1)
    (grad,) = torch.autograd.grad((rows * log_probs).sum(), logits)
    return grad.flatten(1).norm(dim=1), log_probs.detach()


@pytest.mark.parametrize("shape", [(40,), (40, 6)])
def test_the_gradient_norm_is_a_proxy_of_the_norm_at_the_logits(shape):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*shape, 5, generator=generator, dtype=torch.float64)
    actions = torch.randint(5, shape, generator=generator)
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    norms, log_probs = true_norms(logits, actions, advantages)
    signal = kondo.signals.gradient_norm
    function = signal if len(shape) == 1 else kondo.signals.known_of(signal).of_sequences
    proxy = function(log_probs, advantages)
    assert proxy.shape == (40,)
    assert (proxy <= norms * (1 + 1e-9)).all()
    assert (norms <= math.sqrt(2) * proxy * (1 + 1e-9)).all()


def test_tokens_outside_the_mask_have_no_gradient_norm():
    log_probs = torch.tensor([[-1.0, NAN], [-1.0, -2.0]])
    mask = torch.tensor([[True, False], [True, True]])
    rows = kondo.signals.known_of(kondo.signals.gradient_norm).of_sequences(
        log_probs, torch.tensor([2.0, 1.0]), mask=mask
    )
    one, two = 1 - math.exp(-1), 1 - math.exp(-2)
    assert_close(rows, torch.tensor([2 * one, math.hypot(one, two)]))


def test_the_gradient_norm_of_a_normal_density():
    """Between the norm at the mean alone and that at mean and log-std, where these are near."""
    z = torch.tensor([0.0, 0.5, 1.0, -1.5], dtype=torch.float64)
    found = kondo.signals.known_of(kondo.signals.gradient_norm).of_densities(
        -(z**2) / 2, torch.full_like(z, -2.0)
    )
    assert_close(found, 2 * (1 + z**2).sqrt())
    mean_and_scale = 2 * (z**2 + (z**2 - 1) ** 2).sqrt()
    assert (found / mean_and_scale).max() < 1.5
    assert (found / mean_and_scale).min() > 0.6


def test_a_log_prob_above_zero_is_no_probability():
    with pytest.raises(ValueError, match="log_probs must not exceed 0"):
        kondo.signals.gradient_norm(torch.tensor([0.5]), torch.ones(1))


def test_a_partial_of_what_only_the_checked_signal_takes_is_called_itself():
    modes, log_probs = torch.tensor([2.0, 1.0, 0.5]), torch.tensor([1.5, 0.25, -1.0])
    signal = partial(kondo.delight, mode_log_probs=modes)
    gate = kondo.Gate(rate=0.5, signal=signal)
    chosen = kondo.select(log_probs, torch.tensor([1.0, -1.0, 0.5]), gate=gate)
    assert chosen.values.tolist() == [0.5, -0.75, 0.75]
