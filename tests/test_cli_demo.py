import json
import os
import signal

import pytest
import torch

from kondo import cli


def test_demo_writes_where_told_and_never_over_old_results(tmp_path, capsys):
    out = tmp_path / "demo"
    assert cli.main(["demo", "--quick", "--out", str(out), "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert f"Open {out}/report.html in a browser." in text
    assert f"files to {out}\n" in text
    assert "numbers mean nothing" in text
    assert "already holds results" not in text
    manifest = (out / "manifest.json").read_text()
    assert json.loads(manifest)["seeds"] == [3]
    assert json.loads(manifest)["command"] == f"kondo demo --quick --out {out} --seed 3"

    assert cli.main(["demo", "--quick", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"already holds results; writing to {out}-2" in text
    assert (out / "manifest.json").read_text() == manifest
    assert json.loads((tmp_path / "demo-2" / "manifest.json").read_text())["seeds"] == [0]


def test_an_unusable_folder_is_an_error_before_any_training(tmp_path, capsys):
    (tmp_path / "demo").write_text("a file")
    assert cli.main(["demo", "--out", str(tmp_path / "demo")]) == 1
    assert "kondo demo: cannot write to" in capsys.readouterr().err


@pytest.fixture
def ctrl_c(monkeypatch):
    """Press Ctrl-C before a step of the demo: of this task, after so many steps of a method."""
    from kondo_lab.studies.demo.training import TrainingRun

    real = TrainingRun.step

    def install(unit, made, times=1):
        def step(run):
            if run._task.unit == unit and len(run.records) == made:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)
            real(run)

        monkeypatch.setattr(TrainingRun, "step", step)

    return install


def test_a_stopped_demo_reports_what_there_is_and_goes_on(tmp_path, capsys, ctrl_c, monkeypatch):
    out = tmp_path / "demo"
    ctrl_c("sequence", 2)
    assert cli.main(["demo", "--quick", "--out", str(out)]) == 128 + signal.SIGINT
    text = capsys.readouterr().out
    assert f"To continue: kondo demo --quick --out {out}" in text
    assert "Interrupted." in (out / "report.html").read_text()
    # Digits to their end, reversal as far as all methods came: 2 of 4 steps of 100 answers.
    headline = (out / "headline.csv").read_text()
    assert "digits,PG,backward passes,400," in headline
    assert "reversal,PG,backward passes,200," in headline
    monkeypatch.undo()
    assert cli.main(["demo", "--quick", "--out", str(out)]) == 0
    assert f"Resuming {out}: 1 of 2 parts done." in capsys.readouterr().out
    assert "reversal,PG,backward passes,400," in (out / "headline.csv").read_text()
    assert not (out / "parts").exists()
    assert "Interrupted." not in (out / "report.html").read_text()


def test_a_demo_stopped_before_its_first_results_writes_none(tmp_path, capsys, ctrl_c):
    ctrl_c("sample", 0)
    out = tmp_path / "demo"
    assert cli.main(["demo", "--quick", "--out", str(out)]) == 128 + signal.SIGINT
    assert "wrote" not in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "parts"]


def test_a_second_ctrl_c_ends_without_a_traceback(tmp_path, capsys, ctrl_c):
    ctrl_c("sample", 2, times=2)
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 128 + signal.SIGINT
    assert "kondo demo: interrupted." in capsys.readouterr().err


def test_an_older_demo_is_named_as_such(tmp_path, capsys):
    for name in ("manifest.json", "curves.csv"):
        (tmp_path / name).write_text("{}")
    assert cli.main(["plot", "demo", "--from", str(tmp_path)]) == 1
    assert f"{tmp_path} is in the older format of `kondo demo`" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 1
    assert f"{tmp_path} is not a result folder, it lacks headline.csv" in capsys.readouterr().err


def test_the_demo_trains_on_the_cpu_alone(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(["run", "demo", "--small", "--device", "cuda"]) == 1
    assert "--device cuda: demo trains on the CPU. Use --device cpu." in capsys.readouterr().err
