"""What the studies of token reversal share."""

import pandas as pd
import torch

from kondo_lab.evidence import seed_blocks
from kondo_lab.evidence.study import Estimate, headline, ordering
from kondo_lab.studies import reversals
from kondo_lab.training import arms
from kondo_lab.training.member import each_seed
from kondo_lab.training.part import Context
from lab.made_up import Record, table_of
from tolerances import assert_close


def context(tmp_path):
    return Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=lambda: False,
        checkpoint=tmp_path / "checkpoint",
    )


def lengths(values):
    """Records of DG from {(seed, length): errors at steps 1, 2, ...}."""
    return table_of(
        part="lengths",
        made=[
            Record(
                part="lengths",
                series="DG",
                setting=length,
                seed=seed,
                step=step,
                forward=100 * step,
                backward=100 * step,
                metric="online error",
                value=value,
            )
            for (seed, length), errors in values.items()
            for step, value in enumerate(errors, start=1)
        ],
    )


def test_a_population_has_the_width_it_is_given_and_the_settled_one_without(tmp_path):
    members = each_seed({"PG": arms.PG}, [4, 7], learning_rate=1e-3)
    assert [member.seed for member in members] == [4, 7]
    here = context(tmp_path)
    narrow = reversals.population(here, members, length=3, feed_forward=24)
    assert narrow.parameters["0.up"].shape == (2, 64, 24)
    assert narrow.parameters["1.down"].shape == (2, 24, 64)
    settled = reversals.population(here, members, length=3)
    assert settled.parameters["0.up"].shape[2] == reversals.FEED_FORWARD


def test_a_population_may_be_asked_for_a_variant(tmp_path):
    members = each_seed({"PG": arms.PG}, 1, learning_rate=1e-3)
    copied = reversals.population(
        context(tmp_path), members, length=3, num_tokens=4, reverse=False, increment=True
    )
    assert copied.program.task.target(torch.tensor([3, 1, 0])).tolist() == [0, 2, 1]


def test_a_length_is_solved_by_the_mean_so_far_or_by_the_moment():
    table = lengths({(0, 10): [0.4, 0.0], (0, 20): [0.9, 0.1], (0, 30): [0.9, 0.9]})
    now = reversals.longest_solved(table, "lengths", "DG", 200, average=False)
    so_far = reversals.longest_solved(table, "lengths", "DG", 200, average=True)
    assert_close(now.mean, 20 + 10 * (0.25 - 0.1) / (0.9 - 0.1))
    assert_close(so_far.mean, 10 + 10 * (0.25 - 0.2) / (0.5 - 0.2))


def test_below_the_shortest_length_the_error_is_taken_to_fall_to_nothing():
    table = lengths({(0, 10): [0.1], (0, 20): [0.9], (1, 10): [0.5], (1, 20): [0.9]})
    found = reversals.longest_solved(table, "lengths", "DG", 100, average=False)
    first, second = 10 + 10 * (0.25 - 0.1) / (0.9 - 0.1), 10 * 0.25 / 0.5
    assert_close(found.mean, (first + second) / 2)
    assert found.seeds == 2


def test_pg_stands_for_ppo_only_where_ppo_was_not_run():
    def one(part, series, value):
        return Record(part, series, 1.0, 0, 1, 100, 100, "online error", value)

    tables = [
        table_of([one("a", "PG", 0.25)], part="a"),
        table_of([one("b", "PG", 0.5), one("b", "PPO", 0.75)], part="b"),
    ]
    assert reversals.without_ppo(pd.concat(tables)) == {"a"}
    found = reversals.with_ppo(pd.concat(tables))
    ppo = found[found["series"] == "PPO"]
    assert dict(zip(ppo["part"], ppo["value"], strict=True)) == {"a": 0.25, "b": 0.75}
    assert len(found) == 4


def test_pgs_runs_are_counted_once_and_fitted_numbers_are_told_from_the_papers():
    at = {"expected": 10.0}
    number, other = (headline("f", name, "m", 1, 10.0, **at) for name in ("PPO", "PG"))
    found = {"DG": Estimate(1.0, 0.1, 3), "PPO": Estimate(2.0, 0.1, 3), "PG": Estimate(2.0, 0.1, 3)}
    orders = [ordering("f", "m", 1, order=["DG", name], ours=found) for name in ("PPO", "PG")]
    lines = reversals.uncounted(reversals.fitted([number, other, *orders]))
    assert [(line.against, line.verdict) for line in lines] == [
        ("", ""),
        ("fitted", "matches"),
        ("", ""),
        ("paper", "matches"),
    ]
    assert [line.expected for line in lines] == [10.0, 10.0, 1.0, 1.0]
    assert [line.ours for line in lines] == [10.0, 10.0, 1.0, 1.0]


def test_a_verdict_of_two_seeds_is_noisy_and_no_verdict_stays_none():
    few = headline("f", "DG", "m", 1, Estimate(1.0, 0.0, 2), expected=1.0)
    more, none = few._replace(seeds=3), few._replace(verdict="")
    assert [line.verdict for line in reversals.open_if_few([few, more, none])] == [
        "noisy",
        "matches",
        "",
    ]


def test_blocks_hold_every_seed_once_whatever_their_number():
    for number in range(1, 14):
        found = seed_blocks.blocks(number)
        assert [seed for block in found for seed in block] == list(range(number))
        assert len(found) == min(2, number)
        assert len(found[0]) - len(found[-1]) in (0, 1)
