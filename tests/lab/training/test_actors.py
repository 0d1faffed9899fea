import time

import pytest

from kondo.actors.setup import incarnation_of, process_seed
from kondo_lab.training import actors
from kondo_lab.training.actors import digits, slowed


def waited(monkeypatch, pauses, seed):
    """Return the seconds that one rollout of the process with this seed asks to sleep."""
    asked = []
    monkeypatch.setattr(time, "sleep", asked.append)
    task = slowed(digits(batch=5, width=4), pauses).make_task(seed)
    assert task.unit == "sample"
    assert len(task.rollout(actors._digits_policy(4, 0)).rewards) == 5
    return sum(asked)


@pytest.mark.parametrize(("process", "seconds"), [(1, 0.5), (2, 2.0), (3, 0.0), (4, 0.5), (8, 2.0)])
def test_slow_actors_wait_in_turn(monkeypatch, process, seconds):
    assert waited(monkeypatch, (0.5, 2.0, 0.0), process_seed(7, process)) == seconds


def test_the_learner_never_waits(monkeypatch):
    assert waited(monkeypatch, (0.5,), process_seed(7, 0)) == 0


def test_a_slow_actor_draws_what_a_quick_one_does(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    setup, seed = digits(batch=20, width=4), process_seed(3, 1)
    policy = setup.make_policy(0)
    quick, slow = (s.make_task(seed).rollout(policy) for s in (setup, slowed(setup, (1.0,))))
    assert quick.rows["images"].equal(slow.rows["images"])
    assert quick.rows["actions"].equal(slow.rows["actions"])


@pytest.mark.parametrize("pauses", [(), (0.1, -0.1)])
def test_pauses_must_be_seconds(pauses):
    with pytest.raises(ValueError, match="pauses must be seconds >= 0, one or more"):
        slowed(digits(), pauses)


def test_a_seed_tells_its_process():
    assert [incarnation_of(process_seed(s, i)) for s in (0, 5) for i in (0, 1, 90)] == [
        0,
        1,
        90,
    ] * 2
