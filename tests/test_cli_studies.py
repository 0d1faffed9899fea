# ruff: noqa: F811 (pytest finds the fixture by its name)
import dataclasses
import errno
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from cli_studies import studies  # noqa: F401
from kondo import cli
from kondo.cli.common import OutputError
from kondo_lab import cli as lab_cli


@pytest.mark.parametrize(("columns", "width"), [(None, 100), ("60", 60), ("140", 140)])
def test_list_has_a_line_for_each_study_as_wide_as_the_terminal(
    columns, width, capsys, studies, monkeypatch
):
    from lab.studies import toy

    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    studies(toy.study(title="A toy that counts. " * 20, claim="Counting works. " * 20))
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["study", "title", "met", "missed", "open"]
    assert lines[2].startswith("toy    A toy that counts. ")
    assert re.search(r"…  +-  +-  +- *$", lines[2])
    assert max(map(len, lines[:3])) == width
    assert "Counting" not in " ".join(lines)
    assert cli.main(["list", "--full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["study", "paper", "claim", "met", "missed", "open"]
    assert "Toy" in lines[2]
    assert sum(line.count("Counting") for line in lines) == 20
    assert max(map(len, lines[:3])) == width


def test_list_counts_the_verdicts_of_each_device(capsys, studies, monkeypatch):
    from kondo_lab.evidence import bundled_claims
    from kondo_lab.evidence.study import Claim

    found = {
        "toy-cpu-v1": [Claim("a", "met", ""), Claim("b", "open", ""), Claim("c", "met", "")],
        "toy-cuda-v1": [Claim("a", "missed", "")],
        "toy-v2": [Claim("of another version", "met", "")],
    }
    monkeypatch.setattr(bundled_claims, "read", lambda: found)
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"toy \(cpu\)  +A toy +2 +0 +1 *", lines[2])
    assert re.fullmatch(r"toy \(cuda\)  +A toy +0 +1 +0 *", lines[3])
    assert cli.main(["list", "--json"]) == 0
    (study,) = json.loads(capsys.readouterr().out)["studies"]
    assert study == {
        "name": "toy",
        "title": "A toy",
        "paper": "Toy Fig 1",
        "claim": "Counting works.",
        "version": 1,
        "verdicts": {
            "toy-cpu": {"met": 2, "missed": 0, "open": 1},
            "toy-cuda": {"met": 0, "missed": 1, "open": 0},
        },
    }


def test_run_shows_the_headline_and_what_was_written(capsys, studies, tmp_path):
    assert cli.main(["run", "toy", "--small", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"Toy Fig 1 +PG +error +1000 +0.03 +0.03281 ±0.0016 +2 +matches", text)
    assert "PG ends at 0.0328." in text
    assert re.search(r"met +PG ends at 3% +PG at 1000: 0\.0328", text)
    assert text.index("PG ends at 3%") < text.index("±0.0016  ")  # claims come first
    assert "Claims: 1 met.\n" in text
    assert "Numbers: 2, of which 1 has an expected value: 1 matches.\n" in text
    assert "wrote 7 files to kondo-runs/toy-small\n" in text
    assert "do not compare its numbers" in text
    assert max(map(len, text.splitlines())) <= 100
    manifest = json.loads((tmp_path / "kondo-runs/toy-small/manifest.json").read_text())
    assert manifest["command"] == "kondo run toy --small --device cpu"


def test_run_takes_seeds_and_a_folder(capsys, studies, tmp_path):
    assert cli.main(["run", "toy", "--seeds", "4", "--device", "cpu", "--out", "here"]) == 0
    assert "do not compare" not in capsys.readouterr().out
    manifest = json.loads((tmp_path / "here/manifest.json").read_text())
    assert (manifest["size"], manifest["num_seeds"], manifest["seeds"]) == ("full", 4, [0, 1, 2, 3])


def test_a_finished_run_is_shown_and_not_run_again(capsys, studies):
    from lab.studies import toy

    assert cli.main(["run", "toy", "--small"]) == 0
    starts = []
    studies(toy.study(starts=starts))
    before = {path: path.read_bytes() for path in Path("kondo-runs/toy-small").iterdir()}
    capsys.readouterr()
    assert cli.main(["run", "toy", "--small"]) == 0
    text, err = capsys.readouterr()
    folder = "kondo-runs/toy-small"
    assert f"Already finished: these are the results in {folder}. Nothing was run." in text
    assert f"To run it anew: kondo run toy --small --out DIR, or move {folder} away." in text
    assert "Claims: 1 met." in text
    assert (starts, err) == ([], "")
    assert {path: path.read_bytes() for path in Path("kondo-runs/toy-small").iterdir()} == before
    assert cli.main(["run", "toy", "--small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "already finished"


def test_run_refuses_a_folder_with_other_results(capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    capsys.readouterr()
    assert cli.main(["run", "toy", "--seeds", "4"]) == 1
    text = capsys.readouterr().err
    assert "kondo run: kondo-runs/toy already holds results of other settings (" in text
    assert "settings.num_seeds" in text


@pytest.mark.parametrize("command", ["run", "plot"])
def test_json_alone_is_on_standard_output(command, capsys, studies):
    if command == "plot":
        assert cli.main(["run", "toy", "--small"]) == 0
        capsys.readouterr()
    more = ["--small"] if command == "run" else []
    assert cli.main([command, "toy", "--json", *more]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(found) == {
        *("study", "version", "title", "paper", "claim", "size", "device", "seeds", "command"),
        *("status", "folder", "seconds", "notes", "claims", "headline", "findings", "written"),
    }
    assert (found["study"], found["size"], found["seeds"]) == ("toy", "small", [0, 1])
    assert found["status"] == {"run": "finished", "plot": "analysed"}[command]
    assert found["folder"] == "kondo-runs/toy-small"
    assert found["claims"][0]["verdict"] == "met"
    assert found["headline"][0]["expected"] == 0.03
    assert found["headline"][1]["expected"] is None
    assert found["findings"] == ["PG ends at 0.0328."]
    assert "kondo-runs/toy-small/headline.csv" in found["written"]
    if command == "run":
        assert "Counting works." in err
        assert "100%" in err


def test_json_of_a_stopped_run_says_so(capsys, studies):
    from lab.studies import toy

    def stop(name, step, context):
        if (name, step) == ("first", 4):
            os.kill(os.getpid(), signal.SIGINT)

    studies(toy.study(stop))
    assert cli.main(["run", "toy", "--small", "--json"]) == cli.INTERRUPTED
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["claims"], found["written"]) == ("stopped", [], [])


def test_many_lines_are_shortened_unless_all_are_asked_for(capsys, studies):
    from kondo_lab.evidence.study import Claim, headline
    from lab.studies import toy

    def analyse(records, chosen):
        made = toy.analyse(records, chosen)
        lines = [headline("Fig 9", f"s{i}", "error", i, 1.0, expected=1.0) for i in range(20)]
        lines += [headline("Fig 9", "odd", "error", i, 1.0, expected=9.0) for i in range(15)]
        claims = [Claim(f"claim {i}", "met" if i % 2 else "missed", "") for i in range(20)]
        findings = [f"finding {i}" for i in range(5)]
        return dataclasses.replace(made, headline=lines, claims=claims, findings=findings)

    studies(toy.study(analyse=analyse))
    assert cli.main(["run", "toy"]) == 0
    text = capsys.readouterr().out
    assert text.count("Fig 9") == 12
    assert "s3" not in text
    assert text.count("claim ") == 12 + text.count("verdict  claim ")
    assert "Claims: 10 met, 10 missed." in text
    assert "35, of which 35 have expected values: 20 matches, 15 differs." in text
    assert "finding 2" in text
    assert "finding 3" not in text
    assert "Not shown: 8 claims, 23 numbers, 2 findings. --full shows them." in text
    assert cli.main(["plot", "toy", "--full"]) == 0
    text = capsys.readouterr().out
    assert text.count("Fig 9") == 35
    assert "finding 4" in text
    assert "claim 19" in text
    assert "Not shown" not in text
    assert "wrote kondo-runs/toy/headline.csv" in text


def test_a_note_says_that_digits_replace_mnist(capsys, studies):
    from kondo_lab.studies.mnist_kondo import STUDY
    from lab.studies import toy

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(toy.Settings):
        data: str = "mnist"

    def settings(size, num_seeds):
        return Settings(num_seeds=2, data="digits" if size == "small" else "mnist")

    assert STUDY.settings("small", None).data == "digits"  # what a real study does
    studies(toy.study(settings=settings))
    assert cli.main(["run", "toy", "--small"]) == 0
    text = capsys.readouterr().out
    assert text.count("Note: the small size trains on the 1,797 digits of 8 x 8 pixels") == 1
    assert "instead of MNIST" in text
    assert cli.main(["run", "toy"]) == 0
    assert "Note:" not in capsys.readouterr().out
    assert cli.main(["run", "toy", "--small", "--json", "--out", "another"]) == 0
    assert "instead of MNIST" in json.loads(capsys.readouterr().out)["notes"][0]


def test_missing_data_are_named_in_one_line(capsys, studies, tmp_path, monkeypatch):
    from kondo_lab.tasks import mnist
    from lab.studies import toy

    monkeypatch.delenv("KONDO_MNIST", raising=False)
    monkeypatch.setenv("KONDO_CACHE", str(tmp_path / "cache"))
    mirrors = ("file:///nowhere/", "file:///nowhere-either/")
    studies(toy.study(lambda name, step, context: mnist.load(mirrors=mirrors)))
    assert cli.main(["run", "toy"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("kondo run: MNIST's train-images-idx3-ubyte is not in the cache")
    assert "--mnist DIR" in text
    assert text.count("\n") == 1


def test_a_stopped_run_says_how_to_go_on(capsys, studies, tmp_path):
    from lab.studies import toy

    def stop(name, step, context):
        if (name, step) == ("second", 4):
            os.kill(os.getpid(), signal.SIGINT)

    studies(toy.study(stop))
    assert cli.main(["run", "toy", "--small"]) == cli.INTERRUPTED
    text = capsys.readouterr().out
    assert "To continue: kondo run toy --small" in text
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
        (
            ["plot", "toy"],
            "kondo-runs/toy, kondo-runs/toy-small or results/toy-v1",
        ),
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


@pytest.mark.parametrize(
    ("cause", "status"), [(BrokenPipeError(), cli.CLOSED_PIPE), (OSError(errno.ENOSPC, "full"), 1)]
)
def test_a_run_whose_output_is_lost_says_what_is_kept(cause, status, capsys, studies, monkeypatch):
    from lab.studies import toy

    def lose(name, step, context):
        if (name, step) == ("second", 4):
            raise OutputError("cannot write standard output: lost.") from cause

    monkeypatch.setattr(cli, "drop_output", lambda: None)
    studies(toy.study(lose))
    assert cli.main(["run", "toy"]) == status
    assert capsys.readouterr().err == (
        "kondo run: cannot write standard output: lost. This was part 'second' of study 'toy'. "
        "Finished parts are kept in kondo-runs/toy; the same command goes on from there.\n"
    )


def test_run_hands_the_mnist_folder_on(studies, tmp_path, monkeypatch):
    from lab.studies import toy

    monkeypatch.setenv(lab_cli.MNIST, "before")  # so that it is put back
    seen = []
    studies(toy.study(lambda name, step, context: seen.append(os.environ[lab_cli.MNIST])))
    (tmp_path / "files").mkdir()
    assert cli.main(["run", "toy", "--mnist", "files"]) == 0
    assert set(seen) == {str(tmp_path / "files")}


@pytest.mark.parametrize(
    ("size", "threads", "expected"),
    [([], None, [3]), (["--small"], None, [1]), ([], "1", []), (["--small"], "2", [])],
)
def test_a_small_run_uses_one_thread_unless_told_otherwise(
    studies, monkeypatch, size, threads, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    chosen = []
    monkeypatch.setattr("kondo_lab.training.worker_pool.usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert cli.main(["run", "toy", "--device", "cpu", *size]) == 0
    assert chosen == expected


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
    assert text.startswith("reading kondo-runs/toy\n")
    assert "wrote 6 files to kondo-runs/toy\n" in text


def test_plot_takes_the_newest_run(capsys, studies, tmp_path):
    folders = ["results/toy-v1", "kondo-runs/toy", "results/toy-cpu-v1"]
    for folder in folders:
        assert cli.main(["run", "toy", "--out", folder]) == 0
    assert cli.main(["run", "toy", "--small"]) == 0
    folders.append("kondo-runs/toy-small")
    for newest in folders:
        for folder in folders:
            when = 2 if folder == newest else 1
            os.utime(tmp_path / folder / "runs.jsonl.gz", (when, when))
        capsys.readouterr()
        assert cli.main(["plot", "toy"]) == 0
        assert capsys.readouterr().out.startswith(f"reading {newest}\n")


def test_plot_finds_a_run_that_was_killed(capsys, studies, tmp_path):
    from kondo_lab.evidence import part_files

    assert cli.main(["run", "toy"]) == 0
    folder = tmp_path / "kondo-runs/toy"
    (folder / "parts").mkdir()
    part_files.restore(folder, ["first", "second"])
    for name in ("runs.jsonl.gz", "headline.csv"):  # which it had not come to
        (folder / name).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"finished": False, "finished_parts": ["first", "second"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert cli.main(["plot", "toy"]) == 0
    assert capsys.readouterr().out.startswith("reading kondo-runs/toy\n")
    assert (folder / "headline.csv").exists()


def test_report_is_made_of_every_run_there_is(capsys, studies, tmp_path, monkeypatch):
    from kondo_lab.evidence import html_report

    for folder in ("results/toy-v1", "kondo-runs/toy"):
        assert cli.main(["run", "toy", "--out", folder]) == 0
    (tmp_path / "results/demo-v1").mkdir()
    (tmp_path / "results/demo-v1/manifest.json").write_text("{}")
    asked = []
    monkeypatch.setattr(html_report, "write", lambda folders, out: asked.append((folders, out)))
    capsys.readouterr()
    assert cli.main(["report"]) == 0
    out, err = capsys.readouterr()
    assert out == "wrote report.html\n"
    assert err == "kondo report: skipped results/demo-v1: it holds no finished run\n"
    assert cli.main(["report", "results/toy-v1", "--out", "a.html"]) == 0
    both = [Path("kondo-runs/toy"), Path("results/toy-v1")]
    assert asked == [(both, Path("report.html")), ([both[1]], Path("a.html"))]


def test_a_report_of_a_run_can_be_written(studies, tmp_path):
    assert cli.main(["run", "toy"]) == 0
    assert cli.main(["report"]) == 0
    assert "Counting works." in (tmp_path / "report.html").read_text()
