"""The order of the report, its groups and its key numbers come from one table."""

import re

import pytest

from kondo_lab.evidence import html_report
from kondo_lab.evidence.html_report import layout, tables
from kondo_lab.evidence.result_folder import read
from kondo_lab.evidence.study import headline
from kondo_lab.studies import registry
from lab.studies.result_folders import MNIST_LINES, manifest, write_folder


def folder(root, study, *, version=1, name="", **facts):
    facts = {"study": study, "version": version, "title": study} | facts
    return write_folder(root / (name or f"{study}-v{version}"), manifest(**facts), MNIST_LINES)


def order(folders):
    return [
        (group.name, [result.name for result in results])
        for group, results in layout.arrange([read(each) for each in folders])
    ]


def test_every_study_has_its_place():
    placed = [name for group in (*layout.GROUPS, layout.REST) for name in group.studies]
    assert len(placed) == len(set(placed))
    assert {study.name for study in registry.all_studies()} - set(placed) == set()


def test_a_study_stands_in_the_group_of_its_paper():
    for group in layout.GROUPS:
        for name in set(group.studies) & {study.name for study in registry.all_studies()}:
            assert registry.find(name).paper.startswith(group.paper)


def test_papers_come_in_order_then_language_models_performance_and_the_rest(tmp_path):
    studies = ("demo", "asynchrony", "lm-rl", "measured", "reversal-dg", "mnist-dg", "mnist-kondo")
    assert order([folder(tmp_path, study) for study in studies]) == [
        ("kondo", ["mnist-kondo-v1"]),
        ("dg", ["mnist-dg-v1", "reversal-dg-v1"]),
        ("distributed", ["asynchrony-v1"]),
        ("language", ["lm-rl-v1"]),
        ("performance", ["measured-v1"]),
        ("more", ["demo-v1"]),
    ]


def test_an_unknown_study_goes_to_its_paper_or_to_the_end(tmp_path):
    folders = [
        folder(tmp_path, "a-new-one", paper="beyond the papers"),
        folder(tmp_path, "another", paper="DG paper, Figure 99"),
        folder(tmp_path, "mnist-dg"),
        folder(tmp_path, "demo"),
    ]
    expected = [("dg", ["mnist-dg-v1", "another-v1"]), ("more", ["demo-v1", "a-new-one-v1"])]
    assert order(folders) == expected


def test_an_earlier_version_stands_at_the_end_unless_only_a_small_run_is_newer(tmp_path):
    folders = [
        folder(tmp_path, "lm-rl", version=1),
        folder(tmp_path, "lm-rl", version=2),
        folder(tmp_path, "mnist-dg", version=1),
        folder(tmp_path, "mnist-dg", version=2, size="small"),
    ]
    assert order(folders) == [
        ("dg", ["mnist-dg-v2", "mnist-dg-v1"]),
        ("language", ["lm-rl-v2"]),
        ("earlier", ["lm-rl-v1"]),
    ]


def test_two_devices_of_one_study_are_both_shown_and_told_apart(tmp_path):
    folders = [
        folder(tmp_path, "measured", name=f"measured-{device}-v1", device=device)
        for device in ("cuda", "cpu")
    ]
    html_report.write(folders, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<code>(measured-\w+-v1)</code> &middot; (\w+)", text) == [
        ("measured-cpu-v1", "cpu"),
        ("measured-cuda-v1", "cuda"),
    ]


def test_the_order_of_the_folders_does_not_matter(tmp_path):
    folders = [folder(tmp_path, study) for study in ("mnist-kondo", "lm-rl", "demo", "mnist-dg")]
    pages = []
    for each in (folders, folders[::-1]):
        html_report.write(each, tmp_path / "report.html")
        pages.append((tmp_path / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_key_numbers_are_one_per_figure_of_the_paper_at_the_end_of_its_axis():
    lines = [
        headline("Kondo Fig 1", "DG-K 3%", "error", 10, 0.3, expected=0.3),
        headline("Kondo Fig 1", "DG-K 3%", "error", 100, 0.2, expected=0.2),
        headline("Kondo Fig 1", "PG", "error", 1000, 0.1, expected=0.1),
        headline("Kondo Fig 1", "DG < PG", "order of error", 100, 1.0, expected=1.0),
        headline("Kondo Prop 1", "PG", "c", "", 2.0, expected=2.0, against="formula"),
        headline("beyond the paper", "DG-K 3%", "speed-up", "", 4.0),
        headline("Kondo Fig 4", "DG", "noise borne", "", float("inf"), expected=0.5),
    ]
    assert tables.key_numbers(lines) == [lines[1], lines[4], lines[5]]


def test_picks_of_the_table_come_first_and_those_that_are_missing_are_passed_over():
    pick = layout.PICKS["gambling"][1]
    other = headline("Kondo Prop 3", "p=0.5", "Pr", 3, 0.1, expected=0.1)
    line = headline("Kondo Prop 3", pick.series, pick.metric, pick.x, 0.9)
    assert tables.key_numbers([other, line], "gambling") == [line, other]
    assert tables.key_numbers([other, line]) == [other, line]


@pytest.mark.parametrize("study", layout.PICKS)
def test_picks_are_of_studies_that_the_table_names(study):
    assert any(study in group.studies for group in (*layout.GROUPS, layout.REST))


def test_lines_without_an_expected_number_are_cut_and_counted(tmp_path):
    compared = [MNIST_LINES[0]] * 3
    alone = [
        ("beyond the paper", f"series {number}", "error", "", "", "0.1", "", "1", "", "")
        for number in range(tables.MOST_ALONE + 5)
    ]
    made = write_folder(tmp_path / "a", manifest(), [*alone, *compared])
    html_report.write([made], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count('<tr class="line') == tables.MOST_ALONE + len(compared)
    assert "5 more lines without an expected number are in headline.csv" in text
