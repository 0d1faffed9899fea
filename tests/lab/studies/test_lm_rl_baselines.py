"""Runs against baselines are made once, at rates that are at no edge, and judged by fixed rules."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kondo_lab.studies.lm_rl import baselines, judge_baselines
from kondo_lab.training.fields import TOY

RULE = {
    "family": "f",
    "role": "claim",
    "task": "sorting-3",
    "model": "85m",
    "one": "ours",
    "axis": "loop seconds",
    "factor": "1.2",
    "alpha": "0.05",
    "least_seeds": "3",
}


def run(arm: str, seed: int, rollouts: float, end: float = 1.0) -> dict[str, Any]:
    """Return a run that gets from 0 to a reward in so many rollouts, a second for each."""
    names = ("step", "passes", "seconds generate", "seconds rest")
    rows = [{"reward": reward, "rollouts": paid} for reward, paid in ((0, 0), (end, rollouts))]
    curve = [dict.fromkeys(names, 0.0) | row | {"seconds learner": row["rollouts"]} for row in rows]
    curve += [curve[-1]]
    return {"arm": arm, "seed": seed, "learning_rate": 1e-5, "curve": curve}


def test_the_rate_that_is_chosen_has_a_worse_one_on_either_side():
    paid = {1e-5: 5.0, 2e-5: 4.0, 4e-5: 3.0, 8e-5: 3.0, 5e-6: 9.0}
    tried: dict[float, list[dict[str, Any]]] = {}
    for _ in range(6):
        rate, found = baselines.next_rate(tried, 1e-5)
        if found:
            break
        tried[rate] = [run("a", 0, paid[rate], end=2.0 if rate == 4e-5 else 1.5)]
    assert rate == 4e-5
    assert list(tried) == [1e-5, 2e-5, 5e-6, 4e-5, 8e-5]


@pytest.mark.parametrize(
    ("ratios", "end", "verdict"),
    [
        ((1.5, 1.6, 1.7), 1.0, "met"),
        ((1.0, 1.1, 1.05), 1.0, "missed"),
        ((1.0, 1.9, 1.3), 1.0, "open"),
        ((1.5, 1.6), 1.0, "open"),
        ((1.5, 1.6, 1.7), 0.5, "open"),  # never at the target
    ],
)
def test_a_verdict_is_against_the_strongest_and_of_seeds_in_pairs(ratios, end, verdict):
    place = ("sorting-3", "85m")
    arms = {
        (*place, "ours"): {s: run("ours", s, 10.0 + s, end) for s in range(len(ratios))},
        (*place, "weak"): {s: run("weak", s, 900.0) for s in range(len(ratios))},
        (*place, "strong"): {s: run("strong", s, r * (10.0 + s)) for s, r in enumerate(ratios)},
    }
    rules = pd.DataFrame([RULE | {"other": "weak|strong"}, RULE | {"other": "strong|absent"}])
    judged = judge_baselines.judge(rules, arms)
    assert list(judged["verdict"]) == [verdict, "not run"]
    assert judged["against"].iloc[0] == "strong"


def test_runs_are_made_once_and_none_after_the_time_is_up(tmp_path: Path, monkeypatch):
    for name, value in {"HELD_OUT": 16, "EVERY": 64, "TARGET": 2.0, "START": 0.0}.items():
        monkeypatch.setattr(baselines, name, value)
    monkeypatch.setattr(baselines, "STEPS", {"reported": 2})
    arm = baselines.arms("toy")["PODS 128"]
    path = tmp_path / "runs.jsonl.gz"
    for until, made in ((0.0, 0), (time.monotonic() + 600, 1), (0.0, 1)):
        runner = baselines.Runner(path, TOY, {"commit": "abc"}, torch.device("cpu"), until)
        runner.make_start(tmp_path)
        if made:
            runner.run(arm, "reported", 1e-4, 100)
        else:
            with pytest.raises(baselines.TimeUpError):
                runner.run(arm, "reported", 1e-4, 100)
        assert len(runner.lines) == made
    with gzip.open(path, "rt", encoding="utf-8") as file:
        (line,) = map(json.loads, file)
    assert line["curve"][-1]["rollouts"] == 2 * 128
    assert line["curve"][-1]["passes"] <= 2 * 128 // 4
    assert {"arm", "k", "learning_rate", "seed", "task", "commit"} <= line.keys()
