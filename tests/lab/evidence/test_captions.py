"""Captions of figures: of the committed records, with few seeds, and with numbers that move."""

import functools
import re
from pathlib import Path

import pytest

from kondo_lab.evidence import captions, plotting, records, runner
from kondo_lab.evidence.run_manifest import read_manifest, settings_of
from kondo_lab.evidence.study import Analysis, Claim, Estimate, headline
from kondo_lab.studies import registry
from kondo_lab.studies.asynchrony.captions import captions as asynchrony
from kondo_lab.studies.bandit_dg.captions import captions as bandit_dg
from kondo_lab.studies.bandit_kondo.captions import captions as bandit_kondo
from kondo_lab.studies.contamination.captions import captions as contamination
from kondo_lab.studies.frontier.captions import caption as frontier
from kondo_lab.studies.frontier.points import Task
from kondo_lab.studies.measured.captions import captions as measured
from kondo_lab.studies.scale.captions import captions as scale

RESULTS = Path(__file__).parents[3] / "results"
FOLDERS = (
    "asynchrony-v1",
    "bandit-dg-v1",
    "bandit-kondo-v1",
    "contamination-v1",
    "control-v1",
    "frontier-v1",
    "gambling-v1",
    "lm-frictions-v1",
    "lm-gates-v1",
    "lm-rl-v2",
    "measured-cpu-v1",
    "measured-cuda-v1",
    "scale-v1",
)
SAYS_MORE = ("below", "above", "claim", "(met)", "missed", "not clearly different")
"""What a caption of too few seeds does not say."""


def line(series, mean, se=0.01, seeds=10, x="", metric="error"):
    return headline("Fig 1", series, metric, x, Estimate(mean, se, seeds))


def compared(one, other, **options):
    told = {"otherwise": "Error by step."} | options
    return captions.compared("DG's error is", one, {"PG's": other}, **told)


@functools.cache
def committed(name):
    """Return the study, the settings, the records and the manifest of a committed folder."""
    folder = RESULTS / name
    if not (folder / runner.RECORDS).exists():
        pytest.skip("results/ of the repository is not here")
    manifest = read_manifest(folder)
    study = registry.find(manifest["study"])
    settings = settings_of(
        study, manifest["size"], manifest["num_seeds"], manifest.get("first_seed", 0)
    )
    return study, settings, records.table(records.read(folder / runner.RECORDS)), manifest


@functools.cache  # an analysis takes seconds, and no test changes what it returns
def analysed(name):
    """Return the analysis of all records of a committed folder."""
    return analysed_of(name, lambda table: table["seed"] >= 0)


def analysed_of(name, keep):
    """Return the analysis of some records of a committed folder."""
    study, settings, table, _ = committed(name)
    with plotting.style():
        return study.analyse(table[keep(table)], settings)


# Sentences.


def test_a_difference_that_seeds_decide_is_said_with_both_numbers_and_the_seeds():
    low, high = line("DG", 0.02, 0.001), line("PG", 0.05, 0.002)
    told = "DG's error is 0.02 ± 0.001, below PG's 0.05 ± 0.002 (10 seeds)."
    assert compared(low, high) == told
    assert ", above PG's 0.02 " in compared(high, low)
    assert compared(low, high, verdict="; claim met").endswith(" (10 seeds; claim met).")
    assert compared(low, high, show=captions.percent).startswith("DG's error is 2 ± 0.1%, ")


def test_noise_and_few_seeds_are_not_called_a_difference():
    noisy = compared(line("DG", 0.02, 0.05), line("PG", 0.05, 0.05))
    assert ", not clearly different from PG's " in noisy
    few = [line(name, mean, 0.001, seeds=2) for name, mean in (("DG", 0.02), ("PG", 0.05))]
    told = "DG's error is 0.02 ± 0.001, against PG's 0.05 ± 0.001 (2 seeds)."
    assert compared(*few, verdict="; claim met") == told
    exact = compared(line("DG", 0.02, seeds=1), line("PG", 0.5, seeds=1), exact=True)
    assert exact.endswith("below PG's 0.5 ± 0.01 (exact).")


def test_without_a_number_a_caption_says_what_is_drawn():
    there, without = line("DG", 0.02), line("PG", float("nan"))
    assert compared(None, there) == "Error by step."
    assert compared(there, None) == "Error by step."
    assert compared(there, without) == compared(without, there) == "Error by step."
    assert captions.stated("It is {0}", [there, None], otherwise="Drawn.") == "Drawn."
    assert (
        captions.stated("It is {0}", [there], otherwise="Drawn.") == "It is 0.02 ± 0.01 (10 seeds)."
    )


def test_numbers_seeds_and_claims_in_words():
    one, five, three = (line("DG", 0.1, seeds=n) for n in (1, 5, 3))
    assert captions.seeds_told(one) == "one seed"
    assert captions.seeds_told(five, three) == "3 to 5 seeds"
    assert captions.seeds_told(five, unit="round") == "5 rounds"
    assert captions.percent(Estimate(0.0163, 0.0004, 10)) == "1.63 ± 0.04%"
    assert captions.plain(Estimate(0.92, 0.0, 10)) == "0.92"
    claims = [Claim("DG is lower", "missed", "2 of 3 match"), Claim("DG is faster", "open", "")]
    assert captions.verdict_told(claims, "lower") == "; claim missed"
    assert captions.verdict_told(claims, "lower", "of a tenth") == "; claim of a tenth: missed"
    assert captions.verdict_told(claims, "longer") == ""
    told = captions.claimed(claims, "is lower", [five], otherwise="Drawn.")
    assert told == "DG is lower: missed (2 of 3 match; 5 seeds)."
    assert captions.claimed(claims, "is lower", [one], otherwise="Drawn.") == "Drawn."
    assert captions.claimed(claims, "is longer", [five], otherwise="Drawn.") == "Drawn."


def test_lines_are_found_by_the_start_of_a_metric_and_by_their_furthest_x():
    lines = [line("DG", n, x=n, metric=f"error, step {n}") for n in (1, 2)]
    assert captions.starting(lines, "DG", "error,") is lines[0]
    assert captions.starting(lines, "DG", "error,", 2) is lines[1]
    assert captions.starting(lines, "PG", "error,") is None
    same = [line("DG", n, x=n) for n in (3, 10, 2)]
    assert captions.furthest(same, "DG", "error") is same[1]
    assert captions.furthest(same, "PG", "error") is None


def test_only_figures_that_are_there_get_captions():
    with plotting.style():
        figure, _ = plotting.grid(1, 1)
    found = captions.with_captions(Analysis(figures={"a": figure}), {"a": "One.", "b": "Two."})
    assert found.captions == {"a": "One."}


# Studies.


def written(value):
    """Return the ways in which captions write a number."""
    forms = (f"{value:.3g}", f"{100 * value:.3g}", f"{value:,.0f}", f"{value:.2f}", f"{value:.1f}")
    return {*forms, f"{100 * value:.1f}"}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_figure_of_the_committed_records_states_a_number_of_the_headline(name):
    found, manifest = analysed(name), committed(name)[-1]
    assert list(found.captions) == list(found.figures)
    assert len(set(found.captions.values())) == len(found.captions)
    assert manifest["captions"] == found.captions
    known = {form for each in found.headline for form in written(each.ours)}
    known |= {number for claim in found.claims for number in numbers(claim.measured)}
    for caption in found.captions.values():
        assert caption.endswith(".")
        assert "nan" not in caption
        assert known & {*numbers(caption)}, caption


def numbers(text):
    return [each.rstrip(".,") for each in re.findall(r"-?\d[\d,.]*(?:e[+-]\d+)?", text)]


@pytest.mark.parametrize(
    "name", ["bandit-dg-v1", "control-v1", "frontier-v1", "gambling-v1", "lm-gates-v1", "lm-rl-v2"]
)
def test_two_seeds_claim_nothing(name):
    found = analysed_of(name, lambda table: table["seed"] < 2)
    assert set(found.captions) == set(found.figures)
    for figure, caption in found.captions.items():
        if figure != "prop2-eta":  # its sets are drawn anew at every seed
            assert not any(word in caption for word in SAYS_MORE), caption


def test_missing_parts_leave_the_captions_of_the_others():
    found = analysed_of("bandit-dg-v1", lambda table: table["part"] == "single")
    assert list(found.captions) == ["fig5-one-context"]
    assert "After 150 steps DG's error is" in found.captions["fig5-one-context"]
    none = analysed_of(
        "lm-rl-v2", lambda table: ~table["series"].isin(["random by PG", "delight by PG"])
    )
    assert none.captions["selections"].startswith("Reward at the end by what selects")


CALLS = {
    "asynchrony-v1": asynchrony,
    "bandit-dg-v1": bandit_dg,
    "bandit-kondo-v1": bandit_kondo,
    "contamination-v1": contamination,
    "measured-cpu-v1": measured,
    "scale-v1": lambda lines, claims: scale(lines, claims, ["digits", "reversal"], 8),
    "frontier-v1": lambda lines, _: {
        "mnist": frontier(lines, Task("mnist", "test error", 0.05), 2)
    },
}
NOT_BY_NUMBER = {"errors"}
"""Figures whose captions quote claims alone."""


@pytest.mark.parametrize("name", CALLS)
def test_other_numbers_make_other_captions(name):
    found = analysed(name)
    moved = [each._replace(ours=each.ours * 1.37 + 0.001) for each in found.headline]
    told = CALLS[name](moved, found.claims)
    for figure in told.keys() - NOT_BY_NUMBER:
        assert told[figure] != found.captions[figure], figure
    assert set(CALLS[name]([], []).keys()) >= told.keys()
