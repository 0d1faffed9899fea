import math

import pytest

from kondo_lab import progress
from kondo_lab.part import Record
from kondo_lab.studies import records, runner
from kondo_lab.studies.claims import NOTHING
from kondo_lab.studies.reversal_fit import STUDY, analysis
from kondo_lab.studies.reversal_fit.analysis import Compared
from kondo_lab.studies.reversal_fit.claims import FIGURES, STATEMENT, claims
from kondo_lab.studies.reversal_fit.settings import SMALL, Pair, Settings
from kondo_lab.studies.study import Claim, Estimate, headline
from lab.studies import toy
from tolerances import assert_close

PAIR = Pair(64, 2e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-fit"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.read(out / runner.RECORDS)


def number(figure, method, expected, ours, metric="online error"):
    return Compared(figure, method, metric, 1.0, expected, Estimate(ours))


def line(part, method, pair, values, *, setting=math.nan, seed=0):
    """Records of one member from {step: error}."""
    return [
        Record(
            part=part,
            series=f"{method}, {pair.name}",
            setting=setting,
            seed=seed,
            step=step,
            forward=100 * step,
            backward=100 * step,
            metric="online error",
            value=value,
        )
        for step, value in values.items()
    ]


def test_every_pair_is_scored_on_every_figure_and_the_best_is_named_first(small):
    found, table = small
    assert set(found.figures) == {"scores", "fig8-learning-curves"}
    assert set(found.captions) == set(found.figures)
    assert set(table["part"]) == {"prefix", "tokens", "vocabularies", "lengths", "longest"}
    totals = {
        row.series: row.ours for row in found.headline if row.figure.startswith("all figures")
    }
    assert set(totals) == {pair.name for pair in SMALL.pairs}
    best = min(totals, key=lambda name: totals[name])
    width, rate = best.removeprefix("ff ").split(", lr ")
    assert found.findings[0].startswith(
        f"Best pair: feed-forward {width}, learning rate {rate}, with"
    )
    assert len(found.findings) == 1 + len(SMALL.pairs)


def test_what_is_fitted_has_no_verdict(small):
    assert {(row.against, row.verdict) for row in small[0].headline} == {("", "")}


def test_the_score_of_a_figure_is_the_root_mean_square_of_log_ratios():
    numbers = [number("a", "DG", 0.1, 0.1 * math.e), number("a", "PG", 0.2, 0.2 / math.e**2)]
    assert_close(analysis.score(numbers), math.sqrt((1 + 4) / 2))


def test_errors_below_a_thousandth_count_as_one():
    assert analysis.score([number("a", "DG", 2e-5, 0.0)]) == 0.0
    assert_close(analysis.score([number("a", "DG", 2e-5, 0.002)]), math.log(2))


def test_figures_count_alike_whatever_their_points_and_exact_ties_not_at_all():
    far = [number("a", "DG", 0.1, 0.1 * math.e**2)] * 5
    close = [number("b", "PG", 0.1, 0.1)]
    ties = [number("b", "PMPO", 0.1, 0.9)]
    figures, totals = analysis.scores([*far, *close, *ties])
    assert_close(figures["a"], 2.0)
    assert figures["b"] == 0.0
    assert_close(list(totals.values()), [math.sqrt(2.0)] * 2)


def test_each_reading_of_solved_has_a_score_of_its_own():
    solved = [
        number("Kondo Fig 10", "DG", 10.0, 10.0 * math.e, analysis.LENGTH + analysis.NOW),
        number("Kondo Fig 10", "DG", 10.0, 10.0, analysis.LENGTH + analysis.SO_FAR),
    ]
    figures, totals = analysis.scores([number("a", "DG", 0.1, 0.1), *solved])
    assert set(figures) == {
        "a",
        f"Kondo Fig 10, {analysis.NOW}",
        f"Kondo Fig 10, {analysis.SO_FAR}",
    }
    assert_close(totals[analysis.NOW], math.sqrt(1 / 2))
    assert totals[analysis.SO_FAR] == 0.0


def test_numbers_are_compared_where_they_stand_in_the_papers():
    curve = dict.fromkeys(range(20, 2501, 20), 0.5) | {1000: 0.0166}
    made = line("prefix", "DG-K 3%", PAIR, curve)
    made += line("prefix", "PMPO float32", PAIR, dict.fromkeys(curve, 0.3))
    tables = [records.frame(made, part="prefix")]
    ends = [
        row
        for size in (30, 50)
        for row in line("vocabularies", "PG", PAIR, {10_000: 0.2}, setting=size)
    ]
    tables.append(records.frame(ends, part="vocabularies"))
    lengths = [
        row
        for length, late in ((12, 0.0), (18, 0.1), (24, 0.4))
        for row in line("lengths", "DG", PAIR, {2500: 0.5, 5000: late}, setting=length)
    ]
    tables.append(records.frame(lengths, part="lengths"))
    found = analysis.compared(analysis.pd.concat(tables), Settings(), PAIR)
    got = {(each.figure, each.method, each.metric, each.x): each for each in found}
    assert_close(got["Kondo Fig 8", "DG-K 3%", "online error", 1000].ours.mean, 0.0166)
    assert got["Kondo Fig 8", "DG-K 3%", "online error", 1000].expected == 0.0083
    assert got["Kondo Fig 8", "PMPO float32", "online error", 2400].expected == 0.30
    assert ("Kondo Fig 8", "DG-K 3%", "online error", 5000) not in got
    assert got["DG Fig 9b", "PG", "online error", 50].expected == 0.43
    now = got["Kondo Fig 10", "DG", analysis.LENGTH + analysis.NOW, 500e3]
    assert_close(now.ours.mean, 18 + 6 * (0.25 - 0.1) / (0.4 - 0.1))
    so_far = got["Kondo Fig 10", "DG", analysis.LENGTH + analysis.SO_FAR, 500e3]
    assert_close(so_far.ours.mean, 12 * 1.0)
    early = got["Kondo Fig 10", "DG", analysis.LENGTH + analysis.NOW, 250e3]
    assert_close(early.ours.mean, 12 * 0.25 / 0.5)


def scores(**best):
    """Lines of two pairs on every figure; `best` says which pair has the lower score there."""
    figures = [*FIGURES[:3], *(f"{FIGURES[3]}, {how}" for how in ("now", "so far")), FIGURES[4]]
    pairs = ("ff 64, lr 0.0002", "ff 128, lr 0.0001")
    return [
        headline(figure, pair, analysis.SCORE, "", 0.2 + 0.1 * (pairs.index(pair) != first))
        for figure in figures
        for first in [best.get(figure.split(",")[0].replace(" ", "_"), 0)]
        for pair in pairs
    ]


def test_the_claim_is_met_if_one_pair_fits_every_figure_best():
    (met,) = claims(scores())
    assert met.verdict == "met"
    assert "DG Fig 9a: ff 64, lr 0.0002" in met.measured
    (missed,) = claims(scores(DG_Fig_9b=1))
    assert missed.verdict == "missed"
    assert "DG Fig 9b: ff 128, lr 0.0001" in missed.measured


def test_the_claim_is_open_until_every_figure_was_run():
    assert claims([line for line in scores() if line.figure != "DG Fig 9a"])[0].verdict == "open"
    assert claims([]) == [Claim(STATEMENT, "open", NOTHING)]
