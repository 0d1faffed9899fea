import dataclasses
import json
import math

import pytest
import torch

import kondo
from kondo.stage_clock import STAGES
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


@pytest.mark.parametrize(
    ("gate", "absent"),
    [
        (None, {"price"}),
        (kondo.Gate(rate=0.2), set()),
        (kondo.Gate(price=0.0, temperature=1.0), set()),
        (kondo.UnbiasedGate(rate=0.2), {"bias_negative"}),  # its values are positive
        (kondo.VarianceGate(rate=0.2), {"price", "entropy"}),  # and no screen
        (kondo.Gate(price=1e9), {"kept_positive_share", "effective_units"}),  # keeps nothing
        (kondo.Gate(price=math.inf), {"price", "kept_positive_share", "effective_units"}),
    ],
)
def test_a_logger_is_given_plain_finite_numbers_and_no_others(gate, absent):
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.linspace(0.1, 2.0, 80, dtype=torch.bfloat16).view(20, 4)
    report = run_step(
        lambda rows: -(rows * weight).sum(1), rows, torch.linspace(-1, 1, 20), gate=gate
    )
    flat = report.as_dict(prefix="")
    assert {type(value) for value in flat.values()} == {int, float}
    assert all(math.isfinite(value) for value in flat.values())
    names = set(report.diagnostics) | {"price", "loss", "kept", "rows_trained", "seconds_forward"}
    assert names - set(flat) == absent
    json.dumps(flat, allow_nan=False)


def test_a_step_without_signal_has_no_nan():
    report = run_step(
        lambda rows: -rows,
        torch.ones(4, requires_grad=True),
        torch.zeros(4),
        gate=kondo.Gate(rate=0.5),
    )
    assert report.empty
    assert all(math.isfinite(value) for value in report.as_dict().values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_logged(value):
    late = one_report().late._replace(loss=value)
    report = dataclasses.replace(one_report(), _late=lambda: late)
    assert str(report.as_dict()["kondo/loss"]) == str(value)


def test_prints_what_was_done():
    text = str(one_report())
    assert "kept 1 of 2 units (50.00%)" in text
    assert "differentiated 1 of 2 rows in 1 calls" in text
    assert "nothing kept, .grad untouched" in str(one_report(price=math.inf))
