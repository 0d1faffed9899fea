"""What is installed: the library alone, without a study, and code of a size that can be read."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "lab" / "src").rglob("*.py")])
MOST_PARAMETERS = 12
MOST_LINES = 80
MOST_KILOBYTES = 400


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The library's wheel, built from a copy of what git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
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
        if path.is_file() and (name.startswith("src/") or "/" not in name):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_library_holds_no_study_and_is_small(wheel):
    assert wheel.stat().st_size < MOST_KILOBYTES * 1024
    names = zipfile.ZipFile(wheel).namelist()
    assert "kondo/engine/step.py" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kondo", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [name for name in names if "lab" in name or "stud" in name]


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
