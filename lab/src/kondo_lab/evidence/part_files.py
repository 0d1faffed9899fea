"""Runs of single parts, which a run keeps until its last part is finished.

    out/parts/<part>.jsonl.gz           of a finished part
    out/parts/<part>.partial.jsonl.gz   of a part that was stopped

`runs.jsonl.gz` holds them all, by the name of their part. So a run whose `parts` are not there,
such as a committed one, can go on too.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kondo.run_files import DamagedFileError
from kondo_lab.evidence import records
from kondo_lab.training.part import Part
from kondo_lab.training.record import Run

RECORDS = "runs.jsonl.gz"
OLDER_RECORDS = "records.csv.gz"
"""Of older versions: a table instead of runs."""
PARTS = "parts"


def path_of(out: Path, part: str, *, partial: bool = False) -> Path:
    """Return where a part's records go: all of them, or those of a part that was stopped."""
    return out / PARTS / f"{part}{'.partial' if partial else ''}.jsonl.gz"


def finished(out: Path, parts: Sequence[Part]) -> list[str]:
    """Return the names of the parts whose records are complete, in the order of the study."""
    return [part.name for part in parts if path_of(out, part.name).exists()]


def table(out: Path, parts: Sequence[str]) -> pd.DataFrame:
    """Return the records of finished parts, for a part that goes on from them."""
    for part in parts:
        if not path_of(out, part).exists():
            raise ValueError(
                f"parts must be finished parts, got {part!r}, whose records are not at "
                f"{path_of(out, part)}; run it first."
            )
    return records.table([run for part in parts for run in records.read(path_of(out, part))])


def all_files(out: Path, parts: Sequence[Part]) -> list[Path]:
    """Return where the records of all parts go, whole ones and those of stopped parts."""
    return [path_of(out, part.name, partial=kind) for part in parts for kind in (False, True)]


def gather(out: Path, files: Sequence[Path]) -> bool:
    """Write the runs of the parts that are there into one file; return whether there are any."""
    runs: dict[str, list[Run]] = {}
    for path in files:  # of a part that is finished and was stopped before, the whole one is first
        if path.exists() and _part_of(path) not in runs:
            runs[_part_of(path)] = _read(path)
    if runs:
        records.write(out / RECORDS, [run for some in runs.values() for run in some])
    return bool(runs)


def _part_of(path: Path) -> str:
    return path.name.partition(".")[0]


def _read(path: Path) -> list[Run]:
    """Return the runs of a part's file, which are all of that part."""
    runs = records.read(path)
    if others := sorted({run.part for run in runs} - {_part_of(path)}):
        raise DamagedFileError(f"{path} is damaged (has records of {', '.join(others)}).")
    return runs


def check(files: Sequence[Path]) -> None:
    """Raise if records of finished parts are damaged: now, and not after hours of training."""
    for path in files:
        try:
            if path.exists():
                _read(path)
        except DamagedFileError as error:
            raise DamagedFileError(
                f"{error} Delete it; `kondo run` then takes that part from {RECORDS}, or makes it "
                f"again."
            ) from error


def restore(out: Path, names: Sequence[str]) -> None:
    """Write the files of finished parts that are missing, from the records of the whole run.

    Args:
        out: the run's folder.
        names: of the parts whose records are complete.

    Raises:
        DamagedFileError: the records cannot be read, or lack a part.
    """
    missing = [name for name in names if not path_of(out, name).exists()]
    if not missing or not (out / RECORDS).exists():
        return
    runs = records.read(out / RECORDS)
    for name in sorted(set(missing) - {run.part for run in runs}):
        raise DamagedFileError(
            f"{out / RECORDS} has no records of part {name!r}, which the manifest calls "
            f"finished. Put a good copy in its place, or run the study into another folder."
        )
    for name in missing:
        records.write(path_of(out, name), [run for run in runs if run.part == name])
