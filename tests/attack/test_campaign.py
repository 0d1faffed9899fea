"""The frame of the attack: a case is repeated by its seed, and no finding is lost."""

import csv
import random
from collections import Counter
from pathlib import Path

import pytest

from attack.campaign import Campaign, Finding


def test_repeats_a_case_by_its_seed():
    drawn = []

    def case(draw: random.Random, counts: Counter) -> None:
        drawn.append(draw.random())
        if len(drawn) == 3:
            raise ZeroDivisionError("three")

    campaign = Campaign("here", seed=5, seconds=0.05)
    with pytest.raises(Finding, match="ZeroDivisionError: three") as found:
        campaign.run(case)
    assert campaign.findings == 1
    assert campaign.cases == len(drawn) > 3, "a finding does not end the campaign"
    seed = int(str(found.value).split("--attack-case ")[1].split()[0])
    again = []
    Campaign("here", seed=0, seconds=9.0, only=seed).run(
        lambda draw, _: again.append(draw.random())
    )
    assert again == [drawn[2]]


def test_one_seed_gives_the_same_cases():
    seen = []
    for _ in range(2):
        drawn = []
        Campaign("here", seed=7, seconds=0.02).run(lambda draw, _, d=drawn: d.append(draw.random()))
        seen.append(drawn[:1])
    assert seen[0] == seen[1]


def test_counts_what_cases_did():
    def case(draw: random.Random, counts: Counter) -> None:
        counts["steps"] += 2

    campaign = Campaign("here", seed=1, seconds=0.01)
    campaign.run(case)
    assert campaign.counts["steps"] == 2 * campaign.cases > 0


def test_the_page_shows_the_last_campaign():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "concepts" / "reliability.md").read_text()
    with (root / "benchmarks" / "data" / "attack_cpu.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert sum(float(line["seconds"]) for line in lines) >= 600
    for line in lines:
        shown = next(row for row in page.splitlines() if row.startswith(f"| {line['fuzzer']} |"))
        cells = [cell.strip() for cell in shown.strip("|").split("|")]
        assert cells[2:4] == [f"{float(line['seconds']):.0f}", f"{int(line['cases']):,}"]
        assert cells[5] == line["findings"] == "0"
        assert set(cells[4].split(", ")) <= set(line["did"].split(", "))
