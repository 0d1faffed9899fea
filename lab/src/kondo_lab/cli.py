"""The commands that the laboratory adds to `kondo`: demo, list, run, plot and report.

Installed as an entry point of the group `kondo.commands`. A command imports what it needs when it
runs, so that `kondo --help` stays quick.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kondo.cli import INTERRUPTED, Commands, fail, whole
from kondo.run_files import DamagedFileError, FolderInUseError, WriteError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from kondo_lab.studies.runner import Outcome
    from kondo_lab.studies.study import Analysis, Study

RUNS = Path("kondo-runs")
"""Where runs go."""
RESULTS = Path("results")
"""Where this repository keeps its own."""
REPORT = "report.html"
"""The page that `kondo demo` writes beside its results."""
QUICK = "This was a quick trial: its numbers mean nothing."
MNIST = "KONDO_MNIST"
"""Environment variable with the folder of the MNIST files."""
MAX_SEEDS = 10_000
"""Most seeds of a run. Each has weights and records of its own in memory."""
MAX_MINUTES = 100_000
"""Longest run: ten weeks."""
MAX_SEED = 2**32 - 1
"""Highest first seed. Records hold seeds as 64-bit numbers."""


def add_commands(commands: Commands) -> None:
    """Add the laboratory's commands to the command line."""
    for add in (_add_demo, _add_list, _add_run, _add_plot, _add_report):
        add(commands)


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train PG, DG and DG-K side by side and compare them",
        description=(
            "Train the same small policies with PG, DG and DG-K (3%) on two tasks that need no "
            "download: handwritten digits as a bandit, and token reversal. Prints a table and "
            "writes a figure, a one-page report, the curves and a manifest. Takes one to three "
            "minutes on two CPU cores. Ctrl-C stops it and reports what there is; the same command "
            "then resumes."
        ),
        allow_abbrev=False,
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("kondo-demo"),
        metavar="DIR",
        help="folder for the results (default: %(default)s); if it already holds some, a numbered "
        "folder beside it is used",
    )
    first = partial(whole, least=0, most=MAX_SEED)
    demo.add_argument(
        "--seed", type=first, default=0, metavar="N", help="first seed (default: %(default)s)"
    )
    demo.add_argument(
        "--quick", action="store_true", help="a few steps only: a trial whose numbers mean nothing"
    )
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    import torch

    from kondo_lab import progress
    from kondo_lab.studies import html_report, registry, runner

    asked = runner.Order(
        study=registry.find("demo"),
        size="small" if options.quick else "full",
        num_seeds=None,
        first_seed=options.seed,
        out=options.out,
        device=torch.device("cpu"),
        command=options.typed,
    )
    order = runner.numbered(asked)
    console = progress.make_console()
    if order.out.resolve() != asked.out.resolve():
        _say(console, f"{asked.out} already holds results; writing to {order.out}.")
    _say(console, order.study.title, order.study.claim, "")
    try:
        outcome = runner.run(order, console)
    except (runner.FolderError, FolderInUseError, DamagedFileError, WriteError) as error:
        return fail(options, str(error))
    if outcome.analysis is not None:
        try:
            html_report.write([order.out], order.out / REPORT)
        except (ValueError, WriteError) as error:
            return fail(options, str(error))
        outcome.written.append(order.out / REPORT)
    return _end(console, outcome, options.typed, QUICK if options.quick else "")


def _add_list(commands: Commands) -> None:
    text = (
        "Name the studies, the figures of the papers they repeat, their claims, and how many "
        "statements of each were met, missed or left open in the repository's results."
    )
    summary = "name the studies, what each should show and what came of it"
    parser = commands.add_parser("list", help=summary, description=text, allow_abbrev=False)
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    from kondo_lab import progress
    from kondo_lab.studies import bundled_claims, registry, table

    console = progress.make_console()
    width = min(console.width, table.WIDTH)
    known, bundled = registry.all_studies(), bundled_claims.read()
    verdicts = {
        study.name: "; ".join(
            bundled_claims.told(claims)
            + (f" ({folder.removeprefix(study.name + '-')})" if folder != study.name else "")
            for folder, claims in bundled_claims.of_study(study, bundled).items()
        )
        for study in known
    }
    console.print(table.studies(known, verdicts), width=width)
    told = "\nVerdicts are those of the results in the repository: statements met, missed and open."
    console.print(told, highlight=False)
    console.print("kondo run STUDY --small tries one in under two minutes.", highlight=False)
    return 0


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a study",
        description=(
            "Run a study and compare it with the paper. Ctrl-C stops it: what is finished is kept "
            "and analysed, and the same command goes on from there. Results are never overwritten."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("study", metavar="STUDY", help="as `kondo list` names it")
    parser.add_argument(
        "--small", action="store_true", help="under two minutes on two cores, to see it work"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="default: cuda where there is one",
    )
    number = partial(whole, least=1, most=MAX_SEEDS)
    parser.add_argument(
        "--seeds", type=number, metavar="N", help="number of seeds (default: the study's)"
    )
    parser.add_argument(
        "--minutes",
        type=partial(whole, least=1, most=MAX_MINUTES),
        metavar="N",
        help="start no part after N minutes; the same command goes on from there (default: no "
        "limit)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder for the results (default: {RUNS}/STUDY, or {RUNS}/STUDY-small)",
    )
    parser.add_argument(
        "--mnist",
        type=Path,
        metavar="DIR",
        help=f"folder with the four MNIST files (default: ${MNIST}, then a cache, then download)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import torch

    from kondo_lab import progress
    from kondo_lab.studies import registry, runner
    from kondo_lab.worker_pool import usable_cores

    if options.mnist is not None:
        if not options.mnist.is_dir():
            return fail(options, f"--mnist must be a folder, got {options.mnist}.")
        os.environ[MNIST] = str(options.mnist.resolve())
    try:
        study = registry.find(options.study)
        order = runner.Order(
            study=study,
            size="small" if options.small else "full",
            num_seeds=options.seeds,
            out=options.out or RUNS / (study.name + ("-small" if options.small else "")),
            device=_device(options.device, study),
            command=options.typed,
            minutes=options.minutes,
        )
        order.settings()
    except ValueError as error:
        return fail(options, str(error))
    if order.device.type == "cuda":
        # Populations run side by side, a stream each; by default only 8 of them would overlap.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if order.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    console = progress.make_console()
    _say(console, f"{study.title} ({study.paper})", study.claim, "")
    try:
        outcome = runner.run(order, console)
    except (runner.FolderError, FolderInUseError, DamagedFileError, WriteError) as error:
        return fail(options, str(error))
    small = "This was the small size: its numbers are not to be compared."
    return _end(console, outcome, options.typed, small if options.small else "")


def _device(name: str, study: "Study") -> "torch.device":
    import torch

    if study.cpu_only:
        if name == "cuda":
            raise ValueError(f"--device cuda: {study.name} trains on the CPU. Use --device cpu.")
        return torch.device("cpu")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def _add_plot(commands: Commands) -> None:
    parser = commands.add_parser(
        "plot",
        help="analyse a study's records again",
        description="Read the records of a run and write its numbers and figures again.",
        allow_abbrev=False,
    )
    parser.add_argument("study", metavar="STUDY", help="as `kondo list` names it")
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="DIR",
        help=f"a run's folder (default: the newest of {RUNS}/STUDY and {RESULTS}/STUDY-vN)",
    )
    parser.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> int:
    from kondo_lab import progress
    from kondo_lab.studies import registry, runner

    console = progress.make_console()
    try:
        study = registry.find(options.study)
        folder = options.folder or _newest(study)
        analysis, written = runner.reanalyse(study, folder)
    except (registry.UnknownStudyError, runner.FolderError, DamagedFileError, WriteError) as error:
        return fail(options, str(error))
    _show(console, analysis)
    _say(console, *(f"wrote {path}" for path in written))
    return 0


def _newest(study: "Study") -> Path:
    from kondo_lab.studies import runner
    from kondo_lab.studies.part_files import RECORDS

    places = [RUNS / study.name, RESULTS / f"{study.name}-v{study.version}"]
    found = [path for path in places if (path / RECORDS).exists()]
    if not found:
        raise runner.FolderError(
            f"no records in {places[0]} or {places[1]}. Run the study first, or name a folder "
            "with --from."
        )
    return max(found, key=lambda path: (path / RECORDS).stat().st_mtime)


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="make one page of finished runs",
        description="Write one HTML page with the figures and numbers of runs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="FOLDER",
        help=f"folders of runs (default: all under {RESULTS} and {RUNS})",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s"
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from kondo_lab import progress
    from kondo_lab.studies import html_report, older_folders

    found = sorted(folder for root in (RESULTS, RUNS) for folder in root.glob("*"))
    runs = [folder for folder in found if older_folders.holds_results(folder)]
    folders = options.folders or runs
    if not folders:
        return fail(options, f"no runs under {RESULTS} or {RUNS}. Run a study, or name folders.")
    try:
        html_report.write(folders, options.out)
    except (ValueError, WriteError) as error:
        return fail(options, str(error))
    _say(progress.make_console(), f"wrote {options.out}")
    return 0


def _end(console: "Console", outcome: "Outcome", command: str, small: str) -> int:
    """Say what came of a run and return the command's exit status; `small` warns of its size."""
    if outcome.analysis is not None:
        _show(console, outcome.analysis)
    _say(console, *(f"wrote {path}" for path in outcome.written))
    if outcome.stopped:
        _say(console, f"Stopped. What was finished is kept. To go on: {command}")
    if small and not outcome.stopped:
        _say(console, small)
    return INTERRUPTED if outcome.stopped else 0


def _show(console: "Console", analysis: "Analysis") -> None:
    from kondo_lab.studies import table

    width = min(console.width, table.WIDTH)
    if analysis.claims:
        console.print("\n", table.claims(analysis.claims), sep="", width=width)
    if analysis.headline:
        console.print("\n", table.headline(analysis.headline), "\n", sep="", width=width)
    _say(console, *(f"{sentence}\n" for sentence in analysis.findings))


def _say(console: "Console", *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
