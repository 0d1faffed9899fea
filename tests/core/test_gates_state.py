"""Gate state: saved, loaded and resumed, the decisions are those of a gate never interrupted."""

import copy
import io
import math

import pytest
import torch

from kondo import Gate

OPTIONS = {
    "window": {"rate": 0.2, "window": 5, "warmup": 2},
    "drawn_window": {"rate": 0.2, "window": 5, "temperature": 0.3},
    "normalise": {"price": 0.2, "temperature": 0.5, "normalise": True, "scale_decay": 0.9},
    "relative": {"rate": 0.2, "temperature": 0.5, "normalise": "temperature"},
    "everything": {
        "rate": 0.2,
        "temperature": 0.5,
        "normalise": True,
        "window": 3,
        "inverse_propensity": True,
    },
}


def batches(count: int) -> list[torch.Tensor]:
    """Return small batches with some zeros and many ties, within and across batches."""
    generator = torch.Generator().manual_seed(0)
    return [(1.0 + i % 2) * torch.randint(-2, 3, (17,), generator=generator) for i in range(count)]


def through_disk(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_resumed_gate_decides_as_if_never_stopped(options, stop):
    gate, generator = Gate(**options), torch.Generator().manual_seed(1)
    for delight in batches(15)[:stop]:
        gate(delight, generator=generator)
    resumed, resumed_generator = Gate(**options), torch.Generator()
    saved = through_disk({"gate": gate.state_dict(), "generator": generator.get_state()})
    resumed.load_state_dict(saved["gate"])
    resumed_generator.set_state(saved["generator"])
    for delight in batches(15)[stop:]:
        ours = gate(delight, generator=generator)
        theirs = resumed(delight, generator=resumed_generator)
        for name, mine, other in zip(ours._fields, ours, theirs, strict=True):
            assert torch.equal(mine, other), name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_state_matters(options):
    # The round trip above would pass with an empty state if the past had no say.
    gate, fresh = Gate(**options), Gate(**options)
    for delight in batches(9):
        gate(delight, generator=torch.Generator().manual_seed(1))
    last = 5 * torch.arange(-8.0, 9.0)
    out, other = (g(last, generator=torch.Generator().manual_seed(1)) for g in (gate, fresh))
    assert not torch.equal(out.price, other.price) or not torch.equal(
        out.probability, other.probability
    )


def test_saved_state_does_not_follow_the_gate():
    gate = Gate(rate=0.2, window=3)
    gate(torch.ones(4))
    state = gate.state_dict()
    gate(2 * torch.ones(4))
    assert len(state["past"]["values"]) == 1
    assert state["calls"] == 1


@pytest.mark.parametrize("change", [{"extra": 1}, {}])
def test_a_foreign_state_is_refused(change):
    state = Gate(rate=0.5).state_dict() | change
    if not change:
        del state["past"]
    with pytest.raises(ValueError, match="state must have the keys"):
        Gate(rate=0.5).load_state_dict(state)


def remembering(calls: int = 4) -> Gate:
    gate = Gate(**OPTIONS["everything"])
    for delight in batches(calls):
        gate(delight, generator=torch.Generator().manual_seed(1))
    return gate


DAMAGE = {
    "nan scale": ("scale", "mean_square", lambda part: part * math.nan),
    "infinite scale": ("scale", "mean_square", lambda part: part + math.inf),
    "negative scale": ("scale", "mean_square", lambda part: -part),
    "scale of integers": ("scale", "mean_square", lambda part: part.long()),
    "negative calls of the scale": ("scale", "calls", lambda part: part - 9),
    "ragged scale": ("scale", "calls", lambda part: torch.cat([part, part])),
    "wide scale": ("scale", "mean_square", lambda part: part.expand(2)),
    "a scale that is a number": ("scale", "mean_square", float),
    "0-d scale": ("scale", "mean_square", lambda part: part.squeeze()),
    "negative units": ("past", "valid", lambda part: -part),
    "units as floats": ("past", "valid", lambda part: part.double()),
    "too few units": ("past", "valid", lambda part: part // 9),
    "fewer calls": ("past", "valid", lambda part: part[1:]),
    "nan weights": ("past", "stands_for", lambda part: part * math.nan),
    "weights of 0": ("past", "stands_for", lambda part: part * 0),
    "large weights": ("past", "stands_for", lambda part: part * 1000),
    "weights in a list": ("past", "stands_for", lambda part: part.tolist()),
    "fewer weights": ("past", "stands_for", lambda part: part[:-1]),
    "integer values": ("past", "values", lambda part: part.nan_to_num().long()),
    "flat values": ("past", "values", lambda part: part.flatten()),
    "values of another member": ("past", "values", lambda part: part[None]),
}


@pytest.mark.parametrize(("part", "name", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_state_is_refused_and_changes_nothing(part, name, damage):
    state = remembering().state_dict()
    state[part][name] = damage(state[part][name])
    gate = remembering(2)
    before = str(gate.state_dict())
    with pytest.raises(ValueError, match=rf"state\['{part}'\].* must "):
        gate.load_state_dict(state)
    assert str(gate.state_dict()) == before


@pytest.mark.parametrize("calls", [-1, 2.5, math.nan, None, True, torch.tensor([1, 2])])
def test_a_number_of_calls_that_cannot_be_is_refused(calls):
    state = remembering().state_dict() | {"calls": calls}
    with pytest.raises(ValueError, match=r"state\['calls'\] must be a whole number >= 0"):
        Gate(**OPTIONS["everything"]).load_state_dict(state)


@pytest.mark.parametrize("part", ["past", "scale"])
@pytest.mark.parametrize("given", [None, [], {"valid": torch.ones(1)}])
def test_a_part_of_another_structure_is_refused(part, given):
    state = remembering().state_dict() | {part: given}
    with pytest.raises(ValueError, match=rf"state\['{part}'\] must have the keys"):
        Gate(**OPTIONS["everything"]).load_state_dict(state)


def test_a_state_that_is_no_dict_is_refused():
    with pytest.raises(ValueError, match=r"state must have the keys .* got list"):
        Gate(rate=0.5).load_state_dict([])


def test_the_states_of_odd_batches_load():
    # Summarised calls, infinite values, all zeros, nothing that counts, and several members.
    gate = Gate(rate=0.2, window=6)
    for values in (torch.randn(20_011), torch.tensor([math.inf, 1.0]), torch.zeros(3)):
        gate(values)
    gate(torch.ones(3), torch.zeros(3, dtype=torch.bool))
    members = Gate(**OPTIONS["everything"])
    some = torch.tensor([[True, True], [False, False]])
    members.choose(torch.randn(2, 2), some, torch.rand(2, 2))
    for one in (gate, members):
        again = copy.deepcopy(one)
        again.load_state_dict(through_disk(one.state_dict()))
        assert str(again.state_dict()) == str(one.state_dict())
