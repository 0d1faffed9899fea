"""Stage 3, compact: gather the kept rows of everything that has rows, in micro-batches."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from kondo import rows
from kondo.engine.selection import KeptRows


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
    keep: Tensor | None
    """bool [n] or [n, T]; None where every element is kept."""
    weight: Tensor | None
    """float like keep; None where it is 1 for what is kept."""
    num_rows: int
    """Rows that enter the forward."""
    num_tokens: int | Tensor
    """Tokens that enter the forward, an int or 0-d: here the elements of these rows that count.
    0 where `keep` is None, and the log-probs tell."""
    filler: bool = False
    """Nothing of it is kept: it is run only because other ranks make a call."""
    row_of: Tensor | None = None
    """int64 [K]: the row of each element, where [n, T] was flattened; for losses that weigh whole
    sequences. Elements of a row must stand together, and all of them in one micro-batch."""


Compact = Callable[..., Iterable[MicroBatch]]
"""Called like `micro_batches`."""


def micro_batches(
    batch: Any,
    advantages: Tensor,
    kept: KeptRows,
    *,
    loss_inputs: dict[str, Tensor],
    size: int | None = None,
) -> Iterator[MicroBatch]:
    """Yield the kept rows, `size` at a time, in batch order; no copy where all are kept."""
    keep = None if kept.whole else kept.keep
    parts = (batch, advantages, loss_inputs, keep, kept.weight)
    num_kept = kept.rows.numel()
    step = size or num_kept
    everything = num_kept == kept.keep.shape[0]
    for start in range(0, num_kept, step):
        stop = min(start + step, num_kept)
        index = slice(start, stop) if everything else kept.rows[start:stop]
        taken = parts if everything and step >= num_kept else rows.take(parts, index)
        num_tokens = 0 if kept.whole else kept.mask[index].sum()
        yield MicroBatch._make((*taken, stop - start, num_tokens, False, None))
