"""Runs of the hold-out are the study's runs, one JSON line each, and are made once."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import torch

from kondo_lab.studies.mnist_dg import holdout, run
from kondo_lab.studies.mnist_dg.settings import SMALL
from kondo_lab.training.part import Context

SETTINGS = dataclasses.replace(SMALL, num_steps=30, num_probes=1, log_every=10, num_seeds=3)
CPU = torch.device("cpu")


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_its_runs_are_those_of_the_study_and_are_made_once(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl.gz"
    for _ in range(2):
        holdout.add(path, SETTINGS, 1, range(1, 3), 10.0, device=CPU, commit="abc")
    found = read(path)
    assert len(found) == 2 * len(run.compared_at(1))
    assert {(each["seed"], each["commit"], each["k"]) for each in found} == {
        (1, "abc", 1),
        (2, "abc", 1),
    }

    context = Context(
        device=CPU,
        progress=lambda share, note: None,
        stopped=lambda: False,
        checkpoint=tmp_path / "part.pt",
    )
    (part,) = (part for part in run.parts(SETTINGS) if part.name == "samples-1")
    theirs = {
        (each.arm, each.seed, row["step"], metric): value
        for each in part.run(context)
        for row in each.curve
        for metric, value in row.items()
        if metric not in ("step", "rollouts", "passes")
    }
    ours = {
        (each["arm"], each["seed"], row["step"], metric): value
        for each in found
        for row in each["curve"]
        for metric, value in row.items()
        if metric not in ("step", "rollouts", "passes")
    }
    expected = {key: float(f"{value:.6g}") for key, value in theirs.items() if key[1] in (1, 2)}
    assert ours == expected
    assert found[0]["curve"][-1]["passes"] == 30 * SETTINGS.batch


def test_no_seed_is_begun_after_the_time_is_up(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl.gz"
    holdout.add(path, SETTINGS, 1, range(1, 3), -1.0, device=CPU, commit="abc")
    assert not path.exists()
