"""What gates do to tokens that the reward does not depend on, by enumeration.

A policy over K tokens, and an advantage of +-u by the toss of a coin whatever the token: dense
policy gradient expects no change, nor does a gate that looks at no surprisal, or at no sign. DG
expects, for a large temperature, u^2 / (4 eta) times the gradient of the entropy, since
E[l grad log pi] = grad H. A hard gate whose price cuts by surprisal points the same way.
"""

import pytest
import torch

import kondo
from tolerances import assert_close

LOGITS = torch.tensor([1.5, 0.2, -0.7, -2.0], dtype=torch.float64)
SIZE = 0.5
"""u: the reward is 1 or 0, and its mean is known."""


def expected_gradient(weights):
    """Return the expected ascent direction of the logits, [K], of weights [2, K] by coin and token.

    sum over coins and tokens of  1/2 pi(token) * weight * U * grad log pi(token)
    """
    probs = LOGITS.softmax(0)
    scores = torch.eye(len(probs), dtype=torch.float64) - probs  # grad log pi of each token
    advantages = torch.tensor([[SIZE], [-SIZE]], dtype=torch.float64)
    return torch.einsum("ck,k,kj->j", 0.5 * advantages * weights, probs, scores)


def entropy_gradient():
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    (found,) = torch.autograd.grad(-(log_probs.exp() * log_probs).sum(), logits)
    return found


def of_coins(priority):
    """Return priority [2, K] of every token with either advantage."""
    log_probs = LOGITS.log_softmax(0).expand(2, -1).flatten()
    advantages = torch.tensor([SIZE, -SIZE], dtype=torch.float64).repeat_interleave(len(LOGITS))
    return priority(log_probs, advantages).view(2, -1)


def test_dense_policy_gradient_leaves_such_tokens_alone():
    assert_close(expected_gradient(torch.ones(2, 4).double()), torch.zeros(4).double())


@pytest.mark.parametrize("eta", [30.0, 100.0])
def test_dg_raises_their_entropy(eta):
    drift = expected_gradient(torch.sigmoid(of_coins(kondo.delight) / eta))
    predicted = SIZE**2 / (4 * eta) * entropy_gradient()
    torch.testing.assert_close(drift, predicted, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("price", [0.3, 0.5, 1.0])
def test_a_hard_gate_by_delight_raises_their_entropy(price):
    kept = (of_coins(kondo.delight) > price).double()
    assert expected_gradient(kept) @ entropy_gradient() > 0.005


@pytest.mark.parametrize("price", [0.0, 0.3])
def test_a_hard_gate_by_advantage_leaves_them_alone(price):
    kept = (of_coins(kondo.priorities.advantage) > price).double()
    assert kept.sum() == len(LOGITS)
    assert_close(expected_gradient(kept), torch.zeros(4).double())


@pytest.mark.parametrize("price", [0.1, 0.5, 1.0])
def test_a_gate_that_is_blind_to_the_sign_leaves_them_alone(price):
    kept = (of_coins(kondo.priorities.abs_delight) > price).double()
    assert kept.sum() > 0
    assert_close(expected_gradient(kept), torch.zeros(4).double())
