"""The step benchmark: it runs, its CSV has the schema, and its own checks can fail.

No time is asserted anywhere: the numbers of a shared machine prove nothing.
"""

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"

COLUMNS = [
    "benchmark",
    "model",
    "config",
    "contender",
    "rate",
    "unit",
    "rows",
    "tokens",
    "rows_differentiated",
    "step_ms_p20",
    "step_ms_p50",
    "step_ms_p80",
    "speedup_p20",
    "speedup_p50",
    "speedup_p80",
    "limit",
    "share_of_limit",
    "gate_overhead",
    "stages",
    "peak_memory_mb",
    "device",
    "threads",
    "torch",
    "transformers",
    "python",
    "commit",
    "date",
    "repeats",
]
RATES = ["0.01", "0.03", "0.1", "0.3", "0.5", "1"]


@pytest.fixture
def scripts(monkeypatch):
    """Import the benchmark's modules as its own command does: from their folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_step
    import harness
    import workloads

    return bench_step, harness, workloads


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "step.csv"
    command = [sys.executable, str(FOLDER / "bench_step.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    with out.open(newline="") as file:
        return out, list(csv.DictReader(file))


def test_csv_has_the_schema(quick_run):
    _, lines = quick_run
    assert list(lines[0]) == COLUMNS
    for line in lines:
        for column in COLUMNS:
            optional = ("limit", "share_of_limit", "gate_overhead", "stages")
            assert line[column] or column in optional, (column, line)


def test_every_contender_is_there_at_every_rate(quick_run):
    _, lines = quick_run
    found = {(line["model"], line["contender"].split("-0")[0], line["rate"]) for line in lines}
    assert {model for model, _, _ in found} == {"mlp", "gpt2", "larger"}
    for model in ("mlp", "gpt2", "larger"):
        assert {(model, name, "1") for name in ("dense", "forward")} <= found
        for name in ("exact", "free"):
            assert {(model, name, rate) for rate in RATES} <= found
        masked = {rate for m, name, rate in found if m == model and name.startswith("kondo-gate")}
        assert masked in (set(RATES), set())


def test_rows_differentiated_are_those_the_rate_buys(quick_run):
    """64 rows: round(0.01 * 64) = 1, 0.03: 2, 0.1: 6, 0.3: 19, 0.5: 32, 1: 64."""
    _, lines = quick_run
    for name in ("exact", "free"):
        rows = [
            int(line["rows_differentiated"])
            for line in lines
            if line["model"] == "mlp" and line["contender"] == name
        ]
        assert rows == [1, 2, 6, 19, 32, 64]
    for line in lines:
        if line["contender"] == "dense" or line["contender"].startswith("kondo-gate"):
            assert line["rows_differentiated"] == line["rows"]
        if line["contender"] == "forward":
            assert line["rows_differentiated"] == "0"


def test_plot_lies_beside_the_csv(quick_run):
    pytest.importorskip("matplotlib")
    out, _ = quick_run
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_quick_does_not_replace_the_real_numbers(scripts):
    bench_step, _, _ = scripts
    with pytest.raises(SystemExit):
        bench_step.parse(["--quick"])


@pytest.mark.parametrize("name", ["exact", "free"])
def test_a_wrong_gradient_ends_the_run(scripts, name):
    bench_step, _, workloads = scripts
    work = workloads.build("mlp", torch.device("cpu"), quick=True)
    known = bench_step.forward_log_probs(work)
    expected = bench_step.masked_gradient(work, 0.1, known)
    found = bench_step.contenders_for(work, [0.1], known)
    (contender,) = [c for c in found if c.name == name]
    work.model.zero_grad(set_to_none=True)
    contender.step()
    bench_step.check_gradient(work, contender, expected)
    work.model[0].weight.grad[0, 0] += 0.1
    with pytest.raises(SystemExit, match="differs from masked dense"):
        bench_step.check_gradient(work, contender, expected)


def test_a_report_with_other_rows_than_were_counted_ends_the_run(scripts):
    bench_step, harness, workloads = scripts
    work = workloads.build("mlp", torch.device("cpu"), quick=True)
    known = bench_step.forward_log_probs(work)
    *_, contender = bench_step.contenders_for(work, [0.1], known)
    seen = harness.inspect(contender, work.model, held=[], device=torch.device("cpu"))
    assert seen.rows == seen.report.rows_trained == 6
    bench_step.check_rows(work, contender, seen)
    with pytest.raises(SystemExit, match="were counted"):
        bench_step.check_rows(work, contender, dataclasses.replace(seen, rows=64))


def test_peak_memory_is_the_peak_and_not_the_sum(scripts):
    """2 MiB held; a step holds 4 MiB, frees it, then holds 1 MiB: the peak is 6 MiB."""
    _, harness, _ = scripts
    model = torch.nn.Linear(1, 1)
    mebi = 2**20 // 4  # float32 per MiB

    def step():
        torch.empty(4 * mebi)
        torch.empty(1 * mebi)

    contender = harness.Contender(name="memory", rate=1.0, step=step, limit=None)
    held = [torch.empty(2 * mebi)]
    seen = harness.inspect(contender, model, held=held, device=torch.device("cpu"))
    assert seen.peak_memory_mb == 6


def test_speedups_are_ratios_inside_a_round(scripts):
    """A round that is ten times slower for all changes no ratio.

    dense 1 and 10 s, F 0.25 and 2.5 s, ours 0.5 and 5 s at a realised rate of 1/4: speed-up 2,
    limit 1 / (1/4 + 1/4) = 2, so all of it.
    """
    _, harness, _ = scripts
    names = (harness.DENSE, harness.FORWARD, "exact")
    contenders = [
        harness.Contender(name=name, rate=0.25, step=lambda: None, limit=lambda f, r: 1 / (f + r))
        for name in names
    ]
    samples = [
        harness.Samples(seconds=[[t], [10 * t]], reports=[[None], [None]]) for t in (1, 0.25, 0.5)
    ]
    seen = [harness.Inspection(rows=n, peak_memory_mb=1.0, report=None) for n in (4, 0, 1)]
    words = ("benchmark", "model", "config", "unit", "tokens")
    shared = dict.fromkeys(words, "") | {"rows": 4} | harness.environment(torch.device("cpu"), "c")
    ours = harness.summarise(contenders, samples, seen, shared)[2]
    assert (ours.speedup_p20, ours.speedup_p50, ours.speedup_p80) == (2, 2, 2)
    assert (ours.limit, ours.share_of_limit) == (2, 1)
