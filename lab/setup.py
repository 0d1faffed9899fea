"""What pyproject.toml cannot say: the version of kondo-lab is that of kondo.

In a checkout it is read from src/kondo/__init__.py, which has the only copy. A source distribution
does not hold that file, so there it is read from the distribution's own PKG-INFO.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PLACES = {
    HERE.parent / "src" / "kondo" / "__init__.py": r'^__version__ = "(.+)"$',
    HERE / "PKG-INFO": r"^Version: (.+)$",
}


def version() -> str:
    """Return the version of the first place that exists."""
    for path, pattern in PLACES.items():
        if path.exists():
            found = re.search(pattern, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            if found:
                return found[1]
    raise ValueError(f"version: expected one of {', '.join(map(str, PLACES))}, found none.")


# Each dependency has its reason in docs/contributing/dependencies.md of the repository.
setup(
    version=version(),
    install_requires=[
        f"kondo=={version()}",
        "numpy>=2",
        "pandas>=2.2",
        "matplotlib>=3.9",
        "scikit-learn>=1.5",
        "pillow>=11",
        "rich>=13",
        "scipy>=1.13",
        "shtab>=1.13",
    ],
)
