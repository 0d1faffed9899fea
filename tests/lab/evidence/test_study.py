import math

import pytest

from kondo_lab.evidence.study import Estimate, headline, ordering, sized
from lab.studies import toy


def test_a_number_is_judged_against_whom_it_is_of():
    line = headline("Fig 1", "PG", "error", 1e6, Estimate(0.0122, 0.0012, 3), expected=0.01)
    assert (line.expected, line.against, line.verdict) == (0.01, "paper", "matches")
    line = headline("Prop 1", "PG", "c", "", 0.0121, expected=0.01, against="formula")
    assert (line.against, line.verdict) == ("formula", "differs")
    line = headline("Fig 1", "DG", "factor", "", 40.0, expected=10.0, rule="about")
    assert line.verdict == "matches"


def test_a_number_that_nobody_expects_has_no_verdict():
    line = headline("beyond the paper", "PG", "error", "", Estimate(1.0, math.nan, 4))
    assert line == ("beyond the paper", "PG", "error", "", None, 1.0, None, 4, "", "")


def test_an_order_counts_the_pairs_that_agree():
    same = ordering("Fig 1", "error", 1e6, order=["DG", "K", "PG"], ours={"PG": 3, "DG": 1, "K": 2})
    assert (same.series, same.ours, same.verdict) == ("DG < K < PG", 1.0, "matches")
    # DG < K and DG < PG hold, K < PG does not.
    other = ordering("Fig 1", "error", "", order=["DG", "K", "PG"], ours={"PG": 2, "DG": 1, "K": 3})
    assert (other.ours, other.verdict) == (pytest.approx(2 / 3), "differs")


def test_settings_of_a_size_take_the_seeds_that_are_given():
    full, small = toy.Settings(num_seeds=5), toy.Settings(num_seeds=1)
    assert sized("full", full, small, num_seeds=None) == full
    assert sized("small", full, small, num_seeds=None) == small
    assert sized("small", full, small, num_seeds=3).num_seeds == 3
