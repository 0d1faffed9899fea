"""Corrections: losses for experience that is stale, wrong or not the learner's own.

    L = 1/D * sum over tokens of  -weight * U * log pi(token)        weight: not differentiated

| arm                     | weight, r = pi / mu of a token, chi = U l its delight          | mu |
|-------------------------|----------------------------------------------------------------|----|
| GRPO uncorrected        | 1                                                              |    |
| PPO clip 0.2            | r where min(r U, clip(r) U) has a gradient, else 0             | x  |
| token ratios, cap 2     | min(r, 2)                                                      | x  |
| sequence ratios, cap 2  | min(product of r over the answer, 2)                           | x  |
| CISPO                   | min(r, 5)                                                      | x  |
| GSPO                    | as PPO with s = geometric mean of r over the answer            | x  |
| DG, eta                 | sigmoid(chi / eta)                                             |    |
| DG, relative eta        | sigmoid(chi / (eta * root mean square of the batch's chi))     |    |
| DG by sequence          | sigmoid(sum of chi over the answer / eta)                      |    |
| DG without drift        | sigmoid(chi / eta) - mean(U^2) l / (4 eta U)                   |    |
| price 0                 | 1 where the answer's delight is above 0, else 0                |    |
| DG-K                    | 1 for the share of answers of highest delight, else 0          |    |
| DG x PPO clip           | sigmoid(chi / eta) times PPO's                                 | x  |

A cross under mu: needs the log-probs of whoever acted. Surprisal l is always the learner's own, at
the time of the update. Losses with ratios divide U by the group's standard deviation, as GRPO does;
those with delight do not.
"""

import dataclasses
import inspect
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kondo import Gate, delight, losses
from kondo_lab.training.arms import Arm, percent
from kondo_lab.training.gates import unchecked
from kondo_lab.training.language_arms import CLIPPED, text_arm
from kondo_lab.training.losses import Loss

_TINY = 1e-30


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}.")


@dataclasses.dataclass(frozen=True)
class Delightful:
    """DG with the learner's own log-probs: -sigmoid(chi / eta) * U * log pi.

    By token it is `kondo.losses.dg`, but reads nothing from the device.

    Args:
        eta: temperature.
        unit: whose delight it is: the token's, or the sum over its answer.
        relative: eta counts in root mean squares of the batch's token delights.
    """

    eta: float = 1.0
    unit: Literal["token", "sequence"] = "token"
    relative: bool = False

    def __post_init__(self) -> None:
        _check_positive("eta", self.eta)
        if self.relative and self.unit != "token":
            raise ValueError(f"unit must be 'token' for a relative eta, got {self.unit!r}.")

    def __call__(
        self, log_probs: Tensor, advantages: Tensor, *, mask: Tensor, members: int
    ) -> Tensor:
        """Return the terms, [n, T]; members' rows [n / members] stand one after the other."""
        chi = _delight(log_probs, advantages)
        if self.unit == "sequence":
            chi = torch.where(mask, chi, 0.0).sum(dim=1, keepdim=True)
        scale: float | Tensor = self.eta
        if self.relative:
            scale = self.eta * _mean(chi.square(), mask, members).sqrt().clamp(min=_TINY)
        return torch.sigmoid(chi / scale) * losses.pg(log_probs, advantages)


@dataclasses.dataclass(frozen=True)
class Driftless:
    """DG less the entropy bonus that it has in expectation.

    To first order in 1 / eta the coefficient of grad log pi is

        U sigmoid(U l / eta) = U / 2 + U^2 l / (4 eta).

    Where U does not depend on the token, its mean is 0 and l = -log pi, the first term vanishes in
    expectation, and the second is a gradient of the entropy H = E[l]:

        E[U^2 l grad log pi] / (4 eta) = E[U^2] / (4 eta) * E[l grad log pi]
                                       = E[U^2] / (4 eta) * grad H,

    as grad H = -sum_a grad pi(a) (log pi(a) + 1) = E[l grad log pi]. DG raises the entropy of
    tokens that say nothing about the reward. Hence the coefficient here,

        U sigmoid(U l / eta) - mean(U^2) l / (4 eta),

    with the mean over the tokens of the batch.
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("eta", self.eta)

    def __call__(
        self, log_probs: Tensor, advantages: Tensor, *, mask: Tensor, members: int
    ) -> Tensor:
        """Return the terms, [n, T]; members' rows [n / members] stand one after the other."""
        chi, unlikely = _delight(log_probs, advantages), -log_probs.detach()
        squares = advantages.square().expand_as(log_probs)
        bonus = _mean(squares, mask, members) * unlikely / (4 * self.eta)
        return torch.sigmoid(chi / self.eta) * losses.pg(log_probs, advantages) + bonus * log_probs


@dataclasses.dataclass(frozen=True)
class DelightfulClip:
    """PPO's clipped surrogate times DG's weight: sigmoid(chi / eta) * ppo."""

    eta: float = 1.0
    clip: float = 0.2

    def __post_init__(self) -> None:
        _check_positive("eta", self.eta)
        _check_positive("clip", self.clip)

    def __call__(self, log_probs: Tensor, advantages: Tensor, *, old_log_probs: Tensor) -> Tensor:
        """Return the terms, [n, T]."""
        weight = torch.sigmoid(_delight(log_probs, advantages) / self.eta)
        return weight * losses.ppo(log_probs, advantages, old_log_probs, clip=self.clip)


@dataclasses.dataclass(frozen=True)
class GroupSequence:
    """GSPO: PPO's surrogate of one ratio per answer, s = exp(mean over tokens of log(pi / mu)).

    Every token of an answer has the term -min(s U, clip(s) U), and the gradient is shared among
    them: a token's coefficient is that of PPO with s in the place of r.

    Args:
        clip: of s. The published 3e-4 is for answers of thousands of tokens; the spread of a mean
            falls with the root of their number, and answers here have about 20.

    Reference: https://arxiv.org/abs/2507.18071, equation 5
    """

    clip: float = 0.05

    def __post_init__(self) -> None:
        _check_positive("clip", self.clip)

    def __call__(
        self, log_probs: Tensor, advantages: Tensor, *, old_log_probs: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the terms, [n, T]."""
        log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
        mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        own, none = mean.expand_as(log_probs), torch.zeros_like(log_probs)
        return losses.ppo(own, advantages, none, clip=self.clip)


def _delight(log_probs: Tensor, advantages: Tensor) -> Tensor:
    found: Tensor = unchecked(delight)(log_probs, advantages)
    return found


def _mean(values: Tensor, mask: Tensor, members: int) -> Tensor:
    """Return each member's mean over its tokens, for each of its rows: [n, 1]."""
    of_member = mask.view(members, -1)
    total = torch.where(mask, values, 0.0).view(members, -1).sum(dim=1)
    means = total / of_member.sum(dim=1).clamp(min=1)
    return means.repeat_interleave(len(mask) // members).unsqueeze(1)


def needs_behaviour(arm: Arm) -> bool:
    """Return whether an arm's loss takes the log-probs of whoever acted.

    Example:
        >>> from kondo_lab.training.corrections import corrections, needs_behaviour
        >>> [each.name for each in corrections() if needs_behaviour(each)][:2]
        ['PPO clip 0.2', 'token ratios, cap 2']
    """
    taken = inspect.signature(arm.loss).parameters
    return bool({"old_log_probs", "behaviour_log_probs"} & set(taken))


def corrections(*, etas: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0), rate: float = 0.1) -> list[Arm]:
    """Return the arms of the table above. Gates screen with the learner's own log-probs.

    Example:
        >>> from kondo_lab.training.corrections import corrections
        >>> [each.name for each in corrections(etas=(1.0,))][6:8]
        ['DG, eta 1', 'DG, relative eta']
    """
    ratios: dict[str, Loss] = {
        "GRPO uncorrected": losses.pg,
        "PPO clip 0.2": CLIPPED,
        "token ratios, cap 2": partial(losses.is_pg, max_weight=2.0),
        "sequence ratios, cap 2": partial(losses.sequence_is_pg, max_weight=2.0),
        "CISPO": partial(losses.is_pg, max_weight=5.0),
        "GSPO": GroupSequence(),
    }
    delights: dict[str, Loss] = {f"DG, eta {eta:g}": Delightful(eta) for eta in etas} | {
        "DG, relative eta": Delightful(relative=True),
        "DG by sequence": Delightful(unit="sequence"),
        "DG without drift": Driftless(),
        "DG x PPO clip": DelightfulClip(),
    }
    return [
        *(text_arm(name=name, loss=loss, divided=True) for name, loss in ratios.items()),
        *(text_arm(name=name, loss=loss) for name, loss in delights.items()),
        Arm(name="price 0", gate=Gate(price=0.0)),
        Arm(name=f"DG-K {percent(rate)}", gate=Gate(rate=rate)),
    ]
