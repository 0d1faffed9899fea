"""The laboratory's benchmark: it runs, its CSV has the schema, and its own checks can fail.

No time is asserted anywhere: the numbers of a shared machine prove nothing.
"""

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tolerances import assert_close

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
SLOW = pytest.mark.slow  # of the run of the whole script: four processes, each imports torch


@pytest.fixture
def scripts(monkeypatch):
    """Import the benchmark's modules as its own command does: from their folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_lab
    import harness
    import lab_check
    import lab_jobs
    import plain_loop

    return bench_lab, harness, lab_check, lab_jobs, plain_loop


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "lab.csv"
    command = [sys.executable, str(FOLDER / "bench_lab.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    with out.open(newline="") as file:
        return out, list(csv.DictReader(file))


def job(lab_jobs, task, method, members):
    return lab_jobs.Job(task=task, method=method, members=members, seed=3, sizes=lab_jobs.QUICK)


@SLOW
def test_csv_has_the_schema_and_every_contender(quick_run, scripts):
    _, harness, _, _, _ = scripts
    _, lines = quick_run
    assert tuple(lines[0]) == harness.COLUMNS
    empty = ("limit", "share_of_limit", "gate_overhead", "stages")
    for line in lines:
        for column, cell in line.items():
            assert bool(cell) != (column in empty), (column, line)
    names = ["plain-loop/2x1", "population-1/1x1", "population-2/2x1", "population-2/1x1"]
    for task, unit in (("mnist", "sample"), ("reversal", "sequence")):
        for method in ("DG", "DG-K 3%"):
            own = [
                line
                for line in lines
                if line["model"] == task and line["config"].startswith(f"{method},")
            ]
            assert [line["contender"] for line in own] == names
            assert {line["unit"] for line in own} == {unit}
            assert [line["threads"] for line in own] == ["2", "1", "2", "1"]
            assert float(own[0]["speedup_p50"]) == 1


@SLOW
def test_rows_differentiated_are_those_the_gate_keeps(quick_run):
    """Dense and plain: all 100. DG-K 3%: 3, or 4 (the next size) where a member keeps a tie."""
    _, lines = quick_run
    for line in lines:
        gated = line["rate"] == "0.03" and line["contender"].startswith("population")
        assert int(line["rows_differentiated"]) in ((3, 4) if gated else (100,)), line


@SLOW
def test_plot_lies_beside_the_csv(quick_run):
    out, _ = quick_run
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--quick"], ["--members", "3"], ["--members", "-2"]])
def test_wrong_options_are_refused(scripts, arguments):
    bench_lab, *_ = scripts
    with pytest.raises(SystemExit):
        bench_lab.parse(arguments)


@pytest.mark.parametrize("task", ["mnist", "reversal"])
@pytest.mark.parametrize("method", ["DG", "DG-K 3%"])
def test_gradient_error_sees_another_gradient(scripts, task, method):
    _, _, lab_check, lab_jobs, _ = scripts
    population = lab_jobs.build(job(lab_jobs, task, method, 2), CPU)
    twin = lab_jobs.plain_policy(task, lab_jobs.QUICK, 0)
    assert lab_check.gradient_error(population, twin, method) < 1e-5
    other = "DG" if method == "DG-K 3%" else "DG-K 3%"
    assert lab_check.gradient_error(population, twin, other) > 1e-2


def test_a_wrong_gradient_ends_the_run(scripts):
    bench_lab, _, _, lab_jobs, _ = scripts
    contender = bench_lab.Contender(
        name="population-1/1x1", jobs=(job(lab_jobs, "mnist", "DG", 1),), threads=1
    )
    for error in (1e-3, math.nan):
        with pytest.raises(SystemExit, match="differs from plain PyTorch"):
            bench_lab.check_gradient(contender, [lab_jobs.Finding(100, 1.0, error, 1.0)])
    bench_lab.check_gradient(contender, [lab_jobs.Finding(100, 1.0, 1e-6, 1.0)])


@pytest.mark.parametrize("task", ["mnist", "reversal"])
@pytest.mark.parametrize(("members", "method", "rows"), [(0, "DG-K 3%", 100), (2, "DG", 100)])
def test_counting_rows_leaves_the_learner_as_it_was(scripts, task, members, method, rows):
    *_, lab_jobs, _ = scripts
    learner = lab_jobs.build(job(lab_jobs, task, method, members), CPU)
    owner = learner.program if members else learner
    before = set(vars(owner))
    assert lab_jobs.count_rows(learner) == rows
    assert set(vars(owner)) == before


def test_plain_sampling_reads_the_whole_context(scripts):
    """The log-probs it sampled with are those of the finished answers, and the weights move."""
    *_, lab_jobs, _ = scripts
    loop = lab_jobs.build(job(lab_jobs, "reversal", "DG", 0), CPU)
    experience = loop.sample()
    assert experience.rows["answers"].shape == (100, 3)
    assert_close(experience.log_probs, loop.policy.log_prob(experience.rows))
    assert_close(experience.advantages.view(10, 10).mean(dim=1), torch.zeros(10))
    weight = loop.policy.head.weight.clone()
    loop.step()
    assert not torch.equal(loop.policy.head.weight, weight)


def test_plain_weights_by_hand(scripts):
    """Delight 2 x 1 + 2 x 3 = 8 and -1: sigmoid of each token's; the better of 33 rows kept."""
    *_, plain_loop = scripts
    log_probs = torch.zeros(33, 2)
    log_probs[0] = torch.tensor([-1.0, -3.0])
    log_probs[1] = torch.tensor([-1.0, 0.0])
    advantages = torch.zeros(33, 1)
    advantages[0], advantages[1] = 2.0, -1.0
    experience = plain_loop.Experience({}, log_probs, advantages)
    soft = plain_loop.weights("DG", experience)
    assert_close(soft[:2], torch.tensor([[2.0, 6.0], [-1.0, 0.0]]).sigmoid())
    hard = plain_loop.weights("DG-K 3%", experience)
    assert hard.flatten().nonzero().tolist() == [[0]]
    assert_close(plain_loop.loss(log_probs, "DG-K 3%", experience), 2.0 * 4.0 / 66)


def test_speed_ups_are_member_steps_inside_a_round(scripts):
    """Plain 4 and 40 ms a member-step, ours 1 and 10 ms: 4x in both rounds."""
    bench_lab, harness, _, lab_jobs, _ = scripts
    shapes = [(2, 1)]
    contenders = bench_lab.contenders_for(
        "mnist", "DG", lab_jobs.QUICK, shapes=shapes, max_members=4
    )
    assert [c.name for c in contenders] == [
        "plain-loop/2x1",
        "population-2/2x1",
        "population-4/2x1",
    ]
    assert [c.members for c in contenders] == [2, 2, 4]
    assert [[job.seed for job in c.jobs] for c in contenders] == [[0, 1], [0, 1], [0, 2]]
    samples = [[[0.004], [0.04]], [[0.001], [0.01]], [[0.002], [0.02]]]
    findings = [[lab_jobs.Finding(100, 5.0, 0.0, 1.0)] * 2] * 3
    where = harness.environment(CPU, "commit")
    _, first, second = bench_lab.summarise(contenders, findings, samples, where)
    assert (first.speedup_p20, first.speedup_p50, first.speedup_p80) == (4, 4, 4)
    assert second.speedup_p50 == 2
    assert first.step_ms_p50 == pytest.approx(5.5)
    assert (first.peak_memory_mb, first.threads) == (10.0, 2)


def test_time_is_shared_out_to_members_and_steps(scripts):
    bench_lab, _, _, lab_jobs, _ = scripts
    asked = []

    class Crew:
        def ask(self, orders):
            asked.append([order.steps for order in orders])

    contenders = bench_lab.contenders_for(
        "mnist", "DG", lab_jobs.QUICK, shapes=[(2, 1)], max_members=2
    )
    findings = [[lab_jobs.Finding(100, 5.0, 0.0, 0.1), lab_jobs.Finding(100, 5.0, 0.0, 0.05)]] * 2
    samples = bench_lab.run_rounds(
        contenders, findings, {(2, 1): Crew()}, repeats=2, turn_seconds=0.5
    )
    assert [[len(turns) for turns in rounds] for rounds in samples] == [[3, 3], [1, 1]]
    assert asked == [[5, 5]] * 8  # by the slower process: 0.5 s of steps of 0.1 s


@pytest.mark.parametrize(("seconds", "verdict"), [(0.8, "met"), (1.1, "MISSED")])
def test_targets_name_the_best_population(scripts, capsys, seconds, verdict):
    """Plain 5 s a member-step; the population of 2 takes 2 s and that of 4 `seconds`."""
    bench_lab, harness, _, lab_jobs, _ = scripts
    contenders = bench_lab.contenders_for(
        "reversal", "DG", lab_jobs.QUICK, shapes=[(2, 1)], max_members=4
    )
    findings = [[lab_jobs.Finding(100, 5.0, 0.0, 1.0)] * 2] * 3
    samples = [[[5.0]], [[2.0]], [[seconds]]]
    where = harness.environment(CPU, "commit")
    bench_lab.print_targets(bench_lab.summarise(contenders, findings, samples, where))
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"Target, reversal, DG: {5 / seconds:.2f}x")
    assert "(population-4/2x1, p50)" in said
    assert said.endswith(f": {verdict}")
