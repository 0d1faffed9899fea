"""What a report is made from: result folders, read and checked."""

import csv
import dataclasses
import io
import json
import math
import os
import re
import reprlib
import stat
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from kondo.run_files import DamagedFileError, read_bytes
from kondo_lab.evidence.agreement import Against, Verdict
from kondo_lab.evidence.study import Claim, ClaimVerdict, FrontierPoint, Headline, Size

MANIFEST, HEADLINE, FRONTIER = "manifest.json", "headline.csv", "frontier.csv"
CLAIMS = "claims.csv"
CURVES = "curves.csv.gz"
NEEDED = (MANIFEST, HEADLINE, CURVES)
KEYS = (
    "study",
    "version",
    "title",
    "paper",
    "claim",
    "differences",
    "findings",
    "size",
    "command",
    "seconds",
    "settings",
    "environment",
    "interrupted",
)

MEND = "Put a good copy in its place, or run the study again into another folder."
"""What to do about a damaged file of a run."""
_LEVELS = 50
"""How deep a JSON file may be nested: far more than one of ours."""


class FolderError(ValueError):
    """The folder is not one to run in, or to read."""


def _whole(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most  # True is an int too


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _texts(value: Any, pattern: str = r"(?s).*") -> bool:
    """Return whether the value is a list of texts that match."""
    return isinstance(value, list) and all(
        isinstance(own, str) and re.fullmatch(pattern, own) for own in value
    )


# Key of a manifest -> (what it must be, in words; whether a value is that). Not all are needed.
_TEXT = ("a text", lambda value: isinstance(value, str))
_TEXTS = ("a list of texts", _texts)
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_COUNT = ("a whole number >= 0", _whole)
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("study", "title", "paper", "claim", "command", "device", "records_sha256"), _TEXT
    ),
    **dict.fromkeys(("differences", "findings"), _TEXTS),
    **dict.fromkeys(("settings", "environment"), _OBJECT),
    **dict.fromkeys(("finished", "interrupted"), _FLAG),
    **dict.fromkeys(("version", "resumed", "first_seed"), _COUNT),
    "size": ("small or full", lambda value: value in get_args(Size)),
    "seconds": ("a number", _number),
    "seconds_by_part": (
        "an object of numbers",
        lambda value: isinstance(value, dict) and all(map(_number, value.values())),
    ),
    "num_seeds": (
        "a whole number from 1 to 1000000, or null",
        lambda value: value is None or _whole(value, 1, 1_000_000),
    ),
    "seeds": ("a list of seeds", lambda value: isinstance(value, list) and all(map(_whole, value))),
    "commits": (
        "a list of commits",
        lambda value: isinstance(value, list) and _texts([own for own in value if own is not None]),
    ),
    "captions": (
        "an object of texts",
        lambda value: isinstance(value, dict) and _texts(list(value.values())),
    ),
    # Names of files in the folder: stale figures are deleted, lost parts are written.
    "figures": ("names of PNG files", lambda value: _texts(value, r"[^/\0]+\.png")),
    "finished_parts": ("names of parts", lambda value: _texts(value, r"[a-z0-9-]+")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One result folder."""

    name: str
    """Of the folder."""
    manifest: dict[str, Any]
    headline: list[Headline]
    frontier: list[FrontierPoint]
    claims: list[Claim]
    """None where an older version wrote the folder; `kondo plot` writes them."""
    figures: list[Path]
    """In the order they are shown: those of a paper by its numbers, others as the study does."""
    older: str = ""
    """Which older or other program wrote the folder; empty for folders of `kondo run`."""

    @property
    def captions(self) -> dict[str, str]:
        """Return name of a figure without suffix -> what it shows; older folders have none."""
        return dict(self.manifest.get("captions", {}))

    @property
    def small(self) -> bool:
        """Whether the run only showed that it works."""
        return bool(self.manifest["size"] == "small")


def read(folder: Path) -> Result:
    """Return what `folder` holds.

    Raises:
        FolderError: it is not a result folder.
        DamagedFileError: a file in it is not what `kondo run` writes.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FolderError(
            f"folders: {folder} {what}; expected a folder that `kondo run` wrote. Leave it out or "
            "name the folder of a run."
        )
    missing = [name for name in NEEDED if not os.path.lexists(folder / name)]
    if missing:
        raise FolderError(
            f"folders: {folder} is not a result folder, it lacks {', '.join(missing)}; expected "
            "a folder that `kondo run` wrote. Leave it out or run the study."
        )
    figures = sorted(folder.glob("*.png"), key=_natural)
    # Only studies that train to a target have a frontier; older folders have no claims.
    frontier, claims = (
        [folder / name] if os.path.lexists(folder / name) else [] for name in (FRONTIER, CLAIMS)
    )
    check_files([*(folder / name for name in NEEDED), *frontier, *claims, *figures])
    manifest = read_json(folder / MANIFEST)
    check_manifest(folder / MANIFEST, manifest, KEYS)
    return Result(
        name=folder.resolve().name,
        manifest=manifest,
        headline=[_row(Headline, where, line) for where, line in _lines(folder / HEADLINE)],
        frontier=[_row(FrontierPoint, *each) for path in frontier for each in _lines(path)],
        claims=[_row(Claim, *each) for path in claims for each in _lines(path)],
        figures=_in_order(figures, manifest.get("figures", [])),
    )


def check_files(paths: Iterable[Path]) -> None:
    """Raise a DamagedFileError unless all are regular files, and every *.png a whole image."""
    for path in paths:
        _check_regular(path)
        if path.suffix == ".png":
            _check_png(path)


def _check_regular(path: Path) -> None:
    """Raise if the file is a link, a pipe or a folder: a page shows what the folder itself holds.

    A link in a folder from elsewhere could put any file of this machine into a page that is shared.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise DamagedFileError(
            f"folders: {path} is a link or no file; expected a regular file that `kondo run` "
            "wrote. Remove it, or replace a link by a copy of its file."
        )


def _check_png(path: Path) -> None:
    """Raise unless the file is a whole PNG image: every chunk is there, with its checksum."""
    image = path.read_bytes()
    at, whole = 8, image[:8] == b"\x89PNG\r\n\x1a\n" and image[12:16] == b"IHDR"
    kind = b""
    while whole and kind != b"IEND":
        size = int.from_bytes(image[at : at + 4], "big")
        kind, body = image[at + 4 : at + 8], image[at + 4 : at + 8 + size]
        checksum = image[at + 8 + size : at + 12 + size]
        whole = len(checksum) == 4 and zlib.crc32(body) == int.from_bytes(checksum, "big")
        at += 12 + size
    if not whole:
        raise DamagedFileError(
            f"folders: {path} is not a whole PNG image. Delete it, then draw it again with "
            f"`kondo plot STUDY --from {path.parent}`."
        )


def _in_order(figures: list[Path], listed: Any) -> list[Path]:
    """Return fig1, fig2, ... first; then the others in the order that the manifest lists them."""
    names = [str(name) for name in listed] if isinstance(listed, list) else []

    def place(path: Path) -> int:
        if re.match(r"(fig|prop)\d", path.stem):
            return -1
        return names.index(path.name) if path.name in names else len(names)

    return sorted(figures, key=place)  # keeps the natural order of those with equal places


def _natural(path: Path) -> list[tuple[int, str]]:
    """Order fig2 before fig10."""
    pieces = re.findall(r"\d+|\D+", path.stem)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


def read_text(path: Path) -> str:
    """Return a file as text.

    Raises:
        DamagedFileError: it is no file, no UTF-8, or has NUL bytes.
    """
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path} is damaged ({error}). {MEND}") from error
    if "\0" in text:
        raise DamagedFileError(f"{path} is damaged (has NUL bytes). {MEND}")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return a file that holds a JSON object.

    Raises:
        DamagedFileError: it holds none, or one that is nested too deep to be ours.
    """
    try:
        content = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged (not JSON: {error}). {MEND}") from error
    if not isinstance(content, dict) or _is_deeper(content, _LEVELS):
        raise DamagedFileError(
            f"{path} is damaged (not a JSON object of at most {_LEVELS} levels). {MEND}"
        )
    return content


def _is_deeper(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_deeper(inner, levels - 1) for inner in inside)


def check_manifest(path: Path, manifest: dict[str, Any], needed: Sequence[str]) -> None:
    """Raise a DamagedFileError unless a manifest has the keys, and every value is of its kind."""
    if missing := [key for key in needed if key not in manifest]:
        raise DamagedFileError(f"{path} is damaged (lacks {', '.join(missing)}). {MEND}")
    for key, (what, fits) in _KINDS.items():
        if key in manifest and not fits(manifest[key]):
            found = reprlib.repr(manifest[key])
            raise DamagedFileError(f"{path} is damaged ({key} is {found}; expected {what}). {MEND}")


_COLUMNS = {
    HEADLINE: Headline._fields,
    FRONTIER: FrontierPoint._fields,
    CLAIMS: Claim._fields,
}
_COUNTS, _OPTIONAL = ("seeds", "reached"), ("expected", "se")
_NUMBERS = ("rate", "forward", "backward", "final_error", "ours", *_COUNTS, *_OPTIONAL)


def csv_lines(path: Path) -> tuple[tuple[str, ...], list[tuple[str, dict[str, str]]]]:
    """Return the columns of a table, and (where, column -> text) for each line.

    Raises:
        DamagedFileError: it is no CSV, or its last line is cut.
    """
    text = read_text(path)
    if text and not text.endswith("\n"):
        raise DamagedFileError(f"{path} is damaged (its last line is cut). {MEND}")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = tuple(reader.fieldnames or ())  # reads the first line, if there is one
        return columns, [(f"{path}, line {reader.line_num}", line) for line in reader]
    except csv.Error as error:
        raise DamagedFileError(f"folders: {path} is no CSV ({error}). {MEND}") from error


def _lines(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Return (where, column -> text) for each line of a table of `kondo run`."""
    found, lines = csv_lines(path)
    columns = _COLUMNS[path.name]
    if found != columns:
        raise DamagedFileError(
            f"folders: {path} has columns {', '.join(found) or '(none)'}; "
            f"expected {', '.join(columns)}. Run the study again."
        )
    return lines


def _row(made: Any, where: str, line: dict[str, str]) -> Any:
    """Return a line as what it is a line of; files leave empty what there is none of."""
    if None in line or None in line.values():
        raise DamagedFileError(
            f"folders: {where} does not have a cell for each column. Run the study again."
        )
    verdicts = ClaimVerdict if made is Claim else Verdict
    for name, kind in (("verdict", verdicts), ("against", Against)):
        if name in line and line[name] not in get_args(kind):
            known = ", ".join(word or "nothing" for word in get_args(kind))
            found = reprlib.repr(line[name])
            raise DamagedFileError(
                f"folders: {where}: {name} is {found}; expected one of {known}. Run the study "
                "again."
            )
    values: dict[str, Any] = dict(line)
    for name in (name for name in _NUMBERS if name in line):
        if line[name] == "" and name not in _COUNTS:
            values[name] = None if name in _OPTIONAL else math.nan
            continue
        try:
            number = float(line[name])
            values[name] = int(number) if name in _COUNTS else number
        except (OverflowError, ValueError) as error:
            found = reprlib.repr(line[name])
            raise DamagedFileError(
                f"folders: {where}: {name} is {found}; expected a number. Run the study again."
            ) from error
    return made(**values)
