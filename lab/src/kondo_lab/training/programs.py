"""What one step of a task does: draw inputs, act, pay; then log-probs of the rows to be trained.

Three programs share one shape. Rows are images (T actions each, usually one) or answers (T tokens
each); log-probs are [P, N, T], advantages [P, N, T], or [P, N, 1] where a row has one.

    act, pay -> Rolled      no gradient, all members at once
    outputs  -> Tensor      differentiable, of all rows or the kept ones
    taken    -> Tensor      the log-probs of what was done, of outputs
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kondo import advantage
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.models.networks import (
    Initialisation,
    Parameters,
    StackedMLP,
    categorical,
)
from kondo_lab.models.sampler import completion_mask, sample
from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.tasks.base import SequenceTask
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.base import TextTask
from kondo_lab.training.arms import Arm
from kondo_lab.training.broken_answers import break_answers
from kondo_lab.training.supervised import HeldOut

Rolled = dict[str, Tensor]
"""Experience of one step, name -> [P, ...]; holds log_probs [P, N, T] and rewards at least.

log_probs are those that actors reported. Where the program judges them they are the learner's, and
behaviour [P, N, T] holds the reported ones. mask [P, N, T] tells real tokens, where some are not;
bug [P, N] tells rows that a bug has replaced.
"""

Measured = Callable[[], dict[str, Tensor]]
"""Measures all members on held-out inputs: metric -> [P]."""

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards; TRL's."""
_MOST_ROWS = 65_535


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return values [P, C, ...] of the rows [P, C] in values [P, N, ...]."""
    index = rows.view(*rows.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*rows.shape, *values.shape[2:]))


class Program(ABC):
    """A task and its networks: all that the training loop knows of either."""

    network: StackedMLP | StackedDecoder
    num_rows: int
    """N, rows of a step and member."""
    num_choices: int
    """Actions or tokens to choose from."""
    group = 1
    """Rows that answer one prompt, side by side."""
    prompt_length = 0
    """Tokens that a kept row drags into its forward beside its own."""
    whole_rows = True
    """Whether the T actions of a row are one answer, with one importance weight."""
    judges = True
    """Whether log-probs are made those of the learner where somebody else acted."""
    shown = "online error"
    """Metric that progress shows."""
    is_text = False
    """Whether steps are measured token by token, and never ask the device for a number."""
    max_norm = math.inf
    """A member's gradient is clipped to this norm."""

    def most_members(self, num_rows: int) -> int | None:
        """Return how many members with so many rows fit into one forward; None for any."""
        return None

    @abstractmethod
    def act(
        self,
        parameters: Parameters,
        draws: Draws,
        step: Tensor,
        *,
        temperature: Tensor | None = None,
    ) -> Rolled:
        """Draw inputs and act; no rewards yet."""

    @abstractmethod
    def pay(self, rolled: Rolled) -> Tensor:
        """Return the rewards, [P, ...]."""

    @abstractmethod
    def judge(self, parameters: Parameters, rolled: Rolled) -> Rolled:
        """Return what `act` says of the policy, of these parameters for what was done."""

    @abstractmethod
    def advantages(self, arm: Arm, rolled: Rolled) -> Tensor:
        """Return the centred advantages that gates see."""

    @abstractmethod
    def outputs(self, parameters: Parameters, rolled: Rolled, rows: Tensor | None) -> Tensor:
        """Return what log-probs are made of, of the rows [p, C] or of all; differentiable."""

    def taken(self, arm: Arm, outputs: Tensor, rolled: Rolled, rows: Tensor | None) -> Tensor:
        """Return the log-probs of what was done, [p, C, T], of `outputs`."""
        return outputs

    @abstractmethod
    def actions(self, rolled: Rolled) -> Tensor:
        """Return what was done, int64 [P, N, T]."""

    @abstractmethod
    def with_actions(self, rolled: Rolled, actions: Tensor, replaced: Tensor) -> Rolled:
        """Return the same inputs with other actions in the rows `replaced`, bool [P, N]."""

    @abstractmethod
    def right(self, rolled: Rolled) -> Tensor:
        """Return the right actions, like `actions`."""

    def broken(self, rolled: Rolled, hit: Tensor, draws: Draws, step: Tensor) -> Rolled:
        """Return the experience with the rows that were hit, bool [P, N], broken."""
        raise ValueError(f"broken must be 0 for {type(self).__name__}; text alone can break.")

    def with_noise(self, rolled: Rolled, noise: float, draws: Draws, step: Tensor) -> Rolled:
        """Return what `judge` does, of logits with Gaussian noise."""
        raise ValueError("logit_noise must be 0 for sequences, which keep no logits; use a bandit.")

    def trained_advantages(
        self, arm: Arm, rolled: Rolled, centred: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Return the advantages of the loss, given those of the gate and what it kept."""
        return centred

    def evaluator(self, parameters: Parameters, draws: Draws) -> Measured:
        """Return what measures these parameters, as they will stand, on held-out inputs."""
        return dict  # every prompt is fresh, so the online error is already held out


class BanditProgram(Program):
    """Images with labels: `batch` images a step, `samples` actions for each."""

    whole_rows = False

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
        self.network: StackedMLP = StackedMLP(
            task.num_inputs, task.num_actions, width=width, initialisation=initialisation
        )

    @torch.no_grad()
    def act(
        self,
        parameters: Parameters,
        draws: Draws,
        step: Tensor,
        *,
        temperature: Tensor | None = None,
    ) -> Rolled:
        """Show images and draw actions; no rewards yet."""
        _refuse(temperature, self)
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

    def with_actions(self, rolled: Rolled, actions: Tensor, replaced: Tensor) -> Rolled:
        """Return the same images with other actions."""
        return rolled | {"actions": actions}

    def right(self, rolled: Rolled) -> Tensor:
        """Return the labels."""
        return rolled["labels"].expand_as(rolled["actions"])

    @torch.no_grad()
    def judge(self, parameters: Parameters, rolled: Rolled) -> Rolled:
        """Return the distribution and the log-probs of what was done."""
        distribution = self.outputs(parameters, rolled, None)
        log_probs = distribution.gather(2, rolled["actions"])
        return {"distribution": distribution, "log_probs": log_probs}

    def advantages(self, arm: Arm, rolled: Rolled) -> Tensor:
        """Return reward minus the baseline of `arm`, [P, N, T]."""
        rewards, distribution = rolled["rewards"], rolled["distribution"]
        match arm.baseline:
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
        """Return the log-probs of every action, [p, C, K]."""
        inputs = rolled["inputs"] if rows is None else take_rows(rolled["inputs"], rows)
        return self.network.logits(parameters, inputs).log_softmax(dim=-1)

    def taken(self, arm: Arm, outputs: Tensor, rolled: Rolled, rows: Tensor | None) -> Tensor:
        """Return the log-probs of the actions, [p, C, T], or of the labels."""
        own = rolled["labels" if arm.of_labels else "actions"]
        return outputs.gather(2, own if rows is None else take_rows(own, rows))

    def evaluator(self, parameters: Parameters, draws: Draws) -> Measured:
        """Return what measures the share of held-out images whose likeliest action is wrong."""

        @torch.no_grad()
        def measure() -> dict[str, Tensor]:
            images, labels = self.task.test_inputs, self.task.test_labels
            wrong: list[Tensor] = []
            for start in range(0, labels.numel(), 1000):
                some = slice(start, start + 1000)
                guess = self.network.shared_logits(parameters, images[some]).argmax(dim=-1)
                wrong.append((guess != labels[some]).sum(dim=1))
            return {"test error": torch.stack(wrong).sum(dim=0) / labels.numel()}

        return measure


class SequenceProgram(Program):
    """Prompts with answers: `num_prompts` fresh prompts a step, `num_answers` to each."""

    def __init__(
        self, task: SequenceTask, network: StackedDecoder, *, num_prompts: int, num_answers: int
    ):
        self.task = task
        self.network: StackedDecoder = network
        self.num_prompts, self.num_answers = num_prompts, num_answers
        self.num_rows, self.group = num_prompts * num_answers, num_answers
        self.num_choices = task.num_tokens

    @torch.no_grad()
    def act(
        self,
        parameters: Parameters,
        draws: Draws,
        step: Tensor,
        *,
        temperature: Tensor | None = None,
    ) -> Rolled:
        """Draw prompts and answer each several times."""
        _refuse(temperature, self)
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

    def with_actions(self, rolled: Rolled, actions: Tensor, replaced: Tensor) -> Rolled:
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

    def advantages(self, arm: Arm, rolled: Rolled) -> Tensor:
        """Return reward minus the mean reward of the same prompt's answers, [P, N, 1].

        With equal_rewards = "rounded" both are rounded as in the author's float32 code.
        """
        rewards = rolled["rewards"]
        if arm.equal_rewards == "rounded":
            rewards = _times_inverse(rewards, self.task.answer_length)
            centred = rewards - _mean_in_order(rewards)
        else:
            centred = rewards - rewards.mean(dim=2, keepdim=True)
            # Equal rewards must leave exactly nothing: rounding of the mean would make delight.
            same = rewards.amax(dim=2, keepdim=True) == rewards.amin(dim=2, keepdim=True)
            centred = torch.where(same, 0.0, centred)
        return centred.flatten(1, 2).unsqueeze(2)

    def outputs(self, parameters: Parameters, rolled: Rolled, rows: Tensor | None) -> Tensor:
        """Return the log-probs of the answers' tokens, [p, C, T]."""
        if rows is None:
            log_probs = self.network.log_prob(parameters, rolled["prompts"], rolled["answers"])
            return log_probs.flatten(1, 2)
        prompts = take_rows(rolled["prompts"], rows // self.num_answers)
        answers = take_rows(rolled["answers"].flatten(1, 2), rows)
        return self.network.log_prob(parameters, prompts, answers.unsqueeze(2)).squeeze(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How much text is sampled, and how an update is made."""

    num_prompts: int = 32
    """G, fresh prompts per step and member."""
    repeats: int = 8
    """A, completions per prompt: a group."""
    num_held_out: int = 128
    """Prompts of an evaluation, the same at each."""
    greedy: bool = True
    """Whether an evaluation also measures the likeliest answers."""
    max_norm: float = 1.0
    """A member's gradient is clipped to this norm."""
    max_tokens: int = 65_536
    """Most tokens of a forward, but those of at least one member, or of one row of a single model.
    In training a token costs about 32 * num_layers * width bytes in bfloat16."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_held_out", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.repeats < 2:
            raise ValueError(
                f"repeats must be >= 2, got {self.repeats}: an advantage is measured from "
                f"the other answers to the same prompt."
            )
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {self.max_norm}; infinite does not clip.")

    @property
    def num_rows(self) -> int:
        """N."""
        return self.num_prompts * self.repeats


class TextProgram(Program):
    """Text tasks and language models: fresh prompts, several completions of each.

    Args:
        task: prompts and rewards.
        model: of every member.
        shape: how much is sampled, and how an update is made.
    """

    judges = False
    shown = "train reward"
    is_text = True

    def __init__(self, task: TextTask, model: StackedDecoder, shape: Shape):
        for name, own, wanted in (
            ("prompt_length", model.prompt_length, task.prompt_length),
            ("answer_length", model.answer_length, task.answer_length),
        ):
            if own != wanted:
                raise ValueError(f"model must have the task's {name}, {wanted}, got {own}.")
        self.task, self.shape = task, shape
        self.network: StackedDecoder = model
        self.num_rows, self.group = shape.num_rows, shape.repeats
        self.num_choices, self.prompt_length = model.num_tokens, model.prompt_length
        self.max_norm = shape.max_norm

    def most_members(self, num_rows: int) -> int | None:
        """Return how many members with so many rows have at most `max_tokens` tokens, or 1."""
        length = self.network.prompt_length + self.network.answer_length
        return max(1, self.shape.max_tokens // (num_rows * length))

    @torch.no_grad()
    def act(
        self,
        parameters: Parameters,
        draws: Draws,
        step: Tensor,
        *,
        temperature: Tensor | None = None,
    ) -> Rolled:
        """Draw prompts and complete each several times.

        The entropy, [P] in nats, is the mean of the distributions that tokens were drawn from,
        whatever becomes of the answers.
        """
        drawn = sample(
            self.network,
            parameters,
            self.task.prompts(draws, "prompts", step, self.shape.num_prompts),
            repeats=self.shape.repeats,
            draws=draws,
            step=step,
            temperature=None if temperature is None else temperature.flatten(),
        )
        entropy = drawn.entropies.sum(dim=(1, 2)) / drawn.mask.sum(dim=(1, 2))
        return drawn._asdict() | {"entropy": entropy}

    def pay(self, rolled: Rolled) -> Tensor:
        """Return the rewards, [P, N]."""
        return self.task.reward(self.prompts(rolled), self.actions(rolled))

    def prompts(self, rolled: Rolled) -> Tensor:
        """Return the prompt of every completion, [P, N, Lp]."""
        return rolled["tokens"][..., : self.prompt_length]

    def actions(self, rolled: Rolled) -> Tensor:
        """Return the completions, [P, N, T]."""
        return rolled["tokens"][..., self.prompt_length :]

    def with_actions(self, rolled: Rolled, actions: Tensor, replaced: Tensor) -> Rolled:
        """Return the same prompts with other completions."""
        tokens = torch.cat([self.prompts(rolled), actions], dim=2)
        mask = torch.where(replaced.unsqueeze(2), completion_mask(actions), rolled["mask"])
        return rolled | {"tokens": tokens, "mask": mask}

    def right(self, rolled: Rolled) -> Tensor:
        """Return demonstrations."""
        return self.task.demonstrations(self.prompts(rolled))

    def broken(self, rolled: Rolled, hit: Tensor, draws: Draws, step: Tensor) -> Rolled:
        """Return the experience with the completions that were hit broken."""
        rows = self.num_rows
        kind = draws.integers("broken kind", step, 4, rows)
        where = draws.uniform("broken place", step, rows)
        completions, mask = break_answers(
            self.actions(rolled), rolled["mask"], kind, where, self.group
        )
        hit = hit.unsqueeze(2)
        kept = torch.where(hit, completions, self.actions(rolled))
        tokens = torch.cat([self.prompts(rolled), kept], dim=2)
        return rolled | {"tokens": tokens, "mask": torch.where(hit, mask, rolled["mask"])}

    @torch.no_grad()
    def judge(self, parameters: Parameters, rolled: Rolled) -> Rolled:
        """Return the log-probs of the completions' tokens."""
        return {"log_probs": self.outputs(parameters, rolled, None)}

    def advantages(self, arm: Arm, rolled: Rolled) -> Tensor:
        """Return reward minus the mean reward of the same prompt's answers, [P, N, 1]."""
        return advantage.group_mean(rolled["rewards"], self.group).unsqueeze(2)

    def trained_advantages(
        self, arm: Arm, rolled: Rolled, centred: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Return U of the loss: centred, and for GRPO divided by the group's standard deviation.

        Where a gate keeps a number of each group, mean and deviation are those of the kept rows,
        [P, N] bool, and U is 0 elsewhere.
        """
        if getattr(arm.gate, "group", None) is None or kept is None:
            if not arm.divided:
                return centred
            own = centred.reshape(len(centred), -1, self.group)
            return (own / (own.std(dim=2, keepdim=True) + STD_EPSILON)).view_as(centred)
        rewards, among = (
            values.reshape(len(kept), -1, self.group) for values in (rolled["rewards"], kept)
        )
        number = among.sum(dim=2, keepdim=True)
        mean = torch.where(among, rewards, 0.0).sum(dim=2, keepdim=True) / number.clamp(min=1)
        own = torch.where(among, rewards - mean, 0.0)
        if arm.divided:
            variance = own.square().sum(dim=2, keepdim=True) / (number - 1).clamp(min=1)
            own = own / (variance.sqrt() + STD_EPSILON)
        return own.view_as(centred)

    def outputs(self, parameters: Parameters, rolled: Rolled, rows: Tensor | None) -> Tensor:
        """Return the log-probs of the completions' tokens, [p, C, T]."""
        tokens = rolled["tokens"] if rows is None else take_rows(rolled["tokens"], rows)
        return self.network.log_prob(parameters, tokens)

    def evaluator(self, parameters: Parameters, draws: Draws) -> Measured:
        """Return what measures mean rewards on held-out prompts, the same ones every time."""
        shape = self.shape
        return HeldOut(
            self.network, parameters, self.task, draws, shape.num_held_out, greedy=shape.greedy
        )

    def check_rows(self, num_members: int, device: torch.device) -> None:
        """Refuse more rows than attention kernels on a GPU count in one dimension of their grid."""
        num_rows = num_members * self.num_rows
        if device.type == "cuda" and num_rows > _MOST_ROWS:
            raise ValueError(
                f"members must have at most {_MOST_ROWS} rows together on a GPU, members times "
                f"num_prompts times repeats, got {num_rows}; train several populations."
            )


def _refuse(temperature: Any, program: Program) -> None:
    if temperature is not None:
        raise ValueError(f"temperature must be 1 for {type(program).__name__}; text alone has one.")


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
