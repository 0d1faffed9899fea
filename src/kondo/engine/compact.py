"""Stage 3, compact: gather the kept rows of everything that has rows, in micro-batches."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from kondo.engine import rows
from kondo.engine.select import Selection


class MicroBatch(NamedTuple):
    """Kept rows, ready to be differentiated. n rows, T tokens (absent for unit "sample").

    A compaction that knows more of the model may flatten [n, T] to [K], one per kept token.
    """

    rows: Any
    """The nest log_prob takes."""
    advantages: Tensor
    """[n] or [n, T]."""
    loss_inputs: dict[str, Tensor]
    """Further tensors of the loss, [n, ...]."""
    keep: Tensor
    """bool [n] or [n, T]."""
    weight: Tensor
    """float like keep."""
    num_rows: int
    """Rows that enter the forward."""
    num_tokens: int | Tensor
    """Tokens that enter the forward, an int or 0-d: here the elements of these rows that count."""


Compact = Callable[..., Iterable[MicroBatch]]
"""Called like `micro_batches`."""


def micro_batches(
    batch: Any,
    advantages: Tensor,
    selection: Selection,
    *,
    loss_inputs: dict[str, Tensor],
    size: int | None = None,
) -> Iterator[MicroBatch]:
    """Yield the kept rows, `size` at a time, in batch order; no copy where all are kept."""
    parts = (batch, advantages, loss_inputs, selection.keep, selection.weight)
    num_kept = selection.rows.numel()
    step = size or num_kept
    everything = num_kept == selection.keep.shape[0]
    if everything and step >= num_kept:
        yield MicroBatch(*parts, num_rows=num_kept, num_tokens=selection.mask.sum())
        return
    for start in range(0, num_kept, step):
        stop = min(start + step, num_kept)
        index = slice(start, stop) if everything else selection.rows[start:stop]
        counts = (stop - start, selection.mask[index].sum())
        yield MicroBatch._make((*rows.take(parts, index), *counts))
