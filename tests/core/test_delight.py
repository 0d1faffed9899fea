"""kondo.surprisal and kondo.delight."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from core.strategies import junk, units
from oracles import core as oracle
from tolerances import assert_close

INF, NAN = math.inf, math.nan


def test_surprisal_literal(device):
    # -log 1 = 0, -log e^-0.5 = 0.5, -log e^-2 = 2, -log 0 = inf.
    log_probs = torch.tensor([0.0, -0.5, -2.0, -INF], device=device)
    assert_close(kondo.surprisal(log_probs), torch.tensor([0.0, 0.5, 2.0, INF]))


def test_surprisal_of_a_density_is_measured_from_the_mode():
    # A normal with sigma = 0.1 has log-density -log(0.1 sqrt(2 pi)) - (a / 0.1)^2 / 2, so the mode
    # stands at 1.3836 > 0 and the action a = 0.2 is (0.2 / 0.1)^2 / 2 = 2 below it.
    normal = torch.distributions.Normal(torch.zeros(2, dtype=torch.float64), 0.1)
    action = torch.tensor([0.0, 0.2], dtype=torch.float64)
    log_density, at_mode = normal.log_prob(action), normal.log_prob(torch.zeros(2).double())
    assert at_mode[0] > 1.38
    surprisal = kondo.surprisal(log_density, mode_log_probs=at_mode)
    assert_close(surprisal, torch.tensor([0.0, 2.0], dtype=torch.float64))


def test_a_density_without_its_mode_is_refused():
    with pytest.raises(ValueError, match=r"excess of 1\.38.*mode_log_probs"):
        kondo.surprisal(torch.tensor([1.38]))


def test_a_density_above_its_mode_is_refused():
    with pytest.raises(ValueError, match=r"must not exceed mode_log_probs, got an excess of 0\.5"):
        kondo.surprisal(torch.tensor([1.5]), mode_log_probs=torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        (torch.float64, 0.009),
        (torch.float32, 0.009),
        (torch.float16, 0.045),
        (torch.bfloat16, 0.24),
    ],
)
def test_a_log_prob_above_zero_by_rounding_alone_has_no_surprise(dtype, rounding):
    assert kondo.surprisal(torch.tensor([rounding], dtype=dtype)).item() == 0.0
    with pytest.raises(ValueError, match="float32"):
        kondo.surprisal(torch.tensor([1.2 * rounding], dtype=dtype))


def test_delight_literal(device):
    # Row 0: U = 2:   2 * 1 = 2, 2 * 2 = 4.       Row 1: U = -0.5: -0.5 * 0.5 = -0.25, -0.5 * 0 = 0.
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], device=device)
    advantages = torch.tensor([2.0, -0.5], device=device)
    expected = torch.tensor([[2.0, 4.0], [-0.25, 0.0]])
    assert_close(kondo.delight(log_probs, advantages), expected)
    assert_close(kondo.delight(log_probs, advantages.unsqueeze(1).expand(2, 2)), expected)


def test_delight_of_a_density_literal():
    # l = 1.5 - 0.5 = 1, chi = -3 * 1; and the masked mode's NaN is nobody's business.
    log_probs, modes = torch.tensor([0.5, 0.5]), torch.tensor([1.5, NAN])
    mask = torch.tensor([True, False])
    delight = kondo.delight(log_probs, torch.full((2,), -3.0), mask=mask, mode_log_probs=modes)
    assert delight.tolist() == [-3.0, 0.0]


def test_zero_advantage_times_infinite_surprisal_is_exactly_zero():
    impossible = torch.full((4,), -INF)
    delight = kondo.delight(impossible, torch.tensor([0.0, -0.0, 1.0, -1.0]))
    assert delight.tolist() == [0.0, 0.0, INF, -INF]


@pytest.mark.parametrize("beside", [NAN, -INF])
def test_an_excess_is_refused_whatever_stands_beside_it(beside):
    with pytest.raises(ValueError, match=r"must not exceed 0, got an excess of 0.5"):
        kondo.surprisal(torch.tensor([beside, 0.5, -1.0]))


def test_no_log_probs_have_no_surprisal():
    assert kondo.surprisal(torch.zeros(0)).shape == (0,)


def test_nan_in_a_unit_that_counts_stays_nan():
    log_probs, advantages = torch.tensor([NAN, -1.0, NAN]), torch.tensor([1.0, NAN, 0.0])
    assert kondo.delight(log_probs, advantages).isnan().all()


def test_masked_units_have_no_delight_whatever_stands_there():
    log_probs = torch.tensor([[NAN, -1.0], [5.0, INF]])
    advantages = torch.tensor([[NAN, 2.0], [INF, -INF]])
    mask = torch.tensor([[False, True], [False, False]])
    assert kondo.delight(log_probs, advantages, mask=mask).tolist() == [[0.0, 2.0], [0.0, 0.0]]
    rows = torch.tensor([True, False])
    delight = kondo.delight(log_probs[:, 1], advantages[:, 1], mask=rows)
    assert delight.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_multiplied_in_float32(half):
    log_probs = torch.linspace(-9, -0.1, 41).to(half)
    advantages = torch.linspace(-3, 3, 41).to(half)
    truth = log_probs.double().neg() * advantages.double()
    ours, naive = kondo.delight(log_probs, advantages), -log_probs * advantages
    assert ours.dtype == torch.float32
    assert_close(ours, truth)
    assert (ours.double() - truth).abs().max() < (naive.double() - truth).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_kept(dtype):
    ones = torch.ones(2, dtype=dtype)
    assert kondo.surprisal(-ones).dtype == kondo.delight(-ones, ones).dtype == dtype


def test_nothing_is_differentiated():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], requires_grad=True)
    modes = torch.zeros(2, requires_grad=True)
    assert not kondo.surprisal(log_probs, mode_log_probs=modes).requires_grad
    assert not kondo.delight(log_probs, advantages, mode_log_probs=modes).requires_grad


def test_inputs_are_left_as_they_were():
    log_probs, advantages = torch.tensor([NAN, -1.0]), torch.tensor([0.0, 1.0])
    kondo.delight(log_probs, advantages, mask=torch.tensor([False, True])).add_(1)
    assert log_probs.isnan().tolist() == [True, False]
    assert advantages.tolist() == [0.0, 1.0]


@given(units())
def test_delight_against_the_oracle(unit):
    log_probs, advantages, mask = unit
    rows = zip(log_probs.tolist(), advantages.tolist(), mask.tolist(), strict=True)
    expected = torch.tensor([oracle.delight(*row) for row in rows], dtype=torch.float64)
    assert_close(kondo.delight(log_probs, advantages, mask=mask), expected)


@given(units(), st.data())
def test_permuting_units_permutes_delight(unit, data):
    log_probs, advantages, mask = unit
    order = torch.tensor(data.draw(st.permutations(range(mask.numel()))))
    delight = kondo.delight(log_probs, advantages, mask=mask)
    permuted = kondo.delight(log_probs[order], advantages[order], mask=mask[order])
    assert torch.equal(permuted, delight[order])


@given(units(), st.integers(0, 13))
def test_splitting_the_batch_changes_nothing(unit, cut):
    whole = kondo.delight(*unit[:2], mask=unit[2])
    parts = [
        kondo.delight(log_probs, advantages, mask=mask)
        for log_probs, advantages, mask in (
            [t[:cut] for t in unit],
            [t[cut:] for t in unit],
        )
    ]
    assert torch.equal(torch.cat(parts), whole)


@given(units(), st.floats(1e-3, 1e3))
def test_delight_scales_with_the_advantage(unit, factor):
    log_probs, advantages, mask = unit
    scaled = kondo.delight(log_probs, factor * advantages, mask=mask)
    assert_close(scaled, factor * kondo.delight(log_probs, advantages, mask=mask))


@given(units(), junk, junk)
def test_masked_entries_do_not_matter(unit, bad_log_prob, bad_advantage):
    log_probs, advantages, mask = unit
    dirty = kondo.delight(
        torch.where(mask, log_probs, bad_log_prob),
        torch.where(mask, advantages, bad_advantage),
        mask=mask,
    )
    assert torch.equal(dirty, kondo.delight(log_probs, advantages, mask=mask))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_probs": [-1.0]}, "log_probs must be a floating-point tensor, got list"),
        ({"log_probs": torch.tensor([-1, -2])}, "log_probs must be floating point, got torch.int"),
        ({"advantages": torch.ones(3)}, r"advantages must have shape \[2\].*got \[3\]"),
        ({"advantages": torch.tensor([1, 2])}, "advantages must be floating point"),
        ({"mask": torch.ones(2)}, "mask must be a bool tensor .* got torch.float32"),
        ({"mask": [True, False]}, "mask must be a bool tensor .* got list"),
        ({"mask": torch.ones(1, dtype=torch.bool)}, r"mask must have shape \[2\].*got \[1\]"),
        ({"mode_log_probs": torch.ones(1)}, r"mode_log_probs must have .* \[2\], got \[1\]"),
        ({"mode_log_probs": [1.0, 1.0]}, "mode_log_probs must be a floating-point tensor"),
        ({"log_probs": torch.tensor([-1.0, 0.5])}, "log_probs must not exceed 0"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_bad_input_is_named(arguments, message, masked):
    given_mask = {"mask": torch.tensor([True, True])} if masked else {}
    good = {"log_probs": torch.tensor([-1.0, -2.0]), "advantages": torch.ones(2), **given_mask}
    with pytest.raises(ValueError, match=message):
        kondo.delight(**(good | arguments))


def test_a_value_per_token_is_not_taken_for_one_per_row():
    log_probs = torch.full((3, 3), -1.0)
    by_row = kondo.delight(log_probs, torch.tensor([1.0, 2.0, 3.0]))
    assert by_row[:, 0].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match=r"shape \[3, 2\] or \[3\].*got \[2\]"):
        kondo.delight(log_probs[:, :2], torch.tensor([1.0, 2.0]))
