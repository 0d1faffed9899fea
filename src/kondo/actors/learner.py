"""The learner: checked rollouts in, one update, a new price. Does not use Ray.

    StepOrder + messages -> validate -> train on what is worth its price -> price for the next
                               \\-> quarantine <-'                          checkpoint now and then

The same step orders and messages give the same result, so a learner that died is restored by its
checkpoint and a replay of the steps since.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kondo.actors import checkpoint
from kondo.actors.ledger import Ledger
from kondo.actors.messages import Batch, Order, Quarantine, schema_of, validate
from kondo.actors.setup import Settings, Setup, process_seed
from kondo.actors.source_price import Price, SourceGate
from kondo.actors.update import Updater
from kondo.run_files import WriteError, save_state

QUARANTINE = "quarantine"
"""Folder of quarantined messages kept for inspection."""
MAX_KEPT = 8

# Of the learner, as they are in a checkpoint.
_NUMBERS = ("wire_bytes", "full_bytes", "incarnations")

_Refusal = tuple[int, str, str]  # actor, reason, detail


class Undelivered(NamedTuple):
    """Stands for a message that could not be fetched."""

    why: str


class StepOrder(NamedTuple):
    """All that one step of the learner depends on but the messages."""

    number: int  # 1 for the first step
    orders: tuple[Order, ...]  # whose messages are given
    lost: tuple[tuple[int, str], ...]  # orders that will not be delivered, and why
    issued: int  # orders given so far
    incarnations: int  # rollout processes started so far


class StepReport(NamedTuple):
    """What one step did. Sums are over this step alone."""

    step: int
    produced: int
    trained: int
    skipped: int
    quarantined: tuple[_Refusal, ...]  # (actor, reason, detail) of each refused message
    error: float  # 1 - mean reward of the accepted rollouts; NaN without any
    loss: float
    # Mean of (learner's version - version acted with) over accepted samples; NaN without any.
    staleness: float
    wire_bytes: int
    full_bytes: int  # what the same messages would have been with all their rows
    price: Price  # published with the weights of this step
    durable: int  # newest step that a checkpoint holds
    counts: dict[str, int]  # the ledger so far
    # Of the learner's process, which fills it in: check, train and publish, but not the fetching,
    # which is done while the step before is at work.
    seconds: float = 0.0
    idle_seconds: float = 0.0  # it waited before


class Publication(NamedTuple):
    """What actors act with."""

    version: int
    price: Price
    weights: Any  # arrays by name; in the driver, the reference of such a publication


class Learner:
    """Trains one policy on what actors send. Its checkpoints are in a folder, which must exist."""

    def __init__(self, setup: Setup, settings: Settings, folder: Path, *, resume: bool = False):
        self._setup, self._settings, self._folder = setup, settings, folder
        self.gate = SourceGate(settings)
        seed = process_seed(settings.seed, 0)
        self._task = setup.make_task(seed)
        # A rollout of our own shows what messages look like, and sets the first price: else every
        # actor would send its first rollouts whole. Nothing is trained on it.
        self.policy = setup.make_policy(seed)
        own = self._task.rollout(self.policy)
        self.schema = schema_of(setup, self._task.unit, own)
        self._updater = Updater(self.policy, self.schema, settings, self.gate, own)
        self.ledger = Ledger(setup.samples)
        self.step_number = self.wire_bytes = self.full_bytes = self.incarnations = 0
        self.staleness: Counter[int] = Counter()  # accepted samples by staleness
        self._kept_messages = 0
        self._saved: StepReport | None = None
        if resume:
            self._load(checkpoint.load(folder))
        else:
            self.save()
        self._durable = self.step_number

    @property
    def price(self) -> Price:
        """The price that goes with the weights."""
        return self._updater.price

    def step(self, order: StepOrder, messages: Sequence[Any]) -> StepReport:
        """Make one update from the messages of `order.orders`.

        A learner that died after writing a checkpoint and before its report was read is asked for
        the same step again; it returns the saved report.
        """
        if self._saved is not None and order.number == self._saved.step == self.step_number:
            return self._saved
        if order.number != self.step_number + 1:
            raise ValueError(f"number must be {self.step_number + 1}, got {order.number}.")
        self._note(order)
        batches, refused = self._accept(order.orders, messages)
        made, faulty = self._updater.update(batches)
        for batch, found in faulty:
            place = order.orders.index(batch.order)
            refused.append(self._refuse(batch.order, found, messages[place]))
        accepted, samples = made.batches, self.schema.samples
        ages = [self.step_number - batch.order.version for batch in accepted]
        for batch, age in zip(accepted, ages, strict=True):
            self.ledger.train(batch.order.number, batch.trained)
            self.staleness[age] += samples
        trained = sum(batch.trained for batch in accepted)
        sent = sum(batch.wire_bytes for batch in accepted)
        full = sum(batch.full_bytes for batch in accepted)
        self.wire_bytes += sent
        self.full_bytes += full
        self.step_number += 1
        report = StepReport(
            step=self.step_number,
            produced=len(order.orders) * samples,
            trained=trained,
            skipped=len(accepted) * samples - trained,
            quarantined=tuple(refused),
            error=1 - _mean([batch.mean_reward for batch in accepted]),
            loss=made.loss,
            staleness=_mean(ages),
            wire_bytes=sent,
            full_bytes=full,
            price=self.price,
            durable=self._durable,
            counts=self.ledger.counts(),
        )
        if self.step_number % self._settings.checkpoint_every == 0:
            report = report._replace(durable=self.step_number)
            self.save(report)
        return report

    def _note(self, order: StepOrder) -> None:
        """Take down what was issued and lost since the last step."""
        self.ledger.issue(order.issued)
        self.incarnations = order.incarnations
        for number, why in order.lost:
            if not self.ledger.is_settled(number):
                self.ledger.lose(number, why)

    def _accept(
        self, orders: Sequence[Order], messages: Sequence[Any]
    ) -> tuple[list[Batch], list[_Refusal]]:
        batches: list[Batch] = []
        refused: list[_Refusal] = []
        for order, message in zip(orders, messages, strict=True):
            again = any(order.number == batch.order.number for batch in batches)
            if again or self.ledger.is_settled(order.number):
                self.ledger.duplicates += 1
                refused.append((order.actor, "duplicate", f"order {order.number} was settled"))
            elif isinstance(message, Undelivered):
                self.ledger.lose(order.number, "undelivered")
            else:
                found = validate(message, order, self.schema, self.gate)
                if isinstance(found, Batch):
                    batches.append(found)
                else:
                    refused.append(self._refuse(order, found, message))
        return batches, refused

    def _refuse(self, order: Order, found: Quarantine, message: Any) -> _Refusal:
        """Settle the order, and keep the arrays of the first few messages for inspection.

        Raises:
            WriteError: the copy cannot be written, as on a full disk.
        """
        self.ledger.quarantine(order.number, found.reason, order.actor)
        refusal = (order.actor, *found)
        if self._kept_messages == MAX_KEPT:
            return refusal
        self._kept_messages += 1
        # Exact types: a subclass may do what it likes.
        given = message.get("arrays") if type(message) is dict else None
        known: Any = given if type(given) is dict else {}
        arrays = {}
        for name in self.schema.fields:
            array = known.get(name)
            if type(array) is np.ndarray and array.dtype.isnative:
                with contextlib.suppress(TypeError):  # what a tensor cannot hold
                    arrays[name] = torch.from_numpy(array.copy())
        path = self._folder / QUARANTINE / f"{order.number}.pt"
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise WriteError.of(path.parent, error) from error
        save_state(path, {**found._asdict(), "actor": order.actor, "arrays": arrays})
        return refusal

    def publication(self) -> Publication:
        """Return the weights of this step, and the price that goes with them."""
        weights = {k: v.detach().cpu().numpy().copy() for k, v in self.policy.state_dict().items()}
        return Publication(self.step_number, self.price, weights)

    def held_out_error(self) -> float | None:
        """Return the task's own measure of the policy, if it has one."""
        measure = getattr(self._task, "held_out_error", None)
        return None if measure is None else measure(self.policy)

    def finish(self, order: StepOrder) -> None:
        """Settle what was lost since the last step, and write the last checkpoint."""
        self._note(order)
        self.save()

    def save(self, report: StepReport | None = None) -> None:
        """Write a checkpoint, with the report of its step."""
        checkpoint.save(
            self._folder,
            {
                **self._identity(),
                "step": self.step_number,
                **{name: part.state_dict() for name, part in self._parts().items()},
                **{name: getattr(self, name) for name in _NUMBERS},
                "price": list(self.price),
                "staleness": dict(self.staleness),
                "rng": torch.get_rng_state(),
                # Tuples, numbers and strings, which a checkpoint may hold.
                "report": report and report._asdict() | {"price": tuple(report.price)},
            },
        )
        self._durable = self.step_number

    def _identity(self) -> dict[str, str]:
        """Return what a run that goes on must have in common with the one before."""
        return {"setup": self._setup.name, "gate": type(self.gate.gate).__name__}

    def _parts(self) -> dict[str, Any]:
        """Return what has a state of its own, by its name in a checkpoint."""
        return {
            "policy": self.policy,
            "optimiser": self._updater.optimiser,
            "window": self._updater.window,
            "gradient_scale": self._updater.scale,
            "gate_state": self.gate,
            "ledger": self.ledger,
        }

    def _load(self, state: dict[str, Any]) -> None:
        for what, given in self._identity().items():
            if state[what] != given:
                raise ValueError(
                    f"{what} must be {state[what]!r} as in the checkpoint, got {given!r}."
                )
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        if broken := self._updater.not_finite():
            raise ValueError(
                f"{checkpoint.FILE} must be finite, got NaN or infinity in {broken}; resume from "
                f"an older one, or start anew without resume."
            )
        for name in _NUMBERS:
            setattr(self, name, state[name])
        self._updater.price, self.step_number = Price(*state["price"]), state["step"]
        self.staleness = Counter(state["staleness"])
        torch.set_rng_state(state["rng"])
        if (saved := state["report"]) is not None:
            self._saved = StepReport(**saved | {"price": Price(*saved["price"])})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
