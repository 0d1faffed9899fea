"""What a part of a study is, and what it gives back: runs.

A part knows nothing of files: it is given a `Context`, reports progress, and returns runs.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pandas as pd
import torch

from kondo.run_files import DamagedFileError, check_regular
from kondo_lab.training.record import Run

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 (a request granted, not an error)
    """Raised by a part that was told to stop before its end.

    Args:
        name: of the part.
        runs: made so far, for the analysis of the stopped study. A resumed one makes them again.
    """

    def __init__(self, name: str = "", runs: Sequence[Run] = ()):
        super().__init__(name)
        self.runs = runs


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
    run: Callable[[Context], Iterable[Run]]
    work: float = 1.0
    """Expected seconds, or any measure of work common to the study's parts: for the time left."""
