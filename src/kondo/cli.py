"""The `kondo` command. Each subcommand is a function that adds its parser and a function it runs.

The base install is torch alone, so a subcommand imports what it needs when it runs; what is missing
is named together with the extra that brings it.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import kondo

_EXTRAS = {"numpy": "lab", "matplotlib": "lab", "sklearn": "lab", "rich": "lab"}

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


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
        if package not in _EXTRAS:
            raise
        extra = _EXTRAS[package]
        return _fail(options, f"{package} is not installed. Run: pip install 'kondo[{extra}]'")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _fail(options, "interrupted.")
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
    _add_demo(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="train PG, DG and DG-K side by side and compare them",
        description=(
            "Train the same small policies with PG, DG and DG-K (3%) on two tasks that need no "
            "download: handwritten digits as a bandit, and token reversal. Prints a table and "
            "writes a figure, a one-page report, the curves and a manifest. Takes one to three "
            "minutes on two CPU cores. Ctrl-C stops early and reports what there is."
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
    demo.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="first seed (default: %(default)s)"
    )
    demo.add_argument(
        "--quick", action="store_true", help="a few steps only: a trial whose numbers mean nothing"
    )
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from kondo.lab import demo, output, progress

    try:
        out = output.claim_folder(options.out)
    except OSError as error:
        return _fail(options, f"cannot write to {options.out}: {error.strerror}.")
    console = progress.make_console()
    if out.resolve() != options.out.resolve():
        notice = f"{options.out} already holds results; writing to {out}."
        console.print(notice, highlight=False, soft_wrap=True)
    try:
        outcome = demo.run_demo(
            demo.QUICK if options.quick else demo.DemoSettings(),
            seed=options.seed,
            out=out,
            command=options.typed,
            console=console,
        )
    except BaseException:
        output.release_folder(out)
        raise
    if not outcome.rows:
        output.release_folder(out)
        console.print("Interrupted before the first results; nothing was written.")
        return INTERRUPTED
    if outcome.interrupted:
        console.print("Interrupted: this is the part of the run that was finished.")
    if options.quick:
        console.print("This was a quick trial: its numbers mean nothing.")
    for name in output.FILES:
        console.print(f"wrote {out / name}", highlight=False, soft_wrap=True)
    return INTERRUPTED if outcome.interrupted else 0


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        seed = -1
    if seed < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return seed


def _fail(options: argparse.Namespace, message: str) -> int:
    print(f"kondo {options.command}: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
