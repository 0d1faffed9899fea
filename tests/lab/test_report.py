import base64
import html
import re
from html.parser import HTMLParser

import pytest

from kondo_lab import figures, report, table
from kondo_lab.findings import findings
from kondo_lab.summary import summarise
from lab.examples import comparison

FACTS = {
    "command": "kondo demo --out <here>",
    "seeds": [3, 4],
    "workers": 2,
    "interrupted": False,
    "settings": {"rate": 0.03, "digits": {"num_steps": 40}},
    "environment": {"torch": "2.13.0", "commit": None},
    "seconds": 12.3,
}


@pytest.fixture(scope="module")
def rows():
    return summarise(comparison())


@pytest.fixture(scope="module")
def panels(rows):
    return [panel for line in figures.panels(comparison(), rows) for panel in line]


@pytest.fixture(scope="module")
def page(rows, panels):
    return report.page(rows, panels, FACTS)


class Elements(HTMLParser):
    """Collects start tags; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_needs_nothing_from_elsewhere(page):
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", page)
    for tag, attributes in Elements(page).seen:
        assert tag not in ("script", "link", "iframe")
        source = attributes.get("src", "data:") or ""
        assert source.startswith("data:")


def test_every_panel_is_in_the_page(page, panels):
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == len(panels) == 6
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)


def test_page_holds_table_findings_settings_and_caveats(page, rows):
    text = html.unescape(page)
    for row in rows:
        assert "".join(f"<td>{cell}</td>" for cell in table.cells(row)) in text
    for sentence in [*findings(rows), *report.CAVEATS, *table.MEANINGS.values()]:
        assert sentence in text
    assert "<dt>digits: num steps</dt><dd>40</dd>" in page
    assert "<dt>seeds</dt><dd>3, 4</dd>" in page
    assert "<dt>commit</dt><dd>unknown</dd>" in page


def test_what_the_user_typed_is_escaped(page):
    assert "<here>" not in page
    assert "kondo demo --out &lt;here&gt;" in page


def test_only_an_interrupted_run_is_called_so(page, rows, panels):
    assert "Interrupted" not in page
    cut = report.page(rows, panels[:1], FACTS | {"interrupted": True})
    assert "Interrupted: digits after 40 steps, reversal after 40 steps." in cut
