"""What arms choose and what it costs, one unit at a time in Python floats."""

import math


def advantages(rewards: list[float], group: int, *, divided: bool) -> list[float]:
    """Reward minus its group's mean, for GRPO over the group's standard deviation."""
    found = []
    for start in range(0, len(rewards), group):
        own = rewards[start : start + group]
        mean = math.fsum(own) / group
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / (group - 1))
        found += [(r - mean) / (std + 1e-4 if divided else 1.0) for r in own]
    return found


def variance(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / len(values)


def largest_variance(values: list[float], count: int) -> float:
    """Of all subsets of `count` values, by trying them all."""

    def subsets(rest: list[float], wanted: int):
        if wanted == 0:
            yield []
        elif rest:
            yield from ([rest[0], *some] for some in subsets(rest[1:], wanted - 1))
            yield from subsets(rest[1:], wanted)

    return max(variance(some) for some in subsets(values, count))


def highest(priority: dict[object, float], rate: float) -> set[object]:
    """The round(rate * units) units of highest priority, without zeros; no two may tie."""
    worth = sorted((p for p in priority if priority[p] != 0.0), key=priority.get, reverse=True)
    return set(worth[: max(1, round(rate * len(priority)))])


def tokens_read(keep: list[list[bool]], prompt_length: int) -> int:
    """Tokens of a training forward: each row with a kept token, up to the last of them."""
    total = 0
    for row in keep:
        if any(row):
            total += prompt_length + max(t for t in range(len(row)) if row[t]) + 1
    return total
