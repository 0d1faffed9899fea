"""Tables of result pages, written from a run's headline.csv.

A page has a place for each of its tables:

    <!-- table NAME -->
    ...
    <!-- end of table -->

`python -m kondo_lab.studies.page_tables mnist-kondo ...` fills docs/results/studies/NAME.md
of each study from results/NAME-vVERSION, in the repository's root. What the tables are, a study's page.py says:
`tables(headline, settings)` -> {name: Markdown}.
"""

import importlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kondo_lab.studies import registry

_PLACE = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end of table -->)", flags=re.DOTALL)
MARKS = {"differs": " **differs**", "noisy": " (noisy)"}
"""What is added to a number; a match needs no word."""


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with its tables replaced.

    Raises:
        ValueError: a table has no place, or a place no table.
    """
    places = [name for _, name, _ in _PLACE.findall(text)]
    if sorted(places) != sorted(tables):
        raise ValueError(
            f"text must have one place for each of the tables {sorted(tables)}, got places for "
            f"{sorted(places)}; write <!-- table NAME --> and <!-- end of table -->."
        )
    return _PLACE.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def lines(headline: pd.DataFrame, **fields: Any) -> pd.DataFrame:
    """Return the lines with these fields; numbers of x within the digits of the file."""
    chosen = headline
    for name, value in fields.items():
        if isinstance(value, str):
            chosen = chosen[chosen[name] == value]
        else:
            numbers = pd.to_numeric(chosen[name], errors="coerce")
            chosen = chosen[np.isclose(numbers, value, rtol=1e-5, atol=0)]
    return chosen


def cell(headline: pd.DataFrame, *, error: bool = True, **fields: Any) -> str:
    """Return the number of a line with its standard error and verdict; "" if there is no line."""
    found = lines(headline, **fields)
    if not len(found):
        return ""
    line = found.iloc[0]
    told = number(line["ours"])
    if error and not pd.isna(line["se"]):
        told += f" ± {number(line['se'], digits=2)}"
    return told + MARKS.get(line["verdict"], "")


def number(value: float, digits: int = 3) -> str:
    """Return a number as tables have it, without a 0 before the point.

    Example:
        >>> from kondo_lab.studies.page_tables import number
        >>> number(0.01712), number(13.235), number(224845.0)
        ('.0171', '13.2', '225,000')
    """
    if not math.isfinite(value):
        return "never" if math.isinf(value) else "-"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return re.sub(r"^(-?)0\.", r"\1.", f"{rounded:,.{places}f}")


def write(name: str, root: Path) -> Path:
    """Fill the page of a study, by its name, and return where it is."""
    study = registry.find(name)
    page = importlib.import_module(f"kondo_lab.studies.{name.replace('-', '_')}.page")
    headline = read(root / "results" / f"{name}-v{study.version}" / "headline.csv")
    path = root / "docs" / "results" / "studies" / f"{name}.md"
    tables = page.tables(headline, study.settings("full", None))
    path.write_text(fill(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return path


def read(path: Path) -> pd.DataFrame:
    """Return a headline.csv; empty texts stay empty."""
    return pd.read_csv(path, keep_default_na=False, na_values={"se": "", "expected": ""})


def main(names: Sequence[str]) -> None:
    """Fill the pages of these studies."""
    for name in names:
        print(f"wrote {write(name, Path.cwd())}")


if __name__ == "__main__":
    main(sys.argv[1:])
