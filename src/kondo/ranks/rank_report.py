"""What a step of many ranks did: the engine's report and clock, with what only ranks have."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kondo.engine.report import STAGES, Report, StageClock

RANK_STAGES = (*STAGES, "coordinate", "wait", "reduce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport(Report):
    """The outcome of `kondo.backward(..., group=...)` on one rank.

    What `kondo.Report` has is that of all ranks together, as one process with all rows would report
    it, and the same on every rank; but `calls`, which every rank makes alike, and `seconds`, this
    rank's own. Beside the engine's stages these are: "coordinate" (gathering values, assigning and
    moving rows), "wait" (agreeing, which includes waiting for slower ranks) and "reduce" (our own
    sum of gradients).
    """

    ranks: int
    """Ranks of the group."""
    rank_kept: int
    """Units kept among this rank's own, wherever they were trained."""
    rank_rows_trained: int
    """Rows this rank trained, wherever they came from."""
    rank_tokens_trained: int
    """Tokens this rank trained; see `tokens_trained`."""
    rank_loss: float
    """This rank's part of the loss; the parts add up to `loss`."""
    rank_fillers: int
    """Of its calls, those this rank made with a row of weight zero, only to keep step."""
    rows_moved: int
    """Rows trained on another rank than their own."""
    bytes_moved: int
    """Bytes of those rows."""


class RankClock(StageClock):
    """Adds up seconds per stage; a stage inside another is counted once, as the inner one."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._open: list[str] = []
        self._spent = {name: 0.0 for stage in RANK_STAGES for name in (stage, _inside(stage))}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the stage `name`, and take it from the one around."""
        names = [name, *(_inside(outer) for outer in self._open[-1:])]
        self._open.append(name)
        try:
            with super().stage(names[0]):
                if len(names) == 1:
                    yield
                else:
                    with super().stage(names[1]):
                        yield
        finally:
            self._open.pop()

    def seconds(self) -> dict[str, float]:
        """Return seconds per stage; on CUDA this is a sync point."""
        spent = super().seconds()
        return {name: spent[name] - spent[_inside(name)] for name in RANK_STAGES}


def _inside(stage: str) -> str:
    return f"inside {stage}"
