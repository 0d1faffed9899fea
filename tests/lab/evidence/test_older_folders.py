"""Folders of older versions and of the benchmark are read, and claim nothing."""

import re

import pytest

from kondo_lab.evidence import html_report, older_folders
from lab.studies.result_folders import (
    MNIST_LINES,
    STEP,
    manifest,
    older_demo_folder,
    step_folder,
    write_folder,
    write_table,
)


def test_the_older_demo_is_read_with_its_numbers(tmp_path):
    made = older_folders.read(older_demo_folder(tmp_path / "demo-v1"))
    assert (made.manifest["study"], made.older) == ("demo", older_folders.DEMO)
    assert made.claims == []
    found = {(line.series, line.metric): (line.ours, line.se, line.seeds) for line in made.headline}
    assert found["PG", "final error"] == (0.107, 0.0048, 2)
    assert found["DG-K (3%)", "learner speed-up"] == (3.44, None, 2)
    assert ("PG", "learner speed-up") not in found
    assert all(line.verdict == "" for line in made.headline)
    assert made.manifest["findings"] == [
        "digits: the learner of DG-K (3%) is 3.4 times faster than that of PG."
    ]


def test_the_benchmark_of_a_step_is_read_with_its_numbers(tmp_path):
    made = older_folders.read(step_folder(tmp_path / "lm-step-v1"))
    assert (made.manifest["study"], made.older) == ("lm-step", older_folders.BENCHMARK)
    assert [(line.figure, line.series, line.ours, line.seeds) for line in made.headline] == [
        ("large, 128 x 1024 tokens", "free, rate 3% by sequence", 28.5, 5),
        ("small, 128 x 1024 tokens", "free, rate 3% by sequence", 23.7, 5),
    ]
    assert "28.5 times: large" in made.manifest["findings"][0]
    assert made.manifest["command"] == ["bench large", "bench small"]


def test_the_page_says_who_wrote_them_and_that_they_claim_nothing(tmp_path):
    folders = [older_demo_folder(tmp_path / "demo-v1"), step_folder(tmp_path / "lm-step-v1")]
    html_report.write(folders, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    step, demo = re.findall("<article.*?</article>", text, re.S)
    for own, writer in ((step, "benchmarks/bench_lm_step.py"), (demo, "an older version of")):
        assert f"</strong> {writer}" in own
        assert older_folders.NO_CLAIM in own
        assert "no claim</span>" in own
        assert own.count("<img") == 1
    assert "3.44" in demo
    assert "28.5" in step


def test_they_are_found_like_other_results(tmp_path):
    folders = [
        older_demo_folder(tmp_path / "a"),
        step_folder(tmp_path / "b"),
        write_folder(tmp_path / "c", manifest(), MNIST_LINES),
    ]
    assert all(map(older_folders.holds_results, folders))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert not older_folders.holds_results(tmp_path / "empty")
    assert not older_folders.holds_results(tmp_path / "file")
    (folders[2] / "headline.csv").unlink()
    assert not older_folders.holds_results(folders[2])


def test_a_damaged_older_demo_is_named(tmp_path):
    folder = older_demo_folder(tmp_path / "a")
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"method"', '"mathod"'))
    with pytest.raises(ValueError, match=r"a/manifest\.json is of an older `kondo demo` and dam"):
        older_folders.read(folder)


def test_a_damaged_benchmark_is_named(tmp_path):
    folder = step_folder(tmp_path / "a")
    write_table(folder / "small.csv", STEP[1:], [])
    with pytest.raises(ValueError, match=r"small\.csv lacks the columns benchmark; expected"):
        older_folders.read(folder)
    write_table(folder / "small.csv", STEP, [("lm_step", "m", "c", "free", "x", "token", "1", "1")])
    with pytest.raises(ValueError, match=r"small\.csv, line 2: could not convert"):
        older_folders.read(folder)
    (folder / "large.manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"large\.manifest\.json is damaged \(not JSON: "):
        older_folders.read(folder)


@pytest.mark.parametrize("name", ["manifest.json", "figure.png"])
def test_a_link_in_an_older_folder_is_refused(tmp_path, name):
    folder = older_demo_folder(tmp_path / "a")
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"{name} is a link or no file"):
        older_folders.read(folder)
