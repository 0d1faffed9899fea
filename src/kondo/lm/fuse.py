"""Chains of elementwise operations and sums as one kernel, on a GPU that has a compiler for it."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_HAS_TRITON = importlib.util.find_spec("triton") is not None

# Sizes that change become symbols, those that stay are constants: a row of logits is cut by its own
# length in every index.
_compiled = functools.cache(torch.compile)


def can_fuse(device: torch.device) -> bool:
    """Return whether `fused` makes one kernel there: on CUDA, where Triton is installed."""
    return device.type == "cuda" and _HAS_TRITON


def fused(function: _F, device: torch.device) -> _F:
    """Return the function as one kernel where that can be had: else every operation is a pass.

    Inside a layer that is compiled itself it becomes a part of that layer's kernels.
    """
    if torch.compiler.is_compiling() or not can_fuse(device):
        return function
    return cast(_F, _compiled(function))
