"""kondo.arguments: every refusal names the argument; broadcasting is by row and nothing else."""

import math

import pytest
import torch

from kondo import arguments as checks

SHAPE = torch.Size([2, 3])


def test_check_float_returns_the_tensor_itself():
    value = torch.ones(2, dtype=torch.float16)
    assert checks.check_float("value", value) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], r"thing must be a floating-point tensor, got list; wrap it"),
        (1.0, r"thing must be a floating-point tensor, got float; wrap it"),
        (torch.ones(1, dtype=torch.int32), r"got torch\.int32; convert it with thing\.float\(\)"),
        (torch.ones(1, dtype=torch.bool), r"got torch\.bool"),
        (torch.ones(1, dtype=torch.complex64), r"got torch\.complex64"),
    ],
)
def test_check_float_refuses(value, message):
    with pytest.raises(ValueError, match=message):
        checks.check_float("thing", value)


def test_check_mask_broadcasts_rows():
    assert checks.check_mask(None, SHAPE) is None
    rows = checks.check_mask(torch.tensor([True, False]), SHAPE)
    assert rows.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), r"True means 'counts', got torch\.float32; convert it with mask\.bool"),
        (torch.ones(2, 3, dtype=torch.uint8), r"got torch\.uint8"),
        ([[True]], "got list"),
        (torch.ones(3, dtype=torch.bool), r"mask must have shape \[2, 3\] or \[2\].*got \[3\]"),
        (torch.ones(1, 3, dtype=torch.bool), r"got \[1, 3\]"),
    ],
)
def test_check_mask_refuses(mask, message):
    with pytest.raises(ValueError, match=message):
        checks.check_mask(mask, SHAPE)


def test_expand_rows_literal():
    # One value per row; each row repeats its own.
    assert checks.expand_rows("x", torch.tensor([1.0, 2.0]), SHAPE).tolist() == [
        [1.0] * 3,
        [2.0] * 3,
    ]
    column = torch.tensor([[1.0], [2.0]])
    assert checks.expand_rows("x", column, SHAPE).tolist() == [[1.0] * 3, [2.0] * 3]
    full = torch.ones(SHAPE)
    assert checks.expand_rows("x", full, SHAPE) is full


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (3, 1), (2, 3, 1)])
def test_expand_rows_refuses_any_other_broadcast(shape):
    with pytest.raises(ValueError, match=r"x must have shape .* or one per row"):
        checks.expand_rows("x", torch.ones(shape), SHAPE)


def test_expand_rows_of_one_unit_per_row_has_one_choice():
    with pytest.raises(ValueError, match=r"shape \[2\], got \[3\]"):
        checks.expand_rows("x", torch.ones(3), torch.Size([2]))


def test_prepare_units_writes_zero_where_nothing_counts():
    log_probs = torch.tensor([[-1.0, math.nan], [math.inf, -2.0]], requires_grad=True)
    advantages = torch.tensor([math.nan, 3.0], dtype=torch.bfloat16)
    mask = torch.tensor([[False, False], [False, True]])
    got_log_probs, got_advantages, got_mask = checks.prepare_units(log_probs, advantages, mask)
    assert got_log_probs.tolist() == [[0.0, 0.0], [0.0, -2.0]]
    assert got_advantages.tolist() == [[0.0, 0.0], [0.0, 3.0]]
    assert got_advantages.dtype == torch.float32
    assert not got_log_probs.requires_grad
    assert got_mask is mask


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_at_least_float32(dtype, expected):
    assert checks.at_least_float32(torch.ones(1, dtype=dtype)).dtype == expected


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (torch.tensor([False, True, True]), "unit 1"),
        (torch.tensor([[False, False], [False, True]]), r"unit \(1, 1\)"),
    ],
)
def test_first_unit_literal(where, name):
    assert checks.first_unit(where) == name.replace("\\", "")
