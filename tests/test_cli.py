import builtins
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kondo
from kondo import cli
from kondo_lab import cli as lab_cli
from test_run_files import file_limit


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kondo {kondo.__version__}\n"


def test_help_lists_the_commands(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("demo", "list", "run", "plot", "report"))
    assert "train PG, DG and DG-K side by side" in text


def test_help_of_demo_explains_its_options(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--out DIR", "--seed N", "--quick", "kondo-demo", "(3%)"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--seed", "-1"], "must be a whole number from 0 to 4294967295, got '-1'"),
        (["demo", "--seed", "two"], "must be a whole number from 0 to 4294967295, got 'two'"),
        (["demo", "--qui"], "unrecognized arguments: --qui"),
        (["run"], "the following arguments are required: STUDY"),
        (["run", "toy", "--seeds", "0"], "must be a whole number from 1 to 10000, got '0'"),
        (["run", "toy", "--seeds", "-2"], "must be a whole number from 1 to 10000, got '-2'"),
        (["run", "toy", "--seeds", "9" * 20], "--seeds: must be a whole number from 1 to 10000"),
        (["run", "toy", "--seeds", "9" * 5000], "--seeds: must be a whole number from 1 to 10000"),
        (["demo", "--seed", "9" * 20], "--seed: must be a whole number from 0 to 4294967295"),
        (["run", "toy", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["plot"], "the following arguments are required: STUDY"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_demo_writes_where_told_and_never_over_old_results(tmp_path, capsys):
    out = tmp_path / "demo"
    assert cli.main(["demo", "--quick", "--out", str(out), "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert f"wrote {out}/report.html" in text
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


@pytest.mark.parametrize("package", ["sklearn", "rich"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package, tmp_path):
    # In a process of its own: here everything has been imported already.
    code = f"""
import sys
sys.modules[{package!r}] = None
from kondo import cli
sys.exit(cli.main(["demo", "--quick", "--out", {str(tmp_path / "demo")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"kondo demo: {package} is not installed. Run: pip install 'kondo-lab'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo").exists()


def test_every_package_of_the_lab_is_known_to_the_command():
    required = [r for r in importlib.metadata.requires("kondo-lab") if "extra ==" not in r]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in required} - {"kondo"}
    assert names == {"numpy", "pandas", "matplotlib", "scikit-learn", "rich"}
    modules = {name.replace("scikit-learn", "sklearn") for name in names}
    assert {cli._INSTALLS.get(module) for module in modules} == {"kondo-lab"}


def test_a_command_of_the_laboratory_says_what_to_install_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    assert cli.main(["run", "mnist-kondo", "--small"]) == 1
    assert "kondo run: this command comes with another package" in (err := capsys.readouterr().err)
    assert "pip install kondo-lab" in err


def test_a_module_that_no_extra_brings_is_a_plain_error(monkeypatch):
    real = builtins.__import__

    def broken(name, *rest):
        if name == "kondo_lab.studies":
            raise ModuleNotFoundError("No module named 'strange'", name="strange")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ModuleNotFoundError, match="strange"):
        cli.main(["demo", "--quick"])


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
    assert f"To go on: kondo demo --quick --out {out}" in text
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


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """Work in an empty folder where the toy is the only study; give a way to change it."""
    from kondo_lab.studies import registry
    from lab.studies import toy

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def install(study):
        monkeypatch.setattr(registry, "_packages", lambda: ["toy"])
        monkeypatch.setattr(registry, "_load", lambda package: study)

    install(toy.study())
    return install


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


def damaged(path, how):
    content = path.read_bytes()
    made = {"empty": b"", "cut": content[: len(content) // 2], "noise": b"\xff\0\x1f" * 9}
    path.write_bytes(made[how])


@pytest.mark.parametrize("how", ["empty", "cut", "noise"])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("plot", "manifest.json"),
        ("plot", "records.csv.gz"),
        ("report", "manifest.json"),
        ("report", "headline.csv"),
        ("report", "frontier.csv"),
        ("report", "error.png"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(command, name, how, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    path = Path("kondo-runs/toy") / name
    damaged(path, how)
    arguments = {"plot": ["plot", "toy"], "report": ["report"]}[command]
    capsys.readouterr()
    assert cli.main(arguments) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"kondo {command}: ")
    assert str(path) in text
    assert re.search("good copy" if command == "plot" else "again", text)
    assert text.count("\n") == 1
    assert not Path("report.html").exists()


@pytest.mark.parametrize("how", ["empty", "cut", "noise"])
@pytest.mark.parametrize("name", ["manifest.json", "parts/first.csv.gz"])
def test_a_run_is_not_resumed_from_damaged_files(name, how, capsys, studies):
    from lab.studies import toy

    def stop(name, step, context):
        if (name, step) == ("second", 4):
            os.kill(os.getpid(), signal.SIGINT)

    studies(toy.study(stop))
    assert cli.main(["run", "toy"]) == cli.INTERRUPTED
    path = Path("kondo-runs/toy") / name
    damaged(path, how)
    starts = []
    studies(toy.study(starts=starts))
    capsys.readouterr()
    assert cli.main(["run", "toy"]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"kondo run: {path} is damaged (")
    assert text.count("\n") == 1
    assert starts == []
    if path.suffix == ".gz":  # what the message says to do helps
        path.unlink()
        assert cli.main(["run", "toy"]) == 0
        assert starts == [("second", 5), ("third", 0)]  # the first is in the records too


def test_a_manifest_cannot_name_files_elsewhere_to_be_deleted(capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    path = Path("kondo-runs/toy/manifest.json")
    content = json.loads(path.read_text())
    Path("mine.png").write_text("mine")
    path.write_text(json.dumps(content | {"figures": ["../../mine.png"]}))
    assert cli.main(["plot", "toy"]) == 1
    assert f"{path} is damaged (figures are not names of files)" in capsys.readouterr().err
    assert Path("mine.png").exists()


@pytest.mark.parametrize("limit", [10, 100, 400, 3000])
@pytest.mark.parametrize("command", [["run", "toy"], ["plot", "toy"], ["report"]])
def test_a_full_disk_is_told_in_one_line(command, limit, capsys, studies):
    if command[0] != "run":
        assert cli.main(["run", "toy"]) == 0
    capsys.readouterr()
    with file_limit(limit):
        assert cli.main(command) == 1
    text = capsys.readouterr().err
    assert re.match(rf"kondo {command[0]}: cannot write \S+: File too large\. Make room", text)
    assert text.count("\n") == 1
    if command[0] == "run":
        assert cli.main(command) == 0


def test_a_page_that_cannot_be_written_is_named(capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    Path("folder").mkdir()
    for out in ("folder", "nowhere/page.html"):
        assert cli.main(["report", "--out", out]) == 1
        assert f"kondo report: cannot write {out}: " in capsys.readouterr().err
