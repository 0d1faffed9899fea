"""Messages between processes, and their validation.

    driver -> actor    Order: which rollout, with which weights, at which price
    actor -> learner   message: plain arrays and numbers, see `pack`
    learner            validate(message, order, schema) -> Batch, or Quarantine with the reason

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
from kondo.actors.source_price import Array, Price, Rule, Sketch, bought, sketch, unit_values

# Log-probs in low precision may stand this little above 0.
_ROUNDING = 1e-3
# Products and sums of log-probs above this one are finite in float32.
_LEAST_LOG_PROB = -math.sqrt(torch.finfo(torch.float32).max)
# Values of a sketch were computed on another machine: they may differ from ours in the last digits.
_TOLERANCE = 1e-5
_INDEX_BYTES = 4


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
    keep: Tensor  # bool, one per unit: [n], or [n, T] for unit "token": the price buys it
    weight: Tensor  # like keep, float: factor of a unit's loss, 0 where not kept
    sketch: Sketch  # of all units' values
    mean_reward: float  # of all N samples
    wire_bytes: int  # of the message
    full_bytes: int  # of the message had it held all N rows

    @property
    def trained(self) -> int:
        """Rows with a unit that the price buys."""
        return int(_of_rows(self.keep).sum())


class Quarantine(NamedTuple):
    """Why a message is not trained on."""

    reason: str  # one of `REASONS`
    detail: str  # what was expected and what came


REASONS = (
    *("structure", "identity", "rows", "dtype", "shape", "nan", "range", "reward", "sketch"),
    # What a step makes of a message tells; see `update`.
    *("gradient", "error", "price"),
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
    tokens: int  # T, or 1 where a row is one action
    fields: dict[str, Field]  # of the rows, and "log_probs", "advantages", "rewards"
    reward_limits: tuple[float, float]

    @property
    def units(self) -> int:
        """Units of a rollout: what a rate is a share of."""
        return self.samples * (self.tokens if self.unit == "token" else 1)

    @property
    def elements(self) -> int:
        """Log-probs of a rollout: what a full denominator counts."""
        return self.samples * self.tokens


_SIGNALS = ("log_probs", "advantages", "rewards")


def schema_of(setup: Setup, unit: kondo.Unit, rollout: Rollout) -> Schema:
    """Return what messages must look like, from one rollout made where it is trusted."""
    arrays = _arrays(rollout)
    fields = {}
    for name, array in arrays.items():
        if array.shape[:1] != (setup.samples,):
            raise ValueError(
                f"rollout must have {setup.samples} rows (samples of the setup) in {name}, got "
                f"shape {array.shape}."
            )
        fields[name] = Field(array.dtype, array.shape[1:], *_limits(setup, name, array))
    if unknown := set(setup.limits) - set(rollout.rows):
        raise ValueError(
            f"limits must name fields of the rows, {sorted(rollout.rows)}, got {sorted(unknown)}."
        )
    wanted = 1 if unit == "sample" else 2
    if arrays["log_probs"].ndim != wanted:
        raise ValueError(
            f'log_probs must have {wanted} dimensions for unit "{unit}", got shape '
            f"{arrays['log_probs'].shape}."
        )
    for name in ("advantages", "rewards"):
        if arrays[name].ndim != 1:
            raise ValueError(f"{name} must be one per row, got shape {arrays[name].shape}.")
    tokens = arrays["log_probs"].shape[1] if wanted == 2 else 1
    return Schema(setup.samples, unit, tokens, fields, setup.reward_limits)


def _limits(setup: Setup, name: str, array: Array) -> tuple[float, float]:
    known = {
        "log_probs": (_LEAST_LOG_PROB, _ROUNDING),
        "advantages": (-setup.max_advantage, setup.max_advantage),
        "rewards": setup.reward_limits,
        **setup.limits,
    }
    if name not in known and array.dtype.kind in "iu":
        raise ValueError(
            f"limits must hold lowest and highest value of the whole numbers in {name}; without "
            f"them an id out of range would crash the policy."
        )
    return known.get(name, (-np.inf, np.inf))


def pack(
    rollout: Rollout,
    order: Order,
    *,
    rule: Rule,
    unit: kondo.Unit,
    at_source: bool,
    sketch_size: int,
) -> Any:
    """Return the message of a rollout: plain arrays and numbers.

    At the source, rows that the order's price does not buy stay behind. What is broken is always
    sent: the learner must see it to put the rollout into quarantine.
    """
    arrays = _arrays(rollout)
    index = torch.arange(len(arrays["log_probs"]))
    worth = torch.zeros(0)
    if _is_sound(arrays, unit):
        kondo.surprisal(rollout.log_probs)  # refuses log-probs above 0
        worth = unit_values(rule, rollout.log_probs, rollout.advantages, unit)
        if at_source:
            keep = bought(rule, worth, order.price, number=order.number, index=index).keep
            broken = _of_rows(~worth.isfinite()) | _of_rows(~rollout.log_probs.isfinite())
            index = (_of_rows(keep) | broken).nonzero().squeeze(1)
            arrays = {name: array[index.numpy()] for name, array in arrays.items()}
    values, weights = sketch(worth, sketch_size)
    message = {
        "number": order.number,
        "incarnation": order.incarnation,
        "arrays": arrays,
        "index": index.numpy().astype(np.int32),
        "mean_reward": float(rollout.rewards.double().mean()),
        "sketch_values": values,
        # Powers of two: their exponents fit a byte.
        "sketch_levels": np.log2(weights).round().astype(np.uint8),
    }
    sent = wire_bytes(message)
    behind = len(rollout.log_probs) - len(index)
    row = sum(math.prod(a.shape[1:]) * a.itemsize for a in arrays.values())
    return {**message, "wire_bytes": sent, "full_bytes": sent + behind * (row + _INDEX_BYTES)}


def _is_sound(arrays: dict[str, Array], unit: kondo.Unit) -> bool:
    """Return whether values can be computed; what cannot is sent whole, for the learner to see."""
    log_probs, advantages = arrays["log_probs"], arrays["advantages"]
    return (
        all(array.shape[:1] == log_probs.shape[:1] for array in arrays.values())
        and log_probs.ndim == (1 if unit == "sample" else 2)
        and advantages.ndim == 1
        and log_probs.dtype.kind == advantages.dtype.kind == "f"
    )


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


def validate(
    message: Any, order: Order, schema: Schema, *, rule: Rule, at_source: bool
) -> Batch | Quarantine:
    """Return the batch, or why it must not be trained on. Never raises, whatever the message."""
    try:
        return _checked(message, order, schema, rule, at_source)
    except _RefusedError as bad:
        return Quarantine(*bad.args)
    except MemoryError:
        raise
    except Exception as error:  # a key or a number that cannot even be shown, say
        name = type(error).__name__
        return Quarantine("structure", f"expected a message that can be checked, got {name}")


_KEYS: dict[str, type] = {
    **dict.fromkeys(("number", "incarnation", "wire_bytes", "full_bytes"), int),
    **dict.fromkeys(("index", "sketch_values", "sketch_levels"), np.ndarray),
    "arrays": dict,
    "mean_reward": float,
}


def _checked(message: Any, order: Order, schema: Schema, rule: Rule, at_source: bool) -> Batch:
    _check_structure(message, schema)
    asked, got = ((m["number"], m["incarnation"]) for m in (order._asdict(), message))
    detail = f"rollout {asked[0]} of process {asked[1]} was asked for, got {got[0]} of {got[1]}"
    _require(asked == got, "identity", detail)
    index = _check_index(message["index"], schema, at_source)
    tensors = {
        name: _check_array(name, message["arrays"][name], field, len(index))
        for name, field in schema.fields.items()
    }
    (low, high), mean = schema.reward_limits, message["mean_reward"]
    _require(low <= mean <= high, "reward", f"a mean reward in [{low}, {high}], got {mean}")
    sizes = (message["wire_bytes"], message["full_bytes"])
    _require(0 < sizes[0] <= sizes[1] < 2**62, "structure", f"sizes in bytes, got {sizes}")
    log_probs, advantages, _ = (tensors.pop(name) for name in _SIGNALS)
    worth = unit_values(rule, log_probs, advantages, schema.unit)
    _require(bool(worth.isfinite().all()), "range", "finite values of all units, got others")
    found = _check_sketch(message["sketch_values"], message["sketch_levels"], schema.units)
    _check_limits(found.values, rule.least, worth, order.price)
    keep, weight = bought(rule, worth, order.price, number=order.number, index=index)
    # An actor has no say in what is chosen: it sends what the price buys, or all it has.
    others = int((~_of_rows(keep)).sum()) if len(index) < schema.samples else 0
    _require(not others, "rows", f"rows that the price buys, got {others} others")
    weight = weight.to(log_probs.dtype)
    return Batch(order, tensors, log_probs, advantages, keep, weight, found, mean, *sizes)


def _of_rows(units: Tensor) -> Tensor:
    """Return which rows have a unit that is True: bool [n] or [n, T] -> [n]."""
    return units if units.ndim == 1 else units.any(dim=1)


def _check_structure(message: Any, schema: Schema) -> None:
    _require(type(message) is dict, "structure", f"a dict, got {type(message).__name__}")
    _require_keys("keys", message, _KEYS)
    for name, kind in _KEYS.items():
        # An exact type: a subclass may compare and index as it likes.
        got = type(message[name])
        _require(got is kind, "structure", f"{name} as {kind}, got {got}")
    _require_keys("arrays", message["arrays"], schema.fields)


def _check_index(index: Array, schema: Schema, at_source: bool) -> Tensor:
    _require(index.dtype == np.int32, "dtype", f"index as int32, got {index.dtype}")
    _require(index.ndim == 1, "shape", f"index with one dimension, got {index.shape}")
    fits = len(index) <= schema.samples if at_source else len(index) == schema.samples
    bound = "at most " if at_source else ""
    _require(fits, "rows", f"{bound}{schema.samples} rows, got {len(index)}")
    inside = len(index) == 0 or (index[0] >= 0 and index[-1] < schema.samples)
    ascending = bool(inside and (np.diff(index) > 0).all())
    _require(ascending, "rows", f"ascending row numbers below {schema.samples}, got others")
    return torch.from_numpy(index.astype(np.int64))


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
        reason = "reward" if name in ("rewards", "advantages") else "range"
        limits = f"[{field.low}, {field.high}]"
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


def _check_limits(values: Array, least: float, worth: Tensor, price: Price) -> None:
    """Refuse values of a sketch that no unit can have.

    A unit above the price is in a row that was sent. So no value of the sketch is higher than both
    the price and all that was sent: one lie would raise the price for everybody.
    """
    if not len(values):
        return
    most = max(price.price, float(worth.max()) if worth.numel() else -math.inf)
    low, high = float(values.min()), float(values.max())
    fits = least <= low and high <= most + _TOLERANCE * abs(most)
    _require(fits, "sketch", f"values in [{least}, {most}], got [{low}, {high}]")


def _require_keys(what: str, found: Mapping[Any, Any], expected: Mapping[str, Any]) -> None:
    names = sorted(str(key)[:40] for key in found)[:20]
    fits = found.keys() == expected.keys()
    _require(fits, "structure", f"{what} {sorted(expected)}, got {names}")


def _require(sound: bool, reason: str, expected_and_got: str) -> None:
    if not sound:
        raise _RefusedError(reason, f"expected {expected_and_got}")
