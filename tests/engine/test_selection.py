"""`kondo.Selection`: rows and counts are read once, a capacity gives a number of rows."""

import gc
import math
import warnings
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo.core.given_gates import as_gate
from kondo.engine.select import choose, units_of
from no_reads import NoReads


def batch(unit, lead=(), seed=0, rows=6, length=3):
    draw = torch.Generator().manual_seed(seed)
    shape = (*lead, rows) if unit == "sample" else (*lead, rows, length)
    log_probs = -torch.rand(shape, generator=draw) - 0.01
    return log_probs, torch.randn((*lead, rows), generator=draw)


def unread(log_probs, advantages, gate, unit, capacity=None):
    """Select as on a GPU, where nothing is read before somebody asks."""
    with NoReads():
        units = units_of(as_gate(gate), log_probs, advantages, unit, None)
        return choose(units, as_gate(gate), capacity=capacity, reads=False)


def test_counts_and_rows_are_read_once(monkeypatch):
    selection = unread(*batch("sample"), kondo.Gate(rate=0.5), "sample")
    reads = []
    read = selection.read
    monkeypatch.setattr(selection, "read", lambda: reads.append(1) or read())
    rows = selection.rows
    assert selection.counts.rows_kept == len(rows) == 3
    with NoReads():
        assert selection.rows is rows
        assert selection.counts is selection.counts
        assert selection.elements is selection.elements
    assert len(reads) == 1
    assert selection.read() == selection.counts
    assert len(reads) == 2  # a replayed graph may have written others


@pytest.mark.parametrize("unit", ["sample", "token", "sequence"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("capacity", [1, 4, 6])
def test_a_capacity_gives_that_many_rows_and_spare_ones_have_no_weight(unit, lead, capacity):
    log_probs, advantages = batch(unit, lead)
    gate = kondo.Gate(price=0.6)
    whole = unread(log_probs, advantages, gate, unit)
    selection = unread(log_probs, advantages, gate, unit, capacity)
    with NoReads():
        rows = selection.rows
    assert rows.shape == (*lead, capacity)
    weights = selection.elements.weight
    weights = weights if unit == "sample" else weights.sum(-1)
    kept = whole.kept_rows.reshape(-1, 6)
    over = int(kept.sum(-1).max()) > capacity
    for mine, row_kept, weight in zip(
        rows.reshape(-1, capacity), kept, weights.reshape(-1, 6), strict=True
    ):
        expected = row_kept.nonzero().squeeze(1).tolist()[:capacity]
        assert mine.tolist()[: len(expected)] == expected
        assert len(set(mine.tolist())) == capacity
        own = weight[mine[: len(expected)]]
        fits = int(row_kept.sum()) <= capacity
        assert bool((own > 0).all() if fits else own.isnan().all())  # a loss shows what was lost
        assert bool((weight[mine[len(expected) :]] == 0).all())
    if not over:
        assert selection.counts == pytest.approx(whole.counts, nan_ok=True)
        return
    with pytest.raises(ValueError, match=f"capacity must be at least .* got {capacity}, and "):
        selection.counts  # noqa: B018


def test_more_rows_than_the_capacity_are_refused():
    log_probs, advantages = torch.full((4,), -1.0), torch.tensor([1.0, 2.0, 3.0, -1.0])
    gate = kondo.Gate(price=0.0)
    with pytest.raises(ValueError, match="got 2, and 3 of 4 rows kept"):
        kondo.select(log_probs, advantages, gate=gate, capacity=2)
    selection = unread(log_probs, advantages, gate, "sample", 2)
    assert selection.rows.tolist() == [0, 1]
    for _ in range(2):  # an error is not cached as an answer
        with pytest.raises(ValueError, match="got 2, and 3 of 4 rows kept"):
            selection.counts  # noqa: B018
    full = kondo.select(log_probs, advantages, gate=gate, capacity=3)
    assert full.rows.tolist() == [0, 1, 2]


def test_rows_of_several_choices_need_a_capacity():
    log_probs, advantages = batch("sample", (2,))
    selection = kondo.select(log_probs, advantages, gate=kondo.Gate(rate=0.5), unit="sample")
    with pytest.raises(ValueError, match=r"capacity must be given .* keep of shape \[2, 6\]"):
        selection.rows  # noqa: B018
    assert selection.counts.units_kept == 6
    assert math.isnan(selection.counts.price)
    assert math.isnan(selection.counts.rate)


@given(st.integers(0, 99), st.integers(1, 6), st.sampled_from([0.2, 0.5, 1.0]))
def test_kept_rows_are_among_the_first_of_a_capacity_that_holds_them(seed, capacity, rate):
    log_probs, advantages = batch("token", (), seed)
    whole = unread(log_probs, advantages, kondo.Gate(rate=rate), "token")
    selection = unread(log_probs, advantages, kondo.Gate(rate=rate), "token", capacity)
    kept = whole.rows.tolist()
    assert selection.rows.tolist()[: len(kept)] == kept[:capacity]
    if len(kept) <= capacity:
        spare = selection.rows[len(kept) :]
        assert not bool(selection.keep[spare].any())
    else:
        with pytest.raises(ValueError, match="capacity must be at least"):
            selection.read()


def test_nothing_kept_is_no_row():
    selection = kondo.select(*batch("token"), gate=kondo.Gate(price=1e9), unit="token")
    assert selection.rows.tolist() == []
    assert selection.rows.dtype == torch.int64
    assert (selection.counts.units_kept, selection.counts.rows_kept) == (0, 0)


def test_elements_of_tokens_and_samples_are_the_units():
    for unit in ("sample", "token"):
        selection = kondo.select(*batch(unit), gate=kondo.Gate(rate=0.5), unit=unit)
        assert selection.elements.keep is selection.keep
        assert selection.elements.weight is selection.weight


def test_diagnostics_are_those_of_the_values_and_the_choice():
    log_probs, advantages = batch("token")
    selection = kondo.select(log_probs, advantages, gate=kondo.Gate(rate=0.5), unit="token")
    expected = kondo.diagnostics(kondo.delight(log_probs, advantages), selection.choice, eta=0.5)
    assert selection.diagnostics(eta=0.5) == pytest.approx(expected, nan_ok=True)
    assert "delight_rms" in expected
    gate = kondo.UnbiasedGate(rate=0.5)
    assert (
        "signal_rms" in kondo.select(log_probs, advantages, gate=gate, unit="token").diagnostics()
    )


def test_diagnostics_of_several_choices_are_refused():
    selection = kondo.select(*batch("token", (3,)), gate=None, unit="token", capacity=6)
    with pytest.raises(ValueError, match=r"must be of one choice, got \[3\] of them"):
        selection.diagnostics()


def test_the_denominator_is_of_all_elements_or_of_those_kept():
    selection = kondo.select(*batch("sequence"), gate=kondo.Gate(rate=0.5), unit="sequence")
    counts = selection.counts
    assert (counts.denominator("full"), counts.denominator("kept")) == (18.0, 9.0)
    assert counts.denominator(2.5) == 2.5
    assert counts._replace(elements=0).denominator("full") == 1.0


def test_a_selection_raises_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kondo.select(*batch("sample"), gate=kondo.Gate(rate=0.5)).rows  # noqa: B018


def test_a_selection_is_gone_with_its_last_reference():
    gc.disable()  # on a GPU its tensors would stay until Python counts enough objects
    try:
        selection = kondo.select(*batch("token"), gate=kondo.Gate(rate=0.5), unit="token")
        selection.rows, selection.elements  # noqa: B018
        seen = weakref.ref(selection), weakref.ref(selection.weight)
        del selection
        assert [each() for each in seen] == [None, None]
    finally:
        gc.enable()
