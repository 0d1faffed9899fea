"""How far ahead of dense GRPO a series is at equal time: runs of equal steps end at unequal times.

difference of a seed = reward at the end - dense GRPO's reward at the same seconds
"""

import numpy as np

from kondo_lab.evidence.runs import Run
from kondo_lab.studies.lm_gates.arena import Arena
from kondo_lab.training.tuning import LAST


def smoothed(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what a run had paid, and its reward: at the start, then at each evaluation, [E] each.

    Both are means over the last evaluations up to that one, so the last reward is the run's reward
    at the end. A mean of rewards alone would be late by an evaluation. An evaluation of dense GRPO
    takes longer than one of a gate, so that dense GRPO would seem slower than it is.

    Example:
        >>> import numpy as np
        >>> from kondo_lab.studies.lm_gates.equal_seconds import smoothed
        >>> from kondo_lab.evidence.runs import LOOP, Run
        >>> steps, reward = np.arange(5), np.array([0.0, 0.5, 0.7, 0.9, 0.8])
        >>> paid, mean = smoothed(Run("GRPO", 0, steps, reward, {LOOP: 2.0 * steps}), LOOP)
        >>> paid.tolist(), mean.round(3).tolist()
        ([0.0, 2.0, 3.0, 4.0, 6.0], [0.0, 0.5, 0.6, 0.7, 0.8])
    """

    def means(values: np.ndarray) -> np.ndarray:
        later = values[run.steps > 0]
        ends = range(1, len(later) + 1)
        return np.array([values[0], *(later[max(0, end - LAST) : end].mean() for end in ends)])

    return means(run.costs[axis]), means(run.reward)


def differences(arena: Arena, series: str, axis: str) -> list[float] | None:
    """Return the reward at the end less dense GRPO's at the same seconds, of the seeds of both.

    Between two evaluations dense GRPO's reward is taken to grow linearly with what is paid.

    Args:
        arena: the runs.
        series: whose end it is.
        axis: what is paid, `LEARNER` or `LOOP` seconds.

    Returns:
        One number for each seed. None where no seed is of both, and where dense GRPO ended sooner
        on any: its reward after its end is not known.
    """
    dense = {own.seed: smoothed(own, axis) for own in arena.runs[arena.dense]}
    apart = []
    for own in arena.runs[series]:
        if own.seed not in dense:
            continue
        (paid, reward), (dense_paid, dense_reward) = smoothed(own, axis), dense[own.seed]
        if paid[-1] > dense_paid[-1]:
            return None
        apart.append(float(reward[-1] - np.interp(paid[-1], dense_paid, dense_reward)))
    return apart or None
