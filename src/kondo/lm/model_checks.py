"""Try on a few tokens whether a model can be a `CausalLM`, when one is made.

    ids -> backbone -> hidden states -> output layer -> scale, cap -> logits
             1                2              3

Its logits must be those of its output layer, a scale and a cap: the three places are compared one
by one. A comparison of logits alone would miss a cap of 30: logits of random weights are too small
to reach it, and bfloat16 rounds them by more. So what follows the output layer is given numbers of
our own, large ones in float32, instead of the layer's. It must be causal; and packs laid end to end
must give the hidden states of rows side by side.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kondo.engine.policy import evaluation
from kondo.engine.preserved import preserved
from kondo.lm.architecture import check_whole, is_here, last_hidden
from kondo.lm.head import Head
from kondo.lm.pack import packs
from kondo.lm.rows import TokenRows

if TYPE_CHECKING:
    from kondo.lm.model import CausalLM

# Twice Gemma's usual cap of 30: an unknown cap of up to a few thousand shows in float32.
_LARGEST = 60.0


def head_fault(lm: "CausalLM") -> str | None:
    """Return what makes logits beside the head and the bends we know, None if nothing does."""
    layer, head = lm._head, lm.head
    if not isinstance(layer, nn.Module):
        return None
    check_whole(head.weight)
    if not is_here(head.weight):
        return None
    if lm._given_head is None:
        with _as_written(lm.module):
            return _logits_fault(lm, layer, head)
    with _as_written(layer):
        hidden = _probe(head.weight[:3]).to(head.weight.dtype)
        fault = _difference(_linear(hidden, head), layer(hidden), least=1e-5)
    return f"in the output layer, {fault}" if fault else None


def _logits_fault(lm: "CausalLM", layer: nn.Module, head: Head) -> str | None:
    """Compare the logits of a model's own forward with those that its backbone and head make."""
    ids = torch.arange(3, device=lm.device).unsqueeze(0) % lm.vocab_size
    hidden = last_hidden(lm.backbone(input_ids=ids, use_cache=False))
    hidden = lm._as_head_takes(hidden, head)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(_: nn.Module, args: Any, options: dict[str, Any], output: Tensor) -> Tensor:
        calls.append(((*args, *options.values())[0], output, probe := _probe(output)))
        return probe

    hook = layer.register_forward_hook(record, with_kwargs=True)
    try:
        logits = lm.module(input_ids=ids, use_cache=False).logits
    except RuntimeError as error:
        if not calls:
            raise
        return f"what follows the output layer takes no float32 ({error})"
    finally:
        hook.remove()
    if len(calls) != 1:  # its weight is read, and the layer not called
        return _difference(bend(_linear(hidden, head), head), logits, least=1e-3)
    taken, output, probe = calls[0]
    for place, ours, theirs in (
        ("before the output layer", hidden.to(taken.device), taken),
        ("in the output layer", _linear(taken, head), output),
        ("after the output layer", bend(probe.double(), head), logits),
    ):
        if fault := _difference(ours, theirs, least=1e-5):
            return f"{place}, {fault}"
    return None


def bend(logits: Tensor, head: Head) -> Tensor:
    """Return what the head makes of the products of its weight."""
    logits = head.scale * logits
    return logits if head.soft_cap is None else head.soft_cap * (logits / head.soft_cap).tanh()


def _linear(hidden: Tensor, head: Head) -> Tensor:
    return nn.functional.linear(hidden, head.weight, head.bias)


def _probe(output: Tensor) -> Tensor:
    """Return numbers of both signs, small and large, no two alike; as wide as float32."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    numbers = torch.linspace(-1, 1, output.numel(), dtype=dtype, device=output.device)
    return (_LARGEST * numbers).view(output.shape)


def ahead_fault(lm: "CausalLM") -> str | None:
    """Return by how much hidden states change with later tokens, None if they do not.

    Two rows of four tokens that end otherwise. Weights that are elsewhere are left to
    `kondo.check`, and so is a backbone that does not run yet.
    """
    if not all(map(is_here, lm.backbone.parameters())):
        return None
    ids = (torch.arange(4, device=lm.device) + lm.vocab_size // 2) % lm.vocab_size
    later = torch.cat([ids[:2], (ids[2:] + 1) % lm.vocab_size])
    real = torch.ones(2, 4, dtype=torch.bool, device=lm.device)
    rows = TokenRows(input_ids=torch.stack([ids, later]), attention_mask=real, completion_mask=real)
    wanted = real.index_fill(1, torch.tensor([0], device=lm.device), False)
    (pack,) = packs(rows, wanted, layout="padded", max_tokens=8)
    devices = {each.device for each in lm.backbone.parameters() if each.is_cuda}
    with preserved(list(lm.backbone.modules()), list(devices), None, None):
        try:
            with _as_written(lm.backbone):
                hidden = lm._hidden(pack)
        except Exception:
            return None
    # Experts take other groups of tokens, whose rounding grows from layer to layer.
    return _difference(hidden[1, :2], hidden[0, :2], least=1e-3, least_half=0.05)


def packs_fault(lm: "CausalLM") -> str | None:
    """Compare the hidden states of two short rows, end to end and side by side."""
    ids = torch.arange(10, device=lm.device).reshape(2, 5) % lm.vocab_size
    real = torch.ones_like(ids, dtype=torch.bool)
    sampled = real.clone()
    sampled[:, 0] = False
    rows = TokenRows(input_ids=ids, attention_mask=real, completion_mask=sampled)
    hidden = {}
    for layout in ("padded", "varlen"):
        (pack,) = packs(rows, sampled, layout=layout, max_tokens=10)
        try:
            with _as_written(lm.backbone):
                hidden[layout] = lm._hidden(pack).flatten(0, -2)[pack.read]
        except Exception as error:  # whatever a foreign model raises is the reason we look for
            return str(error)
    return _difference(hidden["varlen"], hidden["padded"], least=1e-3, least_half=0.05)


def _difference(
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


@contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    """Leave no trace; compiled layers run as they are written, because a graph of a few tokens
    serves nothing else."""
    compiled = any(each._compiled_call_impl is not None for each in module.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with torch.no_grad(), evaluation([module]), eager:
        yield
