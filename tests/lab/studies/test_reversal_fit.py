import math

import numpy as np
import pytest

from kondo_lab.evidence import progress, records, runner
from kondo_lab.evidence.claims import NOTHING
from kondo_lab.evidence.study import Claim, headline
from kondo_lab.studies.reversal_fit import STUDY, analysis, resamples
from kondo_lab.studies.reversal_fit.analysis import USED, Compared
from kondo_lab.studies.reversal_fit.claims import FIGURES, STATEMENT, WON, claims
from kondo_lab.studies.reversal_fit.settings import SMALL, Pair, Settings
from lab.made_up import Record, table_of
from lab.studies import toy
from tolerances import assert_close

PAIR = Pair(64, 2e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-fit"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


def number(figure, method, expected, ours, metric="online error"):
    return Compared(figure, method, metric, 1.0, expected, {0: ours})


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
    figures = {"prefix", "tokens", "vocabularies", "lengths", "longest"}
    finals = {f"{figure}-finalists" for figure in ("vocabularies", "lengths", "longest")}
    assert set(table["part"]) == figures | finals
    more = table[table["part"].isin(finals)]
    assert set(more["seed"]) == {1}  # beside seed 0 of the first parts
    assert set(more["series"].str.partition(", ")[2]) == {SMALL.finalists[0].name}
    totals = {
        row.series: row.ours for row in found.headline if row.figure.startswith("all figures,")
    }
    assert set(totals) == {pair.name for pair in SMALL.pairs}
    best = min(totals, key=lambda name: totals[name])
    width, rate = best.removeprefix("ff ").split(", lr ")
    assert found.findings[0].startswith(
        f"Best pair: feed-forward {width}, learning rate {rate}, with"
    )
    assert len(found.findings) == 2 + len(SMALL.pairs)
    won = {row.series: row.ours for row in found.headline if row.metric == WON}
    assert set(won) == set(totals)
    assert_close(sum(won.values()), 1.0)
    sure = found.findings[1]
    assert sure.startswith("Lowest score in 1000 resamples of the seeds: ")
    # Everybody has one seed in Figure 8; in Figure 9 the finalist has two, so a spread.
    for name, share in won.items():
        alone = f"without a spread, {name}: DG Fig 8, "
        assert (alone in sure) == (share > 0)
        nine = f"{alone}{'Kondo Fig 8' if name == SMALL.finalists[0].name else 'DG Fig 9a'}"
        assert (nine in sure) == (share > 0)
    (claim,) = found.claims
    assert (claim.verdict, USED in claim.measured) == ("open", True)


def test_the_seeds_of_finalists_count_together(small):
    found, _ = small
    seeds = {row.series: row.seeds for row in found.headline if row.figure == "DG Fig 9b"}
    final = SMALL.finalists[0].name
    assert {name: number for name, number in seeds.items() if name.startswith("PG, ")} == {
        f"PG, {pair.name}": 2 if pair.name == final else 1 for pair in SMALL.pairs
    }


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
    tables = [table_of(made, part="prefix")]
    ends = [
        row
        for size in (30, 50)
        for row in line("vocabularies", "PG", PAIR, {10_000: 0.2}, setting=size)
    ]
    tables.append(table_of(ends, part="vocabularies"))
    lengths = [
        row
        for length, late in ((12, 0.0), (18, 0.1), (24, 0.4))
        for row in line("lengths", "DG", PAIR, {2500: 0.5, 5000: late}, setting=length)
    ]
    tables.append(table_of(lengths, part="lengths"))
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


def by_seed(figure, values, expected=0.1):
    return Compared(figure, "PG", "online error", 1.0, expected, dict(enumerate(values)))


def shares(numbers):
    counted = {name: analysis._counted(own) for name, own in numbers.items()}
    return resamples.shares_won(counted, analysis._total)


def test_the_score_of_the_run_is_that_of_a_resample_of_every_seed_once():
    numbers = [by_seed("a", (0.2, 0.4)), by_seed("a", (0.0, 0.3)), by_seed("b", (0.5, 0.1))]
    own = analysis._counted(numbers)
    once = {
        figure: (np.array([[each.ours.mean] for each in of]), np.array([0.1] * len(of)))
        for figure, of in own.items()
    }
    assert_close(float(analysis._total(once)[0]), min(analysis.scores(numbers)[1].values()))


def test_a_pair_that_is_nearer_with_every_seed_always_wins():
    found = shares({"near": [by_seed("a", (0.1, 0.11))], "far": [by_seed("a", (0.3, 0.4))]})
    assert found == {"near": 1.0, "far": 0.0}


def test_a_pair_that_wins_by_one_seed_of_four_wins_where_that_seed_is_drawn():
    """All or nothing: three seeds stay at 0.4, one is at 0. Drawn k times of 4, the mean is
    0.4 (1 - k / 4): 0.1 at k = 3, where the other pair's 0.3 is further off. At k = 0 and 1 it is
    0.4 and 0.3, a tie that goes to the first; at 2, 0.2, it is nearer; at 4, 0 counts as 0.001."""
    numbers = {"steady": [by_seed("a", [0.3] * 4)], "lucky": [by_seed("a", [0.4, 0.4, 0.4, 0.0])]}
    found = shares(numbers)
    chance = sum(math.comb(4, k) * 0.25**k * 0.75 ** (4 - k) for k in (2, 3))
    assert abs(found["lucky"] - chance) < 0.05
    assert_close(sum(found.values()), 1.0)
    assert shares(numbers) == found


def test_all_pairs_are_resampled_with_the_same_seeds():
    values = (0.1, 0.2, 0.4, 0.8)
    better = tuple(0.99 * value for value in values)
    found = shares({"one": [by_seed("a", values, 0.01)], "two": [by_seed("a", better, 0.01)]})
    assert found == {"one": 0.0, "two": 1.0}


PAIRS = ("ff 64, lr 0.0002", "ff 128, lr 0.0001")


def scores(won, **best):
    """Lines of two pairs on every figure; `best` says which pair has the lower score there."""
    figures = [*FIGURES[:3], *(f"{FIGURES[3]}, {how}" for how in ("now", "so far")), FIGURES[4]]
    lines = [
        headline(figure, pair, analysis.SCORE, "", 0.2 + 0.1 * (PAIRS.index(pair) != first))
        for figure in [*figures, "all figures, now"]
        for first in [best.get(figure.split(",")[0].replace(" ", "_"), 0)]
        for pair in PAIRS
    ]
    return lines + [
        headline("all figures", pair, WON, "", share)
        for pair, share in zip(PAIRS, (won, 1 - won), strict=True)
    ]


@pytest.mark.parametrize(
    ("won", "used", "verdict"),
    [
        (0.96, PAIRS[0], "met"),
        (0.94, PAIRS[0], "open"),
        (0.94, PAIRS[1], "open"),
        (0.96, PAIRS[1], "missed"),
        (0.96, "ff 256, lr 0.0001", "open"),
    ],
)
def test_the_claim_is_about_the_pair_in_use_and_about_resamples(won, used, verdict):
    (claim,) = claims(scores(won), used)
    assert claim.verdict == verdict
    assert used in claim.measured
    assert f"lowest score: {PAIRS[0]}, in {won:.0%}" in claim.measured


def test_the_best_pair_of_every_figure_is_told_and_not_judged():
    (claim,) = claims(scores(0.99, DG_Fig_9b=1), PAIRS[0])
    assert claim.verdict == "met"
    assert f"DG Fig 9b: {PAIRS[1]}" in claim.measured
    assert f"DG Fig 9a: {PAIRS[0]}" in claim.measured


def test_the_claim_is_open_until_every_figure_was_run():
    some = [line for line in scores(0.99) if line.figure != "DG Fig 9a"]
    assert claims(some, PAIRS[0])[0].verdict == "open"
    assert claims([], PAIRS[0]) == [Claim(STATEMENT, "open", NOTHING)]


def test_the_claim_is_open_while_a_figure_has_one_or_two_seeds(small):
    (claim,) = claims(scores(0.99), PAIRS[0], ["DG Fig 9a"])
    assert claim.verdict == "open"
    assert "fewer than 3 seeds: DG Fig 9a" in claim.measured
    found, _ = small
    assert "fewer than 3 seeds: DG Fig 8, DG Fig 9a, DG Fig 9b, K" in found.claims[0].measured


def test_figure_8_where_seeds_are_all_or_nothing_has_ten():
    assert Settings().prefix_seeds >= 10
