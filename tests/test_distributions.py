"""What is installed: the library alone, without a study, and code of a size that can be read."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kondo

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "lab" / "src").rglob("*.py")])
MOST_PARAMETERS = 12
MOST_LINES = 80
MOST_KILOBYTES = 400


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A copy of what git knows of both distributions."""
    copy = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to it is not known")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and (name.startswith(("src/", "lab/")) or "/" not in name):
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return copy


def run(*command: str | Path, **options) -> str:
    """Run a command, and return what it prints; its errors are the test's."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def built(source, tmp_path_factory) -> Path:
    """A folder with the source distribution and the wheel of both, built as a release is."""
    folder = tmp_path_factory.mktemp("built")
    for project in (source, source / "lab"):
        command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, project)
        run(*command)
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_library_holds_no_study_and_is_small(built):
    wheel = only(built, "kondo-*.whl")
    assert wheel.stat().st_size < MOST_KILOBYTES * 1024
    names = zipfile.ZipFile(wheel).namelist()
    assert "kondo/engine/step.py" in names
    assert "kondo/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kondo", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [name for name in names if "lab" in name or "stud" in name]


def test_the_laboratory_brings_what_its_page_is_made_of(built):
    names = zipfile.ZipFile(only(built, "kondo_lab-*.whl")).namelist()
    assert "kondo_lab/evidence/assets/claims.json" in names
    assert {name.split("/")[0] for name in names if "/" in name} == {
        "kondo_lab",
        f"kondo_lab-{kondo.__version__}.dist-info",
    }


def test_both_distributions_have_the_one_version(built):
    names = sorted(path.name for path in built.iterdir())
    version = kondo.__version__
    assert names == sorted(
        f"{name}-{version}{end}"
        for name in ("kondo", "kondo_lab")
        for end in (".tar.gz", "-py3-none-any.whl")
    )
    wheel = zipfile.ZipFile(only(built, "kondo_lab-*.whl"))
    metadata = wheel.read(f"kondo_lab-{version}.dist-info/METADATA").decode()
    assert f"Requires-Dist: kondo=={version}" in metadata.splitlines()


def test_the_version_is_written_once():
    literal = re.compile(rf'"[=]*{re.escape(kondo.__version__)}"')
    places = [*SOURCES, *(ROOT / name for name in ("pyproject.toml", "lab/pyproject.toml"))]
    found = [path.relative_to(ROOT) for path in places if literal.search(path.read_text())]
    assert found == [Path("src/kondo/__init__.py")]


def test_a_registry_would_take_them(built):
    told = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))
    assert told.count("PASSED") == 4


def test_the_wheels_run_where_nothing_else_of_ours_is(built, tmp_path):
    """Installed into an empty folder, beside the dependencies of this environment."""
    target, wheels = tmp_path / "installed", sorted(built.glob("*.whl"))
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", target, *wheels)
    environment = os.environ | {"PYTHONPATH": str(target)}
    code = "import kondo, kondo_lab; print(kondo.__file__, kondo_lab.__file__)"
    places = run(sys.executable, "-P", "-c", code, env=environment, cwd=tmp_path).split()
    assert all(Path(place).is_relative_to(target) for place in places)
    called = (sys.executable, "-P", "-m", "kondo", "list")
    assert "mnist-kondo" in run(*called, env=environment, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheels_install_and_run_in_a_clean_environment(built, tmp_path):
    """Everything from the registry, as a stranger installs it; the demo then runs."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (torch_pin,) = [pin for pin in pins if pin.startswith("torch==")]
    pip = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(*pip, torch_pin, env=clean)
    run(*pip, *sorted(built.glob("*.whl")), env=clean)
    kondo_command = tmp_path / "venv" / "bin" / "kondo"
    told = run(kondo_command, "demo", "--quick", env=clean, cwd=tmp_path)
    assert "DG-K" in told
    assert (tmp_path / "kondo-demo" / "report.html").exists()


def test_the_library_does_not_name_the_laboratory():
    naming = [path for path in (ROOT / "src").rglob("*.py") if "kondo_lab" in path.read_text()]
    assert naming == []


def functions(path: Path):
    """Yield a file's functions; kernels, whose parameters are pointers and strides, are none."""
    for node in ast.walk(ast.parse(path.read_text())):
        kernel = any("triton" in ast.unparse(d) for d in getattr(node, "decorator_list", ()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not kernel:
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_can_be_read(path):
    for node in functions(path):
        given = node.args
        names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        own = [name for name in names if name not in ("self", "cls")]
        assert len(own) <= MOST_PARAMETERS, f"{node.name} takes {len(own)} parameters"
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        lines = node.end_lineno - node.lineno + 1
        lines -= first.end_lineno - first.lineno + 1 if documented else 0
        assert lines < MOST_LINES, f"{node.name} has {lines} lines"
