"""One update of the policy, with only those rollouts that it can be made of.

    rollouts -> gradient -> norm within the bound -> next price -> optimiser
                   \\-> an error, a norm beyond the bound, no price:
                       each rollout alone -> refuse those that fail too -> again without them

Weights change last, when everything else is known to be sound. Before each try the random state
and the policy's buffers are put back. So an update from which rollouts were refused is the one that
the other rollouts make alone, bit for bit.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kondo
from kondo.actors.gradient_scale import GradientScale, all_finite, gradient_norm
from kondo.actors.messages import Batch, Order, Quarantine, Schema
from kondo.actors.setup import Policy, Rollout, Settings
from kondo.actors.source_price import EVERYTHING, Price, PriceWindow, Rule, sketch, unit_values

# Rows of the learner's own rollout that are differentiated to know what is normal.
_OWN_ROWS = 32
_DETAIL = 200  # characters of an error that a report shows


class Outcome(NamedTuple):
    """What became of the rollouts of a step."""

    accepted: list[Batch]
    refused: list[tuple[Batch, Quarantine]]
    loss: float  # 0 if nothing was differentiated


class _Gradient(NamedTuple):
    """A try that went well; the gradient is in the parameters."""

    loss: float
    norm: float | None  # None: nothing was worth differentiating
    window: PriceWindow
    price: Price


class _Fault(NamedTuple):
    """A try that did not."""

    found: Quarantine
    error: Exception | None = None  # that was raised, if any was


class Updater:
    """Policy, optimiser and price of a learner, and the scale of its gradients.

    Args:
        policy: what is trained.
        schema: what rollouts look like.
        settings: learning rate, loss, window and the like.
        rule: what a unit is worth.
        own: a rollout of the learner's own task, which is trusted. It sets the first price and the
            first scale of gradients; nothing is trained on it.
        max_advantage: the largest |advantage| that a message may have.
    """

    def __init__(
        self,
        policy: Policy,
        schema: Schema,
        settings: Settings,
        rule: Rule,
        *,
        own: Rollout,
        max_advantage: float,
    ):
        self.policy, self._schema, self._settings, self._rule = policy, schema, settings, rule
        self.optimiser = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        worth = unit_values(rule, own.log_probs, own.advantages, schema.unit)
        self.window = PriceWindow(settings.window)
        self.window.push(sketch(worth, settings.sketch_size), schema.units)
        self.price = self.window.price(rule)
        self._own = _own_batch(own, worth, settings, max_advantage)
        self.scale = GradientScale(self._own_norm(), policy.parameters())

    def update(self, batches: Sequence[Batch]) -> Outcome:
        """Make one update of the rollouts, without those that cannot be part of it.

        Raises:
            Exception: whatever a try raised, if it is no rollout's fault: no rollout alone raises
                it, or the learner's own rows do, or memory is short.
            RuntimeError: weights or moments are no longer finite. A gradient within its bound does
                not do that; an absurd learning rate does.
        """
        before = self._random_state()
        rest, refused = list(batches), []
        while isinstance(found := self._try(rest, before), _Fault):
            culprits = self._culprits(rest, found, before)
            refused += culprits
            guilty = {batch.order.number for batch, _ in culprits}
            rest = [batch for batch in rest if batch.order.number not in guilty]
        self._apply(found, any(why.reason == "gradient" for _, why in refused))
        return Outcome(rest, refused, found.loss)

    def _try(self, batches: Sequence[Batch], before: list[Tensor]) -> _Gradient | _Fault:
        """Compute gradient and next price; nothing is changed but gradients and random state."""
        self._restore(before)
        try:
            loss = self._differentiate(batches)
            window = self.window.copy()
            for batch in batches:
                window.push(batch.sketch, self._schema.units)
            price = window.price(self._rule)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            said = f"{type(error).__name__}: {error}".partition("\n")[0][:_DETAIL]
            return _Fault(Quarantine("error", f"expected a step without errors, got {said}"), error)
        if math.isnan(price.price):
            return _Fault(Quarantine("price", "expected values that have a price, got NaN for it"))
        norm = None if loss is None else gradient_norm(self.policy.parameters())
        if norm is not None and not norm <= self.scale.bound:  # also NaN
            detail = f"expected a gradient of norm {self.scale.bound:.3g} at most, got {norm:.3g}"
            return _Fault(Quarantine("gradient", detail))
        return _Gradient(loss or 0.0, norm, window, price)

    def _differentiate(self, batches: Sequence[Batch]) -> float | None:
        """Put the gradient of what is worth its price into the parameters; return the loss.

        The denominator counts every sample produced, sent or not: the gradient is the gated
        gradient of whole rollouts. None: nothing is worth it.
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

    def _culprits(
        self, batches: Sequence[Batch], joint: _Fault, before: list[Tensor]
    ) -> list[tuple[Batch, Quarantine]]:
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

    def _own_raises(self, before: list[Tensor]) -> bool:
        """Return whether the learner's own rows make a step raise: then it is its own error."""
        self._restore(before)
        try:
            self._differentiate([self._own])
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            return True
        return False

    def _own_norm(self) -> float:
        """Return the norm of a gradient of the own rows, as if they were a whole rollout."""
        before = self._random_state()
        self._differentiate([self._own])
        norm = gradient_norm(self.policy.parameters())
        self.optimiser.zero_grad()
        self._restore(before)
        return norm * self._schema.elements / self._own.log_probs.numel()

    def _apply(self, made: _Gradient, refused_gradient: bool) -> None:
        """Step the optimiser, and take over window and price."""
        self.window, self.price = made.window, made.price
        if made.norm is not None:
            self.optimiser.step()
            self.scale.accept(made.norm)
            if broken := self.not_finite():
                raise RuntimeError(
                    f"{broken} must be finite after a step, got NaN or infinity from a gradient of "
                    f"norm {made.norm:.3g}; resume with a smaller learning_rate."
                )
        elif refused_gradient:
            self.scale.refuse()
        self.optimiser.zero_grad()

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

    def _random_state(self) -> list[Tensor]:
        """Return what a forward may change: torch's generator, and the policy's buffers."""
        return [torch.get_rng_state(), *(buffer.clone() for buffer in self._buffers())]

    def _restore(self, before: list[Tensor]) -> None:
        torch.set_rng_state(before[0])
        for buffer, kept in zip(self._buffers(), before[1:], strict=True):
            buffer.copy_(kept)

    def _buffers(self) -> list[Tensor]:
        named: Any = getattr(self.policy, "buffers", None)  # of every module
        return [] if named is None else list(named())


def _own_batch(own: Rollout, worth: Tensor, settings: Settings, max_advantage: float) -> Batch:
    """Return some rows of a trusted rollout, all kept, with the largest advantages of both signs.

    Advantages of the rollout itself may all be 0, as before a first success.
    """
    size = min(len(own.log_probs), _OWN_ROWS)
    signs = torch.where(torch.arange(size) % 2 == 0, 1.0, -1.0)
    log_probs, worth = own.log_probs[:size].detach(), worth[:size]
    keep = torch.ones_like(worth, dtype=torch.bool)
    return Batch(
        Order(-1, -1, 0, 0, EVERYTHING),
        {name: rows[:size].detach() for name, rows in own.rows.items()},
        log_probs,
        (max_advantage * signs).to(own.advantages),
        keep,
        keep.to(log_probs.dtype),
        sketch(worth, settings.sketch_size),
        mean_reward=0.0,
        wire_bytes=0,
        full_bytes=0,
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the machine is short of memory: no rollout's fault."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
