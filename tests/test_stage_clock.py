"""Seconds of stages: added up, each second counted once, also when a stage fails."""

import pytest
import torch

from kondo import stage_clock
from kondo.stage_clock import STAGES, StageClock


def test_clock_adds_up_stages(device):
    clock = StageClock(device)
    for _ in range(2):
        with clock.stage("forward"):
            torch.randn(64, 64, device=device) @ torch.randn(64, 64, device=device)
    seconds = clock.seconds()
    assert seconds["forward"] > 0
    assert seconds["screen"] == 0


def test_a_stage_inside_another_is_counted_once(monkeypatch):
    times = iter([0.0, 10.0, 13.0, 20.0])
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: next(times))
    clock = StageClock(torch.device("cpu"))
    with clock.stage("select"), clock.stage("screen"):
        pass
    assert clock.seconds() == dict.fromkeys(STAGES, 0.0) | {"screen": 3.0, "select": 17.0}


def test_a_stage_that_fails_is_no_longer_open(monkeypatch):
    times = iter([0.0, 5.0, 7.0])
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: next(times))
    clock = StageClock(torch.device("cpu"), ("one", "two"))
    with pytest.raises(KeyboardInterrupt), clock.stage("one"):
        raise KeyboardInterrupt
    with clock.stage("two"):
        pass
    assert clock.seconds() == {"one": 0.0, "two": 2.0}
