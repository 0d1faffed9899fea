"""Gate a stream of samples: what the gate skips leaves the micro-batch before it is collated.

    queue -> TRL's planner -> GatedPlanner -> collate -> TRL's loss
             micro-batches    kept samples,   denominators of
             of samples       weighted        all samples

TRL's planner forms the same micro-batches as without a gate. So an optimizer step stands for the
same samples, and takes as many from the queue, however much is skipped. A sample is a dict of
TRL's: input_ids, completion_mask, old_log_probs [T], advantage, group_id, metrics.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher
from trl.experimental.async_grpo.packing import TreeRow

import kondo
from kondo.lm import TokenRows
from kondo.lm.trained_forward import MOST_ROWS

# A standard deviation of this part of a reward is rounding: the rewards of the group are equal.
_ROUNDING = 1e-12

# What TRL adds to the standard deviation of a group before it divides by it.
_EPSILON = 1e-8

Sample = dict[str, Any]


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


def rows_to_try(samples: list[Sample], accelerator: Any) -> TokenRows | None:
    """Return rows of up to 8 samples for `kondo.check`, the shortest; None if none has a token.

    They have at most the tokens of a process's share together, but there are at least two.
    """
    most = sum(len(sample["input_ids"]) for sample in samples) // accelerator.num_processes
    shortest = sorted(filter(num_trained, samples), key=lambda sample: len(sample["input_ids"]))
    ends = itertools.accumulate(len(sample["input_ids"]) for sample in shortest)
    few = shortest[: min(MOST_ROWS, max(2, sum(end <= most for end in ends)))]
    if not few:
        return None
    rows, device = token_rows(few)[0], accelerator.device
    found: TokenRows = kondo.rows.map_fields(rows, lambda each: each.to(device))
    return found


def packed_log_probs(model: torch.nn.Module, rows: TokenRows) -> Tensor:
    """Return log-probs [n, S] by TRL's forward: rows end to end, none sharing its start."""
    real, device = rows.attention_mask, rows.device
    lengths = real.sum(dim=1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    labels = rows.input_ids.masked_fill(~rows.completion_mask, -100).roll(-1, dims=1)
    found = model(
        input_ids=rows.input_ids[real].unsqueeze(0),
        position_ids=(real.cumsum(1) - 1)[real].unsqueeze(0),
        shift_labels=labels[real].unsqueeze(0),
        fused_lm_head=True,
        tree_kv_index=torch.arange(int(ends[-1]), device=device),
        tree_cu_seqlens_q=ends,
        tree_cu_seqlens_k=ends,
        tree_max_seqlen_q=longest,
        tree_max_seqlen_k=longest,
    ).log_probs.flatten()
    # Each is of the token that follows its place.
    wide = torch.zeros(real.shape, dtype=found.dtype, device=device).masked_scatter(real, found)
    return wide.roll(1, dims=1)


def sample_advantages(samples: list[Sample], gate: kondo.BaseGate) -> Tensor:
    """Return what the gate looks at, [N]: the loss's advantages, or centred rewards.

    TRL's worker divides centred rewards by the standard deviation of their group, and notes it in
    each sample's metrics. Delight needs the advantage's own scale, so it is taken back there. An
    unbiased gate needs what enters the loss. Both are exactly 0 where the rewards of a group are
    equal: through rounding, TRL's are not quite. The group may be spread over micro-batches, so
    only its standard deviation can tell.

    Raises:
        ValueError: a sample of another worker that notes no standard deviation.
    """
    advantages = []
    for sample in samples:
        metrics, advantage = sample["metrics"], float(sample["advantage"])
        spread = metrics.get("reward_std")
        if spread is not None and spread <= _ROUNDING * abs(metrics.get("reward", 0.0)):
            advantage = 0.0
        if not isinstance(gate, kondo.UnbiasedGate):
            if spread is None:
                raise ValueError(
                    f"metrics of a sample must have 'reward_std', the standard deviation that its "
                    f"advantage was divided by, for {gate!r}, got {sorted(metrics)}; let the "
                    f"rollout worker add it, or use an unbiased gate such as 'unbiased:0.1'."
                )
            # NaN in a group without rewards.
            advantage = advantage * (spread + _EPSILON) if advantage else 0.0
        advantages.append(advantage)
    return torch.tensor(advantages)


class MicroBatch(NamedTuple):
    """What a gate left of a micro-batch."""

    rows: list[Any]
    """TRL's `TreeRow`, one per process: weighted samples, and fillers where a row had none."""
    seen: list[Sample]
    """All samples."""
    kept: list[Sample]


class GatedPlanner(torch.utils.data.IterableDataset[MicroBatch]):
    """TRL's planner, less what the gate skips.

    A weight > 0 of the advantage is one of the loss, which is -min(r A, clip(r) A).

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
            # Rewards are logged for all samples elsewhere.
            by_row = [
                [
                    sample | {"advantage": sample["advantage"] * weight, "metrics": {}}
                    for sample, weight in zip(row.samples, weights, strict=False)
                    if weight
                ]
                for row in rows
            ]
            kept = [sample for row in by_row for sample in row]
            yield MicroBatch(_partition(by_row, seen, budget), seen, kept)


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


def collate(collator: Any, examples: Iterable[MicroBatch]) -> dict[str, Tensor]:
    """Return TRL's batch of one micro-batch, and `kondo_kept`, `kondo_trained`, [processes].

    Its denominators, and the rewards that TRL's collator logs, are those of all samples.
    """
    (micro,) = examples
    batch: dict[str, Tensor] = collator([micro.rows])
    seen, trained = (float(sum(map(num_trained, samples))) for samples in (micro.seen, micro.kept))
    like = batch["global_n_tokens"]
    batch["global_n_tokens"] = torch.full_like(like, seen)
    batch["kondo_trained"] = torch.full_like(like, trained)
    batch["kondo_kept"] = torch.full_like(like, float(len(micro.kept)))
    # An epoch counts prompts that were looked at, whatever was kept of them.
    collator.groups_trained.update(sample["group_id"] for sample in micro.seen)
    for name in dict.fromkeys(name for sample in micro.seen for name in sample["metrics"]):
        found = [sample["metrics"].get(name, math.nan) for sample in micro.seen]
        scored = [value for value in found if not math.isnan(value)]
        collator.metrics[name].append(sum(scored) / len(scored) if scored else math.nan)
    for name, value in (
        ("samples_seen_total", float(len(micro.seen))),
        ("samples_trained_total", float(len(micro.kept))),
        ("tokens_seen_total", seen),
        ("tokens_trained_total", trained),
    ):
        collator.metrics[f"kondo/{name}"].append(value)
    return batch
