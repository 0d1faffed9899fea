"""`kondo actors run TASK`: parse, then call `run`."""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kondo.run_files import FolderInUseError, WriteError

if TYPE_CHECKING:
    from kondo.actors.setup import Setup

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

TASKS = "kondo.actors"
"""Entry-point group: short names of functions that return a `Setup`."""
RATE = 0.03
"""Share to train on if nothing is said."""
SIGNALLED = 128
"""Added to the number of the signal that ended a run: 130 after Ctrl-C, 143 after SIGTERM."""
IN_USE = 2
"""Exit status where another run uses the folder of --checkpoint."""


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
            "Run a task with many actors and one learner. Without --address a small Ray is started "
            "on this machine, for this run alone. Ctrl-C or SIGTERM ends the run "
            "after the step under way; --resume goes on from the checkpoint."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    known = f"{_known()}, or MODULE:FUNCTION of a function that returns a Setup"
    add("task", metavar="TASK", help=known)
    add("--actors", type=_positive, default=2, metavar="N", help="default: %(default)s")
    add("--steps", type=_positive, default=200, metavar="N", help="default: %(default)s")
    kinds_of_gate = "what to train on: the highest delight (default), or an unbiased draw"
    add("--gate", choices=("delight", "unbiased"), default="delight", help=kinds_of_gate)
    much = parser.add_mutually_exclusive_group().add_argument
    much("--rate", type=float, help=f"share to train on (default: {RATE})")
    much("--noise", type=float, help="instead of a rate: the noise that a draw may have, >= 1")
    where = parser.add_mutually_exclusive_group().add_argument
    at_source = "actors send only what the price buys (default)"
    where("--price-at-source", dest="at_source", action="store_true", help=at_source)
    where("--send-all", dest="at_source", action="store_false", help="actors send everything")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    joined = "of a Ray cluster to join, or auto for the one that runs here; default: start one"
    add("--address", metavar="HOST:PORT", help=joined)
    add("--checkpoint", type=Path, metavar="DIR", help="for checkpoints and the log")
    add("--resume", action="store_true", help="go on from the checkpoint in --checkpoint")
    parser.set_defaults(run=run_command, at_source=True)


def run_command(options: argparse.Namespace) -> int:
    """Run the task; return the exit status."""
    from rich.console import Console

    from kondo.actors import console
    from kondo.actors.driver import run
    from kondo.actors.setup import Settings

    if options.resume and options.checkpoint is None:
        return _fail("--resume needs --checkpoint DIR.")
    try:
        setup = find_setup(options.task)
        if options.rate is None and options.noise is None:
            options.rate = RATE
        names = ("actors", "steps", "gate", "rate", "noise", "at_source", "seed")
        settings = Settings(**{name: getattr(options, name) for name in names})
        screen = Console(file=sys.stdout)
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
    except FolderInUseError as error:
        _fail(str(error))
        return IN_USE
    except (ValueError, RuntimeError, ConnectionError, WriteError) as error:
        return _fail(str(error))
    for line in console.closing(summary):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    return SIGNALLED + stopped() if stopped() else 0


def find_setup(name: str) -> "Setup":
    """Return the setup that a short name or MODULE:FUNCTION stands for; raise if there is none."""
    from kondo.actors.setup import Setup

    named = {point.name: point.value for point in entry_points(group=TASKS)}
    module, _, function = named.get(name, name).partition(":")
    if not function:
        raise ValueError(f"TASK must be {_known()} or MODULE:FUNCTION, got {name}.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a module in the current folder
    try:
        make: Any = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is there, and misses something itself
        raise ValueError(f"TASK {name}: no module {module} here.") from error
    setup = make() if callable(make) else make
    if not isinstance(setup, Setup):
        raise ValueError(f"TASK {name} must be a function that returns a Setup, got {setup!r}.")
    return setup


def _known() -> str:
    """Name the tasks that installed distributions bring."""
    names = sorted(point.name for point in entry_points(group=TASKS))
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
