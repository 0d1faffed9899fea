"""The screens that are compared, and what each costs beside a forward pass of the policy."""

import itertools
import math
from typing import Any, NamedTuple

from kondo import Gate, delight, signals
from kondo_lab.studies.speculative.settings import Settings
from kondo_lab.training import arms
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Member, each_seed

EXACT, ADVANTAGE = "exact", "advantage only"
DENSE = {"PG": arms.PG, "DG": arms.DG}
"""No screen and no gate, for comparison."""
SHAPES = {"mnist": (784, 10), "digits": (64, 10)}
"""Inputs and actions of the images."""
FULL_BITS = 32
TRAINING = 3
"""A backward pass counts as two forward passes: what learns on a row pays three in all."""


class Screen(NamedTuple):
    """One way to decide by less than the policy itself."""

    series: str
    family: str
    options: dict[str, Any]
    """Of `Arm`."""
    cost: float
    """Counted, per row, in forward passes of the policy; NaN where it stands for no computation."""
    signal: signals.Signal = delight
    """What rows are ranked by."""

    def update(self, rate: float) -> Arm:
        """Return the gate that decides by this screen."""
        return Arm(gate=Gate(rate=rate, signal=self.signal), **self.options)


def macs(*sizes: int) -> int:
    """Return the multiplications of one row through layers of these sizes.

    Example:
        >>> from kondo_lab.studies.speculative.drafts import macs
        >>> macs(784, 100, 100, 10)
        89400
    """
    return sum(rows * columns for rows, columns in itertools.pairwise(sizes))


def narrow_share(settings: Settings, width: int) -> float:
    """Return the multiplications of a narrower network's forward over those of the policy's."""
    num_inputs, num_actions = SHAPES[settings.images]
    draft, policy = (macs(num_inputs, w, w, num_actions) for w in (width, settings.width))
    return draft / policy


def screens(settings: Settings) -> list[Screen]:
    """Return every screen of the study.

    | family         | cost                                                                  |
    |----------------|-----------------------------------------------------------------------|
    | exact          | 1, a forward of the policy                                            |
    | noisy          | NaN: noise stands for a cheap forward's error, whatever that costs    |
    | noisy alone    | the same, with noise in the surprisal and none in the baseline        |
    | stale          | 1: an old policy computes as much; what it saves is sending weights   |
    | quantised      | bits / 32, as if time went with the bits of a weight                  |
    | narrow         | its multiplications over the policy's, three times: it also learns    |
    | advantage only | 0: no surprisal, no forward                                           |
    """
    found = [Screen(EXACT, EXACT, {}, 1.0)]
    for noise in settings.noises:
        options: dict[str, Any] = {"logit_noise": noise}
        found.append(Screen(f"noise {noise:g}", "noisy", options, math.nan))
        alone = options | {"screened": "surprisal"}
        name = f"noise {noise:g}, surprisal alone"
        found.append(Screen(name, "noisy alone", alone, math.nan))
    found += [
        Screen(f"{steps} steps old", "stale", {"screen": "stale", "draft": steps}, 1.0)
        for steps in settings.periods
    ]
    found += [
        Screen(
            f"{bits} bits", "quantised", {"screen": "quantised", "draft": bits}, bits / FULL_BITS
        )
        for bits in settings.bits
    ]
    for width in settings.widths:
        options = {"screen": "narrow", "draft": width}
        cost = TRAINING * narrow_share(settings, width)
        found.append(Screen(f"width {width}", "narrow", options, cost))
    return [*found, Screen(ADVANTAGE, ADVANTAGE, {}, 0.0, signals.advantage)]


def gated(settings: Settings, rate: float) -> list[Member]:
    """Return the members with a screen, at a rate."""
    compared = {screen.series: screen.update(rate) for screen in screens(settings)}
    options = {"learning_rate": settings.learning_rate, "setting": rate}
    return each_seed(compared, settings.num_seeds, **options)


def dense(settings: Settings) -> list[Member]:
    """Return the members that train on every row."""
    options = {"learning_rate": settings.learning_rate, "setting": 1.0}
    return each_seed(DENSE, settings.num_seeds, **options)
