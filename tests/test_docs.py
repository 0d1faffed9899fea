"""The documents tell the truth: code runs, links lead somewhere, every name is there."""

import re
from pathlib import Path

import pytest

import kondo

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)


def name(path):
    return str(path.relative_to(ROOT))


def python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("path", [p for p in PAGES if python_blocks(p)], ids=name)
def test_code_runs(path):
    """All Python blocks of a page, one after another, as a reader would type them."""
    code = "\n".join(python_blocks(path))
    exec(compile(code, name(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_resolve(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if not re.match(r"https?://", target):
            assert (path.parent / target).exists(), f"{name(path)} links to {target}"


def test_every_public_name_is_documented():
    text = (ROOT / "docs/api.md").read_text()
    missing = [symbol for symbol in kondo.__all__ if f"kondo.{symbol}" not in text]
    assert missing == []


def test_every_function_of_the_public_modules_is_documented():
    text = (ROOT / "docs/api.md").read_text()
    for module in (kondo.advantage, kondo.priorities, kondo.losses):
        own = [
            symbol
            for symbol, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and symbol[0] != "_"
        ]
        assert own
        assert [symbol for symbol in own if f"`{symbol}`" not in text] == []


def test_the_citation_names_the_three_papers():
    text = (ROOT / "CITATION.cff").read_text()
    assert all(paper in text for paper in ("2603.20526", "2603.14608", "2603.20521"))
