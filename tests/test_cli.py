import builtins
import importlib.metadata
import json
import re
import signal
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
    assert "demo" in text
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
        (["demo", "--seed", "-1"], "--seed: must be a whole number >= 0, got '-1'"),
        (["demo", "--seed", "two"], "--seed: must be a whole number >= 0, got 'two'"),
        (["demo", "--qui"], "unrecognized arguments: --qui"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_demo_writes_where_told_and_never_over_old_results(tmp_path, capsys):
    out = tmp_path / "demo"
    assert cli.main(["demo", "--quick", "--out", str(out), "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert f"wrote {out}/report.html" in text
    assert "numbers mean nothing" in text
    assert "already holds results" not in text
    manifest = (out / "manifest.json").read_text()
    assert json.loads(manifest)["seeds"] == [3]
    assert json.loads(manifest)["command"] == f"kondo demo --quick --out {out} --seed 3"

    assert cli.main(["demo", "--quick", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"already holds results; writing to {out}-2" in text
    assert (out / "manifest.json").read_text() == manifest
    assert json.loads((tmp_path / "demo-2" / "manifest.json").read_text())["seeds"] == [0]


def test_an_unusable_folder_is_an_error_before_any_training(tmp_path, capsys):
    (tmp_path / "demo").write_text("a file")
    assert cli.main(["demo", "--out", str(tmp_path / "demo")]) == 1
    assert "kondo demo: cannot write to" in capsys.readouterr().err


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
    assert f"kondo demo: {package} is not installed. Run: pip install 'kondo[lab]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo").exists()


def test_every_package_of_the_lab_is_known_to_the_command():
    required = [r for r in importlib.metadata.requires("kondo") if "lab" in r.partition(";")[2]]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in required}
    assert names == {"numpy", "matplotlib", "scikit-learn", "rich"}
    modules = {name.replace("scikit-learn", "sklearn") for name in names}
    assert {cli._EXTRAS.get(module) for module in modules} == {"lab"}


def test_a_module_that_no_extra_brings_is_a_plain_error(monkeypatch):
    real = builtins.__import__

    def broken(name, *rest):
        if name == "kondo.lab":
            raise ModuleNotFoundError("No module named 'strange'", name="strange")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ModuleNotFoundError, match="strange"):
        cli.main(["demo", "--quick"])


@pytest.fixture
def interrupted(monkeypatch):
    """Let the demo end as if Ctrl-C had been pressed."""
    from kondo.lab import demo

    def install(outcome):
        def run_demo(settings, **where):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(demo, "run_demo", run_demo)

    return install


def test_ctrl_c_with_results_says_so(tmp_path, capsys, interrupted):
    from kondo.lab.demo import Outcome

    interrupted(Outcome(["a row"], True))
    assert cli.main(["demo", "--out", str(tmp_path / "demo")]) == 128 + signal.SIGINT
    assert "Interrupted: this is the part" in capsys.readouterr().out
    assert (tmp_path / "demo").exists()


def test_ctrl_c_without_results_leaves_no_folder(tmp_path, capsys, interrupted):
    from kondo.lab.demo import Outcome

    interrupted(Outcome([], True))
    assert cli.main(["demo", "--out", str(tmp_path / "demo")]) == 128 + signal.SIGINT
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "demo").exists()


def test_a_second_ctrl_c_ends_without_a_traceback(tmp_path, capsys, interrupted):
    interrupted(KeyboardInterrupt())
    assert cli.main(["demo", "--out", str(tmp_path / "demo")]) == 128 + signal.SIGINT
    assert "kondo demo: interrupted." in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
