"""Screens: forwards without a graph, in chunks; drafts; what is refused."""

import pytest
import torch
from torch import nn

import kondo
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

    def forward(self, rows):
        self.modes.append((self.training, self.net.training, torch.is_grad_enabled()))
        self.sizes.append(rows.shape[0])
        return -self.net(rows).squeeze(1).square()


@pytest.fixture
def states():
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(0))


def snapshot(policy):
    return {key: value.clone() for key, value in policy.state_dict().items()}


def test_the_screen_leaves_no_trace_in_modules_that_it_is_told_of(states):
    policy = Policy().train()
    policy.net[2].eval()  # a flag that differs from its parent's
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, rng = snapshot(policy), torch.get_rng_state()
    result = screen_log_probs(policy, states, modules=[policy])
    assert policy.modes == [(False, False, False)]
    assert policy.training
    assert policy.net.training
    assert not policy.net[2].training
    assert not result.requires_grad
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in policy.parameters())


def test_others_run_as_they_are(states):
    policy = Policy().train()
    before = snapshot(policy)
    result = screen_log_probs(policy, states)
    assert policy.modes == [(True, True, False)]  # without a graph alone
    assert not result.requires_grad
    assert not torch.equal(policy.net[1].running_mean, before["net.1.running_mean"])
    policy.modes.clear()
    screen_log_probs(policy, states, modules=[policy.net])
    assert policy.modes == [(True, False, False)]  # the policy itself was not named
    assert policy.net.training


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_flags_are_restored_after_an_error(states, error):
    class Broken(Policy):
        def forward(self, rows):
            super().forward(rows)
            raise error("boom")

    policy = Broken().train()
    policy.net[2].eval()
    with pytest.raises(error, match="boom"):
        screen_log_probs(policy, states, modules=[policy])
    assert policy.modes == [(False, False, False)]
    assert policy.training
    assert policy.net[1].training
    assert not policy.net[2].training
    assert torch.is_grad_enabled()


def test_chunks_give_the_same_log_probs(states):
    policy = Policy()
    whole = screen_log_probs(policy, states, modules=[policy])
    policy.sizes.clear()
    parts = screen_log_probs(policy, states, modules=[policy], chunk=4)
    assert policy.sizes == [4, 4, 2]
    assert_close(parts, whole)


def step(policy, states, screen):
    advantages = torch.linspace(-1, 1, 10)
    return kondo.backward(policy, states, advantages, gate=kondo.Gate(rate=0.3), screen=screen)


def test_known_log_probs_call_nothing(states):
    policy = Policy()
    known = torch.linspace(-2, -1, 10, requires_grad=True)
    report = step(policy, states, known)
    assert report.rows_screened == 0
    assert policy.modes == [(True, True, True)]
    assert known.grad is None
    assert report.price == pytest.approx(float((-known * torch.linspace(-1, 1, 10)).topk(3)[0][-1]))


@pytest.mark.parametrize(
    ("screen", "message"),
    [
        (torch.zeros(10, dtype=torch.int64), "screen must be floating point"),
        (torch.zeros(9), r"screen must have shape \[10\] or \[10, T\].*got \[9\]"),
        (torch.zeros(10, 2, 2), r"screen must have shape \[10\]"),
        ("draft", "screen must be callable on rows, .* got str"),
        (lambda rows: None, r"screen\(rows\) must be a floating-point tensor, got NoneType"),
        (lambda rows: rows.sum(), r"screen\(rows\) must have shape \[10\]"),
    ],
)
def test_bad_screens_are_named(states, screen, message):
    with pytest.raises(ValueError, match=message):
        step(Policy(), states, screen)


def test_a_policy_must_be_callable(states):
    with pytest.raises(ValueError, match=r"policy must be callable on rows, .* got Tensor"):
        step(states, states, None)
