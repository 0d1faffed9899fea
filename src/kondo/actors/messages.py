"""Messages between processes, and their validation.

    driver -> actor    Order: which rollout, with which weights, at which price
    actor -> learner   message: plain arrays and numbers, see `pack`
    learner            validate(message, order, schema, gate) -> Batch, or Quarantine and why

Orders come from the driver and are trusted. Messages come from actors that may be broken: nothing
of a message is used before `validate` has checked all of it.
"""

import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import kondo
from kondo.actors.setup import Rollout, Setup
from kondo.actors.source_price import Array, Price, Sketch, SourceGate, sketch

# Log-probs in low precision may stand this little above 0.
_ROUNDING = 1e-3
# Products and sums of log-probs above this one are finite in float32.
_LEAST_LOG_PROB = -math.sqrt(torch.finfo(torch.float32).max)
# Values of a sketch were computed on another machine: they may differ from ours in the last digits.
_TOLERANCE = 1e-5
_SIGNALS = ("log_probs", "advantages", "rewards")


class Order(NamedTuple):
    """One rollout that was asked for. Its N samples are (number, 0) .. (number, N - 1)."""

    number: int  # no other order of the run has it
    actor: int  # place in the worker pool
    incarnation: int  # number of its process; no other process of the run has it
    version: int  # of the weights it acts with: the learner's step that made them
    price: Price  # published with those weights


class Batch(NamedTuple):
    """A rollout that passed every check; n of its N rows were sent."""

    order: Order
    rows: dict[str, Tensor]  # [n, ...] each
    log_probs: Tensor  # [n] or [n, T]
    advantages: Tensor  # [n]
    keep: Tensor  # bool, one per unit: [n], or [n, T] for unit "token": it is trained on
    weight: Tensor  # like keep, float: factor of a unit's loss, 0 where not kept
    sketch: Sketch  # of all units' values
    mean_reward: float  # of all N samples
    wire_bytes: int  # of the message
    full_bytes: int  # of the message had it held all N rows

    @property
    def trained(self) -> int:
        """Rows with a unit that is trained on."""
        return int(_of_rows(self.keep).sum())


class Quarantine(NamedTuple):
    """Why a message is not trained on."""

    reason: str  # one of `REASONS`
    detail: str  # what was expected and what came


REASONS = (
    *("structure", "identity", "rows", "dtype", "shape", "nan", "range", "reward", "sketch"),
    # What a step makes of a message tells; see `update`.
    *("gradient", "error"),
)


class Field(NamedTuple):
    """What an array must look like."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of one row
    low: float
    high: float


class Schema(NamedTuple):
    """What a message must look like."""

    samples: int  # N of every rollout
    unit: kondo.Unit
    fields: dict[str, Field]  # of the rows, and "log_probs", "advantages", "rewards"

    @property
    def units(self) -> int:
        """Units of a rollout: what a rate is a share of."""
        return self.elements if self.unit == "token" else self.samples

    @property
    def elements(self) -> int:
        """Log-probs of a rollout: what a full denominator counts."""
        return self.samples * math.prod(self.fields["log_probs"].shape)


def schema_of(setup: Setup, unit: kondo.Unit, rollout: Rollout) -> Schema:
    """Return what messages must look like, from one rollout made where it is trusted."""
    arrays = _arrays(rollout)
    limits = {
        "log_probs": (_LEAST_LOG_PROB, _ROUNDING),
        "advantages": (-setup.max_advantage, setup.max_advantage),
        "rewards": setup.reward_limits,
        **setup.limits,
    }
    dims = {"log_probs": 1 if unit == "sample" else 2, "advantages": 1, "rewards": 1}
    fields = {}
    for name, array in arrays.items():
        if array.shape[:1] != (setup.samples,):
            raise ValueError(
                f"rollout must have {setup.samples} rows (samples of the setup) in {name}, got "
                f"shape {array.shape}."
            )
        if array.ndim != dims.get(name, array.ndim):
            raise ValueError(
                f'{name} must have {dims[name]} dimensions for unit "{unit}", got shape '
                f"{array.shape}."
            )
        if name not in limits and array.dtype.kind in "iu":
            raise ValueError(
                f"limits must hold lowest and highest value of the whole numbers in {name}; "
                f"without them an id out of range would crash the policy."
            )
        fields[name] = Field(array.dtype, array.shape[1:], *limits.get(name, (-np.inf, np.inf)))
    if unknown := set(setup.limits) - set(rollout.rows):
        raise ValueError(
            f"limits must name fields of the rows, {sorted(rollout.rows)}, got {sorted(unknown)}."
        )
    return Schema(setup.samples, unit, fields)


def pack(rollout: Rollout, order: Order, gate: SourceGate, unit: kondo.Unit) -> Any:
    """Return the message of a rollout: plain arrays and numbers.

    At the source, rows that the order's price does not buy stay behind. What is broken is always
    sent: the learner must see it to put the rollout into quarantine.
    """
    arrays = _arrays(rollout)
    log_probs, advantages = arrays["log_probs"], arrays["advantages"]
    index, worth = torch.arange(len(log_probs)), torch.zeros(0)
    sound = (
        all(array.shape[:1] == log_probs.shape[:1] for array in arrays.values())
        and log_probs.ndim == (1 if unit == "sample" else 2)
        and advantages.ndim == 1
        and log_probs.dtype.kind == advantages.dtype.kind == "f"
    )
    if sound:  # else no value can be computed
        kondo.surprisal(rollout.log_probs)  # refuses log-probs above 0
        worth = gate.values(rollout.log_probs, rollout.advantages, unit)
        if gate.at_source:
            keep = gate.bought(worth, order.price, order.number, index).keep
            broken = _of_rows(~worth.isfinite()) | _of_rows(~rollout.log_probs.isfinite())
            index = (_of_rows(keep) | broken).nonzero().squeeze(1)
            arrays = {name: array[index.numpy()] for name, array in arrays.items()}
    values, weights = sketch(worth, gate.sketch_size)
    return {
        "number": order.number,
        "incarnation": order.incarnation,
        "arrays": arrays,
        "index": index.numpy().astype(np.int32),
        "mean_reward": float(rollout.rewards.double().mean()),
        "sketch_values": values,
        # Powers of two: their exponents fit a byte.
        "sketch_levels": np.log2(weights).round().astype(np.uint8),
    }


def _arrays(rollout: Rollout) -> dict[str, Array]:
    signals = {name: getattr(rollout, name) for name in _SIGNALS}
    if wrong := [name for name in rollout.rows if not isinstance(name, str)]:
        raise ValueError(f"rows must have strings as names of fields, got {wrong}; rename them.")
    if clash := sorted(set(rollout.rows) & set(signals)):
        raise ValueError(f"rows must not have fields named {clash}; rename them.")
    return {k: v.detach().cpu().numpy() for k, v in {**rollout.rows, **signals}.items()}


def wire_bytes(message: Any) -> int:
    """Return the serialised size: Ray pickles like this, with arrays beside the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return len(inside) + sum(buffer.raw().nbytes for buffer in buffers)


class _RefusedError(Exception):
    """Carries reason and detail of a quarantine out of a check."""


def validate(message: Any, order: Order, schema: Schema, gate: SourceGate) -> Batch | Quarantine:
    """Return the batch, or why it must not be trained on. Never raises, whatever the message."""
    try:
        return _checked(message, order, schema, gate)
    except _RefusedError as bad:
        return Quarantine(*bad.args)
    except MemoryError:
        raise
    except Exception as error:  # a key or a number that cannot even be shown, say
        name = type(error).__name__
        return Quarantine("structure", f"expected a message that can be checked, got {name}")


_REASON_OF_RANGE = {"rewards": "reward", "advantages": "reward", "index": "rows"}
_KEYS: dict[str, type] = {
    **dict.fromkeys(("number", "incarnation"), int),
    **dict.fromkeys(("index", "sketch_values", "sketch_levels"), np.ndarray),
    "arrays": dict,
    "mean_reward": float,
}


def _checked(message: Any, order: Order, schema: Schema, gate: SourceGate) -> Batch:
    _require(type(message) is dict, "structure", f"a dict, got {type(message).__name__}")
    _require_keys("keys", message, _KEYS)
    for name, kind in _KEYS.items():
        # An exact type: a subclass may compare and index as it likes.
        got = type(message[name])
        _require(got is kind, "structure", f"{name} as {kind}, got {got}")
    _require_keys("arrays", message["arrays"], schema.fields)
    asked, came = ((m["number"], m["incarnation"]) for m in (order._asdict(), message))
    detail = f"rollout {asked[0]} of process {asked[1]} was asked for, got {came[0]} of {came[1]}"
    _require(asked == came, "identity", detail)
    places = Field(np.dtype(np.int32), (), 0, schema.samples - 1)
    index = _check_array("index", message["index"], places, len(message["index"])).long()
    fits = len(index) == schema.samples or gate.at_source
    _require(fits, "rows", f"all {schema.samples} rows, got {len(index)}")
    _require(bool((index.diff() > 0).all()), "rows", "ascending row numbers, got others")
    tensors = {
        name: _check_array(name, message["arrays"][name], field, len(index))
        for name, field in schema.fields.items()
    }
    (_, _, low, high), mean = schema.fields["rewards"], message["mean_reward"]
    _require(low <= mean <= high, "reward", f"a mean reward in [{low}, {high}], got {mean}")
    log_probs, advantages, _ = (tensors.pop(name) for name in _SIGNALS)
    worth = gate.values(log_probs, advantages, schema.unit)
    _require(bool(worth.isfinite().all()), "range", "finite values of all units, got others")
    found = _check_sketch(message["sketch_values"], message["sketch_levels"], schema.units)
    if len(found.values):
        # A unit above the price is in a row that was sent. So no value of the sketch is higher than
        # both the price and all that was sent: one lie would raise the price for everybody.
        most = max(order.price.price, float(worth.max()) if worth.numel() else -math.inf)
        low, high = float(found.values.min()), float(found.values.max())
        fits = gate.least <= low and high <= most + _TOLERANCE * abs(most)
        _require(fits, "sketch", f"values in [{gate.least}, {most}], got [{low}, {high}]")
    choice = gate.bought(worth, order.price, order.number, index)
    # An actor has no say in what is chosen: it sends what the price buys, or all it has.
    others = int((~_of_rows(choice.keep)).sum()) if len(index) < schema.samples else 0
    _require(not others, "rows", f"rows that the price buys, got {others} others")
    weight = choice.weight.to(log_probs.dtype)
    sent, behind = wire_bytes(message), schema.samples - len(index)
    row = sum(math.prod(field.shape) * field.dtype.itemsize for field in schema.fields.values())
    sizes = (sent, sent + behind * (row + message["index"].itemsize))
    return Batch(order, tensors, log_probs, advantages, choice.keep, weight, found, mean, *sizes)


def _of_rows(units: Tensor) -> Tensor:
    """Return which rows have a unit that is True: bool [n] or [n, T] -> [n]."""
    return units if units.ndim == 1 else units.any(dim=1)


def _check_array(name: str, array: Any, field: Field, num_rows: int) -> Tensor:
    _require(type(array) is np.ndarray, "structure", f"{name} as an array, got {type(array)}")
    _require(array.dtype == field.dtype, "dtype", f"{name} as {field.dtype}, got {array.dtype}")
    count, *shape = array.shape or (None,)
    _require(count == num_rows, "rows", f"{name} with {num_rows} rows, got {array.shape}")
    fits = tuple(shape) == field.shape
    _require(fits, "shape", f"{name} with rows of shape {field.shape}, got {tuple(shape)}")
    if array.size:
        _require(not np.isnan(array).any(), "nan", f"{name} without NaN")
        low, high = float(array.min()), float(array.max())
        inside = field.low <= low and high <= field.high and np.isfinite([low, high]).all()
        limits = f"[{field.low}, {field.high}]"
        reason = _REASON_OF_RANGE.get(name, "range")
        _require(bool(inside), reason, f"{name} in {limits}, got [{low}, {high}]")
    # A copy: what Ray delivers is read-only and shared.
    return torch.from_numpy(array.copy())


def _check_sketch(values: Array, levels: Array, num_units: int) -> Sketch:
    sound = (
        values.dtype == np.float32
        and levels.dtype == np.uint8
        and values.ndim == 1
        and values.shape == levels.shape
        and len(values) <= num_units
        and bool(np.isfinite(values).all() and (values != 0).all() and (levels < 48).all())
    )
    _require(sound, "sketch", "finite non-zero values with a level each, got others")
    weights = np.left_shift(np.int64(1), levels.astype(np.int64))
    total = int(weights.sum())
    _require(total <= num_units, "sketch", f"a sketch of at most {num_units} units, got {total}")
    return Sketch(values.copy(), weights)


def _require_keys(what: str, found: Mapping[Any, Any], expected: Mapping[str, Any]) -> None:
    names = sorted(str(key)[:40] for key in found)[:20]
    fits = found.keys() == expected.keys()
    _require(fits, "structure", f"{what} {sorted(expected)}, got {names}")


def _require(sound: bool, reason: str, expected_and_got: str) -> None:
    if not sound:
        raise _RefusedError(reason, f"expected {expected_and_got}")
