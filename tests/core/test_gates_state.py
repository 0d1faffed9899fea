"""Gate state: saved, loaded and resumed, the decisions are those of a gate never interrupted."""

import io

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
