"""The multiple-choice knapsack by brute force, in plain Python: one cut per row, or none."""

from torch import Tensor


def curves(delight: Tensor, mask: Tensor, attention: Tensor):
    """Per row the choices (cost, value): skip it, or cut after token t."""
    rows = []
    for chi, counts, real in zip(
        delight.double().tolist(), mask.tolist(), attention.tolist(), strict=True
    ):
        choices, cost, value = [(0, 0.0)], 0, 0.0
        for t in range(len(chi)):
            cost += int(real[t])
            if counts[t] and chi[t] > 0:
                value += chi[t]
            choices.append((cost, value))
        rows.append(choices)
    return rows


def best_value(choices: list[list[tuple[int, float]]], budget: int) -> float:
    """Dynamic programming over rows: best[b] is the most delight that costs at most b tokens."""
    best = [0.0] * (budget + 1)
    for row in choices:
        best = [
            max(best[b - cost] + value for cost, value in row if cost <= b)
            for b in range(budget + 1)
        ]
    return best[budget]


def best_value_by_trying(choices: list[list[tuple[int, float]]], budget: int) -> float:
    """Every combination of cuts: slower still, and it judges the dynamic programming."""
    if not choices:
        return 0.0
    first, *rest = choices
    return max(
        value + best_value_by_trying(rest, budget - cost) for cost, value in first if cost <= budget
    )


def bought(delight: Tensor, keep: Tensor, attention: Tensor) -> tuple[float, int]:
    """Delight of the kept tokens, and the prefix tokens they drag into the backward."""
    value, tokens = 0.0, 0
    for chi, kept, real in zip(
        delight.double().tolist(), keep.tolist(), attention.tolist(), strict=True
    ):
        value += sum(c for c, k in zip(chi, kept, strict=True) if k)
        last = max((t for t in range(len(kept)) if kept[t]), default=-1)
        tokens += sum(real[: last + 1])
    return value, tokens
