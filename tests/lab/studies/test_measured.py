"""The study `measured`: learners do what they are timed for; ratios and sentences follow.

No time is asserted: made-up seconds test the arithmetic.
"""

import csv
import math

import pandas as pd
import pytest
import torch

from kondo_lab.studies.measured import STUDY, analysis, quality, run
from kondo_lab.studies.measured.run import DG, EXACT, FREE, PG
from kondo_lab.studies.measured.settings import BanditShape, ReversalShape, Settings, settings
from kondo_lab.studies.measured.workloads import build
from kondo_lab.training.part import Context, Stopped
from kondo_lab.training.record import Log
from lab.made_up import table_of
from tolerances import assert_close

BANDIT = BanditShape(width=8, batch=40)
REVERSAL = ReversalShape(length=3, width=8, num_layers=1, num_heads=2, num_prompts=5, num_answers=8)
TINY = Settings(rounds=2, bandits=(BANDIT,), reversals=(REVERSAL,), rate=0.1)
SERIES = {PG, DG, FREE, EXACT}


def context(device, stopped=False):
    return Context(
        device=device, progress=lambda share, note: None, stopped=lambda: stopped, checkpoint=None
    )


def run_part(chosen, name, device=torch.device("cpu")):  # noqa: B008
    (part,) = [part for part in STUDY.parts(chosen) if part.name == name]
    return table_of(part.run(context(device)), part=name)


@pytest.mark.parametrize("shape", [BANDIT, REVERSAL])
def test_every_round_has_every_method_with_its_stages(shape, device):
    table = run_part(TINY, shape.name, device)
    for number in range(TINY.rounds):
        own = table[table["seed"] == number]
        assert set(own["series"]) == SERIES
        for series in SERIES:
            metrics = set(own[own["series"] == series]["metric"])
            stages = {"sampling", "learner", "optimiser", "loop"}
            stages |= {"forward", "backward"} if series == PG else set()
            stages |= (
                {"screen", "gate", "forward", "backward"} if series in (FREE, EXACT) else set()
            )
            ratios = {run.LEARNER, run.LOOP, run.COUNTED}
            ratios |= {run.COST_RATIO} if series == PG else set()
            assert metrics == {f"seconds {stage}" for stage in stages} | ratios
    assert (table["value"] >= 0).all()
    paid = table.groupby("series")["backward"].agg(["min", "max"])
    assert paid.loc[PG].tolist() == paid.loc[DG].tolist() == [40, 40]
    assert paid.loc[FREE].tolist() == paid.loc[EXACT].tolist() == [4, 4]


@pytest.mark.parametrize("shape", [BANDIT, REVERSAL])
def test_learners_have_the_gradient_they_are_timed_for(shape):
    """Written without kondo: PG, DG, and PG of the tenth with the largest delight over all rows."""
    work = build(shape, learning_rate=1e-3, device=torch.device("cpu"))
    rollout = work.rollout()
    good = rollout.advantages if rollout.log_probs.ndim == 1 else rollout.advantages[:, None]
    chi = -rollout.log_probs * good
    best = (chi if chi.ndim == 1 else chi.sum(dim=1)).topk(4).indices
    kept = torch.zeros(40).index_fill_(0, best, 1.0)
    kept = kept if chi.ndim == 1 else kept[:, None]
    weights = {PG: torch.ones(()), DG: torch.sigmoid(chi), FREE: kept, EXACT: kept}
    for name, learner in run.learners(work, 0.1).items():
        work.optimiser.zero_grad()
        loss = -(weights[name] * good * work.policy.log_prob(rollout.rows)).mean()
        expected = torch.autograd.grad(loss, list(work.policy.parameters()))
        learner(rollout)
        for parameter, gradient in zip(work.policy.parameters(), expected, strict=True):
            assert_close(parameter.grad, gradient)


def test_only_an_exact_screen_pays_a_forward_for_every_row(monkeypatch):
    work = build(BANDIT, learning_rate=1e-3, device=torch.device("cpu"))
    rollout, forward = work.rollout(), work.policy.log_prob
    seen = []
    monkeypatch.setattr(
        work.policy,
        "log_prob",
        lambda rows: (seen.append(len(rows["actions"])), forward(rows))[1],
        raising=False,
    )
    calls = {}
    for name, learner in run.learners(work, 0.1).items():
        seen.clear()
        learner(rollout)
        calls[name] = list(seen)
    assert calls == {PG: [40], DG: [40], FREE: [4], EXACT: [40, 4]}


def test_speed_ups_are_ratios_to_the_pg_of_the_same_round():
    """PG 8 s, ours 2 s; c = 3 and a quarter kept: counted 1 / (1/4) and 4 / (1 + 1)."""
    turn = run._Turn
    taken = {
        PG: turn({"learner": 8.0, "loop": 12.0}, 40),
        DG: turn({"learner": 16.0, "loop": 24.0}, 40),
        FREE: turn({"learner": 2.0, "loop": 6.0}, 10),
        EXACT: turn({"learner": 4.0, "loop": 8.0}, 10),
        run.STAGES: turn({"forward": 2.0, "backward": 6.0}, 40),
    }
    log = Log(BANDIT.name)
    run._log_round(log, BANDIT, 0, 0, taken)
    found = {(one.arm, name): value for one in log.runs() for name, value in one.curve[0].items()}
    assert [found[s, run.LEARNER] for s in (PG, DG, FREE, EXACT)] == [1, 0.5, 4, 2]
    assert [found[s, run.LOOP] for s in (PG, DG, FREE, EXACT)] == [1, 0.5, 2, 1.5]
    assert [found[s, run.COUNTED] for s in (PG, DG, FREE, EXACT)] == [1, 1, 4, 2]
    assert found[PG, run.COST_RATIO] == 3


def test_a_cpu_leaves_out_what_is_too_large():
    small = Settings(rounds=1, bandits=(BANDIT,), reversals=(), max_cpu_gigaflops=1e-9)
    (record,) = run_part(small, BANDIT.name).itertuples()
    assert record.metric == run.LEFT_OUT
    assert record.value == BANDIT.gigaflops
    found = STUDY.analyse(run_part(small, BANDIT.name), small)
    assert found.findings == [f"Too large for this device, not timed: {BANDIT.name}."]
    assert found.headline == []


def test_gigaflops_are_six_per_weight_and_row():
    """8 x (784 + 8 + 10) = 6416 weights, 40 rows; 12 x 8^2 weights, 40 rows of 5 tokens."""
    assert_close(BANDIT.gigaflops, 6 * 6416 * 40 / 1e9)
    assert_close(REVERSAL.gigaflops, 6 * 768 * 40 * 5 / 1e9)


def test_a_stopped_part_leaves_nothing():
    part = STUDY.parts(TINY)[0]
    with pytest.raises(Stopped):
        list(part.run(context(torch.device("cpu"), stopped=True)))


def test_rounds_are_the_seeds_asked_for():
    assert settings("small", 7).rounds == settings("full", 7).rounds == 7
    full = settings("full", None)
    assert len({shape.name for shape in full.shapes}) == 17


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Two bandits with c = 4: on one the gate is fast, on the other slow. Five rounds, two odd."""
    monkeypatch.chdir(tmp_path)
    fast, slow = BanditShape(width=8, batch=40), BanditShape(width=16, batch=40)
    chosen = Settings(rounds=5, bandits=(fast, slow), reversals=())
    tables = []
    for place, (shape, speed_up) in enumerate(((fast, 2.0), (slow, 0.5))):
        log = Log(shape.name)
        for number, noise in enumerate((1.0, 1.0, 1.0, 1.5, 0.5)):
            values = {
                PG: {"seconds learner": 0.01, run.COST_RATIO: 4.0},
                DG: {run.LEARNER: 1.0, run.LOOP: 1.0},
                FREE: {run.LEARNER: 2 * speed_up * noise, run.LOOP: 1.5, run.COUNTED: 33.0},
                EXACT: {run.LEARNER: speed_up * noise, run.LOOP: 1.0, run.COUNTED: 4.0},
            }
            for series, metrics in values.items():
                log.add(series, number, metrics, x=place, rollouts=shape.rows, passes=4)
        tables.append(table_of(log.runs(), part=shape.name))
    return pd.concat(tables, ignore_index=True), chosen, fast, slow


def test_headline_has_medians_beside_the_papers_curve(made_up):
    table, chosen, fast, slow = made_up
    found = {(x.series, x.metric, x.x): x for x in STUDY.analyse(table, chosen).headline}
    assert found[EXACT, run.LEARNER, fast.name].ours == 2.0
    assert found[EXACT, run.LEARNER, slow.name].ours == 0.5
    to_quality = f"{run.LEARNER} over PG to 5% test error"
    line = found[EXACT, to_quality, fast.name]
    assert (line.figure, line.seeds, line.verdict) == ("Kondo Fig 3, counted", 5, "differs")
    assert line.against == "formula"
    assert line.ours == pytest.approx(1.41 * 2.0)
    assert line.expected == pytest.approx(1.41 * 5 / 1.12)
    assert found[DG, to_quality, slow.name].verdict == "matches"
    assert found[FREE, to_quality, fast.name].expected is None
    assert found[FREE, f"{run.LOOP} over PG to 5% test error", fast.name].ours == 1.41 * 1.5


def test_findings_name_where_the_gate_does_not_pay(made_up):
    table, chosen, fast, slow = made_up
    ratio, free, exact, free_loop, exact_loop, source = STUDY.analyse(table, chosen).findings
    assert "4.00" in ratio
    assert free == (
        f"{FREE}, learner: at best 4.00x ({fast.name}; counted 33.00x); "
        "no workload is slower than PG."
    )
    assert exact == (
        f"{EXACT}, learner: at best 2.00x ({fast.name}; counted 4.00x). "
        f"It does not pay on 1 of 2: {slow.name} (0.50x)."
    )
    assert "no workload is slower" in free_loop
    assert "no workload is slower" in exact_loop  # a ratio of 1 is not below it
    assert "the paper's Fig 3" in source


def test_percentiles_are_over_rounds(made_up):
    table, _, fast, _ = made_up
    found = analysis.spread(table, fast, EXACT, run.LEARNER)  # 1, 2, 2, 2, 3
    assert found == pytest.approx((1.8, 2.0, 2.2, 5))
    # sqrt(pi / 2 / 5) of the standard deviation whose p20 and p80 lie 0.4 apart
    assert found.se == pytest.approx(0.5605 * 0.4 / 1.6832, rel=1e-3)


def write_frontier(results, samples, version=1, target="5% test error"):
    folder = results / f"mnist-kondo-v{version}"
    folder.mkdir(parents=True)
    with (folder / "frontier.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "series", "target", "forward"])
        writer.writerows(["MNIST", series, target, forward] for series, forward in samples.items())


def test_step_gain_is_ours_where_there_is_one(tmp_path):
    write_frontier(tmp_path, {"PG": 10, "DG": 10, "DG-K 3%": 10}, version=9)
    write_frontier(tmp_path, {"PG": 300, "DG": 100, "DG-K 3%": 200, "DG-K 1%": 1}, version=10)
    found = quality.step_gain(tmp_path)
    assert (found.dg, found.gate, found.source) == (3.0, 1.5, "our mnist-kondo-v10")
    assert found.by_series == {DG: 3.0, FREE: 1.5, EXACT: 1.5}


def test_step_gain_is_the_papers_otherwise(tmp_path):
    assert quality.step_gain(tmp_path)[:2] == (2.25, 1.41)


@pytest.mark.parametrize("samples", [{"PG": 300, "DG": 100}, {"PG": 3, "DG": 1, "DG-K 3%": ""}])
def test_a_frontier_without_a_series_is_refused(tmp_path, samples):
    write_frontier(tmp_path, samples)
    with pytest.raises(ValueError, match="it lacks DG-K 3%"):
        quality.step_gain(tmp_path)


def test_counted_with_the_papers_gain_is_its_figure(tmp_path):
    """Read off the figure: 1.41 at c = 0, 6.30 at 4, 10.21 at 8."""
    gain = quality.step_gain(tmp_path)
    for ratio, value in ((0, 1.41), (4, 6.30), (8, 10.21)):
        found = gain.counted(ratio)
        assert found[DG] == 2.25
        assert math.isclose(found[EXACT], value, rel_tol=0.01)
