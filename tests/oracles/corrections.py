"""Losses of one answer, token by token in Python floats: the coefficient of grad log pi."""

import math


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clipped(ratio: float, advantage: float, clip: float) -> float:
    """The coefficient of PPO: r U where the surrogate has a gradient, else 0."""
    held = min(max(ratio, 1 - clip), 1 + clip)
    return ratio * advantage if ratio * advantage <= held * advantage else 0.0


def coefficients(
    rule: str, batch: list[tuple[float, list[float], list[float]]], eta: float
) -> list[list[float]]:
    """Coefficients of every token of a member's batch: answers of (U, log pi, log mu)."""
    chis = [[u * -p for p in new] for u, new, _ in batch]
    tokens = [chi for row in chis for chi in row]
    rms = math.sqrt(math.fsum(chi * chi for chi in tokens) / len(tokens))
    square = math.fsum(u * u for u, new, _ in batch for _ in new) / len(tokens)
    found = []
    for (u, new, old), chi in zip(batch, chis, strict=True):
        ratios = [math.exp(p - q) for p, q in zip(new, old, strict=True)]
        whole = math.prod(ratios)
        found.append([])
        for p, r, x in zip(new, ratios, chi, strict=True):
            by_rule = {
                "GRPO uncorrected": u,
                "PPO clip 0.2": clipped(r, u, 0.2),
                "token ratios, cap 2": min(r, 2) * u,
                "sequence ratios, cap 2": min(whole, 2) * u,
                "CISPO": min(r, 5) * u,
                "GSPO": clipped(whole ** (1 / len(new)), u, 0.05),
                "DG": sigmoid(x / eta) * u,
                "DG, relative eta": sigmoid(x / rms) * u,
                "DG by sequence": sigmoid(math.fsum(chi)) * u,
                "DG without drift": sigmoid(x) * u + square * p / 4,
                "DG x PPO clip": sigmoid(x) * clipped(r, u, 0.2),
            }
            found[-1].append(by_rule[rule])
    return found
