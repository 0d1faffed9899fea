"""What a hosted repository shows and runs: badges that are true, a workflow of the two commands."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import kondo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def badge(name: str) -> str:
    text = (ROOT / "docs" / "assets" / "badges" / f"{name}.svg").read_text()
    return re.search(r"<title>(.*)</title>", text)[1]


def test_badges_say_what_the_project_declares():
    declared = PROJECT["project"]
    versions = [
        line.rpartition(" ")[2]
        for line in declared["classifiers"]
        if re.search(r"Python :: 3\.\d+", line)
    ]
    assert badge("license") == f"license: {declared['license']}"
    assert badge("python") == f"python: {' | '.join(versions)}"
    assert "Typing :: Typed" in declared["classifiers"]
    assert PROJECT["tool"]["mypy"]["strict"]
    assert badge("typed") == "typed: mypy strict"


def test_the_readme_shows_badges_from_the_repository_alone():
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", text)
    assert {Path(path).stem for path in shown} == {"license", "python", "typed"}
    assert not [path for path in shown if "://" in path]


def test_the_readme_is_short_and_cites_this_version():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120  # two screens
    assert f"version={{{kondo.__version__}}}" in text
    for name in ("2603.14608", "2603.20526", "2603.20521"):
        assert f"arXiv:{name}" in text


@pytest.fixture(scope="module")
def steps():
    """The commands of the hosted workflow."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    return [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]


def test_the_workflow_runs_the_two_commands_of_the_readme(steps):
    assert steps == ["make test", "make demo"]
    told = (ROOT / "README.md").read_text()
    assert all(step in told for step in steps)
    called = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make" in line]
    assert called == ["make test"]
