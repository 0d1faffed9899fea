"""`kondo report`: one HTML page of runs."""

import argparse
import sys
from pathlib import Path

from kondo.cli import CommandError, Commands
from kondo.command_line import given_path
from kondo_lab.cli.output import RESULTS, RUNS, expected_errors, say


def add_report(commands: Commands) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser(
        "report",
        help="make one HTML page of finished runs",
        description="Write one HTML page with the claims, figures and numbers of runs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=given_path,
        metavar="FOLDER",
        help=f"folders of runs (default: all under {RESULTS} and {RUNS})",
    )
    text = "page to write (default: %(default)s)"
    parser.add_argument(
        "--out", type=given_path, default=Path("report.html"), metavar="FILE", help=text
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from kondo_lab.evidence import html_report, progress

    folders = options.folders or _found()
    if not folders:
        raise CommandError(f"no runs under {RESULTS} or {RUNS}. Run a study, or name folders.")
    with expected_errors():
        html_report.write(folders, options.out)
    say(progress.make_console(), f"wrote {options.out}")
    return 0


def _found() -> list[Path]:
    """Return the folders of runs there are, and say which others were left out."""
    from kondo_lab.evidence.older_folders import holds_results

    inside = [path for root in (RESULTS, RUNS) for path in root.glob("*") if path.is_dir()]
    runs = [folder for folder in sorted(inside) if holds_results(folder)]
    for folder in sorted(set(inside) - set(runs)):
        print(f"kondo report: skipped {folder}: it holds no finished run", file=sys.stderr)
    return runs
