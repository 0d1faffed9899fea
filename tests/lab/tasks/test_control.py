import math
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="the extra kondo-lab[control] is not installed")

from kondo_lab.tasks.control import Environments, Sampled, make


def always(action):
    """A policy that takes one action."""

    def act(observations):
        actions = torch.full((len(observations),), action)
        return Sampled(actions, torch.zeros(len(observations)), torch.ones(len(observations)))

    return act


def test_the_step_after_an_end_is_no_sample_and_starts_the_next_episode():
    env = Environments("CartPole-v1", num_envs=3, seed=0)
    rollout = env.rollout(always(1), 40)
    assert rollout.observations.shape == (41, 3, 4)
    assert rollout.ended.any()
    assert torch.equal(rollout.ended, rollout.terminated)  # pushed one way, no pole stands for long
    assert torch.equal(~rollout.counts[1:], rollout.ended[:-1])
    assert rollout.counts[0].all()
    first = rollout.observations[1:][~rollout.counts]
    assert (first.abs() <= 0.05).all()  # where CartPole resets to
    last = rollout.observations[1:][rollout.ended]
    assert (last[:, 2].abs() > 0.2).all()  # the pole has fallen over
    assert rollout.entropy == 1.0


def test_returns_are_those_of_whole_episodes_across_rollouts():
    env = Environments("CartPole-v1", num_envs=2, seed=0)
    assert math.isnan(env.mean_return)
    parts = [env.rollout(always(0), 7) for _ in range(6)]
    ended = torch.cat([part.ended for part in parts])
    counts = torch.cat([part.counts for part in parts])
    lengths = []
    for column in range(2):
        running = 0
        for end, count in zip(ended[:, column].tolist(), counts[:, column].tolist(), strict=True):
            running += count  # every step that counts pays 1
            if end:
                lengths.append(running)
                running = 0
    assert env.episodes == len(lengths) > 4
    assert env.mean_return == pytest.approx(float(np.mean(lengths)))


def test_an_episode_that_is_cut_off_is_not_terminated():
    env = Environments("Pendulum-v1", num_envs=2, seed=0)
    assert (env.continuous, env.num_inputs, env.num_outputs) == (True, 3, 1)

    def rest(observations):
        return Sampled(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2))

    rollout = env.rollout(rest, 201)
    assert rollout.ended[199].all()
    assert not rollout.terminated.any()
    assert not rollout.counts[200].any()
    assert env.episodes == 2


def test_the_same_seed_gives_the_same_rollout():
    found = [
        Environments("Acrobot-v1", num_envs=2, seed=s).rollout(always(1), 5) for s in (3, 3, 4)
    ]
    assert torch.equal(found[0].observations, found[1].observations)
    assert not torch.equal(found[0].observations, found[2].observations)


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'kondo-lab\[control\]'"):
        make("CartPole-v1", 1)
