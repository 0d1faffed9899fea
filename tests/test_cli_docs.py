"""docs/how-to/command-line.md names every command, key of JSON and environment variable."""

import argparse
import re
from pathlib import Path

import pytest

from kondo import cli
from kondo.actors import Summary
from kondo.actors.command import as_dict as actors_dict
from kondo.engine.planner import PlannedRate

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/command-line.md").read_text()


def section(command):
    """Return the text on the JSON of a command."""
    return re.split(r"\n\*\*|\n## ", PAGE.split(f"**`kondo {command} --json`**")[1])[0]


def commands():
    parser = cli.make_parser()
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices


def test_every_command_is_in_the_table():
    assert set(re.findall(r"^\| `kondo (\w+)", PAGE, flags=re.M)) == set(commands())


def test_every_environment_variable_is_in_the_table():
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "lab/src").rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"KONDO_[A-Z]+", path.read_text())}
    assert {"KONDO_MNIST", "KONDO_TRACEBACK"} <= used
    assert {name for name in used if f"| `{name}` |" not in PAGE} == set()


def test_every_key_of_actors_is_documented():
    keys = actors_dict(Summary(*[None] * len(Summary._fields)), "digits", False)
    assert [key for key in keys if f"`{key}`" not in section("actors run")] == []


def test_every_key_of_a_planned_rate_is_documented():
    fields = PlannedRate.__dataclass_fields__
    assert [name for name in fields if f"`{name}`" not in section("plan")] == []


@pytest.mark.parametrize("command", ["list", "run", "plot", "plan"])
def test_commands_that_take_json_are_named(command):
    assert "--json" in commands()[command]._option_string_actions
    assert f"`kondo {command} --json`" in PAGE


def test_keys_of_a_run_are_documented():
    from kondo_lab.evidence.study import Claim, Headline

    text = section("plot")  # the tables of run and plot are one
    keys = ("study", "status", "folder", "seconds", "notes", "claims", "headline", "findings")
    wanted = [*keys, "written", "seeds", "command", "device", "size", *Claim._fields]
    assert [key for key in (*wanted, *Headline._fields) if f"`{key}`" not in text] == []
