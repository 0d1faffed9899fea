"""Plant each fault of the tables in a copy of the project, and run the tests that must fail.

    make mutants                        all; exit status 1 unless every one is killed
    make mutants MUTANTS='-k ranks'     those with "ranks" in their area, name or file
    make mutants MUTANTS='--list'       name them

A mutant is killed if its tests pass without it and one of them fails with it. It has survived if
they pass. Everything else is a broken row: a text that is not there, tests that fail anyway or
cannot be collected, a time-out.
"""

import argparse
import compileall
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from py_compile import PycInvalidationMode

from mutants import outcome, table
from mutants.table import Mutant

# What tests need of the project, where it is there.
_CONTENTS = (
    *("src", "lab", "tests", "benchmarks", "examples", "docs"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml"),
)
_SOURCES = ("src", "lab/src")
_FAILED = 1  # pytest's exit status where tests ran and some failed


@dataclasses.dataclass(frozen=True)
class Project:
    """What mutants are planted in."""

    root: Path
    packages: Sequence[str]
    """Must be imported from the copy."""
    mutants: Sequence[Mutant]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    state: str
    """killed, survived or broken."""
    reason: str
    seconds: float = 0.0


def here() -> Project:
    """Return this project with its tables."""
    return Project(Path(__file__).parents[2], ("kondo", "kondo_lab"), table.read())


def main(arguments: Sequence[str] | None = None, project: Project | None = None) -> int:
    """Run the mutants that the arguments ask for; return the exit status."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="in area, name or file")
    parser.add_argument("--jobs", type=int, default=2, help="at a time; default %(default)s")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of one mutant")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    asked = parser.parse_args(arguments)
    project = project or here()
    mutants = [m for m in project.mutants if asked.k in f"{m.area} {m.name} {m.file}"]
    if not mutants:
        print(f"no mutant has {asked.k!r} in its area, name or file")
        return 1
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.area:<14} {mutant.name:<50} {mutant.file}")
        return 0
    verdicts = run(dataclasses.replace(project, mutants=mutants), asked.jobs, asked.timeout)
    lost = [verdict for verdict in verdicts if verdict.state != "killed"]
    print(f"\n{len(verdicts) - len(lost)} of {len(verdicts)} mutants killed")
    for verdict in lost:
        print(f"{verdict.state}: {verdict.mutant.name} ({verdict.mutant.file}): {verdict.reason}")
    return 1 if lost else 0


def run(project: Project, jobs: int, timeout: float) -> list[Verdict]:
    """Return the verdicts on all mutants of a project, after printing each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        bench = _Bench(project, Path(scratch), jobs, timeout)
        with ThreadPoolExecutor(jobs) as pool:
            verdicts = []
            for verdict in pool.map(bench.judge, project.mutants):
                verdicts.append(verdict)
                mutant, seconds = verdict.mutant, verdict.seconds
                print(f"{verdict.state:<9} {seconds:5.1f} s  {mutant.area:<14} {mutant.name}")
                sys.stdout.flush()
    return verdicts


class _Bench:
    """A copy of the project as it is, and one more per mutant while its tests run."""

    def __init__(self, project: Project, scratch: Path, jobs: int, timeout: float):
        self._project, self._scratch, self._timeout = project, scratch, timeout
        self._sound = scratch / "sound"
        (scratch / "plugin").mkdir()
        shutil.copy(outcome.__file__, scratch / "plugin" / "mutant_outcome.py")
        self._sound.mkdir()
        for name in _CONTENTS:
            source, target = project.root / name, self._sound / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file():
                shutil.copy(source, target)
        # By hash: a planted fault may have the size and the second of what it replaces.
        for folder in filter(Path.is_dir, (self._sound / name for name in _SOURCES)):
            by_hash = PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(folder, quiet=1, invalidation_mode=by_hash)
        self._faulty = self._without_mutants(jobs)

    def _without_mutants(self, jobs: int) -> dict[Sequence[str], str]:
        """Return what is wrong with tests that do not pass without a mutant, by tests."""
        sets = list(dict.fromkeys(tuple(mutant.tests) for mutant in self._project.mutants))
        every = list(dict.fromkeys(test for tests in sets for test in tests))
        # All in one process, which is fast; one by one only to name what fails.
        many = self._timeout * len(every)
        if not self._complaint(self._sound, every, many):
            return {}
        with ThreadPoolExecutor(jobs) as pool:
            found = pool.map(lambda tests: self._complaint(self._sound, tests, self._timeout), sets)
            return {tests: text for tests, text in zip(sets, found, strict=True) if text}

    def _complaint(self, copy: Path, tests: Sequence[str], timeout: float) -> str:
        """Return why tests that should pass do not; an empty text if they do."""
        status, seen = self._pytest(copy, tests, timeout)
        if status == 0 and seen["passed"]:
            return ""
        bad = ", ".join(seen.get("failed", []) + seen.get("errors", []))
        return f"its tests do not pass without it: {bad or _status_in_words(status)}"

    def judge(self, mutant: Mutant) -> Verdict:
        """Plant one mutant, and run its tests."""
        started = time.monotonic()
        if faulty := self._faulty.get(tuple(mutant.tests)):
            return Verdict(mutant, "broken", faulty)
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(self._sound, copy)
            try:
                mutant.plant(copy)
            except ValueError as error:
                return Verdict(mutant, "broken", str(error))
            status, seen = self._pytest(copy, mutant.tests, self._timeout)
        seconds = time.monotonic() - started
        if status == 0:
            return Verdict(mutant, "survived", f"passed: {', '.join(mutant.tests)}", seconds)
        if status == _FAILED and seen["failed"]:
            return Verdict(mutant, "killed", f"by {seen['failed'][0]}", seconds)
        errors = ", ".join(seen.get("errors", []))
        return Verdict(mutant, "broken", errors or _status_in_words(status), seconds)

    def _pytest(
        self, copy: Path, tests: Sequence[str], timeout: float
    ) -> tuple[int | None, dict[str, list[str]]]:
        """Run tests in a copy; return pytest's exit status, None after a time-out, and what ran."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            said = Path(folder) / "outcome.json"
            environment = os.environ | {
                "CI": "1",  # the same random cases every time
                "MUTANTS_OUTCOME": str(said),
                "MUTANTS_PACKAGES": ",".join(self._project.packages),
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.pathsep.join(
                    str(path) for path in (*(copy / s for s in _SOURCES), self._scratch / "plugin")
                ),
            }
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "mutant_outcome"]
            process = subprocess.Popen(
                [*command, "-p", "no:cacheprovider", *tests],
                cwd=copy,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None, {}
            finally:
                _end(process)
            if not said.exists():
                return status, {}
            seen = json.loads(said.read_text())
        for package, origin in seen["origins"].items():
            if not Path(origin).resolve().is_relative_to(copy.resolve()):
                raise RuntimeError(f"{package} was imported from {origin}, outside the copy {copy}")
        return status, seen


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _status_in_words(status: int | None) -> str:
    return "time-out" if status is None else f"pytest ended with exit status {status}"


if __name__ == "__main__":
    sys.exit(main())
