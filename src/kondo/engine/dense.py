"""The selection of a dense step: everything that counts, with weight 1."""

import math

import torch
from torch import Tensor

from kondo.engine.selection import Counts, KeptRows


def everything(
    num_rows: int,
    mask: Tensor | None,
    device: torch.device,
    num_counted: int | None = None,
    *,
    of_rows: bool = False,
) -> tuple[KeptRows, Counts]:
    """Return all elements that count, and their number.

    Args:
        num_rows: N.
        mask: bool [N] or [N, T]; None where everything counts.
        device: where the work happens.
        num_counted: elements that count, in every row some, where that is known: nothing is read.
        of_rows: the mask has one value per row, whatever their tokens.
    """
    valid = torch.ones(num_rows, dtype=torch.bool, device=device) if mask is None else mask
    if of_rows:
        valid = valid.reshape(num_rows)
    index = torch.arange(num_rows, device=device)
    elements = num_rows if num_counted is None else num_counted
    host: Tensor | None = torch.arange(num_rows)
    if mask is not None and num_counted is None:
        some = valid if valid.ndim == 1 else valid.any(dim=1)
        elements, rows_kept = (int(n) for n in torch.stack([valid.sum(), some.sum()]).tolist())
        if rows_kept < num_rows:
            index, host = some.nonzero_static(size=rows_kept).squeeze(1), None
    counts = Counts(
        units=elements,
        units_kept=elements,
        elements=elements,
        elements_kept=elements,
        rows=num_rows,
        rows_kept=index.numel(),
        hidden_nan=0,
        rows_screened=0,
        surprised=0,
        price=-math.inf,
        rate=float(elements > 0),
        surprisal=math.nan,
    )
    whole = mask is None or of_rows
    return KeptRows(index, valid, None, valid, whole, by_row=True, host_rows=host), counts
