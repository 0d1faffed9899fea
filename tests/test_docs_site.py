"""The docs site builds strictly, needs no network, and breaks on broken links."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import kondo

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROMPT = '<span class="gp">&gt;&gt;&gt; </span>'
# What gates, plan() and select() return, whose examples show them; a protocol and a literal.
# Those of `kondo.check` stand in its own docstring.
WITHOUT_EXAMPLE = ("CheckError", "CheckWarning", "Choice", "Plan", "Selection", "Group", "Unit")
# Modules in the API; those of the second line are parts of others, without an example each.
MODULES = ("advantage", "losses", "signals")
PARTS = ("adapters", "quantiles", "ratios", "rows", "sampling")
PACKAGES = ("actors", "lm", "ranks")
PAGES = (
    *("index", "get-started/rl-loop", "get-started/trl", "get-started/language-model"),
    *("concepts/delight", "concepts/gates", "concepts/screen", "concepts/cost"),
    *("concepts/which-gate", "how-to/ppo", "how-to/continuous-actions", "how-to/checkpoints"),
    *("how-to/accelerate-fabric", "how-to/ddp-fsdp2", "integrations/trl", "api/index"),
    *("results/papers", "results/performance", "results/studies/lm-rl", "faq", "changelog"),
)


def build(folder, site):
    """Build strictly, in a process of its own: MkDocs and its plugins keep global state."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, str(folder))
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """What a built page links to, loads and defines."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag != "a":
            found = [given[name] for name in ("src", "href", "data", "poster") if name in given]
            self.loads += [address for address in found if address]


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_there(site, page):
    text = (site / f"{page}.html").read_text()
    assert "<h1" in text
    assert 'class="md-nav' in text


def test_the_changelog_is_the_repositorys(site):
    assert f'id="{kondo.__version__.replace(".", "")}' in (site / "changelog.html").read_text()


def test_search_works_without_a_server(site):
    index = json.loads((site / "search/search_index.json").read_text())
    places = {part["location"].partition("#")[0] for part in index["docs"]}
    assert {f"{page}.html" for page in PAGES} <= places
    # Code is shown, and not searched; the pages about it are.
    of_examples = {place for place in places if place.startswith("repository/examples")}
    assert of_examples == {"repository/examples.html", "repository/examples/README.html"}
    assert (site / "search/search_index.js").read_text().startswith("var __index = {")


def test_every_public_name_is_in_the_api_with_its_signature_and_example(site):
    text = (site / "api/kondo.html").read_text()
    for name in set(kondo.__all__) - {*MODULES, *PARTS, *PACKAGES}:
        assert f'<h2 id="kondo.{name}"' in text, name
        place = text.split(f'<h2 id="kondo.{name}"')[1].split("<h2 ")[0]
        warning = getattr(kondo, name) is kondo.CheckWarning  # its signature is Python's
        assert "doc-signature" in place or warning, name
        assert PROMPT in place or name in WITHOUT_EXAMPLE, name
    assert "temperature" in text.split('<h2 id="kondo.Gate"')[1].split("<h3 ")[0]
    for name in (*MODULES, *PARTS):
        place = name if name in MODULES else "parts"
        module, page = getattr(kondo, name), (site / f"api/{place}.html").read_text()
        own = [
            symbol
            for symbol, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__.startswith(module.__name__)
            and symbol[0] != "_"
        ]
        assert own
        assert [symbol for symbol in own if f'id="kondo.{name}.{symbol}"' not in page] == []
        assert name in PARTS or page.count(PROMPT) >= len(own)
    for module in (kondo.lm, kondo.ranks, kondo.actors):
        page = (site / f"api/{module.__name__.partition('.')[2]}.html").read_text()
        names = [f"{module.__name__}.{symbol}" for symbol in module.__all__]
        assert [name for name in names if f'id="{name}"' not in page] == []


def test_names_in_the_text_link_to_the_api(site):
    text = (site / "faq.html").read_text()
    link = 'href="api/kondo.html#kondo.UnbiasedGate"><code>kondo.UnbiasedGate(rate=0.1)</code></a>'
    assert link in text


def test_no_page_loads_anything_from_the_network(site, pages):
    for path, page in pages.items():
        outside = [address for address in page.loads if urlsplit(address).netloc]
        assert outside == [], path
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text()
        assert "@import" not in style.read_text()


def test_every_link_of_the_built_site_leads_somewhere(site, pages):
    """Independent of MkDocs: what a browser would find."""
    for path, page in pages.items():
        for address in page.links + page.loads:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.relative_to(site)}: {address}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                found = unquote(parts.fragment) in pages[target].ids
                assert found, f"{path.relative_to(site)}: {address}"


@pytest.fixture
def small(tmp_path):
    """A repository with this one's configuration and hook, and two pages."""
    settings = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[0]
    nav = "\nnav: [index.md, guide/page.md, ../CHANGELOG.md]\n"
    (tmp_path / "mkdocs.yml").write_text(settings + nav)
    shutil.copy(ROOT / "docs_hooks.py", tmp_path)
    shutil.copytree(ROOT / "docs/assets", tmp_path / "docs/assets")
    (tmp_path / "src").mkdir()
    (tmp_path / "docs/guide").mkdir()
    (tmp_path / "docs/index.md").write_text("# Home\n\n[page](guide/page.md#part)\n")
    (tmp_path / "docs/guide/page.md").write_text("# Page\n\n## Part\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n[part](docs/guide/page.md#part)\n")
    return tmp_path


def test_links_out_of_docs_work_in_the_site(small):
    files = {
        "examples/run.py": '"""Print a word.\n\nMore."""\n\nprint("joy")\n',
        "tools/README.md": "# Tools\n\n[run](../examples/run.py) [p](../docs/guide/page.md#part)",
        "results/a/table.csv": "a,b\n",
        "results/a/notes.json": "{}",
        "results/a/large.bin": "x" * 1_000_001,
        "results/b/figure.png": "not really",
        "NOTES.md": "# Notes\n\n## Deep\n\n[back](docs/guide/page.md#part) [run](examples/run.py)",
    }
    for name, text in files.items():
        (small / name).parent.mkdir(parents=True, exist_ok=True)
        (small / name).write_text(text)
    (small / "docs/guide/page.md").write_text(
        "# Page\n\n## Part\n\n[run](../../examples/run.py) [all](../../results/a)\n"
        "[examples](../../examples) [tools](../../tools) ![figure](../../results/b/figure.png)\n"
        "[notes](../../NOTES.md#deep)\n"
    )
    done = build(small, "site")
    assert done.returncode == 0, done.stderr
    site = small / "site"
    page = Page(site / "guide/page.html")
    for address in ("examples/run.py.html", "results/a.html", "NOTES.html#deep"):
        assert f"../repository/{address}" in page.links
    assert "../repository/results/b/figure.png" in page.loads
    assert (site / "repository/results/b/figure.png").read_text() == "not really"
    assert "joy" in (site / "repository/examples/run.py.html").read_text()
    listing = Page(site / "repository/results/a.html")
    assert {"a/table.csv", "a/notes.json.html"} <= set(listing.links)
    assert "large.bin" in (site / "repository/results/a.html").read_text()
    assert not (site / "repository/results/a/large.bin").exists()
    assert "<td>Print a word.</td>" in (site / "repository/examples.html").read_text()
    tools = Page(site / "repository/tools.html")
    assert {"examples/run.py.html", "../guide/page.html#part"} <= set(tools.links)
    notes = Page(site / "repository/NOTES.html")
    assert {"../guide/page.html#part", "examples/run.py.html"} <= set(notes.links)
    assert "guide/page.html#part" in Page(site / "changelog.html").links


def test_what_is_broken_fails_the_build(small):
    """All at once, since a build takes seconds: every defect is a warning of its own."""
    links = ("gone.md", "#gone", "../../examples/gone.py", "../../gone", "../../CHANGELOG.md#gone")
    text = "".join(f"[gone]({link})\n\n" for link in links)
    (small / "docs/guide/page.md").write_text(f"# Page\n\n## Part\n\n{text}")
    (small / "docs/guide/other.md").write_text("# Not in the navigation\n")
    (small / "CHANGELOG.md").write_text("# Changelog\n\n[gone](docs/lost.md)\n")
    done = build(small, "site")
    assert done.returncode != 0
    assert "Aborted with 7 warnings in strict mode" in done.stdout + done.stderr
    for link in (*(f"'{link}'" for link in links), "guide/other.md", "'/lost.md'"):
        assert link in done.stderr


def notebook(text):
    cells = [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": text}]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_a_notebook_is_a_page_with_links_and_without_a_network(small):
    settings = small / "mkdocs.yml"
    settings.write_text(
        settings.read_text().replace("guide/page.md,", "guide/page.md, hour.ipynb,")
    )
    source = small / "docs/hour.ipynb"
    source.write_text(notebook("# Hour\n\n[part](guide/page.md#part) [log](../CHANGELOG.md)"))
    done = build(small, "site")
    assert done.returncode == 0, done.stderr
    page = Page(small / "site/hour.html")
    assert {"guide/page.html#part", "changelog.html"} <= set(page.links)
    assert [address for address in page.loads if urlsplit(address).netloc] == []

    source.write_text(notebook("# Hour\n\n[gone](guide/gone.md)"))
    done = build(small, "site")
    assert done.returncode != 0
    assert "guide/gone.md" in done.stderr


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed here")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 1440])
def test_pages_fit_the_screen_and_ask_the_network_for_nothing(site, browser, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    view, asked = context.new_page(), []
    view.on("request", lambda request: asked.append(request.url))
    for page in ("index", "concepts/gates", "api/kondo", "results/performance", "changelog"):
        view.goto((site / f"{page}.html").as_uri())
        assert view.evaluate("document.documentElement.scrollWidth") <= width, page
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []
    context.close()


def test_search_and_the_dark_mode_work_from_the_file_system(site, browser):
    context = browser.new_context(color_scheme="light", viewport={"width": 1440, "height": 900})
    view = context.new_page()
    view.goto((site / "index.html").as_uri())
    assert view.get_attribute("body", "data-md-color-scheme") == "default"
    view.click("label[title='Switch to dark mode']")
    view.wait_for_selector("body[data-md-color-scheme=slate]")
    view.click("input[name=query]")
    view.keyboard.type("UnbiasedGate")
    view.wait_for_selector(".md-search-result__item a")
    found = view.eval_on_selector_all(".md-search-result__item a", "all => all.map(a => a.href)")
    assert any("api/kondo.html" in address for address in found)
    context.close()
