"""Which rank trains which row: literals, and properties over random selections."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.integrations.verl.update_plan import make_plan, mini_batches


def plan_of(keep, *, ranks=2, size=None, micro_batch=2, epochs=1, seed=None, weight=None):
    number = len(keep)
    sizes = [3 + (7 * row) % 5 for row in range(number)]
    counted = [1 + row % 3 for row in range(number)]
    batches = mini_batches(number, size=size or number, ranks=ranks, epochs=epochs, seed=seed)
    weight = torch.arange(1.0, number + 1) if weight is None else weight
    keep = torch.tensor(keep, dtype=torch.bool)
    plan = make_plan(keep, weight, sizes, counted, batches, ranks=ranks, micro_batch=micro_batch)
    return plan, sizes, counted, batches


def test_verl_gives_every_rank_a_consecutive_part_and_cuts_it():
    (epoch,) = mini_batches(12, size=4, ranks=2, epochs=1)
    assert [batch.tolist() for batch in epoch] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_a_seed_shuffles_each_epoch_within_the_ranks_parts():
    first, second = mini_batches(12, size=4, ranks=2, epochs=2, seed=3)
    for epoch in (first, second):
        own = torch.cat([batch[:2] for batch in epoch])
        assert sorted(own.tolist()) == list(range(6))
        # Ranks shuffle differently: verl adds the rank to the seed.
        assert [b[:2].tolist() for b in epoch] != [(b[2:] - 6).tolist() for b in epoch]
    assert [b.tolist() for b in first] != [b.tolist() for b in second]


@pytest.mark.parametrize(("rows", "size", "ranks"), [(6, 4, 2), (6, 3, 2), (5, 5, 2)])
def test_sizes_that_do_not_divide_are_refused(rows, size, ranks):
    with pytest.raises(ValueError, match="multiples of the data-parallel size"):
        mini_batches(rows, size=size, ranks=ranks, epochs=1)


def test_a_plan_literal():
    """The longest row goes first, to the emptier rank; the short rank repeats its shortest row."""
    keep = torch.tensor([True, False, True, True])
    batches = mini_batches(4, size=4, ranks=2, epochs=1)
    sizes, counted = [3, 1, 5, 4], [2, 1, 4, 3]
    plan = make_plan(keep, torch.ones(4), sizes, counted, batches, ranks=2, micro_batch=1)
    (step,) = plan.steps
    assert plan.ranks == [[2, 1], [3, 0]]
    assert step.rows == [[0, 1], [0, 1]]
    assert step.weights == [[1.0, 0.0], [1.0, 1.0]]
    assert step.num_tokens == 10


def test_rows_of_one_rank_are_spread_over_both():
    plan, *_ = plan_of([1, 1, 1, 1, 0, 0, 0, 0])
    kept = [[row for row in own if row < 4] for own in plan.ranks]
    assert [len(own) for own in kept] == [2, 2]
    assert plan.fillers == 0


def test_nothing_kept_is_no_step():
    plan, *_ = plan_of([0] * 8, size=4, epochs=2)
    assert plan.steps == []
    assert plan.rows == []
    assert plan.empty_steps == 4
    assert plan.trained([1] * 8) == (0, 0)


def test_a_mini_batch_without_a_kept_row_is_no_step():
    plan, *_ = plan_of([1, 0, 0, 0, 1, 0, 0, 0], size=4, epochs=2)
    assert len(plan.steps) == 2
    assert plan.empty_steps == 2


def test_all_rows_fill_verls_own_micro_batches():
    plan, *_ = plan_of([1] * 8)
    (step,) = plan.steps
    assert step.micro_batch == 2
    assert plan.fillers == 0
    assert sorted(plan.rows) == list(range(8))


def test_micro_batches_shrink_before_fillers_are_added():
    """5 rows in micro-batches of at most 4 are 2 of 3: one filler, where 2 of 4 had three."""
    plan, *_ = plan_of([1] * 5 + [0] * 3, ranks=1, micro_batch=4)
    (step,) = plan.steps
    assert step.micro_batch == 3
    assert plan.fillers == 1


@given(
    keep=st.lists(st.booleans(), min_size=16, max_size=16),
    ranks=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([4, 8, 16]),
    micro_batch=st.sampled_from([None, 1, 2, 3]),
    epochs=st.integers(1, 2),
    seed=st.sampled_from([None, 5]),
)
def test_every_step_trains_its_kept_rows_once_and_ranks_run_alike(
    keep, ranks, size, micro_batch, epochs, seed
):
    plan, sizes, counted, batches = plan_of(
        keep, ranks=ranks, size=size, micro_batch=micro_batch, epochs=epochs, seed=seed
    )
    assert len({len(own) for own in plan.ranks}) == 1
    assert len(set(plan.rows)) == len(plan.rows)
    expected = []
    for batch in (batch for epoch in batches for batch in epoch):
        kept = {row: row + 1.0 for row in batch.tolist() if keep[row]}
        if kept:
            expected.append((kept, sum(counted[row] for row in batch.tolist())))
    assert len(plan.steps) == len(expected)
    for step, (kept, num_tokens) in zip(plan.steps, expected, strict=True):
        trained = {}
        for own, rows, weights in zip(plan.ranks, step.rows, step.weights, strict=True):
            assert len(rows) == len(weights) == len(step.rows[0]) > 0
            assert len(rows) % (step.micro_batch or 1) == 0
            assert (step.micro_batch is None) == (micro_batch is None)
            assert micro_batch is None or step.micro_batch <= micro_batch
            for row, weight in zip(rows, weights, strict=True):
                if weight:
                    assert own[row] not in trained
                    trained[own[row]] = weight
        assert trained == kept
        assert step.num_tokens == num_tokens
    assert plan.trained(sizes)[0] == sum(len(own) for step in plan.steps for own in step.rows)


@given(keep=st.lists(st.booleans(), min_size=16, max_size=16))
def test_without_shuffling_no_rank_has_two_rows_more_of_a_mini_batch(keep):
    plan, *_ = plan_of(keep, ranks=4, size=8, micro_batch=None)
    for step in plan.steps:
        kept = [sum(weight > 0 for weight in own) for own in step.weights]
        assert max(kept) - min(kept) <= 1
