"""One choice among units, one number at a time: what `kondo.select` is held to.

Tensors of one batch come in, [N] or [N, T] without leading dimensions; lists come out.
"""

import math

import torch
from torch import Tensor


def unit_values(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, unit: str
) -> tuple[list[float], list[bool]]:
    """Return the delight of every unit, flat, and which units count."""
    if unit == "sample":
        triples = zip(log_probs.tolist(), advantages.tolist(), mask.tolist(), strict=True)
        return [-p * u if m else 0.0 for p, u, m in triples], mask.tolist()
    values, counts = [], []
    for row in range(log_probs.shape[0]):
        tokens, counted = [], []
        for place in range(log_probs.shape[1]):
            counted.append(bool(mask[row, place]))
            value = -float(log_probs[row, place]) * float(advantages[row])
            tokens.append(value if counted[-1] else 0.0)
        values += tokens if unit == "token" else [math.fsum(tokens)]
        counts += counted if unit == "token" else [any(counted)]
    return values, counts


def highest(values: list[float], counts: list[bool], rate: float) -> tuple[list[bool], float]:
    """Return which units a hard rate keeps, and the price; for values without ties."""
    worth = sorted((v for v, c in zip(values, counts, strict=True) if c and v != 0), reverse=True)
    number = min(len(worth), max(1, round(rate * sum(counts))))
    if not number:
        return [False] * len(values), math.inf
    price = worth[number - 1]
    return [c and v != 0 and v >= price for v, c in zip(values, counts, strict=True)], price


def by_element(per_unit: list[float], mask: Tensor, unit: str) -> list[float]:
    """Return what belongs to a unit for each of its elements that count, flat; 0 elsewhere."""
    counted = mask.flatten().tolist()
    if unit == "sequence":
        per_unit = [value for value in per_unit for _ in range(mask.shape[1])]
    return [value if counts else 0.0 for value, counts in zip(per_unit, counted, strict=True)]


def rows_of(elements: list[float], num_rows: int) -> list[int]:
    """Return the rows with an element that is not 0."""
    width = len(elements) // num_rows if num_rows else 0
    return [row for row in range(num_rows) if any(elements[row * width : (row + 1) * width])]


def gated_loss(log_probs: Tensor, advantages: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of -weight * U * log pi, with a weight of 0 where nothing is kept."""
    spread = advantages if advantages.ndim == log_probs.ndim else advantages.unsqueeze(-1)
    return -torch.where(weight != 0, weight * spread * log_probs, 0.0).sum()
