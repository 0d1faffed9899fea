"""`kondo demo`: PG, DG and DG-K side by side, in minutes and without a download."""

import argparse
from functools import partial
from pathlib import Path

from kondo.cli import INTERRUPTED, Commands, whole
from kondo.command_line import given_path
from kondo_lab.cli.output import add_full, expected_errors, say, say_written, show

REPORT = "report.html"
"""The page that `kondo demo` writes beside its results."""
QUICK = "This was a quick trial: its numbers mean nothing."
MAX_SEED = 2**32 - 1
"""Highest first seed. Records hold seeds as 64-bit numbers."""


def add_demo(commands: Commands) -> None:
    """Add `demo` to the command line."""
    demo = commands.add_parser(
        "demo",
        help="train PG, DG and DG-K side by side and compare them",
        description=(
            "Train the same small policies with PG, DG and DG-K (3%) on two tasks that need no "
            "download: handwritten digits as a bandit, and token reversal. Prints a table and "
            "writes a figure, a one-page report, the curves and a manifest. Takes one to three "
            "minutes on two CPU cores. Ctrl-C stops it and reports what is finished; the same "
            "command then continues."
        ),
        allow_abbrev=False,
    )
    demo.add_argument(
        "--out",
        type=given_path,
        default=Path("kondo-demo"),
        metavar="DIR",
        help="folder for the results (default: %(default)s); if it already holds results, a "
        "numbered folder beside it is used",
    )
    first = partial(whole, least=0, most=MAX_SEED)
    demo.add_argument(
        "--seed", type=first, default=0, metavar="N", help="first seed (default: %(default)s)"
    )
    demo.add_argument(
        "--quick", action="store_true", help="a few steps only: a trial whose numbers mean nothing"
    )
    add_full(demo, "name every file that is written")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    import torch

    from kondo_lab.evidence import html_report, progress, runner
    from kondo_lab.studies import registry

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
        say(console, f"{asked.out} already holds results; writing to {order.out}.")
    say(console, order.study.title, order.study.claim, "")
    with expected_errors():
        outcome = runner.run(order, console)
        if outcome.analysis is not None:
            html_report.write([order.out], order.out / REPORT)
            outcome.written.append(order.out / REPORT)
    if outcome.analysis is not None:
        show(console, outcome.analysis, full=options.full)
        say_written(console, outcome.written, full=options.full)
        say(console, f"Open {order.out / REPORT} in a browser.")
    if outcome.stopped:
        say(console, f"Stopped. Finished parts are kept. To continue: {options.typed}")
        return INTERRUPTED
    if options.quick:
        say(console, QUICK)
    return 0
