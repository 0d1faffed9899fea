"""`kondo run STUDY`: run a study, continue one that was stopped, or say that it is finished."""

import argparse
import dataclasses
import os
from functools import partial
from typing import TYPE_CHECKING

from kondo.cli import INTERRUPTED, CommandError, Commands, whole
from kondo.command_line import add_json, given_path, print_json
from kondo_lab.cli.output import (
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
    import torch
    from rich.console import Console

    from kondo_lab.evidence.runner import Order
    from kondo_lab.evidence.study import Study

MNIST = "KONDO_MNIST"
"""Environment variable with the folder of the MNIST files."""
MAX_SEEDS = 10_000
"""Most seeds of a run. Each has weights and records of its own in memory."""
MAX_MINUTES = 100_000
"""Longest run: ten weeks."""
SMALL = "This was the small size: do not compare its numbers with the paper's."


def add_run(commands: Commands) -> None:
    """Add `run` to the command line."""
    parser = commands.add_parser(
        "run",
        help="run a study",
        description=(
            "Run a study and compare it with the paper. Ctrl-C stops it: finished parts are kept "
            "and analysed, and the same command continues from there. Results are never "
            "overwritten: if the run is already finished, the command says where its results are."
        ),
        allow_abbrev=False,
    )
    add_study(parser)
    add = parser.add_argument
    add("--small", action="store_true", help="a trial of under two minutes on two cores")
    devices = "where to train (default: cuda if there is a CUDA device)"
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help=devices)
    number = partial(whole, least=1, most=MAX_SEEDS)
    add("--seeds", type=number, metavar="N", help="number of seeds (default: the study's)")
    number = partial(whole, least=1, most=MAX_MINUTES)
    text = "start no part after N minutes; the same command continues later (default: no limit)"
    add("--minutes", type=number, metavar="N", help=text)
    text = f"folder for the results (default: {RUNS}/STUDY, or {RUNS}/STUDY-small)"
    add("--out", type=given_path, metavar="DIR", help=text)
    text = f"folder with the four MNIST files (default: ${MNIST}, then a cache, then a download)"
    add("--mnist", type=given_path, metavar="DIR", help=text)
    add_full(parser, "print every claim, number and finding")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kondo_lab.evidence import progress, runner

    if options.mnist is not None:
        if not options.mnist.is_dir():
            raise CommandError(f"--mnist must be a folder, got {options.mnist}.")
        os.environ[MNIST] = str(options.mnist.resolve())
    order = _order(options)
    _set_threads(order)
    console = progress.make_console(stderr=options.json)
    notes = _notes(order)
    with expected_errors():
        try:
            say(console, f"{order.study.title} ({order.study.paper})", order.study.claim, *notes)
            say(console, "")
            outcome = runner.run(order, console)
        except runner.FinishedError:
            return _finished(order, console, options, notes)
    if options.json:
        status = "stopped" if outcome.stopped else "finished"
        written, analysis = outcome.written, outcome.analysis
        print_json(as_dict(order.out, analysis, status=status, written=written, notes=notes))
    else:
        if outcome.analysis is not None:
            show(console, outcome.analysis, full=options.full)
        say_written(console, outcome.written, full=options.full)
    if outcome.stopped:
        say(console, f"Stopped. Finished parts are kept. To continue: {options.typed}")
        return INTERRUPTED
    if options.small:
        say(console, SMALL)
    return 0


def _order(options: argparse.Namespace) -> "Order":
    """Return what the options ask for, checked before anything is written."""
    from kondo_lab.evidence import runner
    from kondo_lab.studies import registry

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
        raise CommandError(str(error)) from error
    return order


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


def _set_threads(order: "Order") -> None:
    """Choose torch's threads; OMP_NUM_THREADS, which torch has read, wins."""
    import torch

    from kondo_lab.training.worker_pool import default_threads

    if order.device.type == "cuda":
        # Populations run side by side, a stream each; by default only 8 of them would overlap.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(default_threads(small=order.size == "small"))


def _notes(order: "Order") -> list[str]:
    """Return what a reader of the numbers must know of this run: data that replace others."""
    from kondo_lab.tasks.digits import INSTEAD_OF_MNIST

    full, own = order.study.settings("full", None), order.settings()
    names = [field.name for field in dataclasses.fields(full)]
    replaced = any((getattr(full, n), getattr(own, n)) == ("mnist", "digits") for n in names)
    return [f"Note: {INSTEAD_OF_MNIST}"] if replaced else []


def _finished(
    order: "Order", console: "Console", options: argparse.Namespace, notes: list[str]
) -> int:
    """Say that this run is finished, show its results, and say how to run it anew."""
    from kondo_lab.evidence import result_folder
    from kondo_lab.evidence.study import Analysis

    with expected_errors():
        found = result_folder.read(order.out)
    analysis = Analysis(
        headline=found.headline, claims=found.claims, findings=found.manifest["findings"]
    )
    if options.json:
        status = "already finished"
        print_json(as_dict(order.out, analysis, status=status, written=[], notes=notes))
    else:
        show(console, analysis, full=options.full)
    say(
        console,
        f"Already finished: these are the results in {order.out}. Nothing was run.",
        f"To run it anew: {options.typed} --out DIR, or move {order.out} away.",
    )
    return 0
