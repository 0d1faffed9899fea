"""`kondo plot STUDY`: analyse the records of a run again."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kondo.cli import CommandError, Commands
from kondo.command_line import add_json, given_path, print_json
from kondo_lab.cli.output import (
    RESULTS,
    RUNS,
    add_full,
    add_study,
    as_dict,
    expected_errors,
    say,
    say_written,
    show,
)

if TYPE_CHECKING:
    from kondo_lab.evidence.study import Study


def add_plot(commands: Commands) -> None:
    """Add `plot` to the command line."""
    parser = commands.add_parser(
        "plot",
        help="analyse the records of a run again",
        description="Read the records of a run and write its numbers and figures again.",
        allow_abbrev=False,
    )
    add_study(parser)
    places = f"{RUNS}/STUDY, {RUNS}/STUDY-small and {RESULTS}/STUDY-vN"
    text = f"folder of a run (default: the newest of {places})"
    parser.add_argument("--from", dest="folder", type=given_path, metavar="DIR", help=text)
    add_full(parser, "print every claim, number and finding")
    add_json(parser)
    parser.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> int:
    from kondo_lab.evidence import progress, runner
    from kondo_lab.studies import registry

    console = progress.make_console(stderr=options.json)
    with expected_errors():
        study = registry.find(options.study)
        folder = options.folder or _newest(study)
        if options.folder is None:
            say(console, f"reading {folder}")
        analysis, written = runner.reanalyse(study, folder)
    if options.json:
        print_json(as_dict(folder, analysis, status="analysed", written=written))
        return 0
    show(console, analysis, full=options.full)
    say_written(console, written, full=options.full)
    return 0


def _newest(study: "Study") -> Path:
    """Return the folder of this study whose records were written last.

    A run that was killed has only those of its parts.
    """
    from kondo_lab.evidence.part_files import PARTS, RECORDS

    runs = [RUNS / study.name, RUNS / f"{study.name}-small"]
    devices = ("", "-cpu", "-cuda")  # a study of speed has results of each
    kept = [RESULTS / f"{study.name}{device}-v{study.version}" for device in devices]
    written = {
        path: max(file.lstat().st_mtime for file in files)
        for path in (*runs, *kept)
        if (
            files := [*filter(os.path.lexists, [path / RECORDS]), *path.glob(f"{PARTS}/*.jsonl.gz")]
        )
    }
    if not written:
        raise CommandError(
            f"no records in {runs[0]}, {runs[1]} or {kept[0]}. Run the study first, or name a "
            "folder with --from."
        )
    return max(written, key=written.__getitem__)
