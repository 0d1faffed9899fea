"""Small packs from CUDA graphs: Python takes longer to launch a few thousand tokens than a GPU.

A graph has fixed sizes, so a pack is padded up to one of a few shapes: the padding is in rows of
its own behind the others, which nobody reads and no gradient enters. The first pack of a shape is
run a few times and recorded, forward and backward; from then on both are replayed.

    pack -> padded, copied to where the graph reads -> replay -> hidden states
    gradient of the hidden states -> copied -> replay -> gradients of the parameters

All graphs of a model share one pool of memory, that of the largest, and one place for gradients. A
forward therefore overwrites what an earlier one had kept for its backward: packs are differentiated
one after the other, as `kondo.backward` does, and whoever does not is told.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kondo.lm.pack import Pack

STEP = 512
"""Tokens from one shape to the next, of packs below 16 times as many: the most that padding costs.
Of longer ones an eighth of the pack at most, so that packs of any length have few shapes. No row of
padding is longer."""
MAX_GRAPHS = 64
"""Most graphs of a model; the one unused for longest makes room."""
EAGER_CALLS = 2
"""Calls before the recording: lazy initialisation and compilation happen there."""

Run = Callable[["Inputs", int], Tensor]
"""(inputs, longest row) -> hidden states [1, T, D]."""

Gradients = tuple[Tensor | None, ...]
"""One for each parameter that learns; None for those without influence."""


class Shape(NamedTuple):
    """What is fixed in a graph."""

    tokens: int  # T
    rows: int  # R, those of the padding and empty ones included
    longest: int  # no row is longer


class Inputs(NamedTuple):
    """What a backbone reads of a pack."""

    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    starts: Tensor  # int32 [R + 1]: where each row starts


def shape_of(num_tokens: int, num_rows: int, longest: int) -> Shape:
    """Return the smallest shape that a pack fits.

    Example:
        >>> shape_of(num_tokens=1300, num_rows=3, longest=600)
        Shape(tokens=1536, rows=4, longest=1024)
        >>> shape_of(num_tokens=40_000, num_rows=1000, longest=50)
        Shape(tokens=40960, rows=1024, longest=512)
    """
    step = max(STEP, (1 << num_tokens.bit_length() - 1) // 8)
    tokens = -(-num_tokens // step) * step
    # Room for the most padding there can be: how much there is must not make another shape.
    rows = _power_of_two(num_rows + -(-step // STEP))
    return Shape(tokens, rows, _power_of_two(max(longest, STEP)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def fill(inputs: Inputs, pack: Pack) -> None:
    """Write a pack and its padding over `inputs`, without waiting for the device."""
    total, tokens = pack.num_tokens, inputs.input_ids.shape[1]
    inputs.input_ids[:, :total].copy_(pack.input_ids)
    inputs.position_ids[:, :total].copy_(pack.position_ids)
    # All padding stands at the first place: a model may have fewer places than padding tokens.
    inputs.input_ids[:, total:].zero_()
    inputs.position_ids[:, total:].zero_()
    ends = pack.cu_seqlens.numel()
    inputs.starts[:ends].copy_(pack.cu_seqlens)
    padding = inputs.starts[ends:]
    most = total + STEP * padding.numel()
    torch.arange(total + STEP, most + 1, STEP, out=padding)
    padding.clamp_(max=tokens)


class Graphs:
    """The graphs of one backbone, whose parameters are differentiated and which `run` runs."""

    def __init__(self, backbone: nn.Module, run: Run):
        self._backbone, self._run = backbone, run
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._places: tuple[Any, ...] = ()
        self._gradients: Gradients | None = None
        self._pool: Any = None
        self.turn = 0  # goes up with every forward, and with its backward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Graphs":
        """Return graphs of the copied backbone, none of them recorded yet."""
        return Graphs(copy.deepcopy(self._backbone, memo), copy.deepcopy(self._run, memo))

    def __call__(self, pack: Pack) -> Tensor:
        """Return the hidden states of a pack laid end to end, [1, total, D]; differentiable once.

        Differentiated with respect to the parameters that require grad.
        """
        weights = self._weights()
        learning = [weight for weight in weights if weight.requires_grad]
        shape = shape_of(pack.num_tokens, pack.num_rows, pack.max_length)
        places = tuple((weight.data_ptr(), weight.requires_grad) for weight in weights)
        if places != self._places:  # a graph reads weights where they were when it was recorded
            self._recorded.clear()
            self._places, self._gradients = places, None
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key = (shape, self._backbone.training, autocast)
        recorded = self._recorded.pop(key, None) or self._record(shape, learning, pack)
        self._recorded[key] = recorded  # the last is the latest used
        hidden: Tensor = _Replay.apply(self, recorded, pack, *learning)  # type: ignore[no-untyped-call]
        return hidden

    def _record(self, shape: Shape, learning: Sequence[Tensor], pack: Pack) -> "_Recorded":
        device = pack.input_ids.device
        self._check(device)
        if len(self._recorded) >= MAX_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        ids = torch.zeros(1, shape.tokens, dtype=torch.int64, device=device)
        starts = torch.zeros(shape.rows + 1, dtype=torch.int32, device=device)
        inputs = Inputs(ids, ids.clone(), starts)
        fill(inputs, pack)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        recorded = _record(self._run, shape, inputs, learning, self._pool, self._gradients)
        self._gradients = recorded.gradients
        return recorded

    def _check(self, device: torch.device) -> None:
        if device.type != "cuda":
            _refuse(f"for a model on {device.type}, got packs to replay from CUDA graphs")
        if getattr(self._backbone, "is_gradient_checkpointing", False):
            _refuse("with gradient checkpointing, which runs layers again in the backward")

    def _weights(self) -> list[Tensor]:
        """Return the parameters; refuse hooks, which a replay passes by or a recording runs twice.

        One walk over the modules for both: this is done for every pack.
        """
        found: dict[int, Tensor] = {}
        hooked: object = None
        for module in self._backbone.modules():
            if (
                module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                hooked = hooked or module
            found |= {id(own): own for own in module._parameters.values() if own is not None}
        weights = list(found.values())
        if hooked is None and any(weight._backward_hooks for weight in weights):
            hooked = weights[0]
        if hooked is not None:
            kind = type(hooked).__name__
            _refuse(f"for a model with hooks, got one on a {kind}: a replay does not run it")
        return weights


def _refuse(what: str) -> None:
    raise ValueError(f"graph_tokens must be 0 {what}; leave it out.")


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """Two graphs, and the memory that they read from and write to."""

    inputs: Inputs
    forward: torch.cuda.CUDAGraph
    hidden: Tensor  # [1, T, D], detached
    gradient: Tensor  # [1, T, D], of the hidden states
    backward: torch.cuda.CUDAGraph
    gradients: Gradients  # shared by all graphs of a model


def _record(
    run: Run,
    shape: Shape,
    inputs: Inputs,
    learning: Sequence[Tensor],
    pool: Any,
    places: Gradients | None,
) -> _Recorded:
    """Record forward and backward; the latter writes to `places`, or to new ones if None."""
    device = inputs.input_ids.device

    def differentiate(hidden: Tensor, gradient: Tensor) -> Gradients:
        return torch.autograd.grad(hidden, learning, gradient, allow_unused=True)

    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(EAGER_CALLS):
            hidden = run(inputs, shape.longest)
            gradient = torch.zeros_like(hidden)
            found = differentiate(hidden, gradient)
            del hidden
    torch.cuda.synchronize(device)
    if places is None:
        places = tuple(None if each is None else torch.empty_like(each) for each in found)
    del found
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward, pool=pool):
        hidden = run(inputs, shape.longest)
    with torch.cuda.graph(backward, pool=pool):
        for place, each in zip(places, differentiate(hidden, gradient), strict=True):
            if place is not None and each is not None:
                place.copy_(each)
    return _Recorded(inputs, forward, hidden.detach(), gradient, backward, places)


class _Replay(torch.autograd.Function):
    """A recorded forward and backward, made known to autograd."""

    @staticmethod
    def forward(
        ctx: Any, graphs: Graphs, recorded: _Recorded, pack: Pack, *learning: Tensor
    ) -> Tensor:
        graphs.turn += 1  # what earlier forwards kept is overwritten from now on
        ctx.graphs, ctx.recorded, ctx.turn = graphs, recorded, graphs.turn
        fill(recorded.inputs, pack)
        recorded.forward.replay()
        # A copy: the next replay writes to the same place.
        return recorded.hidden[:, : pack.num_tokens].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        graphs: Graphs = ctx.graphs
        recorded: _Recorded = ctx.recorded
        if ctx.turn != graphs.turn:
            raise RuntimeError(
                "a pack that is replayed from a CUDA graph must be differentiated once, before the "
                "next one is run: they share their memory. Differentiate each pack in turn, as "
                "kondo.backward does, or use CausalLM(..., graph_tokens=0)."
            )
        graphs.turn += 1
        total = gradient.shape[1]
        recorded.gradient[:, :total].copy_(gradient)
        recorded.gradient[:, total:].zero_()
        recorded.backward.replay()
        copies = (None if found is None else found.clone() for found in recorded.gradients)
        return None, None, None, *copies
