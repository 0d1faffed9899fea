"""What a report is made from: result folders, read and checked."""

import csv
import dataclasses
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from kondo_lab.studies.agreement import Against, Verdict
from kondo_lab.studies.study import Claim, ClaimVerdict, FrontierPoint, Headline

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

_KINDS = {
    **dict.fromkeys(("differences", "findings"), list),
    **dict.fromkeys(("settings", "environment", "captions"), dict),
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
        ValueError: it is not a result folder, or a file in it is not what `kondo run` writes.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(
            f"folders: {folder} {what}; expected a folder that `kondo run` wrote. Leave it out or "
            "name the folder of a run."
        )
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"folders: {folder} is not a result folder, it lacks {', '.join(missing)}; expected "
            "a folder that `kondo run` wrote. Leave it out or run the study."
        )
    figures = sorted(folder.glob("*.png"), key=_natural)
    # Only studies that train to a target have a frontier; older folders have no claims.
    frontier, claims = (
        [folder / name] if os.path.lexists(folder / name) else [] for name in (FRONTIER, CLAIMS)
    )
    check_files([*(folder / name for name in NEEDED), *frontier, *claims, *figures])
    manifest = _manifest(folder / MANIFEST)
    return Result(
        name=folder.resolve().name,
        manifest=manifest,
        headline=[_row(Headline, where, line) for where, line in _lines(folder / HEADLINE)],
        frontier=[_row(FrontierPoint, *each) for path in frontier for each in _lines(path)],
        claims=[_row(Claim, *each) for path in claims for each in _lines(path)],
        figures=_in_order(figures, manifest.get("figures", [])),
    )


def check_files(paths: Iterable[Path]) -> None:
    """Raise a ValueError unless every path is a regular file, and every *.png a whole image."""
    for path in paths:
        _check_regular(path)
        if path.suffix == ".png":
            _check_png(path)


def _check_regular(path: Path) -> None:
    """Raise if the file is a link, a pipe or a folder: a page shows what the folder itself holds.

    A link in a folder from elsewhere could put any file of this machine into a page that is shared.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(
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
        raise ValueError(
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


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"folders: {path} is not JSON ({error}); run the study again.") from error
    missing = [key for key in KEYS if not isinstance(manifest, dict) or key not in manifest]
    if missing:
        raise ValueError(
            f"folders: {path} lacks {', '.join(missing)}; expected a manifest that `kondo run` "
            "wrote. Run the study again."
        )
    for key, kind in _KINDS.items():
        if not isinstance(manifest.get(key, kind()), kind):
            raise ValueError(
                f"folders: {path}: {key} is {manifest[key]!r}; expected a {kind.__name__}. Run the "
                "study again."
            )
    return dict(manifest)


_COLUMNS = {
    HEADLINE: Headline._fields,
    FRONTIER: FrontierPoint._fields,
    CLAIMS: Claim._fields,
}
_COUNTS, _OPTIONAL = ("seeds", "reached"), ("expected", "se")
_NUMBERS = ("rate", "forward", "backward", "final_error", "ours", *_COUNTS, *_OPTIONAL)


def _lines(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Return (where, column -> text) for each line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            found = tuple(reader.fieldnames or ())  # reads the first line, if there is one
            lines = [(f"{path}, line {reader.line_num}", line) for line in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"folders: {path} is no CSV ({error}); run the study again.") from error
    columns = _COLUMNS[path.name]
    if found != columns:
        raise ValueError(
            f"folders: {path} has columns {', '.join(found) or '(none)'}; "
            f"expected {', '.join(columns)}. Run the study again."
        )
    return lines


def _row(made: Any, where: str, line: dict[str, str]) -> Any:
    """Return a line as what it is a line of; files leave empty what there is none of."""
    if None in line or None in line.values():
        raise ValueError(
            f"folders: {where} does not have a cell for each column. Run the study again."
        )
    verdicts = ClaimVerdict if made is Claim else Verdict
    for name, kind in (("verdict", verdicts), ("against", Against)):
        if name in line and line[name] not in get_args(kind):
            known = ", ".join(word or "nothing" for word in get_args(kind))
            raise ValueError(
                f"folders: {where}: {name} is {line[name]!r}; expected one of {known}. Run the "
                "study again."
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
            raise ValueError(
                f"folders: {where}: {name} is {line[name]!r}; expected a number. Run the study "
                "again."
            ) from error
    return made(**values)
