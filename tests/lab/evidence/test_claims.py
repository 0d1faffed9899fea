import json
import math
import re
from pathlib import Path

import pytest

from kondo_lab.evidence import bundled_claims, claims, result_folder
from kondo_lab.evidence.study import Claim, Estimate, headline, ordering
from kondo_lab.studies import pages, registry
from lab.studies import toy

ROOT = Path(__file__).parents[3]


def line(ours, expected=1.0, se=math.nan, seeds=10, **changes):
    made = headline("Fig 1", "DG", "error", 3, Estimate(ours, se, seeds), expected=expected)
    return made._replace(**changes)


@pytest.mark.parametrize(
    ("ours", "verdict", "measured"),
    [
        ([1.0, 1.1], "met", "DG at 3: 1, expected 1; DG at 3: 1.1, expected 1"),
        ([1.0, 9.0], "missed", "1 of 2 match, 1 differs: DG at 3: 9, expected 1"),
        (
            [9.0] * 5,
            "missed",
            "0 of 5 match, 5 differ: " + "DG at 3: 9, expected 1; " * 3 + "2 more",
        ),
        ([1.0] * 4, "met", "4 of 4 match"),
        ([], "open", "not measured"),
    ],
)
def test_a_claim_is_met_if_every_line_matches(ours, verdict, measured):
    assert claims.by_lines("it works", map(line, ours)) == Claim("it works", verdict, measured)


def test_noise_leaves_a_claim_open_and_lines_without_an_expected_number_decide_nothing():
    noisy, without = line(1.2, se=0.5), line(1.0, expected=None)
    assert noisy.verdict == "noisy"
    assert claims.by_lines("a", [line(1.0), noisy]).verdict == "open"
    assert claims.by_lines("a", [noisy, line(9.0)]).verdict == "missed"
    assert claims.by_lines("a", [without]).verdict == "open"
    assert claims.by_lines("a", [without, line(1.0)]).verdict == "met"


def test_an_order_is_named_by_its_series():
    order = ordering("Fig 1", "error", 7, order=["DG", "PG"], ours={"DG": 1.0, "PG": 2.0})
    assert claims.by_lines("a", [order]).measured == "error, DG < PG at 7"


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ((1.0, 0.1), (2.0, 0.1), "met"),
        ((2.0, 0.1), (1.0, 0.1), "missed"),
        ((1.0, 0.5), (1.5, 0.5), "open"),
    ],
)
def test_lower_is_by_more_than_two_standard_errors(one, other, verdict):
    found = claims.lower("a", line(one[0], se=one[1]), line(other[0], se=other[1]))
    assert found.verdict == verdict
    assert claims.lower("a", line(1.0), None).verdict == "open"


def test_together_all_must_be_met():
    met, missed, left = (Claim(word, word, "1") for word in ("met", "missed", "open"))
    assert claims.together("all", [met, met]) == Claim("all", "met", "2 of 2 met")
    assert claims.together("all", [met, left]).verdict == "open"
    found = claims.together("all", [met, left, missed])
    assert found == Claim("all", "missed", "1 of 3 met; open open (1); missed missed (1)")
    assert claims.together("all", []).verdict == "open"


@pytest.mark.parametrize("seeds", [2, 3, 5, 30])
def test_chance_errors_are_those_of_students_t(seeds):
    known = {2: 6.31, 3: 2.92, 5: 2.13, 30: 2.0}
    assert claims.chance_errors(seeds) == known[seeds]


# What every study claims.


@pytest.mark.parametrize("study", registry.all_studies(), ids=lambda study: study.name)
def test_every_study_makes_claims(study):
    package = Path(registry.__file__).parent / study.name.replace("-", "_")
    assert any("Claim" in path.read_text(encoding="utf-8") for path in package.glob("*.py"))


RESULTS = [path.parent for path in sorted((ROOT / "results").glob("*/claims.csv"))]


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_claims_of_results_were_measured(folder):
    found = result_folder.read(folder).claims
    assert found
    statements = [claim.statement for claim in found]
    assert len(set(statements)) == len(statements)
    assert not [claim for claim in found if claim.measured == claims.NOTHING]


def test_the_bundled_claims_are_those_of_the_results():
    """If this fails: python -m kondo_lab.studies.pages, from the root."""
    assert bundled_claims.read() == bundled_claims.gather(ROOT / "results", pages.versions())


def test_the_page_counts_the_claims():
    page = (ROOT / "docs" / "results" / "papers.md").read_text(encoding="utf-8")
    assert bundled_claims.table(bundled_claims.read()) in page


def test_the_readme_counts_the_claims():
    told = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    everything = [claim for own in bundled_claims.read().values() for claim in own]
    assert f"Of {len(everything)} claims: {bundled_claims.told(everything)}" in told


def test_folders_of_a_study_may_name_a_device_and_older_versions_do_not_count(tmp_path):
    measured = registry.find("measured")
    claim = [Claim("a", "met", "1")]
    bundled = {"measured-cpu-v1": claim, "measured-v0": claim, "lm-measured-v1": claim}
    assert bundled_claims.of_study(measured, bundled) == {"measured-cpu": claim}
    assert bundled_claims.of_study(toy.study(), bundled) == {}


def test_small_runs_are_not_bundled(tmp_path):
    from lab.studies.result_folders import MNIST_CLAIMS, MNIST_LINES, manifest, write_folder

    for name, size, version in (("a", "small", 1), ("b", "full", 1), ("c", "full", 99)):
        facts = manifest(size=size, version=version)
        write_folder(tmp_path / name, facts, MNIST_LINES, claims=MNIST_CLAIMS)
    current = registry.find("mnist-kondo").version
    facts = manifest(version=current)
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(facts), encoding="utf-8")
    assert list(bundled_claims.gather(tmp_path, pages.versions())) == ["b"]
