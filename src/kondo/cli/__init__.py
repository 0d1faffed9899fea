"""The `kondo` command. Other distributions add commands by entry point.

An entry point of the group `kondo.commands` names a function that takes the sub-parsers and adds
parsers to them, each with `set_defaults(run=function of the parsed options)`. The base install is
torch alone, and `kondo --help` must not wait for torch, so a command imports what it needs when it
runs. A missing package is named together with the command that installs it.
"""

import argparse
import contextlib
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TextIO, cast

import kondo
from kondo.actors.command import add_parser as add_actors
from kondo.cli.common import (
    CLOSED_PIPE,
    FAILED,
    INTERRUPTED,
    CheckedOutput,
    CommandError,
    Commands,
    OutputError,
    drop_output,
    fail,
    forget_odd_columns,
    whole,
)
from kondo.cli.completion import add_completion
from kondo.cli.install_hints import install_command
from kondo.cli.plan import add_plan

__all__ = [
    "CLOSED_PIPE",
    "INTERRUPTED",
    "CommandError",
    "Commands",
    "fail",
    "install_command",
    "main",
    "make_parser",
    "whole",
]

COMMANDS = "kondo.commands"
"""Entry-point group of functions that add commands."""
TRACEBACK = "KONDO_TRACEBACK"
"""Environment variable: if set, expected errors have their traceback too."""

_INSTALLS = {
    **dict.fromkeys(
        ("numpy", "pandas", "matplotlib", "scipy", "sklearn", "PIL", "rich"), "kondo-lab"
    ),
    **dict.fromkeys(("ray", "datasketches"), "kondo[ray]"),
    "gymnasium": "kondo-lab[control]",
    "shtab": "kondo[completion]",
    "torchao": "kondo[draft]",
    "transformers": "kondo[lm]",
}
# Named in the help although another distribution brings them.
_ELSEWHERE = {
    "demo": "train PG, DG and DG-K side by side",
    "list": "list the studies",
    "run": "run a study",
    "plot": "analyse a run again",
    "report": "make one page of runs",
}
# Errors of the file system that the user mends: no access, no room, names that cannot be files.
_FILE_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = argparse.Namespace(command=None)
    if sys.stdout is None:  # closed, as by `>&-`: print would lose everything without a word
        return fail(options, "standard output is closed. Send it to a file or to /dev/null.")
    forget_odd_columns()
    try:
        with contextlib.redirect_stdout(cast(TextIO, CheckedOutput(sys.stdout))):
            try:
                return _run(list(sys.argv[1:] if argv is None else argv), options)
            finally:
                sys.stdout.flush()  # what fails is noticed here, not at the interpreter's end
    except OutputError as error:
        drop_output()
        left = isinstance(error.__cause__, BrokenPipeError)  # as of `kondo list | head -1`
        notes = getattr(error, "__notes__", [])  # what a run that it stopped has kept
        if notes or not left:
            fail(options, " ".join([str(error), *notes]))
        return CLOSED_PIPE if left else FAILED


def _run(arguments: list[str], options: argparse.Namespace) -> int:
    """Parse into `options`, run the command, and say expected errors in one line."""
    parser = make_parser()
    parser.parse_args(arguments, options)
    if options.command is None:
        parser.print_help()
        return 0
    options.typed = shlex.join(["kondo", *arguments])
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        fail(options, "interrupted.")
        return INTERRUPTED
    except (CommandError, ImportError, OSError) as error:
        message = _told(error, options.command)
        if message is None or TRACEBACK in os.environ:
            raise
        return fail(options, message)


def _told(error: Exception, command: str) -> str | None:
    """Return the line that explains an expected error; None if it is not one."""
    if isinstance(error, CommandError):
        return str(error)
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    if isinstance(missing, ModuleNotFoundError):
        package = (missing.name or "").partition(".")[0]
        if package not in _INSTALLS:
            return None
        requirement = "kondo[ray]" if command == "actors" else _INSTALLS[package]
        return f"{package} is not installed. Run: {install_command(requirement)}"
    if isinstance(error, OSError) and error.errno in _FILE_ERRORS and error.filename is not None:
        why = f"cannot read or write {error.filename}: {error.strerror}"
        return f"{why}. Mend that, or name another file or folder."
    return None


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with the commands of other distributions."""
    parser = argparse.ArgumentParser(
        prog="kondo",
        description="Policy-gradient training that pays only for the backward passes worth it.",
        epilog="`kondo COMMAND --help` explains a command.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=16),
    )
    parser.add_argument("--version", action="version", version=f"kondo {kondo.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for added in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
        added.load()(commands)
    for name, summary in _ELSEWHERE.items():
        if name not in commands.choices:
            absent = commands.add_parser(name, help=f"{summary} (needs kondo-lab)", add_help=False)
            absent.add_argument("ignored", nargs=argparse.REMAINDER)
            absent.set_defaults(run=_missing)
    for add in (add_plan, add_actors, add_completion):
        add(commands)
    return parser


def _missing(options: argparse.Namespace) -> int:
    """Say which distribution brings the command."""
    install = install_command("kondo-lab")
    return fail(options, f"this command is part of kondo-lab. Run: {install}")
