import dataclasses
import math

import pytest
import torch

from kondo_lab.evidence import progress, records, runner
from kondo_lab.studies.mnist_stale import STUDY, analysis, run
from kondo_lab.studies.mnist_stale.settings import SMALL, Settings, settings
from kondo_lab.training import learner_error
from kondo_lab.training.member import Frictions
from kondo_lab.training.part import Context
from lab.made_up import Record, table_of
from lab.studies import toy
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "mnist-stale"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


def table(errors, part="oldest"):
    """Records from {(series, delay, seed): error at the end}."""
    return table_of(
        part=part,
        made=[
            Record(part, series, delay, seed, 10, 1000, 1000, metric, value)
            for (series, delay, seed), error in errors.items()
            for metric, value in (("learner error", error), ("test error", error), ("diverged", 0))
        ],
    )


def test_actors_use_the_oldest_parameters_or_any_of_them(monkeypatch, tmp_path):
    caught = {}
    monkeypatch.setattr(
        run.image_bandits.run,
        "train",
        lambda populations, *_, part, **__: caught.update({part: populations}),
    )
    context = Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=lambda: False,
        checkpoint=tmp_path / "part.pt",
    )
    for part in run.parts(SMALL):
        part.run(context)
    assert set(caught) == {"oldest", "uniform"}
    for part, populations in caught.items():
        members = [member for population in populations for member in population.members]
        assert {member.series for member in members} == set(run.methods(SMALL))
        for member in members:
            assert member.arm == run.methods(SMALL)[member.series]
            expected = Frictions(delay=int(member.setting), uniform_delay=part == "uniform")
            assert member.frictions == expected


def test_both_ways_of_being_late_are_run_at_every_delay(small):
    for part, delays, seeds in (
        ("oldest", SMALL.delays, SMALL.num_seeds),
        ("uniform", SMALL.uniform_delays, SMALL.uniform_seeds),
    ):
        own = small[1][small[1]["part"] == part]
        assert set(own["series"]) == set(run.methods(SMALL))
        assert set(own["setting"]) == set(delays)
        assert own["seed"].nunique() == seeds
        assert set(own["metric"]) == {"online error", "test error", "learner error", "diverged"}


def test_without_a_delay_importance_weights_change_nothing(small):
    fresh = small[1][(small[1]["setting"] == 0) & (small[1]["metric"] == "learner error")]
    by_series = {series: own["value"].tolist() for series, own in fresh.groupby("series")}
    assert by_series["IS-PG"] == by_series["IS-PG cap 10"] == by_series["REINFORCE"]
    assert by_series["DG"] != by_series["REINFORCE"]


def test_a_delay_moves_every_method(small):
    ends = small[1][(small[1]["part"] == "oldest") & (small[1]["metric"] == "learner error")]
    ends = ends[ends["step"] == SMALL.num_steps]
    for _, own in ends.groupby(["series", "seed"]):
        assert own["value"].nunique() == len(SMALL.delays)


def test_late_reinforce_forgets_what_dg_learns(small):
    by_series = {
        name: analysis.finals(small[1], "oldest", name, learner_error.LEARNER_ERROR)[30].mean
        for name in ("REINFORCE", "DG")
    }
    assert by_series["DG"] < by_series["REINFORCE"]


def test_every_figure_is_drawn_and_no_number_of_the_paper_is_compared_with_digits(small):
    assert list(small[0].figures) == ["error-by-delay", "learning-curves"]
    assert set(small[0].captions) == set(small[0].figures)
    for line in small[0].headline:
        assert line.expected is None or line.metric.startswith("order of")


def test_the_papers_numbers_stand_at_a_delay_of_1000_alone():
    full = Settings(delays=(0, 1000))
    errors = {
        (name, delay, seed): (0.02 if name == "DG" else 0.09 + place / 1e5)
        + delay / 1e6
        + seed / 1e3
        for place, name in enumerate(sorted(run.methods(full), key="IS-PG".__ne__))
        for delay in full.delays
        for seed in range(2)
    }
    lines = analysis.analyse(table(errors), full).headline
    known = {(line.series, line.x): line for line in lines if line.expected not in (None, 1.0)}
    assert set(known) == {("DG", 1000), ("IS-PG", 1000), ("IS-PG / DG", 1000)}
    factor = (0.09 + 1e-3 + 0.5e-3) / (0.02 + 1e-3 + 0.5e-3)
    assert_close(known["IS-PG / DG", 1000].ours, factor)
    assert known["IS-PG / DG", 1000].expected == 4
    spread = math.hypot(0.5e-3 / 0.0915, 0.5e-3 / 0.0215)  # seeds lie 0.001 apart
    assert_close(known["IS-PG / DG", 1000].se, factor * spread)
    orders = [line for line in lines if line.metric.startswith("order of")]
    assert {line.verdict for line in orders} == {"matches"}
    assert len(orders) == 6


def test_one_update_under_three_names_is_compared_once():
    """Without a delay all importance weights are 1."""
    full = Settings(delays=(0, 1000))
    errors = {
        (name, delay, seed): (0.02 if name == "DG" else 0.09 + delay * place / 1e5) + seed / 1e3
        for place, name in enumerate(run.methods(full))
        for delay in full.delays
        for seed in range(2)
    }
    lines = analysis.analyse(table(errors), full).headline
    orders = {(line.series, line.x) for line in lines if line.metric.startswith("order of")}
    others = ("IS-PG", "IS-PG cap 10", "REINFORCE")
    assert orders == {("DG < IS-PG", 0), *((f"DG < {other}", 1000) for other in others)}


def test_who_diverged_is_told():
    errors = {(name, 0, 0): 0.5 for name in run.methods(SMALL)}
    found = table(errors)
    lost = (found["series"] == "IS-PG") & (found["metric"] == "diverged")
    found.loc[lost, "value"] = 1.0
    only = dataclasses.replace(SMALL, delays=(0,))
    findings = analysis.analyse(found, only).findings
    assert findings[-1] == (
        "Parameters that are no longer finite: IS-PG at 0 (1 of 1 seeds, oldest)."
    )
    found.loc[lost, "value"] = 0.0
    assert len(analysis.analyse(found, only).findings) == len(findings) - 1


def test_a_number_of_seeds_holds_for_every_part():
    chosen = settings("full", 4)
    assert (chosen.num_seeds, chosen.uniform_seeds) == (4, 4)
