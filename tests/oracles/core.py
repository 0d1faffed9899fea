"""What core computes, one unit at a time in Python floats: no broadcasting, no cleverness.

Tensors come in and go out as lists (or lists of lists) of float64 numbers, so that nothing but the
formula is shared with the code under test.
"""

import math

import torch
from torch import Tensor


def surprisal(log_prob: float, mode_log_prob: float = 0.0) -> float:
    return max(0.0, mode_log_prob - log_prob)


def delight(log_prob: float, advantage: float, counts: bool = True) -> float:
    if not counts or advantage == 0.0:
        return 0.0
    return advantage * surprisal(log_prob)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


# Baselines: rewards -> advantages.


def batch_mean(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def group_mean(rewards: list[float], groups: list[int]) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        result.append(reward - math.fsum(members) / len(members))
    return result


def leave_one_out(rewards: list[float], groups: list[int]) -> list[float]:
    result = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and groups[j] == groups[i]]
        result.append(reward - math.fsum(others) / len(others))
    return result


def sample_std(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


# Gates.


def rate_choice(
    delight: list[float], rate: float, counts: list[bool]
) -> tuple[int, set[int], set[int]]:
    """Return how many units a hard rate keeps, which it must keep, and which it may keep.

    Units tied at the price are in `may` and not in `must`; without ties the two are equal.
    """
    worth = [i for i, d in enumerate(delight) if counts[i] and d != 0.0]
    count = min(len(worth), max(1, round(rate * sum(counts))))
    if count == 0:
        return 0, set(), set()
    price = sorted((delight[i] for i in worth), reverse=True)[count - 1]
    above = {i for i in worth if delight[i] > price}
    at = {i for i in worth if delight[i] == price}
    must = above | at if len(above | at) == count else above
    return count, must, above | at


def expected_count(delight: list[float], price: float, temperature: float) -> float:
    return math.fsum(sigmoid((d - price) / temperature) for d in delight)


def solved_price(delight: list[float], count: float, temperature: float) -> float:
    """Bisect for the price at which `count` units are kept in expectation."""
    low, high = min(delight) - 100 * temperature, max(delight) + 100 * temperature
    for _ in range(200):
        middle = (low + high) / 2
        if expected_count(delight, middle, temperature) > count:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def lot(position: int, salt: float) -> int:
    """Mix a position and the bits of a float32 by splitmix64; read the result as signed."""
    bits = torch.tensor(salt, dtype=torch.float32).double().view(torch.int64).item()
    mixed = (position + bits) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    mixed = mixed ^ (mixed >> 31)
    return mixed if mixed < 2**63 else mixed - 2**64


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values))


# Losses per unit, and their derivative by log_prob with everything else held still.


def pg(log_prob: float, advantage: float) -> tuple[float, float]:
    return -advantage * log_prob, -advantage


def dg(log_prob: float, advantage: float, eta: float) -> tuple[float, float]:
    weight = sigmoid(advantage * surprisal(log_prob) / eta)
    return -weight * advantage * log_prob, -weight * advantage


def ppo(
    log_prob: float, advantage: float, old_log_prob: float, clip: float, beta: float
) -> tuple[float, float]:
    ratio = math.exp(log_prob - old_log_prob)
    too_far_up = advantage > 0 and ratio > 1 + clip
    too_far_down = advantage < 0 and ratio < 1 - clip
    kl = beta * (old_log_prob - log_prob)
    if too_far_up:
        return -(1 + clip) * advantage + kl, -beta
    if too_far_down:
        return -(1 - clip) * advantage + kl, -beta
    return -ratio * advantage + kl, -ratio * advantage - beta


def pmpo(
    log_prob: float,
    advantage: float,
    old_log_prob: float,
    alpha: float,
    gamma: float,
    beta: float,
) -> tuple[float, float]:
    prob = math.exp(log_prob)
    kl = beta * (old_log_prob - log_prob)
    if advantage > 0:
        return -alpha * log_prob + kl, -alpha - beta
    loss = (1 - alpha) * math.log(gamma + prob)
    return loss + kl, (1 - alpha) * prob / (gamma + prob) - beta


def is_pg(
    log_prob: float, advantage: float, behaviour_log_prob: float, max_weight: float
) -> tuple[float, float]:
    ratio = min(math.exp(log_prob - behaviour_log_prob), max_weight)
    return -ratio * advantage * log_prob, -ratio * advantage


def awr(log_prob: float, advantage: float, beta: float, max_weight: float) -> tuple[float, float]:
    weight = min(math.exp(advantage / beta), max_weight)
    return -weight * log_prob, -weight


def elementwise(loss, *tensors: Tensor, **options: float) -> tuple[Tensor, Tensor]:
    """Apply a scalar loss to every unit of equally shaped tensors: values, and derivatives."""
    rows = zip(*(t.detach().double().reshape(-1).tolist() for t in tensors), strict=True)
    pairs = [loss(*row, **options) for row in rows]
    values, slopes = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return values.reshape(tensors[0].shape), slopes.reshape(tensors[0].shape)


# Diagnostics.


def diagnostics(
    delight: list[float], keep: list[bool], counts: list[bool], eta: float
) -> dict[str, float]:
    units = [(d, k) for d, k, c in zip(delight, keep, counts, strict=True) if c]
    weights = [sigmoid(d / eta) for d, _ in units]
    mean = math.fsum(weights) / len(units)
    kept_positive = sum(d > 0 and k for d, k in units)
    return {
        "delight_rms": root_mean_square([d for d, _ in units]),
        "gate_spread": math.sqrt(math.fsum((w - mean) ** 2 for w in weights) / len(units)),
        "off_neutral": share(sum(abs(w - 0.5) > 0.1 for w in weights), len(units)),
        "positive_share": share(sum(d > 0 for d, _ in units), len(units)),
        "positives_kept": share(kept_positive, sum(d > 0 for d, _ in units)),
        "kept_positive_share": share(kept_positive, sum(k for _, k in units)),
        "zero_share": share(sum(d == 0 for d, _ in units), len(units)),
        "nan_count": float(sum(math.isnan(d) for d in delight)),
    }


def share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
