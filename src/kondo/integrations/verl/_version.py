"""The versions of verl whose private seams `trainer.py` and `worker.py` rely on."""

import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

SUPPORTED = ">=0.9.1,<0.10"

# Method -> its first parameters. tests/integrations/verl/test_contract.py holds more.
TRAINER_SEAMS = {
    "_compute_advantage": ("self", "batch", "metrics"),
    "_init_resource_pool_mgr": ("self",),
    "_init_tokenizer": ("self",),
    "_load_checkpoint": ("self",),
    "_save_checkpoint": ("self",),
    "_update_actor": ("self", "batch", "metrics"),
}
WORKER_SEAMS = {
    "set_loss_fn": ("self", "loss_fn"),
    "train_batch": ("self", "data"),
    "train_mini_batch": ("self", "data"),
}


def check_version(version: str | None) -> None:
    """Raise ImportError unless `version` of verl (None: not installed) is one we support."""
    advice = f"kondo.integrations.verl supports verl{SUPPORTED}: pip install 'kondo[verl]'"
    if version is None:
        raise ImportError(f"{advice}; verl is not installed.")
    release = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not (0, 9, 1) <= release < (0, 10):
        raise ImportError(f"{advice}; verl {version} is installed.")


def check_seams(owner: type[Any], seams: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ImportError if a method of verl's that we build on has other parameters."""
    for name, expected in seams.items():
        method = getattr(owner, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)
        if found[: len(expected)] != expected:
            raise ImportError(
                f"kondo.integrations.verl builds on {owner.__name__}.{name}{expected}, but verl "
                f"{installed()} has {found}; install a version of verl{SUPPORTED} that the tests "
                f"of kondo pass with, such as 0.9.1."
            )


def installed() -> str | None:
    """Return the version of verl that is installed, None if there is none."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return None
