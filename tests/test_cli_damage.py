# ruff: noqa: F811 (pytest finds the fixture by its name)
import gzip
import json
import math
import os
import re
import signal
import zlib
from pathlib import Path

import pytest

from attack.test_run_folders import contents
from cli_studies import studies  # noqa: F401
from kondo import cli
from kondo_lab.evidence import records
from test_run_files import file_limit


def damaged(path, how):
    content = path.read_bytes()
    made = {"empty": b"", "cut": content[: len(content) // 2], "noise": b"\xff\0\x1f" * 9}
    path.write_bytes(made[how])


WHOLE = (None, "3", 1.5, True, 10**30, [])
"""No whole numbers, or too large."""


@pytest.mark.parametrize("how", ["empty", "cut", "noise"])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("plot", "manifest.json"),
        ("plot", "runs.jsonl.gz"),
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


def refused(arguments, folder, capsys):
    """Run a command that must fail, and leave the folder as it is; return its one line."""
    before = contents(folder)
    capsys.readouterr()
    assert cli.main(arguments) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"kondo {arguments[0]}: ")
    assert text.count("\n") == 1
    assert contents(folder) == before
    assert not Path("report.html").exists()
    return text


def replaced(path, how):
    path.unlink()
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path.name),
        "nowhere": lambda: path.symlink_to("nowhere"),
    }[how]()


@pytest.mark.timeout(60)  # a pipe must not be waited for
@pytest.mark.parametrize("how", ["folder", "pipe", "loop", "nowhere"])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("plot", "manifest.json"),
        ("plot", "runs.jsonl.gz"),
        *(("report", f"{name}.csv") for name in ("headline", "claims", "frontier")),
        ("report", "error.png"),
        ("run", "manifest.json"),
        ("run", "claims.csv"),
    ],
)
def test_what_is_no_file_is_named_and_not_waited_for(command, name, how, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    replaced(folder / name, how)
    arguments = [command] if command == "report" else [command, "toy"]
    assert str(folder / name) in refused(arguments, folder, capsys)


def test_a_run_that_cannot_write_leaves_the_folder_as_it_was(capsys, studies):
    folder = Path("kondo-runs/toy")
    (folder / "curves.csv.gz").mkdir(parents=True)
    assert "curves.csv.gz: it is a folder" in refused(["run", "toy"], folder, capsys)


def stopped(studies):
    """Make a run that was stopped in its second part."""
    from lab.studies import toy

    def stop(name, step, context):
        if (name, step) == ("second", 4):
            os.kill(os.getpid(), signal.SIGINT)

    studies(toy.study(stop))
    assert cli.main(["run", "toy"]) == cli.INTERRUPTED
    studies(toy.study())
    return Path("kondo-runs/toy")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["folder", "pipe"])
@pytest.mark.parametrize("command", ["plot", "run"])
def test_a_part_that_is_no_file_is_named(command, how, capsys, studies):
    folder = stopped(studies)
    path = folder / "parts/first.jsonl.gz"
    replaced(path, how)
    assert f"{path} is damaged (a folder, a pipe" in refused([command, "toy"], folder, capsys)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["folder", "pipe"])
def test_a_checkpoint_that_is_no_file_is_set_aside(how, capsys, studies):
    folder = stopped(studies)
    path = folder / "parts/second.checkpoint"
    assert path.exists()
    replaced(path, how)
    capsys.readouterr()
    assert cli.main(["run", "toy"]) == 0
    assert f"{path} is damaged (a folder, a pipe" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", [["plot", "toy"], ["report"]])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 100_000 + "]" * 100_000, "not JSON: maximum recursion depth"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "not a JSON object of at most 50 levels"),
        ("[]", "not a JSON object"),
        ("{}\0", "has NUL bytes"),
    ],
    ids=["deep", "less-deep", "list", "nul"],
)
def test_a_manifest_that_is_no_json_of_ours_is_named(command, content, told, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    (folder / "manifest.json").write_text(content)
    text = refused(command, folder, capsys)
    assert f"{folder}/manifest.json is damaged ({told}" in text
    assert "Put a good copy in its place" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", "large"),
        ("num_seeds", 0),
        ("num_seeds", 13),  # which the study refuses
        ("first_seed", 3),  # which the study does not have
        ("seconds", math.nan),
        ("finished", "yes"),
        ("captions", {"error": 3}),
        ("figures", ["runs.jsonl.gz"]),  # stale figures are deleted
        ("figures", ["."]),
        ("figures", ["a\0.png"]),
        ("finished_parts", ["../first"]),
        ("seeds", None),
    ],
)
def test_a_manifest_with_other_values_is_named(key, value, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    text = refused(["plot", "toy"], folder, capsys)
    assert text.startswith(f"kondo plot: {path} is damaged ({key} ")


def lines_of(change):
    """Return a change of a file's text that changes the list of its lines."""
    return lambda text: b"".join(change(text.splitlines(keepends=True)))


def edited(change):
    """Return a change of records that edits the JSON of the second line."""

    def of_lines(lines):
        run = json.loads(lines[1])
        change(run)
        return [lines[0], json.dumps(run).encode() + b"\n", *lines[2:]]

    return lines_of(of_lines)


def with_field(name, value):
    return edited(lambda run: run.update({name: value}))


def with_cell(name, value):
    return edited(lambda run: run["curve"][4].update({name: value}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lines_of(lambda lines: [lines[0], lines[1][:-9] + b"\n", *lines[2:]]),
            "line 2: Expecting",
        ),
        (lambda text: text[:-3], "its last line is cut"),
        (lambda text: text[:-1], "its last line is cut"),
        (lambda text: text.replace(b"\n", b"\n\n", 1), "line 2: Expecting value"),
        (lambda text: text.replace(b'"PG"', b'"P\0"'), "line 1: Invalid control"),
        (lambda text: text.replace(b'"PG"', b'"P\\u0000"'), "expected a text without NUL bytes"),
        (lambda text: text.replace(b'"PG"', b'"P\\ud800"'), "surrogates not allowed"),
        (lambda text: text.replace(b'"PG"', b'"P\xff"'), "invalid start byte"),
        (lambda text: text.replace(b'"error": 1}', b'"error": NaN}'), "has NaN, which is not JSON"),
        (lambda text: text.replace(b'"error": 1}', b'"error": 1e999}'), "is too large"),
        (lambda text: text.replace(b'"step": 1,', b'"step": 1, "step": 1,'), "has 'step' twice"),
        (lambda text: b"[]\n" + text, "line 1: is no object with a curve"),
        (lambda text: b"[" * 9000 + b"]" * 9000 + b"\n" + text, "recursion|too deep"),
        *(
            (edited(lambda run, name=name: run.pop(name)), f"line 2: (lacks {name}|is no object)")
            for name in records.KEYS
        ),
        *((with_field(name, 3), f"line 2: {name} is 3; expected a text") for name in records.TEXTS),
        *((with_field("seed", seed), "line 2: seed is .*expected a whole") for seed in WHOLE),
        (with_field("k", 1.5), "line 2: k is 1.5; expected a whole number"),
        (with_field("x", "a"), "line 2: x is 'a'; expected a number"),
        (with_field("learning_rate", True), "line 2: learning_rate is True; expected a number"),
        (with_field("curve", []), "line 2: has a curve without rows"),
        (with_field("curve", {}), "line 2: is no object with a curve"),
        (with_field("curve", [3]), "line 2: has 3 in its curve"),
        (with_field("curve", [{"step": 1, "error": 1}]), "has a row that lacks rollouts, passes"),
        (edited(lambda run: run["curve"][4].pop("error")), "a row without a metric, at step 4"),
        *((with_cell("step", step), "step is .*expected a whole") for step in WHOLE),
        (with_cell("step", 3), "has repeated rows, first arm PG, .* step 3, metric error"),
        (with_cell("error", "a"), "error is 'a'; expected a number"),
        (with_cell("error", False), "error is False; expected a number"),
        (with_cell("error", 10**400), "too large"),
        (lines_of(lambda lines: [*reversed(lines)]), "not as manifest.json says"),
        (lines_of(lambda lines: [*lines[:4], *lines[5:]]), "not as manifest.json says"),
        (edited(lambda run: run["curve"].pop()), "not as manifest.json says"),
        (with_cell("error", None), "not as manifest.json says"),
        (with_cell("error", "Infinity"), "not as manifest.json says"),
        (with_field("more", 1), "not as manifest.json says"),
    ],
)
def test_records_that_were_changed_are_not_analysed(change, told, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    before = (folder / "runs.jsonl.gz").read_bytes()
    rewritten(folder / "runs.jsonl.gz", change)
    text = refused(["plot", "toy"], folder, capsys)
    assert re.match(rf"kondo plot: {folder}/runs\.jsonl\.gz is damaged \(.*({told})", text)
    (folder / "runs.jsonl.gz").write_bytes(gzip.compress(gzip.decompress(before), 1))
    assert cli.main(["plot", "toy"]) == 0  # packed in another way


def test_a_finished_run_has_all_its_parts_and_seeds_whatever_its_manifest_lists(capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | {"finished_parts": []}
    del manifest["records_sha256"]  # as older versions wrote it
    path.write_text(json.dumps(manifest))
    rewritten(folder / "runs.jsonl.gz", without_second)
    assert "has no records of second, which" in refused(["plot", "toy"], folder, capsys)
    without_seed = lines_of(lambda lines: [line for line in lines if b'"seed": 2,' not in line])
    rewritten(folder / "runs.jsonl.gz", without_seed)
    assert "has no records of second, seed 2, which" in refused(["plot", "toy"], folder, capsys)


def test_older_records_without_a_series_are_named(capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    rewritten(folder / "runs.jsonl.gz", lambda text: text.replace(b'"PG"', b'"DG"'))
    del manifest["records_sha256"]
    path.write_text(json.dumps(manifest))
    told = "runs.jsonl.gz lacks records (series must be one of ['DG'], got 'PG'.) Put a good copy"
    assert told in refused(["plot", "toy"], folder, capsys)


def test_a_part_does_not_bring_records_of_another(capsys, studies):
    folder = stopped(studies)
    first = folder / "parts/first.jsonl.gz"
    table = gzip.decompress(first.read_bytes())
    rewritten(first, lambda text: text.replace(b'"first"', b'"second"'))
    for command in ("plot", "run"):
        text = refused([command, "toy"], folder, capsys)
        assert f"{first} is damaged (has records of second)" in text
    first.write_bytes(gzip.compress(table))
    (folder / "parts/first.partial.jsonl.gz").write_bytes(gzip.compress(table))
    assert cli.main(["plot", "toy"]) == 0  # each part counts once


def test_parts_beside_a_finished_run_do_not_replace_its_records(capsys, studies):
    from kondo_lab.evidence import part_files

    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    before = (folder / "runs.jsonl.gz").read_bytes()
    path = folder / "manifest.json"  # as older versions wrote it
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished_parts": []}))
    (folder / "parts").mkdir()
    part_files.restore(folder, ["first"])
    assert cli.main(["plot", "toy"]) == 0
    assert (folder / "runs.jsonl.gz").read_bytes() == before


@pytest.mark.parametrize("name", ["headline.csv", "claims.csv", "error.png", "old.png"])
def test_plot_writes_nothing_where_a_folder_is_in_its_way(name, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"figures": ["error.png", "old.png"]}))
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    (folder / "curves.csv.gz").write_bytes(b"as it was")
    told = f"cannot write {folder / name}: it is a folder. Move it away"
    assert told in refused(["plot", "toy"], folder, capsys)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("headline.csv", lambda text: text[:-4], "its last line is cut"),
        ("headline.csv", lambda text: text.replace(b"PG", b"P\0"), "has NUL bytes"),
        ("claims.csv", lambda text: text.replace(b"PG", b"\xff"), "invalid start byte"),
        ("frontier.csv", lambda text: text[:-1], "its last line is cut"),
    ],
)
def test_a_table_that_is_cut_or_no_text_is_named(name, change, told, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    text = refused(["report"], folder, capsys)
    assert re.match(rf"kondo report: {folder}/{name} is damaged \(.*{told}", text)


def test_a_figure_that_cannot_be_drawn_is_named_though_its_checksums_are_right(capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    path = Path("kondo-runs/toy/error.png")
    image = path.read_bytes()
    at = image.index(b"IDAT")
    end = at + 4 + int.from_bytes(image[at - 4 : at], "big")
    chunk = image[at : at + 4] + bytes(end - at - 4)
    path.write_bytes(image[:at] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + image[end + 4 :])
    text = refused(["report"], path.parent, capsys)
    assert re.match(rf"kondo report: {path} is damaged \(.*\)\. Delete it, then", text)


def test_an_expected_number_near_zero_has_no_percentage(studies):
    assert cli.main(["run", "toy"]) == 0
    path = Path("kondo-runs/toy/headline.csv")
    path.write_text(path.read_text().replace(",0.03,", ",1e-320,"))
    assert cli.main(["report"]) == 0


def test_an_error_of_the_report_has_its_traceback(studies, monkeypatch):
    from kondo_lab.evidence import html_report

    def fail(folders, out):
        raise ValueError("as told")

    assert cli.main(["run", "toy"]) == 0
    monkeypatch.setattr(html_report, "write", fail)
    with pytest.raises(ValueError, match="as told"):
        cli.main(["report"])


def test_bytes_of_a_name_that_are_no_text_can_be_shown(studies):
    assert cli.main(["run", "toy", "--out", "a\udcff"]) == 0
    assert cli.main(["report", "a\udcff"]) == 0
    assert "a\\udcff" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: 2 * text, r"9 repeated, first arm PG, x nan, seed 0"),
        (lambda text: text + text.splitlines(keepends=True)[7], r"1 repeated, first arm PG"),
    ],
    ids=["all", "one"],
)
def test_records_that_stand_twice_do_not_count_seeds_twice(change, told, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rewritten(folder / "runs.jsonl.gz", change)
    capsys.readouterr()
    assert cli.main(["plot", "toy"]) == 1
    text = capsys.readouterr().err
    assert re.match(rf"kondo plot: {folder}/runs\.jsonl\.gz is damaged \(has {told}", text)
    assert text.count("\n") == 1
    for name in before.keys() - {"runs.jsonl.gz"}:
        assert (folder / name).read_bytes() == before[name]


def without_second(text):
    return b"".join(
        line for line in text.splitlines(keepends=True) if b'"part": "second"' not in line
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: b"", "has no records"),
        (without_second, r"has no records of second, which manifest\.json calls finished"),
    ],
    ids=["all", "a-part"],
)
def test_records_that_are_gone_take_no_figure_with_them(change, told, capsys, studies):
    assert cli.main(["run", "toy"]) == 0
    folder = Path("kondo-runs/toy")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"error.png", "frontier.csv"} < before.keys()
    rewritten(folder / "runs.jsonl.gz", change)
    capsys.readouterr()
    assert cli.main(["plot", "toy"]) == 1
    text = capsys.readouterr().err
    assert re.match(rf"kondo plot: {folder}/runs\.jsonl\.gz is damaged \({told}\)\. Put", text)
    assert text.count("\n") == 1
    for name in before.keys() - {"runs.jsonl.gz"}:
        assert (folder / name).read_bytes() == before[name]


@pytest.mark.parametrize("how", ["empty", "cut", "noise"])
@pytest.mark.parametrize("name", ["manifest.json", "parts/first.jsonl.gz"])
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
    assert (
        f"{path} is damaged (figures is ['../../mine.png']; expected names of"
        in capsys.readouterr().err
    )
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
