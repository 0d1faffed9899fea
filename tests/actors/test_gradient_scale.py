import math

import pytest
import torch

from kondo.actors.gradient_scale import (
    FACTOR,
    PATIENCE,
    GradientScale,
    all_finite,
    gradient_norm,
)

WEIGHTS = [torch.zeros(3)]


def parameters(*gradients):
    made = [torch.zeros(len(each)) for each in gradients]
    for weight, gradient in zip(made, gradients, strict=True):
        weight.grad = torch.tensor(gradient)
    return made


def test_the_norm_is_that_of_all_gradients_together():
    assert gradient_norm([*parameters([3.0, 0.0], [4.0]), torch.zeros(2)]) == 5.0
    assert gradient_norm(WEIGHTS) == 0.0


def test_the_norm_does_not_overflow_and_hides_no_nan():
    assert gradient_norm(parameters([3e38, 3e38])) == pytest.approx(3e38 * 2**0.5)
    assert not math.isfinite(gradient_norm(parameters([1.0], [math.inf])))
    assert math.isnan(gradient_norm(parameters([1.0], [math.nan])))


def test_without_a_scale_squares_alone_are_bounded():
    """Adam keeps squares in the dtype of the weights."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        bound = GradientScale(0.0, [torch.zeros(2, dtype=dtype)]).bound
        assert bool(torch.tensor(bound * 0.99, dtype=dtype).square().isfinite())
        assert not bool(torch.tensor(bound * 1.02, dtype=dtype).square().isfinite())
    for floor in (math.nan, math.inf):
        assert GradientScale(floor, WEIGHTS).bound == GradientScale(0.0, WEIGHTS).bound


def test_the_bound_follows_what_is_accepted_and_never_falls_below_the_floor():
    scale = GradientScale(1.0, WEIGHTS)
    scale.accept(1e-9)
    assert scale.bound == FACTOR
    for _ in range(1000):
        scale.accept(50.0)
    assert scale.bound == pytest.approx(50 * FACTOR, rel=1e-3)
    for _ in range(5000):
        scale.accept(0.0)
    assert scale.bound == FACTOR


def test_a_scale_that_has_really_grown_is_not_locked_out_for_good():
    scale, norm, refused = GradientScale(1.0, WEIGHTS), 1e9, 0
    while norm > scale.bound:
        scale.refuse()
        refused += 1
    assert refused == PATIENCE * round(math.log10(norm / FACTOR))
    scale.accept(norm)
    assert scale.bound >= norm
    scale.accept(1.0)


def test_refusals_between_sound_steps_do_not_widen_the_bound():
    scale = GradientScale(1.0, WEIGHTS)
    for _ in range(10 * PATIENCE):
        scale.refuse()
        scale.accept(1.0)
    assert scale.bound == FACTOR


def test_no_number_of_refusals_lets_squares_overflow():
    scale = GradientScale(1.0, WEIGHTS)
    for _ in range(10_000):
        scale.refuse()
    assert scale.bound == GradientScale(0.0, WEIGHTS).bound


def test_its_state_comes_back():
    scale, again = GradientScale(1.0, WEIGHTS), GradientScale(7.0, WEIGHTS)
    scale.accept(30.0)
    scale.refuse()
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict() == {"floor": 1.0, "mean": 30.0, "refusals": 1}


@pytest.mark.parametrize(
    "change", [{"floor": math.nan}, {"mean": -1.0}, {"mean": math.inf}, {"refusals": -1}]
)
def test_a_state_without_sense_is_refused(change):
    scale = GradientScale(1.0, WEIGHTS)
    with pytest.raises(ValueError, match="gradient_scale must have"):
        scale.load_state_dict(scale.state_dict() | change)
    assert scale.state_dict() == {"floor": 1.0, "mean": 0.0, "refusals": 0}


def test_finite_means_every_number():
    assert all_finite([torch.zeros(0), torch.ones(2), torch.tensor([2**40])])
    for value in (math.nan, math.inf, -math.inf):
        assert not all_finite([torch.ones(2), torch.tensor([1.0, value])])
