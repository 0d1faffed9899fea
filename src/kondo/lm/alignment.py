"""Values that belong to tokens: aligned with their rows, and possible as log-probs."""

import torch
from torch import Tensor

from kondo.core.delight import ROUNDING
from kondo.lm.rows import TokenRows


def check_per_token(name: str, value: Tensor, rows: TokenRows) -> None:
    """Refuse values per completion token, [N, C], which would not say where the prompt ends."""
    num_rows, num_columns = rows.input_ids.shape
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] in (1, num_columns):
        return  # other shapes are the engine's to refuse
    missing = num_columns - value.shape[1]
    raise ValueError(
        f"{name} must have shape [{num_rows}, {num_columns}] like input_ids (prompt and "
        f"completion), got {list(value.shape)}; "
        + (
            f"if these are completions that end the rows, put zeros before them: "
            f"torch.nn.functional.pad({name}, ({missing}, 0))."
            if missing > 0
            else "cut it to the rows' columns."
        )
    )


def check_screen(screen: Tensor, rows: TokenRows) -> None:
    """Refuse log-probs that no policy can have given to these tokens.

    One device sync; more where there are log-probs beside the completions, as of prompts.
    """
    check_per_token("screen", screen, rows)
    if screen.shape != rows.input_ids.shape:
        raise ValueError(
            f"screen must have one log-prob per token, {list(rows.input_ids.shape)}, got "
            f"{list(screen.shape)}; sums over sequences do not say which token was surprising."
        )
    sampled, most = rows.completion_mask.to(screen.device), ROUNDING.get(screen.dtype, 1e-2)
    known = screen != 0
    facts = torch.stack([sampled & (screen > most), sampled & known, known > sampled])
    num_above, num_known, num_beside = facts.sum((1, 2)).tolist()
    if num_above:
        above = sampled & (screen > most)
        raise ValueError(
            f"screen must hold log-probs, at most 0, got {num_above} sampled tokens above "
            f"{most}, first at {above.nonzero()[0].tolist()}; logits, probabilities, "
            f"surprisals or values of another tokenisation are no log-probs of these tokens."
        )
    if not num_known:
        raise ValueError(
            "screen must hold the log-probs of the sampled tokens, got 0 for every one of them; "
            "they were not recorded, or they stand in other columns than their tokens: "
            "screen[n, t] belongs to input_ids[n, t]."
        )
    if not num_beside:
        return
    for by, side in ((-1, "left"), (1, "right")):
        number = int(_shifted_rows(known, sampled, by).sum())
        if 2 * number > screen.shape[0]:
            raise ValueError(
                f"screen must have the log-prob of input_ids[n, t] at screen[n, t], got one that "
                f"stands a column to the {side} in {number} of {screen.shape[0]} rows: there is a "
                f"log-prob beside the completion, and 0 at its other end. Shift it back, e.g. with "
                f"torch.roll(screen, {1 if side == 'left' else -1}, 1)."
            )


def _shifted_rows(known: Tensor, sampled: Tensor, by: int) -> Tensor:
    """Return which rows have log-probs only where sampled tokens would stand `by` columns further.

    Zeros at an end of the completion alone would prove nothing, since a certain token (the last one
    of an answer, a forced first one) has a log-prob of exactly 0. Here there is also a log-prob
    beside the completion, and none anywhere else, as there would be if prompts had been recorded.
    """
    moved = torch.roll(sampled, by, 1)
    return (known & ~sampled).any(1) & ~(known & ~moved).any(1)


def lengths_of(batch: TokenRows, keep: Tensor) -> Tensor:
    """Return each row's tokens from the first real to the last kept one, on the CPU; one sync."""
    masks = torch.stack([batch.attention_mask.to(keep.device), keep]).cpu()
    if masks.numel() == 0:
        return torch.zeros(masks.shape[1], dtype=torch.int64)
    real, kept = masks.unbind()
    return kept.shape[1] - kept.flip(1).byte().argmax(1) - real.byte().argmax(1)
