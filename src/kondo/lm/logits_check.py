"""Whether a causal LM makes its logits as `Head` does: by its output layer, a scale and a cap.

    ids -> backbone -> hidden states -> output layer -> scale, cap -> logits
                             1                2              3

The three places are compared one by one. A comparison of logits alone would miss a cap of 30:
logits of random weights are too small to reach it, and bfloat16 rounds them by more. So what
follows the output layer is given numbers of our own, large ones in float32, instead of the layer's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kondo.lm.head import Head

# Twice Gemma's usual cap of 30: an unknown cap of up to a few thousand shows in float32.
_LARGEST = 60.0


def logits_fault(
    model: nn.Module, layer: nn.Module, head: Head, ids: Tensor, hidden: Tensor
) -> str | None:
    """Return what else than `head` makes the logits of a model, None if nothing does.

    Args:
        model: the causal LM; called once.
        layer: its output layer.
        head: what is taken for the layer, its scale and its cap.
        ids: int64 [1, T].
        hidden: [1, T, D], the backbone's, of these ids; in the dtype that the layer takes.
    """
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(_: nn.Module, args: Any, options: dict[str, Any], output: Tensor) -> Tensor:
        calls.append(((*args, *options.values())[0], output, probe := _probe(output)))
        return probe

    hook = layer.register_forward_hook(record, with_kwargs=True)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except RuntimeError as error:
        if not calls:
            raise
        return f"what follows the output layer takes no float32 ({error})"
    finally:
        hook.remove()
    if len(calls) != 1:  # its weight is read, and the layer not called
        return difference(bend(_linear(hidden, head), head), logits, least=1e-3)
    taken, output, probe = calls[0]
    for place, ours, theirs in (
        ("before the output layer", hidden.to(taken.device), taken),
        ("in the output layer", _linear(taken, head), output),
        ("after the output layer", bend(probe.double(), head), logits),
    ):
        if fault := difference(ours, theirs, least=1e-5):
            return f"{place}, {fault}"
    return None


def layer_fault(layer: nn.Module, head: Head) -> str | None:
    """Return by how much a call of an output layer differs from what is taken for it."""
    hidden = _probe(head.weight[:3]).to(head.weight.dtype)
    if fault := difference(_linear(hidden, head), layer(hidden), least=1e-5):
        return f"in the output layer, {fault}"
    return None


def bend(logits: Tensor, head: Head) -> Tensor:
    """Return what the head makes of the products of its weight."""
    logits = head.scale * logits
    return logits if head.soft_cap is None else head.soft_cap * (logits / head.soft_cap).tanh()


def difference(
    ours: Tensor, theirs: Tensor, *, least: float, least_half: float = 0.0
) -> str | None:
    """Say by how much two results differ, if by more than rounding.

    The norm of the difference may be as large as the step between two numbers of theirs, of norm
    1. `least` is the limit where that is smaller, `least_half` that in half precision.
    """
    if ours.shape != theirs.shape:
        return f"results differ in shape: {list(ours.shape)} and {list(theirs.shape)}"
    half = theirs.dtype in (torch.float16, torch.bfloat16)
    limit = max(torch.finfo(theirs.dtype).eps, least_half if half else least)
    error, norm = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
    return (
        None if error <= limit * norm else f"results differ by {error:.2g}, their norm {norm:.2g}"
    )


def _linear(hidden: Tensor, head: Head) -> Tensor:
    return nn.functional.linear(hidden, head.weight, head.bias)


def _probe(output: Tensor) -> Tensor:
    """Return numbers of both signs, small and large, no two alike; as wide as float32."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    numbers = torch.linspace(-1, 1, output.numel(), dtype=dtype, device=output.device)
    return (_LARGEST * numbers).view(output.shape)
