import builtins
import contextlib
import errno
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import kondo
from kondo import cli

ROOT = Path(__file__).parents[1]


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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    lab = ROOT / "lab"
    assert f"kondo demo: {package} is not installed. Run: pip install {lab}\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo").exists()


def test_every_package_of_the_lab_is_known_to_the_command():
    required = [line for line in metadata.requires("kondo-lab") if "extra ==" not in line]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in required} - {"kondo"}
    called = {"scikit-learn": "sklearn", "pillow": "PIL"}
    modules = {called.get(name, name) for name in names}
    assert "pandas" in modules
    assert modules <= set(cli._INSTALLS)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {f"kondo[{extra}]" for extra in extras["optional-dependencies"]}
    assert set(cli._INSTALLS.values()) <= known | {"kondo-lab", "kondo-lab[control]"}


def test_a_command_of_the_laboratory_says_what_to_install_where_it_is_missing(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "mnist-kondo", "--small"]) == 1
    monkeypatch.chdir(ROOT)
    assert cli.main(["run", "mnist-kondo", "--small"]) == 1
    here = "kondo run: this command is part of kondo-lab. Run: pip install "
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{here}{ROOT / 'lab'}", f"{here}./lab"]


def test_a_module_that_no_extra_brings_is_a_plain_error(monkeypatch):
    real = builtins.__import__

    def broken(name, *rest):
        if name == "kondo_lab.studies":
            raise ModuleNotFoundError("No module named 'strange'", name="strange")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ModuleNotFoundError, match="strange"):
        cli.main(["demo", "--quick"])


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["run", "--help"]])
def test_help_and_version_start_without_torch(arguments):
    # torch takes more than a second to import, and so do pandas and matplotlib together.
    code = f"""
import sys
from kondo.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
slow = {{"torch", "numpy", "pandas", "matplotlib", "rich", "ray", "shtab"}} & set(sys.modules)
sys.exit(f"imported {{slow}}" if slow else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_python_m_kondo_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kondo", "run", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage: kondo run ")
    wrong = subprocess.run([sys.executable, "-m", "kondo", "dance"], capture_output=True, text=True)
    assert wrong.returncode == 2


def test_torch_without_numpy_is_imported_without_its_warning():
    # As in the base install. The warning comes from torch, at its import.
    code = """
import sys, warnings
sys.modules["numpy"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "numpy" else real(name, *more)
import kondo
kondo.Gate(rate=0.1)
warnings.warn("Failed to initialize NumPy: No module named 'numpy'", UserWarning)
warnings.warn("something else", UserWarning)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NumPy" not in done.stderr
    assert "something else" in done.stderr


def run_as(monkeypatch, error):
    """Run a command that raises `error`."""

    def add(commands):
        parser = commands.add_parser("fall")

        def fall(options):
            raise error

        parser.set_defaults(run=fall)

    class Point:
        name = "fall"

        def load(self):
            return add

    monkeypatch.setattr(cli, "entry_points", lambda group: [Point()])
    return cli.main(["fall"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (cli.CommandError("take\nanother"), "take another"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b: Permission denied."),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left on device."),
        (ModuleNotFoundError("no", name="gymnasium.envs"), "gymnasium is not installed. Run: pip"),
    ],
)
def test_an_expected_error_is_one_line(error, message, monkeypatch, capsys):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    assert run_as(monkeypatch, error) == 1
    text = capsys.readouterr().err
    assert text.startswith("kondo fall: ")
    assert message in text
    assert text.count("\n") == 1
    monkeypatch.setenv(cli.TRACEBACK, "1")
    with pytest.raises(type(error)):
        run_as(monkeypatch, error)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "none", "a"), ImportError("x")]
)
def test_an_error_of_the_program_has_its_traceback(error, monkeypatch):
    with pytest.raises(type(error)):
        run_as(monkeypatch, error)


def shell(line, **environment):
    """Run a line of bash in which KONDO is the command; return what came of it."""
    kondo = f"{shlex.quote(sys.executable)} -m kondo"
    return subprocess.run(
        ["bash", "-c", line.replace("KONDO", kondo)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("command", ["--help", "completion bash", "list", "list --json"])
def test_a_closed_pipe_ends_the_command_quietly_and_not_as_if_it_were_done(command):
    done = shell(f"KONDO {command} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "--version", "", "list", "completion bash"])
def test_output_that_cannot_be_written_is_an_error_in_one_line(command, unbuffered):
    done = shell(f"KONDO {command} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    told = r"kondo( \w+)?: cannot write standard output: No space left on device\.\n"
    assert re.fullmatch(told, done.stderr)


@pytest.mark.parametrize("command", ["--help", "--version", "list", "run mnist-kondo --small"])
def test_a_closed_output_is_refused_before_anything_is_done(command, tmp_path):
    done = shell(f"cd {tmp_path} && KONDO {command} >&-")
    assert done.returncode == 1
    assert done.stderr == ("kondo: standard output is closed. Send it to a file or to /dev/null.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("columns", ["0", "5", "-5", "abc", "²", "999999999", "9" * 5000])
@pytest.mark.parametrize("arguments", [["list"], ["--help"]])
def test_odd_columns_are_no_columns(columns, arguments, capsys, monkeypatch):
    def output():
        with contextlib.suppress(SystemExit):
            cli.main(arguments)
        return capsys.readouterr().out

    monkeypatch.delenv("COLUMNS", raising=False)
    usual = output()
    monkeypatch.setenv("COLUMNS", columns)
    assert output() == usual
    monkeypatch.setenv("COLUMNS", "66")
    assert output() != usual


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", LONG], f"no study is called '{LONG}'"),
        (["plot", LONG], f"no study is called '{LONG}'"),
        (["run", "demo", "--out", LONG], "File name too long. Mend that, or name another"),
        (["run", "demo", "--mnist", LONG], "File name too long"),
        (["demo", "--quick", "--out", LONG], "File name too long"),
        (["plot", "demo", "--from", LONG], "File name too long"),
        (["report", LONG], "File name too long"),
        (["plan", LONG], "File name too long"),
        (["plan", f"{LONG}:make"], "no module"),
        (["plan", ".here:make"], "MODEL must be MODULE:FUNCTION, got .here:make"),
        (["actors", "run", ".here:make"], "TASK must be MODULE:FUNCTION, got .here:make"),
    ],
)
def test_names_that_cannot_be_are_told_in_one_line(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"kondo {arguments[0]}: ")
    assert message in text
    assert text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "demo", "--out", ""],
        ["run", "demo", "--mnist", ""],
        ["demo", "--out", ""],
        ["plot", "demo", "--from", ""],
        ["report", ""],
        ["report", "--out", ""],
        ["actors", "run", "digits", "--checkpoint", ""],
    ],
)
def test_an_empty_name_is_not_the_current_folder(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "must name a file or a folder, got an empty text" in capsys.readouterr().err


class Installed:
    """A distribution that pip installed from an address; from an index if it is None."""

    def __init__(self, address):
        self.text = None if address is None else f'{{"url": "{address}", "dir_info": {{}}}}'

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.text


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Install the package elsewhere: into site-packages of `tmp_path`, from an address."""
    from kondo.cli import install_hints

    monkeypatch.chdir(tmp_path)
    here = tmp_path / "site-packages/kondo/cli/install_hints.py"
    monkeypatch.setattr(install_hints, "_HERE", here)

    def install(address):
        monkeypatch.setattr(install_hints, "distribution", lambda name: Installed(address))
        return install_hints.install_command

    return install


def test_hints_name_the_index_where_the_package_came_from_it(installed):
    command = installed(None)
    assert command("kondo-lab") == "pip install kondo-lab"
    assert command("kondo[ray]") == "pip install 'kondo[ray]'"


def test_hints_name_the_checkout_where_the_package_came_from_it(installed, tmp_path, monkeypatch):
    root = tmp_path / "my checkout"
    (root / "lab").mkdir(parents=True)
    for folder in (root, root / "lab"):
        (folder / "pyproject.toml").touch()
    command = installed(root.as_uri())
    assert command("kondo-lab") == "pip install './my checkout/lab'"
    monkeypatch.chdir(root)
    assert command("kondo-lab[control]") == "pip install './lab[control]'"
    assert command("kondo[ray]") == "pip install '.[ray]'"
    monkeypatch.chdir(root / "lab")
    assert command("kondo[ray]") == f"pip install '{root}[ray]'"


def test_hints_name_the_wheel_beside_the_one_that_was_installed(installed, tmp_path):
    (tmp_path / "dist").mkdir()
    wheels = [tmp_path / f"dist/{name}-0.2.0-py3-none-any.whl" for name in ("kondo", "kondo_lab")]
    wheels[0].touch()
    command = installed(wheels[0].as_uri())
    assert command("kondo-lab") == "pip install kondo-lab"  # it is not there
    wheels[1].touch()
    assert command("kondo-lab") == "pip install ./dist/kondo_lab-0.2.0-py3-none-any.whl"
    assert command("kondo[ray]") == "pip install './dist/kondo-0.2.0-py3-none-any.whl[ray]'"
