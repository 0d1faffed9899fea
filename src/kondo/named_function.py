"""Functions that a command line names as MODULE:FUNCTION."""

import importlib
import sys
from typing import Any


def find(name: str, argument: str) -> Any:
    """Return what MODULE:FUNCTION stands for; None if the module has no such name.

    A module in the current folder is found, as by `python -m`.

    Args:
        name: MODULE:FUNCTION.
        argument: what the command line calls it, for messages.

    Raises:
        ValueError: `name` has no colon, or there is no such module.

    Example:
        >>> from kondo.named_function import find
        >>> find("math:sqrt", "TASK")(9.0)
        3.0
    """
    module, _, function = name.partition(":")
    if not (module and function) or module.startswith("."):
        raise ValueError(f"{argument} must be MODULE:FUNCTION, got {name}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise  # the module is there, and something that it imports is not
        raise ValueError(f"{argument} {name}: no module {module} here.") from error
