# ruff: noqa: F811 (pytest finds the fixture by its name)
import gzip
import json
import os
import re
import signal
from pathlib import Path

import pytest

from cli_studies import studies  # noqa: F401
from kondo import cli
from test_run_files import file_limit


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


def rewritten(path, change):
    """Change the text of a compressed table; its checksum is right."""
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))


def doubled(text):
    header, _, body = text.partition(b"\n")
    return header + b"\n" + 2 * body


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (doubled, r"99 repeated, first series PG, setting nan, seed 0, step 0, metric error"),
        (lambda text: text + text.splitlines(keepends=True)[7], r"1 repeated, first series PG"),
    ],
    ids=["all", "one"],
)
def test_records_that_stand_twice_do_not_count_seeds_twice(change, told, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rewritten(folder / "records.csv.gz", change)
    capsys.readouterr()
    assert cli.main(["plot", "toy"]) == 1
    text = capsys.readouterr().err
    assert re.match(rf"kondo plot: {folder}/records\.csv\.gz is damaged \(has {told}", text)
    assert text.count("\n") == 1
    for name in before.keys() - {"records.csv.gz"}:
        assert (folder / name).read_bytes() == before[name]


def without_second(text):
    return b"".join(
        line for line in text.splitlines(keepends=True) if not line.startswith(b"second,")
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.partition(b"\n")[0] + b"\n", "has no records"),
        (without_second, r"has no records of second, which manifest\.json calls finished"),
    ],
    ids=["all", "a-part"],
)
def test_records_that_are_gone_take_no_figure_with_them(change, told, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"error.png", "frontier.csv"} < before.keys()
    rewritten(folder / "records.csv.gz", change)
    capsys.readouterr()
    assert cli.main(["plot", "toy"]) == 1
    text = capsys.readouterr().err
    assert re.match(rf"kondo plot: {folder}/records\.csv\.gz is damaged \({told}\)\. Put", text)
    assert text.count("\n") == 1
    for name in before.keys() - {"records.csv.gz"}:
        assert (folder / name).read_bytes() == before[name]


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
