"""Will it pay? Measure this model's forward and backward once, and say what each rate saves.

With F and B the seconds of a forward without a graph and of what a backward adds, rho the rate:

    dense          F + B
    exact screen   F + rho (F + B)     pays below rho = B / (F + B), about 2/3
    free screen        rho (F + B)     always pays

A small kept batch costs more than its share, so each rate's backward is also measured. All are
measured in turns, so that other work of the machine slows them down alike. A measurement that beats
its limit is not believed. With the batch's advantages it also says how noisy each rate is, and
recommends a gate.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.arguments import at_least_float32, check_float
from kondo.core.base_gate import BaseGate, Unit
from kondo.core.diagnostics import diagnostics
from kondo.core.gates import Gate
from kondo.core.sampling import count_for
from kondo.core.unbiased import UnbiasedGate
from kondo.engine.finite import leaves_of
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

# What is recommended: a noise budget, and for single decisions the papers' rate.
_SAFE_NOISE = 1.5
_PAPER_RATE = 0.03
# Kept rows that cost less than this part of their share of dense were not timed well.
_BELIEVED = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRate:
    """What one rate would save. Speed-ups are ratios to dense; above 1 it pays."""

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
    """What is recommended; None for dense, and where no advantages were given."""
    advice: str = ""
    """Why; empty where no advantages were given."""

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
        """Whether no measurement is impossible: no row beats its limit, and a backward costs."""
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
    single_decisions: bool = False,
    rates: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 1.0),
    micro_batch: int | None = None,
    repeats: int = 3,
) -> Plan:
    """Measure forward and backward of a policy on `batch`; say what each rate would save.

    With `advantages` it also recommends a gate: `plan.gate`, with the reason in `plan.advice`.

    Measures this process alone. Where a forward is a collective, as under FSDP2, every rank calls
    it, with the same number of rows.

    Call `kondo.check` first, with the same policy and batch: a policy that it refuses gains nothing
    from a fast step. Log-probs and advantages that `kondo.backward` refuses are refused here too.

    Gradients, random numbers, and the buffers, modes and flags of modules that were given are as
    before afterwards, also where a normaliser updates itself in every forward. Those of a plain
    function, which runs as it is, and parameters that a forward writes to are not put back;
    `kondo.check` names them. Gradient checkpointing needs use_reentrant=False. No other thread may
    draw random numbers meanwhile: they would be drawn again. Counts one unit per row: token units
    keep more rows than their rate says.

    Args:
        policy: rows -> [n] or [n, T], best a module or its method, or a `kondo.lm.CausalLM`, as
            for `kondo.backward`.
        batch: any nest of tensors with N rows; use a full, typical batch.
        advantages: [N] or [N, T] float, the advantages of the batch, centred.
        single_decisions: whether every reward belongs to one decision, as in a bandit. False where
            a reward is shared by the tokens of an answer or the steps of an episode.
        rates: rates to plan for, each in (0, 1].
        micro_batch: rows per forward/backward; all at once if None.
        repeats: rounds in which all measurements are timed once; the median counts.

    Raises:
        ValueError: for a policy, batch or advantages that `kondo.backward` refuses.

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
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1 row, got {micro_batch}.")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    for rate in rates:
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rates must lie in (0, 1], got {rate}.")
    size = rows.num_rows(batch)
    known, log_prob = policy_of(policy)
    modules = modules_of(known, log_prob)
    devices = [device for device in devices_of(modules, batch) if device.type == "cuda"]
    cuda = bool(devices)
    counts = [count_for(rate, size) for rate in rates]

    def forward() -> None:
        _in_pieces(batch, micro_batch, log_prob)

    def dense(part: Any) -> None:
        _in_pieces(part, micro_batch, lambda piece: _gradient(log_prob(piece)))

    def train(count: int) -> Callable[[], float]:
        # Evenly spaced: a batch may be sorted by length.
        kept = batch if count == size else rows.take(batch, torch.arange(count) * size // count)
        return partial(_seconds, partial(dense, kept), cuda)

    def timed(call: Callable[[], float]) -> float:
        with torch.enable_grad():
            return call()

    def screened() -> float:
        with torch.no_grad(), evaluation(modules):
            return _seconds(forward, cuda)

    jobs: list[Callable[[], float]] = [
        screened,
        *(partial(timed, train(count)) for count in (size, *counts)),
    ]
    with preserved(parts_of(modules), devices, None, None):
        worth = _unit_worth(known, log_prob, modules, batch, advantages, micro_batch)
        forward_seconds, dense_seconds, *kept_seconds = _in_turns(jobs, repeats)
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
            noise=None if advantages is None else _noise(UnbiasedGate(rate=rate), *worth),
        )
        for rate, count, kept in zip(rates, counts, kept_seconds, strict=True)
    )
    measured = Plan(
        forward_seconds=forward_seconds,
        backward_seconds=dense_seconds - forward_seconds,
        rates=planned,
    )
    if advantages is None:
        return measured
    gate, advice = _recommended(measured, single_decisions, *worth)
    return dataclasses.replace(measured, gate=gate, advice=advice)


def _unit_worth(
    known: Policy,
    log_prob: LogProb,
    modules: Sequence[nn.Module],
    batch: Any,
    advantages: Tensor | None,
    micro_batch: int | None,
) -> tuple[Tensor, Tensor]:
    """Return a proxy of the norm of each row's gradient, [N], and which rows count.

    Refuses what a step refuses: logits, NaN, other shapes. Without advantages each counts as 1.
    """
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
    mask = known.mask(batch)
    chosen = select(
        found,
        check_float("advantages", given).to(found.device),
        gate=UnbiasedGate(rate=1.0),
        unit=unit,
        mask=None if mask is None else mask.to(found.device),
        generator=torch.Generator().manual_seed(0),
        density=density,
    )
    chosen.counts  # noqa: B018  # on a GPU too, raises what is wrong
    return chosen.values, chosen.mask


def _noise(gate: BaseGate, worth: Tensor, mask: Tensor) -> float:
    """Return the noise of a draw."""
    choice = gate(worth, mask, torch.Generator().manual_seed(0))
    return diagnostics(worth, choice, mask=mask)["noise"]


def _recommended(
    measured: Plan, single_decisions: bool, worth: Tensor, mask: Tensor
) -> tuple[BaseGate | None, str]:
    """Return a gate for such batches, and the reason."""
    if not bool((worth != 0).any()):
        return None, "recommended: dense, gate=None. No row of this batch has an advantage."
    gate: BaseGate = UnbiasedGate(noise=_SAFE_NOISE)
    share = float(gate(worth, mask, torch.Generator().manual_seed(0)).rate)
    why = (
        f"it keeps {share:.0%} of this batch, so that the sum of squared gradients is at most "
        f"{_SAFE_NOISE:g} times dense's; safe where a reward is shared by many decisions"
    )
    if single_decisions:
        gate, share = Gate(rate=_PAPER_RATE), _PAPER_RATE
        why = "the papers' gate: every reward belongs to one decision"
    forward, dense = measured.forward_seconds, measured.forward_seconds + measured.backward_seconds
    kept = _seconds_at([(row.rate, row.kept_seconds) for row in measured.rates], share, dense)
    exact, free = dense / (forward + kept), dense / kept
    told = f"{exact:.1f}x with an exact screen, {free:.1f}x with a free one"
    if free <= 1:
        return None, f"recommended: dense, gate=None. {gate!r} would be slower: {told}."
    warning = "" if exact > 1 else "; give screen=, an exact screen would be slower than dense"
    return gate, f"recommended: gate=kondo.{gate!r}: {why}. Learner {told}{warning}."


def _seconds_at(known: Sequence[tuple[float, float]], rate: float, dense: float) -> float:
    """Return the seconds of a kept share, between measured ones; all rows take dense's.

    Below the lowest rate that was measured its seconds count: fixed costs do not shrink.
    """
    seconds = {1.0: dense} | dict(known)
    below = max((point for point in seconds if point <= rate), default=min(seconds))
    above = min(point for point in seconds if point >= max(rate, below))
    if above == below:
        return seconds[below]
    way = (rate - below) / (above - below)
    return (1 - way) * seconds[below] + way * seconds[above]


def _in_pieces(batch: Any, micro_batch: int | None, call: Callable[[Any], Any]) -> None:
    size = rows.num_rows(batch)
    for start in range(0, size, micro_batch or size):
        call(rows.take(batch, slice(start, start + (micro_batch or size))))


def _gradient(log_probs: Tensor) -> None:
    """Differentiate with respect to every leaf of the graph, leaving `.grad` alone."""
    if not log_probs.requires_grad:
        raise ValueError("log_prob(rows) must be differentiable, got a detached tensor.")
    loss = at_least_float32(log_probs).sum()
    torch.autograd.grad(loss, leaves_of(loss), allow_unused=True)


def _in_turns(jobs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the median seconds of each job; every round runs all of them once.

    The first round is a warm-up: lazy initialisation, autotuning, allocator.
    """
    rounds = [[job() for job in jobs] for _ in range(1 + repeats)]
    return [statistics.median(spent) for spent in zip(*rounds[1:], strict=True)]


def _seconds(call: Callable[[], None], cuda: bool) -> float:
    """Return how long a call takes."""
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
