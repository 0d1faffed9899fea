"""What command lines share: --json, functions named as MODULE:FUNCTION, and paths."""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json to a command that prints its result."""
    text = "print the result as JSON on standard output; everything else goes to standard error"
    parser.add_argument("--json", action="store_true", help=text)


def print_json(content: Mapping[str, Any]) -> None:
    """Print the result of a command as JSON on standard output.

    Example:
        >>> print_json({"noise": float("nan"), "rate": 0.5})
        {
          "noise": null,
          "rate": 0.5
        }
    """
    print(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """Return the value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def look_here() -> None:
    """Let modules of the current folder be found, as by `python -m`."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def find_function(name: str, argument: str) -> Any:
    """Return what MODULE:FUNCTION stands for; None if the module has no such name.

    A module in the current folder is found, as by `python -m`. `argument` is what the command line
    calls it, for messages.

    Raises:
        ValueError: `name` has no colon, or there is no such module.

    Example:
        >>> find_function("math:sqrt", "TASK")(9.0)
        3.0
    """
    module, _, function = name.partition(":")
    if not (module and function) or module.startswith("."):
        raise ValueError(f"{argument} must be MODULE:FUNCTION, got {name}.")
    look_here()
    try:
        return getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise  # the module is there, and something that it imports is not
        raise ValueError(f"{argument} {name}: no module {module} here.") from error


def given_path(text: str) -> Path:
    """Return a path. An empty one, as of an unset shell variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must name a file or a folder, got an empty text")
    return Path(text)
