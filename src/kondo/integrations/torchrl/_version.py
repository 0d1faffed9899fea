"""The versions of TorchRL that the tests pass with; importing this checks them."""

import importlib.metadata
import re

SUPPORTED = ">=0.14,<0.15"


def check_version(version: str | None) -> None:
    """Raise ImportError unless `version` of TorchRL (None: not installed) is one we support."""
    advice = f"kondo.integrations.torchrl supports torchrl{SUPPORTED}: pip install 'kondo[torchrl]'"
    if version is None:
        raise ImportError(f"{advice}; TorchRL is not installed.")
    if not re.match(r"0\.14(\D|$)", version):
        raise ImportError(f"{advice}; torchrl {version} is installed.")


def _installed() -> str | None:
    try:
        return importlib.metadata.version("torchrl")
    except importlib.metadata.PackageNotFoundError:
        return None


check_version(_installed())
