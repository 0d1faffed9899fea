"""Planted faults fit the code, the runner tells what becomes of them, and every one is killed."""

import ast
import dataclasses
from collections import Counter

import pytest

from mutants import runner
from mutants.table import Mutant, read

ROOT = runner.here().root
MUTANTS = read()
# Area -> where its files are, and the fewest faults it may have.
AREAS = {
    "core-engine-lm": (
        (
            *("src/kondo/core/", "src/kondo/engine/", "src/kondo/lm/"),
            *("src/kondo/arguments.py", "src/kondo/rows.py", "src/kondo/stage_clock.py"),
        ),
        15,
    ),
    "ranks-and-actors": (("src/kondo/ranks/", "src/kondo/actors/"), 12),
    "integrations": (("src/kondo/integrations/",), 12),
    "attack": (("src/kondo/",), 31),
    "lab": (("lab/src/kondo_lab/", "src/kondo/cli/", "src/kondo/run_files.py"), 22),
}
LEAST = 70


def test_there_are_enough_of_every_area():
    names = Counter(mutant.name for mutant in MUTANTS)
    assert [name for name, number in names.items() if number > 1] == []
    assert len(MUTANTS) >= LEAST
    areas = Counter(mutant.area for mutant in MUTANTS)
    assert areas.keys() == AREAS.keys()
    for area, (_, least) in AREAS.items():
        assert areas[area] >= least, area


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_row_fits_the_code(mutant):
    assert mutant.file.startswith(AREAS[mutant.area][0])
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.text) == 1, "the code has changed: plant the fault where it is now"
    planted = ast.parse(source.replace(mutant.text, mutant.replacement))
    assert ast.dump(planted) != ast.dump(ast.parse(source))
    assert mutant.tests
    assert mutant.why
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert f"def {name}(" in (ROOT / file).read_text() or not name, test


@pytest.fixture
def quick(monkeypatch):
    """Leave out the plugins of this environment, which the tiny project does not need."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


TINY = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n",
    "src/tiny/__init__.py": "def area(width, height):\n    return width * height\n",
    "tests/test_area.py": (
        "import pytest\nimport tiny\n\n"
        "def test_literal():\n    assert tiny.area(2, 3) == 6\n\n"
        "def test_square():\n    assert tiny.area(2, 2) == 4\n\n"
        "@pytest.fixture\ndef six():\n    return tiny.area(2, 3)\n\n"
        "def test_fixture(six):\n    assert six\n\n"
        "def test_wrong():\n    assert tiny.area(2, 3) == 5\n\n"
        "@pytest.mark.skip\ndef test_skipped():\n    pass\n\n"
        "def test_endless():\n    while tiny.area(1, 1) != 1:\n        pass\n"
    ),
}


PLUS = Mutant(
    area="tiny",
    name="killed",
    file="src/tiny/__init__.py",
    text="width * height",
    replacement="width + height",
    tests=("tests/test_area.py::test_literal",),
    why="",
)


def other(name, test="literal", **changes):
    return dataclasses.replace(
        PLUS, name=name, tests=(f"tests/test_area.py::test_{test}",), **changes
    )


def tiny(folder, packages=("tiny",), *more):
    """Return a project of one function, with a mutant for each thing that can become of one."""
    for name, text in TINY.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    mutants = [
        PLUS,
        other("survived", "square"),
        other("text missing", text="width / height"),
        other("tests wrong", "wrong"),
        other("tests skipped", "skipped"),
        other("not collected", replacement="width *"),
        other("fixture", "fixture", replacement="1 / 0"),
        *more,
    ]
    return runner.Project(folder, packages, mutants)


@pytest.mark.usefixtures("quick")
def test_the_runner_tells_killed_survived_and_broken(tmp_path, capsys):
    project = tiny(tmp_path)
    assert runner.main([], project) == 1
    told = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert told[0] == "1 of 7 mutants killed"
    expected = [
        "survived: survived (src/tiny/__init__.py): passed: tests/test_area.py::test_square",
        "broken: text missing (src/tiny/__init__.py): its text occurs 0 times in "
        "src/tiny/__init__.py, expected once",
        "broken: tests wrong (src/tiny/__init__.py): its tests do not pass without it: "
        "tests/test_area.py::test_wrong",
        "broken: tests skipped (src/tiny/__init__.py): its tests do not pass without it: "
        "pytest ended with exit status 0",
        "broken: not collected (src/tiny/__init__.py): tests/test_area.py",
        "broken: fixture (src/tiny/__init__.py): tests/test_area.py::test_fixture",
    ]
    assert told[1:] == expected
    # Nothing was planted in the project itself.
    assert (tmp_path / "src/tiny/__init__.py").read_text() == TINY["src/tiny/__init__.py"]


@pytest.mark.usefixtures("quick")
def test_the_runner_is_content_where_all_are_killed(tmp_path, capsys):
    assert runner.main(["-k", "killed"], tiny(tmp_path)) == 0
    assert "1 of 1 mutants killed" in capsys.readouterr().out
    assert runner.main(["--list"], tiny(tmp_path)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7
    assert runner.main(["-k", "nothing has this"], tiny(tmp_path)) == 1


@pytest.mark.usefixtures("quick")
def test_the_runner_refuses_code_from_elsewhere(tmp_path):
    with pytest.raises(RuntimeError, match=r"json was imported from .* outside the copy"):
        runner.main(["-k", "killed"], tiny(tmp_path, packages=("json",)))


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_runner_does_not_wait_for_ever(tmp_path, capsys):
    project = tiny(tmp_path, ("tiny",), other("endless", "endless"))
    assert runner.main(["-k", "endless", "--timeout", "20"], project) == 1
    assert "broken: endless (src/tiny/__init__.py): time-out" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_every_mutant_is_killed(capsys):
    assert runner.main([]) == 0, capsys.readouterr().out
