"""`kondo completion SHELL`: print a script that completes commands, options and names with Tab.

shtab writes the scripts. An argument may have an attribute `completions`, a function that returns
the words to complete it with: it is called for the script alone, since it may take seconds.
"""

import argparse
from collections.abc import Iterator

from kondo.cli.common import Commands

SHELLS = {
    "bash": 'eval "$(kondo completion bash)" in ~/.bashrc',
    "zsh": "kondo completion zsh > FOLDER/_kondo, a folder of $fpath",
    "fish": "kondo completion fish > ~/.config/fish/completions/kondo.fish",
}
"""Each shell, and where its script goes."""


def add_completion(commands: Commands) -> None:
    """Add `completion` to the command line."""
    uses = "; ".join(f"{shell}: {use}" for shell, use in SHELLS.items())
    parser = commands.add_parser(
        "completion",
        help="print a script for completion with Tab in bash, zsh or fish",
        description=f"Print a shell script that completes commands, options and names. {uses}.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that reads the script")
    parser.set_defaults(run=_print)


def _print(options: argparse.Namespace) -> int:
    import shtab

    from kondo.cli import make_parser

    parser = make_parser()
    for action in _actions(parser):
        if hasattr(action, "completions"):
            action.choices = action.completions()
        elif action.metavar in ("DIR", "FOLDER", "MODEL"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands.

    Describes each command by its line in the help: a shell shows it beside the name.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for told in action._choices_actions:
                inner = action.choices[told.dest]
                inner.description = told.help
                yield from _actions(inner)
        else:
            yield action
