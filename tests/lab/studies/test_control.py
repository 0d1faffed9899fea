import io
import math
import threading

import pandas as pd
import pytest
import torch
from rich.console import Console

pytest.importorskip("gymnasium", reason="the extra kondo-lab[control] is not installed")

import kondo
from kondo_lab.evidence import result_folder, runner
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies import registry
from kondo_lab.studies.control import analysis, claims, run
from kondo_lab.studies.control.settings import CARTPOLE, SMALL
from kondo_lab.training.part import Context, DamagedCheckpointError, Stopped
from lab.made_up import Record, table_of

NAMES = [
    "dense",
    "random 10%",
    "price 0",
    "delight 10%",
    "delight 3%",
    "variance 10%",
    "unbiased 10%",
    "unbiased 10% by |delight|",
    "noise 1.5",
    "noise 3",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    order = runner.Order(
        study=registry.find("control"),
        size="small",
        num_seeds=None,
        out=tmp_path_factory.mktemp("runs") / "control",
        device=torch.device("cpu"),
        command="kondo run control --small",
    )
    outcome = runner.run(order, Console(file=io.StringIO()))
    return outcome.analysis, order.out


def test_the_contenders_are_the_gates_that_users_call():
    gates = {name: make(torch.Generator()) for name, make in run.contenders(SMALL).items()}
    assert list(gates) == NAMES
    assert gates["dense"] is None
    assert gates["price 0"].price == 0
    assert gates["delight 3%"].rate == 0.03
    assert repr(gates["unbiased 10%"]) == "UnbiasedGate(rate=0.1)"
    assert repr(gates["noise 3"]) == "UnbiasedGate(noise=3.0)"
    assert gates["unbiased 10% by |delight|"].signal is kondo.signals.abs_delight
    assert isinstance(gates["variance 10%"], kondo.VarianceGate)
    assert run.promised(SMALL) == ["unbiased 10%", "noise 1.5"]


def test_every_contender_is_recorded_on_every_task(small):
    found, out = small
    ends = [line for line in found.headline if line.metric.endswith("return at the end")]
    assert [line.series for line in ends] == 3 * NAMES
    assert all(line.seeds == 2 and math.isfinite(line.ours) for line in ends)
    rates = {
        (line.metric.split(":")[0], line.series): line.ours
        for line in found.headline
        if line.metric.endswith(run.RATE)
    }
    for task in ("cartpole", "acrobot", "pendulum"):
        assert rates[task, "dense"] == 1
        for name in ("random 10%", "delight 10%", "variance 10%", "unbiased 10%"):
            assert rates[task, name] == pytest.approx(0.1, abs=0.005), (task, name)
        assert rates[task, "noise 3"] < rates[task, "noise 1.5"] < 1
    figures = {path.name for path in out.glob("*.png")}
    assert figures == {
        "returns-by-samples.png",
        "returns-by-rows.png",
        "entropies.png",
    }


def test_the_claims_say_what_was_met(small):
    made = result_folder.read(small[1]).claims
    assert made == small[0].claims
    verdicts = [own for own in made if "within one standard error of dense" in own.statement]
    assert len(verdicts) == 6  # two contenders on three tasks
    assert {own.verdict for own in verdicts} <= {"met", "missed"}
    assert any("ends below dense" in own.statement for own in made)


def test_the_gate_by_delight_points_away_from_the_dense_gradient(small):
    cosines = {
        line.series: line.ours
        for line in small[0].headline
        if line.metric == f"cartpole: {run.COSINE}, mean over the run"
    }
    assert cosines["dense"] == pytest.approx(1)
    assert cosines["noise 1.5"] > 0.8
    assert cosines["delight 3%"] < 0.5


@pytest.mark.parametrize(
    ("own", "dense", "wanted"),
    [
        ((90.0, 3.0), (95.0, 4.0), "met"),  # the difference has a standard error of 5
        ((89.9, 3.0), (95.0, 4.0), "missed"),
        ((200.0, 3.0), (95.0, 4.0), "met"),  # better is no miss
        ((95.0, math.nan), (95.0, math.nan), "open"),
        ((math.nan, 1.0), (95.0, 1.0), "open"),
    ],
)
def test_a_verdict_is_by_the_standard_error_of_the_difference(own, dense, wanted):
    assert claims.verdict(Estimate(*own, 10), Estimate(*dense, 10)) == wanted


def test_what_was_paid_for_a_return_is_known_only_if_every_seed_got_there():
    def records(last):
        points = [(0, 100, 1000, 0.0), (0, 200, 2000, 500.0), (1, 100, 1500, 300.0)]
        points.append((1, 200, 3000, last))
        return table_of(
            [
                Record("cartpole", "dense", math.nan, seed, step, step, paid, run.RETURN, value)
                for seed, step, paid, value in points
            ],
            part="cartpole",
        )

    # Target 400: seed 0 is there after 4/5 of its second stretch, seed 1 half way.
    assert CARTPOLE.target == 400
    assert analysis._paid(records(500.0), CARTPOLE, "dense").mean == (1800 + 2250) / 2
    assert math.isnan(analysis._paid(records(399.0), CARTPOLE, "dense").mean)


def test_a_stopped_part_goes_on_with_the_runs_that_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(run.worker_pool, "usable_cores", lambda: 1)
    part = run.parts(SMALL)[0]
    stop, notes = threading.Event(), []

    def context(stop_after):
        def progress(share, note):
            notes.append(note)
            if share >= stop_after:
                stop.set()

        return Context(
            device=torch.device("cpu"),
            progress=progress,
            stopped=stop.is_set,
            checkpoint=tmp_path / "checkpoint",
        )

    with pytest.raises(Stopped) as stopped:
        part.run(context(0.2))
    kept = {(made.arm, made.seed) for made in stopped.value.runs}
    assert 0 < len(kept) < len(run.runs(SMALL))
    stop.clear()
    notes.clear()
    found = part.run(context(2.0))
    again = {tuple(note.split(", ")[:2]) for note in notes}
    assert again == {(n, f"seed {s}") for n, s in run.runs(SMALL) if (n, s) not in kept}
    assert {(made.arm, made.seed) for made in found} == set(run.runs(SMALL))
    first = [made for made in found if (made.arm, made.seed) in kept]
    tables = [table_of(some, part="cartpole") for some in (first, stopped.value.runs)]
    pd.testing.assert_frame_equal(*tables)
    assert [made.learning_rate for made in first] == [1e-2] * len(kept)


@pytest.mark.parametrize("content", ['{"0": [["cartpo', "[1, 2]", '{"first": []}'])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "checkpoint"
    path.write_text(content)
    context = Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=lambda: False,
        checkpoint=path,
    )
    with pytest.raises(DamagedCheckpointError, match="checkpoint is damaged"):
        run.parts(SMALL)[0].run(context)
