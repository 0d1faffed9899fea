"""Gates as text: every word of the grammar, and a reason for everything else."""

import sys
import types

import pytest

import kondo
from kondo.core.specs import RULES, SIGNALS


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("unbiased:0.1", kondo.UnbiasedGate(rate=0.1)),
        ("noise:1.5", kondo.UnbiasedGate(noise=1.5)),
        ("variance:0.25", kondo.VarianceGate(rate=0.25)),
        ("delight:0.03", kondo.Gate(rate=0.03)),
        ("delight:3e-2", kondo.Gate(rate=0.03)),
        ("price:0", kondo.Gate(price=0.0)),
        ("price:-1.5", kondo.Gate(price=-1.5)),
        (" unbiased:0.1 ", kondo.UnbiasedGate(rate=0.1)),
        ("delight:0.1,negative_quota=0.3", kondo.Gate(rate=0.1, negative_quota=0.3)),
        (
            "delight:0.1, temperature=0.5, inverse_propensity=True",
            kondo.Gate(rate=0.1, temperature=0.5, inverse_propensity=True),
        ),
        ("delight:0.1,window=8,warmup=2", kondo.Gate(rate=0.1, window=8, warmup=2)),
        ("price:0,temperature=1", kondo.Gate(price=0.0, temperature=1)),
        (
            "unbiased:0.1,signal=advantage,max_weight=20",
            kondo.UnbiasedGate(rate=0.1, signal=kondo.signals.advantage, max_weight=20),
        ),
    ],
)
def test_a_spec_is_the_gate_that_it_describes(spec, expected):
    found = kondo.parse_gate(spec)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)
    assert found.signal is expected.signal


def test_dense_is_no_gate():
    assert kondo.parse_gate("dense") is None


def test_each_call_returns_another_gate():
    assert kondo.parse_gate("delight:0.1,window=4") is not kondo.parse_gate("delight:0.1,window=4")


@pytest.mark.parametrize("name", sorted(SIGNALS))
def test_every_signal_has_a_name(name):
    gate = kondo.parse_gate(f"unbiased:0.5,signal={name}")
    assert gate is not None
    assert gate.signal is SIGNALS[name]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "must name a known rule, got ''"),
        ("unbiased", "must name a known rule"),
        ("unbiased : 0.1", "must name a known rule"),
        ("greedy:0.1", "write 'unbiased:0.1'"),
        ("delight:", "must have a number after the colon, got ''"),
        ("delight:ten", "got 'ten'"),
        ("delight:0", r"rate must lie in \(0, 1\]"),
        ("delight:1.5", "refused"),
        ("delight:nan", "refused"),
        ("noise:0.5", "noise must be finite and at least 1"),
        ("delight:0.1,colour=red", "'colour=red'"),
        ("delight:0.1,reserve", "'reserve'"),
        ("delight:0.1,rate=0.2", "'rate=0.2'"),
        ("delight:0.1,reserve=0.1,reserve=0.2", "each once, .* got 'reserve=0.2'"),
        ("delight:0.1,price=1", "give exactly one of rate and price"),
        ("delight:0.1,reserve=much", "refused"),
        ("variance:0.1,signal=beauty", "signal must be one of"),
        ("kondo.nowhere:Gate", "cannot be imported"),
        ("kondo.core.gates:Nothing", "cannot be imported"),
        ("kondo.core.delight:delight", "refused: delight"),
        (0.03, "write gate=kondo.UnbiasedGate.rate=0.03."),
    ],
)
def test_what_is_no_spec_is_refused_with_its_reason(spec, why):
    with pytest.raises(ValueError, match=why):
        kondo.parse_gate(spec)


def test_a_gate_of_ones_own_is_imported(monkeypatch):
    module = types.ModuleType("own.gates")
    module.made = kondo.VarianceGate(rate=0.5)
    module.make = lambda: kondo.Gate(price=2.0)
    module.wrong = lambda: 3
    monkeypatch.setitem(sys.modules, "own.gates", module)
    assert kondo.parse_gate("own.gates:made") is module.made
    assert repr(kondo.parse_gate("own.gates:make")) == "Gate(price=2.0)"
    with pytest.raises(ValueError, match=r"must name a kondo.BaseGate.*got 3"):
        kondo.parse_gate("own.gates:wrong")


def test_every_rule_is_in_the_message_and_the_docstring():
    for word in RULES:
        assert f"{word}:" in kondo.parse_gate.__doc__
        with pytest.raises(ValueError, match=f"'{word}:"):
            kondo.parse_gate("unknown:1")
