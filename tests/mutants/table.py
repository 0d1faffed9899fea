"""The planted faults: one TOML file per area, one entry per fault.

[[mutant]]
name = "kebab-case, unique"
file = "src/kondo/..."
text = "what stands there, exactly once in the file"
replacement = "what is planted instead"
tests = ["tests/...", "tests/...::test_name"]    # at least one of their tests must fail
why = "what a user would get"
"""

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One planted fault."""

    area: str
    """Name of the table."""
    name: str
    file: str
    """From the root of the project, like the tests."""
    text: str
    replacement: str
    tests: Sequence[str]
    why: str

    def plant(self, root: Path) -> None:
        """Replace the text in the copy at `root`; a ValueError unless it is there exactly once."""
        path = root / self.file
        source = path.read_text() if path.is_file() else ""
        if (found := source.count(self.text)) != 1:
            raise ValueError(f"its text occurs {found} times in {self.file}, expected once")
        if self.text == self.replacement:
            raise ValueError("its replacement is its text")
        path.write_text(source.replace(self.text, self.replacement))


def read(folder: Path = FOLDER) -> list[Mutant]:
    """Return the mutants of all tables in a folder."""
    return [
        Mutant(area=path.stem, **row)
        for path in sorted(folder.glob("*.toml"))
        for row in tomllib.loads(path.read_text())["mutant"]
    ]
