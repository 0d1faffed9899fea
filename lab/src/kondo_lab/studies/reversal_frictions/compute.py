"""How many samples a method needs to get to an error, over DG's, and whether that grows with H.

    cost    samples until the error first fell to a target; a run that never got there counts with
            all that it was given
    gain    log10(cost of the other / cost of DG), seed by seed
    slope   of the gain on H, by least squares, seed by seed

Where the other never got there its true cost is larger, and so is the gain; where DG never did the
gain is smaller. What a bound cannot tell is open.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.study import Estimate, Verdict
from kondo_lab.training.learner_error import LEARNER_ERROR


class Cost(NamedTuple):
    """What a seed has paid."""

    samples: float
    reached: bool


class Gain(NamedTuple):
    """log10 of a ratio of costs, and in which directions the truth may lie."""

    log10: float
    may_be_larger: bool
    may_be_smaller: bool


class Bounded(NamedTuple):
    """A mean over seeds, of numbers of which some are bounds."""

    estimate: Estimate
    may_be_larger: bool
    may_be_smaller: bool

    @property
    def words(self) -> str:
        """How the truth stands to the estimate; "" where nothing is a bound."""
        if self.may_be_larger and self.may_be_smaller:
            return "either side"
        return "at least" if self.may_be_larger else "at most" if self.may_be_smaller else ""

    def verdict(self, of_estimate: Verdict) -> Verdict:
        """Return the verdict on "at least so large", open where a bound cannot tell."""
        if of_estimate == "differs" and self.may_be_larger:
            return "noisy"
        return "noisy" if of_estimate == "matches" and self.may_be_smaller else of_estimate


def costs(
    records: pd.DataFrame, part: str, series: str, target: float, *, setting: float
) -> dict[int, Cost]:
    """Return seed -> samples until the learner's error first fell to `target`."""
    own = statistics.select(records, part, series, LEARNER_ERROR, setting=setting)
    reach = statistics.first_reach(records, part, series, LEARNER_ERROR, target, setting=setting)
    given = {
        int(seed): float(value) for seed, value in own.groupby("seed")["forward"].max().items()
    }
    return {
        seed: Cost(reach.costs[seed].forward, True)
        if seed in reach.costs
        else Cost(all_of_it, False)
        for seed, all_of_it in given.items()
    }


def gains(theirs: Mapping[int, Cost], ours: Mapping[int, Cost]) -> dict[int, Gain]:
    """Return seed -> gain, of the seeds that both have.

    Example:
        >>> from kondo_lab.studies.reversal_frictions.compute import Cost, gains
        >>> gains({0: Cost(1000.0, False)}, {0: Cost(100.0, True)})
        {0: Gain(log10=1.0, may_be_larger=True, may_be_smaller=False)}
    """
    return {
        seed: Gain(
            math.log10(theirs[seed].samples / ours[seed].samples),
            not theirs[seed].reached,
            not ours[seed].reached,
        )
        for seed in sorted(theirs.keys() & ours.keys())
    }


def ratio(found: Iterable[Gain]) -> Bounded:
    """Return the geometric mean of the ratios, with the standard error to first order."""
    several = list(found)
    logs = statistics.estimate([gain.log10 for gain in several])
    mean = 10**logs.mean
    estimate = Estimate(mean, mean * math.log(10) * logs.se, logs.seeds)
    return Bounded(
        estimate,
        any(gain.may_be_larger for gain in several),
        any(gain.may_be_smaller for gain in several),
    )


def slope(by_length: Mapping[float, Mapping[int, Gain]]) -> Bounded | None:
    """Return the slope of the gain on H: mean over the seeds that have all lengths.

        slope = sum_H c_H gain_H,   c_H = (H - mean H) / sum (H - mean H)^2

    A gain that may be larger makes a slope that may be larger where c_H > 0, else one that may be
    smaller. None with fewer than three lengths, or no seed at all of them.
    """
    lengths = sorted(by_length)
    seeds = sorted(set.intersection(*(set(own) for own in by_length.values()))) if lengths else []
    if len(lengths) < 3 or not seeds:
        return None
    centred = np.array(lengths) - np.mean(lengths)
    factors = centred / (centred**2).sum()
    found, larger, smaller = [], False, False
    for seed in seeds:
        own = [by_length[length][seed] for length in lengths]
        found.append(float(factors @ [gain.log10 for gain in own]))
        for factor, gain in zip(factors, own, strict=True):
            larger |= bool(
                (factor > 0 and gain.may_be_larger) or (factor < 0 and gain.may_be_smaller)
            )
            smaller |= bool(
                (factor < 0 and gain.may_be_larger) or (factor > 0 and gain.may_be_smaller)
            )
    return Bounded(statistics.estimate(found), larger, smaller)


def always_reached(by_length: Mapping[float, Mapping[int, Cost]]) -> Sequence[float]:
    """Return the lengths at which every seed got there."""
    return [x for x, own in sorted(by_length.items()) if all(cost.reached for cost in own.values())]
