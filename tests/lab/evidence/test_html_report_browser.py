"""The report in a real browser: Debian's Chromium, without a window and without a network."""

import math

import pytest

from kondo_lab.evidence import html_report
from lab.studies.browser import CONTRASTS, NEEDS_CHROMIUM
from lab.studies.result_folders import (
    MNIST_FRONTIER,
    MNIST_LINES,
    REVERSAL_FRONTIER,
    manifest,
    toy_folders,
    write_folder,
)

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    html_report.write(toy_folders(root), root / "report.html")
    return (root / "report.html").as_uri()


@pytest.fixture
def page(visit, address):
    return visit(address)


def costs(points, target, c):
    """Series -> forward + c * backward, for those that every seed brought to the target."""
    return {
        series: float(forward) + c * float(backward)
        for _, series, _, at, forward, backward, reached, seeds, _ in points
        if at == target and reached == seeds
    }


def slide(page, c):
    page.locator("#ratio").fill(str(c))


def column(page, number):
    rows = page.locator("#frontier-table tbody tr").all()
    return [row.locator("th, td").nth(number).inner_text() for row in rows]


def names(page):
    """Series in the order of the table, without their marks."""
    return page.locator("#frontier-table tbody tr").evaluate_all(
        "rows => rows.map(row => row.cells[0].firstChild.textContent)"
    )


def winner(page):
    return page.locator("#frontier-table tr.winner th").inner_text().removesuffix("wins").strip()


def open_all(page):
    for fold in page.locator("details > summary").all():
        fold.click()


def test_page_renders_with_its_figures(page):
    assert page.title() == "Kondo results report"
    assert page.get_by_role("heading", level=1).inner_text() == "Kondo results report"
    assert page.locator("#frontier-app").is_visible()
    open_all(page)
    for image in page.locator("img").all():
        image.scroll_into_view_if_needed()
        page.wait_for_function("image => image.naturalWidth === 500", arg=image.element_handle())
    assert page.locator("img").count() == 3


@pytest.mark.parametrize("c", [0, 0.3, 2, 7.5, 20])
def test_slider_chooses_the_winner(page, c):
    slide(page, c)
    paid = costs(MNIST_FRONTIER, "5% test error", c)
    best = min(paid, key=paid.get)
    speedup = paid["PG"] / paid[best]
    said = page.locator("#sentence").inner_text()
    assert said.startswith(f"At c = {c} {best} reaches 5% test error at ")
    assert float(said.split(" at ")[1].split("x")[0]) == pytest.approx(speedup, abs=0.05)
    assert said.endswith("x less cost than PG.")
    assert page.locator("#ratio-value").inner_text() == str(c)
    assert winner(page) == best
    assert page.locator("#chart g.winner").get_attribute("data-series") == best
    # The table ranks by cost, and those that some seeds never brought there stand below.
    assert names(page) == [*sorted(paid, key=paid.get), "DG-K 1%"]
    assert column(page, 2)[:-1] == [f"{round(paid[s]):,}" for s in sorted(paid, key=paid.get)]


def test_the_toy_winner_depends_on_the_cost_ratio():
    best = {
        c: min(p, key=p.get) for c in (0, 2, 20) if (p := costs(MNIST_FRONTIER, "5% test error", c))
    }
    assert best == {0: "DG", 2: "DG-K 10%", 20: "DG-K 3%"}


def test_slider_obeys_the_keyboard(page):
    page.locator("#ratio").focus()
    before = page.locator("#sentence").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#ratio-value").inner_text() == "2.1"
    page.keyboard.press("End")
    assert page.locator("#ratio-value").inner_text() == "20"
    assert page.locator("#sentence").inner_text() != before


def test_ranges_name_each_winner_along_the_slider(page):
    # 20 + 20 c = 26 + 2.6 c at c = 0.34; 26 + 2.6 c = 32 + 0.96 c at c = 3.66 (thousands).
    assert page.locator("#ranges").inner_text() == (
        "Cheapest from c = 0 to 20: first DG, then DG-K 10% from c = 0.4, "
        "then DG-K 3% from c = 3.7."
    )


@pytest.mark.parametrize("c", [0, 2, 20])
def test_pareto_optimal_are_those_that_nothing_beats_twice(page, c):
    slide(page, c)
    paid = costs(MNIST_FRONTIER, "5% test error", c)
    error = {line[1]: float(line[-1]) for line in MNIST_FRONTIER if line[3] == "5% test error"}
    best = {
        a
        for a in paid
        if not any(paid[b] < paid[a] and error[b] < error[a] for b in paid if b != a)
    }
    shown = page.locator("#chart .point:is(.pareto, .winner)").evaluate_all(
        "points => points.map(point => point.dataset.series)"
    )
    assert set(shown) == best
    assert len(best) == {0: 1, 2: 3, 20: 4}[c]


def test_a_series_that_some_seeds_never_brought_there_is_marked_and_not_ranked(page):
    # At c = 20 it would be the cheapest.
    slide(page, 20)
    row = page.locator("#frontier-table tr.partial")
    assert row.locator("th").inner_text().startswith("DG-K 1%")
    assert "not ranked" in row.inner_text()
    assert "12 of 30 seeds" in row.inner_text()
    assert row.locator("td").nth(2).inner_text() == "–"  # noqa: RUF001 - as on the page
    assert page.locator("#chart .partial text").inner_html() == "DG-K 1% (12/30 seeds)"


def test_chart_places_points_by_cost_and_error(page):
    def place(series):
        circle = page.locator(f'#chart [data-series="{series}"] circle')
        return float(circle.get_attribute("cx")), float(circle.get_attribute("cy"))

    slide(page, 2)
    (pg, high), (dg, low), (gate, _) = place("PG"), place("DG"), place("DG-K 3%")
    paid = costs(MNIST_FRONTIER, "5% test error", 2)
    assert gate < dg < pg
    assert high < low  # a larger error lies higher, where y is smaller
    # A log axis: distances are ratios of costs.
    ratio = math.log(paid["PG"] / paid["DG-K 3%"]) / math.log(paid["PG"] / paid["DG"])
    assert (pg - gate) / (pg - dg) == pytest.approx(ratio, rel=1e-6)
    slide(page, 10)
    assert place("DG-K 3%")[0] < gate
    assert place("PG")[0] == pytest.approx(pg)


def test_labels_do_not_overlap_even_on_a_phone(visit, address):
    page = visit(address, width=360)
    boxes = page.locator("#chart .point text").evaluate_all(
        "texts => texts.map(t => { const b = t.getBBox(); return [b.x, b.y, b.width, b.height] })"
    )
    assert len(boxes) == 7
    for i, (x, y, width, height) in enumerate(boxes):
        for u, v, other, _ in boxes[:i]:
            assert x >= u + other or u >= x + width or abs(y - v) >= 0.8 * height


def test_another_task_changes_table_chart_and_sentence(page):
    page.locator("#choice").select_option(index=2)
    slide(page, 0)
    assert names(page) == ["PG", "DG", "DG-K 50%"]
    said = page.locator("#sentence").inner_text()
    assert said == "At c = 0 nothing reaches 10% error at less cost than PG."
    assert "small run" in page.locator("#ranges").inner_text()
    slide(page, 20)
    best = min((paid := costs(REVERSAL_FRONTIER, "10% error", 20)), key=paid.get)
    assert winner(page) == best == "PG"
    # An error of zero has a place on the log axis, below all others.
    heights = page.locator("#chart circle").evaluate_all(
        "all => all.map(c => +c.getAttribute('cy'))"
    )
    zero = page.locator('#chart [data-series="DG-K 50%"] circle').get_attribute("cy")
    assert float(zero) == max(heights)


def test_without_pg_at_the_target_no_ratio_is_claimed(page):
    page.locator("#choice").select_option(index=1)
    said = page.locator("#sentence").inner_text()
    assert said.startswith(
        "At c = 2 DG-K 10% reaches 2% test error at the least cost; PG reached it"
    )
    assert "0 of 30 seeds" in said
    assert set(column(page, 3)) == {"–"}  # noqa: RUF001
    assert page.locator("#chart circle").count() == 2


def test_a_target_nobody_reached_is_said_to_be(visit, tmp_path):
    frontier = [("MNIST", "PG", "1", "1% error", "", "", "0", "3", "0.04")]
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES, frontier)
    html_report.write([folder], tmp_path / "report.html")
    page = visit((tmp_path / "report.html").as_uri())
    assert page.locator("#sentence").inner_text().startswith("No series reached 1% error in every")
    assert names(page) == ["PG"]


def test_table_sorts_by_each_column_both_ways(page):
    head = page.locator("#frontier-table thead")
    head.get_by_role("button", name="final error").click()
    errors = [float(text) for text in column(page, 4)]
    assert errors == sorted(errors)
    assert head.locator('[aria-sort="ascending"]').inner_text().startswith("final error")
    head.get_by_role("button", name="final error").click()
    errors = [float(text) for text in column(page, 4)]
    assert errors == sorted(errors, reverse=True)
    assert head.locator('[aria-sort="descending"]').count() == 1
    head.get_by_role("button", name="speed-up").press("Enter")
    speedups = [float(text.removesuffix("x")) for text in column(page, 3)[:-1]]
    assert speedups == sorted(speedups, reverse=True)
    head.get_by_role("button", name="series").click()
    assert names(page)[0] == "Bernoulli 3%"
    # The order is kept while the slider moves.
    slide(page, 5)
    assert names(page)[0] == "Bernoulli 3%"


def test_filter_leaves_only_what_differs(page):
    open_all(page)
    lines = page.locator(".comparison tr.line")
    assert len([line for line in lines.all() if line.is_visible()]) == 12
    page.get_by_label("only what differs").check()
    shown = [line.locator("th").inner_text() for line in lines.all() if line.is_visible()]
    assert shown == ["DG-K 3%", "DG-K 3%", "PPO"]
    groups = [g.inner_text() for g in page.locator("tr.group").all() if g.is_visible()]
    assert len(groups) == 3
    assert not any("beyond the paper" in group for group in groups)
    page.get_by_label("only what differs").uncheck()
    assert all(line.is_visible() for line in lines.all())


def test_filter_says_where_nothing_differs(visit, tmp_path):
    folder = write_folder(tmp_path / "a", manifest(), MNIST_LINES[:2])
    html_report.write([folder], tmp_path / "report.html")
    page = visit((tmp_path / "report.html").as_uri())
    open_all(page)
    nothing = page.get_by_text("Nothing differs in this study.")
    assert not nothing.is_visible()
    page.get_by_label("only what differs").check()
    assert nothing.is_visible()
    assert not page.locator("table.comparison").is_visible()
    assert not page.locator("#frontier").is_visible()


def test_figure_enlarges_and_closes(page):
    open_all(page)
    small = page.locator(".enlarge img").first.bounding_box()["width"]
    page.locator(".enlarge").first.click()
    assert page.locator("#viewer img").bounding_box()["width"] > 1.5 * small
    page.keyboard.press("Escape")
    assert not page.locator("#viewer").is_visible()
    page.locator(".enlarge").nth(1).press("Enter")
    assert page.locator("#viewer img").get_attribute("alt").startswith("MNIST")
    page.get_by_role("button", name="Close").click()
    assert not page.locator("#viewer").is_visible()


def test_manifest_opens(page):
    command = page.get_by_text("kondo run mnist-kondo --device cuda")
    assert not command.is_visible()
    page.locator(".run summary").first.click()
    assert command.is_visible()


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_is_wider_than_the_screen_and_text_can_be_read(visit, address, width):
    page = visit(address, width=width, height=740, is_mobile=width == 360, has_touch=True)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.innerWidth") == width
    sizes = page.locator("p, li, td, th, dd, label, figcaption, .verdict, svg text").evaluate_all(
        "all => all.map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    # The chart is drawn for this width, not scaled down to it.
    scale = page.locator("#chart").evaluate("s => s.clientWidth / s.viewBox.baseVal.width")
    assert scale == pytest.approx(1, abs=0.02)
    table = page.locator(".scroll").nth(1)
    assert table.evaluate("t => t.clientWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(visit, address, scheme):
    page = visit(address, color_scheme=scheme)
    open_all(page)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (scheme == "dark")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert [found for found in contrasts if found[0] < 4.5] == []


def test_without_script_tables_figures_and_filter_still_work(visit, address):
    page = visit(address, java_script_enabled=False)
    assert page.locator("noscript p").is_visible()
    assert not page.locator("#frontier-app").is_visible()
    assert page.locator(".plate img").first.is_visible()
    assert page.locator("button.enlarge").count() == 0
    page.locator(".numbers summary").first.click()
    assert page.locator(".comparison tr.line.matches").first.is_visible()
    page.get_by_label("only what differs").check()
    assert not page.locator(".comparison tr.line.matches").first.is_visible()


def test_names_from_files_stay_text(visit, tmp_path):
    evil = "</script><img src=x onerror=console.log(1)>"
    frontier = [(evil, evil, "", evil, "1", "1", "1", "1", "0.1")]
    lines = [(evil, evil, evil, evil, "1", "1", "", "3", "paper", "differs")]
    folder = write_folder(tmp_path / "a", manifest(title=evil), lines, frontier)
    html_report.write([folder], tmp_path / "report.html")
    page = visit((tmp_path / "report.html").as_uri())
    assert evil in page.locator("#sentence").inner_text()
    assert winner(page) == evil
    assert page.locator("img").count() == 1
