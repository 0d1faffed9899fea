"""Plans: every row once, kept rows last, no process with a call more than another."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.integrations.trl.plan import Part, order_rows, part_of, widths_of


@st.composite
def batches(draw):
    steps, size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    widths = draw(
        st.lists(
            st.one_of(st.just(0), st.integers(0, 9)), min_size=steps * size, max_size=steps * size
        )
    )
    least = math.ceil(sum(width > 0 for width in widths) / size)
    return widths, steps, size, draw(st.integers(least, steps))


@given(batches())
def test_every_row_has_one_place_and_kept_rows_the_last_ones(batch):
    widths, steps, size, active = batch
    order = order_rows(widths, steps=steps, active=active)
    assert sorted(order) == list(range(len(widths)))
    shares = [
        [widths[row] for row in order[s * size : (s + 1) * size] if widths[row]]
        for s in range(steps)
    ]
    assert all(not share for share in shares[: steps - active])
    counts = [len(share) for share in shares[steps - active :]]
    assert not counts or max(counts) - min(counts) <= 1  # dealt evenly
    kept = [width for share in shares for width in share]
    assert kept == sorted(kept)  # similar widths together


@given(batches())
def test_a_part_runs_its_kept_rows_or_one_filler(batch):
    widths, _, size, _ = batch
    part = part_of(widths[:size], [9] * size, idle=False)
    kept = [row for row in range(size) if widths[row]]
    if kept:
        assert part == Part(rows=kept, width=max(widths[:size]), idle=False)
    else:
        assert part == Part(rows=[0], width=1, idle=False)


def test_the_filler_is_the_shortest_row():
    assert part_of([0, 0, 0], [5, 2, 4], idle=True) == Part(rows=[1], width=1, idle=True)


def test_widths_end_at_the_last_kept_token():
    keep = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()
    assert widths_of(keep) == [2, 0, 4]
