"""Screen and select: which tokens of a generation batch are trained, and with which weights.

n rows of this process's generation batch, N of all processes, T completion tokens. The rows of all
processes are gathered, and one gate decides for all of them, alike everywhere.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

import kondo
from kondo.integrations.trl.advantages import centred_rewards, loss_advantages, weighted_rewards
from kondo.integrations.trl.gate_options import check_gate
from kondo.integrations.trl.grpo_inputs import loss_mask, token_rows

# The trainer is TRL's: to mypy, what it returns is Any.
# mypy: warn-return-any=False


def screens(gate: kondo.BaseGate | None) -> bool:
    """Return whether a choice needs log-probs; None, which keeps everything, may for its eta."""
    return gate is None or kondo.signals.needs_log_probs(gate.signal)


def screen(trainer: Any, output: dict[str, Any]) -> Tensor:
    """Return log-probs of the completion tokens, [n, T], from the cheapest source allowed."""
    source = trainer.args.kondo_screen
    if source != "rollout" and "old_per_token_logps" in output:
        return output["old_per_token_logps"]
    if source != "exact" and "sampling_per_token_logps" in output:
        log_probs = output["sampling_per_token_logps"]
        # vLLM cannot score some tokens. As in TRL's own correction they count as unsurprising.
        unscored = log_probs.isnan() & loss_mask(output)
        trainer._log("unscored_tokens", unscored.sum().item())
        return log_probs.masked_fill(log_probs.isnan(), 0.0)
    if source == "rollout":
        raise ValueError(
            "kondo_screen='rollout' needs the sampler's log-probs, and this rollout returned "
            "none; return them as 'logprobs', or set kondo_screen='exact'."
        )
    args, model = trainer.args, trainer.model
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    quiet = disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs)
    width, batch_size = output["completion_ids"].shape[1], args.per_device_train_batch_size
    with torch.no_grad(), quiet:
        return trainer._get_per_token_logps_and_entropies(
            model, ids, mask, width, batch_size=batch_size
        )[0]


def decide(
    trainer: Any, log_probs: Tensor | None, output: dict[str, Any], rewards: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate the rows of all processes on the CPU; return keep, weight and factor of this one's.

    All three are [n, T]: bool, the factor of every term of the loss, and that of the advantage.

    Args:
        trainer: a `KondoGRPOTrainer`.
        log_probs: [n, T] float; None where the gate's signal does not read them.
        output: TRL's inputs of this process.
        rewards: [N, K] float, of each reward function.
    """
    args, accelerator = trainer.args, trainer.accelerator
    mask, prompt = loss_mask(output), 0
    gate = trainer.gate
    check_gate(gate, args)
    facts = None if gate is None else gate.row_facts(token_rows(output))
    if gate is not None and facts is not None:  # they describe prompts and completions
        prompt = output["prompt_ids"].shape[1]
        gate = gate.bind(_gather(accelerator, facts).cpu())
    whole = functools.partial(nn.functional.pad, pad=(prompt, 0))
    counted = _gather(accelerator, whole(mask.int())).bool().cpu()
    known = torch.zeros(counted.shape)
    if log_probs is not None:
        known = _gather(accelerator, whole(log_probs.float())).cpu()
    chosen = kondo.select(
        known,
        _gate_advantages(trainer, gate, log_probs, output, rewards).cpu(),
        gate=gate,
        unit=args.kondo_unit,
        mask=counted,
        generator=trainer._draws,
    )
    for name, value in chosen.diagnostics(args.delight_eta or 1.0).items():
        trainer._log(name, value)
    counts = chosen.counts
    if log_probs is None:
        counts = counts._replace(surprisal=math.nan)
    trainer._log("entropy", counts.entropy)
    if accelerator.is_main_process:
        mean = weighted_rewards(rewards, trainer.reward_weights).nanmean()
        kondo.monitor(trainer.gate, counts, reward=float(mean))
    decision = _of_first_process(accelerator, _stacked(chosen, args.delight_eta))
    start = accelerator.process_index * mask.shape[0]
    rows = slice(start, start + mask.shape[0])
    keep, weight, factor = decision[:, rows, prompt : prompt + mask.shape[1]]
    return keep.bool(), weight, factor


def _gate_advantages(
    trainer: Any,
    gate: kondo.BaseGate | None,
    log_probs: Tensor | None,
    output: dict[str, Any],
    rewards: Tensor,
) -> Tensor:
    """Return the advantages that the gate looks at, of all processes: [N] or [N, T].

    They are centred rewards, whatever the loss divides them by. An unbiased gate needs what enters
    the loss instead: it must be able to keep whatever has a gradient.
    """
    accelerator = trainer.accelerator
    centred = centred_rewards(
        rewards,
        trainer.reward_weights,
        groups=trainer.num_generations,
        aggregation=trainer.multi_objective_aggregation,
    )
    if not isinstance(gate, kondo.UnbiasedGate):
        return centred
    own = centred.chunk(accelerator.num_processes)[accelerator.process_index]
    found = loss_advantages(output, own, log_probs, trainer.args)
    return _gather(accelerator, found) if found.ndim == 2 else accelerator.gather(found)


def _gather(accelerator: Any, values: Tensor) -> Tensor:
    """Gather [n, T] of every process, T being each process's own, into [N, largest T]."""
    return accelerator.gather(accelerator.pad_across_processes(values, dim=1))


def _stacked(chosen: kondo.Selection, eta: float | None) -> Tensor:
    """Return keep, weight and the advantage's factor of all rows: [3, N, T]."""
    keep, weight, _ = chosen.elements
    factor = torch.ones_like(weight)
    if eta is not None:
        soft = torch.sigmoid(chosen.values / eta)
        factor = factor * (soft if soft.ndim == 2 else soft.unsqueeze(1))
    return torch.stack([keep.to(weight.dtype), weight, factor])


def _of_first_process(accelerator: Any, decision: Tensor) -> Tensor:
    """Return the decision of the first process.

    All processes decided on the same numbers, but the last bit may differ between machines, and
    processes with different plans would wait for each other for ever.
    """
    decision = decision.to(accelerator.device)
    if accelerator.num_processes > 1:
        torch.distributed.broadcast(decision, src=0)
    return decision
