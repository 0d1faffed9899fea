"""What holds for every example: short, says what to expect, listed in the folder's README."""

import ast
import re

import pytest

from examples.scripts import EXAMPLES

SCRIPTS = sorted(EXAMPLES.glob("*.py"))
README = EXAMPLES / "README.md"
# A module that axolotl imports; its config beside it has the comments.
IMPORTED = {"axolotl_kondo.py"}


def rows():
    """The rows of the table of the README: by file, the cells."""
    lines = [line for line in README.read_text().splitlines() if line.startswith("| [")]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: row for row in cells for name in re.findall(r"\]\((.*?)\)", row[0])}


def docstring(script):
    return ast.get_docstring(ast.parse(script.read_text())) or ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_short_and_listed(script):
    assert len(script.read_text().splitlines()) < 150
    assert script.name in rows()


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.name not in IMPORTED], ids=lambda path: path.name
)
def test_the_first_lines_say_how_to_run_it_and_what_to_expect(script):
    text = docstring(script)
    _, _, install, command, _, _ = rows()[script.name]
    assert f"Install, in a checkout:  {install.strip('`')}" in text
    assert command.strip("`") in text
    assert re.search(r"^Expect ", text, re.M)
    assert "other digits" in " ".join(text.split())
    # The output is the last thing, indented.
    assert text.splitlines()[-1].startswith("    ")
    assert '\nif __name__ == "__main__":\n    main()\n' in script.read_text()


def test_the_table_lists_what_is_there():
    assert set(rows()) == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {
        README.name
    }


def test_links_of_the_table_resolve():
    for target in re.findall(r"\]\(([^)#]*)", README.read_text()):
        assert (EXAMPLES / target).exists(), target
