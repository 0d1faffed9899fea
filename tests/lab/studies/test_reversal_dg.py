import pytest

from kondo_lab import progress
from kondo_lab.part import Record
from kondo_lab.studies import records, runner
from kondo_lab.studies.reversal_dg import STUDY, analysis
from kondo_lab.studies.reversal_dg.settings import SMALL
from kondo_lab.studies.study import Estimate
from lab.studies import toy
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-dg"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.read(out / runner.RECORDS)


def test_every_figure_is_drawn_and_every_method_compared(small):
    found, table = small
    assert list(found.figures) == [
        "fig8-learning-curves",
        "fig9-learning-rate-0.001",
        "fig9-learning-rate-0.0003",
    ]
    methods = ("PG", "PPO", "PMPO", "DG")
    slower = {f"{name}, lr 0.0003" for name in methods}
    assert set(table[table["part"] == "curves"]["series"]) == set(methods)
    assert set(table[table["part"] == "lengths"]["series"]) == {*methods, *slower}
    assert {line.figure for line in found.headline} == {
        "DG Fig 8",
        "DG Fig 9a",
        "DG Fig 9b",
        "DG Fig 9c",
        "DG Fig 9d",
    }


def test_a_fresh_policy_gets_half_of_the_tokens_right(small):
    table = small[1]
    first = table[(table["part"] == "curves") & (table["step"] == table["step"].min())]
    assert 0.3 < first["value"].mean() < 0.6
    assert SMALL.curve_steps in set(table["step"])


def test_the_average_error_weighs_a_point_by_the_steps_before_it():
    table = records.frame(
        part="lengths",
        records=[
            Record("lengths", "DG", 10.0, 0, step, 100 * step, 100 * step, "online error", value)
            for step, value in ((10, 1.0), (40, 0.2))
        ],
    )
    found = analysis.averages(table, "lengths", "DG")
    assert_close(found[10.0].mean, (10 * 1.0 + 30 * 0.2) / 40)


def test_the_exponent_is_that_of_a_power_law():
    found = {x: Estimate(0.5 * x**1.5, 0.0, 1) for x in (2.0, 5.0, 20.0)}
    assert_close(analysis.exponent(found), 1.5)
