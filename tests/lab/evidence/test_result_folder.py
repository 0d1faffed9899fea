"""What is no result folder, or a damaged one, is refused by a message that names it."""

import json
import os

import pytest

from kondo_lab.evidence import html_report
from lab.studies.result_folders import (
    FRONTIER,
    HEADLINE,
    MNIST_FRONTIER,
    MNIST_LINES,
    manifest,
    toy_folders,
    write_folder,
    write_table,
)


def written(folders, tmp_path):
    out = tmp_path / "report.html"
    html_report.write(folders, out)
    return out.read_text(encoding="utf-8")


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="folders: expected at least one result folder"):
        html_report.write([], tmp_path / "report.html")


@pytest.mark.parametrize("name", ["manifest.json", "headline.csv", "curves.csv.gz"])
def test_a_folder_that_is_no_result_folder_is_refused_by_what_it_lacks(tmp_path, name):
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"folders: .*a is not a result folder, it lacks {name};"):
        html_report.write([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"folders: .*nowhere does not exist; expected a folder"):
        html_report.write([tmp_path / "nowhere"], tmp_path / "report.html")


def test_a_file_and_an_empty_folder_are_refused_by_name(tmp_path):
    (tmp_path / "notes.md").write_text("no results")
    with pytest.raises(ValueError, match=r"folders: .*notes\.md is a file; expected a folder"):
        html_report.write([tmp_path / "notes.md"], tmp_path / "report.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"lacks manifest.json, headline.csv, curves.csv.gz"):
        html_report.write([tmp_path / "empty"], tmp_path / "report.html")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest.json is damaged \(not JSON: "),
        ("[]", r"manifest.json is damaged \(not a JSON object"),
        (
            json.dumps({k: v for k, v in manifest().items() if k != "claim"}),
            r"manifest.json is damaged \(lacks claim\)",
        ),
    ],
)
def test_a_broken_manifest_is_refused(tmp_path, text, message):
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        html_report.write([folder], tmp_path / "report.html")


@pytest.mark.parametrize(
    ("name", "header", "lines", "message"),
    [
        (
            "headline.csv",
            HEADLINE[:-1],
            [],
            "has columns figure.*against; expected figure.*verdict",
        ),
        ("headline.csv", HEADLINE, [(*MNIST_LINES[0][:-1], "close")], "line 2: verdict is 'close'"),
        (
            *("headline.csv", HEADLINE, [(*MNIST_LINES[0][:-2], "rumour", "matches")]),
            "line 2: against is 'rumour'",
        ),
        (
            "headline.csv",
            HEADLINE,
            [("", "", "", "", "x", "1", "", "1", "", "")],
            "expected is 'x'",
        ),
        ("headline.csv", HEADLINE, [("", "", "", "", "", "1", "", "", "", "")], "seeds is ''"),
        ("frontier.csv", FRONTIER[1:], [], "has columns series"),
        ("frontier.csv", FRONTIER, [(*MNIST_FRONTIER[0][:-1], "low")], "final_error is 'low'"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, name, header, lines, message):
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES)
    write_table(folder / name, header, lines)
    with pytest.raises(ValueError, match=message):
        html_report.write([folder], tmp_path / "report.html")


@pytest.mark.parametrize(
    "name", ["manifest.json", "headline.csv", "curves.csv.gz", "frontier.csv", "fig9.png"]
)
def test_a_link_is_refused_and_what_it_points_to_is_not_shown(name, tmp_path):
    folder = toy_folders(tmp_path / "runs")[0]
    secret = tmp_path / "secret"
    if (folder / name).exists():
        (folder / name).rename(secret)  # whole and valid, but elsewhere
    else:
        secret.write_bytes(next(folder.glob("*.png")).read_bytes())
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name} is a link or no file.*copy"):
        written([folder], tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_pipe_is_refused_instead_of_read_for_ever(tmp_path):
    folder = toy_folders(tmp_path / "runs")[0]
    os.mkfifo(folder / "fig9.png")
    with pytest.raises(ValueError, match=r"fig9\.png is a link or no file"):
        written([folder], tmp_path)


def test_a_link_to_a_whole_folder_may_be_named(tmp_path):
    folder = toy_folders(tmp_path / "runs")[0]
    (tmp_path / "latest").symlink_to(folder)
    assert written([tmp_path / "latest"], tmp_path) == written([folder], tmp_path)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (MNIST_LINES[0][:-1], "line 2 does not have a cell for each column"),
        ((*MNIST_LINES[0], "more"), "line 2 does not have a cell for each column"),
        (
            (*MNIST_LINES[0][:-3], "nan", "paper", "matches"),
            "line 2: seeds is 'nan'; expected a number",
        ),
        (
            (*MNIST_LINES[0][:-3], "inf", "paper", "matches"),
            "line 2: seeds is 'inf'; expected a number",
        ),
    ],
)
def test_a_line_that_is_cut_or_makes_no_sense_is_named(cells, message, tmp_path):
    folder = write_folder(tmp_path / "a", manifest(), [cells])
    with pytest.raises(ValueError, match=rf"headline\.csv, {message}"):
        written([folder], tmp_path)


@pytest.mark.parametrize(("key", "value"), [("findings", 3), ("settings", []), ("environment", "")])
def test_a_manifest_with_other_types_is_named(key, value, tmp_path):
    folder = write_folder(tmp_path / "a", manifest(**{key: value}), MNIST_LINES)
    with pytest.raises(
        ValueError, match=rf"manifest\.json is damaged \({key} is .*; expected an? "
    ):
        written([folder], tmp_path)


def test_a_flipped_bit_of_a_figure_is_found(tmp_path):
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES)
    path = folder / "fig1.png"
    image = bytearray(path.read_bytes())
    image[len(image) // 2] ^= 1
    path.write_bytes(image)
    with pytest.raises(ValueError, match=r"fig1\.png is not a whole PNG image.*kondo plot"):
        written([folder], tmp_path)


@pytest.mark.parametrize("word", ["matches", "", "perhaps"])
def test_a_claim_is_met_missed_or_open(tmp_path, word):
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES, claims=[("it works", word, "1")])
    with pytest.raises(ValueError, match=r"claims\.csv, line 2: verdict is .*met, missed, open"):
        html_report.write([folder], tmp_path / "report.html")
