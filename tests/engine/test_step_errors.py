"""What `kondo.backward` refuses, and how it says so."""

import math

import pytest
import torch

import kondo
from steps import run_step


def log_prob_ok(rows):
    return -(rows * torch.ones(3, requires_grad=True)).sum(1).square()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": {"x": 1}}, "batch must hold at least one tensor"),
        ({"batch": torch.zeros(0, 3)}, "batch must not be empty"),
        ({"advantages": torch.ones(5, dtype=torch.int64)}, "advantages must be floating point"),
        ({"advantages": torch.ones(4)}, r"advantages must have shape \[5\].*got \[4\]"),
        ({"advantages": [1.0] * 5}, "advantages must be a floating-point tensor, got list"),
        ({"micro_batch": 0}, "micro_batch must be at least 1 row, got 0"),
        ({"micro_batch": 2.5}, "micro_batch must be a whole number of rows, got 2.5"),
        ({"micro_batch": True}, "micro_batch must be a whole number of rows, got True"),
        ({"screen_chunk": "4"}, "screen_chunk must be a whole number of rows, got '4'"),
        ({"screen_chunk": -1}, "screen_chunk must be at least 1 row, got -1"),
        ({"denominator": "mean"}, 'denominator must be "full", "kept" or a positive number'),
        ({"denominator": 0}, "denominator must be"),
        ({"denominator": math.inf}, "denominator must be"),
        ({"denominator": None}, "denominator must be .* got None"),
        ({"denominator": [3.0]}, "denominator must be"),
        ({"denominator": True}, "denominator must be .* got True"),
        ({"denominator": math.nan}, "denominator must be .* got nan"),
        ({"unit": "token"}, r'unit "token" needs log-probs of shape \[N, T\]'),
        ({"mask": torch.ones(5)}, "mask must be a bool tensor"),
        ({"screen": torch.zeros(4)}, "screen must have shape"),
        ({"loss": lambda lp, adv: lp.sum()}, r"loss must return one value per unit, \[5\]"),
        (
            {"loss_inputs": {"old_log_probs": torch.zeros(4)}},
            r"loss_inputs\[\'old_log_probs\'\] must have shape \[5\]",
        ),
        (
            {"loss_inputs": {"old_log_probs": [0.0] * 5}},
            "loss_inputs must hold tensors .* got list for 'old_log_probs'",
        ),
        ({"loss_inputs": {"clip": 0.2}}, r"got float for 'clip'; .*functools.partial\(loss, clip"),
        ({"loss_inputs": torch.zeros(5)}, "loss_inputs must be a dict of name -> tensor"),
        (
            {"loss_inputs": {0: torch.zeros(5)}},
            r"loss_inputs must hold what pg takes .* got \[0\]: keywords must be strings",
        ),
        (
            {"log_prob": lambda rows: log_prob_ok(rows).detach()},
            r"log_prob\(rows\) must be differentiable, got a detached tensor",
        ),
        ({"log_prob": lambda rows: rows.argmax(1)}, r"log_prob\(rows\) must be floating point"),
        ({"log_prob": lambda rows: log_prob_ok(rows) + 99}, "log_probs must not exceed 0"),
        ({"screen": -torch.ones(5, 2), "unit": "token"}, r"log_prob\(rows\) must return shape"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = {
        "log_prob": log_prob_ok,
        "batch": torch.randn(5, 3),
        "advantages": torch.ones(5),
        "gate": kondo.Gate(rate=1.0),
    } | changes
    call = [arguments.pop(name) for name in ("log_prob", "batch", "advantages")]
    with pytest.raises(ValueError, match=message):
        run_step(*call, **arguments)


@pytest.mark.parametrize(
    ("gate", "instead"),
    [
        (0.03, r"gate=kondo\.UnbiasedGate\(rate=0\.03\), or gate=kondo\.Gate\(rate=0\.03\)"),
        (1, r"UnbiasedGate\(rate=1\)"),
        ("unbiased:0.1", r"Write gate=kondo\.parse_gate\('unbiased:0\.1'\)"),
        (kondo.Gate, r"a class: write gate=kondo\.Gate\(\.\.\.\)"),
        (3, r"Write for example gate=kondo\.UnbiasedGate\(rate=0\.1\)"),
        (True, r"Write for example"),
    ],
)
def test_what_is_no_gate_is_refused_with_what_to_write(gate, instead):
    policy, rows = torch.nn.Linear(2, 1), torch.ones(4, 2)
    with pytest.raises(ValueError, match=instead):
        kondo.backward(lambda x: -policy(x).squeeze(1).abs(), rows, torch.ones(4), gate=gate)
