"""Options of the step that are no numbers, whole numbers or flags are refused by it."""

import math

import numpy
import pytest
import torch
from torch import nn

import kondo


def step(**options):
    weight = torch.ones(3, requires_grad=True)
    return kondo.backward(
        lambda rows: (rows * weight).sum(1).clamp(max=0),
        -torch.rand(4, 3),
        torch.ones(4),
        options=kondo.Options(**options),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact_units": 2.5}, "exact_units must be a whole number, got 2.5"),
        ({"exact_units": "many"}, "exact_units must be a whole number, got 'many'"),
        ({"exact_units": True}, "exact_units must be a whole number, got True"),
        ({"rebalance": "no"}, "rebalance must be True or False, got 'no'"),
        ({"all_reduce": "no"}, "all_reduce must be True or False, got 'no'"),
        ({"all_reduce": 1}, "all_reduce must be True or False, got 1"),
        ({"screen_chunk": 2.5}, "screen_chunk must be a whole number of rows, got 2.5"),
        ({"screen_chunk": math.nan}, "screen_chunk must be a whole number of rows, got nan"),
        ({"denominator": math.nan}, "denominator must be .* got nan"),
        ({"denominator": True}, "denominator must be .* got True"),
        ({"denominator": "3"}, "denominator must be .* got '3'"),
        ({"module": len}, "module must be a torch.nn.Module, or a list of some, got builtin"),
        ({"module": [nn.Linear(1, 1), "net"]}, "module must be .* a list of some, got str"),
        ({"module": {"net": 1}}, "module must be .* a list of some, got dict"),
    ],
    ids=str,
)
def test_what_an_option_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        step(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"exact_units": numpy.int64(3)},
        {"screen_chunk": numpy.int64(3)},
        {"denominator": numpy.float32(3)},
        {"denominator": numpy.int64(3)},
    ],
    ids=str,
)
def test_numbers_of_numpy_are_numbers(options):
    assert step(**options).kept == 4


def test_modules_are_one_several_or_none():
    one, other = nn.Linear(1, 1), nn.Tanh()
    assert kondo.Options().modules == ()
    assert kondo.Options(module=one).modules == (one,)
    assert kondo.Options(module=[one, other]).modules == (one, other)
    assert kondo.Options(module=(other, one)).modules == (other, one)
    assert kondo.Options(module=[]).modules == ()


def test_what_is_each_rank_s_own_is_not_compared():
    alike = kondo.Options(module=nn.Tanh(), screen_chunk=3).alike()
    assert not {"module", "screen_chunk", "backward_fn"} & set(alike)
    assert alike == kondo.Options(module=[nn.Linear(1, 1)]).alike()
