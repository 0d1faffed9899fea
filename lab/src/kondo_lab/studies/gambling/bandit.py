"""The gambling bandit: one sure arm, worse arms that may pay more by luck, and what theory says.

Arm 0 pays 1. Each other arm pays 1 - Delta on average; some have Gaussian noise of deviation sigma.
The baseline is the policy's true expected reward, V = sum_a pi(a) mu(a).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Arms(NamedTuple):
    """A bandit's arms; the sweep over sigma / Delta multiplies the noise."""

    means: tuple[float, ...]
    noisy: tuple[bool, ...]

    @property
    def best(self) -> int:
        """The arm of highest mean."""
        return max(range(len(self.means)), key=lambda arm: self.means[arm])

    def rewards(self, actions: Tensor, sigma: Tensor, normal: Tensor) -> Tensor:
        """Return [P, n]: mu(a), plus sigma [P, 1] times the draw where the arm is noisy.

        `normal`, [P, n], is standard normal, or the mean of several such.
        """
        means, noisy = (
            torch.tensor(of_arm, dtype=torch.float64, device=actions.device)
            for of_arm in (self.means, self.noisy)
        )
        return means[actions] + sigma * noisy[actions] * normal


def gamble(gap: float, *, num_arms: int = 2, gamblers: int = 1) -> Arms:
    """Return arm 0 sure, `gamblers` noisy arms, the rest sure; all but arm 0 worse by `gap`."""
    if not 0 <= gamblers < num_arms:
        raise ValueError(
            f"gamblers must be below num_arms ({num_arms}), got {gamblers}; arm 0 is sure."
        )
    worse = num_arms - 1
    noisy = (False, *(arm < gamblers for arm in range(worse)))
    return Arms(means=(1.0,) + (1.0 - gap,) * worse, noisy=noisy)


def landmine(gap: float, penalty: float, *, num_arms: int) -> Arms:
    """Return arm 0 sure, worse sure arms, and last a noisy one that costs `penalty` on top."""
    worse = (1.0 - gap,) * (num_arms - 2)
    means = (1.0, *worse, 1.0 - gap - penalty)
    return Arms(means=means, noisy=(False,) * (num_arms - 1) + (True,))


def equal_noise(gap: float) -> Arms:
    """Return two arms with the same noise."""
    return Arms(means=(1.0, 1.0 - gap), noisy=(True, True))


def good_gamble(gap: float) -> Arms:
    """Return two arms of which the noisy one is the better by `gap`."""
    return Arms(means=(1.0, 1.0 + gap), noisy=(False, True))


def luck(p: float, ratio: float) -> float:
    """Return Pr(U > 0 | bad arm) = Phi(-p Delta / sigma), p the good arm's probability.

    A draw of the bad arm is 1 - Delta + sigma z, the baseline 1 - (1 - p) Delta.
    """
    return 0.5 * math.erfc(p / ratio / math.sqrt(2)) if ratio > 0 else 0.0


def rest_point(
    weight: Callable[[np.ndarray], np.ndarray], gap: float, *, bad_noise: float, good_noise: float
) -> float:
    """Return where the expected update of two arms leaves the bad arm, from an even start.

    The logit of the good arm over the bad one moves by 2 pi_0 pi_1 (A_0 - A_1), where
    A_a = E[w(U l) U | a]. From pi_1 = 1/2 the bad arm's probability follows the sign of A_0 - A_1
    to the first zero; 0 or 1 if there is none; 1/2 if nothing is kept there.

    A gate at price 0 has a closed form: with h(x) = phi(x) - x Phi(-x) and a sure good arm,
    A_0 - A_1 = pi_1 Delta - sigma h(pi_0 Delta / sigma), which is below 0 everywhere once
    sigma / Delta > 1 / h(0) = sqrt(2 pi) = 2.51.
    `weight` is that of a sample by its delight, `gap` is Delta, the noises are sigma of each arm.
    """
    normal = np.linspace(-8, 8, 1001)
    density = np.exp(-(normal**2) / 2)
    density /= density.sum()

    def attraction(mean: float, sigma: float, surprisal: float) -> float:
        advantage = mean + sigma * normal
        return float((weight(advantage * surprisal) * advantage * density).sum())

    def pull(bad: float) -> float:
        good = attraction(bad * gap, good_noise, -math.log1p(-bad))
        return good - attraction((bad - 1) * gap, bad_noise, -math.log(bad))

    start = pull(0.5)
    if start == 0:
        return 0.5
    side = -1.0 if start > 0 else 1.0
    for logit in np.arange(0.05, 14, 0.05):
        bad = 1 / (1 + math.exp(-side * logit))
        if pull(bad) * side > 0:
            return bad
    return 0.0 if side < 0 else 1.0
