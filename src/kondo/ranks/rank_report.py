"""What a step of many ranks did: the engine's report, with what only ranks have."""

import dataclasses

from kondo.engine.report import Report
from kondo.stage_clock import STAGES

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
