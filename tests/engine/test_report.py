import math

import torch

import kondo
from kondo.engine.report import STAGES, StageClock
from steps import run_step


def one_report(price=0.0):
    weight = torch.ones(3, requires_grad=True)
    return run_step(
        lambda rows: -(rows * weight).sum(1).square(),
        torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]),
        torch.tensor([1.0, -1.0]),
        gate=kondo.Gate(price=price),
    )


def test_literal():
    # log-probs -1 and -4, delight 1 and -4; price 0 keeps the first; loss = -(1 * -1) / 2
    report = one_report()
    assert (report.seen, report.kept, report.rate, report.price) == (2, 1, 0.5, 0.0)
    assert report.loss == 0.5
    assert not report.empty
    assert set(report.seconds) == set(STAGES)
    assert all(spent >= 0 for spent in report.seconds.values())
    assert report.diagnostics["positives_kept"] == 1.0


def test_as_dict_is_flat_and_prefixed():
    flat = one_report().as_dict()
    assert all(key.startswith("kondo/") for key in flat)
    assert all(isinstance(value, int | float) for value in flat.values())
    assert flat["kondo/kept"] == 1
    assert flat["kondo/seconds_backward"] > 0
    assert flat["kondo/empty"] == 0.0
    assert "kondo/gate_spread" in flat
    assert one_report().as_dict(prefix="")["rate"] == 0.5


def test_prints_what_was_done():
    text = str(one_report())
    assert "kept 1 of 2 units (50.00%)" in text
    assert "differentiated 1 of 2 rows in 1 calls" in text
    assert "nothing kept, .grad untouched" in str(one_report(price=math.inf))


def test_clock_adds_up_stages(device):
    clock = StageClock(device)
    for _ in range(2):
        with clock.stage("forward"):
            torch.randn(64, 64, device=device) @ torch.randn(64, 64, device=device)
    seconds = clock.seconds()
    assert seconds["forward"] > 0
    assert seconds["screen"] == 0
