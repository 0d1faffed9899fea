"""Check that the installed version of a framework is one that an integration was built on."""

import dataclasses
import importlib.metadata
import inspect
import re
from collections.abc import Mapping
from typing import Any

Seams = Mapping[str, tuple[str, ...]]
"""Method -> its first parameters."""


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework, and the versions of it that we support."""

    package: str
    """As `pip` calls it; the integration and its extra have the same name."""
    lowest: tuple[int, ...]
    below: tuple[int, ...]
    tested: str
    """A version that the tests pass with."""

    @property
    def supported(self) -> str:
        """The range, as `pip` writes it."""
        low, high = (".".join(map(str, release)) for release in (self.lowest, self.below))
        return f"{self.package}>={low},<{high}"

    @property
    def installed(self) -> str | None:
        """The installed version; None if there is none."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def check(self, version: str | None) -> None:
        """Raise ImportError unless a version (None: not installed) is one we support."""
        if version is None or not self.lowest <= release_of(version) < self.below:
            found = "is not installed" if version is None else f"{version} is installed"
            raise ImportError(
                f"kondo.integrations.{self.package} supports {self.supported}: pip install "
                f"'kondo[{self.package}]'; {self.package} {found}."
            )

    def check_seams(self, owner: type[Any], seams: Seams, others: Seams | None = None) -> None:
        """Raise ImportError if a method of the framework's class has other parameters than ours.

        `others` may stand instead of `seams`, in some versions.
        """
        for name, expected in seams.items():
            method = getattr(owner, name, None)
            found = () if method is None else tuple(inspect.signature(method).parameters)
            known = (expected, (others or {}).get(name, expected))
            if not any(found[: len(seam)] == seam for seam in known):
                raise ImportError(
                    f"kondo.integrations.{self.package} builds on {owner.__name__}.{name}"
                    f"{expected}, but {self.package} {self.installed} has {found}; install a "
                    f"version of {self.supported} that the tests of kondo pass with, such as "
                    f"{self.tested}."
                )
