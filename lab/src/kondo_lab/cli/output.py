"""What the commands share: where runs are, expected errors, and how results are printed."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kondo.cli import CommandError

if TYPE_CHECKING:
    from rich.console import Console

    from kondo_lab.evidence.study import Analysis

RUNS = Path("kondo-runs")
"""Where runs go."""
RESULTS = Path("results")
"""Where this repository keeps its own."""
MOST_FINDINGS = 3
"""Sentences that are printed without --full."""


@contextmanager
def expected_errors() -> Iterator[None]:
    """Turn errors that the user can mend into one line without a traceback."""
    from kondo.run_files import DamagedFileError, FolderInUseError, WriteError
    from kondo_lab.evidence.run_manifest import FolderError
    from kondo_lab.studies.registry import UnknownStudyError
    from kondo_lab.tasks.mnist import MnistError

    data = (DamagedFileError, MnistError, UnknownStudyError)
    try:
        yield
    except (*data, FolderError, FolderInUseError, WriteError) as error:
        raise CommandError(str(error)) from error


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the argument STUDY."""
    study = parser.add_argument("study", metavar="STUDY", help="name of a study, see `kondo list`")
    study.completions = study_names  # type: ignore[attr-defined]  # read by `kondo completion`


def add_full(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --full to a command whose output is short by default."""
    parser.add_argument("--full", action="store_true", help=text)


def study_names() -> list[str]:
    """Return the names of all studies."""
    from kondo_lab.studies import registry

    return [study.name for study in registry.all_studies()]


def as_dict(
    folder: Path,
    analysis: "Analysis | None",
    *,
    status: str,
    written: Sequence[Path],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the keys of --json for a run in `folder`."""
    from kondo_lab.evidence.run_manifest import read_manifest

    manifest = read_manifest(folder)
    copied = ("study", "version", "title", "paper", "claim", "size", "device", "seeds", "command")
    return {name: manifest[name] for name in copied} | {
        "status": status,
        "folder": str(folder),
        "seconds": manifest.get("seconds"),
        "notes": list(notes),
        "claims": [] if analysis is None else [claim._asdict() for claim in analysis.claims],
        "headline": [] if analysis is None else [line._asdict() for line in analysis.headline],
        "findings": [] if analysis is None else analysis.findings,
        "written": [str(path) for path in written],
    }


def show(console: "Console", analysis: "Analysis", *, full: bool) -> None:
    """Print claims, numbers and findings: all of them, or what is read first."""
    from kondo_lab.evidence import table
    from kondo_lab.evidence.bundled_claims import told

    claims = analysis.claims if full else analysis.claims[: table.MOST_LINES]
    if claims:
        console.print("", table.claims(claims), sep="\n")
        say(console, f"Claims: {told(analysis.claims)}.")
    lines = analysis.headline if full else table.first_lines(analysis.headline)
    if lines:
        console.print("", table.headline(lines), sep="\n")
    if analysis.headline:
        say(console, f"Numbers: {table.numbers(analysis.headline)}.")
    findings = analysis.findings if full else analysis.findings[:MOST_FINDINGS]
    say(console, "", *findings)
    left = [
        f"{len(every) - len(some)} {name}"
        for name, every, some in (
            ("claims", analysis.claims, claims),
            ("numbers", analysis.headline, lines),
            ("findings", analysis.findings, findings),
        )
        if len(every) > len(some)
    ]
    if left:
        say(console, f"Not shown: {', '.join(left)}. --full shows them.")
    say(console, "")


def say_written(console: "Console", written: Sequence[Path], *, full: bool) -> None:
    """Name the files that were written, or their folder."""
    if full:
        say(console, *(f"wrote {path}" for path in written))
    elif written:
        count = "1 file" if len(written) == 1 else f"{len(written)} files"
        say(console, f"wrote {count} to {written[0].parent}")


def say(console: "Console", *lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
