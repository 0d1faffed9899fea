"""Who makes a step together: one process alone, or the ranks of a group.

`kondo.backward` calls these members in this order. `Alone` has nobody to agree with; the ranks'
side is `kondo.ranks.rank_peers`, whose members exchange what must be known between the stages.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kondo.core.contract import BaseGate, value_name
from kondo.core.diagnostics import diagnostics
from kondo.engine.compact import MicroBatch
from kondo.engine.differentiate import differentiate
from kondo.engine.finite import FiniteCheck
from kondo.engine.inputs import Inputs, Rows
from kondo.engine.partial_screen import Forward, Screened
from kondo.engine.policy import Policy
from kondo.engine.report import Late, Report, StageClock
from kondo.engine.select import Counts, Selection

_T = TypeVar("_T")


class Trained(NamedTuple):
    """What was differentiated; named as in the report."""

    read: Callable[[], tuple[int, float]]
    """Return the tokens that were trained, and the loss."""
    rows_trained: int
    calls: int
    elements: int
    """Elements of log-probs of a dense step without a mask, which nobody could count before."""


class Alone:
    """One process: what it has is all there is."""

    may_be_empty = False
    """Whether a batch may have 0 rows, as on one of many ranks."""

    first = True
    """Whether this process is the one that warns for all."""

    spare: Rows | None = None
    """A row to run where this process has none of its own; `agree` sets it."""

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which an error of one is an error of all."""
        return contextlib.nullcontext()

    def clock(self, device: torch.device) -> StageClock:
        """Return a fresh clock."""
        return StageClock(device)

    def agree(self, inputs: Inputs, clock: StageClock) -> Inputs:
        """Compare what all must have in common, and return the inputs to go on with."""
        return inputs

    def total(self, *numbers: int) -> list[int]:
        """Return the sums over ranks."""
        return list(numbers)

    def forwards(self, run: Forward, some: Any, calls: int) -> Tensor | None:
        """Run some rows, in as many forwards as every rank."""
        return run(some)

    def gate(self, inputs: Inputs, clock: StageClock) -> BaseGate:
        """Return the gate for the rows of all, which it is bound to where it has to be."""
        assert inputs.gate is not None
        facts = inputs.gate.row_facts(inputs.rows.batch)
        return inputs.gate if facts is None else inputs.gate.bind(facts)

    def count(self, chosen: Selection, screened: Screened | None, clock: StageClock) -> Counts:
        """Return what all screened, saw and kept together."""
        return own_counts(chosen, screened)

    def train(
        self, inputs: Inputs, chosen: Selection, counts: Counts, clock: StageClock
    ) -> Trained:
        """Differentiate what was kept."""
        compact = inputs.options.compact or inputs.policy.compact
        counted = Counted(
            compact(
                inputs.rows.batch,
                inputs.rows.advantages,
                chosen,
                loss_inputs=inputs.rows.loss_inputs,
                size=inputs.micro_batch,
            )
            if chosen.rows.numel()
            else ()
        )
        done = differentiate(
            inputs.policy.log_prob,
            timed(counted, clock),
            loss=inputs.loss,
            denominator=denominator(inputs, chosen, counts),
            backward_fn=inputs.options.backward_fn,
            clock=clock,
            check=finite_check(inputs, chosen),
        )
        elements = done.elements if chosen.whole else 0
        read = partial(counted.read, done.loss, elements)
        return Trained(read, counted.rows, counted.calls, elements)

    def report(
        self,
        inputs: Inputs,
        chosen: Selection,
        screened: Screened | None,
        counts: Counts,
        trained: Trained,
        clock: StageClock,
    ) -> Report:
        """Say what was done."""
        return Report(
            **report_fields(counts, trained),
            rows_trained=trained.rows_trained,
            calls=trained.calls,
            _late=partial(_late, trained, clock),
            _diagnose=partial(diagnose, inputs.gate, chosen, screened, counts, eta_of(inputs.gate)),
        )


def own_counts(chosen: Selection, screened: Screened | None) -> Counts:
    """Return what this process screened, saw and kept."""
    if screened is None:
        return chosen.counts
    counts = chosen.counts._replace(rows_screened=screened.num_rows)
    if screened.elements is not None:
        counts = counts._replace(surprised=screened.elements)
    if not screened.known:
        return counts._replace(surprisal=math.nan)
    if screened.at_mode is None:
        return counts
    # -log pi(a) = (log pi(mode) - log pi(a)) - log pi(mode): the first is the surprisal of a gate.
    counted = torch.where(chosen.mask, screened.at_mode.to(chosen.mask.device), 0.0)
    return counts._replace(surprisal=counts.surprisal - float(counted.sum(dtype=torch.float64)))


def _late(trained: Trained, clock: StageClock) -> Late:
    tokens, loss = trained.read()
    return Late(loss, tokens, clock.seconds())


def report_fields(counts: Counts, trained: Trained) -> dict[str, Any]:
    """Return the fields of a report that count what all ranks saw and kept."""
    dense_elements = trained.elements  # where no mask had told them before
    return {
        "seen": dense_elements or counts.units,
        "kept": dense_elements or counts.units_kept,
        "rate": counts.rate,
        "price": counts.price,
        "rows_seen": counts.rows,
        "rows_screened": counts.rows_screened,
        "tokens_seen": dense_elements or counts.elements,
    }


def denominator(
    inputs: Inputs, chosen: Selection, counts: Counts
) -> float | Callable[[Tensor], float]:
    """Return what the sum of losses is divided by, or how log-probs of some rows tell it."""
    asked = inputs.options.denominator
    if chosen.whole and isinstance(asked, str):
        return lambda log_probs: float(max(1, counts.rows_kept * log_probs[0].numel()))
    return counts.denominator(asked)


def finite_check(inputs: Inputs, chosen: Selection, *, moved: bool = False) -> FiniteCheck | None:
    """Return what refuses NaN in kept units; a dense step has none, as `loss.backward()`.

    Args:
        inputs: of the step.
        chosen: what was kept of them.
        moved: whether rows went to other ranks before they are differentiated.
    """
    if inputs.gate is None:
        return None
    plain = inputs.options.compact is None and type(inputs.policy).compact is Policy.compact
    return FiniteCheck(inputs.rows.loss_inputs, chosen, in_order=plain and not moved)


def eta_of(gate: BaseGate | None) -> float:
    """Return the gate's temperature of this step, at which diagnostics judge it; a hard one's is 1.

    A running scale moves on with the next step.
    """
    return 1.0 if gate is None else gate.eta or 1.0


def diagnose(
    gate: BaseGate | None,
    chosen: Selection,
    screened: Screened | None,
    counts: Counts,
    eta: float,
) -> dict[str, float]:
    """Judge the gate at its own temperature; a hard one at 1. Count the NaN the mask hid."""
    if gate is None:
        return {"rate": counts.rate, "price": counts.price, "nan_count": float(counts.hidden_nan)}
    mask = chosen.unit_mask
    if screened is not None and screened.rows is not None:
        known = screened.rows.to(mask.device)
        mask = mask & (known if mask.ndim == 1 else known.unsqueeze(1))
    numbers = diagnostics(
        chosen.values,
        chosen.choice,
        mask=mask,
        eta=eta,
        name=value_name(gate.signal),
    )
    return numbers | {"entropy": counts.entropy, "nan_count": float(counts.hidden_nan)}


class Counted:
    """Passes micro-batches on and counts what really went through."""

    def __init__(self, micros: Iterable[MicroBatch]):
        self._micros = micros
        self.calls = 0
        self.rows = 0
        self.tokens: int | Tensor = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in self._micros:
            self.calls += 1
            self.rows += micro.num_rows
            self.tokens = micro.num_tokens + self.tokens
            yield micro

    def read(self, loss: Tensor, elements: int = 0) -> tuple[int, float]:
        """Return the tokens, or else `elements`, and a loss as numbers; one device sync."""
        if not isinstance(self.tokens, Tensor):
            return self.tokens or elements, float(loss)
        # float64 holds every count below 2^53.
        both = [self.tokens.double(), loss.to(self.tokens.device).double()]
        count, value = torch.stack(both).tolist()
        return int(count), value


def timed(items: Iterable[_T], clock: StageClock) -> Iterator[_T]:
    """Count the time spent waiting for each item as the stage "compact"."""
    iterator = iter(items)
    while True:
        with clock.stage("compact"):
            item = next(iterator, None)
        if item is None:
            return
        yield item
