"""`kondo report results/*` over the repository's own results, as a file and in Chromium."""

import re
from pathlib import Path

import pytest

from kondo import cli
from kondo_lab.evidence.html_report import layout
from lab.studies.browser import CONTRASTS, NEEDS_CHROMIUM

RESULTS = Path(__file__).parents[3] / "results"
FOLDERS = sorted(RESULTS.iterdir()) if RESULTS.is_dir() else []
pytestmark = pytest.mark.skipif(not FOLDERS, reason="results/ of the repository is not here")
MOST_BYTES = 3_000_000
WIDTHS = (390, 1440)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert cli.main(["report", *map(str, FOLDERS), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def text(path):
    return path.read_text(encoding="utf-8")


def test_it_is_smaller_than_three_megabytes_and_shows_every_folder(path, text):
    assert path.stat().st_size < MOST_BYTES
    shown = re.findall(r'<p class="quiet about">.*?<code>(.*?)</code>', text)
    assert sorted(shown) == [folder.name for folder in FOLDERS]


def test_claims_come_first_then_the_groups_in_order(text):
    sections = re.findall(r'<section [^>]*?id="([\w-]+)"|<section id="([\w-]+)"', text)
    found = [first or second for first, second in sections]
    groups = [f"group-{each.name}" for each in (*layout.GROUPS, layout.REST, layout.EARLIER)]
    assert found[0] == "claims"
    assert found[-1] == "frontier"
    assert found[1:-1] == [name for name in groups if name in found]
    assert found[1:4] == ["group-kondo", "group-dg", "group-distributed"]


def test_every_study_has_a_verdict_a_figure_with_words_and_three_numbers(text):
    articles = re.findall("<article.*?</article>", text, re.S)
    assert len(articles) == len(FOLDERS)
    for article in articles:
        glance = article[: article.index('class="folds"')]
        assert re.search('<p class="result">.*verdict', glance)
        assert glance.count("<figure") == 1
        assert re.search(r"<figcaption><b>.+?</b> \S.+</figcaption>", glance)
        assert glance.count('class="value"') == 3
        assert "<table" not in glance


def test_one_image_is_loaded_at_once(text):
    images = re.findall("<img [^>]*?>", text)
    assert len(images) > len(FOLDERS)
    assert sum('loading="lazy"' not in image for image in images) == 1
    assert all('decoding="async"' in image for image in images)


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", WIDTHS)
def test_it_never_scrolls_sideways(visit, path, width):
    page = visit(path.as_uri(), width=width, height=844, is_mobile=width == WIDTHS[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.innerWidth") == width


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [*WIDTHS, 1240])
def test_the_counts_fit_into_their_tiles(visit, path, width):
    page = visit(path.as_uri(), width=width, height=844)
    sizes = page.locator(".tile").evaluate_all(
        "all => all.map(e => [e.scrollWidth, e.clientWidth])"
    )
    assert len(sizes) == 6
    assert all(needed <= own for needed, own in sizes)


@NEEDS_CHROMIUM
def test_a_study_is_about_one_screen_high(visit, path):
    page = visit(path.as_uri(), width=1440, height=900)
    heights = page.locator("article").evaluate_all("all => all.map(e => e.offsetHeight)")
    assert max(heights) < 1000
    assert page.evaluate("document.documentElement.scrollHeight") < 1000 * (len(FOLDERS) + 8)
    timing = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    print(f"DOMContentLoaded after {page.evaluate(timing):.0f} ms")


@NEEDS_CHROMIUM
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(visit, path, scheme):
    page = visit(path.as_uri(), color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 1000
    assert [found for found in contrasts if found[0] < 4.5] == []


@NEEDS_CHROMIUM
def test_the_keyboard_is_enough(visit, path):
    page = visit(path.as_uri())
    focused = "document.activeElement"

    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.className") == "skip"
    assert page.evaluate(f"{focused}.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.id") == "claims"

    page.keyboard.press("Tab")  # the first thing after the skipped bar
    assert page.evaluate(f"{focused}.tagName") == "SUMMARY"
    for wanted in (True, False):
        page.keyboard.press("Enter")
        assert page.evaluate(f"{focused}.parentElement.open") is wanted
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.id") == "only-differs"
    page.keyboard.press("Space")
    assert page.evaluate(f"{focused}.checked")
    outline = page.evaluate(f"getComputedStyle({focused}).outlineStyle")
    assert outline != "none"

    page.locator("article .enlarge").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#viewer").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate(f"{focused}.className") == "enlarge"


@NEEDS_CHROMIUM
def test_it_prints(visit, path):
    page = visit(path.as_uri(), color_scheme="dark")
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert len(FOLDERS) < pages < 4 * len(FOLDERS)

    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".bar").is_visible()
    assert not page.locator("table.comparison").first.is_visible()
    # More figures and statements are printed without being opened; none is cut.
    figures = page.locator(".more-figures figure").evaluate_all(
        "all => all.map(e => e.offsetHeight)"
    )
    assert len(figures) > 20
    folded = page.locator(".more-figures figure, .statements li")
    assert folded.evaluate_all("all => all.every(e => e.checkVisibility())")
    # A4 less its margins has 182 by 269 mm; at 96 dots an inch 1 mm has 3.78.
    assert max(figures) < 269 * 3.78
    assert page.locator("figure").first.evaluate("e => getComputedStyle(e).breakInside") == "avoid"


@NEEDS_CHROMIUM
def test_it_can_be_read_without_script(visit, path):
    page = visit(path.as_uri(), java_script_enabled=False)
    assert page.locator("article .plate img").first.is_visible()
    page.locator("article .numbers summary").first.click()
    assert page.locator("article table").first.is_visible()
