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
    "everything": {
        "rate": 0.2,
        "temperature": 0.5,
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


def test_saved_state_does_not_follow_the_gate():
    gate = Gate(rate=0.2, window=3)
    gate(torch.ones(4))
    state = gate.state_dict()
    gate(2 * torch.ones(4))
    assert len(state["past"]["values"]) == 1
    assert state["past"]["calls"] == 1


@pytest.mark.parametrize("change", [{"extra": 1}, {}])
def test_a_foreign_state_is_refused(change):
    state = Gate(rate=0.5, window=2).state_dict() | change
    if not change:
        del state["past"]
    with pytest.raises(ValueError, match="state must have the key 'past' alone"):
        Gate(rate=0.5, window=2).load_state_dict(state)


def test_a_gate_without_a_window_has_no_state():
    gate = Gate(rate=0.5)
    gate(torch.ones(4))
    assert gate.state_dict() == {}
    with pytest.raises(ValueError, match="state must be empty for Gate"):
        gate.load_state_dict(Gate(rate=0.5, window=2).state_dict())


def remembering(calls: int = 4) -> Gate:
    gate = Gate(**OPTIONS["everything"])
    for delight in batches(calls):
        gate(delight, generator=torch.Generator().manual_seed(1))
    return gate


DAMAGE = {
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
    "negative calls": ("past", "calls", lambda part: part - 9),
    "calls as a number": ("past", "calls", int),
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


@pytest.mark.parametrize("given", [None, [], {"valid": torch.ones(1)}])
def test_a_window_of_another_structure_is_refused(given):
    state = remembering().state_dict() | {"past": given}
    with pytest.raises(ValueError, match=r"state\['past'\] must have the keys"):
        Gate(**OPTIONS["everything"]).load_state_dict(state)


def test_a_state_that_is_no_dict_is_refused():
    with pytest.raises(ValueError, match=r"state must have the key .* got list"):
        Gate(rate=0.5, window=2).load_state_dict([])


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
