import html
import itertools
import json
import re
from html.parser import HTMLParser

import pytest

from kondo_lab.evidence import html_report
from lab.studies.result_folders import (
    MNIST_CLAIMS,
    MNIST_LINES,
    REVERSAL_LINES,
    manifest,
    toy_folders,
    write_folder,
)


def written(folders, tmp_path):
    out = tmp_path / "report.html"
    html_report.write(folders, out)
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    return written(toy_folders(root), root)


class Elements(HTMLParser):
    """Collects start tags and the text between tags; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "input", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


def study(page, anchor):
    return re.search(f'<article class="study" id="{anchor}".*?</article>', page, re.S)[0]


def rows(text):
    """(class, cells) of each line of a comparison."""
    lines = re.findall(r'<tr class="line (\w+)">(.*?)</tr>', text, re.S)
    strip = re.compile(r"<[^>]+>")
    return [
        (kind, [html.unescape(strip.sub("", cell)) for cell in re.split(r"</t[hd]>", inside)[:-1]])
        for kind, inside in lines
    ]


def test_page_needs_nothing_from_elsewhere(page):
    assert not re.search(r"https?:|@import|url\(|[\"'(]//", page)
    for _, attributes in Elements(page).seen:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))


def test_every_anchor_leads_somewhere_and_every_id_is_there_once(page):
    seen = Elements(page).seen
    ids = [attributes["id"] for _, attributes in seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in seen:
        for name in {"href", "for", "aria-labelledby"} & attributes.keys():
            if not attributes[name].startswith("data:"):
                assert attributes[name].removeprefix("#") in ids


def test_headings_leave_out_no_level(page):
    levels = [int(tag[1]) for tag, _ in Elements(page).seen if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_summary_counts_the_verdicts_of_all_studies(page):
    counts = dict(re.findall(r'data-count="(\w*)">([^<]+)<', page))
    assert counts == {"met": "1", "missed": "1", "open": "1", "paper": "6 of 10", "other": "1 of 1"}
    # One line has no expected number.
    assert len(MNIST_LINES + REVERSAL_LINES) == 10 + 1 + 1


def test_cells_of_an_abstracts_factor_are_counted_apart_from_the_papers_numbers(tmp_path):
    cell = ("Distributed", "PG / DG", "error, bugs", "0.1", "10", "2", "0.1", "10")
    lines = [*MNIST_LINES, (*cell, "abstract", "differs"), (*cell, "abstract", "matches")]
    folders = [
        write_folder(tmp_path / "own", manifest(), lines),
        write_folder(tmp_path / "other", manifest(study="other"), []),
    ]
    counts = dict(re.findall(r'data-count="(\w*)">([^<]+)<', written(folders, tmp_path)))
    papers = sum(line[-2] == "paper" for line in MNIST_LINES)
    assert counts["abstract"] == "1 of 2"
    assert counts["paper"].endswith(f" of {papers}")


def test_table_has_paper_ours_and_verdict_in_the_order_of_the_figures(page):
    assert rows(study(page, "study-mnist-kondo")) == [
        (
            "matches",
            ["PG", "1,000,000", "0.037", "paper", "0.03910 ± 0.00060", "+6%", "matches", "30"],
        ),
        (
            "matches",
            ["DG", "1,000,000", "0.0163", "paper", "0.01610 ± 0.00020", "-1%", "matches", "30"],
        ),
        (
            "differs",
            [
                "DG-K 3%",
                "1,000,000",
                "0.0236",
                "paper",
                "0.03120 ± 0.00040",
                "+32%",
                "differs",
                "30",
            ],
        ),
        ("matches", ["DG < DG-K 3% < PG", "1,000,000", "1", "paper", "1", "0%", "matches", "1"]),
        ("matches", ["DG", "2", "2.25", "paper", "2.310 ± 0.080", "+3%", "matches", "30"]),
        ("differs", ["DG-K 3%", "2", "3.98", "paper", "2.9", "-27%", "differs", "30"]),
        ("matches", ["DG / PG", "", "2", "formula", "2.02 ± 0.10", "+1%", "matches", "30"]),
        ("none", ["DG-K 10%", "", "", "", "0.02040 ± 0.00030", "", "no expected number", "30"]),
    ]
    # A number that is missing is said to be, and a place can be a word.
    assert rows(study(page, "study-reversal-kondo"))[1:] == [
        ("differs", ["PPO", "1,000,000", "16.7", "paper", "none", "", "differs", "10"]),
        (
            "noisy",
            ["DG", "", "0.01", "paper", "0.0130 ± 0.0060", "+30%", "too noisy to tell", "10"],
        ),
        ("matches", ["PG", "at the end", "0.31", "paper", "0.300 ± 0.020", "-3%", "matches", "10"]),
    ]


def test_lines_of_a_figure_stand_together_wherever_they_are_in_the_file(tmp_path):
    lines = [MNIST_LINES[0], MNIST_LINES[4], MNIST_LINES[3], MNIST_LINES[1]]
    page = written([write_folder(tmp_path / "a", manifest(), lines)], tmp_path)
    groups = re.findall(r'<tr class="group">.*?<span>([^<]*?) <', page)
    assert groups == [
        "Kondo Fig 1: online error",
        "Kondo Fig 1: order of online error",
        "Kondo Fig 3: speed-up over PG to 5% test error",
    ]
    assert [cells[0] for _, cells in rows(page)] == ["PG", "DG", "DG < DG-K 3% < PG", "DG"]


def test_a_number_without_bound_is_shown_and_not_compared(tmp_path):
    line = ("Fig 4", "DG", "noise borne", "", "0.5", "inf", "", "10", "paper", "differs")
    page = written([write_folder(tmp_path / "a", manifest(), [line])], tmp_path)
    assert "<td>0.5</td><td>paper</td><td>∞</td><td></td>" in page


def test_study_shows_claim_findings_differences_and_manifest(page):
    text = Elements(study(page, "study-mnist-kondo")).text
    facts = manifest()
    for sentence in [facts["claim"], *facts["findings"], *facts["differences"]]:
        assert sentence in text
    definitions = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert definitions["seconds"] == "412.7"
    assert definitions["commit"] == "0123abc"
    assert definitions["rates"] == "0.01, 0.03, 0.1"
    assert definitions["network: width"] == "100"
    assert "kondo run mnist-kondo --device cuda" in text


def test_a_study_without_findings_has_no_fold_for_them(page):
    assert "<summary>1 finding</summary>" in study(page, "study-mnist-kondo")
    assert "finding" not in study(page, "study-reversal-kondo")


def test_only_small_and_interrupted_runs_are_called_so(page):
    full, small = (study(page, f"study-{name}-kondo") for name in ("mnist", "reversal"))
    for word in ("Small run.", "numbers mean little", "Interrupted."):
        assert word in small
        assert word not in full
    assert "1 of 2 are small runs." in page


def images(page):
    return [attributes for tag, attributes in Elements(page).seen if tag == "img"]


def test_every_figure_is_inside_with_words_for_it(page):
    assert [image["alt"] for image in images(page)] == [
        "MNIST bandit with the Kondo gate. Figure 1: online error. Compared with Kondo Fig 1: 3 of "
        "4 match, 1 differs: DG-K 3% at 1e+06: 0.0312 ± 0.0004, expected 0.0236.",
        "MNIST bandit with the Kondo gate. Figure 3: speed up. Compared with Kondo Fig 3: 1 of 2 "
        "match, 1 differs: DG-K 3% at 2: 2.9, expected 3.98.",
        "Token reversal with the Kondo gate. Figure 1. DG-K 3% ends between DG and PG with 3% of "
        "the backward passes.",
    ]
    assert all(image["src"].startswith("data:image/webp;base64,UklGR") for image in images(page))
    assert {(image["width"], image["height"]) for image in images(page)} == {("500", "320")}


def test_only_the_first_figure_of_the_page_is_shown_at_once(page):
    assert [image.get("loading") for image in images(page)] == [None, "lazy", "lazy"]
    assert {image["decoding"] for image in images(page)} == {"async"}


def names(page):
    return re.findall(r"<figcaption><b>(.*?)\.</b>", page)


def test_figures_of_a_paper_come_first_by_number_and_others_as_the_study_lists_them(tmp_path):
    figures = ("fig10", "ages", "many", "fig2b", "fig2a", "unlisted")
    facts = manifest(figures=["many.png", "fig10.png", "ages.png"])
    page = written([write_folder(tmp_path / "a", facts, [], figures=figures)], tmp_path)
    shown = ["Figure 2a", "Figure 2b", "Figure 10", "Many", "Ages", "Unlisted"]
    assert names(page) == shown


def test_frontier_data_has_each_choice_once_and_null_for_what_is_missing(page):
    text = re.search(r'id="frontier-data">(.*?)</script>', page)[1]
    choices = json.loads(text)
    assert [(c["task"], c["target"], c["small"], len(c["points"])) for c in choices] == [
        ("MNIST", "5% test error", False, 7),
        ("MNIST", "2% test error", False, 3),
        ("reversal H=10", "10% error", True, 3),
    ]
    never = choices[1]["points"][0]
    assert never["forward"] is None
    assert never["reached"] == 0
    assert choices[0]["points"][5]["rate"] is None


def test_a_page_without_frontier_hides_it(tmp_path):
    page = written([write_folder(tmp_path / "a", manifest(), MNIST_LINES)], tmp_path)
    section = dict(a for a in _by_id(page) if a[0] == "frontier")["frontier"]
    assert "hidden" in section


def _by_id(page):
    return [(a["id"], a) for _, a in Elements(page).seen if "id" in a]


def test_nothing_from_a_file_becomes_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    facts = manifest(
        **dict.fromkeys(("study", "title", "paper", "claim", "command"), evil),
        differences=[evil],
        findings=[evil],
        settings={evil: [evil], "inner": {evil: evil}},
        environment={evil: evil},
        further=evil,
    )
    lines = [(evil, evil, evil, evil, "1", "1", "", "3", "paper", "matches")]
    frontier = [(evil, evil, "", evil, "1", "1", "1", "1", "0.1")]
    name = "<i>'&"
    folder = write_folder(tmp_path / "a", facts, lines, frontier, figures=(name,))
    page = written([folder], tmp_path)
    elements = Elements(page)
    tags = [tag for tag, _ in elements.seen]
    assert tags.count("script") == 2
    assert tags.count("img") == 1
    assert "i" not in [
        tag for tag, _ in Elements(re.search("<article.*</article>", page, re.S)[0]).seen
    ]
    assert not any("onerror" in attributes for _, attributes in elements.seen)
    # At title, paper, study, claim, command, findings, differences, settings, environment, table:
    assert elements.text.count(evil) >= 15
    point = json.loads(re.search(r'id="frontier-data">(.*?)</script>', page)[1])[0]["points"][0]
    assert point["series"] == evil


def test_equal_folders_give_equal_bytes(tmp_path):
    pages = [
        written(toy_folders(tmp_path / place / "results"), tmp_path / place)
        for place in ("here", "there")
    ]
    assert pages[0] == pages[1]


def test_a_study_that_is_there_twice_has_two_anchors(tmp_path):
    folders = [write_folder(tmp_path / name, manifest(), MNIST_LINES) for name in ("a", "b")]
    page = written(folders, tmp_path)
    ids = [name for name, _ in _by_id(page)]
    assert "study-mnist-kondo" in ids
    assert "study-mnist-kondo--2" in ids


def test_a_study_without_numbers_says_so(tmp_path):
    page = written([write_folder(tmp_path / "a", manifest(), [], figures=())], tmp_path)
    assert "No numbers to compare." in page
    assert "<img" not in page


def test_claims_come_first_in_a_study_with_what_came_of_them(page):
    own = study(page, "study-mnist-kondo")
    claims = re.findall(r'<li><span class="verdict (\w+)">(\w+)</span> <span>(.*?) <span', own)
    assert claims == [
        ("met", "met", "DG-K ends below PG &lt;at 3%&gt;"),
        ("missed", "missed", "DG-K ends near DG"),
        ("open", "open", "it bears noise"),
    ]
    assert own.index('class="claim"') < own.index("1 met") < own.index("<figure")
    assert own.index("<figure") < own.index('class="claims"') < own.index("<table")
    assert "(0.0312, expected 0.0236)" in own


def test_the_page_opens_with_the_claims_of_every_study(page):
    opening = page[page.index('id="claims"') : page.index('class="group"')]
    lines = re.findall("<li>.*?</li>", opening, re.S)
    assert ["MNIST bandit" in lines[0], "Token reversal" in lines[1]] == [True, True]
    assert '<span class="verdict missed">1 missed</span>' in lines[0]
    assert html.escape(manifest()["claim"]) in lines[0]
    assert page.index('id="claims"') < page.index("<article")


def test_a_page_of_one_study_lists_its_claims_once_at_the_top(tmp_path):
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES, claims=MNIST_CLAIMS)
    page = written([folder], tmp_path)
    assert page.count("DG-K ends near DG") == 1
    assert page.index("DG-K ends near DG") < page.index("<article")
    assert 'class="bar"' not in page
    assert 'class="tiles"' not in page
    assert [tag for tag, _ in Elements(page).seen if re.fullmatch("h[1-3]", tag)][:3] == [
        "h1",
        "h2",
        "h2",
    ]


def test_many_or_long_claims_are_folded(tmp_path):
    many = [(f"statement {number}", "met", "1") for number in range(5)]
    for name, claims in (("a", many), ("b", [("long", "missed", "x" * 900)])):
        folders = [
            write_folder(tmp_path / name, manifest(study=name), MNIST_LINES, claims=claims),
            write_folder(tmp_path / f"{name}2", manifest(study="other"), MNIST_LINES),
        ]
        own = study(written(folders, tmp_path), f"study-{name}")
        fold = re.search('<details class="fold statements">.*?</details>', own, re.S)[0]
        assert claims[0][0] in fold
        assert own.count(claims[0][0]) <= 2  # a caption may quote the first one


def test_a_folder_without_claims_says_so(page):
    assert "No verdict in the folder" in study(page, "study-reversal-kondo")
    assert "2 match" in study(page, "study-reversal-kondo")
