"""What a part of a study is, and what it gives back: records.

A part knows nothing of files: it is given a `Context`, reports progress, and returns records.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pandas as pd
import torch

from kondo.run_files import DamagedFileError, check_regular

T = TypeVar("T")


class Record(NamedTuple):
    """One number of one member. A table of records is all that analysis gets."""

    part: str
    """Name of the part that made it."""
    series: str
    """The line in the figure, as in the papers' legends: PG, DG, DG-K 3%, ..."""
    setting: float
    """What the part sweeps (rate, noise, length, ...); NaN where it sweeps nothing."""
    seed: int
    step: int
    """Updates made; 0 where there is no training."""
    forward: int
    """Samples seen so far by this member."""
    backward: int
    """Samples a backward pass was paid for so far."""
    metric: str
    """online error, test error, cosine, seconds, ..."""
    value: float


class Stopped(Exception):  # noqa: N818 (a request granted, not an error)
    """Raised by a part that was told to stop before its end.

    Args:
        name: of the part.
        records: made so far, for the analysis of the stopped run. A resumed run makes them again.
    """

    def __init__(self, name: str = "", records: Sequence[Record] = ()):
        super().__init__(name)
        self.records = records


class DamagedCheckpointError(DamagedFileError):
    """A checkpoint cannot be read: the runner sets it aside and starts the part anew."""


def _alone(parts: Sequence[str]) -> pd.DataFrame:
    raise ValueError(f"parts must be finished parts, got {', '.join(map(repr, parts))}; run them.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What the runner gives to a part."""

    device: torch.device
    progress: Callable[[float, str], None]
    """(share of this part done, in [0, 1]; a short note such as "error 3.1%")."""
    stopped: Callable[[], bool]
    """Whether the user asked to stop: save to `checkpoint`, then raise Stopped."""
    checkpoint: Path
    """A file of this part alone. It is there when the part is resumed, deleted when it ends."""
    finished: Callable[[Sequence[str]], pd.DataFrame] = _alone
    """Names of finished parts of the same run -> their records, by the fields of Record."""

    def resume(self, read: Callable[[Path], T]) -> T | None:
        """Return what `read` makes of the checkpoint; None if there is none.

        Raises:
            DamagedCheckpointError: `read` fails because of what the file holds.
        """
        if not self.checkpoint.exists():
            return None
        try:
            check_regular(self.checkpoint)
            return read(self.checkpoint)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise  # says nothing of what the file holds
        except DamagedFileError as error:
            raise DamagedCheckpointError(str(error)) from error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise DamagedCheckpointError(f"{self.checkpoint} is damaged ({reason}).") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a study that is run, saved and resumed as one."""

    name: str
    """Lower-case letters, digits and hyphens: it names a file."""
    run: Callable[[Context], Iterable[Record]]
    work: float = 1.0
    """Expected seconds, or any measure of work common to the study's parts: for the time left."""
