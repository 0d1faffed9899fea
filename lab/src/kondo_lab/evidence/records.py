"""Files of a run: records, curves, headline and frontier. All or nothing: no file is ever half."""

import csv
import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kondo.run_files import DamagedFileError, atomically, read_bytes
from kondo_lab.evidence.study import Claim, FrontierPoint, Headline
from kondo_lab.training.part import Record

DTYPES = {
    "part": str,
    "series": str,
    "setting": "float64",
    "seed": "int64",
    "step": "int64",
    "forward": "int64",
    "backward": "int64",
    "metric": str,
    "value": "float64",
}
_FLOATS = [name for name, dtype in DTYPES.items() if dtype == "float64"]
_INTEGERS = [name for name, dtype in DTYPES.items() if dtype == "int64"]
_KEY = ["series", "setting", "seed", "step", "metric"]


def frame(records: Iterable[Record], *, part: str) -> pd.DataFrame:
    """Return the records of one part as a table, one column per field of Record.

    Raises:
        ValueError: there is none; one is of another part; a count is not whole; or two stand at
            the same place, so that a mean over seeds would count a seed twice.
    """
    given = pd.DataFrame(list(records), columns=list(Record._fields))
    if given.empty:
        raise ValueError(f"part {part!r} must give at least one record, got none.")
    table = given.astype(DTYPES)
    broken = [name for name in _INTEGERS if (table[name] != given[name]).any()]
    if broken:
        raise ValueError(f"{broken[0]} must be whole in every record of part {part!r}; round it.")
    others = sorted(set(table["part"]) - {part})
    if others:
        raise ValueError(f"records of part {part!r} must name it as their part, got {others}.")
    if repeated := _repeated(table):
        raise ValueError(
            f"records of part {part!r} must differ in series, setting, seed, step or metric, got "
            f"{repeated}."
        )
    return table


def _repeated(table: pd.DataFrame) -> str:
    """Return how many records stand at the place of another, and the first; empty for none."""
    twice = table[table.duplicated(["part", *_KEY])]
    if twice.empty:
        return ""
    place = ", ".join(f"{name} {twice.iloc[0][name]}" for name in _KEY)
    return f"{len(twice)} repeated, first {place}"


def write(path: Path, table: pd.DataFrame) -> None:
    """Write a table, compressed, floats with 6 digits. The same table gives the same bytes."""
    text = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    with atomically(path) as partial:
        partial.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> pd.DataFrame:
    """Return the records of a file as a table, one column per field of Record.

    Raises:
        DamagedFileError: it is no file, it or a line of it is cut, its checksum is wrong, it is
            no table of records, it has none, or two of them stand at the same place.
    """
    content = read_bytes(path)
    try:
        text = gzip.decompress(content)
        with np.errstate(invalid="raise"):  # a whole number that is none, or too large
            table = pd.read_csv(
                io.BytesIO(text),
                dtype=DTYPES,
                keep_default_na=False,  # a series may be called "None"
                na_values={name: ["", "nan"] for name in _FLOATS},
            )
        if list(table) != list(DTYPES):
            raise ValueError(f"has columns {', '.join(map(str, table))}")
        if table.empty:
            raise ValueError("has no records")
        if _is_ragged(text, table):
            raise ValueError("has NUL bytes, or lines that are cut or too long")
        if repeated := _repeated(table):  # else a mean over seeds would count a seed twice
            raise ValueError(f"has {repeated}")
    except (gzip.BadGzipFile, zlib.error, EOFError, ArithmeticError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFileError(f"{path} is damaged ({reason}).") from error
    return table


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's records, however they are compressed."""
    return hashlib.sha256(gzip.decompress(read_bytes(path))).hexdigest()


def _is_ragged(text: bytes, table: pd.DataFrame) -> bool:
    """Return whether lines have too few or too many cells; pandas fills or moves them unasked."""
    within = sum(
        name.count(",") * count
        for column, dtype in DTYPES.items()
        if dtype is str
        for name, count in table[column].value_counts().items()
    )
    commas = (len(DTYPES) - 1) * (len(table) + 1) + within
    return b"\0" in text or (text.count(b","), text.count(b"\n")) != (commas, len(table) + 1)


def write_rows(
    path: Path, made: type[Headline | FrontierPoint | Claim], rows: Iterable[Any]
) -> None:
    """Write headline.csv, frontier.csv or claims.csv; what there is none of stays empty."""
    with atomically(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(made._fields)
        writer.writerows([_cell(value) for value in row] for row in rows)


def _cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
