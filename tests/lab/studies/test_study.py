import math

import pytest

from kondo_lab.studies.study import Estimate, headline, ordering, sized
from lab.studies import toy


@pytest.mark.parametrize(
    ("ours", "se", "verdict"),
    [
        (0.0119, math.nan, "matches"),
        (0.0081, math.nan, "matches"),
        (0.0121, math.nan, "differs"),
        (0.0079, math.nan, "differs"),
        (0.0139, 0.002, "matches"),
        (0.0141, 0.002, "differs"),
        (0.0141, math.nan, "differs"),
    ],
)
def test_a_number_matches_within_a_fifth_or_two_standard_errors(ours, se, verdict):
    line = headline("Fig 1", "PG", "error", 1e6, Estimate(ours, se), paper=0.01)
    assert line.verdict == verdict


def test_a_number_without_the_papers_has_no_verdict():
    line = headline("beyond the paper", "PG", "error", "", Estimate(1.0, math.nan, 4))
    assert line == ("beyond the paper", "PG", "error", "", None, 1.0, None, 4, "")


def test_an_order_counts_the_pairs_that_agree():
    same = ordering("Fig 1", "error", 1e6, paper=["DG", "K", "PG"], ours={"PG": 3, "DG": 1, "K": 2})
    assert (same.series, same.ours, same.verdict) == ("DG < K < PG", 1.0, "matches")
    # DG < K and DG < PG hold, K < PG does not.
    other = ordering("Fig 1", "error", "", paper=["DG", "K", "PG"], ours={"PG": 2, "DG": 1, "K": 3})
    assert (other.ours, other.verdict) == (pytest.approx(2 / 3), "differs")


def test_settings_of_a_size_take_the_seeds_that_are_given():
    full, small = toy.Settings(num_seeds=5), toy.Settings(num_seeds=1)
    assert sized("full", full, small, num_seeds=None) == full
    assert sized("small", full, small, num_seeds=None) == small
    assert sized("small", full, small, num_seeds=3).num_seeds == 3
