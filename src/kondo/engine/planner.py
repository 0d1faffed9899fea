"""Measure a model's forward and backward once, and say what each rate saves.

With F and B the seconds of a forward without a graph and of what a backward adds, rho the rate:

    dense          F + B
    exact screen   F + rho (F + B)     pays below rho = B / (F + B), about 2/3
    free screen        rho (F + B)     always pays

A small kept batch costs more than its share, so each rate's backward is also measured, and that of
the rows that a gate keeps. All are measured in turns, so that other work of the machine slows them
down alike. A measurement that beats its limit is not believed. With the batch's advantages it also
says how noisy each rate is, and what a gate saves.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.arguments import at_least_float32, check_float, check_size
from kondo.core.adapters import adapter_of
from kondo.core.base_gate import AnyGate, BaseGate, Unit
from kondo.core.diagnostics import diagnostics
from kondo.core.given_gates import as_gate
from kondo.core.sampling import count_for
from kondo.core.unbiased import UnbiasedGate
from kondo.engine.differentiate import leaves_of
from kondo.engine.policy import (
    LogProb,
    Policy,
    devices_of,
    evaluation,
    modules_of,
    parts_of,
    policy_of,
)
from kondo.engine.preserved import preserved
from kondo.engine.screen import from_mode, screen_log_probs
from kondo.engine.select import select
from kondo.engine.selection import Selection

# The noise budget that is recommended.
_SAFE_NOISE = 1.5
# Kept rows that cost less than this part of their share of dense were not timed well.
_BELIEVED = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRate:
    """Savings of one rate. Speed-ups are ratios to dense; above 1 it pays."""

    rate: float
    rows: int
    """Rows a backward at this rate is paid for, one unit per row."""
    kept_seconds: float
    """Measured forward + backward of that many rows."""
    exact: float
    """Speed-up with an exact screen."""
    free: float
    """Speed-up with a free screen."""
    exact_limit: float
    """The cost model's speed-up, (F + B) / (F + rho (F + B))."""
    free_limit: float
    """The cost model's speed-up, 1 / rho."""
    reliable: bool = True
    """False where the kept rows took less than 90% of their share of dense: other work of the
    machine disturbed the timing."""
    noise: float | None = None
    """Noise of an unbiased draw at this rate, see `kondo.UnbiasedGate`; None without advantages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Measured costs of one model on one batch, and what a gate would save. Print it."""

    forward_seconds: float
    """F: all rows, no graph."""
    backward_seconds: float
    """B: what a graph and a backward of all rows add to F."""
    rates: tuple[PlannedRate, ...]
    gate: BaseGate | None = None
    """The recommended gate: the one that was given, or one of ours. None for dense, and where no
    advantages were given."""
    advice: str = ""
    """The reason, and what it saves; empty where no advantages were given."""

    @property
    def ratio(self) -> float:
        """B / F."""
        return self.backward_seconds / self.forward_seconds

    @property
    def break_even_rate(self) -> float:
        """Rate above which an exact screen loses: B / (F + B)."""
        return self.backward_seconds / (self.forward_seconds + self.backward_seconds)

    @property
    def reliable(self) -> bool:
        """True if no measurement is impossible: no row beats its limit, and a backward costs."""
        return self.backward_seconds > 0 and all(row.reliable for row in self.rates)

    def __str__(self) -> str:
        lines = [
            f"forward {1e3 * self.forward_seconds:.2f} ms, backward adds "
            f"{1e3 * self.backward_seconds:.2f} ms (ratio {self.ratio:.2f}); an exact screen pays "
            f"below a rate of {self.break_even_rate:.0%}",
            "rate     rows   exact screen (limit)   free screen (limit)   noise",
        ]
        for row in self.rates:
            remark = "" if row.exact > 1 else "   exact screen loses: use a free screen or dense"
            if not row.reliable:
                remark = "   timing unreliable: faster than its limit"
            noise = "-" if row.noise is None else f"{row.noise:.2f}"
            lines.append(
                f"{row.rate:>5.1%} {row.rows:>7}   {row.exact:>10.2f}x ({row.exact_limit:.2f}x)"
                f"   {row.free:>10.2f}x ({row.free_limit:.2f}x) {noise:>7}{remark}"
            )
        if not self.reliable:
            lines.append(
                "timing unreliable: other work disturbed it; measure again on an idle machine, or "
                "with more repeats"
            )
        return "\n".join([*lines, self.advice] if self.advice else lines)


def plan(
    policy: Any,
    batch: Any,
    *,
    advantages: Tensor | None = None,
    gate: AnyGate = None,
    rates: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 1.0),
    micro_batch: int | None = None,
    repeats: int = 3,
) -> Plan:
    """Measure forward and backward of a policy on `batch`; say what each rate would save.

    With `advantages` it also says what a gate would save, or recommends one: `plan.gate`, with the
    reason in `plan.advice`.

    Measures this process alone. Where a forward is a collective, as under FSDP2, every rank calls
    it, with the same number of rows.

    Call `kondo.check` first, with the same policy and batch: a policy that it refuses gains nothing
    from a fast step. Log-probs and advantages that `kondo.backward` refuses are refused here too.

    What is left as before afterwards is what `kondo.check` leaves; parameters that a forward writes
    to are not put back. No other thread may draw random numbers meanwhile: they would be drawn
    again. Counts one unit per row: token units keep more rows than their rate says.

    Args:
        policy: rows -> [n] or [n, T], best a module or its method, or a `kondo.lm.CausalLM`, as
            for `kondo.backward`.
        batch: any nest of tensors with N rows; use a full, typical batch.
        advantages: [N] or [N, T] float, the advantages of the batch, centred.
        gate: what to plan for; None for a recommendation. Needs advantages.
        rates: rates to plan for, each in (0, 1].
        micro_batch: rows per forward/backward; all at once if None.
        repeats: rounds in which all measurements are timed once; the median counts.

    Raises:
        ValueError: for a policy, batch, gate or advantages that `kondo.backward` refuses.

    Example:
        >>> import torch, kondo
        >>> policy = torch.nn.Linear(4, 1)
        >>> plan = kondo.plan(lambda rows: -policy(rows).square().sum(1), torch.randn(256, 4))
        >>> [row.rows for row in plan.rates]
        [3, 8, 26, 77, 128, 179, 256]

    With the batch's advantages, `plan.gate` is what to use:

        plan = kondo.plan(policy, batch, advantages=advantages)
        report = kondo.backward(policy, batch, advantages, gate=plan.gate)
    """
    check_size("micro_batch", micro_batch)
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    for rate in rates:
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rates must lie in (0, 1], got {rate}.")
    if gate is not None and advantages is None:
        raise ValueError("advantages must be given with a gate, which chooses by them, got None.")
    chooser = bound = None if gate is None else as_gate(gate)
    if chooser is not None and (facts := adapter_of(chooser).row_facts(batch)) is not None:
        bound = adapter_of(chooser).bind(facts)
    size = rows.num_rows(batch)
    known, log_prob = policy_of(policy)
    modules = modules_of(known, log_prob)
    devices = [device for device in devices_of(modules, batch) if device.type == "cuda"]
    piece = micro_batch or size

    def seconds(index: Tensor, graph: bool) -> float:
        """Return how long a forward of these rows takes, with a graph also the backward."""
        some = batch if len(index) == size else rows.take(batch, index)
        modes = nullcontext() if graph else evaluation(modules)
        with torch.set_grad_enabled(graph), modes:
            start = _clock(devices)
            for first in range(0, len(index), piece):
                log_probs = log_prob(rows.take(some, slice(first, first + piece)))
                if graph:
                    _differentiate(log_probs)
            return _clock(devices) - start

    counts = [count_for(rate, size) for rate in rates]
    # Evenly spaced: a batch may be sorted by length.
    tried = [torch.arange(count) * size // count for count in (size, *counts)]
    with preserved(parts_of(modules), devices, chooser, None):
        chosen = _choosing(known, log_prob, modules, batch, advantages, micro_batch)
        worth = chosen(UnbiasedGate(rate=1.0))
        share = 0.0
        if advantages is not None and bool((worth.values != 0).any()):
            asked = chosen(bound or UnbiasedGate(noise=_SAFE_NOISE))
            share = float(asked.choice.rate)
            tried += [asked.rows.cpu()] * (share > 0)
        jobs = [partial(seconds, tried[0], False)]
        jobs += [partial(seconds, index, True) for index in tried]
        forward_seconds, dense_seconds, *kept_seconds = _in_turns(jobs, repeats)

    def noise(rate: float) -> float:
        draw = chosen(UnbiasedGate(rate=rate)).choice
        return diagnostics(worth.values, draw, mask=worth.mask)["noise"]

    planned = tuple(
        PlannedRate(
            rate=rate,
            rows=count,
            kept_seconds=kept,
            exact=dense_seconds / (forward_seconds + kept),
            free=dense_seconds / kept,
            exact_limit=dense_seconds / (forward_seconds + count / size * dense_seconds),
            free_limit=size / count,
            reliable=kept >= _BELIEVED * count / size * dense_seconds,
            noise=None if advantages is None else noise(rate),
        )
        for rate, count, kept in zip(rates, counts, kept_seconds, strict=False)
    )
    backward_seconds = dense_seconds - forward_seconds
    measured = Plan(
        forward_seconds=forward_seconds, backward_seconds=backward_seconds, rates=planned
    )
    if advantages is None:
        return measured
    return _advised(measured, chooser, share, kept_seconds[-1] if share > 0 else 0.0)


def _choosing(
    known: Policy,
    log_prob: LogProb,
    modules: Sequence[nn.Module],
    batch: Any,
    advantages: Tensor | None,
    micro_batch: int | None,
) -> Callable[[BaseGate], Selection]:
    """Return a function that lets a gate choose, and refuses what a step refuses."""
    density = False

    def shown(some: Any) -> Any:
        nonlocal density
        assert known.screen is not None
        log_probs, at_mode = from_mode(known.screen(some), "screen(rows)")
        density = at_mode is not None
        return log_probs

    model = log_prob if known.screen is None else shown
    found = screen_log_probs(model, batch, chunk=micro_batch, modules=modules)
    unit: Unit = "sample" if found.ndim == 1 else "sequence"
    given = found.new_ones(len(found)) if advantages is None else advantages
    given, mask = check_float("advantages", given).to(found.device), known.mask(batch)

    def chosen(gate: BaseGate) -> Selection:
        selection = select(
            found,
            given,
            gate=gate,
            unit=unit,
            mask=None if mask is None else mask.to(found.device),
            generator=torch.Generator().manual_seed(0),
            density=density,
        )
        selection.counts  # noqa: B018  # on a GPU too, raises what is wrong
        return selection

    return chosen


def _advised(measured: Plan, gate: BaseGate | None, share: float, kept: float) -> Plan:
    """Return the plan with a gate for such batches, and the reason.

    Args:
        measured: without one.
        gate: what was asked for; None recommends one.
        share: of the rows that it keeps.
        kept: seconds of a forward and backward of these rows.
    """
    if share == 0:
        why = f"{gate!r} keeps none of this batch."
        if gate is None:
            why = "No row of this batch has an advantage."
        return dataclasses.replace(measured, advice=f"recommended: dense, gate=None. {why}")
    name, why = repr(gate), f"it keeps {share:.0%} of this batch"
    if gate is None:
        gate = UnbiasedGate(noise=_SAFE_NOISE)
        name = f"kondo.{gate!r}"
        why += (
            f", so that the sum of squared gradients is at most {_SAFE_NOISE:g} times dense's; "
            f"safe where a reward is shared by many decisions"
        )
    forward, dense = measured.forward_seconds, measured.forward_seconds + measured.backward_seconds
    exact, free = dense / (forward + kept), dense / kept
    told = f"{exact:.1f}x with an exact screen, {free:.1f}x with a free one"
    if free <= 1:
        advice = f"recommended: dense, gate=None. {name} would be slower: {told}."
        return dataclasses.replace(measured, advice=advice)
    warning = "" if exact > 1 else "; give screen=, an exact screen would be slower than dense"
    advice = f"recommended: gate={name}: {why}. Learner {told}{warning}."
    return dataclasses.replace(measured, gate=gate, advice=advice)


def _differentiate(log_probs: Tensor) -> None:
    """Differentiate with respect to every leaf of the graph, leaving `.grad` alone."""
    if not log_probs.requires_grad:
        raise ValueError("log_prob(rows) must be differentiable, got a detached tensor.")
    loss = at_least_float32(log_probs).sum()
    torch.autograd.grad(loss, leaves_of(loss), allow_unused=True)


def _clock(devices: Sequence[torch.device]) -> float:
    """Return the time at which all work on these CUDA devices is done."""
    if devices:
        torch.cuda.synchronize()
    return time.perf_counter()


def _in_turns(jobs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the median seconds of each job; every round runs all of them once.

    The first round is a warm-up: lazy initialisation, autotuning, allocator.
    """
    rounds = [[job() for job in jobs] for _ in range(1 + repeats)]
    return [statistics.median(spent) for spent in zip(*rounds[1:], strict=True)]
