import math

import pytest

from kondo_lab.evidence import comparison
from kondo_lab.evidence.study import Estimate
from lab.made_up import Record, table_of
from tolerances import assert_close


def record(**changes):
    fields = {
        "part": "curves",
        "series": "DG",
        "setting": math.nan,
        "seed": 0,
        "step": 10,
        "forward": 1000,
        "backward": 30,
        "metric": "online error",
        "value": 0.5,
    }
    return Record(**fields | changes)


def test_a_number_of_the_paper_stands_beside_ours_at_its_place():
    table = table_of(
        part="curves",
        made=[
            record(seed=0, value=0.4),
            record(seed=1, value=0.6),
            record(seed=0, step=20, forward=2000, value=0.1),
            record(seed=1, step=20, forward=2000, value=0.1),
        ],
    )
    points = {"DG": {1000: 0.5, 2000: 0.3}}
    first, second = comparison.against_paper(
        table, "curves", "Fig", "online error", points, by="forward"
    )
    assert (first.x, first.expected, first.ours, first.seeds) == (1000, 0.5, 0.5, 2)
    assert_close(first.se, 0.1)
    assert (first.verdict, second.verdict) == ("matches", "differs")


def test_finals_are_those_of_each_setting():
    table = table_of(
        part="noise",
        made=[
            record(part="noise", setting=setting, step=step, value=setting + step)
            for setting in (0.0, 1.0)
            for step in (1, 2)
        ],
    )
    found = comparison.finals(table, "noise", "DG")
    assert {setting: value.mean for setting, value in found.items()} == {0.0: 2.0, 1.0: 3.0}


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({0: 2.0, 1: 2.2, 2: 2.6}, 1.75),  # 2.5 lies three quarters of the way to 2.6
        ({0: 1.0, 1: 2.0}, 0.25),
        ({0: 1.0, 1: 1.2}, math.inf),
    ],
)
def test_noise_is_borne_until_the_error_has_grown_by_the_factor(errors, expected):
    found = {setting: Estimate(value, 0.0, 1) for setting, value in errors.items()}
    assert_close(comparison.tolerated(found, 1.25), expected)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({10: 0.05, 20: 0.85}, 12.5),
        ({10: 0.05, 20: 0.1}, 20),  # the longest there is
        ({10: 0.3, 20: 0.9}, 0.0),
        ({10: 0.3, 20: 0.15, 30: 0.35}, 25.0),  # an unlucky shorter one does not count against it
    ],
)
def test_longest_length_is_where_the_error_meets_the_limit(errors, expected):
    assert_close(comparison.interpolated_longest(errors, 0.25), expected)
