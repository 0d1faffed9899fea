"""What arms are: a gate and a loss, when two are the same, and which make no sense."""

import dataclasses
import math
from functools import partial

import pytest
import torch

import kondo
from kondo import signals
from kondo.lm import BudgetGate
from kondo_lab.models.networks import MLP
from kondo_lab.tasks import seeds
from kondo_lab.training import arms
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import DrawnVarianceGate, Everything, QuantileGate
from kondo_lab.training.losses import (
    CrossEntropy,
    ExactPG,
    ImportanceWeighted,
    PreferenceOptimisation,
)
from kondo_lab.training.text_signals import PartialDelight, entropy
from tolerances import assert_close

PARTIAL = PartialDelight(mean=True)


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
        (
            {"gate": kondo.Gate(rate=0.5, temperature=1.0), "unit": "token"},
            "unit must be 'sequence' for Gate.*its draws are one per answer",
        ),
        (
            {"gate": kondo.UnbiasedGate(rate=0.5), "unit": "token"},
            "unit must be 'sequence' for UnbiasedGate",
        ),
        (
            {"gate": kondo.Gate(rate=0.5, signal=PARTIAL), "unit": "token"},
            "unit must be 'sequence' for PartialDelight",
        ),
        (
            {"gate": kondo.Gate(rate=0.5, signal=entropy)},
            "unit must be 'token' for the signal entropy",
        ),
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
            {"gate": kondo.Gate(rate=0.1, signal=signals.uniform)},
            False,
        ),
        ({"gate": kondo.Gate(rate=0.1)}, {"gate": kondo.Gate(rate=0.1), "unit": "token"}, False),
        ({"loss": PPO}, {"loss": partial(kondo.losses.ppo, clip=0.1)}, True),
        ({"loss": PPO}, {"loss": partial(kondo.losses.ppo, clip=0.2)}, False),
        ({"loss": ImportanceWeighted()}, {"loss": ImportanceWeighted(10.0)}, False),
        ({}, {"baseline": "zero"}, False),
        ({}, {"logit_noise": 0.1}, False),
        ({}, {"delight_noise": 0.1}, False),
        ({}, {"screened": "surprisal"}, False),
        ({}, {"divided": True}, False),
        ({}, {"denominator": "kept"}, False),
        ({}, {"screen": "free"}, False),
        ({}, {"equal_rewards": "rounded"}, False),
    ],
)
def test_members_with_equal_arms_share_a_program(one, other, shared):
    assert (Arm(**one).program == Arm(**other).program) is shared
    assert (Arm(**one) == Arm(**other)) is shared
    assert not shared or hash(Arm(**one)) == hash(Arm(**other))


def test_names_and_drafts_tell_arms_apart_that_share_a_program():
    assert Arm(name="one") != Arm(name="other")
    assert Arm(name="one").program == Arm(name="other").program
    old, older = (Arm(screen="stale", draft=steps) for steps in (2, 3))
    assert old != older
    assert old.program == older.program
    assert Arm() != "Arm()"


def test_arms_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Arm().baseline = "zero"


VARIANCE = DrawnVarianceGate(rate=0.25)
IN_GROUPS = DrawnVarianceGate(rate=0.25, group=8)


@pytest.mark.parametrize(
    ("arm", "kind", "rate", "fixed"),
    [
        (Arm(), "dense", 1, 40),
        (arms.DG, "soft", 1, 40),
        (Arm(gate=Everything()), "soft", 1, 40),
        (arms.kondo(0.1), "quantile", 0.1, None),
        (arms.kondo_count(0.1), "top", 0.1, 4),
        (Arm(gate=kondo.Gate(rate=0.01)), "top", 0.01, 1),
        (Arm(gate=kondo.Gate(rate=0.1), unit="token"), "top", 0.1, None),
        (Arm(gate=kondo.Gate(rate=0.1, temperature=1.0)), "draw", 0.1, None),
        (Arm(gate=kondo.Gate(rate=0.1, window=4)), "rolling", 0.1, None),
        (arms.PRICE_0, "price", 1, None),
        (Arm(gate=kondo.Gate(rate=1.0, signal=signals.abs_advantage)), "filter", 1, None),
        (Arm(gate=VARIANCE), "variance", 0.25, 10),
        (Arm(gate=IN_GROUPS), "variance", 0.25, 10),
        (Arm(gate=BudgetGate(budget=0.3)), "budget", 0.3, None),
        (Arm(gate=kondo.UnbiasedGate(rate=0.25)), "unbiased", 0.25, 10),
        (Arm(gate=kondo.UnbiasedGate(noise=1.5)), "unbiased", math.nan, None),
    ],
    ids=repr,
)
def test_kinds_rates_and_how_many_rows_they_fix(arm, kind, rate, fixed):
    assert arm.kind == kind
    assert arm.rate == rate or (math.isnan(rate) and math.isnan(arm.rate))
    assert arm.fixed_rows(40, group=8) == fixed
    assert arm.trains_all_rows == (kind in ("dense", "soft"))


def test_arms_by_delight_are_those_that_keep_a_share_by_it():
    assert arms.kondo_count(0.1).by_delight
    assert Arm(gate=kondo.Gate(rate=0.1, temperature=1.0)).by_delight
    others = [Arm(), arms.DG, arms.PRICE_0, Arm(gate=kondo.Gate(rate=0.1, signal=signals.uniform))]
    assert not any(arm.by_delight for arm in others)


def test_labels_are_looked_at_by_their_own_losses_alone():
    assert [Arm(loss=loss).of_labels for loss in (ExactPG(), CrossEntropy())] == [True] * 2
    assert not any(arm.of_labels for arm in (arms.PG, arms.PPO, arms.PMPO, arms.DG))


def test_the_papers_arms_are_what_their_names_say():
    assert Arm() == arms.PG
    assert Arm(gate=Everything(eta=1.0), unit="token") == arms.DG
    assert Arm(loss=partial(kondo.losses.ppo, clip=0.1)) == arms.PPO
    assert Arm(loss=PreferenceOptimisation(alpha=0.6, beta=0.1)) == arms.PMPO
    assert dataclasses.replace(arms.PMPO, equal_rewards="rounded") == arms.PMPO_FLOAT32
    assert arms.kondo(0.03) == Arm(gate=QuantileGate(rate=0.03))
    assert arms.kondo_count(0.03) == Arm(gate=kondo.Gate(rate=0.03))
    assert (arms.percent(0.03), arms.percent(0.005)) == ("3%", "0.5%")
    assert (arms.dg_k(0.03), arms.dg_k(0.005)) == ("DG-K 3%", "DG-K 0.5%")


DENSE = [Arm(name="PG"), Arm(name="DG", loss=kondo.losses.dg), Arm(gate=Everything())]


@pytest.mark.parametrize("arm", DENSE, ids=repr)
def test_dense_arms_are_ordinary_training(arm):
    policy = MLP(5, 3, width=7, generator=seeds.generator(0, "weights"))
    numbers = torch.Generator().manual_seed(1)
    images = torch.rand(11, 5, generator=numbers)
    rows = {"images": images, "actions": torch.randint(3, (11,), generator=numbers)}
    advantages = torch.randn(11, generator=numbers)
    advantages[2] = 0.0  # delight of zero: an ordinary loop pays for it
    log_probs = policy.log_prob(rows)
    weight = 1.0
    if arm.loss is kondo.losses.dg:
        weight = torch.sigmoid(-advantages * log_probs.detach())
    (-(weight * advantages * log_probs).mean()).backward()
    expected = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    report = kondo.backward(
        policy.log_prob,
        rows,
        advantages,
        gate=arm.gate,
        loss=arm.loss,
        screen=log_probs.detach(),
    )
    assert report.rows_trained == 11
    for parameter, grad in zip(policy.parameters(), expected, strict=True):
        assert_close(parameter.grad, grad)
