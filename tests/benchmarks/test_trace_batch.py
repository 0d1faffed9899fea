"""How many modules a batch passes: counted at run time, and not more than today's limit."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trace_batch(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import trace_batch

    return trace_batch


def test_a_batch_passes_no_more_than_the_limit():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "trace_batch.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "engine.step" in done.stdout
    assert "lm.model" in done.stdout


def test_more_modules_than_the_limit_are_an_error(trace_batch, monkeypatch, capsys):
    monkeypatch.setattr(trace_batch, "LIMITS", dict.fromkeys(trace_batch.STEPS, (5, 10_000)))
    assert trace_batch.main() == 1
    assert "limit 5 and 10,000" in capsys.readouterr().out


def test_modules_are_those_with_a_function_that_ran(trace_batch):
    passed = {each.module: each for each in trace_batch.trace(trace_batch.plain_function())}
    assert {"engine.step", "engine.select", "core.unbiased", "core.losses.on_policy"} <= set(passed)
    assert not {"lm.model", "core.gates", "engine.planner"} & set(passed)
    assert passed["engine.step"].functions[0] == "backward"
    source = FOLDER.parent / "src" / "kondo" / "engine" / "step.py"
    assert passed["engine.step"].lines == len(source.read_text().splitlines())
