import functools

import pytest
import torch
from torch import nn

from kondo.engine.screen import screen_log_probs
from tolerances import assert_close


class Policy(nn.Module):
    """Leaves every trace a training forward can leave: dropout, batch norm, random draws."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.modes = []
        self.sizes = []

    def log_prob(self, rows):
        self.modes.append((self.training, self.net.training, torch.is_grad_enabled()))
        self.sizes.append(rows.shape[0])
        return -self.net(rows).squeeze(1).square()

    forward = log_prob


@pytest.fixture
def states():
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(0))


def snapshot(policy):
    return {key: value.clone() for key, value in policy.state_dict().items()}


def given(policy):
    """Return ways to give a module, so that it is known."""
    return {
        "module": policy,
        "method": policy.log_prob,
        "partial of a method": functools.partial(policy.log_prob),
    }


@pytest.mark.parametrize("kind", ["module", "method", "partial of a method"])
def test_the_screen_of_a_given_module_leaves_no_trace(states, kind):
    policy = Policy().train()
    policy.net[2].eval()  # a flag that differs from its parent's
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, rng = snapshot(policy), torch.get_rng_state()
    result = screen_log_probs(given(policy)[kind], states)
    assert policy.modes == [(False, False, False)]
    assert policy.training
    assert policy.net.training
    assert not policy.net[2].training
    assert not result.requires_grad
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in policy.parameters())


def plain(policy):
    """Return functions behind which nobody looks for a module."""

    class Agent:
        def __init__(self):
            self.policy = policy

        def log_prob(self, rows):
            return self.policy.log_prob(rows)

    return {
        "closure": lambda rows: policy.log_prob(rows),
        "partial": functools.partial(lambda model, rows: model.log_prob(rows), policy),
        "agent": Agent().log_prob,
    }


@pytest.mark.parametrize("kind", ["closure", "partial", "agent"])
def test_a_plain_function_runs_as_it_is(states, kind):
    policy = Policy().train()
    before = snapshot(policy)
    result = screen_log_probs(plain(policy)[kind], states)
    assert policy.modes == [(True, True, False)]  # without a graph alone
    assert not result.requires_grad
    assert not torch.equal(policy.net[1].running_mean, before["net.1.running_mean"])
    policy.modes.clear()
    screen_log_probs(plain(policy)[kind], states, modules=[policy.net])
    assert policy.modes == [(True, False, False)]  # the policy itself was not named
    assert policy.net.training


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_flags_are_restored_after_an_error(states, error):
    class Broken(Policy):
        def log_prob(self, rows):
            super().log_prob(rows)
            raise error("boom")

    policy = Broken().train()
    policy.net[2].eval()
    with pytest.raises(error, match="boom"):
        screen_log_probs(policy.log_prob, states)
    assert policy.modes == [(False, False, False)]
    assert policy.training
    assert policy.net[1].training
    assert not policy.net[2].training
    assert torch.is_grad_enabled()


def test_a_given_draft_is_in_evaluation_mode_instead_of_the_policy(states):
    policy, draft = Policy().train(), Policy().train()
    screen_log_probs(policy.log_prob, states, screen=draft.log_prob)
    assert (policy.modes, draft.modes) == ([], [(False, False, False)])
    assert draft.training


def test_chunks_give_the_same_log_probs(states):
    policy = Policy()
    whole = screen_log_probs(policy.log_prob, states)
    policy.sizes.clear()
    parts = screen_log_probs(policy.log_prob, states, chunk=4)
    assert policy.sizes == [4, 4, 2]
    assert_close(parts, whole)


def test_known_log_probs_call_nothing(states):
    def never(rows):
        raise AssertionError("called")

    known = torch.zeros(10, requires_grad=True)
    result = screen_log_probs(never, states, screen=known)
    assert not result.requires_grad


def test_a_draft_is_called_instead(states):
    result = screen_log_probs(lambda rows: 1 / 0, states, screen=lambda rows: -rows[:, 0].abs())
    assert_close(result, -states[:, 0].abs())


@pytest.mark.parametrize(
    ("screen", "message"),
    [
        (torch.zeros(10, dtype=torch.int64), "screen must be floating point"),
        (torch.zeros(9), r"screen must have shape \[10\] or \[10, T\].*got \[9\]"),
        (torch.zeros(10, 2, 2), r"screen must have shape \[10\]"),
        ("draft", "screen must be callable on rows, a tensor or None, got str"),
        (lambda rows: None, r"screen\(rows\) must be a floating-point tensor, got NoneType"),
        (lambda rows: rows.sum(), r"screen\(rows\) must have shape \[10\]"),
    ],
)
def test_bad_screens_are_named(states, screen, message):
    with pytest.raises(ValueError, match=message):
        screen_log_probs(lambda rows: -rows[:, 0].abs(), states, screen=screen)


def test_log_prob_must_be_callable(states):
    with pytest.raises(ValueError, match="log_prob must be callable on rows, got Tensor"):
        screen_log_probs(states, states)
