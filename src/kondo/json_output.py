"""The option --json: results of commands as JSON on standard output."""

import argparse
import json
import math
from collections.abc import Mapping
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
