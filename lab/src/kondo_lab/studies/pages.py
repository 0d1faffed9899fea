"""Write what the repository says of its results: tables of pages, and the claims of `kondo list`.

    python -m kondo_lab.studies.pages mnist-kondo ...

fills docs/results/studies/NAME.md of each study from results/NAME-vVERSION. Its package has a
module `page` with `tables(headline, settings)` -> {name: Markdown}. Without names

    python -m kondo_lab.studies.pages

writes the file of `kondo list` from the claims in results/, of full runs of each study's present
version, and prints the table for docs/results/papers.md. Both run in the repository's root.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kondo_lab.evidence import bundled_claims
from kondo_lab.evidence.page_tables import fill, read
from kondo_lab.evidence.result_folder import HEADLINE
from kondo_lab.studies import registry


def page_path(name: str, root: Path) -> Path:
    """Return where the page of a study is."""
    return root / "docs" / "results" / "studies" / f"{name}.md"


def made(name: str, root: Path) -> dict[str, str]:
    """Return the tables of a study's page from the run of its newest version, name -> Markdown.

    Raises:
        ValueError: that version was not run.
    """
    study = registry.find(name)
    path = root / "results" / f"{name}-v{study.version}" / HEADLINE
    if not path.exists():
        raise ValueError(
            f"{name} must have been run at version {study.version}, but {path} does not exist; "
            f"run: kondo run {name} --out {path.parent}"
        )
    page = importlib.import_module(f"kondo_lab.studies.{name.replace('-', '_')}.page")
    tables: dict[str, str] = page.tables(read(path), study.settings("full", None))
    return tables


def write(name: str, root: Path) -> Path:
    """Fill the page of a study, by its name, and return where it is."""
    path = page_path(name, root)
    path.write_text(fill(path.read_text(encoding="utf-8"), made(name, root)), encoding="utf-8")
    return path


def versions() -> Mapping[str, int]:
    """Return study -> its present version."""
    return {study.name: study.version for study in registry.all_studies()}


def main(names: Sequence[str]) -> None:
    """Fill the pages of these studies; without names, bundle the claims."""
    for name in names:
        print(f"wrote {write(name, Path.cwd())}")
    if not names:
        print(bundled_claims.bundle(Path("results"), versions()))


if __name__ == "__main__":
    main(sys.argv[1:])
