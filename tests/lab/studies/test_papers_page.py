"""The counts of verdicts in docs/papers.md are those of the committed results."""

import re
from collections import Counter
from pathlib import Path

import pytest

from kondo_lab.studies import result_folder

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def counts():
    """Study -> verdict -> lines of its committed results that are compared with a paper."""
    found = {}
    for path in sorted((ROOT / "results").glob("*/headline.csv")):
        lines = result_folder.read(path.parent).headline
        own = Counter(line.verdict for line in lines if line.against == "paper")
        if own:
            found[re.sub(r"-v\d+$", "", path.parent.name)] = own
    return found


def row(name, own):
    return f"| {name} | {own['matches']} | {own['noisy']} | {own['differs']} |"


def test_the_page_counts_the_verdicts_of_every_study(counts):
    shown = re.findall(r"^\| ([a-z-]+) \| \d+ \| \d+ \| \d+ \|$", PAGE, flags=re.MULTILINE)
    assert shown == [*counts, "all"]
    for name, own in counts.items():
        assert row(name, own) in PAGE
    assert row("all", sum(counts.values(), Counter())) in PAGE
