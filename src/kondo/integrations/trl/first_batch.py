"""Try TRL's forward with `kondo.check`, on a few rows of the first batch.

What is tried is `kondo.lm.trained_forward`, with the forward that TRL trains with. Every
process tries rows of its own, and all make the same number of forwards.
"""

import contextlib
import logging
import time
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing

import kondo
from kondo.integrations.trl.plan import WHOLE_MODELS
from kondo.lm.rows import TokenRows
from kondo.lm.trained_forward import Forward, Run, TrainedForward

_logger = logging.getLogger(__name__)


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
