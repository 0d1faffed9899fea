"""Fused kernels against plain products in float64: on a GPU, and in Triton's interpreter.

What both share, embedding and head, `test_decoder` compares with an oracle.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kondo_lab.models import fused_layers
from kondo_lab.models.architecture import Architecture
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.run import matmul_precision

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
INTERPRETED = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton here; CPU builds have none"
)
# Members, prompts, answers to each, length of both, tokens, feed-forward width: tiles of 64 and of
# 128 tokens, single rows as a gate keeps them, a large vocabulary, one token, and prompts that the
# sampler attends to in several blocks of keys.
SHAPES = [
    (3, 4, 10, 10, 2, 256),
    (2, 2, 10, 12, 2, 64),
    (2, 3, 1, 10, 2, 128),
    (2, 2, 2, 5, 50, 64),
    (2, 2, 3, 1, 3, 16),
    (2, 2, 10, 20, 2, 64),
]


class Case:
    """A population with prompts, answers, weights of their log-probs and noise."""

    def __init__(self, device: str, members, prompts, answers, length, num_tokens, ff_width):
        self.network = StackedDecoder(
            Architecture(ff_width=ff_width),
            prompt_length=length,
            answer_length=length,
            num_tokens=num_tokens,
        )
        draws = Draws(list(range(members)), device)
        self.parameters = self.network.initialise(draws)
        self.prompts = draws.integers("prompts", 0, num_tokens, prompts, length)
        shape = (prompts, answers, length)
        self.answers = draws.integers("answers", 0, num_tokens, *shape)
        # As small as the gradient of a loss is: float16 without a scale would lose it.
        self.weights = 1e-6 * draws.normal("weights", 0, *shape)
        self.uniform = draws.uniform("noise", 0, *shape, num_tokens)

    def train(self, dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
        """Return log-probs and the gradient of their weighted sum, in float64."""
        self.network._fused = lambda hidden: fused
        leaves = {k: v.to(dtype).requires_grad_() for k, v in self.parameters.items()}
        log_probs = self.network.log_prob(leaves, self.prompts, self.answers)
        total = (log_probs * self.weights.to(dtype)).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()))
        return [found.detach().double() for found in (log_probs, *gradients)]

    def sample(self, dtype: torch.dtype, *, fused: bool):
        """Draw answers."""
        self.network._fused = lambda hidden: fused
        parameters = {name: value.to(dtype) for name, value in self.parameters.items()}
        return self.network.sample(parameters, self.prompts, self.uniform.to(dtype))


def error(found: Tensor, right: Tensor) -> float:
    """Return the root mean square difference, relative to the right values'."""
    return float((found - right).square().mean().sqrt() / right.square().mean().sqrt())


def check_training(device: str, shape: tuple[int, ...]) -> None:
    """Raise where log-probs or gradients differ by more than products of 10 bits leave."""
    case = Case(device, *shape)
    with matmul_precision("high"):
        fused = case.train(torch.float32, fused=True)
    log_probs, *gradients = zip(fused, case.train(torch.float64, fused=False), strict=True)
    assert error(*log_probs) < 0.005
    for found, right in gradients:
        # Rounding turns a few units of the feed-forward layer on or off, which a mean over so few
        # tokens shows; training curves of many seeds agree with those of plain products.
        assert error(found, right) < 0.05


def check_sampling(device: str, shape: tuple[int, ...]) -> None:
    """Raise where more answers differ than a draw on the edge between two tokens explains."""
    case = Case(device, *shape)
    with matmul_precision("high"):
        fused = case.sample(torch.float32, fused=True)
    right = case.sample(torch.float64, fused=False)
    same = (fused.answers == right.answers).all(dim=-1)
    assert float(same.double().mean()) > 0.95
    assert error(fused.log_probs[same].double(), right.log_probs[same]) < 0.01


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_trains_and_samples_alike_with_fused_layers(shape):
    check_training("cuda", shape)
    check_sampling("cuda", shape)


@pytest.mark.gpu
@ON_GPU
def test_fused_layers_are_used_for_tf32_alone():
    case = Case("cuda", *SHAPES[0])
    hidden = case.parameters["tokens"]
    assert not case.network._fused(hidden)
    with matmul_precision("high"):
        assert case.network._fused(hidden)
        assert not case.network._fused(hidden.double())


@pytest.mark.gpu
@ON_GPU
def test_a_policy_that_is_not_finite_still_draws_tokens():
    case = Case("cuda", *SHAPES[0])
    case.parameters["head"][1] = torch.nan
    with matmul_precision("high"):
        drawn = case.sample(torch.float32, fused=True)
    assert 0 <= int(drawn.answers.min()) <= int(drawn.answers.max()) < 2
    assert drawn.log_probs[1].isnan().all()
    assert drawn.log_probs[[0, 2]].isfinite().all()


@INTERPRETED
@pytest.mark.parametrize("check", ["training", "sampling"])
def test_the_kernels_say_the_same_in_the_interpreter(check):
    # Triton reads the variable when it is imported.
    code = f"""
from lab.models import test_fused_layers as own
for shape in own.SHAPES[1:]:
    own.check_{check}("cpu", shape)
for own.fused_layers.PROGRAMS in (1, 4):  # which sum over several tiles, the last over fewer
    own.check_training("cpu", own.SHAPES[2])
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    tests = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tests)


def test_a_tile_holds_as_many_answers_as_pay():
    assert fused_layers.answers_per_tile(10, 9, 10) == 5  # 55 of 64 tokens, twice
    assert fused_layers.answers_per_tile(12, 11, 10) == 10  # 122 of 128 tokens, once
    assert fused_layers.answers_per_tile(50, 49, 10) == 1
    assert fused_layers.answers_per_tile(10, 9, 1) == 1
    with pytest.raises(ValueError, match=r"prompt . answer must be <= 128 tokens, got 100 . 99"):
        fused_layers.answers_per_tile(100, 99, 10)


def test_programs_take_several_blocks_where_enough_programs_are_left():
    assert fused_layers._per_program(20, 120) == 7
    assert fused_layers._per_program(20, 1000) == 20
    assert fused_layers._per_program(20, 3) == 1


@pytest.mark.parametrize("sizes", [(64, 2, 100), (48, 2, 64), (64, 8, 64), (128, 2, 64)])
def test_layers_of_other_sizes_are_not_fused(sizes):
    assert fused_layers.fit(64, 2, 256)
    assert not fused_layers.fit(*sizes)
