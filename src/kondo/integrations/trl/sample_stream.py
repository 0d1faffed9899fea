"""Gate a stream of samples: what the gate skips leaves the micro-batch before it is collated.

    queue -> TRL's planner -> GatedPlanner -> GatedCollator -> TRL's loss
             micro-batches    kept samples,    denominators of
             of samples       weighted         all samples

TRL's planner forms the same micro-batches as without a gate. So an optimizer step stands for the
same samples, and takes as many from the queue, however much is skipped. A sample is a dict of
TRL's: input_ids, completion_mask, old_log_probs [T], advantage, group_id, metrics.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher
from trl.experimental.async_grpo.packing import TreeRow

import kondo
from kondo.core import rules
from kondo.core._checks import check_state
from kondo.core.contract import Choice, Randomness
from kondo.core.rolling_price import RollingPrice, check_past
from kondo.lm.rows import TokenRows

# A standard deviation of this part of a reward is rounding: the rewards of the group are equal.
_ROUNDING = 1e-12

# What TRL adds to the standard deviation of a group before it divides by it.
_EPSILON = 1e-8

Sample = dict[str, Any]


class StreamedUnbiasedGate(kondo.UnbiasedGate):
    """An unbiased gate whose price comes from past micro-batches; every sample is drawn by itself.

    A micro-batch may hold fewer samples than a rate can be had of. The price is that of the values
    of `window` micro-batches, the present one included. It depends on no draw, so the mean gradient
    is still the dense one. The number of kept samples varies, and may be 0.

    Args:
        gate: whose rate or noise, signal and largest weight hold.
        window: micro-batches, at least 1.
    """

    remembers = True
    one_price = False

    def __init__(self, gate: kondo.UnbiasedGate, window: int):
        super().__init__(
            rate=gate.rate, noise=gate.noise, signal=gate.signal, max_weight=gate.max_weight
        )
        self.window = window
        self._past = RollingPrice(window)

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among M samples, and remember their values."""
        self._past.push(values, mask & (values != 0), mask.sum(-1, keepdim=True))
        pool, weight = self._past.pooled()
        price = self.price_for(pool.nan_to_num(nan=0.0), weight, self._past.budget(1.0))
        return self.choose_at(values, mask, price, rules.uniform(values, generator))

    def state_dict(self) -> dict[str, Any]:
        """Return the window."""
        return {"past": self._past.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        check_state("state", state, {"past"})
        check_past(state["past"])
        self._past.load_state_dict(state["past"])


def num_trained(sample: Sample) -> int:
    """Return how many tokens of a sample TRL's loss counts; the first of all has no log-prob."""
    return int(sample["completion_mask"][1:].sum())


def token_rows(samples: list[Sample]) -> tuple[TokenRows, Tensor]:
    """Return the samples, padded on the right, and the log-probs of the sampler: [N, T]."""

    def padded(name: str) -> Tensor:
        return pad_sequence([torch.as_tensor(s[name]) for s in samples], batch_first=True)

    sampled = padded("completion_mask").bool()
    sampled[:, 0] = False
    lengths = torch.tensor([len(s["input_ids"]) for s in samples]).unsqueeze(1)
    real = torch.arange(sampled.shape[1]) < lengths
    rows = TokenRows(
        input_ids=padded("input_ids"), attention_mask=real, completion_mask=sampled & real
    )
    return rows, padded("old_log_probs").float()


def sample_advantages(samples: list[Sample], gate: kondo.BaseGate) -> Tensor:
    """Return what the gate looks at, [N]: the loss's advantages, or centred rewards.

    TRL's worker divides centred rewards by the standard deviation of their group, and notes it in
    each sample's metrics. Delight needs the advantage's own scale, so it is taken back there. An
    unbiased gate needs what enters the loss. Both are exactly 0 where the rewards of a group are
    equal: through rounding, TRL's are not quite.

    Raises:
        ValueError: a sample of another worker that notes no standard deviation.
    """
    advantages = [0.0 if _equal_rewards(s) else float(s["advantage"]) for s in samples]
    if isinstance(gate, kondo.UnbiasedGate):
        return torch.tensor(advantages)
    spreads = [sample["metrics"].get("reward_std") for sample in samples]
    if None in spreads:
        raise ValueError(
            f"metrics of a sample must have 'reward_std', the standard deviation that its "
            f"advantage was divided by, for {gate!r}, got {sorted(samples[0]['metrics'])}; let the "
            f"rollout worker add it, or use an unbiased gate such as 'unbiased:0.1'."
        )
    centred = [
        advantage * (spread + _EPSILON) if advantage else 0.0  # NaN in a group without rewards
        for advantage, spread in zip(advantages, spreads, strict=True)
    ]
    return torch.tensor(centred)


def _equal_rewards(sample: Sample) -> bool:
    """Return whether the worker noted that all rewards of the sample's group are the same.

    The group may be spread over micro-batches, so only its standard deviation can tell.
    """
    metrics = sample["metrics"]
    spread, reward = metrics.get("reward_std"), metrics.get("reward", 0.0)
    return spread is not None and bool(spread <= _ROUNDING * abs(reward))


@dataclasses.dataclass
class MicroBatch:
    """What a gate left of a micro-batch."""

    rows: list[Any]
    """TRL's `TreeRow`, one per process: weighted samples, and fillers where a row had none."""
    seen: list[Sample]
    """All samples."""
    kept: list[Sample]


class GatedPlanner(torch.utils.data.IterableDataset[MicroBatch]):
    """TRL's planner, less what the gate skips.

    Args:
        planner: of TRL: yields lists of `TreeRow`.
        weigh: samples -> one weight each, 0 for what is skipped.
    """

    def __init__(self, planner: Any, weigh: Callable[[list[Sample]], list[float]]):
        self.planner, self.weigh = planner, weigh

    def __iter__(self) -> Iterator[MicroBatch]:
        budget = getattr(self.planner, "token_budget", math.inf)
        for rows in self.planner:
            seen = [sample for row in rows for sample in row.samples]
            weights = iter(self.weigh(seen))
            weighted = [[_weighted(s, next(weights)) for s in row.samples] for row in rows]
            by_row = [[s for s in row if s is not None] for row in weighted]
            kept = [sample for row in by_row for sample in row]
            yield MicroBatch(_partition(by_row, seen, budget), seen, kept)


def _weighted(sample: Sample, weight: float) -> Sample | None:
    """Return a sample whose every loss term has this weight; None at 0.

    TRL's loss is -min(r A, clip(r) A): a weight > 0 of the advantage is one of the loss. Rewards
    are logged for all samples elsewhere.
    """
    if weight == 0:
        return None
    return sample | {"advantage": sample["advantage"] * weight, "metrics": {}}


def _filler(samples: list[Sample]) -> Sample:
    """Return the shortest start of a sample with one sampled token, without an advantage.

    Every process must run a forward in every micro-batch, or the others would wait for it.
    """

    def stop(sample: Sample) -> int:
        return 2 + int(torch.as_tensor(sample["completion_mask"][1:]).argmax())

    shortest = min([sample for sample in samples if num_trained(sample)] or samples, key=stop)
    end = stop(shortest)
    cut = {k: shortest[k][:end] for k in ("input_ids", "completion_mask", "old_log_probs")}
    return shortest | cut | {"advantage": 0.0, "metrics": {}}


def _partition(by_row: list[list[Sample]], seen: list[Sample], budget: float) -> list[Any]:
    """Return one row per process: balanced by TRL, or as they were where that breaks the budget."""
    kept = [sample for row in by_row for sample in row]
    fillers = [_filler(seen)] * max(0, len(by_row) - len(kept))
    samples: Any = kept + fillers  # TRL's planner takes anything that can be iterated over
    rows: list[Any]
    (rows,) = FixedCountBatcher(samples, len(by_row), len(samples))
    if all(len(row.tokens) <= budget and row.trained <= budget for row in rows):
        return rows
    rows = [TreeRow() for _ in by_row]  # type: ignore[no-untyped-call]
    for row, own in zip(rows, by_row, strict=True):
        for sample in own or [_filler(seen)]:
            row.add(sample)
    return rows


class GatedCollator:
    """TRL's collator, with the denominators and the logged rewards of all samples.

    Args:
        collator: of TRL.
    """

    def __init__(self, collator: Any):
        self.collator = collator

    def __call__(self, examples: Iterable[MicroBatch]) -> dict[str, Tensor]:
        """Return TRL's batch of one micro-batch, and `kondo_kept`, `kondo_trained`, [processes]."""
        (micro,) = examples
        collator, metrics = self.collator, self.collator.metrics
        batch: dict[str, Tensor] = collator([micro.rows])
        seen, trained = (
            float(sum(map(num_trained, samples))) for samples in (micro.seen, micro.kept)
        )
        like = batch["global_n_tokens"]
        batch["global_n_tokens"] = torch.full_like(like, seen)
        batch["kondo_trained"] = torch.full_like(like, trained)
        batch["kondo_kept"] = torch.full_like(like, float(len(micro.kept)))
        # An epoch counts prompts that were looked at, whatever was kept of them.
        collator.groups_trained.update(sample["group_id"] for sample in micro.seen)
        for name in dict.fromkeys(name for sample in micro.seen for name in sample["metrics"]):
            found = [sample["metrics"].get(name, math.nan) for sample in micro.seen]
            scored = [value for value in found if not math.isnan(value)]
            metrics[name].append(sum(scored) / len(scored) if scored else math.nan)
        for name, value in (
            ("samples_seen_total", float(len(micro.seen))),
            ("samples_trained_total", float(len(micro.kept))),
            ("tokens_seen_total", seen),
            ("tokens_trained_total", trained),
        ):
            metrics[f"kondo/{name}"].append(value)
        return batch
