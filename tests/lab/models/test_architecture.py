import math

import pytest
import torch

from kondo_lab.models.architecture import SIZES, Architecture, compute_dtype
from lab.training import language_toys as toys

NOMINAL = {"toy": 1e5, "1m": 1e6, "5m": 5e6, "25m": 25e6, "85m": 85e6, "300m": 300e6, "1b": 1e9}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_named_by_their_parameters(name):
    own = toys.model(name, prompt_length=20, answer_length=44, num_tokens=48)
    num_parameters = sum(math.prod(shape) for shape in own.shapes.values())
    assert 0.9 < num_parameters / NOMINAL[name] < 1.1
    assert 0.4 < own.architecture.num_weights / NOMINAL[name] < 1.1


def test_products_are_halved_on_cuda_alone():
    assert compute_dtype(torch.device("cuda")) == torch.bfloat16
    assert compute_dtype(torch.device("cpu")) is None


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="width must be a multiple of num_heads, got 6 and 4"):
        Architecture(width=6, num_heads=4)
