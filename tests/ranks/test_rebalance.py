"""Rows on the move: where they go, and that they arrive as they were."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.ranks.rebalance import deal
from ranks import cases

COSTS = st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=6).filter(
    lambda costs: any(costs)
)


@given(costs=COSTS)
def test_no_rank_gets_more_than_a_share_and_one_row(costs):
    targets = deal([torch.tensor(own, dtype=torch.int64) for own in costs])
    loads = [0] * len(costs)
    for own, where in zip(costs, targets, strict=True):
        assert len(own) == len(where)
        for cost, target in zip(own, where.tolist(), strict=True):
            loads[target] += cost
    every = [cost for own in costs for cost in own]
    assert sum(loads) == sum(every)
    share = sum(every) / len(costs)
    assert max(loads) < share + max(every) or max(loads) == max(every)


@given(cost=st.integers(1, 9), counts=st.lists(st.integers(0, 15), min_size=1, max_size=6))
def test_rows_of_one_cost_are_dealt_evenly(cost, counts):
    targets = deal([torch.full((n,), cost, dtype=torch.int64) for n in counts])
    every = torch.cat(targets).tolist()
    dealt = [every.count(rank) for rank in range(len(counts))]
    assert max(dealt) - min(dealt) <= 1


@given(costs=COSTS)
def test_rows_that_are_balanced_stay(costs):
    same = costs[0] or [3]
    for rank, where in enumerate(deal([torch.tensor(same) for _ in costs])):
        assert where.tolist() == [rank] * len(same)


def test_rows_of_any_nest_arrive_as_they_were(crew):
    num_rows, widths = (3, 0, 4, 1), (5, 9, 2, 3)
    targets = [[2, 0, 1], [], [0, 2, 0, 1], [1]]
    results = crew.run(cases.moved_nest, 4, num_rows, widths, targets)
    for rank, found in enumerate(results):
        sent = [
            (source, row)
            for source, own in enumerate(targets)
            for row, target in enumerate(own)
            if target == rank
        ]
        assert found["num_rows"] == len(sent)
        assert found["base"].tolist() == [100 * source + row for source, row in sent]
        assert found["same"].tolist() == found["numbers"] == found["base"].tolist()
        assert found["prompts"] == [f"row {100 * source + row}" for source, row in sent]
        assert found["name"] == f"rank {rank}"
        assert found["ids"].dtype == torch.int32
        assert found["half"].dtype == torch.bfloat16
        width = max((widths[source] for source, _ in sent), default=widths[rank])
        assert found["cube"].shape == (len(sent), 2, width)
        for place, (source, row) in enumerate(sent):
            number, own = 100 * source + row, widths[source]
            assert found["ids"][place].tolist() == [number] * own + [0] * (width - own)
            assert found["even"][place].tolist() == [number % 2 == 0] * own + [False] * (
                width - own
            )
            assert found["bytes"][place].tolist() == [number % 128] * own + [0] * (width - own)
            assert found["cube"][place, 1].tolist() == [number] * own + [0] * (width - own)
    # int32 + bool + bfloat16 + uint8 + two float32 per column, a float64 and an int64 per row.
    bytes_of = [w * (4 + 1 + 2 + 1 + 8) + 16 for w in widths]
    sent_away = [sum(t != rank for t in own) for rank, own in enumerate(targets)]
    total = sum(n * b for n, b in zip(sent_away, bytes_of, strict=True))
    lists = results[0]["num_bytes"] - total
    # Of a row: "row 201", {"number": 201}, and what a pickle adds to them.
    assert 20 * sum(sent_away) < lists < 120 * sum(sent_away)
    assert [found["num_bytes"] for found in results] == [total + lists] * 4
