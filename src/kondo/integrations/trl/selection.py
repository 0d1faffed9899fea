"""Screen and select: which tokens of a generation batch are trained, and with which weights.

    TRL's inputs -> screen -> log-probs
    rewards -> centred rewards U -> advantages -> one gate over the rows of all processes
    -> TRL's inputs, in which skipped tokens add nothing to any term

    sum_then_normalize    R = sum_k w_k r_k                            U = R - mean of its group
    normalize_then_sum    z_k = (r_k - mean_k) / (std_k + 1e-4)        U = sum_k w_k z_k

n rows of this process's generation batch, N of all processes, T completion tokens, K reward
functions. mean_k and std_k are those of reward function k over a group. TRL divides U further, by a
standard deviation of R over the group or the batch, or of U over the batch, and subtracts the
batch's mean of U, which is 0. Delight needs the advantage's own scale, so gates see U without that.
The standard deviations inside z_k stay: they say how much each reward function counts, and so the
sign of U.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import nanstd

import kondo
from kondo.integrations.trl.config import check_gate
from kondo.lm.rows import TokenRows

# The trainer is TRL's: to mypy, what it returns is Any.
# mypy: warn-return-any=False

OPTIONAL_LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Return the completion tokens that TRL's loss counts: bool [n, T]."""
    mask = inputs["completion_mask"]
    counted: Tensor = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    return counted.bool()


def gated_inputs(
    output: dict[str, Any], keep: Tensor, weight: Tensor, factor: Tensor, *, unit: str
) -> dict[str, Tensor]:
    """Return what replaces TRL's inputs: skipped tokens have advantage, log-ratio and KL 0.

    `keep` is bool [n, T]; `weight`, [n, T], the factor of all gradients of a token, 0 where not
    kept; `factor`, [n, T], that of the advantage alone. Unit "sequence" leaves one advantage per
    row, "token" makes it one per token.
    """
    advantages, factor = output["advantages"], factor * keep
    if unit == "token":
        advantages = advantages.unsqueeze(1) * factor
    else:
        advantages = advantages * factor.amax(dim=1)  # one per row, 0 where it is skipped
    changed = {"advantages": advantages, "kondo_keep": keep, "kondo_weight": weight}
    for name in OPTIONAL_LOG_PROBS:
        if name in output:
            changed[name] = torch.where(keep, output[name], 0.0)
    return changed


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
    if gate is not None:
        adapter = kondo.adapters.adapter_of(gate)
        prompts = output["prompt_ids"], output["prompt_mask"]
        facts = adapter.row_facts(TokenRows.join(*prompts, output["completion_ids"], mask))
        if facts is not None:  # they describe prompts and completions
            prompt = output["prompt_ids"].shape[1]
            gate = adapter.bind(_gather(accelerator, facts).cpu())
    whole = functools.partial(nn.functional.pad, pad=(prompt, 0))
    counted = _gather(accelerator, whole(mask.int())).bool().cpu()
    known = torch.zeros(counted.shape)
    if log_probs is not None:
        known = _gather(accelerator, whole(log_probs.float())).cpu()
    chosen = kondo.select(
        known,
        _advantages(trainer, gate, log_probs, output, rewards).cpu(),
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
    keep, weight, _ = chosen.elements
    factor = torch.ones_like(weight)
    if args.delight_eta is not None:
        soft = kondo.losses.dg_weight(chosen.values, eta=args.delight_eta)
        factor = factor * (soft if soft.ndim == 2 else soft.unsqueeze(1))
    decision = torch.stack([keep.to(weight.dtype), weight, factor]).to(accelerator.device)
    if accelerator.num_processes > 1:
        # All processes decided on the same numbers, but the last bit may differ between machines,
        # and processes with different plans would wait for each other for ever.
        torch.distributed.broadcast(decision, src=0)
    start = accelerator.process_index * mask.shape[0]
    own = decision[:, start : start + mask.shape[0], prompt : prompt + mask.shape[1]]
    return own[0].bool(), own[1], own[2]


def _gather(accelerator: Any, values: Tensor) -> Tensor:
    """Gather [n, T] of every process, T being each process's own, into [N, largest T]."""
    return accelerator.gather(accelerator.pad_across_processes(values, dim=1))


def _advantages(
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


def weighted_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return R, [N], of rewards [N, K] and weights [K]; NaN where no reward function applied."""
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), torch.nan)


def centred_rewards(rewards: Tensor, weights: Tensor, *, groups: int, aggregation: str) -> Tensor:
    """Return U, [N]: exactly 0 where the rewards of a group are equal, or none applied.

    Args:
        rewards: [N, K] float, NaN where a reward function did not apply.
        weights: [K] float.
        groups: completions of a prompt, which follow each other.
        aggregation: TRL's `multi_objective_aggregation`.

    Example:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
        >>> weights = torch.tensor([2.0, 1.0])
        >>> centred_rewards(rewards, weights, groups=2, aggregation="sum_then_normalize")
        tensor([-4.,  4.])
        >>> centred_rewards(rewards, weights, groups=2, aggregation="normalize_then_sum").sign()
        tensor([ 1., -1.])
    """
    if aggregation == "sum_then_normalize":
        total = weighted_rewards(rewards, weights)
        return kondo.advantage.group_mean(total, groups, skip_nan=True)
    centred = kondo.advantage.group_mean(rewards.T, groups, skip_nan=True).T
    spread = nanstd(rewards.view(-1, groups, rewards.shape[1]), dim=1)
    # A reward function that scored fewer than two of a group has no standard deviation. TRL leaves
    # it out there.
    scaled = (centred / (spread.repeat_interleave(groups, dim=0) + 1e-4)).nan_to_num(nan=0.0)
    return (scaled * weights.to(rewards.device)).sum(dim=1)


def loss_advantages(
    output: dict[str, Any], centred: Tensor, log_probs: Tensor | None, args: Any
) -> Tensor:
    """Return the factor of grad log pi in minus TRL's loss, at a ratio of 1: [n] or [n, T].

    Without KL that is TRL's advantage A. With it, it is A - beta k: TRL's KL is exp(-d) + d - 1
    with d = log pi - log ref, so that k is 1 - exp(-d); or d, where TRL multiplies the KL by the
    ratio (`use_bias_correction_kl`).

    Args:
        output: TRL's inputs.
        centred: [n] float, by `centred_rewards`.
        log_probs: [n, T] float, of the policy; None if there are none.
        args: TRL's config.
    """
    advantages: Tensor = output["advantages"]
    # Through rounding, TRL's are not quite 0 where all rewards of a group are equal.
    advantages = torch.where(centred == 0, 0.0, advantages)
    if args.beta == 0.0:
        return advantages
    assert log_probs is not None  # `check_gate` refuses a KL that the gate could not see
    gap = log_probs - output["ref_per_token_logps"]
    slope = gap if args.use_bias_correction_kl else 1 - torch.exp(-gap)
    factors: Tensor = advantages.unsqueeze(1) - args.beta * slope
    return factors
