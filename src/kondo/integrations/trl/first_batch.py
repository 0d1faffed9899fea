"""Try TRL's forward with `kondo.check`, on a few rows of the first batch.

    rows of tokens -> the forward that TRL trains with -> log-probs      tried like any policy
    the same rows, cut after half of their tokens      -> the same ones  no token sees later ones

Every process tries rows of its own, and all make the same number of forwards.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

import kondo
from kondo.engine.findings import Precision
from kondo.engine.policy import Policy
from kondo.engine.untraced import without_trace
from kondo.integrations.trl.plan import WHOLE_MODELS
from kondo.lm.rows import TokenRows

_logger = logging.getLogger(__name__)

Run = Callable[[nn.Module, TokenRows], Tensor]
"""(model, rows) -> log-probs [n, S]: 0 or anything else where `completion_mask` is False."""


class Forward(nn.Module):
    """A trainer's forward as a module: of all that a trainer holds, only its model is tried."""

    def __init__(self, model: nn.Module, run: Run):
        super().__init__()
        self.model, self._run = model, run

    def forward(self, rows: TokenRows) -> Tensor:
        """Return log-probs, [n, S]."""
        return self._run(self.model, rows)


class TrainedForward(Policy):
    """TRL's forward as `kondo.check` sees it.

    Args:
        log_prob: the forward.
        most: rows that it can hold with a graph.
    """

    unit = "sequence"

    def __init__(self, log_prob: Forward, most: int):
        super().__init__(log_prob)
        self._forward, self._most = log_prob, most

    def mask(self, batch: Any) -> Tensor:
        """Return the completion mask."""
        mask: Tensor = batch.completion_mask
        return mask

    def screen_calls(self, batch: Any, size: int, chunk: int | None) -> int:
        """Return how many forwards these rows take."""
        return -(-size // self._most)

    def faults(self, batch: Any) -> Iterator[str]:
        """Yield what is wrong with a model that looks ahead: gated rows are cut after the last kept
        token."""
        counted = batch.completion_mask
        before = counted.sum(0).cumsum(0)
        end = int((2 * before >= before[-1]).int().argmax()) + 1
        names = ("input_ids", "attention_mask", "completion_mask")
        cut = TokenRows(**{name: getattr(batch, name)[:, :end] for name in names})
        whole, again, alone = (
            without_trace(partial(self.log_prob, rows), self.log_prob)
            for rows in (batch, batch, cut)
        )
        precision = Precision(whole, list(self._forward.parameters()))
        random = precision.apart(again, whole, counted) is not None
        apart = precision.apart(alone, whole[:, :end], counted[:, :end])
        if apart is not None and not random:
            yield (
                f"Log-probs of a token depend on later tokens: they change by {apart:.2g} when the "
                f"row is cut after it, as a gated step cuts rows after their last kept token. Use "
                f"a causal model: is_decoder=True, no attention in both directions."
            )


def check_forward(trainer: Any, run: Run, rows: TokenRows, *, most: int, unit: Any) -> float | None:
    """Try the forward of a trainer; return the seconds, None where it cannot be tried.

    Args:
        trainer: of TRL.
        run: its forward.
        rows: of this process, N >= 1, each with a token that counts.
        most: rows that one forward can hold with a graph.
        unit: what the trainer gates.

    Raises:
        kondo.CheckError: what makes the model one that rows cannot be dropped from.
    """
    args, accelerator = trainer.args, trainer.accelerator
    kind = accelerator.distributed_type.value
    if kind not in WHOLE_MODELS:
        _logger.warning(
            "kondo.check is left out: with %s parameters are not whole outside of TRL's own step. "
            "Try the model on one process.",
            kind,
        )
        return None
    ranks = accelerator.num_processes > 1
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(accelerator.autocast())  # else rounding is judged as float32's
        if args.torch_compile:  # graphs of a few rows would serve nothing else
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            stack.enter_context(
                disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs)
            )
        try:
            kondo.check(
                TrainedForward(Forward(trainer.model, run), most),
                rows,
                torch.ones(rows.input_ids.shape[0], device=rows.device),
                unit=unit,
                group="world" if ranks else None,
                options=kondo.Options(all_reduce=True if ranks else None),
            )
        except kondo.CheckError as error:
            error.add_note("kondo_check=False trains without this check.")
            raise
    return time.perf_counter() - start
