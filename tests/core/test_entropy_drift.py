"""What gates do to tokens that the reward does not depend on, by enumeration.

A policy over K tokens, and a reward of 1 with probability q, else 0, by the toss of a coin whatever
the token: U = 1 - q or -q. What the expected update does to the entropy:

    dense policy gradient     nothing
    gate by U or |U| alone    nothing, whatever U's distribution
    DG                        for |U| l << eta: about E[U^2] / (4 eta) times the gradient of the
                              entropy, since E[l grad log pi] = grad H
    hard gate by delight      more of it where the price cuts by surprisal
    hard gate by |U| l        nothing where U is symmetric, q = 1/2; else, at prices that are high
                              against the smaller |U|, more of it while successes are rare and less
                              while failures are; at low prices the other way round
    unbiased gate             nothing, whatever the signal: the expected weight of a unit is 1
"""

import pytest
import torch

import kondo
from tolerances import assert_close

LOGITS = torch.tensor([1.5, 0.2, -0.7, -2.0], dtype=torch.float64)
SUCCESS = [0.3, 0.5, 0.9]
"""q: successes that are rare, as frequent as failures, and frequent."""


def coins(success):
    """Return the probability of either side of the coin and its U, both [2]: success, failure."""
    probs = torch.tensor([success, 1 - success], dtype=torch.float64)
    return probs, torch.tensor([1 - success, -success], dtype=torch.float64)


def expected_gradient(weights, success=0.5):
    """Return the expected ascent direction of the logits, [K], of weights [2, K] by coin and token.

    sum over coins and tokens of  pi(coin) pi(token) * weight * U * grad log pi(token)
    """
    probs = LOGITS.softmax(0)
    scores = torch.eye(len(probs), dtype=torch.float64) - probs  # grad log pi of each token
    chances, advantages = coins(success)
    return torch.einsum("c,ck,k,kj->j", chances * advantages, weights, probs, scores)


def entropy_gradient():
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    (found,) = torch.autograd.grad(-(log_probs.exp() * log_probs).sum(), logits)
    return found


def of_coins(priority, success=0.5):
    """Return priority [2, K] of every token with either advantage."""
    log_probs = LOGITS.log_softmax(0).expand(2, -1).flatten()
    advantages = coins(success)[1].repeat_interleave(len(LOGITS))
    return priority(log_probs, advantages).view(2, -1)


def entropy_drift(priority, price, success=0.5):
    """Return <expected gradient, entropy's gradient> of a hard gate that keeps something."""
    kept = (of_coins(priority, success) > price).double()
    assert kept.sum() > 0
    return expected_gradient(kept, success) @ entropy_gradient()


@pytest.mark.parametrize("success", SUCCESS)
def test_dense_policy_gradient_leaves_such_tokens_alone(success):
    assert_close(expected_gradient(torch.ones(2, 4).double(), success), torch.zeros(4).double())


@pytest.mark.parametrize("success", SUCCESS)
@pytest.mark.parametrize("eta", [30.0, 100.0])
def test_dg_raises_their_entropy(eta, success):
    drift = expected_gradient(torch.sigmoid(of_coins(kondo.delight, success) / eta), success)
    chances, advantages = coins(success)
    predicted = (chances @ advantages**2) / (4 * eta) * entropy_gradient()
    torch.testing.assert_close(drift, predicted, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("success", SUCCESS)
def test_dg_at_a_temperature_of_1_still_raises_their_entropy(success):
    weights = torch.sigmoid(of_coins(kondo.delight, success))
    assert expected_gradient(weights, success) @ entropy_gradient() > 0.001


@pytest.mark.parametrize("success", [0.3, 0.5])
@pytest.mark.parametrize("price", [0.3, 0.5, 1.0])
def test_a_hard_gate_by_delight_raises_their_entropy(price, success):
    assert entropy_drift(kondo.delight, price, success) > 0.005


@pytest.mark.parametrize("success", SUCCESS)
@pytest.mark.parametrize("price", [0.0, 0.05])
def test_a_hard_gate_by_advantage_leaves_them_alone(price, success):
    kept = (of_coins(kondo.signals.advantage, success) > price).double()
    assert kept.sum() == len(LOGITS)
    assert_close(expected_gradient(kept, success), torch.zeros(4).double())


@pytest.mark.parametrize(("price", "sides"), [(0.05, 2), (0.6, 1)])
@pytest.mark.parametrize("success", [0.3, 0.9])
def test_a_hard_gate_by_the_size_of_the_advantage_leaves_them_alone(success, price, sides):
    kept = (of_coins(kondo.signals.abs_advantage, success) > price).double()
    assert kept.sum() == sides * len(LOGITS)
    assert_close(expected_gradient(kept, success), torch.zeros(4).double())


@pytest.mark.parametrize("price", [0.1, 0.5, 1.0])
def test_a_gate_by_abs_delight_leaves_them_alone_where_the_advantage_is_symmetric(price):
    kept = (of_coins(kondo.signals.abs_delight) > price).double()
    assert kept.sum() > 0
    assert_close(expected_gradient(kept), torch.zeros(4).double())


@pytest.mark.parametrize(
    ("success", "price", "expected"),
    [
        # Successes are rare, |U| = 0.7, and a high price keeps unlikely tokens of theirs.
        (0.3, 0.5, 0.0147),
        (0.3, 1.0, 0.0203),
        # Failures are, |U| = 0.9: now the unlikely tokens that are kept are pushed down.
        (0.9, 0.5, -0.0092),
        (0.9, 1.0, -0.0092),
        # A low price keeps the rare side whole, and of the other the unlikely tokens.
        (0.3, 0.2, -0.0215),
        (0.9, 0.1, 0.0092),
    ],
)
def test_a_gate_by_abs_delight_moves_the_entropy_where_it_is_not(success, price, expected):
    found = entropy_drift(kondo.signals.abs_delight, price, success)
    assert found.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("success", SUCCESS)
@pytest.mark.parametrize("price", [0.05, 0.6, 5.0])
@pytest.mark.parametrize("options", [{}, {"max_weight": 20.0}], ids=["plain", "floor"])
@pytest.mark.parametrize("signal", ["gradient_norm", "abs_delight", "abs_advantage"])
def test_an_unbiased_gate_leaves_them_alone(signal, options, price, success):
    """The drift is exactly 0: every unit is kept with probability p and weight 1 / p."""
    signal = getattr(kondo.signals, signal)
    gate = kondo.UnbiasedGate(rate=0.1, signal=signal, **options)
    worth = of_coins(signal, success)
    mask, one = torch.ones_like(worth, dtype=torch.bool), torch.tensor([price]).double()
    kept, weight = (
        getattr(gate.choose_at(worth, mask, one, torch.zeros_like(worth)), name)
        for name in ("probability", "weight")
    )
    assert (kept > 0).all()
    assert (kept < 1).any() or price == 0.05
    expected = kept * weight  # a draw of 0 keeps everything, so that every weight is known
    assert_close(expected_gradient(expected, success), torch.zeros(4).double())
    assert_close(expected_gradient(expected, success) @ entropy_gradient(), 0.0)
