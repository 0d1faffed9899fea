import dataclasses
from functools import partial

import pytest

import kondo
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything, QuantileGate
from kondo_lab.training.losses import CrossEntropy, ExactPG, ImportanceWeighted
from kondo_lab.training.member import Frictions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delight_noise": -0.1}, "delight_noise must be >= 0, got -0.1"),
        ({"logit_noise": float("nan")}, "logit_noise must be >= 0, got nan"),
        (
            {"gate": kondo.Gate(rate=0.5), "loss": CrossEntropy()},
            r"gate must be None for CrossEntropy\(\), .* got Gate\(rate=0.5\)",
        ),
        ({"gate": Everything(1.0), "loss": ExactPG()}, r"gate must be None for ExactPG\(\)"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Arm(**options)


@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_an_importance_weight_has_a_cap_above_zero(weight):
    with pytest.raises(ValueError, match="max_weight must be > 0"):
        ImportanceWeighted(weight)


PPO = partial(kondo.losses.ppo, clip=0.1)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({}, {}, True),
        ({"gate": kondo.Gate(price=0.0)}, {"gate": kondo.Gate(price=0.0)}, True),
        ({"gate": kondo.Gate(price=0.0)}, {"gate": kondo.Gate(price=1.0)}, False),
        ({"gate": kondo.Gate(rate=0.1)}, {"gate": QuantileGate(rate=0.1)}, False),
        ({"gate": Everything(1.0)}, {"gate": Everything(2.0)}, False),
        ({"gate": Everything(1.0)}, {}, False),
        (
            {"gate": kondo.Gate(rate=0.1)},
            {"gate": kondo.Gate(rate=0.1, signal=kondo.signals.uniform)},
            False,
        ),
        ({"loss": PPO}, {"loss": partial(kondo.losses.ppo, clip=0.1)}, True),
        ({"loss": PPO}, {"loss": partial(kondo.losses.ppo, clip=0.2)}, False),
        ({"loss": ImportanceWeighted()}, {"loss": ImportanceWeighted(10.0)}, False),
        ({}, {"baseline": "zero"}, False),
        ({}, {"logit_noise": 0.1}, False),
    ],
)
def test_members_with_equal_updates_share_a_program(one, other, shared):
    assert (Arm(**one).program == Arm(**other).program) is shared
    assert (Arm(**one) == Arm(**other)) is shared
    assert not shared or hash(Arm(**one)) == hash(Arm(**other))


def test_updates_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Arm().baseline = "zero"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": -1}, "delay must be >= 0 learner steps, got -1"),
        ({"bug": 1.5}, r"bug must lie in \[0, 1\], got 1.5"),
        ({"discovery": -0.1}, r"discovery must lie in \[0, 1\], got -0.1"),
        ({"random": float("nan")}, r"random must lie in \[0, 1\], got nan"),
        ({"corruption": 2.0}, r"corruption must lie in \[0, 1\], got 2.0"),
        ({"reported": 0.0}, r"reported must lie in \(0, 1\] or be None, got 0.0"),
    ],
)
def test_bad_frictions_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Frictions(**options)


def test_rows_are_foreign_where_another_policy_or_none_drew_them():
    own = [Frictions(), Frictions(corruption=0.5), Frictions(uniform_delay=True)]
    foreign = [Frictions(delay=1), Frictions(bug=0.1), Frictions(random=0.1)]
    assert [f.foreign for f in own] == [False] * 3
    assert [f.foreign for f in [*foreign, Frictions(discovery=0.1)]] == [True] * 4
