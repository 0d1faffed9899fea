import dataclasses

import pytest

from kondo_lab.training import arms
from kondo_lab.training.member import SHARES, Frictions, Member, each_seed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": -1}, "delay must be >= 0 learner steps, got -1"),
        ({"refresh": 0}, "refresh must be >= 1 step, got 0"),
        ({"queue": -1}, "queue must be >= 0 batches, got -1"),
        ({"delay": 1, "refresh": 2}, "stale in one way, got delay 1, refresh 2 and queue 0"),
        ({"refresh": 2, "queue": 1}, "stale in one way, got delay 0, refresh 2 and queue 1"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"bits": 1}, "bits must lie in 2 .. 16, got 1"),
        ({"bug": 1.5}, r"bug must lie in \[0, 1\], got 1.5"),
        ({"discovery": -0.1}, r"discovery must lie in \[0, 1\], got -0.1"),
        ({"random": float("nan")}, r"random must lie in \[0, 1\], got nan"),
        ({"corruption": 2.0}, r"corruption must lie in \[0, 1\], got 2.0"),
        ({"replaced": 0.0}, r"replaced must lie in \(0, 1\] or be None, got 0.0"),
        ({"noise": 0.5}, "noise must be > 0 for reported='noisy' and 0 otherwise, got 0.5"),
        ({"reported": "noisy"}, "noise must be > 0 for reported='noisy' .* got 0.0"),
    ],
)
def test_bad_frictions_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Frictions(**options)


@pytest.mark.parametrize("name", SHARES)
def test_every_share_is_a_probability(name):
    for share in (0.0, 1.0):
        assert getattr(Frictions(**{name: share}), name) == share
    for share in (-0.01, 1.01):
        with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\], got {share}"):
            Frictions(**{name: share})


def test_rows_are_foreign_where_another_policy_or_none_drew_them():
    own = [
        *(Frictions(), Frictions(uniform_delay=True), Frictions(corruption=0.5)),
        *(Frictions(flipped=0.5), Frictions(biased=0.5), Frictions(reported="one")),
    ]
    foreign = [
        *(Frictions(delay=1), Frictions(refresh=2), Frictions(queue=1), Frictions(bits=4)),
        *(Frictions(temperature=0.5), Frictions(bug=0.1), Frictions(random=0.1)),
        *(Frictions(discovery=0.1), Frictions(broken=0.1)),
    ]
    assert [f.foreign for f in own] == [False] * 6
    assert [f.foreign for f in foreign] == [True] * 9


def test_a_name_is_no_friction():
    assert Frictions(name="any").is_none
    assert not any(
        dataclasses.replace(Frictions(), **{name: 0.1}).is_none for name in (*SHARES, "temperature")
    )


def test_every_arm_is_trained_with_every_seed():
    compared = {"one": arms.PG, "other": arms.DG}
    found = each_seed(compared, 2, learning_rate=0.1, setting=0.5)
    assert found == [
        Member(series=series, seed=seed, learning_rate=0.1, arm=arm, setting=0.5)
        for series, arm in compared.items()
        for seed in (0, 1)
    ]
    assert [member.seed for member in each_seed(compared, [7], learning_rate=0.1)] == [7, 7]
