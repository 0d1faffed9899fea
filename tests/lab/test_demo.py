import dataclasses
import io
import json
from functools import partial

import pytest
from rich.console import Console

from kondo_lab import demo, provenance, worker_pool

NAMES = ["PG", "DG", "DG-K (3%)"]


def never():
    return False


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick demo: its outcome, its folder and what it printed."""
    out = tmp_path_factory.mktemp("demo")
    console = Console(file=io.StringIO(), width=100)
    outcome = demo.run_demo(demo.QUICK, seed=5, out=out, command="kondo demo", console=console)
    return outcome, out, console.file.getvalue()


def test_all_methods_on_both_tasks_saw_the_same_samples(quick):
    outcome, _, _ = quick
    assert not outcome.interrupted
    assert [(row.task, row.method) for row in outcome.rows] == [
        (task, name) for task in ("digits", "reversal") for name in NAMES
    ]
    assert {row.samples for row in outcome.rows} == {400}
    assert [row.backward_passes for row in outcome.rows] == [400, 400, 12] * 2


def test_table_and_findings_are_printed(quick):
    _, _, text = quick
    for name in NAMES:
        assert sum(line.strip().startswith(name + "  ") for line in text.splitlines()) == 2
    assert "digits: DG-K (3%) paid for 3.0%" in text


def test_all_files_are_written(quick):
    _, out, _ = quick
    assert sorted(path.name for path in out.iterdir()) == sorted(provenance.FILES)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "http" not in (out / "report.html").read_text()
    assert (out / "curves.csv").read_text().count("\n") == 1 + 6 * 4


def test_manifest_holds_what_is_needed_to_repeat_the_run(quick):
    outcome, out, _ = quick
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["settings"] == json.loads(json.dumps(dataclasses.asdict(demo.QUICK)))
    assert manifest["seeds"] == [5]
    assert manifest["command"] == "kondo demo"
    assert manifest["interrupted"] is False
    assert manifest["seconds"] > 0
    assert manifest["environment"]["torch"]
    assert [row["speed_up"] for row in manifest["rows"]] == [row.speed_up for row in outcome.rows]


def test_the_same_seed_gives_the_same_errors(quick):
    train = partial(demo.train_seeds, send=lambda sent: None, stopped=never, settings=demo.QUICK)
    first, again, other = train([5]), train([5]), train([6])
    errors = [[[r.error for r in run.records] for run in runs] for runs in (first, again, other)]
    assert errors[0] == errors[1]
    assert errors[0] != errors[2]


def test_several_seeds_are_trained_in_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 2)
    console = Console(file=io.StringIO(), width=100)
    settings = dataclasses.replace(demo.QUICK, num_seeds=2)
    outcome = demo.run_demo(settings, seed=0, out=tmp_path, command="", console=console)
    assert {row.num_seeds for row in outcome.rows} == {2}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["seeds"], manifest["workers"]) == ([0, 1], 2)
    # A process of its own changes nothing: the second seed learns as it would here.
    here = demo.train_seeds([1], send=lambda sent: None, stopped=never, settings=settings)
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    ends = {tuple(line.split(",")[:3]): line.split(",")[5] for line in lines[1:]}
    for run in here:
        assert ends[run.task, run.method, "1"] == f"{run.records[-1].error:.6g}"


def test_an_interrupted_demo_reports_the_steps_that_all_methods_made(tmp_path, monkeypatch):
    def spread(job, seeds, *, num_workers, on_update):
        calls = iter(range(1000))
        result = job(seeds, send=lambda sent: on_update(0, sent), stopped=lambda: next(calls) >= 15)
        return worker_pool.Spread([result], True)

    monkeypatch.setattr(worker_pool, "spread", spread)
    console = Console(file=io.StringIO(), width=100)
    outcome = demo.run_demo(demo.QUICK, seed=0, out=tmp_path, command="", console=console)
    assert outcome.interrupted
    # 12 steps in the first round, then two and one of two more.
    assert {row.num_steps for row in outcome.rows} == {2}
    assert "Interrupted: digits after 2 steps" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "manifest.json").read_text())["interrupted"] is True


def test_an_interruption_before_the_first_step_reports_nothing(tmp_path, monkeypatch):
    def spread(job, seeds, *, num_workers, on_update):
        return worker_pool.Spread([job(seeds, send=None, stopped=lambda: True)], True)

    monkeypatch.setattr(worker_pool, "spread", spread)
    console = Console(file=io.StringIO(), width=100)
    outcome = demo.run_demo(demo.QUICK, seed=0, out=tmp_path, command="", console=console)
    assert outcome == ([], True)
    assert list(tmp_path.iterdir()) == []


def test_settings_with_empty_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds must lie between 1 and the fewest steps"):
        dataclasses.replace(demo.QUICK, rounds=5)
