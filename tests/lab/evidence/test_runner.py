import csv
import dataclasses
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import pandas as pd
import pytest
import torch
from rich.console import Console

from kondo.run_files import DamagedFileError, FolderInUseError
from kondo_lab.evidence import plotting, records, runner
from kondo_lab.evidence.study import Analysis
from kondo_lab.training import provenance
from kondo_lab.training.part import Part, Stopped
from lab.made_up import Record, runs_of
from lab.studies import toy

ROOT = Path(__file__).parents[3]


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "runs" / "toy"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_at(part, step):
    """Return a step function that presses Ctrl-C there, once."""

    def on_step(name, at, context):
        if (name, at) == (part, step):
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def stopped_run(out, console, **changes):
    chosen = toy.study(stop_at("second", 4), **changes)
    return runner.run(toy.order(out, chosen), console)


def fails_at(part, step):
    def on_step(name, at, context):
        if (name, at) == (part, step):
            raise ZeroDivisionError("as told")

    return on_step


def test_a_finished_run_leaves_its_files_and_nothing_else(out, console):
    outcome = runner.run(toy.order(out), console)
    expected = ["claims.csv", "curves.csv.gz", "error.png", "frontier.csv"]
    expected += ["headline.csv", "manifest.json"]
    assert names(out) == [*expected, "runs.jsonl.gz"]
    assert sorted(path.name for path in outcome.written) == names(out)
    assert not outcome.stopped
    assert outcome.analysis.findings == ["PG ends at 0.0328."]
    table = records.table(records.read(out / "runs.jsonl.gz"))
    assert list(dict.fromkeys(table["part"])) == ["first", "second", "third"]
    assert len(table) == 3 * 2 * 11


def test_records_say_of_which_study_device_and_commit_they_are(out, console):
    runner.run(toy.order(out), console)
    environment = runner.read_manifest(out)["environment"]
    told = {"study": "toy", "device": "cpu", "commit": environment["commit"]}
    runs = records.read(out / "runs.jsonl.gz")
    assert [dict(run.about) for run in runs] == 6 * [told]
    assert {(run.task, run.learning_rate, run.k) for run in runs} == {("toy", 1e-3, 1)}


def test_headline_has_the_columns_and_empty_cells(out, console):
    runner.run(toy.order(out), console)
    text = (out / "headline.csv").read_text()
    # 1/32 and 1.1/32: mean 0.0328125, standard error 0.1/32/2.
    assert text == (
        "figure,series,metric,x,expected,ours,se,seeds,against,verdict\n"
        "Toy Fig 1,PG,error,1000,0.03,0.0328125,0.0015625,2,paper,matches\n"
        "beyond the paper,PG,parts,,,2,,1,,\n"
    )


def test_frontier_and_curves_are_tables(out, console):
    runner.run(toy.order(out), console)
    [point] = csv.DictReader((out / "frontier.csv").open())
    assert point["rate"] == ""
    assert (point["forward"], point["reached"]) == ("870.5", "2")
    curves = pd.read_csv(out / "curves.csv.gz")
    assert list(curves) == [
        "part", "series", "setting", "step", "metric", "mean", "se", "seeds", "forward", "backward"
    ]  # fmt: skip
    assert len(curves) == 3 * 11


def test_manifest_tells_what_was_run_and_by_what(out, console):
    runner.run(toy.order(out), console)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["settings"] == {"num_seeds": 2, "rates": [0.5, 1.0], "price": "inf"}
    facts = {
        "study": "toy",
        "version": 1,
        "title": "A toy",
        "paper": "Toy Fig 1",
        "claim": "Counting works.",
        "differences": ["none worth telling"],
        "size": "small",
        "num_seeds": None,
        "seeds": [0, 1],
        "command": "kondo run toy --small",
        "finished": True,
        "interrupted": False,
        "resumed": 0,
        "findings": ["PG ends at 0.0328."],
        "figures": ["error.png"],
    }
    assert {key: manifest[key] for key in facts} == facts
    assert manifest["environment"]["torch"] == torch.__version__
    assert manifest["environment"]["pandas"] == pd.__version__
    assert manifest["environment"]["device"] == manifest["device"] == "cpu"
    assert manifest["commits"] == [provenance.commit()]
    assert list(manifest["seconds_by_part"]) == ["first", "second", "third"]
    assert manifest["seconds"] == pytest.approx(sum(manifest["seconds_by_part"].values()))


def test_results_are_never_overwritten(out, console):
    runner.run(toy.order(out), console)
    before = contents(out)
    with pytest.raises(runner.FolderError, match=r"already holds results.*--out"):
        runner.run(toy.order(out), console)
    assert contents(out) == before


def test_the_demos_results_are_no_run_to_resume(out, console):
    out.mkdir(parents=True)
    (out / "manifest.json").write_text("{}\n")
    with pytest.raises(runner.FolderError, match="already holds results"):
        runner.run(toy.order(out), console)
    assert names(out) == ["manifest.json"]


def test_ctrl_c_keeps_and_analyses_what_is_finished(out, console):
    outcome = stopped_run(out, console)
    assert outcome.stopped
    assert [line.metric for line in outcome.analysis.headline] == ["error"]
    assert not (out / "frontier.csv").exists()
    assert names(out / "parts") == [".lock", "first.jsonl.gz", "second.checkpoint"]
    manifest = runner.read_manifest(out)
    assert (manifest["finished"], manifest["interrupted"]) == (False, True)
    assert list(manifest["seconds_by_part"]) == ["first", "second"]


def test_a_resumed_run_skips_finished_parts_and_goes_on_at_the_checkpoint(out, console):
    stopped_run(out, console)
    starts = []
    outcome = runner.run(toy.order(out, toy.study(starts=starts)), console)
    assert starts == [("second", 5), ("third", 0)]
    assert not outcome.stopped
    assert "1 of 3 parts done" in console.file.getvalue()
    manifest = runner.read_manifest(out)
    assert (manifest["finished"], manifest["interrupted"], manifest["resumed"]) == (True, False, 1)
    whole = out.with_name("whole")
    runner.run(toy.order(whole), console)
    for name in ("runs.jsonl.gz", "headline.csv", "curves.csv.gz", "frontier.csv", "error.png"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("content", ["", '{"st', '"half"', "\0\0"])
def test_a_damaged_checkpoint_is_set_aside_and_its_part_starts_anew(content, out, console):
    stopped_run(out, console)
    (out / "parts" / "second.checkpoint").write_text(content)
    starts = []
    chosen = toy.study(stop_at("third", 2), starts)
    assert runner.run(toy.order(out, chosen), console).stopped
    assert starts == [("second", 0), ("third", 0)]
    text = console.file.getvalue()
    assert f"{out}/parts/second.checkpoint is damaged (" in text
    assert "set aside as second.checkpoint.damaged; part second starts anew." in text
    assert (out / "parts" / "second.checkpoint.damaged").read_text() == content
    assert not runner.run(toy.order(out), console).stopped
    whole = out.with_name("whole")
    runner.run(toy.order(whole), console)
    assert (out / "runs.jsonl.gz").read_bytes() == (whole / "runs.jsonl.gz").read_bytes()


def test_a_part_whose_checkpoint_cannot_be_read_for_want_of_memory_keeps_it(out, console):
    stopped_run(out, console)

    def run(context):
        def read(path):
            raise MemoryError

        return context.resume(read)

    def parts(settings):
        return [toy.study().parts(settings)[0], Part(name="second", run=run)]

    with pytest.raises(MemoryError):
        runner.run(toy.order(out, toy.study(parts=parts)), console)
    assert (out / "parts" / "second.checkpoint").exists()


def test_seconds_of_a_part_add_up_over_runs(out, console, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])

    def tick(name, step, context):
        clock[0] += 1
        stop_at("second", 3)(name, step, context)

    runner.run(toy.order(out, toy.study(tick)), console)
    assert runner.read_manifest(out)["seconds_by_part"] == {"first": 10, "second": 4}
    runner.run(toy.order(out, toy.study(tick)), console)
    manifest = runner.read_manifest(out)
    assert manifest["seconds_by_part"] == {"first": 10, "second": 10, "third": 10}
    assert manifest["seconds"] == 30


def test_a_checkpoint_ends_with_its_part(out, console):
    stopped_run(out, console)
    runner.run(toy.order(out, toy.study(stop_at("third", 2))), console)
    assert names(out / "parts") == [
        ".lock",
        "first.jsonl.gz",
        "second.jsonl.gz",
        "third.checkpoint",
    ]


def test_ctrl_c_before_any_part_is_finished_leaves_nothing_to_analyse(out, console):
    outcome = runner.run(toy.order(out, toy.study(stop_at("first", 2))), console)
    assert outcome == (None, True, [])
    assert names(out) == ["manifest.json", "parts"]


def test_ctrl_c_in_the_last_step_of_the_last_part_is_a_finished_run(out, console):
    outcome = runner.run(toy.order(out, toy.study(stop_at("third", toy.STEPS - 1))), console)
    assert not outcome.stopped
    assert runner.read_manifest(out)["finished"]


def test_a_part_that_ends_in_spite_of_ctrl_c_is_kept_and_no_other_started(out, console):
    starts = []
    chosen = toy.study(stop_at("first", toy.STEPS - 1), starts)
    assert runner.run(toy.order(out, chosen), console).stopped
    assert starts == [("first", 0)]
    assert (out / "parts" / "first.jsonl.gz").exists()


def test_half_a_study_that_cannot_be_analysed_says_so_and_is_kept(out, console):
    def analyse(table, settings):
        raise KeyError("third")

    outcome = stopped_run(out, console, analyse=analyse)
    assert outcome == (None, True, [out / "runs.jsonl.gz"])
    assert "cannot be analysed alone: KeyError: 'third'" in console.file.getvalue()
    assert runner.read_manifest(out)["interrupted"]


def test_a_failed_analysis_of_a_whole_run_can_be_repeated(out, console):
    def analyse(table, settings):
        raise KeyError("third")

    with pytest.raises(KeyError):
        runner.run(toy.order(out, toy.study(analyse=analyse)), console)
    starts = []
    runner.run(toy.order(out, toy.study(starts=starts)), console)
    assert starts == []
    assert runner.read_manifest(out)["finished"]


def test_a_failing_part_is_named_and_finished_ones_are_kept(out, console):
    with pytest.raises(ZeroDivisionError) as caught:
        runner.run(toy.order(out, toy.study(fails_at("second", 3))), console)
    assert "part 'second' of study 'toy'" in caught.value.__notes__[0]
    assert names(out / "parts") == [".lock", "first.jsonl.gz"]
    assert not runner.read_manifest(out)["finished"]
    starts = []
    runner.run(toy.order(out, toy.study(starts=starts)), console)
    assert starts == [("second", 0), ("third", 0)]


def test_a_failed_write_is_an_error_and_leaves_no_half_file(out, console, monkeypatch):
    def full(source, target):
        if Path(target).name == "second.jsonl.gz":
            raise OSError(28, "No space left on device")
        real(source, target)

    real = os.replace
    monkeypatch.setattr(provenance.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        runner.run(toy.order(out), console)
    assert names(out / "parts") == [".lock", "first.jsonl.gz"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_seeds": 5}, "settings.num_seeds"),
        ({"size": "full"}, "size, settings.num_seeds"),
        ({"study": toy.study(version=2)}, "version"),
        ({"device": torch.device("meta")}, "device"),
    ],
)
def test_an_unfinished_run_of_other_settings_is_refused(out, console, changes, key):
    stopped_run(out, console)
    before = contents(out / "parts")
    with pytest.raises(runner.FolderError, match=f"other settings: {key}\\. .*--out"):
        runner.run(toy.order(out, **changes), console)
    assert contents(out / "parts") == before


def test_two_runs_do_not_share_a_folder(out, console):
    seen = []

    def on_step(name, step, context):
        if (name, step) == ("first", 0):
            with pytest.raises(
                FolderInUseError, match=f"in use by another run, process {os.getpid()}"
            ) as caught:
                runner.run(toy.order(out), console)
            seen.append(caught)

    runner.run(toy.order(out, toy.study(on_step)), console)
    assert len(seen) == 1


def test_a_file_in_the_way_is_refused(out, console):
    out.parent.mkdir()
    out.write_text("mine")
    with pytest.raises(runner.FolderError, match="cannot write to"):
        runner.run(toy.order(out), console)


@pytest.mark.parametrize("bad", [["One"], ["a/b"], ["same", "same"]])
def test_names_of_parts_are_checked_before_anything_is_made(out, console, bad):
    def parts(settings):
        return [Part(name=name, run=lambda context: []) for name in bad]

    with pytest.raises(ValueError, match="names of parts must differ"):
        runner.run(toy.order(out, toy.study(parts=parts)), console)
    assert not out.exists()


def test_reanalysing_gives_the_same_bytes(out, console):
    runner.run(toy.order(out), console)
    before = contents(out)
    for name in ("claims.csv", "headline.csv", "curves.csv.gz", "frontier.csv", "error.png"):
        (out / name).write_text("spoilt")
    _, written = runner.reanalyse(toy.study(), out)
    assert contents(out) == before
    assert sorted(path.name for path in written) == sorted(before.keys() - {"runs.jsonl.gz"})


def test_reanalysing_removes_what_is_no_longer_made_and_keeps_other_files(out, console):
    runner.run(toy.order(out), console)
    (out / "photo.png").write_text("mine")

    def analyse(table, settings):
        return Analysis(headline=[], figures={}, findings=["Nothing."])

    runner.reanalyse(toy.study(analyse=analyse), out)
    assert not (out / "error.png").exists()
    assert not (out / "frontier.csv").exists()
    assert (out / "photo.png").exists()
    manifest = runner.read_manifest(out)
    assert (manifest["findings"], manifest["figures"]) == (["Nothing."], [])


def test_reanalysing_says_what_the_study_says_now(out, console):
    runner.run(toy.order(out), console)
    assert "claim_at_run" not in runner.read_manifest(out)
    for claim in ("Does counting work?", "It does."):
        runner.reanalyse(toy.study(claim=claim), out)
        manifest = runner.read_manifest(out)
        assert (manifest["claim"], manifest["claim_at_run"]) == (claim, "Counting works.")


def test_reanalysing_refuses_records_of_another_study(out, console):
    with pytest.raises(runner.FolderError, match="holds no records"):
        runner.reanalyse(toy.study(), out)
    runner.run(toy.order(out), console)
    with pytest.raises(runner.FolderError, match="another version of this study: version changed"):
        runner.reanalyse(toy.study(version=2), out)


def test_records_of_an_older_format_are_named(out, console):
    runner.run(toy.order(out), console)
    (out / "runs.jsonl.gz").rename(out / "records.csv.gz")
    told = r"toy holds records\.csv\.gz, which versions before 0\.3 wrote.*Use the commit"
    with pytest.raises(runner.FolderError, match=told):
        runner.reanalyse(toy.study(), out)


def test_finished_parts_of_a_run_that_died_can_be_analysed(out, console):
    with pytest.raises(ZeroDivisionError):
        runner.run(toy.order(out, toy.study(fails_at("third", 2))), console)
    assert not (out / "runs.jsonl.gz").exists()
    analysis, _ = runner.reanalyse(toy.study(), out)
    assert analysis.findings == ["PG ends at 0.0328."]
    assert set(records.table(records.read(out / "runs.jsonl.gz"))["part"]) == {"first", "second"}
    # A damaged part that is deleted, as its error tells to do, is taken from these records.
    (out / "parts" / "first.jsonl.gz").unlink()
    runner.reanalyse(toy.study(), out)
    assert set(records.table(records.read(out / "runs.jsonl.gz"))["part"]) == {"first", "second"}


def test_a_folder_that_a_run_writes_to_is_not_analysed(out, console):
    """Else the run's last part could be overwritten by an analysis of those before it."""
    refused = []

    def on_step(name, at, context):
        if (name, at) == ("third", 2):
            with pytest.raises(FolderInUseError, match="in use by another run"):
                runner.reanalyse(toy.study(), out)
            refused.append(name)

    runner.run(toy.order(out, toy.study(on_step)), console)
    assert refused
    assert set(records.table(records.read(out / "runs.jsonl.gz"))["part"]) == {
        "first",
        "second",
        "third",
    }


def test_a_run_that_died_in_its_first_part_has_nothing_to_analyse(out, console):
    with pytest.raises(ZeroDivisionError):
        runner.run(toy.order(out, toy.study(fails_at("first", 1))), console)
    with pytest.raises(runner.FolderError, match="no part of it was finished"):
        runner.reanalyse(toy.study(), out)


def test_a_setting_added_since_does_not_stop_reanalysis_but_a_changed_one_does(out, console):
    runner.run(toy.order(out), console)
    manifest = runner.read_manifest(out)
    del manifest["settings"]["price"]
    provenance.write_manifest(out / "manifest.json", manifest)
    runner.reanalyse(toy.study(), out)
    manifest["settings"]["rates"] = [0.5]
    provenance.write_manifest(out / "manifest.json", manifest)
    with pytest.raises(runner.FolderError, match=r"settings\.rates changed"):
        runner.reanalyse(toy.study(), out)


@dataclasses.dataclass(frozen=True)
class Group:
    size: int
    later: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups(toy.Settings):
    groups: tuple[Group, ...] = (Group(1), Group(2))


def test_a_setting_added_to_groups_in_a_list_does_not_stop_reanalysis(out, console):
    study = toy.study(settings=lambda size, seeds: Groups(num_seeds=2))
    runner.run(toy.order(out, study), console)
    manifest = runner.read_manifest(out)
    for group in manifest["settings"]["groups"]:
        del group["later"]
    provenance.write_manifest(out / "manifest.json", manifest)
    runner.reanalyse(study, out)
    manifest["settings"]["groups"][1]["size"] = 3
    provenance.write_manifest(out / "manifest.json", manifest)
    with pytest.raises(runner.FolderError, match=r"settings\.groups\.1\.size changed"):
        runner.reanalyse(study, out)
    del manifest["settings"]["groups"][1]
    provenance.write_manifest(out / "manifest.json", manifest)
    with pytest.raises(runner.FolderError, match="another version"):
        runner.reanalyse(study, out)


def test_analysis_is_drawn_in_the_labs_style(out, console):
    seen = {}

    def analyse(table, settings):
        seen["grid"] = mpl.rcParams["grid.color"]
        return toy.analyse(table, settings)

    runner.run(toy.order(out, toy.study(analyse=analyse)), console)
    assert seen == {"grid": plotting.RC["grid.color"]}


def test_progress_counts_work_and_shows_notes(out, console, monkeypatch):
    def parts(settings):
        made = toy.study().parts(settings)
        return [made[0], Part(name="second", run=made[1].run, work=3.0)]

    monkeypatch.setattr(runner.time, "monotonic", lambda: 0.0)
    runner.run(toy.order(out, toy.study(parts=parts)), console)
    text = console.file.getvalue()
    assert "first 80% step [7]" in text.split(" 30%")[0]  # a quarter of the work is the first part
    assert "first: done in" in text
    assert " 62%  0 s, about 0 s left  second 50% step [4]" in text
    assert "100%  0 s, about 0 s left  second 100%" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_real_process_stops_it_and_it_resumes(tmp_path, number, console):
    out, ready = tmp_path / "toy", tmp_path / "ready"
    command = [sys.executable, str(Path(toy.__file__)), str(out), str(ready)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    patience = time.monotonic() + 120
    while not ready.exists() and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.02)
    process.send_signal(number)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 130, text
    assert (out / "parts" / "second.checkpoint").read_text() == "5"
    starts = []
    runner.run(toy.order(out, toy.study(starts=starts)), console)
    assert starts == [("second", 5), ("third", 0)]


def test_a_second_ctrl_c_ends_it_at_once(out, console):
    def on_step(name, step, context):
        if name == "second":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        runner.run(toy.order(out, toy.study(on_step)), console)
    assert (out / "parts" / "first.jsonl.gz").exists()
    assert not (out / "runs.jsonl.gz").exists()


def test_a_figure_too_large_for_the_repository_is_an_error(tmp_path, monkeypatch):
    figure, axes = plotting.grid(1, 1)
    axes[0, 0].plot([0, 1], [0, 1])
    plotting.save(figure, tmp_path / "a.png")
    monkeypatch.setattr(plotting, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match=r"b\.png must fit 10 bytes.*at 80 dpi"):
        plotting.save(figure, tmp_path / "b.png")


def test_a_large_figure_is_drawn_less_sharp(tmp_path, monkeypatch):
    figure, axes = plotting.grid(1, 1)
    axes[0, 0].plot([0, 1], [0, 1])
    plotting.save(figure, tmp_path / "sharp.png")
    size = (tmp_path / "sharp.png").stat().st_size
    monkeypatch.setattr(plotting, "MAX_BYTES", size)
    plotting.save(figure, tmp_path / "small.png")
    assert 0 < (tmp_path / "small.png").stat().st_size < size


def test_stopped_is_no_error_of_the_part(out, console):
    def parts(settings):
        def halt(context):
            raise Stopped

        return [toy.study().parts(settings)[0], Part(name="halt", run=halt)]

    assert runner.run(toy.order(out, toy.study(parts=parts)), console).stopped


def test_records_of_a_stopped_part_are_analysed_and_made_again_when_resumed(out, console):
    def parts(settings):
        def run(context):
            made = [
                Record("first", "PG", math.nan, seed, 1, 100, 3, "error", 0.5) for seed in (0, 1)
            ]
            if stopping:
                raise Stopped("first", runs_of(made))
            return runs_of(record._replace(step=2, value=0.25) for record in made)

        return [Part(name="first", run=run)]

    stopping = True
    outcome = runner.run(toy.order(out, toy.study(parts=parts)), console)
    assert outcome.stopped
    assert outcome.analysis.headline[0].ours == 0.5
    stopping = False
    outcome = runner.run(toy.order(out, toy.study(parts=parts)), console)
    assert not outcome.stopped
    assert outcome.analysis.headline[0].ours == 0.25
    assert records.table(records.read(out / "runs.jsonl.gz"))["step"].tolist() == [2, 2]


def test_a_numbered_folder_is_free_or_holds_the_same_unfinished_run(tmp_path, console, monkeypatch):
    wanted = tmp_path / "toy"
    assert runner.numbered(toy.order(wanted)).out == wanted
    runner.run(toy.order(wanted), console)
    assert runner.numbered(toy.order(wanted)).out == tmp_path / "toy-2"
    stopped_run(tmp_path / "toy-2", console)
    assert runner.numbered(toy.order(wanted)).out == tmp_path / "toy-2"
    other = toy.order(wanted, num_seeds=4)
    assert runner.numbered(other).out == tmp_path / "toy-3"
    monkeypatch.chdir(wanted)
    assert runner.numbered(toy.order(Path("."))).out == tmp_path / "toy-2"


def test_no_part_is_started_when_the_minutes_are_over(out, console, monkeypatch):
    now, starts = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(runner, "time", clock)

    def on_step(name, step, context):
        now[0] += 8  # 80 seconds a part

    chosen = toy.study(on_step, starts)
    outcome = runner.run(toy.order(out, chosen, minutes=2), console)
    assert outcome.stopped
    assert starts == [("first", 0), ("second", 0)]
    assert outcome.analysis is not None
    assert not runner.run(toy.order(out, chosen, minutes=2), console).stopped
    assert starts[2:] == [("third", 0)]


def test_a_run_without_its_parts_goes_on_from_its_records(out, console):
    stopped_run(out, console)
    assert runner.read_manifest(out)["finished_parts"] == ["first"]
    shutil.rmtree(out / "parts")  # as of a run that was committed
    starts = []
    outcome = runner.run(toy.order(out, toy.study(starts=starts)), console)
    assert starts == [("second", 0), ("third", 0)]
    assert not outcome.stopped
    whole = out.with_name("whole")
    runner.run(toy.order(whole), console)
    for name in ("runs.jsonl.gz", "headline.csv", "curves.csv.gz"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert runner.read_manifest(out)["finished_parts"] == ["first", "second", "third"]


def test_records_of_a_stopped_part_are_not_taken_for_finished_ones(out, console):
    def parts(settings):
        def run(context):
            made = [Record("first", "PG", math.nan, 0, 1, 100, 3, "error", 0.5)]
            if stopping:
                raise Stopped("first", runs_of(made))
            return runs_of([made[0]._replace(value=0.25)])

        return [Part(name="first", run=run)]

    stopping = True
    runner.run(toy.order(out, toy.study(parts=parts)), console)
    shutil.rmtree(out / "parts")
    stopping = False
    runner.run(toy.order(out, toy.study(parts=parts)), console)
    assert records.table(records.read(out / "runs.jsonl.gz"))["value"].tolist() == [0.25]


def test_finished_parts_without_records_are_refused(out, console):
    stopped_run(out, console)
    shutil.rmtree(out / "parts")
    manifest = runner.read_manifest(out) | {"finished_parts": ["first", "second"]}
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedFileError, match=r"has no records of part 'second'"):
        runner.run(toy.order(out), console)
