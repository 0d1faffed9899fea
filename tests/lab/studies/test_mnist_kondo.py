import dataclasses
import math

import pandas as pd
import pytest

from kondo_lab.evidence import progress, records, runner
from kondo_lab.evidence.study import Estimate, headline
from kondo_lab.studies.mnist_kondo import STUDY, analysis, paper, speed_ups, tolerance
from kondo_lab.studies.mnist_kondo import run as mnist_kondo_run
from kondo_lab.studies.mnist_kondo.claims import claims
from kondo_lab.studies.mnist_kondo.settings import SMALL, settings
from lab.made_up import Record, table_of
from lab.studies import toy
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "mnist-kondo"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


def record(series, seed, step, value, **changes):
    fields = {"part": "curves", "setting": math.nan, "metric": "test error"}
    return Record(
        series=series,
        seed=seed,
        step=step,
        forward=100 * step,
        backward=(3 if series == "DG-K 3%" else 100) * step,
        value=value,
        **fields | changes,
    )


def test_every_figure_is_drawn_and_every_part_feeds_the_table(small):
    found, _ = small
    assert list(found.figures) == [
        "fig1-learning-curves",
        "fig3-speed-up",
        "fig2-rates",
        "fig4-noise",
        "fig5-priorities",
    ]
    assert set(found.captions) == set(found.figures)
    figures = {line.figure for line in found.headline}
    assert {"Kondo Fig 1", "Kondo Fig 2", "Kondo Fig 4a", "Kondo Fig 4b"} <= figures
    assert {"Kondo Fig 5a", "Kondo Fig 5b"} <= figures


def test_the_papers_numbers_are_not_compared_with_another_data_set(small):
    found, _ = small
    assert all(line.expected is None or line.metric.startswith("order") for line in found.headline)


def test_the_gate_pays_for_its_rate_and_dense_updates_for_everything(small):
    table = small[1]
    ends = table[(table["part"] == "curves") & (table["step"] == SMALL.num_steps)]
    paid = ends.groupby("series")["backward"].unique().apply(list).to_dict()
    assert paid == {
        "PG": [SMALL.num_steps * 100],
        "DG": [SMALL.num_steps * 100],
        "DG-K 3%": [SMALL.num_steps * 3],
    }


def test_noise_of_size_zero_is_no_noise(small):
    table = small[1]
    silent = table[(table["part"] == "noise") & (table["setting"] == 0)]
    by_way = silent[silent["series"].str.startswith("DG,")].groupby("series")["value"].apply(list)
    assert len(by_way) == 3
    assert all(values == by_way["DG, delight noise"] for values in by_way)


def test_every_mix_is_run(small):
    table = small[1][small[1]["part"] == "priorities"]
    one = analysis.finals(table, "priorities", "additive mix")
    assert set(one) == set(SMALL.mixes)


def by_hand(test, online):
    """Records of {series: one list per seed}, values at steps 10, 20 and 40."""
    return table_of(
        part="curves",
        made=[
            record(series, seed, step, value, metric=metric)
            for metric, of_series in (("test error", test), ("online error", online))
            for series, seeds in of_series.items()
            for seed, values in enumerate(seeds)
            for step, value in zip((10, 20, 40), values, strict=True)
        ],
    )


def speed_up(table, metric, rule, ratio):
    baseline, own = (
        speed_ups.passes(speed_ups.curves(table, series, metric), rule)
        for series in ("PG", "DG-K 3%")
    )
    return speed_ups.speed_up(baseline, own, ratio)


def crossing(low, high, above, below):
    """Where the logarithm of an error that falls from `above` to `below` meets 5%."""
    return low + (high - low) * math.log(above / 0.05) / math.log(above / below)


def test_six_readings_of_a_speed_up():
    at_once, by_20, by_40, early = (
        [0.04] * 3,
        [0.1, 0.04, 0.04],
        [0.1, 0.1, 0.04],
        [0.1, 0.01, 0.01],
    )
    table = by_hand(
        test={"PG": [by_40, by_40, early], "DG-K 3%": [at_once] * 3},
        online={"PG": [by_20, by_20, [0.1, 0.16, 0.04]], "DG-K 3%": [by_20] * 3},
    )
    first, second = crossing(10, 20, 0.1, 0.04), crossing(20, 40, 0.1, 0.04)
    expected = {
        ("test error", "median of seeds"): second / 10,
        ("test error", "mean of seeds"): (2 * second + crossing(10, 20, 0.1, 0.01)) / 3 / 10,
        # The mean over seeds is .1, .07 and .03; then .1, .08 and .04.
        ("test error", "mean curve"): crossing(20, 40, 0.07, 0.03) / 10,
        ("online error", "median of seeds"): 1.0,
        ("online error", "mean of seeds"): (2 * first + crossing(20, 40, 0.16, 0.04)) / 3 / first,
        ("online error", "mean curve"): crossing(20, 40, 0.08, 0.04) / first,
    }
    assert set(speed_ups.DEFINITIONS) == set(expected)
    for definition, value in expected.items():
        assert_close(speed_up(table, *definition, 0).mean, value)
        # A backward that costs two forwards: PG pays it for every sample, the gate for 3%.
        assert_close(speed_up(table, *definition, 2).mean, value * 3 / 1.06)


def test_seeds_bear_one_that_never_arrives_and_the_mean_curve_does_not():
    arrives, never = [0.1, 0.04, 0.04], [0.9, 0.9, 0.9]
    curves = {"PG": [arrives, arrives, never], "DG-K 3%": [arrives] * 3}
    table = by_hand(test=curves, online=curves)
    found = speed_up(table, "test error", "median of seeds", 0)
    assert (found.mean, found.seeds) == (1.0, 3)
    assert math.isnan(found.se)  # some resamples have no median
    assert math.isinf(speed_up(table, "test error", "mean curve", 0).mean)
    # Of the two that arrive.
    assert_close(speed_up(table, "test error", "mean of seeds", 0).mean, 1.0)
    never_at_all = {"PG": [never] * 3, "DG-K 3%": [arrives] * 3}
    lost = by_hand(test=never_at_all, online=never_at_all)
    assert math.isinf(speed_up(lost, "test error", "mean of seeds", 0).mean)


def test_the_spread_over_resampled_seeds_is_the_error():
    first, last = [0.05] * 3, [0.1, 0.1, 0.05]
    curves = {"PG": [first, last], "DG-K 3%": [first] * 2}
    found = speed_up(by_hand(test=curves, online=curves), "test error", "median of seeds", 0)
    # Medians of two draws: 10, 25, 25 or 40 steps, a quarter each.
    assert_close(found.mean, 2.5)
    assert abs(found.se - 1.5 * math.sqrt(0.5)) < 0.1


def test_one_reading_stands_beside_the_papers_and_counts_as_fitted():
    arrives = [0.1, 0.05, 0.05]
    curves = {name: [arrives] * 2 for name in ("PG", "DG", "DG-K 3%")}
    lines = analysis._speed_lines(by_hand(test=curves, online=curves), settings("full", None))
    compared = {(line.metric, line.against) for line in lines if line.against}
    assert compared == {("speed-up over PG to 5% online error, median of seeds", "fitted")}
    counted = [(line.series, line.x) for line in lines if line.verdict]
    assert counted == [("DG", 0), ("DG-K 3%", 0), ("DG-K 3%", 8)]
    shown = [line for line in lines if line.expected is not None]
    assert len(shown) == 18  # the paper's number stands beside all of them
    metric = "speed-up over PG to 5% online error, mean curve, of the paper's own Fig 1"
    own = {line.series: line.ours for line in lines if line.metric == metric}
    pg = crossing(0.7, 1.0, 0.060, 0.037)
    assert_close(own["DG"], pg / crossing(0.2, 0.3, 0.054, 0.042))
    assert_close(own["DG-K 3%"], pg / crossing(0.3, 0.5, 0.060, 0.039))


def test_noise_on_logits_reaches_the_baseline_or_not():
    both, alone = (mnist_kondo_run.noise(way, 3.0) for way in mnist_kondo_run.NOISES[1:])
    assert both == {"logit_noise": 3.0, "screened": "both"}
    assert alone == {"logit_noise": 3.0, "screened": "surprisal"}
    assert mnist_kondo_run.noise("delight noise", 3.0) == {"delight_noise": 3.0}


def test_only_one_reading_of_noise_is_judged(small):
    lines = [line for line in small[0].headline if line.figure == "Kondo Fig 4b"]
    alone = [line for line in lines if "surprisal alone" in line.series]
    assert {line.x for line in alone} == {*SMALL.logit_noises, ""}
    assert not any(line.against for line in alone)
    assert any(line.against for line in lines)


def test_errors_that_still_fall_are_told():
    few = dataclasses.replace(SMALL, rates=(0.03, 1.0), rate_seeds=2, rate_steps=30)
    rows = [
        record(series, seed, step, value, part="rates", setting=1e-3, metric="online error")
        for seed in (0, 1)
        for series, values in (("DG-K 3%", (0.2, 0.19)), ("DG-K 100%", (0.2, 0.1)))
        for step, value in zip((20, 30), values, strict=True)
    ]
    told = analysis._plateau_finding(table_of(part="rates", made=rows), few)
    assert told.endswith("DG-K 3% 0.95, DG-K 100% 0.50; still falling: DG-K 100%.")


def test_the_learning_rate_is_chosen_by_the_seeds_that_are_not_reported():
    few = dataclasses.replace(SMALL, rate_seeds=2)
    rows = [
        record("DG-K 3%", seed, 10, value, part="rates", setting=rate, metric="online error")
        for seed, rate, value in (
            (0, 1e-3, 0.1),
            (0, 3e-3, 0.2),
            (1, 1e-3, 0.9),
            (1, 3e-3, 0.2),
        )
    ]
    table = table_of(part="rates", made=rows)
    assert analysis.best_learning_rate(table, "DG-K 3%", few) == 1e-3


def noise_records(borne_by, seeds=4, way="delight noise"):
    """Errors that are 0.01 until a level of noise, and twice that from there on."""
    made = [
        record(
            f"{name}, {way}", seed, 10, value, part="noise", setting=level, metric="online error"
        )
        for name, levels in borne_by.items()
        for seed in range(seeds)
        for level in (0.0, 1.0, 2.0, 4.0)
        for value in [0.02 if level >= levels[seed % len(levels)] else 0.01]
    ]
    return table_of(made, part="noise")


def borne(levels, seeds=4):
    return tolerance.borne(noise_records({"DG": levels}, seeds), "noise", "DG, delight noise", 1.25)


def test_noise_is_borne_seed_by_seed():
    found = borne([2.0, 4.0])
    # A quarter of the way up: 1.25 and 2.5.
    assert_close(found.estimate.mean, 1.875)
    assert_close(found.estimate.se, 0.625 * math.sqrt(4 / 3) / 2)
    assert (found.bounds, found.estimate.seeds, found.shown) == (0, 4, found.estimate)
    some = borne([2.0, 9.0])
    assert_close(some.shown.mean, (1.25 + 4.0) / 2)
    assert some.bounds == 2
    never = borne([9.0])
    assert math.isinf(never.shown.mean)
    assert (never.estimate.mean, never.bounds) == (4.0, 4)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (borne([1.0]), borne([4.0]), "matches"),
        (borne([4.0]), borne([1.0]), "differs"),
        (borne([1.0, 4.0]), borne([4.0, 2.0]), "noisy"),
        (borne([1.0]), borne([9.0]), "matches"),  # a bound: the truth is further away
        (borne([9.0]), borne([1.0]), "differs"),
        (borne([9.0]), borne([9.0]), "noisy"),
        (borne([1.0], seeds=2), borne([4.0], seeds=2), "noisy"),
        (borne([1.0], seeds=1), borne([4.0], seeds=1), "noisy"),
    ],
)
def test_bearing_less_noise_is_judged_with_errors_and_bounds(low, high, verdict):
    assert tolerance.judge_less(low, high) == verdict


@pytest.mark.parametrize(
    ("found", "expected", "rule", "verdict"),
    [
        (borne([2.0]), 1.25, "equals", "matches"),
        (borne([2.0]), 8.0, "at least", "differs"),
        (borne([2.0], seeds=2), 1.25, "equals", "noisy"),
        # Half of the seeds never get there: the mean of 2.625 is a lower bound.
        (borne([2.0, 9.0, 9.0, 2.0]), 6.0, "at least", "noisy"),
        (borne([4.0, 4.0, 4.0, 9.0]), 2.875, "equals", "noisy"),
        (borne([4.0, 4.0, 4.0, 9.0]), 2.875, "at least", "matches"),
        (borne([4.0, 4.0, 4.0, 9.0]), 0.5, "equals", "differs"),
        (borne([9.0]), 0.5, "at least", "matches"),
        (borne([9.0]), 1.0, "equals", "differs"),
    ],
)
def test_noise_that_some_seeds_bear_whatever_it_is_counts_as_a_bound(
    found, expected, rule, verdict
):
    assert found.judged(expected, rule) == verdict


def test_the_order_of_noise_borne_is_open_without_an_error():
    full = settings("full", None)

    def verdicts(seeds):
        tables = [
            noise_records({"DG": [4.0], "DG-K 3%": [1.0]}, seeds, way)
            for way in mnist_kondo_run.NOISES
        ]
        found = analysis.analyse(pd.concat(tables), full)
        orders = [line.verdict for line in found.headline if line.metric == "order of noise borne"]
        (claim,) = (each for each in found.claims if "less noise" in each.statement)
        return orders, claim.verdict

    assert verdicts(3) == (["matches"] * 2, "met")
    assert verdicts(1) == (["noisy"] * 2, "open")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [([1.4] * 6, "met"), ([1.4, 1.2, 2, 3, 4, 5], "open"), ([2, 2.5, 3, 3.5, 4, 5], "missed")],
)
def test_the_claim_of_the_speed_up_is_judged_by_every_reading(found, verdict):
    compared = {"expected": 1.41, "against": "fitted"}
    lines = [
        headline("Kondo Fig 3", "DG-K 3%", each.words, 0, Estimate(ours, 0.01, 30), **options)
        for each, ours in zip(speed_ups.DEFINITIONS, found, strict=True)
        for options in [compared if each == speed_ups.JUDGED else {}]
    ]
    elsewhere = [line._replace(x=8, ours=10.2) for line in lines]
    own = [line._replace(metric=f"{line.metric}, of the paper's own Fig 1") for line in lines]
    (claim,) = (each for each in claims(lines + elsewhere + own) if "1.41" in each.statement)
    assert claim.verdict == verdict
    match = sum(1.41 / 1.2 <= each <= 1.41 * 1.2 for each in found)
    assert claim.measured.startswith(f"{match} of 6 readings match: {min(found):.3g} ± 0.01 to")
    alone = [line._replace(expected=None) for line in lines]  # a small run
    (claim,) = (each for each in claims(alone) if "1.41" in each.statement)
    assert (claim.verdict, claim.measured) == ("open", "not measured")


def test_the_papers_curve_is_its_own_cost_model():
    for ratio, value in enumerate(paper.FIG_3["DG-K 3%"]):
        assert abs(1.41 * (1 + ratio) / (1 + 0.03 * ratio) / value - 1) < 0.01


def test_a_number_of_seeds_holds_for_every_part():
    chosen = settings("full", 4)
    assert (chosen.num_seeds, chosen.sweep_seeds, chosen.rate_seeds) == (4, 4, 4)
