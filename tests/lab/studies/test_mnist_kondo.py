import dataclasses
import math

import numpy as np
import pytest

from kondo_lab import progress
from kondo_lab.part import Record
from kondo_lab.studies import records, runner
from kondo_lab.studies.mnist_kondo import STUDY, analysis, paper
from kondo_lab.studies.mnist_kondo.settings import SMALL, settings
from lab.studies import toy
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "mnist-kondo"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.read(out / runner.RECORDS)


def record(series, seed, step, value, **changes):
    fields = {"part": "curves", "setting": math.nan, "metric": "test error"}
    return Record(
        series=series,
        seed=seed,
        step=step,
        forward=100 * step,
        backward=3 * step,
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
    assert by_way["DG, delight noise"] == by_way["DG, logit noise"]


def test_every_mix_is_run(small):
    table = small[1][small[1]["part"] == "priorities"]
    one = analysis.finals(table, "priorities", "additive mix")
    assert set(one) == set(SMALL.mixes)


def test_passes_are_infinite_for_a_seed_that_never_arrives():
    table = records.frame(
        part="curves",
        records=[record("PG", 0, 10, 0.2), record("PG", 0, 20, 0.05), record("PG", 1, 10, 0.2)],
    )
    assert analysis.passes(table, "PG").tolist() == [[2000.0, 60.0], [math.inf, math.inf]]


def test_speed_up_is_that_of_the_medians():
    dense = np.array([[100.0, 100.0], [200.0, 200.0], [math.inf, math.inf]])
    gated = np.array([[100.0, 3.0], [150.0, 4.5], [200.0, 6.0]])
    assert_close(analysis.speed_up(dense, gated, 0).mean, 200 / 150)
    assert_close(analysis.speed_up(dense, gated, 2).mean, 600 / 159)
    assert math.isnan(analysis.speed_up(dense, gated, 2).se)  # some resamples have no median


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
    table = records.frame(part="rates", records=rows)
    assert analysis.best_learning_rate(table, "DG-K 3%", few) == 1e-3


def test_the_papers_curve_is_its_own_cost_model():
    for ratio, value in enumerate(paper.FIG_3["DG-K 3%"]):
        assert abs(1.41 * (1 + ratio) / (1 + 0.03 * ratio) / value - 1) < 0.01


def test_a_number_of_seeds_holds_for_every_part():
    chosen = settings("full", 4)
    assert (chosen.num_seeds, chosen.sweep_seeds, chosen.rate_seeds) == (4, 4, 4)
