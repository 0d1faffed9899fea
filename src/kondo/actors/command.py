"""`kondo actors run TASK`: parse, then call `run`."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from kondo.command_line import add_json, find_function, given_path, print_json

if TYPE_CHECKING:
    from kondo.actors.processes import Summary
    from kondo.actors.setup import Setup

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

TASKS = "kondo.actors"
"""Entry-point group: short names of functions that return a `Setup`."""
SIGNALLED = 128
"""Added to the number of the signal that ended a run: 130 after Ctrl-C, 143 after SIGTERM."""


def add_parser(commands: "Commands") -> None:
    """Add `actors` to the command line."""
    about = "train with many actors and one learner, on Ray"
    actors = commands.add_parser(
        "actors", help=about, description=f"{about.capitalize()}.", allow_abbrev=False
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
    gate = "what is trained on, as 'unbiased:0.1', 'noise:1.5' or 'package.module:name' "
    add("--gate", default="delight:0.03", metavar="SPEC", help=f"{gate}(default: %(default)s)")
    add("--rate", "--noise", type=_part_of_gate, help=argparse.SUPPRESS)
    everything = "actors send every sample, not only what the gate's price buys"
    add("--send-all", dest="at_source", action="store_false", help=everything)
    add("--seed", type=int, default=0, metavar="N", help="seed (default: %(default)s)")
    joined = "address of a Ray cluster to join, or auto for the one on this machine; default: start"
    add("--address", metavar="HOST:PORT", help=f"{joined} a new one")
    add("--checkpoint", type=given_path, metavar="DIR", help="folder for checkpoints and the log")
    add("--resume", action="store_true", help="continue from the checkpoint in --checkpoint")
    add_json(parser)
    parser.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Run the task; return the exit status."""
    from rich.console import Console

    from kondo.actors import console
    from kondo.actors.driver import run
    from kondo.actors.setup import Settings
    from kondo.run_files import FolderInUseError, WriteError

    try:
        if options.resume and options.checkpoint is None:
            raise ValueError("--resume needs --checkpoint DIR.")
        setup = find_setup(options.task)
        names = ("actors", "steps", "gate", "at_source", "seed")
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
        print(f"kondo actors: {error}", file=sys.stderr)
        return 1
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
    make = find_function(path, "TASK")
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
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore(*first: Any) -> None:
        came.extend(first[:1])
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, restore)
    try:
        yield lambda: came[0] if came else 0
    finally:
        restore()


def _positive(text: str) -> int:
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _part_of_gate(text: str) -> None:
    raise argparse.ArgumentTypeError("is part of --gate: unbiased:0.1, delight:0.03 or noise:1.5")
