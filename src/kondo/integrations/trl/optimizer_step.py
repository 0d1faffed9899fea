"""One optimizer step: what it paid for, and how one that kept nothing is left out."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kondo.stage_clock import StageClock

COUNTED = ("tokens_seen", "rows_seen", "tokens_trained", "rows_trained")


@dataclasses.dataclass
class Window:
    """What happened since the last optimizer step."""

    clock: StageClock
    trained: bool = False  # whether any micro-step ran a forward and backward
    counts: Tensor | int = 0  # [4]: see `COUNTED`; of this process, prompts included


@contextlib.contextmanager
def left_out_step(optimizer: Any) -> Iterator[None]:
    """Make the next `optimizer.step()` do nothing and count as skipped, as an overflow would.

    The Trainer then leaves the learning-rate schedule alone too. The end of the context takes both
    back, whether the step came or an error ended the run before it.
    """
    step = optimizer.step  # a learning-rate schedule has wrapped it

    def skip(closure: Any = None) -> None:
        optimizer.step = step
        optimizer._is_overflow = True

    optimizer.step = skip
    try:
        yield
    finally:
        if optimizer.step is skip:
            optimizer.step = step
        optimizer._is_overflow = False
