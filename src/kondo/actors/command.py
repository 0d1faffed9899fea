"""`kondo actors run TASK`: parse, then call `run`."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from kondo import named_function
from kondo.json_output import add_json, print_json
from kondo.path_argument import given_path

if TYPE_CHECKING:
    from kondo.actors.processes import Summary
    from kondo.actors.setup import Setup

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

TASKS = "kondo.actors"
"""Entry-point group: short names of functions that return a `Setup`."""
RATE = 0.03
"""Share to train on if nothing is said."""
SIGNALLED = 128
"""Added to the number of the signal that ended a run: 130 after Ctrl-C, 143 after SIGTERM."""


def add_parser(commands: "Commands") -> None:
    """Add `actors` to the command line."""
    actors = commands.add_parser(
        "actors",
        help="train with many actors and one learner, on Ray",
        description="Train with many actors and one learner, on Ray.",
        allow_abbrev=False,
    )
    kinds = actors.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = kinds.add_parser(
        "run",
        help="run a task",
        description=(
            "Run a task with many actors and one learner. Without --address the command starts a "
            "small Ray cluster on this machine for this run. Ctrl-C or SIGTERM ends the run after "
            "the current step; --resume continues from the checkpoint."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    known = f"{_known()}, or MODULE:FUNCTION of a function that returns a Setup"
    task = add("task", metavar="TASK", help=known)
    task.completions = _names  # type: ignore[attr-defined]  # read by `kondo completion`
    number = "number of actors (default: %(default)s)"
    add("--actors", type=_positive, default=2, metavar="N", help=number)
    number = "steps of the learner (default: %(default)s)"
    add("--steps", type=_positive, default=200, metavar="N", help=number)
    kinds_of_gate = "which samples to train on: the highest delight (default), or an unbiased draw"
    add("--gate", choices=("delight", "unbiased"), default="delight", help=kinds_of_gate)
    much = parser.add_mutually_exclusive_group().add_argument
    much("--rate", type=float, help=f"share of samples to train on (default: {RATE})")
    much("--noise", type=float, help="instead of a rate: largest noise of the draw, >= 1")
    where = parser.add_mutually_exclusive_group().add_argument
    at_source = "actors send only samples above the price (default)"
    where("--price-at-source", dest="at_source", action="store_true", help=at_source)
    where("--send-all", dest="at_source", action="store_false", help="actors send every sample")
    add("--seed", type=int, default=0, metavar="N", help="seed (default: %(default)s)")
    joined = "address of a Ray cluster to join, or auto for the one on this machine; default: start"
    add("--address", metavar="HOST:PORT", help=f"{joined} a new one")
    add("--checkpoint", type=given_path, metavar="DIR", help="folder for checkpoints and the log")
    add("--resume", action="store_true", help="continue from the checkpoint in --checkpoint")
    add_json(parser)
    parser.set_defaults(run=run_command, at_source=True)


def run_command(options: argparse.Namespace) -> int:
    """Run the task; return the exit status."""
    from rich.console import Console

    from kondo.actors import console
    from kondo.actors.driver import run
    from kondo.actors.setup import Settings
    from kondo.run_files import FolderInUseError, WriteError

    if options.resume and options.checkpoint is None:
        return _fail("--resume needs --checkpoint DIR.")
    try:
        setup = find_setup(options.task)
        if options.rate is None and options.noise is None:
            options.rate = RATE
        names = ("actors", "steps", "gate", "rate", "noise", "at_source", "seed")
        settings = Settings(**{name: getattr(options, name) for name in names})
        screen = Console(file=sys.stderr if options.json else sys.stdout)
        with _signals() as stopped, console.shown(screen) as observe:
            summary = run(
                setup,
                settings,
                address=options.address,
                folder=options.checkpoint,
                resume=options.resume,
                observe=observe,
                stopped=lambda: bool(stopped()),
            )
    except (FolderInUseError, ValueError, RuntimeError, ConnectionError, WriteError) as error:
        return _fail(str(error))
    for line in console.closing(summary):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.json:
        print_json(as_dict(summary, options.task, bool(stopped())))
    return SIGNALLED + stopped() if stopped() else 0


def find_setup(name: str) -> "Setup":
    """Return the setup that a short name or MODULE:FUNCTION stands for; raise if there is none."""
    from kondo.actors.setup import Setup

    named = {point.name: point.value for point in entry_points(group=TASKS)}
    path = named.get(name, name)
    if ":" not in path:
        raise ValueError(f"TASK must be {_known()} or MODULE:FUNCTION, got {name}.")
    make = named_function.find(path, "TASK")
    setup = make() if callable(make) else make
    if not isinstance(setup, Setup):
        raise ValueError(f"TASK {name} must be a function that returns a Setup, got {setup!r}.")
    return setup


def as_dict(summary: "Summary", task: str, stopped: bool) -> dict[str, Any]:
    """Return the keys of --json: the fields of `Summary`, the task, and whether a signal came."""
    return {"task": task, "stopped": stopped} | summary._asdict()


def _names() -> list[str]:
    return sorted(point.name for point in entry_points(group=TASKS))


def _known() -> str:
    """Name the tasks that installed distributions bring."""
    names = _names()
    return f"one of {', '.join(names)}" if names else "a task of another package (kondo-lab)"


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop; a second one ends the process.

    Gives a function that returns the number of the signal, 0 before one came.
    """
    came = 0
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(signum: int, frame: Any) -> None:
        nonlocal came
        came = signum
        restore()

    for number in before:
        signal.signal(number, first)
    try:
        yield lambda: came
    finally:
        restore()


def _positive(text: str) -> int:
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _fail(message: str) -> int:
    print(f"kondo actors: {message}", file=sys.stderr)
    return 1
