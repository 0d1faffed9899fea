"""Softmax bandits in logit space: draws and gradients of many members, and their closed forms.

Arm 0 is the correct one, y*. With score s_a = e_a - pi, a sample's gradient is c_i * s_(a_i), where
c_i is its advantage times whatever weight a method gives it. The closed forms are for
R = 1{A = y*}, p = pi(y*), K - 1 wrong arms of equal probability and a constant baseline b.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from kondo_lab.training.part import Context, Stopped
from kondo_lab.training.record import Log, Run
from kondo_lab.training.worker_pool import one_thread


def on_one_thread(run: Callable[[Context], Iterable[Run]]) -> Callable[[Context], list[Run]]:
    """Return a part's run that computes on one thread: the tensors here are small."""

    def alone(context: Context) -> list[Run]:
        with one_thread():
            return list(run(context))

    return alone


def report(context: Context, share: float, note: str) -> None:
    """Say how far a part has come; raise Stopped where the user asked for it."""
    if context.stopped():
        raise Stopped  # nothing to save: a part takes seconds
    context.progress(share, note)


def by_seed(
    log: Log,
    arm: str,
    x: float,
    measured: Mapping[str, Tensor],
    *,
    step: int = 0,
    rollouts: int = 0,
    passes: int | Tensor = 0,
) -> None:
    """Log measured numbers, metric -> [seeds]; `passes` may be [seeds] too."""
    by_metric = {metric: values.tolist() for metric, values in measured.items()}
    for seed, values in enumerate(zip(*by_metric.values(), strict=True)):
        paid = int(passes[seed]) if isinstance(passes, Tensor) else passes
        found = dict(zip(by_metric, values, strict=True))
        log.add(arm, seed, found, x=x, step=step, rollouts=rollouts, passes=paid)


def peaked(p: float, num_arms: int) -> Tensor:
    """Return [K] float64: p for arm 0, the rest in equal parts for the others.

    Example:
        >>> from kondo_lab.studies.softmax_bandit import peaked
        >>> peaked(0.7, 4)
        tensor([0.7000, 0.1000, 0.1000, 0.1000], dtype=torch.float64)
    """
    if not 0.0 < p < 1.0 or num_arms < 2:
        raise ValueError(
            f"p must lie in (0, 1) and num_arms be at least 2, got p={p}, num_arms={num_arms}; "
            f"a softmax policy gives every arm some probability."
        )
    probs = torch.full((num_arms,), (1 - p) / (num_arms - 1), dtype=torch.float64)
    probs[0] = p
    return probs


def draw_actions(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return [P, n] int64: the arm in which each uniform number falls.

    Args:
        probs: [P, K], the members' policies.
        uniform: [P, n] in (0, 1).
    """
    edges = probs.cumsum(dim=1)[:, :-1].contiguous()  # the last arm takes what rounding leaves
    return torch.searchsorted(edges, uniform.to(edges.dtype).contiguous(), right=True)


def sum_by_arm(values: Tensor, actions: Tensor, num_arms: int) -> Tensor:
    """Return [P, K]: the sum of values [P, n] over the samples of each arm, in float64."""
    total = values.new_zeros(values.shape[0], num_arms, dtype=torch.float64)
    return total.scatter_add_(1, actions, values.double())


def gradient(coefficients: Tensor, actions: Tensor, probs: Tensor) -> Tensor:
    """Return [P, K]: mean over samples of c_i (e_(a_i) - pi)."""
    by_arm = sum_by_arm(coefficients, actions, probs.shape[1])
    return (by_arm - by_arm.sum(dim=1, keepdim=True) * probs) / actions.shape[1]


def perpendicular(vectors: Tensor, direction: Tensor) -> Tensor:
    """Return vectors [..., K] less their part along direction [..., K]."""
    along = (vectors * direction).sum(-1, keepdim=True)
    return vectors - along / direction.square().sum(-1, keepdim=True) * direction


def cosine_gap(vectors: Tensor, direction: Tensor) -> Tensor:
    """Return 1 - cos of the angle between vectors and direction, [...]; 1 for a zero vector.

    Of unit vectors a and b it is |a - b|^2 / 2, which unlike 1 - a.b is exact for small angles.
    """
    norm = vectors.norm(dim=-1, keepdim=True)
    unit = vectors / torch.where(norm > 0, norm, 1.0)
    towards = direction / direction.norm(dim=-1, keepdim=True)
    gap = (unit - towards).square().sum(-1) / 2
    return torch.where(norm.squeeze(-1) > 0, gap, 1.0)


def perpendicular_variance(p: float, num_arms: int, baseline: float) -> float:
    """Return PG's variance per sample off the true direction, (1 - p) b^2 (K - 2) / (K - 1).

    Successes lie along the true gradient. A failure's score leaves it by e_a - mean of wrong arms,
    of squared length (K - 2) / (K - 1).
    """
    return (1 - p) * baseline**2 * (num_arms - 2) / (num_arms - 1)


def pg_cosine_gap(p: float, num_arms: int, baseline: float, samples: float) -> float:
    """Return the expected 1 - cos of PG's mean over n samples, b^2 (K - 2) / (2 n p^2 (1 - p) K).

    To leading order in 1 / n: perpendicular variance over twice |grad J|^2 = p^2 (1-p)^2 K / (K-1).
    """
    steepness = p**2 * (1 - p) * num_arms
    return baseline**2 * (num_arms - 2) / (2 * samples * steepness)


def mixing_threshold(p: float, num_arms: int) -> float:
    """Return alpha* = L / (1 + L), L = log(p (K - 1) / (1 - p)): Kondo paper, Proposition 2."""
    gap = math.log(p * (num_arms - 1) / (1 - p))
    return gap / (1 + gap)


def dg_weights(
    p: float, num_arms: int, baseline: float, eta: float = 1.0
) -> tuple[float, float, float]:
    """Return (w+, w-, c): DG's weight of a success, of a failure, and E[g_DG] = c E[g_PG].

    w+ = sigmoid((1 - b) log(1/p) / eta), w- = sigmoid(-b log((K - 1) / (1 - p)) / eta),
    c = (1 - b) w+ + b w-: DG paper, Proposition 1.
    """
    success = 1 / (1 + math.exp((1 - baseline) * math.log(p) / eta))
    failure = 1 / (1 + math.exp(baseline * math.log((num_arms - 1) / (1 - p)) / eta))
    return success, failure, (1 - baseline) * success + baseline * failure
