"""The `kondo` command. Other distributions add commands by entry point.

An entry point of the group `kondo.commands` names a function that takes the sub-parsers and adds
parsers to them, each with `set_defaults(run=function of the parsed options)`. The base install is
torch alone, so a command imports what it needs when it runs. A missing package is named together
with what installs it.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeAlias

import kondo
from kondo.actors.command import add_parser as add_actors

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
else:
    Commands: TypeAlias = argparse._SubParsersAction

COMMANDS = "kondo.commands"
"""Entry-point group of functions that add commands."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

_INSTALLS = {
    **dict.fromkeys(("numpy", "pandas", "matplotlib", "sklearn", "rich"), "kondo-lab"),
    **dict.fromkeys(("ray", "datasketches"), "kondo[ray]"),
}
# Named in the help although another distribution brings them.
_ELSEWHERE = dict.fromkeys(("demo", "list", "run", "plot", "report"), "kondo-lab")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    options.typed = shlex.join(["kondo", *arguments])
    try:
        return int(options.run(options))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALLS:
            raise
        return fail(options, f"{package} is not installed. Run: pip install '{_INSTALLS[package]}'")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        fail(options, "interrupted.")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kondo",
        description="Policy-gradient training that pays only for the backward passes worth it.",
        epilog="kondo COMMAND --help tells more about a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kondo {kondo.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for added in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
        added.load()(commands)
    for name, distribution in _ELSEWHERE.items():
        if name not in commands.choices:
            _add_missing(commands, name, distribution)
    add_actors(commands)
    return parser


def _add_missing(commands: Commands, name: str, distribution: str) -> None:
    """Add a command that says which distribution brings it."""
    parser = commands.add_parser(name, help=f"needs pip install {distribution}", add_help=False)
    parser.add_argument("ignored", nargs=argparse.REMAINDER)
    parser.set_defaults(
        run=lambda options: fail(
            options, f"this command comes with another package. Run: pip install {distribution}"
        )
    )


def fail(options: argparse.Namespace, message: str) -> int:
    """Print why a command failed and return the exit status for that."""
    print(f"kondo {options.command}: {message}", file=sys.stderr)
    return 1


def whole(text: str, *, least: int, most: int | None = None) -> int:
    """Parse a whole number >= least, and <= most where there is a most.

    Example:
        >>> whole("7", least=1, most=10)
        7
    """
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        allowed = f">= {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
    return number


if __name__ == "__main__":
    sys.exit(main())
