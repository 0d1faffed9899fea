"""Adam of stacked members is torch's own, member by member."""

import copy

import pytest
import torch

from kondo_lab.training.optimiser import StackedAdam, equal_neighbours
from tolerances import assert_close

SHAPES = {"weight": (4, 3), "bias": (1, 3)}
RATES = [0.01, 0.03, 0.03, 0.002]
STEPS = 6


def normal(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(RATES), *shape, generator=generator, dtype=torch.float64)


def stacked():
    return {name: normal(shape, place) for place, (name, shape) in enumerate(SHAPES.items())}


def gradients(step):
    """Some long, some short, so that a norm of 1 clips a part of the members."""
    length = torch.tensor([0.05, 3.0, 0.2, 10.0]).double()
    return {
        name: normal(shape, 100 + 10 * step + place) * length.view(-1, 1, 1)
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def transposed(value):
    """The same numbers, in memory as a transposed product leaves them."""
    return value.mT.contiguous().mT


def alone(start, number, *, max_norm=None, decay=0):
    """A member's parameters by torch.optim.Adam, and its gradients' norms."""
    own = {name: value[number].clone().requires_grad_() for name, value in start.items()}
    adam = torch.optim.Adam(list(own.values()), lr=RATES[number])
    norms = []
    for step in range(1, STEPS + 1):
        if decay:
            adam.param_groups[0]["lr"] = RATES[number] * max(0.0, 1 - (step - 1) / decay)
        for name, value in gradients(step).items():
            own[name].grad = value[number].clone()
        if max_norm:
            norms.append(torch.nn.utils.clip_grad_norm_(list(own.values()), max_norm))
        adam.step()
    return {name: value.detach() for name, value in own.items()}, norms


@pytest.mark.parametrize("lie", [lambda value: value, transposed], ids=["plain", "transposed"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_every_member_is_adam_with_its_own_rate_and_norm(max_norm, lie):
    start = stacked()
    found = {name: value.clone() for name, value in start.items()}
    adam = StackedAdam(found, RATES, **({"max_norm": max_norm} if max_norm else {}))
    norms = []
    for step in range(1, STEPS + 1):
        given = {name: lie(value) for name, value in gradients(step).items()}
        assert given["weight"].is_contiguous() is (lie is not transposed)
        before = {name: value.clone() for name, value in given.items()}
        norms.append(adam.step(given, torch.tensor(step)))
        for name, value in before.items():
            assert torch.equal(given[name], value)
    clipped = 0
    for number in range(len(RATES)):
        expected, own = alone(start, number, max_norm=max_norm)
        for name, value in expected.items():
            assert_close(found[name][number], value)
        for step, norm in enumerate(own):
            assert_close(norms[step][number], norm)
        clipped += sum(bool(norm > 1) for norm in own)
    if max_norm:
        assert 0 < clipped < STEPS * len(RATES)
    else:
        assert norms == [None] * STEPS


def test_a_rate_falls_linearly_to_zero_and_others_stay():
    start = stacked()
    found = {name: value.clone() for name, value in start.items()}
    decays = [4, 4, 0, 10]
    adam = StackedAdam(found, RATES, decay_steps=decays)
    last = None
    for step in range(1, STEPS + 1):
        adam.step(gradients(step), torch.tensor(step))
        if step == 4:
            last = {name: value.clone() for name, value in found.items()}
    for number, decay in enumerate(decays):
        expected, _ = alone(start, number, decay=decay)
        for name, value in expected.items():
            # A rate that changes is a float32 number, as on the device.
            assert_close(found[name][number], value, dtype=torch.float32 if decay else None)
            still = torch.equal(found[name][number], last[name][number])
            assert still is (decay == 4)


def test_it_writes_into_the_parameters_it_was_given():
    weights = stacked()
    places = {name: value.data_ptr() for name, value in weights.items()}
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    before = copy.deepcopy(weights)
    StackedAdam(leaves, RATES).step(gradients(1))
    for name, value in weights.items():
        assert value.data_ptr() == places[name]
        assert (value != before[name]).all()


def test_a_common_rate_takes_the_place_of_all():
    start = stacked()
    found, expected = ({n: v.clone() for n, v in start.items()} for _ in "ab")
    common = torch.tensor(0.5)
    adam, other = StackedAdam(found, RATES), StackedAdam(expected, [0.25] * len(RATES))
    adam.set_rate(common)
    common.fill_(0.25)
    for step in (1, 2):
        adam.step(gradients(step))
        other.step(gradients(step))
    for name, value in expected.items():
        assert_close(found[name], value)


def test_it_goes_on_from_its_state_bit_by_bit(tmp_path):
    options = {"decay_steps": [0, 9, 9, 0], "max_norm": 1.0}
    found = stacked()
    adam = StackedAdam(found, RATES, **options)
    for step in (1, 2, 3):
        adam.step(gradients(step), step)
    torch.save({"adam": adam.state_dict(), "weights": found}, tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    restored = saved["weights"]
    again = StackedAdam(restored, RATES, **options)
    again.load_state_dict(saved["adam"])
    for step in (4, 5, 6):
        for each in (adam, again):
            each.step(gradients(step), step)
    for name, value in found.items():
        assert torch.equal(restored[name], value)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_is_above_zero(norm):
    with pytest.raises(ValueError, match="max_norm must be > 0"):
        StackedAdam(stacked(), RATES, max_norm=norm)


def test_neighbours_that_are_equal_stand_together():
    assert list(equal_neighbours("aabac")) == [
        *((slice(0, 2), "a"), (slice(2, 3), "b"), (slice(3, 4), "a"), (slice(4, 5), "c")),
    ]
    assert list(equal_neighbours([])) == []
