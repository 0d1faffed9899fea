"""Closed forms and exact sums of the contaminated bandit.

Arm 0 is right, p = 1 - delta, the K - 1 wrong arms are equally likely. A sample is drawn from nu
with probability rho, else from pi:

    mu = (1 - rho) pi + rho nu        U = 1/2 for arm 0, -1/2 for the others
    g  = sum_a mu(a) w(a) U(a) (e_a - pi)

With d = e_0 - mean of the wrong arms, n = nu - mean of the wrong arms (they stand at right angles),
w+ the weight of a success and w- that of a failure:

    grad J = p delta d
    g = [(1 - rho) p delta w+ + ((1 - rho) delta + rho) p w-] d / 2  -  rho w- n / 2

A failure that is pushed down lifts all other arms, most of all the right one: hence rho in the
factor of d, and a cosine that does not fall to zero however large rho / delta is.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from kondo_lab.studies import softmax_bandit as bandit

Source = Literal["one arm", "all wrong arms"]
"""Where contaminated samples come from."""


def source(kind: Source, num_arms: int) -> Tensor:
    """Return nu [K]: all on arm 1, or evenly on the wrong arms."""
    nu = torch.zeros(num_arms, dtype=torch.float64)
    if kind == "one arm":
        nu[1] = 1.0
    else:
        nu[1:] = 1 / (num_arms - 1)
    return nu


def advantages(num_arms: int) -> Tensor:
    """Return U [K] of R = 1{A = 0} and b = 1/2."""
    values = torch.full((num_arms,), -0.5, dtype=torch.float64)
    values[0] = 0.5
    return values


def dg_weight(probs: Tensor, values: Tensor, eta: float) -> Tensor:
    """Return sigmoid(U l / eta) [K]."""
    return torch.sigmoid(-values * probs.log() / eta)


def gate_bound(prob: float, eta: float) -> float:
    """Return pi(a)^(1 / (2 eta)), Lemma 1's bound on DG's weight of a failure at U = -1/2."""
    return float(prob ** (1 / (2 * eta)))


def mixture(probs: Tensor, nu: Tensor, rho: float) -> Tensor:
    """Return mu [K]."""
    return (1 - rho) * probs + rho * nu


def expected(probs: Tensor, drawn: Tensor, coefficients: Tensor) -> Tensor:
    """Return sum_a drawn(a) c(a) (e_a - pi), [K]: the mean gradient of samples drawn so."""
    by_arm = drawn * coefficients
    return by_arm - by_arm.sum() * probs


def cosine(vector: Tensor, direction: Tensor) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(1 - bandit.cosine_gap(vector, direction))


def closed_cosine(
    delta: float, rho: float, num_arms: int, *, success: float, failure: float, kind: Source
) -> float:
    """Return cos(g, grad J) of the module's formula, given w+ and w-.

    Example:
        >>> from kondo_lab.studies.contamination.theory import closed_cosine
        >>> pg = closed_cosine(1e-9, 0.1, 10, success=1, failure=1, kind="one arm")
        >>> round(pg, 4), round((10 / 18) ** 0.5, 4)  # sqrt(K / (2 K - 2)) as delta falls
        (0.7454, 0.7454)
    """
    p = 1 - delta
    along = (1 - rho) * p * delta * success + ((1 - rho) * delta + rho) * p * failure
    squares = 1.0 if kind == "one arm" else 1 / (num_arms - 1)
    off = rho * failure * math.sqrt(squares - 1 / (num_arms - 1))
    return along / math.hypot(along, off / math.sqrt(num_arms / (num_arms - 1)))


def limit_cosine(num_arms: int) -> float:
    """Return PG's cosine as delta falls, contamination on one arm: sqrt(K / (2 K - 2))."""
    return math.sqrt(num_arms / (2 * num_arms - 2))


def signal_over_contamination(probs: Tensor, nu: Tensor, rho: float, weights: Tensor) -> float:
    """Return |mean gradient of the policy's own samples| / |that of the contaminated ones|.

    Each with its share, 1 - rho and rho.
    """
    coefficients = weights * advantages(len(probs))
    own = (1 - rho) * expected(probs, probs, coefficients)
    foreign = rho * expected(probs, nu, coefficients)
    return float(own.norm() / foreign.norm())


def failure_second_moment(probs: Tensor, drawn: Tensor, weights: Tensor) -> float:
    """Return E[w^2 U^2 |s_perp|^2; A wrong], s_perp the score less its part along grad J."""
    scores = torch.eye(len(probs), dtype=torch.float64) - probs
    off = bandit.perpendicular(scores, scores[0].expand_as(scores)).square().sum(dim=1)
    return float((drawn * weights.square() * off)[1:].sum() / 4)


def overlap(probs: Tensor, nu: Tensor, eta: float) -> float:
    """Return sum_a nu(a) pi(a)^(1 / eta): the policy-overlap factor, inferred."""
    return float((nu * probs.pow(1 / eta)).sum())
