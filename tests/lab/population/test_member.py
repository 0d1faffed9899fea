import dataclasses

import pytest

from kondo_lab.population.member import Frictions, Update


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, r"rate must lie in \(0, 1\], got 0.0"),
        ({"rate": 1.5}, r"rate must lie in \(0, 1\], got 1.5"),
        ({"rate": float("nan")}, r"rate must lie in \(0, 1\], got nan"),
        ({"gate": "soft", "temperature": 0.0}, "temperature must be > 0 for soft, got 0.0"),
        ({"gate": "draw", "temperature": -1.0}, "temperature must be > 0 for draw, got -1.0"),
        ({"delight_noise": -0.1}, "delight_noise must be >= 0, got -0.1"),
        ({"logit_noise": float("nan")}, "logit_noise must be >= 0, got nan"),
        ({"alpha": 1.1}, r"alpha must lie in \[0, 1\], got 1.1"),
        ({"loss": "is_pg", "max_weight": 0.0}, "max_weight must be > 0, got 0.0"),
        ({"loss": "is_pg", "max_weight": float("nan")}, "max_weight must be > 0, got nan"),
        ({"gate": "rolling", "window": 0}, "window must be >= 1 past steps, got 0"),
        (
            {"gate": "soft", "priority": "surprisal"},
            "priority must be delight for the soft gate, .* got surprisal",
        ),
        (
            {"gate": "top", "loss": "cross_entropy"},
            "gate must be dense for cross_entropy, .* got top",
        ),
        ({"gate": "soft", "loss": "exact_pg"}, "gate must be dense for exact_pg, .* got soft"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Update(**options)


def test_a_temperature_of_zero_is_no_error_where_none_is_used():
    assert Update(gate="top", temperature=0.0).temperature == 0.0


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({}, {"price": 1.0}, True),
        ({"gate": "price"}, {"gate": "price", "price": 1.0}, True),
        ({"gate": "soft"}, {"gate": "soft", "temperature": 2.0}, True),
        ({"gate": "top", "rate": 0.1}, {"gate": "top", "rate": 0.2}, False),
        ({"gate": "price", "rate": 0.1}, {"gate": "price", "rate": 0.2}, True),
        ({"gate": "rolling", "window": 3}, {"gate": "rolling", "window": 4}, False),
        ({"gate": "top", "window": 3}, {"gate": "top", "window": 4}, True),
        ({}, {"clip": 0.2}, True),
        ({"loss": "ppo"}, {"loss": "ppo", "clip": 0.2}, False),
        ({"loss": "pmpo"}, {"loss": "pmpo", "preferred": 0.5}, False),
        ({}, {"max_weight": 10.0}, True),
        ({"loss": "is_pg"}, {"loss": "is_pg", "max_weight": 10.0}, False),
        ({}, {"baseline": "zero"}, False),
        ({"gate": "top"}, {"gate": "top", "priority": "uniform"}, False),
    ],
)
def test_members_share_a_program_where_only_numbers_differ(one, other, shared):
    assert (Update(**one).program == Update(**other).program) is shared


def test_updates_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Update().rate = 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": -1}, "delay must be >= 0 learner steps, got -1"),
        ({"bug": 1.5}, r"bug must lie in \[0, 1\], got 1.5"),
        ({"discovery": -0.1}, r"discovery must lie in \[0, 1\], got -0.1"),
        ({"random": float("nan")}, r"random must lie in \[0, 1\], got nan"),
        ({"corruption": 2.0}, r"corruption must lie in \[0, 1\], got 2.0"),
        ({"reported": 0.0}, r"reported must lie in \(0, 1\], got 0.0"),
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
