"""The laboratory's own gates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo_lab.training.gates import Everything, QuantileGate, kept_first, unchecked
from no_reads import NoReads
from tolerances import assert_close

INF = float("inf")
RATES = [0.01, 0.07, 0.2, 0.29, 1 / 3, 0.5, 0.9, 1.0]


@st.composite
def tied_values(draw):
    """[P, N] with few distinct values, many of them zero."""
    members, units = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    values = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, 3.0])
    rows = st.lists(values, min_size=units, max_size=units)
    return torch.tensor(draw(st.lists(rows, min_size=members, max_size=members)))


def continuous(shape, seed=0, zeros=0.3):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=generator) < zeros, 0.0, values)


def kept(values, rate):
    with NoReads():
        return QuantileGate(rate=rate).choose(values, torch.ones_like(values).bool()).keep


def paper_quantile(row, rate):
    """The author's rule on a Python list: zeros compete, ties are kept, zeros are not paid for."""
    count = max(1, round(rate * len(row)))
    threshold = sorted(row, reverse=True)[count - 1] - 1e-6
    return [value >= threshold and value != 0 for value in row]


@given(tied_values(), st.sampled_from(RATES))
def test_quantile_is_the_papers_rule(values, rate):
    expected = [paper_quantile(row, rate) for row in values.tolist()]
    assert kept(values, rate).tolist() == expected


@pytest.mark.parametrize("rate", RATES)
def test_quantile_is_the_papers_rule_on_distinct_values(rate):
    values = continuous((4, 30))
    expected = [paper_quantile(row, rate) for row in values.tolist()]
    assert kept(values, rate).tolist() == expected


def test_quantile_keeps_what_differs_by_rounding_alone():
    values = torch.tensor([[1.0, 1.0 - 5e-7, 1.0 - 3e-6, 0.2]], dtype=torch.float64)
    assert kept(values, 0.25).tolist() == [[True, True, False, False]]


def test_what_the_mask_hides_takes_no_place():
    values, mask = torch.tensor([9.0, 3.0, 2.0, 1.0]), torch.tensor([False, True, True, True])
    out = QuantileGate(rate=1 / 3)(values, mask)
    assert out.keep.tolist() == [False, True, False, False]
    assert float(out.price) == 3.0


@pytest.mark.parametrize("rate", [0.0, 1.5, float("nan")])
def test_a_rate_is_a_share(rate):
    with pytest.raises(ValueError, match=r"rate must lie in \(0, 1\]"):
        QuantileGate(rate=rate)


def test_everything_pays_for_zeros_too():
    values, mask = torch.tensor([1.0, 0.0, -1.0, 5.0]), torch.tensor([True, True, True, False])
    out = Everything()(values, mask)
    assert out.keep.tolist() == mask.tolist()
    assert out.weight.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert float(out.rate) == 1.0
    soft = Everything(eta=2.0)(values, mask)
    assert_close(soft.weight, torch.sigmoid(values / 2) * mask)
    assert (Everything().eta, Everything(2.0).eta) == (0.0, 2.0)
    with pytest.raises(ValueError, match="eta must be > 0"):
        Everything(eta=0.0)


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (QuantileGate(rate=0.1), "QuantileGate(rate=0.1)"),
        (
            QuantileGate(rate=0.1, signal=kondo.signals.advantage),
            "QuantileGate(rate=0.1, signal=advantage)",
        ),
        (Everything(), "Everything()"),
        (Everything(0.5), "Everything(eta=0.5)"),
    ],
)
def test_their_words(gate, words):
    assert repr(gate) == words


def test_delight_without_a_check_is_delight():
    log_probs = torch.tensor([-0.0, 1e-4, -2.0, -INF, -INF, -3.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -0.25], dtype=torch.float64)
    for signal in (kondo.delight, kondo.signals.abs_delight, kondo.signals.surprisal):
        with NoReads():
            found = unchecked(signal)(log_probs.view(2, 3), advantages.view(2, 3))
        assert torch.equal(found, signal(log_probs, advantages).view(2, 3))


def test_kept_units_come_first_and_in_their_order():
    keep = torch.tensor(
        [[False, True, False, True], [True, True, True, True], [False, False, False, True]]
    )
    assert kept_first(keep).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [3, 0, 1, 2]]
