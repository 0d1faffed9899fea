"""Result folders of every kind that this project wrote, read as what `kondo run` writes now.

    manifest.json with "study"             `kondo run` and `kondo demo`: `result_folder.read`
    manifest.json with "rows"              `kondo demo` of version 0.1
    NAME.csv with NAME.manifest.json       benchmarks/bench_lm_step.py

The last two state no claim, and none is made up for them.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kondo.run_files import DamagedFileError
from kondo_lab.evidence import result_folder
from kondo_lab.evidence.result_folder import MANIFEST, Result
from kondo_lab.evidence.study import Estimate, Headline, headline

ROWS = "rows"
DEMO = "an older version of `kondo demo`"
BENCHMARK = "benchmarks/bench_lm_step.py"
_SUFFIX = ".manifest.json"
_COLUMNS = ("benchmark", "model", "config", "contender", "rate", "unit", "speedup_p50", "repeats")
NO_CLAIM = "This folder states no claim; its numbers are shown as they are."


def read(folder: Path) -> Result:
    """Return what `folder` holds, whichever program of this project wrote it.

    Raises:
        FolderError: it is no folder of results.
        DamagedFileError: a file in it is damaged; the message says which.
    """
    if (folder / MANIFEST).is_file():
        result_folder.check_files([folder / MANIFEST])
        manifest = result_folder.read_json(folder / MANIFEST)
        if "study" not in manifest and ROWS in manifest:
            return _demo(folder, manifest)
    elif _benchmarks(folder):
        return _benchmark(folder)
    return result_folder.read(folder)


def holds_results(folder: Path) -> bool:
    """Return whether `folder` looks like one that `read` can read, without reading all of it."""
    if all(os.path.lexists(folder / name) for name in (MANIFEST, result_folder.HEADLINE)):
        return True
    if (folder / MANIFEST).is_file():
        if not (folder / "curves.csv").is_file():
            return False
        try:
            return ROWS in result_folder.read_json(folder / MANIFEST)
        except DamagedFileError:
            return True  # whoever reads the folder says what is wrong
    return bool(_benchmarks(folder))


def _benchmarks(folder: Path) -> list[Path]:
    """Return the tables of a folder that have a manifest of their own."""
    found = sorted(folder.glob(f"*{_SUFFIX}"))
    tables = [path.with_name(path.name.removesuffix(_SUFFIX) + ".csv") for path in found]
    return [path for path in tables if path.is_file()]


def _result(
    folder: Path, older: str, lines: Sequence[Headline], facts: Mapping[str, Any]
) -> Result:
    figures = sorted(folder.glob("*.png"))
    result_folder.check_files(figures)
    empty: dict[str, Any] = {"differences": [], "findings": [], "claim": NO_CLAIM, "version": 1}
    return Result(
        name=folder.resolve().name,
        manifest=empty | {"size": "full", "interrupted": False, "seconds": math.nan} | dict(facts),
        headline=list(lines),
        frontier=[],
        claims=[],
        figures=figures,
        older=older,
    )


# The demo of version 0.1.


def _demo(folder: Path, manifest: Mapping[str, Any]) -> Result:
    path = folder / MANIFEST
    try:
        lines = [line for row in manifest[ROWS] for line in _demo_lines(row)]
        facts = {key: manifest[key] for key in ("command", "seconds", "settings", "environment")}
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DamagedFileError(
            f"folders: {path} is of an older `kondo demo` and damaged ({reason}). Leave the "
            "folder out or run the demo again."
        ) from error
    result_folder.check_manifest(path, facts, list(facts))
    return _result(
        folder,
        DEMO,
        lines,
        facts
        | {
            "study": "demo",
            "title": "Demo",
            "paper": "beyond the papers; their methods on two small tasks",
            "interrupted": bool(manifest.get("interrupted", False)),
            "findings": [
                f"{line.figure}: the learner of {line.series} is {line.ours:.2g} times faster than "
                "that of PG."
                for line in lines
                if line.metric == "learner speed-up"
            ],
            "device": manifest["environment"].get("device", "cpu"),
        },
    )


def _demo_lines(row: Mapping[str, Any]) -> list[Headline]:
    task, method, seeds = row["task"], row["method"], int(row["num_seeds"])
    found = {}
    for metric, key in (("final error", "error"), ("test error", "test_error")):
        if row[key] is not None:
            mean, se = row[key]
            found[metric] = Estimate(float(mean), float(se), seeds)
    if not row["dense"]:
        found["learner speed-up"] = Estimate(float(row["speed_up"]), math.nan, seeds)
        found["loop speed-up"] = Estimate(float(row["loop_speed_up"]), math.nan, seeds)
    found["backward passes"] = Estimate(float(row["backward_passes"]), math.nan, seeds)
    return [headline(task, method, metric, "", ours) for metric, ours in found.items()]


# The benchmark of one learner step.


def _benchmark(folder: Path) -> Result:
    tables = _benchmarks(folder)
    manifests = [path.with_name(path.stem + _SUFFIX) for path in tables]
    result_folder.check_files([*tables, *manifests])
    contents = [result_folder.read_json(path) for path in manifests]
    for path, content in zip(manifests, contents, strict=True):
        result_folder.check_manifest(path, content, ["settings", "environment"])
    lines = [line for path in tables for line in _step_lines(path)]
    return _result(
        folder,
        BENCHMARK,
        lines,
        {
            "study": re.sub(r"-v\d+$", "", folder.resolve().name),
            "title": "One learner step of a language model, timed",
            "paper": "beyond the papers",
            "command": [str(content.get("command", "")) for content in contents],
            "findings": [_fastest(lines)] if lines else [],
            "settings": {
                path.stem: content.get("settings", {})
                for path, content in zip(tables, contents, strict=True)
            },
            "environment": contents[0].get("environment", {}),
            "device": "cuda" if "NVIDIA" in str(contents[0].get("environment")) else "cpu",
        },
    )


def _fastest(lines: Sequence[Headline]) -> str:
    best = max(lines, key=lambda line: line.ours)
    return (
        f"The largest speed-up over dense is {best.ours:.3g} times: {best.figure}, {best.series}, "
        "p50 of the repeats. A step is the learner's, without generation; dense differentiates "
        "all rows. Rows are kept by highest delight, which we advise against for language models."
    )


def _step_lines(path: Path) -> list[Headline]:
    """Return the speed-up over dense of every contender that is gated."""
    columns, rows = result_folder.csv_lines(path)
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise DamagedFileError(
            f"folders: {path} lacks the columns {', '.join(missing)}; expected a table that "
            f"{BENCHMARK} wrote. Run the benchmark again."
        )
    made = []
    for where, row in rows:
        try:
            rate, speed_up = float(row["rate"]), float(row["speedup_p50"])
            seeds = int(row["repeats"])
        except (TypeError, ValueError) as error:
            raise DamagedFileError(f"folders: {where}: {error}. {result_folder.MEND}") from error
        if rate < 1:
            series = f"{row['contender']}, rate {100 * rate:g}% by {row['unit']}"
            figure = f"{row['model']}, {str(row['config']).split(',')[0]}"
            ours = Estimate(speed_up, math.nan, seeds)
            made.append(headline(figure, series, "speed-up over dense, p50", "", ours))
    return made
