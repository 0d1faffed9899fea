"""Watch a run for two known mistakes, and warn once of each.

Where one reward is shared by many decisions, a gate that keeps the highest delight keeps unlikely
actions that happened to be rewarded: the policy grows more random, and the reward falls. A policy
that starts at random stays so.

Advantages that are plain rewards, without a baseline, have one sign: delight then cannot tell
success from failure, and the gradient of every gate is noisier.
"""

import math
import sys
import warnings
import weakref

from kondo.core import signals
from kondo.core.adapters import adapter_of
from kondo.core.base_gate import BaseGate
from kondo.core.delight import delight
from kondo.core.given_gates import GivenChoice
from kondo.engine.selection import Counts

# Steps before there is a mean to compare with, and the weight of the past.
_MEAN_STEPS, _DECAY = 5, 0.9
# A running mean has moved if it left its best value by this many standard deviations of one step,
# and by this share of that value. Where one action decides, entropy rises and falls again while a
# policy leaves a mistake: a small rise says nothing.
_DEVIATIONS, _SHARE = 3.0, 0.5
# The entropy of a density has no zero: it has risen by this many nats at least.
_NATS = 0.5
# Steps before rewards and entropies are judged.
_REWARD_STEPS, _ENTROPY_STEPS = 20, 50
# Entropy has stayed where it began if it was never further from its first mean than this share of
# it, in this many steps and units. On CartPole in 30 steps of 3,200 units dense falls to 0.44 of it
# and delight at 10% to 0.97, as results/control-v1 has it.
_STAYED, _STAYED_STEPS, _STAYED_UNITS = 0.07, 30, 100_000

# Advantages are judged in the first step, if it has enough units and none is negative, and over the
# later ones of the first steps: a critic that starts at 0 then had time to learn, also where one
# rollout makes dozens of steps. There they have one sign if their sum exceeds this share of the sum
# of their absolute values. A first step in which none is positive is no mistake: a policy that
# fails everywhere has it under a constant baseline. Equal rewards less their mean leave rounding
# errors of one sign: a smaller mean than the last number says nothing.
_FIRST_UNITS = 16
_CENTRED_FROM, _CENTRED_STEPS = 50, 100
_ONE_SIGN = 0.9
_ROUNDING = 1e-6
_WITHOUT_ADVANTAGES = (signals.surprisal, signals.uniform)


class Trend:
    """Running mean of one number per step: has it risen, fallen, or stayed where it began?"""

    def __init__(self) -> None:
        self.steps = 0
        self.mean = 0.0
        self.first = math.nan  # mean of the first steps
        self.lowest, self.highest = math.inf, -math.inf
        self._last = self._change = 0.0  # the latter a running mean of squared changes

    def observe(self, value: float) -> None:
        """Add the number of one step; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        if self.steps:
            self._change += (1 - _DECAY) * ((value - self._last) ** 2 - self._change)
        self.steps, self._last = self.steps + 1, value
        # A plain mean until there are enough steps for a running one.
        self.mean += max(1 - _DECAY, 1 / self.steps) * (value - self.mean)
        if self.steps == _MEAN_STEPS:
            self.first = self.mean
        if self.steps >= _MEAN_STEPS:
            self.lowest, self.highest = min(self.lowest, self.mean), max(self.highest, self.mean)

    @property
    def _noise(self) -> float:
        return _DEVIATIONS * math.sqrt(self._change / 2)

    def rose(self, steps: int, least: float | None = None) -> bool:
        """Return whether the mean, after some steps, is above its lowest value by more than noise.

        Args:
            steps: before it is judged.
            least: by which it must be above; None for a share of the lowest value.
        """
        least = _SHARE * abs(self.lowest) if least is None else least
        return self.steps >= steps and self.mean - self.lowest > max(self._noise, least)

    @property
    def fell(self) -> bool:
        """True if the mean was below its first value by more than the noise of steps."""
        return self.first - self.lowest > self._noise

    @property
    def stayed(self) -> bool:
        """True if the mean never left its first value."""
        furthest = max(self.first - self.lowest, self.highest - self.first)
        return self.steps >= _STAYED_STEPS and furthest < _STAYED * abs(self.first)


class _Run:
    """Numbers of the steps that one gate has made."""

    def __init__(self) -> None:
        self.entropy, self.loss_of_reward = Trend(), Trend()
        self.warned = False
        self.steps = self.elements = 0
        self.units = 0  # of steps whose entropy is known
        self.advantage = self.abs_advantage = 0.0


_RUNS: dict[int, _Run] = {}  # by identity: a gate need not have a hash, and equal ones are two


def monitor(
    gate: BaseGate | None, counts: Counts, *, reward: float = math.nan, density: bool = False
) -> None:
    """Take down one step, and warn once per gate of each mistake that the run shows.

    Args:
        gate: of the step. Entropy and reward are watched only of one that is known to keep the
            highest delight without a draw; see `kondo.adapters.register` for one of your own.
        counts: of the step, of all ranks.
        reward: mean reward of the step, where it is known.
        density: whether actions are continuous. Their entropy may stay, as with a fixed deviation.

    Example:
        >>> import torch, kondo
        >>> gate, advantages = kondo.Gate(rate=0.5), torch.tensor([1.0, -1.0])
        >>> selection = kondo.select(torch.tensor([-1.0, -2.0]), advantages, gate=gate)
        >>> kondo.monitor(gate, selection.counts, reward=0.5)
    """
    if gate is None:
        return
    if id(gate) not in _RUNS:  # known for as long as the gate lives
        _RUNS[id(gate)] = _Run()
        weakref.finalize(gate, _RUNS.pop, id(gate), None)
    run = _RUNS[id(gate)]
    _watch_advantages(gate, run, counts)
    known = adapter_of(gate)
    if gate.signal is not delight or known.draws or known.eta > 0:
        return
    if run.warned or counts.units_kept == counts.units:
        return
    entropy, lost = run.entropy, run.loss_of_reward
    entropy.observe(counts.entropy)
    lost.observe(-reward)
    run.units += counts.units if math.isfinite(counts.entropy) else 0
    best_reward = lost.mean <= lost.lowest < math.inf
    seen = ""
    if entropy.rose(_ENTROPY_STEPS, _NATS if density else None) and not best_reward:
        seen = f"entropy rose from {entropy.lowest:.3g} to {entropy.mean:.3g} nats"
    elif entropy.stayed and run.units >= _STAYED_UNITS and not density and not lost.fell:
        seen = (
            f"entropy stayed at {entropy.mean:.3g} nats, where it began, in {entropy.steps} steps "
            f"of {run.units:,} units"
        )
    elif lost.rose(_REWARD_STEPS):
        seen = f"reward fell from {-lost.lowest:.3g} to {-lost.mean:.3g}"
    if seen:
        run.warned = True
        _warn(
            f"{seen} under {gate!r}, which keeps the highest delight. If one reward is shared by "
            f"many decisions (tokens of an answer, steps of an episode), that choice is biased "
            f"towards random policies: use kondo.UnbiasedGate(rate=...) or (noise=1.5). If each "
            f"reward belongs to one decision, this may pass; a learning rate that is too low looks "
            f"the same. See docs/concepts/which-gate.md."
        )


def _watch_advantages(gate: BaseGate, run: _Run, counts: Counts) -> None:
    """Warn once if advantages have one sign: in the first step all, or most in later ones."""
    if run.steps == _CENTRED_STEPS or any(gate.signal is signal for signal in _WITHOUT_ADVANTAGES):
        return
    if isinstance(gate, GivenChoice):  # a gate elsewhere has left out the advantages of one sign
        return
    run.steps += 1
    first = run.steps == 1 and counts.units >= _FIRST_UNITS
    if first or run.steps > _CENTRED_FROM:
        run.elements += counts.elements
        run.advantage += counts.advantage
        run.abs_advantage += counts.abs_advantage
    if not first and run.steps < _CENTRED_STEPS:
        return
    share = 1 - _ROUNDING if first else _ONE_SIGN
    size = run.advantage if first else abs(run.advantage)
    if size > max(share * run.abs_advantage, _ROUNDING * run.elements):
        seen = f"all {counts.elements} in the first step under {gate!r} are positive, or 0"
        passes = " If a critic has only begun to learn, this passes."
        if not first:
            one_sign = abs(run.advantage) / run.abs_advantage
            steps = _CENTRED_STEPS - _CENTRED_FROM
            seen = f"in {steps} steps under {gate!r} {one_sign:.0%} of their size has one sign"
            passes = ""
        _warn(
            f"advantages are not centred: {seen}. If they are rewards without a baseline, pass "
            f"kondo.advantage.batch_mean(rewards), or kondo.advantage.group_mean(rewards, size) "
            f"for several answers to a prompt: else delight cannot tell success from failure, and "
            f"every gate is noisier.{passes} See docs/concepts/delight.md."
        )
        run.steps = _CENTRED_STEPS
    run.elements, run.advantage, run.abs_advantage = 0, 0.0, 0.0


def _warn(message: str) -> None:
    """Warn at the first frame outside of `kondo`."""
    frame, level = sys._getframe(0), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("kondo."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
