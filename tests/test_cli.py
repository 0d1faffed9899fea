import builtins
import importlib.metadata
import re
import subprocess
import sys

import pytest

import kondo
from kondo import cli


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kondo {kondo.__version__}\n"


def test_help_lists_the_commands(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("demo", "list", "run", "plot", "report"))
    assert "train PG, DG and DG-K side by side" in text


def test_help_of_demo_explains_its_options(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--out DIR", "--seed N", "--quick", "kondo-demo", "(3%)"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--seed", "-1"], "must be a whole number from 0 to 4294967295, got '-1'"),
        (["demo", "--seed", "two"], "must be a whole number from 0 to 4294967295, got 'two'"),
        (["demo", "--qui"], "unrecognized arguments: --qui"),
        (["run"], "the following arguments are required: STUDY"),
        (["run", "toy", "--seeds", "0"], "must be a whole number from 1 to 10000, got '0'"),
        (["run", "toy", "--seeds", "-2"], "must be a whole number from 1 to 10000, got '-2'"),
        (["run", "toy", "--seeds", "9" * 20], "--seeds: must be a whole number from 1 to 10000"),
        (["run", "toy", "--seeds", "9" * 5000], "--seeds: must be a whole number from 1 to 10000"),
        (["demo", "--seed", "9" * 20], "--seed: must be a whole number from 0 to 4294967295"),
        (["run", "toy", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["plot"], "the following arguments are required: STUDY"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("package", ["sklearn", "rich"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package, tmp_path):
    # In a process of its own: here everything has been imported already.
    code = f"""
import sys
sys.modules[{package!r}] = None
from kondo import cli
sys.exit(cli.main(["demo", "--quick", "--out", {str(tmp_path / "demo")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"kondo demo: {package} is not installed. Run: pip install 'kondo-lab'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo").exists()


def test_every_package_of_the_lab_is_known_to_the_command():
    required = [r for r in importlib.metadata.requires("kondo-lab") if "extra ==" not in r]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in required} - {"kondo"}
    assert names == {"numpy", "pandas", "matplotlib", "scikit-learn", "rich"}
    modules = {name.replace("scikit-learn", "sklearn") for name in names}
    assert {cli._INSTALLS.get(module) for module in modules} == {"kondo-lab"}


def test_a_command_of_the_laboratory_says_what_to_install_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    assert cli.main(["run", "mnist-kondo", "--small"]) == 1
    assert "kondo run: this command comes with another package" in (err := capsys.readouterr().err)
    assert "pip install kondo-lab" in err


def test_a_module_that_no_extra_brings_is_a_plain_error(monkeypatch):
    real = builtins.__import__

    def broken(name, *rest):
        if name == "kondo_lab.studies":
            raise ModuleNotFoundError("No module named 'strange'", name="strange")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ModuleNotFoundError, match="strange"):
        cli.main(["demo", "--quick"])
