"""What one step does: draw inputs, act, pay, decide what is worth it; then the loss of kept rows.

Two programs share one shape. Rows are images (T actions each, usually one) or answers (T tokens
each); log-probs, advantages and soft weights are [P, N, T], hard gates choose among N rows.

    act, pay -> Rolled      no gradient, all members at once
    decide   -> Decision    per rule: members with the same update
    outputs  -> Tensor      differentiable, all rows or the kept ones; rules of equal size together
    loss     -> scalar      per rule, of its part of the outputs
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kondo import BaseGate, adapters, signals
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.models.networks import Initialisation, Parameters, StackedMLP, categorical
from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.tasks.base import SequenceTask
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.gates import kept_first, unchecked
from kondo_lab.training.losses import inputs_of, is_of_labels
from kondo_lab.training.member import Update

Rolled = dict[str, Tensor]
"""Experience of one step, name -> [P, ...]; holds log_probs [P, N, T] and rewards at least.

log_probs are the learner's. Where another policy acted (`frictions`), behaviour [P, N, T] holds the
log-probs that it reported, and bug [P, N] tells rows that a bug has replaced.
"""

Screen = Callable[[Rolled, Tensor], Rolled]
"""(experience, step) -> what another policy says of it, to decide by instead of the policy's own:
log_probs [p, N, T] of what was done, and of bandits the distribution [p, N, K]."""


Program: TypeAlias = "BanditProgram | SequenceProgram"
"""A task and its networks: all that the training loop knows of either."""


class Decision(NamedTuple):
    """What a group's gate decided."""

    advantages: Tensor
    """[p, N, T]."""
    weight: Tensor | None
    """[p, N, T] (soft) or [p, N, 1] (hard) factor of the loss; None where all of it is 1."""
    order: Tensor | None
    """[p, N] rows, the kept ones first; None where all rows are trained."""
    kept: Tensor
    """[p] int64, rows a backward pass is paid for."""


def decide(
    program: Program,
    update: Update,
    gate: BaseGate | None,
    rolled: Rolled,
    draws: Draws,
    step: Tensor,
    *,
    screen: Screen | None = None,
) -> Decision:
    """Return the decision of the members that share `update`, whose experience `rolled` is.

    `gate` is their own copy of the update's, with what it remembers. `screen` is a draft to decide
    by; None decides by the policy itself.
    """
    advantages = program.advantages(update, rolled)
    log_probs = rolled["log_probs"]
    members, num_rows, _ = log_probs.shape
    everything = torch.full((members,), num_rows, dtype=torch.int64, device=log_probs.device)
    if gate is None:
        return Decision(advantages, None, None, everything)
    seen = rolled
    if update.logit_noise:
        seen = rolled | program.with_noise(rolled, update.logit_noise, draws, step)
    if screen is not None:
        seen = rolled | screen(rolled, step)
    estimated = advantages
    if seen is not rolled and update.screened == "both":
        # For the gate alone: kept rows are trained with the policy's own advantages.
        estimated = program.advantages(update, seen)
    values = unchecked(gate.signal)(seen["log_probs"], estimated)
    if not update.trains_all_rows:
        values = _of_rows(gate.signal, values, draws, step)
    if update.delight_noise:  # in standard deviations of the member's own values
        flat = values.flatten(1)
        drawn = draws.normal("delight noise", step, flat.shape[1])
        noise = update.delight_noise * flat.std(dim=1, keepdim=True) * drawn
        values = (flat + noise).view(values.shape)
    flat = values.flatten(1)
    known = adapters.adapter_of(gate)
    if (facts := known.row_facts(rolled)) is not None:
        gate = known.bind(facts)
    uniform = draws.uniform("gate", step, num_rows) if known.draws else None
    chosen = gate.choose(flat, torch.ones_like(flat, dtype=torch.bool), uniform)
    if update.trains_all_rows:
        return Decision(advantages, chosen.weight.view(values.shape), None, everything)
    weight = chosen.weight.unsqueeze(2)
    return Decision(advantages, weight, kept_first(chosen.keep), chosen.keep.sum(dim=1))


def _of_rows(signal: signals.Signal, values: Tensor, draws: Draws, step: Tensor) -> Tensor:
    """Return [p, N]: a row's delight is the sum over its actions or tokens, its advantage a mean.

    Random values are those of the members' own draws.
    """
    if signal is signals.uniform:
        return draws.uniform("priority", step, values.shape[1])
    return values.sum(dim=2) if signals.needs_log_probs(signal) else values.mean(dim=2)


def _gather(values: Tensor, rows: Tensor) -> Tensor:
    """Return values [p, C, ...] of the rows [p, C] in values [p, N, ...]."""
    index = rows.view(*rows.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*rows.shape, *values.shape[2:]))


def _mean_in_order(rewards: Tensor) -> Tensor:
    """Return the mean [P, G, 1] over the answers of rewards [P, G, A], added up from the first on.

    One addition after the other and a product with the inverse of their number, as XLA does it,
    round alike on every device; a kernel that sums chooses an order of its own.
    """
    total = rewards[:, :, :1]
    for answer in range(1, rewards.shape[2]):
        total = total + rewards[:, :, answer : answer + 1]
    return total * (1 / rewards.shape[2])


def _times_inverse(rewards: Tensor, length: int) -> Tensor:
    """Return rewards k / H, H = `length`, as XLA rounds them: k times the rounded 1 / H.

    Both round to the same number at some H and to different ones at others, such as 25, 30 and 50.
    A reward that is no k / H stays as it is.
    """
    count = (rewards * length).round()
    # A kernel's own mean may be k / H rounded either way, always within a few units in the last.
    is_share = (rewards * length - count).abs() < 1e-4
    return torch.where(is_share, count * (1 / length), rewards)


def _weighted(
    update: Update,
    log_probs: Tensor,
    rolled: Rolled,
    decision: Decision,
    rows: Tensor | None,
    *,
    whole_rows: bool,
) -> Tensor:
    """Return the weighted loss, summed over members, divided by the full batch's N x T.

    `whole_rows` tells that the T actions of a row are one answer, with one importance weight.
    """
    total = rolled["log_probs"][0].numel()
    advantages, weight = decision.advantages, decision.weight
    sampled = rolled.get("behaviour", rolled["log_probs"])
    if rows is not None:
        sampled, advantages = _gather(sampled, rows), _gather(advantages, rows)
        weight = None if weight is None else _gather(weight, rows)
    units, good, old = (t.reshape(-1, t.shape[-1]) for t in (log_probs, advantages, sampled))

    def positive_share() -> Tensor:
        share = (decision.advantages > 0).double().mean(dim=(1, 2)).to(units.dtype)
        return share.repeat_interleave(units.shape[0] // log_probs.shape[0]).unsqueeze(1)

    inputs = inputs_of(
        update.loss,
        {
            "old_log_probs": lambda: old,
            "positive_share": positive_share,
            "whole_rows": lambda: whole_rows,
        },
    )
    terms = update.loss(units, good, **inputs).view(log_probs.shape)
    return (terms if weight is None else weight * terms).sum() / total


class BanditProgram:
    """Images with labels: `batch` images a step, `samples` actions for each."""

    def __init__(
        self,
        task: ImageBandit,
        *,
        width: int,
        batch: int,
        samples: int = 1,
        initialisation: Initialisation = "uniform",
    ):
        self.task, self.num_rows, self.samples = task, batch, samples
        self.num_choices = task.num_actions
        self.network = StackedMLP(
            task.num_inputs, task.num_actions, width=width, initialisation=initialisation
        )

    @torch.no_grad()
    def act(self, parameters: Parameters, draws: Draws, step: Tensor) -> Rolled:
        """Show images and draw actions; no rewards yet."""
        inputs, labels = self.task.draw(draws, step, self.num_rows)
        distribution = self.network.logits(parameters, inputs).log_softmax(dim=-1)
        uniform = draws.uniform("actions", step, self.num_rows, self.samples)
        actions = categorical(distribution.unsqueeze(2), uniform)
        return {
            "inputs": inputs,
            "labels": labels.unsqueeze(2),
            "distribution": distribution,
            "actions": actions,
            "log_probs": distribution.gather(2, actions),
        }

    def pay(self, rolled: Rolled) -> Tensor:
        """Return 1 for the label, [P, N, T]."""
        return self.task.reward(self.right(rolled), rolled["actions"])

    def actions(self, rolled: Rolled) -> Tensor:
        """Return the actions."""
        return rolled["actions"]

    def with_actions(self, rolled: Rolled, actions: Tensor) -> Rolled:
        """Return the same images with other actions."""
        return rolled | {"actions": actions}

    def right(self, rolled: Rolled) -> Tensor:
        """Return the labels."""
        return rolled["labels"].expand_as(rolled["actions"])

    @torch.no_grad()
    def judge(self, parameters: Parameters, rolled: Rolled) -> Rolled:
        """Return what `act` says of the policy, of these parameters for what was done."""
        distribution = self.outputs(parameters, rolled, None)
        log_probs = distribution.gather(2, rolled["actions"])
        return {"distribution": distribution, "log_probs": log_probs}

    def advantages(self, update: Update, rolled: Rolled) -> Tensor:
        """Return reward minus the baseline of `update`."""
        rewards, distribution = rolled["rewards"], rolled["distribution"]
        match update.baseline:
            case "expected":
                return rewards - distribution.exp().square().sum(dim=2, keepdim=True)
            case "oracle":
                return rewards - distribution.gather(2, rolled["labels"]).exp()
            case "constant":
                return rewards - 0.5
            case "zero":
                return rewards

    def with_noise(self, rolled: Rolled, noise: float, draws: Draws, step: Tensor) -> Rolled:
        """Return what `judge` does, of logits with Gaussian noise."""
        logits = rolled["distribution"]  # log-probs are logits up to a constant
        drawn = draws.normal("logit noise", step, *logits.shape[1:])
        noisy = (logits + noise * drawn).log_softmax(dim=-1)
        return {"distribution": noisy, "log_probs": noisy.gather(2, rolled["actions"])}

    def outputs(self, parameters: Parameters, rolled: Rolled, rows: Tensor | None) -> Tensor:
        """Return the log-probs of every action, [p, C, K], of the rows [p, C] or of all.

        Differentiable, and what `loss` is made of.
        """
        inputs = rolled["inputs"] if rows is None else _gather(rolled["inputs"], rows)
        return self.network.logits(parameters, inputs).log_softmax(dim=-1)

    def loss(
        self,
        update: Update,
        outputs: Tensor,
        rolled: Rolled,
        decision: Decision,
        rows: Tensor | None,
    ) -> Tensor:
        """Return the sum over members of the loss of the actions taken, or of the labels."""
        if is_of_labels(update.loss):
            labels = rolled["labels"] if rows is None else _gather(rolled["labels"], rows)
            return update.loss(outputs.gather(2, labels)).sum() / self.num_rows
        actions = rolled["actions"] if rows is None else _gather(rolled["actions"], rows)
        taken = outputs.gather(2, actions)
        return _weighted(update, taken, rolled, decision, rows, whole_rows=False)

    @torch.no_grad()
    def evaluate(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return the share of held-out images whose most likely action is wrong."""
        images, labels = self.task.test_inputs, self.task.test_labels
        wrong: list[Tensor] = []
        for start in range(0, labels.numel(), 1000):
            some = slice(start, start + 1000)
            guess = self.network.shared_logits(parameters, images[some]).argmax(dim=-1)
            wrong.append((guess != labels[some]).sum(dim=1))
        return {"test error": torch.stack(wrong).sum(dim=0) / labels.numel()}


class SequenceProgram:
    """Prompts with answers: `num_prompts` fresh prompts a step, `num_answers` to each."""

    def __init__(
        self, task: SequenceTask, network: StackedDecoder, *, num_prompts: int, num_answers: int
    ):
        self.task, self.network = task, network
        self.num_prompts, self.num_answers = num_prompts, num_answers
        self.num_rows = num_prompts * num_answers
        self.num_choices = task.num_tokens

    @torch.no_grad()
    def act(self, parameters: Parameters, draws: Draws, step: Tensor) -> Rolled:
        """Draw prompts and answer each several times."""
        task = self.task
        prompts = task.prompts(draws, step, self.num_prompts)
        shape = (self.num_prompts, self.num_answers, task.answer_length, task.num_tokens)
        sampled = self.network.sample(parameters, prompts, draws.uniform("tokens", step, *shape))
        return {
            "prompts": prompts,
            "answers": sampled.answers,
            "log_probs": sampled.log_probs.flatten(1, 2),
        }

    def pay(self, rolled: Rolled) -> Tensor:
        """Return the rewards, [P, G, A]."""
        return self.task.reward(self._asked(rolled), rolled["answers"])

    def actions(self, rolled: Rolled) -> Tensor:
        """Return the answers' tokens."""
        return rolled["answers"].flatten(1, 2)

    def with_actions(self, rolled: Rolled, actions: Tensor) -> Rolled:
        """Return the same prompts with other answers."""
        return rolled | {"answers": actions.view_as(rolled["answers"])}

    def right(self, rolled: Rolled) -> Tensor:
        """Return the right answers."""
        return self.task.target(self._asked(rolled)).flatten(1, 2)

    @torch.no_grad()
    def judge(self, parameters: Parameters, rolled: Rolled) -> Rolled:
        """Return the log-probs of the answers' tokens."""
        return {"log_probs": self.outputs(parameters, rolled, None)}

    def _asked(self, rolled: Rolled) -> Tensor:
        """Return the prompt of every answer, [P, G, A, Hp]."""
        return rolled["prompts"].unsqueeze(2).expand(-1, -1, self.num_answers, -1)

    def advantages(self, update: Update, rolled: Rolled) -> Tensor:
        """Return reward minus the mean reward of the same prompt's answers, for every token.

        With equal_rewards = "rounded" both are rounded as in the author's float32 code.
        """
        rewards = rolled["rewards"]
        if update.equal_rewards == "rounded":
            rewards = _times_inverse(rewards, self.task.answer_length)
            centred = rewards - _mean_in_order(rewards)
        else:
            centred = rewards - rewards.mean(dim=2, keepdim=True)
            # Equal rewards must leave exactly nothing: rounding of the mean would make delight.
            same = rewards.amax(dim=2, keepdim=True) == rewards.amin(dim=2, keepdim=True)
            centred = torch.where(same, 0.0, centred)
        return centred.flatten(1, 2).unsqueeze(2).expand_as(rolled["log_probs"])

    def with_noise(self, rolled: Rolled, noise: float, draws: Draws, step: Tensor) -> Rolled:
        """Refuse: the sampler does not keep its logits."""
        raise ValueError("logit_noise must be 0 for sequences, which keep no logits; use a bandit.")

    def outputs(self, parameters: Parameters, rolled: Rolled, rows: Tensor | None) -> Tensor:
        """Return the log-probs of the answers' tokens, [p, C, T]."""
        if rows is None:
            log_probs = self.network.log_prob(parameters, rolled["prompts"], rolled["answers"])
            return log_probs.flatten(1, 2)
        prompts = _gather(rolled["prompts"], rows // self.num_answers)
        answers = _gather(rolled["answers"].flatten(1, 2), rows)
        return self.network.log_prob(parameters, prompts, answers.unsqueeze(2)).squeeze(2)

    def loss(
        self,
        update: Update,
        outputs: Tensor,
        rolled: Rolled,
        decision: Decision,
        rows: Tensor | None,
    ) -> Tensor:
        """Return the loss of the answers' tokens."""
        return _weighted(update, outputs, rolled, decision, rows, whole_rows=True)

    def evaluate(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return nothing: every prompt is fresh, so the online error is already held out."""
        return {}
