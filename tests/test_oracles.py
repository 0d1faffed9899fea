"""The references and the tolerances are themselves held to something."""

import ast
from pathlib import Path

import pytest
import torch

from tolerances import TOLERANCES, assert_close

ORACLES = sorted((Path(__file__).parent / "oracles").glob("*.py"))


@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.name)
def test_oracles_import_torch_and_math_alone(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported <= {"torch", "math"}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_tolerances_refuse_what_the_next_better_type_would_notice(dtype):
    one, far = torch.ones(3, dtype=dtype), 1 + 3 * sum(TOLERANCES[dtype].values())
    assert_close(one, torch.ones(3, dtype=torch.float64))
    with pytest.raises(AssertionError):
        assert_close(one, torch.full((3,), far, dtype=torch.float64))


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        assert_close(torch.ones(1), torch.ones(2))
    with pytest.raises(AssertionError):
        assert_close(1.0, torch.ones(2))


def test_nan_equals_only_nan():
    nan = torch.tensor([float("nan")])
    assert_close(nan, nan)
    with pytest.raises(AssertionError):
        assert_close(nan, torch.ones(1))


def test_the_less_precise_of_two_sets_the_tolerance():
    near = torch.ones(1) + TOLERANCES[torch.float32]["rtol"]
    assert_close(near, torch.ones(1, dtype=torch.float64))
    with pytest.raises(AssertionError):
        assert_close(near.double(), torch.ones(1, dtype=torch.float64))
    assert_close(near.double(), torch.ones(1, dtype=torch.float64), torch.float32)
    assert_close(torch.tensor([True, False]), torch.tensor([1.0, 0.0]))
