"""One update of the policy, with only those rollouts that it can be made of.

    rollouts -> choice -> gradient -> norm within the bound -> next price -> optimiser
                   \\-> an error, or a norm beyond the bound:
                       each rollout alone -> refuse those that fail too -> again without them

Weights change last, when everything else is known to be sound. Before each try the random state,
the gate's and the policy's buffers are put back. So an update from which rollouts were refused is
the one that the other rollouts make alone, bit for bit.

The bound of the norm follows the gradients that were accepted. One rollout of absurd but finite
numbers has an absurd gradient: its square enters the second moments of Adam and stays there for
thousands of steps, or for good where it overflows.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kondo
from kondo.actors.messages import Batch, Order, Quarantine, Schema
from kondo.actors.setup import Rollout, Settings
from kondo.actors.source_price import EVERYTHING, Price, PriceWindow, SourceGate, sketch

FACTOR = 1e2
"""A gradient may be this many times as large as the scale: wide, so that honest ones pass."""
PATIENCE = 10
"""After so many steps in a row of which nothing was accepted, the bound is 10 times as high."""

_MEMORY = 0.99  # of the running mean, per step
_MAX_WIDTH = 60  # tenfold so many times, every bound is above the largest float32
# Rows of the learner's own rollout that are differentiated to know what is normal.
_OWN_ROWS = 32
_DETAIL = 200  # characters of an error that a report shows


_Refused = list[tuple[Batch, Quarantine]]


class Gradient(NamedTuple):
    """A try that went well; the gradient is in the parameters."""

    batches: list[Batch]  # with what is kept of them
    loss: float  # 0 if nothing was differentiated
    norm: float | None  # None: nothing was worth differentiating
    window: PriceWindow
    price: Price


class _Fault(NamedTuple):
    """A try that did not."""

    found: Quarantine
    error: Exception | None = None  # that was raised, if any was


class GradientScale:
    """The scale of accepted gradients, and the largest norm that is accepted.

    bound = min(FACTOR * max(floor, mean) * 10^(refusals // PATIENCE), sqrt(largest number))

    `mean` is the running mean of accepted norms. The floor keeps the bound up where gradients are
    nearly 0 for a while, as before a first success. Without either there is no scale, and the
    square root alone is the bound: squares of accepted gradients are finite, and so are Adam's
    moments. If nothing at all is accepted, step after step, the bound rises: a scale that has
    really grown is not locked out for good.

    `floor` is the norm of a gradient that is known to be sound, 0 if there is none.
    """

    def __init__(self, floor: float, parameters: Iterable[Tensor]):
        self._limit = min(math.sqrt(torch.finfo(each.dtype).max) for each in parameters)
        self._floor = floor if floor <= self._limit else 0.0  # also 0 for NaN
        self._mean = 0.0
        self._refusals = 0  # steps in a row of which nothing was accepted

    @property
    def bound(self) -> float:
        """The largest norm that is accepted."""
        scale = max(self._floor, self._mean)
        if not scale:
            return self._limit
        width = 10.0 ** min(self._refusals // PATIENCE, _MAX_WIDTH)
        return min(FACTOR * scale * width, self._limit)

    def accept(self, norm: float) -> None:
        """Take down the norm of a step that is made."""
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * norm if self._mean else norm
        self._refusals = 0

    def refuse(self) -> None:
        """Take down a step that is not made because every gradient was too large."""
        self._refusals += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"floor": self._floor, "mean": self._mean, "refusals": self._refusals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        floor, mean, refusals = (state[name] for name in ("floor", "mean", "refusals"))
        if not (0 <= floor < math.inf and 0 <= mean < math.inf and refusals >= 0):
            raise ValueError(
                f"gradient_scale must have a finite floor and mean >= 0 and refusals >= 0, got "
                f"{state}; start anew without resume."
            )
        self._floor, self._mean, self._refusals = floor, mean, refusals


class Updater:
    """Policy, optimiser and price of a learner, and the scale of its gradients.

    `own` is a rollout of the learner's own task, which is trusted. It sets the first price and the
    first scale of gradients; nothing is trained on it.
    """

    def __init__(
        self, policy: Any, schema: Schema, settings: Settings, gate: SourceGate, own: Rollout
    ):
        self.policy, self._schema, self._settings, self._gate = policy, schema, settings, gate
        self.optimiser = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        worth = gate.values(own.log_probs, own.advantages, schema.unit)
        self.window = PriceWindow(settings.window)
        self.window.push(sketch(worth, settings.sketch_size), schema.units)
        self.price = self.window.price(gate)
        # Rows of our own, all kept, with the largest advantages of both signs: those of the rollout
        # may all be 0, as before a first success.
        size = min(len(own.log_probs), _OWN_ROWS)
        signs = torch.where(torch.arange(size) % 2 == 0, 1.0, -1.0)
        keep = torch.ones_like(worth[:size], dtype=torch.bool)
        self._own = Batch(
            Order(-1, -1, 0, 0, EVERYTHING),
            {name: rows[:size].detach() for name, rows in own.rows.items()},
            own.log_probs[:size].detach(),
            (schema.fields["advantages"].high * signs).to(own.advantages),
            keep,
            keep.to(own.log_probs.dtype),
            sketch(worth[:size], settings.sketch_size),
            *(0.0, 0, 0),
        )
        # The norm of their gradient, as if they were a whole rollout.
        before = self._random_state()
        self._chosen([self._own])  # a gate that cannot choose here ends the run
        self._differentiate([self._own])
        norm = gradient_norm(policy.parameters()) * schema.elements / self._own.log_probs.numel()
        self.scale = GradientScale(norm, policy.parameters())
        self.optimiser.zero_grad()
        self._restore(before)

    def update(self, batches: Sequence[Batch]) -> tuple[Gradient, _Refused]:
        """Make one update of the rollouts; return it, and those that cannot be part of it.

        Raises:
            Exception: whatever a try raised, if it is no rollout's fault: no rollout alone raises
                it, or the learner's own rows do, or memory is short.
            RuntimeError: weights or moments are no longer finite. A gradient within its bound does
                not do that; an absurd learning rate does.
        """
        before = self._random_state()
        rest, refused = list(batches), _Refused()
        while isinstance(made := self._try(rest, before), _Fault):
            culprits = self._culprits(rest, made, before)
            refused += culprits
            guilty = {batch.order.number for batch, _ in culprits}
            rest = [batch for batch in rest if batch.order.number not in guilty]
        self.window, self.price = made.window, made.price
        if made.norm is not None:
            self.optimiser.step()
            self.scale.accept(made.norm)
            if broken := self.not_finite():
                raise RuntimeError(
                    f"{broken} must be finite after a step, got NaN or infinity from a gradient of "
                    f"norm {made.norm:.3g}; resume with a smaller learning_rate."
                )
        elif any(why.reason == "gradient" for _, why in refused):
            self.scale.refuse()
        self.optimiser.zero_grad()
        return made, refused

    def _try(self, batches: Sequence[Batch], before: list[Any]) -> Gradient | _Fault:
        """Compute gradient and next price; nothing else changes that is not put back."""
        self._restore(before)
        try:
            chosen = self._chosen(batches)
            loss = self._differentiate(chosen)
            window = self.window.copy()
            for batch in batches:
                window.push(batch.sketch, self._schema.units)
            price = window.price(self._gate)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            said = f"{type(error).__name__}: {error}".partition("\n")[0][:_DETAIL]
            return _Fault(Quarantine("error", f"expected a step without errors, got {said}"), error)
        norm = None if loss is None else gradient_norm(self.policy.parameters())
        if norm is not None and not norm <= self.scale.bound:  # also NaN
            detail = f"expected a gradient of norm {self.scale.bound:.3g} at most, got {norm:.3g}"
            return _Fault(Quarantine("gradient", detail))
        return Gradient(chosen, loss or 0.0, norm, window, price)

    def _chosen(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the rollouts with what is kept of them; a price has said so already."""
        if self._gate.one_price or not batches:
            return list(batches)
        log_probs, advantages = (
            torch.cat([getattr(batch, name) for batch in batches])
            for name in ("log_probs", "advantages")
        )
        unit, sizes = self._schema.unit, [len(batch.log_probs) for batch in batches]
        found = kondo.select(log_probs, advantages, gate=self._gate.gate, unit=unit)
        keeps, weights = torch.split(found.keep, sizes), torch.split(found.weight, sizes)
        parts = zip(batches, keeps, weights, strict=True)
        return [batch._replace(keep=keep, weight=weight) for batch, keep, weight in parts]

    def _differentiate(self, batches: Sequence[Batch]) -> float | None:
        """Put the gradient of what is kept into the parameters; return the loss.

        The denominator counts every sample produced, sent or not: the gradient is the gated
        gradient of whole rollouts. None: nothing is kept.
        """
        self.optimiser.zero_grad()
        if not any(bool(batch.keep.any()) for batch in batches):
            return None
        taken = self._settings.behaviour_input
        rows = {name: torch.cat([b.rows[name] for b in batches]) for name in batches[0].rows}
        log_probs = torch.cat([batch.log_probs for batch in batches])
        keep, weight = (
            torch.cat([getattr(batch, name).flatten() for batch in batches])
            for name in ("keep", "weight")
        )
        report = kondo.backward(
            self.policy.log_prob,
            rows,
            torch.cat([batch.advantages for batch in batches]),
            gate=kondo.Choice.of(keep, price=self.price.price)._replace(weight=weight),
            screen=log_probs,
            unit=self._schema.unit,
            loss=self._settings.loss,
            loss_inputs={} if taken is None else {taken: log_probs},
            micro_batch=self._settings.micro_batch,
            group="local",  # there is one learner, whatever its process belongs to
            options=kondo.Options(denominator=float(len(batches) * self._schema.elements)),
        )
        return report.loss

    def _culprits(self, batches: Sequence[Batch], joint: _Fault, before: list[Any]) -> _Refused:
        """Return the rollouts that fail alone as they do together; raise if none is at fault."""
        alone = [joint] if len(batches) == 1 else [self._try([each], before) for each in batches]
        pairs = list(zip(batches, alone, strict=True))
        faults = [(batch, tried) for batch, tried in pairs if isinstance(tried, _Fault)]
        if not faults and joint.error is None:
            # A mean of norms below the bound is below it, but for rounding and chance (dropout).
            worst = max(pairs, key=lambda pair: getattr(pair[1], "norm", None) or 0.0)[0]
            faults = [(worst, joint)]
        if not faults or (any(fault.error for _, fault in faults) and self._own_raises(before)):
            self._restore(before)
            raise joint.error or next(fault.error for _, fault in faults if fault.error)
        return [(batch, fault.found) for batch, fault in faults]

    def _own_raises(self, before: list[Any]) -> bool:
        """Return whether the learner's own rows make a step raise: then it is its own error."""
        self._restore(before)
        try:
            self._differentiate(self._chosen([self._own]))
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            return True
        return False

    def not_finite(self) -> str:
        """Name what is not finite, weights or the optimiser's state; empty if all is."""
        moments = (
            value
            for state in self.optimiser.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        parts = (("weights", self.policy.parameters()), ("the optimiser's state", moments))
        return " and ".join(name for name, tensors in parts if not all_finite(tensors))

    def _random_state(self) -> list[Any]:
        """Return what a try may change: torch's generator, the gate, the policy's buffers."""
        buffers = [buffer.clone() for buffer in self.policy.buffers()]
        return [torch.get_rng_state(), self._gate.state_dict(), *buffers]

    def _restore(self, before: list[Any]) -> None:
        random, remembered, *buffers = before
        torch.set_rng_state(random)
        self._gate.load_state_dict(remembered)
        for buffer, kept in zip(self.policy.buffers(), buffers, strict=True):
            buffer.copy_(kept)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the machine is short of memory: no rollout's fault."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all gradients, NaN or infinite only if one of them is.

    Summed in float64: squares of a float32 do not overflow there.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms])))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no number is NaN or infinite; tensors of whole numbers are left out."""
    floats = (each.detach() for each in tensors if each.is_floating_point() and each.numel())
    # The largest of them: unlike isfinite, nothing of their size is made.
    largest = [torch.linalg.vector_norm(each, ord=math.inf) for each in floats]
    return all(math.isfinite(float(each)) for each in largest)
