"""TRL's experimental asynchronous GRPO trainer, with samples dropped as they leave the queue.

    from kondo.integrations.trl.async_grpo import KondoAsyncGRPOConfig, KondoAsyncGRPOTrainer

The sampler's log-probs come with every sample, so the screen is free. See `sample_stream` for what
becomes of a micro-batch, and docs/integrations/trl.md for what is refused.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.data import DataLoader

import kondo
from kondo.arguments import check_flag
from kondo.integrations.trl import _version
from kondo.integrations.trl.config import (
    CHECK,
    DEFAULT_GATE,
    AnyGate,
    HoldsGate,
    check_any_trainer,
)
from kondo.integrations.trl.gated_trainer import GatedTrainer

if _version.older_than(1, 16):
    raise ImportError(
        "kondo.integrations.trl.async_grpo needs trl>=1.16,<2: its trainer packs samples in "
        "another way before; pip install 'trl>=1.16,<2'."
    )

from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from kondo.integrations.trl.sample_stream import (
    GatedPlanner,
    Sample,
    collate,
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
    *("ratio", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"),
    *("clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max"),
)


@dataclass
class KondoAsyncGRPOConfig(HoldsGate, AsyncGRPOConfig):
    """TRL's `AsyncGRPOConfig` and the gate, as in `KondoGRPOConfig`.

    Raises:
        ValueError: options that are out of range or contradict each other.

    Example:
        >>> from kondo.integrations.trl.async_grpo import KondoAsyncGRPOConfig
        >>> KondoAsyncGRPOConfig("out", use_cpu=True, bf16=False).make_gate()
        UnbiasedGate(rate=0.1, window=32)
    """

    kondo_gate: AnyGate = field(
        default=DEFAULT_GATE,
        metadata={
            "help": "The gate, as in KondoGRPOConfig. The price of an unbiased gate comes from 32 "
            "micro-batches, unless it says otherwise: 'unbiased:0.1,window=16'."
        },
    )
    kondo_check: bool = CHECK

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        check_flag("kondo_check", self.kondo_check)
        self.make_gate()

    def make_gate(self) -> kondo.BaseGate | None:
        """Return the gate for a stream of micro-batches; None, which keeps all, for dense.

        A `kondo.UnbiasedGate` without a window gets one of 32 micro-batches, since one may hold
        fewer samples than a rate can be had of. Subclasses stay as they are.
        """
        gate = super().make_gate()
        if type(gate) is not kondo.UnbiasedGate or gate.window:
            return gate
        names = ("rate", "noise", "signal", "max_weight")
        return kondo.UnbiasedGate(window=32, **{name: getattr(gate, name) for name in names})


class KondoAsyncGRPOTrainer(GatedTrainer, _Base):  # type: ignore[misc]
    """`trl.experimental.async_grpo.AsyncGRPOTrainer` that trains what the gate keeps.

    Takes the arguments of TRL's trainer, with a `KondoAsyncGRPOConfig` as `args`. The gradient of
    an optimizer step is that of TRL's loss over the same samples, with those that were skipped left
    out of the numerators, the gate's weights in them, and the denominators of all.

    Attributes:
        gate: decides, on the main process; see `KondoGRPOTrainer`.
        empty_steps: optimizer steps that kept nothing, as there.

    Raises:
        ValueError: options that cannot be right together with a gate, saying why.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "async-grpo", "kondo"]

    _config_class = KondoAsyncGRPOConfig
    _folder_ends = "AsyncGRPO"
    _kept: Tensor | float = 0.0  # samples of the present optimizer step, of all processes
    _unsent = True  # whether the weights moved since the sampler had them

    def _check_gate(self, gate: kondo.BaseGate | None) -> None:
        if gate is not None:
            check_any_trainer(self)

    def _start_run(self) -> None:
        super()._start_run()
        self._kept, self._unsent = 0.0, True

    # Queue -> gate

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader; the main process's, which alone is read, with the gate in it."""
        loader = super().get_train_dataloader()
        if not self._gated or not self.accelerator.is_main_process:
            return loader
        return self.accelerator.prepare(
            DataLoader(
                GatedPlanner(loader.dataset, self._weigh),
                batch_size=1,
                collate_fn=functools.partial(collate, loader.collate_fn),
                num_workers=0,
            )
        )

    def _weigh(self, samples: list[Sample]) -> list[float]:
        """Return the weight of each sample of a micro-batch; 0 for what is skipped."""
        if self.args.kondo_check and not self._tried:
            first = rows_to_try(samples, self.accelerator)
            if first is not None:
                most = len(first.input_ids)
                self._try_first(
                    packed_log_probs, first, most=most, unit="sequence", everywhere=False
                )
        gate = self.gate
        if gate is None:
            return [1.0] * len(samples)
        rows, log_probs = token_rows(samples)
        unscored = log_probs.isnan() & rows.completion_mask
        log_probs = log_probs.masked_fill(log_probs.isnan(), 0.0)
        adapter = kondo.adapters.adapter_of(gate)
        facts = adapter.row_facts(rows)
        chosen = kondo.select(
            log_probs,
            sample_advantages(samples, gate),
            gate=gate if facts is None else adapter.bind(facts),
            unit="sequence",
            mask=rows.completion_mask,
            generator=self._draws,
        )
        found = {"entropy": chosen.counts.entropy, "unscored_total": float(unscored.sum())}
        for name, value in (chosen.diagnostics() | found).items():
            self._log(name, value)
        return [float(weight) for weight in chosen.weight]

    # Loss, and steps that keep nothing

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Any:
        """Return TRL's loss; its count of trained tokens becomes that of the kept samples."""
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
                self._leave_out_step()
            self._kept = 0.0
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
