"""Records of single parts, which a run keeps until its last part is finished.

    out/parts/<part>.csv.gz             of a finished part
    out/parts/<part>.partial.csv.gz     of a part that was stopped

`records.csv.gz` holds them all, by the name of their part. So a run whose `parts` are not there,
such as a committed one, can go on too.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kondo.run_files import DamagedFileError
from kondo_lab.evidence import records
from kondo_lab.training.part import Part

RECORDS = "records.csv.gz"
PARTS = "parts"


def path_of(out: Path, part: str, *, partial: bool = False) -> Path:
    """Return where a part's records go: all of them, or those of a part that was stopped."""
    return out / PARTS / f"{part}{'.partial' if partial else ''}.csv.gz"


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
    return pd.concat([records.read(path_of(out, part)) for part in parts], ignore_index=True)


def all_files(out: Path, parts: Sequence[Part]) -> list[Path]:
    """Return where the records of all parts go, whole ones and those of stopped parts."""
    return [path_of(out, part.name, partial=kind) for part in parts for kind in (False, True)]


def gather(out: Path, files: Sequence[Path]) -> bool:
    """Write the records of the parts that are there as one table; return whether there are any."""
    tables: dict[str, pd.DataFrame] = {}
    for path in files:  # of a part that is finished and was stopped before, the whole one is first
        if path.exists() and _part_of(path) not in tables:
            tables[_part_of(path)] = _read(path)
    if tables:
        records.write(out / RECORDS, pd.concat(tables.values(), ignore_index=True))
    return bool(tables)


def _part_of(path: Path) -> str:
    return path.name.partition(".")[0]


def _read(path: Path) -> pd.DataFrame:
    """Return the records of a part's file, which are all of that part."""
    table = records.read(path)
    if others := sorted(set(table["part"]) - {_part_of(path)}):
        raise DamagedFileError(f"{path} is damaged (has records of {', '.join(others)}).")
    return table


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
    table = records.read(out / RECORDS)
    for name in sorted(set(missing) - set(table["part"])):
        raise DamagedFileError(
            f"{out / RECORDS} has no records of part {name!r}, which the manifest calls "
            f"finished. Put a good copy in its place, or run the study into another folder."
        )
    for name in missing:
        records.write(path_of(out, name), table[table["part"] == name])
