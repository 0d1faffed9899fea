"""The fused heads of other packages: liger-kernel and cut-cross-entropy, half precision on CUDA.

They take no temperature: hidden states are divided by it, and (c / T) tanh(x / c) is their own cap,
c / T, of x / T.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from kondo.lm.head import Head, How

Kernel = Callable[[Tensor, Head, Tensor, How], Tensor]

_PACKAGES = {"liger": "liger-kernel", "cce": "cut-cross-entropy"}
_MODULES = {"liger": "liger_kernel.ops.fused_linear_cross_entropy", "cce": "cut_cross_entropy"}

# Its widest block of the vocabulary. Beyond the last token it sets logits to -inf and then caps
# them (25.1.1), so that they count as exp(-cap) each in the log-sum-exp.
_CCE_BLOCK = 256


def kernel_of(backend: str, head: Head, how: How) -> Kernel:
    """Return what computes log-probs; a ValueError says why a backend cannot compute this here."""
    if backend not in _PACKAGES:
        raise ValueError(f'backend must be "torch", "liger" or "cce", got {backend!r}.')
    obstacle = _obstacle(backend, head, how)
    if obstacle is not None:
        raise ValueError(f'backend "{backend}" {obstacle}; use "torch".')
    return {"liger": _liger_log_probs, "cce": _cce_log_probs}[backend]


def _obstacle(backend: str, head: Head, how: How) -> str | None:
    vocabulary, package = head.weight.shape[0], _PACKAGES[backend]
    if how.device.type != "cuda":
        return f"needs CUDA tensors, got {how.device.type}"
    if how.dtype not in (torch.float16, torch.bfloat16):
        return f"needs half precision, got {how.dtype}"
    if backend == "cce" and head.bias is not None:
        return "has no head.bias"
    if backend == "cce" and how.top is not None and vocabulary % _CCE_BLOCK:
        return (
            f"needs a vocabulary that is a multiple of {_CCE_BLOCK} with head.soft_cap, got "
            f"{vocabulary}"
        )
    if importlib.util.find_spec(_MODULES[backend].partition(".")[0]) is None:
        return f'needs a package that is not installed (pip install "{package}")'
    if backend == "liger":
        # Before 0.8.2 the gradients of single tokens' losses were wrong, and before 0.8.3 a chunk
        # had K D / V tokens: a few dozen.
        forward = _import(backend).LigerFusedLinearCrossEntropyFunction.forward
        if "chunk_mem_const" not in inspect.signature(forward).parameters:
            return f'needs a newer package (pip install "{package}>=0.8.3")'
    return None


def _import(backend: str) -> ModuleType:
    return importlib.import_module(_MODULES[backend])


def _cce_log_probs(hidden: Tensor, head: Head, targets: Tensor, how: How) -> Tensor:
    """Use Apple's cut-cross-entropy: logits never leave the chip.

    filter_eps=None: the package would otherwise skip blocks of the gradient whose probabilities are
    all below 2^-12, which are nearly all blocks of a flat distribution.
    """
    loss: Tensor = _import("cce").linear_cross_entropy(
        _divided(hidden, how),
        head.weight.to(how.dtype),
        targets,
        softcap=how.top,
        reduction="none",
        filter_eps=None,
        impl="cce",
    )
    return -loss


def _liger_log_probs(hidden: Tensor, head: Head, targets: Tensor, how: How) -> Tensor:
    """Use liger-kernel: chunks like ours, one kernel for log-softmax and its gradient."""
    vocabulary, width = head.weight.shape
    # It takes K / ceil(V / (x D)) tokens at a time, rounded up to a power of two.
    times_width = max(1, vocabulary * how.chunk // (width * hidden.shape[0]))
    losses: tuple[Tensor, ...] = _import("liger").LigerFusedLinearCrossEntropyFunction.apply(
        _divided(hidden, how),
        head.weight.to(how.dtype),
        targets,
        None if head.bias is None else (head.bias * how.slope).to(how.dtype),
        None,  # weights of tokens in the vocabulary
        -100,  # the target to ignore: never one of ours
        0.0,  # z-loss
        0.0,  # label smoothing
        "none",
        how.top,
        False,  # return the z-loss
        torch.float32,  # sums of gradients over chunks
        False,  # scale by the token's probability
        False,  # return the accuracy
        False,  # return the predictions
        None,  # implementation and mode of its cross-entropy: the default ones
        None,
        times_width,
    )
    return -losses[0]


def _divided(hidden: Tensor, how: How) -> Tensor:
    """Return s h / T."""
    return (hidden if how.slope == 1.0 else hidden * how.slope).to(how.dtype)
