"""Files of a run: records, curves, headline and frontier. All or nothing: no file is ever half.

Records are JSON lines, one for each run, in the order that the part returns them:

    study, part, arm      text
    x                     what the part sweeps; null where it sweeps nothing
    k                     updates per rollout
    learning_rate         null where nothing is trained
    seed, task            a whole number, text
    device, commit        text; commit is null where the package is not under version control
    ...                   whatever else a measurement says of its run: model, role, ...
    curve                 rows: step, rollouts, passes, then the metrics that were measured there

Every line is valid JSON, which has neither NaN nor infinity: `null` is NaN, and the texts
"Infinity" and "-Infinity" are the infinities. A metric that was not measured is left out. Metrics
and x have 6 significant digits; numbers without a fraction are written without a point.
"""

import csv
import gzip
import hashlib
import json
import math
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from kondo.run_files import DamagedFileError, atomically, read_bytes
from kondo_lab.evidence.study import Claim, FrontierPoint, Headline
from kondo_lab.training.record import PLACE, Row, Run

T = TypeVar("T")

Line = dict[str, Any]
"""A run as its JSON line has it."""

KEYS = (
    *("study", "part", "arm", "x", "k", "learning_rate"),
    *("seed", "task", "device", "commit", "curve"),
)
"""Of every line."""
TEXTS = ("study", "part", "arm", "task", "device")
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
"""Columns of `table`."""

_INFINITY = "Infinity"
_INFINITIES = {_INFINITY: math.inf, f"-{_INFINITY}": -math.inf}
_LARGEST = 2**63 - 1
_EXACT = 10.0**15
"""Smaller whole numbers are exact as floats."""
_OWN = ("part", "arm", "x", "k", "learning_rate", "seed", "task")
"""Keys that are fields of a run; the others are its `about`."""


def checked(runs: Iterable[Run], *, part: str) -> list[Run]:
    """Return the runs of one part; those without a row are left out.

    Raises:
        ValueError: there is none; one is of another part; a count is not whole; or two stand at
            the same place, so that a mean over seeds would count a seed twice.
    """
    found = [run for run in runs if run.curve]
    if not found:
        raise ValueError(f"part {part!r} must give at least one run with a row, got none.")
    for run in found:
        for name, value in (("seed", run.seed), ("k", run.k)):
            _check_whole(name, value, part)
        for row in run.curve:
            for name in PLACE:
                _check_whole(name, row[name], part)
            if len(row) == len(PLACE):
                raise ValueError(
                    f"rows of part {part!r} must have a metric, got none of {run.arm!r} at step "
                    f"{row['step']}; leave the row out."
                )
    others = sorted({run.part for run in found} - {part})
    if others:
        raise ValueError(f"runs of part {part!r} must name it as their part, got {others}.")
    if repeated := _repeated(found):
        raise ValueError(
            f"runs of part {part!r} must differ in arm, x or seed, and rows of a run in step or "
            f"metric, got {repeated}."
        )
    return found


def _check_whole(name: str, value: float, part: str) -> None:
    if not math.isfinite(value) or int(value) != value:
        raise ValueError(
            f"{name} must be whole in every run of part {part!r}, got {value}; round it."
        )


def _repeated(runs: Sequence[Run]) -> str:
    """Return what stands at the place of another, and the first; empty for nothing."""
    places = Counter((run.part, run.arm, _x(run), run.seed) for run in runs)
    if twice := [place for place, count in places.items() if count > 1]:
        _, arm, x, seed = twice[0]
        return f"{len(twice)} repeated, first arm {arm}, x {x}, seed {seed}"
    for run in runs:
        for row, metric in _repeated_metrics(run):
            place = f"arm {run.arm}, x {_x(run)}, seed {run.seed}"
            return f"repeated rows, first {place}, step {row['step']}, metric {metric}"
    return ""


def _x(run: Run) -> str:
    return f"{run.x + 0.0:.6g}"  # -0 is 0


def _repeated_metrics(run: Run) -> list[tuple[Row, str]]:
    seen: set[tuple[int, str]] = set()
    for row in run.curve:
        for name in row.keys() - set(PLACE):
            if (row["step"], name) in seen:
                return [(row, name)]
            seen.add((row["step"], name))
    return []


def line(run: Run) -> Line:
    """Return a run as its JSON line has it."""
    own = {name: getattr(run, name) for name in _OWN} | {"x": _digits(run.x)}
    rate = run.learning_rate
    own["learning_rate"] = None if rate is None or math.isnan(rate) else float(rate)
    own |= {"k": int(run.k), "seed": int(run.seed), "curve": [_row(row) for row in run.curve]}
    everything = {**run.about, **own}
    first = [name for name in KEYS if name in everything and name != "curve"]
    others = [name for name in run.about if name not in KEYS]
    return {name: everything[name] for name in (*first, *others, "curve")}


def _row(row: Row) -> Row:
    return {name: int(value) if name in PLACE else _digits(value) for name, value in row.items()}


def _digits(value: float) -> float | str | None:
    """Return a number with 6 significant digits, as JSON has it; a whole one without a point."""
    value = float(value)
    if math.isnan(value):
        return None
    if math.isinf(value):
        return _INFINITY if value > 0 else f"-{_INFINITY}"
    short = float(f"{value:.6g}")
    negative_zero = short == 0 and math.copysign(1, short) < 0
    whole = short.is_integer() and abs(short) < _EXACT and not negative_zero
    return int(short) if whole else short


def write(path: Path, runs: Iterable[Run]) -> None:
    """Write runs, compressed. The same runs give the same bytes.

    Raises:
        ValueError: the `about` of a run lacks study, device or commit.
    """
    lines = [line(run) for run in runs]
    for each in lines:
        if missing := [name for name in KEYS if name not in each]:
            raise ValueError(f"about of every run must have {', '.join(missing)}, got none.")
    with atomically(path) as partial:
        partial.write_bytes(_packed(lines))


def add(path: Path, lines: Iterable[Line]) -> None:
    """Add lines to a file, which need not be there yet."""
    before = read_bytes(path) if path.exists() else b""
    with atomically(path) as partial:
        partial.write_bytes(before + _packed(lines))


def _packed(lines: Iterable[Line]) -> bytes:
    text = "".join(json.dumps(each, allow_nan=False) + "\n" for each in lines)
    return gzip.compress(text.encode(), mtime=0)


def lines(path: Path) -> list[Line]:
    """Return the JSON lines of a file; numbers of curves are floats, NaN and infinite ones too.

    Raises:
        DamagedFileError: it is no file, it or a line of it is cut, its checksum is wrong, or a
            line is no JSON object.
    """
    return _decoded_lines(path, list)


def read(path: Path) -> list[Run]:
    """Return the runs of a file.

    Raises:
        DamagedFileError: as of `lines`; or it has no runs, a line lacks a key or has a value of a
            wrong kind, or two runs, or two values of one, stand at the same place.
    """
    return _decoded_lines(path, _runs)


def _decoded_lines(path: Path, made: Callable[[list[Line]], list[T]]) -> list[T]:
    """Return what `made` makes of a file's lines; whatever is wrong with them is damage."""
    content = read_bytes(path)
    try:
        text = gzip.decompress(content).decode()
        if not text.endswith("\n") and text:
            raise ValueError("its last line is cut")
        found = []
        for number, each in enumerate(text.split("\n")[:-1], start=1):
            found.append(_parsed(each, number))
        return made(found)
    except (
        *(gzip.BadGzipFile, zlib.error, EOFError, RecursionError),
        *(ArithmeticError, ValueError),
    ) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFileError(f"{path} is damaged ({reason}).") from error


def _parsed(text: str, number: int) -> Line:
    """Return a line as a JSON object, with the numbers of its curve decoded."""
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        if not isinstance(found, dict) or not isinstance(found.get("curve"), list):
            raise ValueError("is no object with a curve")
        for row in found["curve"]:
            if not isinstance(row, dict):
                raise ValueError(f"has {reprlib.repr(row)} in its curve; expected an object")
            for name, value in row.items():
                row[name] = _decoded(value)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"line {number}: {error}") from error
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"has {reprlib.repr(twice)} twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"has {text}, which is not JSON")


def _decoded(value: Any) -> Any:
    """Return a number of a curve; other values as they are."""
    if value is None:
        return math.nan
    if isinstance(value, float) and math.isinf(value):
        raise ValueError("has a number that is too large")
    return _INFINITIES.get(value, value) if isinstance(value, str) else value


def _runs(found: Sequence[Line]) -> list[Run]:
    """Return lines as runs, checked."""
    runs = []
    for number, each in enumerate(found, start=1):
        try:
            runs.append(_run(each))
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f"line {number}: {error}") from error
    if not runs:
        raise ValueError("has no records")
    if repeated := _repeated(runs):  # else a mean over seeds would count a seed twice
        raise ValueError(f"has {repeated}")
    return runs


def _run(each: Line) -> Run:
    if missing := [name for name in KEYS if name not in each]:
        raise ValueError(f"lacks {', '.join(missing)}")
    for name in TEXTS:
        _check_text(name, each[name])
    if each["commit"] is not None:
        _check_text("commit", each["commit"])
    for name in ("seed", "k"):
        _check_count(name, each[name])
    x, rate = _decoded(each["x"]), each["learning_rate"]
    _check_number("x", x)
    _check_number("learning_rate", 0.0 if rate is None else rate)
    if not each["curve"]:
        raise ValueError("has a curve without rows")
    for row in each["curve"]:
        _check_row(row)
    own = {name: each[name] for name in _OWN} | {"x": float(x)}
    about = {name: value for name, value in each.items() if name not in (*_OWN, "curve")}
    return Run(**own, curve=each["curve"], about=about)


def _check_row(row: Row) -> None:
    if missing := [name for name in PLACE if name not in row]:
        raise ValueError(f"has a row that lacks {', '.join(missing)}")
    if len(row) == len(PLACE):
        raise ValueError(f"has a row without a metric, at step {reprlib.repr(row['step'])}")
    for name, value in row.items():
        if name in PLACE:
            _check_count(name, value)
        else:
            _check_text("the name of a metric", name)
            _check_number(name, value)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a text without NUL bytes")
    value.encode()  # half of a surrogate pair is no text either


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or abs(value) > _LARGEST:  # True is an int too
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a whole number")


def _check_number(name: str, value: Any) -> None:
    if type(value) not in (int, float):
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a number")
    float(value)  # raises where it is too large


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's records, however they are compressed."""
    return hashlib.sha256(gzip.decompress(read_bytes(path))).hexdigest()


def table(runs: Iterable[Run]) -> pd.DataFrame:
    """Return runs as the table that analyses read: a line for each number that was measured.

    Its columns are part, series (the arm), setting (x), seed, step, forward (rollouts), backward
    (passes), metric and value. Runs keep their order, but those of one arm at one x that follow
    one another are told step by step, as a population measures them: the last digit of a sum
    depends on the order.
    """
    found = []
    for _, some in groupby(runs, key=lambda run: (run.part, run.arm, _x(run))):
        several = [(run, row) for run in some for row in run.curve]
        several.sort(key=lambda pair: pair[1]["step"])
        found += [
            (
                run.part,
                run.arm,
                run.x,
                run.seed,
                *(row[name] for name in PLACE),
                metric,
                row[metric],
            )
            for run, row in several
            for metric in row
            if metric not in PLACE
        ]
    return pd.DataFrame(found, columns=list(DTYPES)).astype(DTYPES)


def write_table(path: Path, made: pd.DataFrame) -> None:
    """Write a table, compressed, floats with 6 digits. The same table gives the same bytes."""
    text = made.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    with atomically(path) as partial:
        partial.write_bytes(gzip.compress(text.encode(), mtime=0))


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
