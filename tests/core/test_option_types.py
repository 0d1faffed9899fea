"""Options of gates that are no numbers, whole numbers or flags are refused when a gate is made."""

import fractions
import math

import numpy
import pytest
import torch

import kondo
from kondo.lm import BudgetGate

RATE = {"rate": 0.5}
NUMBERS = [
    (kondo.Gate, {}, "rate"),
    (kondo.Gate, {}, "price"),
    (kondo.Gate, RATE, "temperature"),
    (kondo.Gate, RATE, "reserve"),
    (kondo.Gate, RATE, "negative_quota"),
    (kondo.UnbiasedGate, {}, "rate"),
    (kondo.UnbiasedGate, {}, "noise"),
    (kondo.UnbiasedGate, RATE, "max_weight"),
    (kondo.VarianceGate, {}, "rate"),
    (BudgetGate, {}, "budget"),
]
COUNTS = [
    (kondo.Gate, RATE, "window"),
    (kondo.Gate, RATE | {"window": 8}, "warmup"),
    (kondo.UnbiasedGate, RATE, "window"),
]
FLAGS = [
    (kondo.Gate, RATE | {"temperature": 1.0}, "inverse_propensity"),
]


def name_of(case):
    return case[0].__name__ + "-" + case[2]


@pytest.mark.parametrize(
    "value", [True, numpy.True_, "0.5", [0.5], 1j, torch.tensor(0.5)], ids=repr
)
@pytest.mark.parametrize("case", NUMBERS, ids=name_of)
def test_what_is_no_number_is_refused(case, value):
    make, others, name = case
    with pytest.raises(ValueError, match=f"{name} must be a number, got "):
        make(**others, **{name: value})


@pytest.mark.parametrize("value", [math.nan, numpy.float32(math.nan)], ids=repr)
@pytest.mark.parametrize("case", NUMBERS, ids=name_of)
def test_nan_is_refused(case, value):
    make, others, name = case
    with pytest.raises(ValueError, match=rf"{name} must .*got nan"):
        make(**others, **{name: value})


@pytest.mark.parametrize("value", [2.5, 3.0, True, "3", math.nan, math.inf], ids=repr)
@pytest.mark.parametrize("case", COUNTS, ids=name_of)
def test_what_is_no_whole_number_is_refused(case, value):
    make, others, name = case
    with pytest.raises(ValueError, match=f"{name} must be a whole number, got "):
        make(**others, **{name: value})


@pytest.mark.parametrize("value", [1, 0, "no", None, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("case", FLAGS, ids=name_of)
def test_what_is_no_flag_is_refused(case, value):
    make, others, name = case
    with pytest.raises(ValueError, match=f"{name} must be True"):
        make(**others, **{name: value})


@pytest.mark.parametrize("value", [1, numpy.float32(1), numpy.int64(1), fractions.Fraction(1)])
@pytest.mark.parametrize("case", NUMBERS[:5] + NUMBERS[6:], ids=name_of)
def test_numbers_of_other_types_are_numbers(case, value):
    make, others, name = case
    if name == "max_weight":
        others, value = {"noise": 1.5}, value + 1
    if name == "reserve":
        others = {"rate": 0.25}
    made = make(**others, **{name: value})
    assert type(getattr(made, name)) in (int, float)
    assert repr(made) == repr(make(**others, **{name: getattr(made, name)}))


def test_counts_of_other_types_are_counts():
    gate = kondo.Gate(rate=0.5, window=numpy.int64(3), warmup=numpy.int8(2))
    assert (type(gate.window), type(gate.warmup)) == (int, int)
    assert type(kondo.UnbiasedGate(rate=0.5, window=numpy.int64(3)).window) is int
    assert gate(torch.tensor([1.0, 2.0])).keep.sum() == 1


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("delight:0.1,window=2.5", "window must be a whole number"),
        ("delight:0.1,window='3'", "window must be a whole number"),
        ("delight:0.1,warmup=True,window=4", "warmup must be a whole number"),
        ("delight:0.1,temperature=high", "temperature must be a number"),
        ("delight:0.1,temperature=1,inverse_propensity=no", "inverse_propensity must be True or"),
        ("unbiased:0.1,max_weight=[20]", "max_weight must be a number"),
        ("unbiased:nan", "rate must lie in"),
        ("delight:0.1,window=-1", "window must be >= 0"),
        ("delight:True", "must have a number after the colon"),
    ],
)
def test_specs_name_the_option(spec, reason):
    with pytest.raises(ValueError, match=f"gate spec .*{reason}"):
        kondo.parse_gate(spec)
