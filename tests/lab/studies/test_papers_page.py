"""The counts of verdicts in docs/results/papers.md are those of the committed results."""

import re
from collections import Counter
from pathlib import Path

import pytest

from kondo_lab.evidence import result_folder

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "results" / "papers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lines():
    """Study -> lines of its committed results."""
    return {
        re.sub(r"-v\d+$", "", path.parent.name): result_folder.read(path.parent).headline
        for path in sorted((ROOT / "results").glob("*/headline.csv"))
    }


@pytest.fixture(scope="module")
def counts(lines):
    """Study -> verdict -> lines that are compared with a paper."""
    found = {
        study: Counter(line.verdict for line in own if line.against == "paper")
        for study, own in lines.items()
    }
    return {study: own for study, own in found.items() if own}


def row(name, own):
    return f"| {name} | {own['matches']} | {own['noisy']} | {own['differs']} |"


def test_the_page_counts_the_verdicts_of_every_study(counts):
    shown = re.findall(r"^\| ([a-z-]+) \| \d+ \| \d+ \| \d+ \|$", PAGE, flags=re.MULTILINE)
    assert shown == [*counts, "all"]
    for name, own in counts.items():
        assert row(name, own) in PAGE
    every = sum(counts.values(), Counter())
    assert row("all", every) in PAGE
    told = f"Of {every.total()} numbers and orders, {every['matches']} match the papers, "
    told += f"{every['noisy']} are too noisy to tell and {every['differs']} differ."
    assert told in " ".join(PAGE.split())


def test_the_page_gives_the_share_with_and_without_what_was_fitted(lines):
    told = " ".join(PAGE.split())
    for kinds, words in (
        (("paper",), "That is {share:.0f}% of {every}."),
        (("paper", "fitted"), "{matches} of {every} numbers of the papers match, {share:.0f}%"),
    ):
        counted = [line for own in lines.values() for line in own if line.against in kinds]
        matches, every = sum(line.verdict == "matches" for line in counted), len(counted)
        share = 100 * matches / every
        assert words.format(matches=matches, every=every, share=share) in told


def test_the_page_counts_what_is_compared_with_anything_else(lines):
    others = Counter(
        (line.against, line.verdict) for own in lines.values() for line in own if line.verdict
    )
    told = " ".join(PAGE.split())
    for against, words in (
        ("fitted", "numbers match"),
        ("abstract", "cells agree"),
        ("formula", "numbers agree with a formula"),
        ("simulation", "with a simulation"),
        ("third party", "with a third party's"),
    ):
        every = sum(count for (whose, _), count in others.items() if whose == against)
        assert f"{others[against, 'matches']} of {every} {words}" in told
