"""Log-probs of tokens straight from hidden states: no [K, V] tensor of logits ever exists.

inputs    what a head is, and checks
chunks    ours: logits of one chunk of tokens at a time, anywhere
kernels   those of other packages, on CUDA
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kondo.lm.head.chunks import chunk_logits, torch_log_probs
from kondo.lm.head.inputs import Head, How, check_targets, default_chunk, prepare, wants_graph
from kondo.lm.head.kernels import cce_log_probs, liger_log_probs, obstacle_of

__all__ = ["Backend", "Head", "default_chunk", "token_entropy", "token_log_probs"]

Backend = Literal["auto", "torch", "liger", "cce"]

# What "auto" takes: the first that can compute what is asked for. Ours, because the kernels of
# other packages round logits (liger) or sums of gradients (cce) to half precision: an importance
# ratio of two such log-probs is off by percents. docs/how-to/language-models.md tells what that
# costs on an H200.
AUTO_WITH_GRAPH: tuple[Backend, ...] = ("torch",)
AUTO_WITHOUT_GRAPH: tuple[Backend, ...] = ("torch",)


def token_log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    backend: Backend = "auto",
    check: bool = True,
) -> Tensor:
    """Return log pi(target | hidden state) of each token, never holding [K, V].

    Differentiated with respect to hidden, head.weight and head.bias, each only if it requires
    grad. Matrix products are in the dtype of hidden, or autocast's; log-sum-exp, and sums of
    gradients over chunks, in float32 (float64 for float64).

    Args:
        hidden: [K, D], in the head's dtype unless autocast is on.
        head: what makes logits of them.
        targets: int64 [K], each in [0, V).
        temperature: divides the logits; one number, or a tensor with one for all or one per token,
            [K]. Not differentiated.
        chunk: tokens whose logits exist at a time; by default see `default_chunk`.
        backend: "torch" computes everything, anywhere. "liger" and "cce" are the kernels of the
            packages liger-kernel and cut-cross-entropy, half precision on CUDA. "auto" takes the
            first of AUTO_WITH_GRAPH, or AUTO_WITHOUT_GRAPH, that can compute what is asked for.
        check: look at the values of targets and of a temperature tensor. That waits for the
            device: False is for callers that have looked, and a target that is out of range then
            ends in a device-side assertion.

    Returns:
        float32 [K] (float64 for float64).

    Raises:
        ValueError: for every argument that cannot be right, naming it.

    Example:
        >>> import torch
        >>> from kondo.lm.head import Head, token_log_probs
        >>> hidden, weight = torch.zeros(3, 8), torch.randn(100, 8)
        >>> token_log_probs(hidden, Head(weight), torch.tensor([0, 7, 99])).exp()
        tensor([0.0100, 0.0100, 0.0100])
    """
    how = prepare(hidden, head, temperature, chunk, check)
    check_targets(targets, hidden.shape[0], head.weight, check)
    name = _choose(backend, hidden, head, how)
    if not hidden.shape[0]:
        name = "torch"  # a kernel cannot be launched for no token
    return _BACKENDS[name](hidden, head, targets, how)


@torch.no_grad()
def token_entropy(
    hidden: Tensor,
    head: Head,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    check: bool = True,
) -> Tensor:
    """Return the entropy of each token's distribution, -sum p log p; not differentiable.

    Args and dtypes are those of `token_log_probs`; returns [K].

    Example:
        >>> import torch
        >>> from kondo.lm.head import Head, token_entropy
        >>> token_entropy(torch.zeros(2, 8), Head(torch.randn(100, 8))).exp()
        tensor([100.0000, 100.0000])
    """
    how = prepare(hidden, head, temperature, chunk, check)
    entropy = torch.empty(hidden.shape[0], dtype=how.wide, device=hidden.device)
    with how.no_autocast():
        head = how.cast_head(head)
        for part in how.chunks(hidden.shape[0]):
            probs = chunk_logits(how.cast(hidden[part]), head, how.at(part)).softmax(dim=1)
            entropy[part] = torch.special.entr(probs, out=probs).sum(dim=1)
            del probs  # before the next chunk's logits exist
    return entropy


_BACKENDS: dict[str, Callable[[Tensor, Head, Tensor, How], Tensor]] = {
    "torch": torch_log_probs,
    "liger": liger_log_probs,
    "cce": cce_log_probs,
}


def _choose(backend: str, hidden: Tensor, head: Head, how: How) -> str:
    """Return the backend to use, never "auto"."""
    if backend == "torch" or (backend == "auto" and how.device.type != "cuda"):
        return "torch"
    if backend == "auto":
        names = AUTO_WITH_GRAPH if wants_graph(hidden, head) else AUTO_WITHOUT_GRAPH
        return next(name for name in names if obstacle_of(name, head, how) is None)
    if backend not in _BACKENDS:
        raise ValueError(f'backend must be "auto", "torch", "liger" or "cce", got {backend!r}.')
    obstacle = obstacle_of(backend, head, how)
    if obstacle is not None:
        raise ValueError(f'backend "{backend}" {obstacle}; use "torch" or "auto".')
    return backend
