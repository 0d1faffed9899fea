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
from kondo.core.base_gate import BaseGate
from kondo.core.delight import delight
from kondo.core.given_gates import GivenChoice
from kondo.engine.selection import Counts
from kondo.engine.trend import Trend

# Steps before rewards and entropies are judged, and units before an entropy that stayed is.
_REWARD_STEPS, _ENTROPY_STEPS = 20, 50
_STAYED_UNITS = 100_000

# The entropy of a density has no zero: it has risen by this many nats at least.
_NATS = 0.5

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


class _Run:
    """What is known of the steps that one gate has made."""

    def __init__(self) -> None:
        self.entropy, self.loss_of_reward = Trend(), Trend()
        self.warned = False
        self.steps = self.elements = 0
        self.units = 0  # of steps whose entropy is known
        self.advantage = self.abs_advantage = 0.0


_RUNS: dict[int, _Run] = {}  # by identity: a gate need not have a hash, and equal ones are two


def _run_of(gate: BaseGate) -> _Run:
    """Return what is known of a gate's run, for as long as the gate lives."""
    if id(gate) not in _RUNS:
        _RUNS[id(gate)] = _Run()
        weakref.finalize(gate, _RUNS.pop, id(gate), None)
    return _RUNS[id(gate)]


def monitor(
    gate: BaseGate | None, counts: Counts, *, reward: float = math.nan, density: bool = False
) -> None:
    """Take down one step, and warn once per gate of each mistake that the run shows.

    Args:
        gate: of the step. Entropy and reward are watched only of one that keeps the highest delight
            without a draw.
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
    run = _run_of(gate)
    _watch_advantages(gate, run, counts)
    if gate.signal is not delight or gate.draws or gate.eta > 0:
        return
    if run.warned or counts.units_kept == counts.units:
        return
    run.entropy.observe(counts.entropy)
    run.loss_of_reward.observe(-reward)
    run.units += counts.units if math.isfinite(counts.entropy) else 0
    seen = ""
    least = _NATS if density else None
    if run.entropy.rose(_ENTROPY_STEPS, least) and not run.loss_of_reward.at_lowest:
        seen = f"entropy rose from {run.entropy.lowest:.3g} to {run.entropy.mean:.3g} nats"
    elif _stayed(run, density) and not run.loss_of_reward.fell:
        seen = (
            f"entropy stayed at {run.entropy.mean:.3g} nats, where it began, in "
            f"{run.entropy.steps} steps of {run.units:,} units"
        )
    elif run.loss_of_reward.rose(_REWARD_STEPS):
        highest, now = -run.loss_of_reward.lowest, -run.loss_of_reward.mean
        seen = f"reward fell from {highest:.3g} to {now:.3g}"
    if seen:
        run.warned = True
        warnings.warn(
            f"{seen} under {gate!r}, which keeps the highest delight. If one reward is shared by "
            f"many decisions (tokens of an answer, steps of an episode), that choice is biased "
            f"towards random policies: use kondo.UnbiasedGate(rate=...) or (noise=1.5). If each "
            f"reward belongs to one decision, this may pass; a learning rate that is too low looks "
            f"the same. See docs/concepts/which-gate.md.",
            RuntimeWarning,
            stacklevel=_callers_level(),
        )


def _stayed(run: _Run, density: bool) -> bool:
    """Return whether a policy over discrete actions has become no surer, in enough units."""
    return not density and run.units >= _STAYED_UNITS and run.entropy.stayed


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
        seen = (
            f"all {counts.elements} in the first step under {gate!r} are positive, or 0"
            if first
            else f"in {_CENTRED_STEPS - _CENTRED_FROM} steps under {gate!r} "
            f"{abs(run.advantage) / run.abs_advantage:.0%} of their size has one sign"
        )
        passes = " If a critic has only begun to learn, this passes." if first else ""
        warnings.warn(
            f"advantages are not centred: {seen}. If they are rewards without a baseline, pass "
            f"kondo.advantage.batch_mean(rewards), or kondo.advantage.group_mean(rewards, size) "
            f"for several answers to a prompt: else delight cannot tell success from failure, and "
            f"every gate is noisier.{passes} See docs/concepts/delight.md.",
            RuntimeWarning,
            stacklevel=_callers_level(),
        )
        run.steps = _CENTRED_STEPS
    run.elements, run.advantage, run.abs_advantage = 0, 0.0, 0.0


def _callers_level() -> int:
    """Return the stack level, for the function that asks, of the first frame outside `kondo`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("kondo."):
        frame, level = frame.f_back, level + 1
    return level
