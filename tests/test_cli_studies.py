# ruff: noqa: F811 (pytest finds the fixture by its name)
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from cli_studies import studies  # noqa: F401
from kondo import cli
from kondo_lab import cli as lab_cli


def test_list_names_the_studies_within_100_columns(capsys, studies):
    from lab.studies import toy

    studies(toy.study(claim="Counting works. " * 20))
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["study", "paper", "claim", "verdicts"]
    assert lines[2].startswith("toy")
    assert "Toy Fig 1" in lines[2]
    assert sum(line.count("Counting") for line in lines) == 20
    assert max(map(len, lines)) <= 100


def test_run_shows_the_headline_and_what_was_written(capsys, studies, tmp_path):
    assert cli.main(["run", "toy", "--small", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"Toy Fig 1 +PG +error +1000 +0.03 +0.03281 ±0.0016 +2 +matches", text)
    assert "PG ends at 0.0328." in text
    assert "wrote kondo-runs/toy-small/headline.csv" in text
    assert "not to be compared" in text
    assert max(map(len, text.splitlines())) <= 100
    manifest = json.loads((tmp_path / "kondo-runs/toy-small/manifest.json").read_text())
    assert manifest["command"] == "kondo run toy --small --device cpu"


def test_run_takes_seeds_and_a_folder(capsys, studies, tmp_path):
    assert cli.main(["run", "toy", "--seeds", "4", "--device", "cpu", "--out", "here"]) == 0
    assert "not to be compared" not in capsys.readouterr().out
    manifest = json.loads((tmp_path / "here/manifest.json").read_text())
    assert (manifest["size"], manifest["num_seeds"], manifest["seeds"]) == ("full", 4, [0, 1, 2, 3])


def test_run_refuses_a_folder_with_results(capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    assert cli.main(["run", "toy"]) == 1
    assert "kondo run: kondo-runs/toy already holds results" in capsys.readouterr().err


def test_a_stopped_run_says_how_to_go_on(capsys, studies, tmp_path):
    from lab.studies import toy

    def stop(name, step, context):
        if (name, step) == ("second", 4):
            os.kill(os.getpid(), signal.SIGINT)

    studies(toy.study(stop))
    assert cli.main(["run", "toy", "--small"]) == cli.INTERRUPTED
    text = capsys.readouterr().out
    assert "To go on: kondo run toy --small" in text
    assert "Toy Fig 1" in text
    studies(toy.study())
    assert cli.main(["run", "toy", "--small"]) == 0
    assert "Resuming kondo-runs/toy-small: 1 of 3 parts done." in capsys.readouterr().out


def test_a_failing_part_is_an_error_with_its_traceback(studies):
    from lab.studies import toy

    def fail(name, step, context):
        raise ZeroDivisionError("as told")

    studies(toy.study(fail))
    with pytest.raises(ZeroDivisionError):  # Python prints it and exits with status 1
        cli.main(["run", "toy"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "tay"], "kondo run: no study is called 'tay'. Did you mean toy? There are: toy."),
        (["run", "toy", "--seeds", "13"], "kondo run: num_seeds must not be 13"),
        (["run", "toy", "--mnist", "nowhere"], "kondo run: --mnist must be a folder, got nowhere"),
        (["plot", "tay"], "kondo plot: no study is called 'tay'"),
        (["plot", "toy"], "kondo plot: no records in kondo-runs/toy or results/toy-v1. Run"),
        (["plot", "toy", "--from", "nowhere"], "kondo plot: nowhere holds no records of a run"),
        (["report"], "kondo report: no runs under results or kondo-runs. Run a study"),
        (["report", "nowhere"], "kondo report: "),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments, message, capsys, studies, tmp_path):
    assert cli.main(arguments) == 1
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert not (tmp_path / "kondo-runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(capsys, studies):
    assert cli.main(["run", "toy", "--device", "cuda"]) == 1
    assert "torch finds no CUDA device here. Use --device cpu" in capsys.readouterr().err


def test_run_hands_the_mnist_folder_on(studies, tmp_path, monkeypatch):
    from lab.studies import toy

    monkeypatch.setenv(lab_cli.MNIST, "before")  # so that it is put back
    seen = []
    studies(toy.study(lambda name, step, context: seen.append(os.environ[lab_cli.MNIST])))
    (tmp_path / "files").mkdir()
    assert cli.main(["run", "toy", "--mnist", "files"]) == 0
    assert set(seen) == {str(tmp_path / "files")}


@pytest.mark.parametrize(("threads", "expected"), [(None, 3), ("1", None)])
def test_run_uses_all_cores_unless_told_otherwise(studies, monkeypatch, threads, expected):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    chosen = []
    monkeypatch.setattr("kondo_lab.worker_pool.usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert cli.main(["run", "toy", "--device", "cpu"]) == 0
    assert chosen == ([] if expected is None else [expected])


def test_plot_writes_the_same_again(capsys, studies, tmp_path):
    assert cli.main(["run", "toy"]) == 0
    headline = tmp_path / "kondo-runs/toy/headline.csv"
    before = headline.read_bytes()
    headline.unlink()
    capsys.readouterr()
    assert cli.main(["plot", "toy"]) == 0
    text = capsys.readouterr().out
    assert headline.read_bytes() == before
    assert "Toy Fig 1" in text
    assert "wrote kondo-runs/toy/headline.csv" in text
    assert "records.csv.gz" not in text


def test_plot_takes_the_newest_run(capsys, studies, tmp_path):
    for folder in ("results/toy-v1", "kondo-runs/toy"):
        assert cli.main(["run", "toy", "--out", folder]) == 0
    os.utime(tmp_path / "kondo-runs/toy/records.csv.gz", (1, 1))
    capsys.readouterr()
    assert cli.main(["plot", "toy"]) == 0
    assert "wrote results/toy-v1/headline.csv" in capsys.readouterr().out


def test_report_is_made_of_every_run_there_is(capsys, studies, tmp_path, monkeypatch):
    from kondo_lab.studies import html_report

    for folder in ("results/toy-v1", "kondo-runs/toy"):
        assert cli.main(["run", "toy", "--out", folder]) == 0
    (tmp_path / "results/demo-v1").mkdir()
    (tmp_path / "results/demo-v1/manifest.json").write_text("{}")
    asked = []
    monkeypatch.setattr(html_report, "write", lambda folders, out: asked.append((folders, out)))
    capsys.readouterr()
    assert cli.main(["report"]) == 0
    assert capsys.readouterr().out == "wrote report.html\n"
    assert cli.main(["report", "results/toy-v1", "--out", "a.html"]) == 0
    both = [Path("kondo-runs/toy"), Path("results/toy-v1")]
    assert asked == [(both, Path("report.html")), ([both[1]], Path("a.html"))]


def test_a_report_of_a_run_can_be_written(studies, tmp_path):
    assert cli.main(["run", "toy"]) == 0
    assert cli.main(["report"]) == 0
    assert "Counting works." in (tmp_path / "report.html").read_text()
