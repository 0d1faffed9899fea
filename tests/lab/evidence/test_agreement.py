"""When does a number of ours agree with an expected one? Bounds worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kondo_lab.evidence.agreement import Estimate, judge, judge_order


@pytest.mark.parametrize(
    ("ours", "se", "against", "verdict"),
    [
        # No errors: 20%, by the ratio, so 1 / 1.2 below.
        (0.0119, math.nan, "formula", "matches"),
        (0.0121, math.nan, "formula", "differs"),
        (0.0084, math.nan, "formula", "matches"),
        (0.0083, math.nan, "formula", "differs"),
        # 10% of our own: log r <= 0.2, r <= 1.2214.
        (0.0122, 0.00122, "formula", "matches"),
        (0.0123, 0.00123, "formula", "differs"),
        # and 3% of reading: 2 sqrt(0.01 + 0.0009) = 0.2088, r <= 1.232.
        (0.0123, 0.00123, "paper", "matches"),
        (0.0124, 0.00124, "paper", "differs"),
        # More than 30% of our own: it agrees with much.
        (0.0150, 0.0046, "formula", "noisy"),
        (0.0100001, 0.0031, "formula", "noisy"),
        (0.0300, 0.0093, "formula", "differs"),
        (math.nan, math.nan, "paper", "differs"),
        (math.inf, math.nan, "paper", "differs"),
    ],
)
def test_a_number_agrees_by_its_ratio_and_both_errors(ours, se, against, verdict):
    assert judge(Estimate(ours, se), 0.01, against) == verdict


@pytest.mark.parametrize(
    ("ours", "se", "expected", "verdict"),
    [
        (0.0, math.nan, 0.0, "matches"),
        (0.1, 0.06, 0.0, "matches"),
        (0.1, 0.04, 0.0, "differs"),
        (0.1, math.nan, 0.0, "differs"),
        (-0.01, 0.01, 0.005, "matches"),
        (-0.01, 0.001, 0.005, "differs"),
        (-1.1, math.nan, -1.0, "matches"),
        (math.inf, math.nan, math.inf, "matches"),
    ],
)
def test_numbers_without_a_ratio_agree_by_their_difference(ours, se, expected, verdict):
    assert judge(Estimate(ours, se), expected, "formula") == verdict


@pytest.mark.parametrize(
    ("ours", "rule", "verdict"),
    [
        (650.0, "about", "matches"),
        (math.inf, "about", "matches"),
        (5.1, "about", "matches"),
        (4.9, "about", "differs"),
        (650.0, "at least", "matches"),
        (8.4, "at least", "matches"),
        (8.3, "at least", "differs"),
        (0.0, "at least", "differs"),
    ],
)
def test_a_factor_may_be_larger_than_claimed(ours, rule, verdict):
    assert judge(Estimate(ours), 10.0, "formula", rule) == verdict


def test_a_noisy_factor_is_told_apart():
    assert judge(Estimate(40.0, 20.0), 10.0, "paper", "about") == "noisy"
    assert judge(Estimate(40.0, 8.0), 10.0, "paper", "about") == "matches"


@given(
    ours=st.floats(1e-6, 1e6),
    expected=st.floats(1e-6, 1e6),
    share=st.floats(0, 2),
    scale=st.floats(1e-3, 1e3),
)
def test_the_unit_of_measurement_does_not_matter(ours, expected, share, scale):
    before = judge(Estimate(ours, share * ours), expected, "paper")
    edge = abs(abs(math.log(ours / expected)) - max(math.log(1.2), 2 * math.hypot(share, 0.03)))
    if edge > 1e-9 and abs(share - 0.3) > 1e-9 and ours != expected:
        after = judge(Estimate(scale * ours, scale * share * ours), scale * expected, "paper")
        assert after == before


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        ((1.0, 0.3), (2.0, 0.3), "matches"),  # 1 apart, 2 x 0.424 needed
        ((1.0, 0.4), (2.0, 0.4), "noisy"),  # 2 x 0.566
        ((2.0, 0.4), (1.0, 0.4), "noisy"),
        ((2.0, 0.3), (1.0, 0.3), "differs"),
        ((1.0, math.nan), (1.0, math.nan), "matches"),
        ((1.0, math.nan), (1.1, math.nan), "matches"),
        ((1.1, math.nan), (1.0, math.nan), "differs"),
        ((1.0, 0.1), (math.nan, 0.1), "differs"),
    ],
)
def test_an_order_is_judged_with_its_uncertainty(low, high, verdict):
    assert judge_order(["a", "b"], {"a": Estimate(*low), "b": Estimate(*high)}) == verdict


def test_one_reversed_pair_decides_an_order():
    ours = {"a": Estimate(1.0, 0.01), "b": Estimate(3.0, 0.01), "c": Estimate(2.0, 0.01)}
    assert judge_order(["a", "b", "c"], ours) == "differs"
    assert judge_order(["a", "c", "b"], ours) == "matches"
