"""Figures of the report: their bytes and their captions."""

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from kondo_lab.evidence import runner
from kondo_lab.evidence.html_report import images
from kondo_lab.evidence.html_report.captions import captions, name_of
from kondo_lab.evidence.html_report.words import shortened
from kondo_lab.evidence.result_folder import read
from kondo_lab.evidence.study import Analysis
from lab.studies import toy
from lab.studies.result_folders import MNIST_CLAIMS, MNIST_LINES, manifest, write_folder


def noise(path, size=(1800, 900)):
    """Write an image that is hard to compress."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def plain(path, size=(1800, 900)):
    Image.new("RGB", size, "white").save(path)
    return path


def content(picture):
    return base64.b64decode(picture.source.partition(",")[2])


def test_a_picture_is_the_figure_at_its_size(tmp_path):
    path = plain(tmp_path / "a.png", (640, 200))
    made = images.encode([(path, True)])[path]
    opened = Image.open(io.BytesIO(content(made)))
    assert (opened.format, opened.size) == ("WEBP", (640, 200))
    assert (made.width, made.height, made.wide, made.large) == (640, 200, True, True)


@pytest.mark.parametrize(
    ("size", "wide", "large"),
    [((640, 400), False, False), ((1200, 800), False, True), ((2000, 1000), False, True)],
)
def test_a_figure_with_panels_is_large_on_a_phone(tmp_path, size, wide, large):
    path = plain(tmp_path / "a.png", size)
    made = images.encode([(path, True)])[path]
    assert (made.wide, made.large) == (wide, large)


def test_transparent_parts_are_white(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(path)
    opened = Image.open(io.BytesIO(content(images.encode([(path, True)])[path])))
    assert opened.convert("RGB").getpixel((10, 10)) == (255, 255, 255)


def test_a_figure_that_does_not_fit_loses_pixels_and_then_quality(tmp_path):
    path = noise(tmp_path / "a.png")
    sizes = []
    for budget in (10_000_000, 500_000, 1):
        made = images.encode([(path, True)], budget)[path]
        sizes.append((made.width, len(content(made))))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1][0] == images.STEPS[-1][0]


def test_what_simple_figures_leave_goes_to_others_and_the_first_of_a_study_has_more(tmp_path):
    hard = noise(tmp_path / "hard.png", (900, 450))
    others = [plain(tmp_path / f"{number}.png", (900, 450)) for number in range(4)]
    full = images.encode([(hard, False)], 10_000_000)[hard]
    budget = 3 * len(content(full))
    late = images.encode([*((path, False) for path in others), (hard, False)], budget)
    early = images.encode([(hard, False), *((path, False) for path in others)], budget)
    lead = images.encode([(hard, True), *((path, False) for path in others)], budget)
    assert len(content(early[hard])) < len(content(lead[hard])) <= len(content(late[hard]))


def result_of(tmp_path, figures, lines=(), claims=(), **facts):
    return read(
        write_folder(tmp_path / "a", manifest(**facts), lines, figures=figures, claims=claims)
    )


def told(result):
    return {path.stem: caption for path, caption in captions(result).items()}


def test_a_caption_of_the_manifest_wins(tmp_path):
    made = result_of(
        tmp_path, ["fig1", "ages"], MNIST_LINES, captions={"fig1": "DG ends at 1.61%."}
    )
    assert told(made) == {
        "fig1": "DG ends at 1.61%.",
        "ages": "",
    }


def test_a_figure_of_a_paper_says_how_its_numbers_compare(tmp_path):
    lines = [MNIST_LINES[0], MNIST_LINES[1], MNIST_LINES[4], MNIST_LINES[5]]
    made = result_of(tmp_path, ["fig1-curves", "fig3-speed-up", "fig30"], lines)
    assert told(made) == {
        "fig1-curves": "Compared with Kondo Fig 1: 2 of 2 match.",
        "fig3-speed-up": "Compared with Kondo Fig 3: 1 of 2 match, 1 differs: DG-K 3% at 2: 2.9, "
        "expected 3.98.",
        "fig30": "",
    }


def test_other_figures_take_claims_or_findings_that_name_them(tmp_path):
    findings = ["Supervised starts end at 0.3.", "Error by the delay of 3 steps: DG 1.5%."]
    claims = [("sorting-3, DG: it ends higher", "missed", "1"), ("sorting-3: it learns", "met", "")]
    made = result_of(
        tmp_path,
        ["error-by-delay", "table-sorting-3", "vocabularies"],
        findings=findings,
        claims=claims,
    )
    assert told(made) == {
        "table-sorting-3": "Statements on sorting-3: 1 met, 1 missed.",
        "error-by-delay": "Error by the delay of 3 steps: DG 1.5%.",
        "vocabularies": "",
    }


@pytest.mark.parametrize(
    ("facts", "claims", "expected"),
    [
        ({}, MNIST_CLAIMS, "Met: DG-K ends below PG <at 3%> (1 of 1 match)."),
        ({}, (), manifest()["findings"][0]),
        ({"findings": []}, (), manifest()["claim"]),
    ],
)
def test_the_first_figure_falls_back_to_a_claim_a_finding_or_the_study(
    tmp_path, facts, claims, expected
):
    made = result_of(tmp_path, ["curves", "more"], claims=claims, **facts)
    assert told(made) == {"curves": expected, "more": ""}


def test_nothing_is_said_under_two_figures(tmp_path):
    made = result_of(tmp_path, ["fig1-a", "fig1-b"], MNIST_LINES[:2])
    assert list(told(made).values()) == ["Compared with Kondo Fig 1: 2 of 2 match.", ""]


def test_names_of_figures_read_as_words(tmp_path):
    read_as = {
        "fig9-learning-rate-3e-05": "Figure 9: learning rate 3e-05",
        "prop2-eta": "Proposition 2: eta",
        "error-by_delay": "Error by delay",
    }
    assert {stem: name_of(tmp_path / f"{stem}.png") for stem in read_as} == read_as


def test_long_sentences_are_cut_between_sentences_or_words():
    assert shortened("One. Two. Three.", 9) == "One. Two."
    assert shortened("a" * 30 + " " + "b" * 30, 40) == "a" * 30 + " …"
    assert shortened("short") == "short"


def test_a_run_writes_its_captions_and_the_report_shows_them(tmp_path):
    def analyse(records, settings):
        found = toy.analyse(records, settings)
        return dataclasses.replace(found, captions={"error": f"{found.findings[0]} It is known."})

    order = toy.order(tmp_path / "toy", toy.study(analyse=analyse))
    runner.run(order, Console(file=io.StringIO()))
    (told_of,) = captions(read(tmp_path / "toy")).values()
    assert re.fullmatch(r"PG ends at 0\.03\d+\. It is known\.", told_of)


def test_captions_are_of_figures_that_are_there():
    with pytest.raises(ValueError, match=r"captions must be of figures, got fig2; .*\(none\)"):
        Analysis(captions={"fig2": "It shows nothing."})
