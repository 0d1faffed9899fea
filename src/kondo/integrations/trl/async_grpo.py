"""TRL's experimental asynchronous GRPO trainer, with samples dropped as they leave the queue.

    from kondo.integrations.trl.async_grpo import KondoAsyncGRPOConfig, KondoAsyncGRPOTrainer

The sampler's log-probs come with every sample, so the screen is free. See `sample_stream` for what
becomes of a micro-batch, and docs/integrations/trl.md for what is refused.
"""

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import kondo
from kondo.arguments import check_flag, check_whole
from kondo.integrations.trl import _version
from kondo.integrations.trl.checks import any_trainer, turn_off_router_loss
from kondo.integrations.trl.config import CHECK
from kondo.integrations.trl.gate_options import check_text
from kondo.integrations.trl.gated_trainer import GatedTrainer
from kondo.integrations.trl.optimizer_step import left_out_step

if _version.older_than(1, 16):
    raise ImportError(
        "kondo.integrations.trl.async_grpo needs trl>=1.16,<2: its trainer packs samples in "
        "another way before; pip install 'trl>=1.16,<2'."
    )

from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from kondo.integrations.trl.sample_stream import (
    GatedCollator,
    GatedPlanner,
    Sample,
    packed_log_probs,
    rows_to_try,
    sample_advantages,
    token_rows,
)

# TRL calls itself typed, but hardly is.
# mypy: warn-return-any=False
_Base: Any = AsyncGRPOTrainer

# What TRL's loss logs of the tokens that it ran.
_OF_THE_LOSS = (
    "ratio",
    "kl",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
)

# Place of the config among the positional arguments of TRL's trainer.
_ARGS = 2


@dataclass
class KondoAsyncGRPOConfig(AsyncGRPOConfig):
    """TRL's `AsyncGRPOConfig` and the gate.

    A function that `kondo_gate` names by its import path is called more than once: the config calls
    it to check the text, and the trainer, like every `make_gate()`, for a gate of its own. It must
    return a new gate each time.

    Raises:
        ValueError: options that are out of range or contradict each other.

    Example:
        >>> from kondo.integrations.trl.async_grpo import KondoAsyncGRPOConfig
        >>> KondoAsyncGRPOConfig("out", use_cpu=True, bf16=False).make_gate()
        UnbiasedGate(rate=0.1, window=32)
    """

    kondo_gate: str = field(
        default="unbiased:0.1",
        metadata={
            "help": "The gate as a short text, by kondo.parse_gate: 'unbiased:0.1', 'noise:1.5', "
            "'delight:0.1,window=16', 'package.module:name', or 'dense' for TRL's trainer."
        },
    )
    kondo_window: int = field(
        default=32,
        metadata={
            "help": "The price of an unbiased gate comes from this many micro-batches, the present "
            "one included. Other gates have a window of their own: 'delight:0.1,window=16'."
        },
    )

    kondo_check: bool = CHECK

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        check_text(self.kondo_gate)
        check_flag("kondo_check", self.kondo_check)
        if check_whole("kondo_window", self.kondo_window) < 1:
            raise ValueError(
                f"kondo_window must be at least 1 micro-batch, got {self.kondo_window}."
            )
        self.make_gate()

    def make_gate(self) -> kondo.BaseGate | None:
        """Return a new gate for a stream of micro-batches; None, which keeps all, for dense.

        A `kondo.UnbiasedGate` without a window gets one of `kondo_window` micro-batches, since one
        may hold fewer samples than a rate can be had of. A gate of your own, a subclass of
        `kondo.UnbiasedGate` too, stays as it is.
        """
        gate = kondo.parse_gate(self.kondo_gate)
        if type(gate) is not kondo.UnbiasedGate or gate.window:
            return gate
        return kondo.UnbiasedGate(
            rate=gate.rate,
            noise=gate.noise,
            signal=gate.signal,
            max_weight=gate.max_weight,
            window=self.kondo_window,
        )


class KondoAsyncGRPOTrainer(GatedTrainer, _Base):  # type: ignore[misc]
    """`trl.experimental.async_grpo.AsyncGRPOTrainer` that trains what the gate keeps.

    Takes the arguments of TRL's trainer, with a `KondoAsyncGRPOConfig` as `args`. The gradient of
    an optimizer step is that of TRL's loss over the same samples, with those that were skipped left
    out of the numerators, the gate's weights in them, and the denominators of all.

    Attributes:
        gate: decides, on the main process; None for dense. Another `kondo.BaseGate`, or a callable
            (values, mask, generator) -> `kondo.Choice`, may replace it before `train()`; None keeps
            everything.
        empty_steps: optimizer steps that kept nothing. Neither the optimizer nor the learning-rate
            schedule moved in them.

    Raises:
        ValueError: options that cannot be right together with a gate, saying why.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "async-grpo", "kondo"]

    def __init__(self, *args: Any, **kwargs: Any):
        given = list(args)  # TRL's order: model, reward_funcs, args, ...
        config = given[_ARGS] if len(given) > _ARGS else kwargs.get("args")
        if config is None:
            model = given[0] if given else kwargs["model"]
            config = KondoAsyncGRPOConfig(f"{model.split('/')[-1]}-AsyncGRPO")
        if not isinstance(config, KondoAsyncGRPOConfig):
            raise ValueError(
                f"args must be a KondoAsyncGRPOConfig, got {type(config).__name__}; write "
                f"KondoAsyncGRPOConfig(..., kondo_gate='unbiased:0.1'), which takes all options of "
                f"AsyncGRPOConfig."
            )
        if len(given) > _ARGS:
            given[_ARGS] = config
        else:
            kwargs["args"] = config
        super().__init__(*given, **kwargs)
        self.gate = self.args.make_gate()
        self.empty_steps = 0
        self._draws = torch.Generator().manual_seed(self.args.seed)
        self._kept: Tensor | int = 0  # samples of the present optimizer step, of all processes
        self._left_out_step = contextlib.ExitStack()
        self._unsent = True  # whether the weights moved since the sampler had them

    def _check_gate(self, gate: kondo.BaseGate | None) -> None:
        if gate is not None:
            turn_off_router_loss(self)
            _check(self)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._kept, self._unsent, self._tried = 0, True, False
        if not self._gated:
            with self._dense_run():
                return super()._inner_training_loop(*args, **kwargs)
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._left_out_step.close()

    # Queue -> gate

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader; the main process's, which alone is read, with the gate in it."""
        loader = super().get_train_dataloader()
        if not self._gated or not self.accelerator.is_main_process:
            return loader
        return self.accelerator.prepare(
            DataLoader(
                GatedPlanner(loader.dataset, self._weigh, tries=self.args.kondo_check),
                batch_size=1,
                collate_fn=GatedCollator(loader.collate_fn),
                num_workers=0,
            )
        )

    def _weigh(self, samples: list[Sample]) -> list[float]:
        """Return the weight of each sample of a micro-batch; 0 for what is skipped."""
        if self.gate is None:
            return [1.0] * len(samples)
        gate = self.gate
        rows, log_probs = token_rows(samples)
        unscored = log_probs.isnan() & rows.completion_mask
        log_probs = log_probs.masked_fill(log_probs.isnan(), 0.0)
        facts = gate.row_facts(rows)
        chosen = kondo.select(
            log_probs,
            sample_advantages(samples, gate),
            gate=gate if facts is None else gate.bind(facts),
            unit="sequence",
            mask=rows.completion_mask,
            generator=self._draws,
        )
        found = chosen.diagnostics()
        found |= {"entropy": chosen.counts.entropy, "unscored_total": float(unscored.sum())}
        for name, value in found.items():
            # TRL's log drops NaN. A price is infinite where nothing was kept.
            self._metrics["train"][f"kondo/{name}"].append(
                value if math.isfinite(value) else math.nan
            )
        return [float(weight) for weight in chosen.weight]

    # Loss, and steps that keep nothing

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Any:
        """Return TRL's loss; its count of trained tokens becomes that of the kept samples."""
        rows = rows_to_try(inputs)
        if rows is not None and not self._tried:
            most = rows.input_ids.shape[0]
            self._try_first(packed_log_probs, rows, most=most, unit="sequence")
        loss = super().compute_loss(model, inputs, **kwargs)
        if "kondo_trained" in inputs:
            seen, trained = inputs["global_n_tokens"][0], inputs["kondo_trained"][0]
            self._step_trained_tokens += float(trained - seen)
            if not float(inputs["kondo_kept"][0]):
                for name in _OF_THE_LOSS:
                    self._metrics["train"][name][-1] = math.nan  # a filler's; TRL's log drops NaN
        return loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one micro-step; see TRL."""
        self._left_out_step.close()
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if "kondo_kept" not in inputs:
            self._unsent = True
            return loss
        self._kept = self._kept + inputs["kondo_kept"][0]
        if self.accelerator.sync_gradients:
            if float(self._kept):
                self._unsent = True
            else:
                self.empty_steps += 1
                self._left_out_step.enter_context(left_out_step(self.optimizer))
            self._kept = 0
            self._metrics["train"]["kondo/empty_steps"] = [float(self.empty_steps)]
        return loss

    def _sync_weight(self) -> None:
        """Send the weights to the sampler, unless it has them.

        After steps that were left out it does. TRL would count a new version of the policy, and
        samples in the queue would age though they are of the present one. All processes know alike
        what was kept, so all of them send or none does.
        """
        if self._unsent:
            super()._sync_weight()
        self._unsent = False


def _check(trainer: Any) -> None:
    """Raise ValueError for an option that does not fit a gate."""
    for why, broken in any_trainer(trainer).items():
        if broken:
            raise ValueError(f"{why} kondo_gate='dense' leaves TRL's trainer as it is.")
