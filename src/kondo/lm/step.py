"""The gated step for language models: `kondo.backward` with rows of tokens, cut and packed."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kondo.core import losses
from kondo.core.delight import ROUNDING, delight
from kondo.engine import step
from kondo.engine.differentiate import BackwardFn, Loss
from kondo.engine.report import Report
from kondo.engine.screen import LogProb
from kondo.engine.select import GateLike, Priority
from kondo.lm.model import CausalLM, check_rows
from kondo.lm.rows import TokenRows


def backward(
    lm: CausalLM,
    rows: TokenRows,
    advantages: Tensor,
    *,
    gate: GateLike,
    unit: Literal["sequence", "token"] = "sequence",
    screen: Tensor | LogProb | None = None,
    loss: Loss = losses.pg,
    denominator: Literal["full", "kept"] | float = "full",
    loss_inputs: dict[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
    priority: Priority = delight,
    screen_rows: Literal["all", "promising"] | None = None,
    backward_fn: BackwardFn = Tensor.backward,
) -> Report:
    """Add to `.grad` the gradient of the gated loss, computing only what the kept tokens need.

    L = 1/D * sum over kept tokens of  w * loss(log pi(token | tokens before it), U)

    Equal to the gradient of the same loss on the whole padded batch. Computed are the rows with a
    kept token, each up to its last kept token, and the head at kept tokens only.

    Args:
        lm: the policy.
        rows: N rows of S tokens.
        advantages: [N] or [N, S] float, not differentiated; centred only.
        gate: `kondo.Gate`, or any callable (delight, mask, generator) -> `kondo.Choice`.
        unit: "sequence" keeps or skips whole completions; "token" single tokens, which pay for
            the tokens before them.
        screen: None for a no-grad forward, unless the priority needs no log-probs (see
            `kondo.signals`); [N, S] log-probs that already exist (the rollout's); or a draft,
            rows -> [N, S].
        loss: (log_probs, advantages, **loss_inputs) -> one value per token. It is given the kept
            tokens of a pack in one dimension, [K].
        denominator: see `kondo.backward`.
        loss_inputs: further tensors of the loss by name, each [N] or [N, S].
        generator: for the gate's draws.
        priority: what the gate looks at, delight by default. For `kondo.VarianceGate` it is
            `kondo.signals.sequence_advantage`.
        screen_rows: "promising" makes no screening forward for rows that cannot be kept; see
            `kondo.backward`. By default so, unless there is another priority.
        backward_fn: how to differentiate a loss; see `kondo.backward`.

    Returns:
        A `Report`; tokens_trained counts what entered the forward with a graph: prompts, prefixes
        and padding included.

    Raises:
        ValueError: for every argument that cannot be right, naming it.

    Example:
        >>> import kondo, torch
        >>> from kondo.lm import CausalLM, TokenRows, backward
        >>> class Bigram(torch.nn.Embedding):
        ...     def forward(self, input_ids, attention_mask, position_ids):
        ...         return super().forward(input_ids)
        >>> lm = CausalLM(Bigram(10, 4), head=torch.nn.Linear(4, 10))
        >>> rows = TokenRows.join(
        ...     torch.randint(10, (100, 3)), torch.ones(100, 3, dtype=torch.bool),
        ...     torch.randint(10, (100, 5)), torch.ones(100, 5, dtype=torch.bool),
        ... )
        >>> report = backward(lm, rows, torch.randn(100), gate=kondo.Gate(rate=0.03))
        >>> report.rows_trained, report.tokens_seen, report.tokens_trained
        (3, 500, 24)
    """
    check_rows(rows).check(lm.vocab_size)
    _check_unit(unit)
    _check_per_token("advantages", advantages, rows)
    for name, value in (loss_inputs or {}).items():
        _check_per_token(name, value, rows)
    if isinstance(screen, Tensor):
        _check_screen(screen, rows)
    elif callable(screen):
        screen = partial(_checked_draft, screen)
    return step.backward(
        lm.log_prob,
        rows,
        advantages,
        gate=gate,
        mask=rows.completion_mask,
        screen=screen,
        loss=loss,
        denominator=denominator,
        unit=unit,
        generator=generator,
        loss_inputs=loss_inputs,
        priority=priority,
        screen_rows=screen_rows or ("promising" if priority is delight else "all"),
        backward_fn=backward_fn,
        compact=lm.compact,
    )


def _check_unit(unit: str) -> None:
    if unit not in ("sequence", "token"):
        raise ValueError(
            f'unit must be "sequence" or "token", got {unit!r}; a completion is a "sequence".'
        )


def _check_per_token(name: str, value: Tensor, rows: TokenRows) -> None:
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


def _checked_draft(draft: LogProb, rows: TokenRows) -> Tensor:
    """Return what the draft makes of these rows, which may be some of the batch's."""
    log_probs = draft(rows)
    if isinstance(log_probs, Tensor):  # anything else is the engine's to refuse
        _check_screen(log_probs, rows)
    return log_probs


def _check_screen(screen: Tensor, rows: TokenRows) -> None:
    """Refuse log-probs that no policy can have given to these tokens.

    One device sync; more where there are log-probs beside the completions, as of prompts.
    """
    _check_per_token("screen", screen, rows)
    if screen.shape != rows.input_ids.shape:
        raise ValueError(
            f"screen must have one log-prob per token, {list(rows.input_ids.shape)}, got "
            f"{list(screen.shape)}; sums over sequences do not say which token was surprising."
        )
    sampled, known = rows.completion_mask.to(screen.device), screen != 0
    most = ROUNDING.get(screen.dtype, 1e-2)
    above, beside = sampled & (screen > most), known > sampled
    num_above, num_known, num_beside = torch.stack(
        [where.sum() for where in (above, sampled & known, beside)]
    ).tolist()
    if num_above:
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
