"""Reinforcement of P language models in one program, each with a contender's update.

    prompts -> completions -> rewards              all members, one sampler, through frictions
    decide -> kept rows -> loss -> clip -> Adam    crew by crew

    crew    neighbours with the same contender, as many as fit into one forward

The whole step is one CUDA graph: no count is asked of the device. Where a contender keeps a fixed
number of rows only these go through forward and backward; where it keeps tokens, or a number of
rows that is not known beforehand, all rows do, with weight 0 for what is not kept, and the records
say what would have been enough.

Shapes: P members, G prompts, N = G * repeats rows.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kondo import advantage, delight
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.models.networks import Parameters
from kondo_lab.models.sampler import Sampled, sample
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.base import TextTask
from kondo_lab.training.contenders import Contender
from kondo_lab.training.cuda_graphs import Captured
from kondo_lab.training.decisions import Batch, Chosen, decide, fixed_rows, loss, take_rows
from kondo_lab.training.gates import unchecked
from kondo_lab.training.language_frictions import NONE, Friction, Frictions
from kondo_lab.training.supervised import HeldOut, StackedAdam, Start

_QUANTILES = {"delight q05": 0.05, "delight q50": 0.5, "delight q95": 0.95}
MEANS = (
    "train reward",
    "entropy",
    "mixed groups",
    "completion length",
    *_QUANTILES,
    "kept rows",
    "kept tokens",
    "kept delight share",
    "gradient norm",
    "effective sample size",
)
"""Metrics of every logged step: means over the steps since the previous one.

Entropy is per token, in nats; mixed groups is the share of prompts whose completions differ in
reward; delight is that of whole completions, U times -log pi(completion). The kept delight share is
sum of weight * delight / sum of delight over the tokens whose delight is above 0; a step without
any counts with 0. The effective sample size is that of `effective_share`. With frictions all of it
is of what the learner gets, and the entropy is that of the actors.
"""
TOTALS = ("tokens generated", "tokens differentiated")
"""Metrics of every logged step: sums since the start. Differentiated are, of each row with a kept
token, the prompt and the completion up to its last kept token."""
_MOST_ROWS = 65_535
_TINY = 1e-300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One training run: a contender with a seed and a learning rate."""

    series: str
    """The line in the figure it belongs to."""
    seed: int
    """Of its start, prompts and completions."""
    learning_rate: float
    """Of Adam."""
    contender: Contender
    setting: float = math.nan
    """What the study sweeps, written into its records."""
    friction: Friction = NONE
    """Between its actors and its learner."""
    decay_steps: int = 0
    """D: the learning rate falls linearly, to 0 after D steps; 0 leaves it as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How much is sampled, and how an update is made."""

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


def experience(sampled: Sampled, rewards: Tensor, group: int) -> dict[str, Tensor]:
    """Return metric -> [P] of completions and their rewards [P, N], `group` of them per prompt."""
    num_tokens = sampled.mask.sum(dim=(1, 2))
    groups = rewards.view(len(rewards), -1, group)
    return {
        "train reward": rewards.mean(dim=1),
        "mixed groups": (groups.amax(dim=2) != groups.amin(dim=2)).double().mean(dim=1),
        "completion length": num_tokens.double() / rewards.shape[1],
        "entropy": mean_entropy(sampled),
    }


def mean_entropy(sampled: Sampled) -> Tensor:
    """Return the mean entropy of the tokens' distributions, [P] in nats."""
    return sampled.entropies.sum(dim=(1, 2)) / sampled.mask.sum(dim=(1, 2))


class _Crew:
    """Neighbouring members that decide by the same contender and train in one forward."""

    def __init__(self, population: "Population", members: slice):
        own = population.members[members]
        self.population, self.members, self.contender = population, members, own[0].contender
        self.draws = population.draws.part(members)
        # Leaves that share the population's memory: the sampler reads what Adam writes.
        parameters = {name: value[members] for name, value in population.parameters.items()}
        self.leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        self.adam = StackedAdam(parameters, max_norm=population.shape.max_norm)
        self.rates = parameters["head"].new_tensor([member.learning_rate for member in own])
        ends = [member.decay_steps or math.inf for member in own]
        self.decay_ends = self.rates.new_tensor(ends)
        missing = population.frictions.missing
        self.missing = None if missing is None else missing[members]

    def step(self, step: Tensor) -> dict[str, Tensor]:
        """Decide, differentiate and move the members; return metric -> one number for each."""
        assert self.population.sampled is not None
        sampled = Sampled(*(part[self.members] for part in self.population.sampled))
        rewards = self.population.rewards[self.members]
        group = self.population.shape.repeats
        log_probs = None
        if self.contender.screen == "exact":
            with torch.no_grad():
                log_probs = self.population.model.log_prob(self.leaves, sampled.tokens)
        batch = Batch(sampled, rewards, self.draws, step, group)
        chosen = decide(self.contender, batch, log_probs)
        gradients, by_token = self._gradients(sampled, chosen)
        left = (1 - (step - 1) / self.decay_ends).clamp(min=0)
        norms = self.adam.step(gradients, self.rates * left)
        worth = _delight(sampled, rewards, group).clamp(min=0).double()
        through = (chosen.weight * worth).sum(dim=(1, 2))
        return {
            "kept rows": chosen.rows_kept,
            "kept tokens": chosen.tokens_kept,
            "kept delight share": through / worth.sum(dim=(1, 2)).clamp(min=_TINY),
            "gradient norm": norms,
            "effective sample size": effective_share(by_token, sampled, chosen),
            "tokens differentiated": chosen.tokens_differentiated,
        }

    def _gradients(self, sampled: Sampled, chosen: Chosen) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradient of the members' losses, of kept rows alone where they are known.

        With it that by the tokens' log-probs, of the same rows.
        """
        tokens = sampled.tokens if chosen.rows is None else take_rows(sampled.tokens, chosen.rows)
        new = self.population.model.log_prob(self.leaves, tokens)
        losses = loss(self.contender, new, sampled, chosen, rows=chosen.rows, unknown=self.missing)
        by_token, *found = torch.autograd.grad(losses.sum(), [new, *self.leaves.values()])
        return dict(zip(self.leaves, found, strict=True)), by_token


def effective_share(by_token: Tensor, sampled: Sampled, chosen: Chosen) -> Tensor:
    """Return (sum w)^2 / (n * sum w^2), [P]: how many tokens count as much as n equal ones would.

    w is a token's weight, |dL / d log pi| / |U|, and n the number of tokens whose U is not 0, those
    that are not trained included. 1 where all weigh the same; 0 where none has a weight.

    Args:
        by_token: dL / d log pi, [P, N, T], or [P, K, T] of the chosen rows.
        sampled: N answers of T tokens.
        chosen: with U, and the rows.
    """
    advantages = chosen.advantages.abs().double()
    count = ((advantages > 0).unsqueeze(2) & sampled.mask).sum(dim=(1, 2))
    if chosen.rows is not None:
        advantages = take_rows(advantages, chosen.rows)
    each = advantages.unsqueeze(2)
    weight = torch.where(each > 0, by_token.abs().double() / each.clamp(min=_TINY), 0.0)
    total, squares = weight.sum(dim=(1, 2)), weight.square().sum(dim=(1, 2))
    return total.square() / (squares * count).clamp(min=_TINY)


def _delight(sampled: Sampled, rewards: Tensor, group: int) -> Tensor:
    """Return the delight of every token, [P, N, T]."""
    centred = advantage.group_mean(rewards, group).unsqueeze(2).expand_as(sampled.log_probs)
    return unchecked(delight)(sampled.log_probs, centred)


class Population:
    """P members of one model and task.

    Args:
        model: of every member.
        task: what they are paid for.
        members: any number, in any order; no member's result depends on the others.
        start: weights of every member's seed.
        device: where all of it lives.
        shape: how much is sampled, and how an update is made.

    Example:
        >>> import kondo, torch
        >>> from kondo_lab.training.contenders import Contender
        >>> from kondo_lab.models.decoder import StackedDecoder
        >>> from kondo_lab.training.language_population import Member, Population, Shape
        >>> from kondo_lab.training.supervised import warm_start
        >>> from kondo_lab.tasks.text import NUM_TOKENS, make
        >>> task, cpu = make("addition", 1), torch.device("cpu")
        >>> model = StackedDecoder(
        ...     "toy",
        ...     prompt_length=task.prompt_length,
        ...     answer_length=task.answer_length,
        ...     num_tokens=NUM_TOKENS,
        ... )
        >>> start, _ = warm_start(
        ...     model, task, [0], num_steps=2, batch=4, learning_rate=1e-3, device=cpu
        ... )
        >>> dense, gated = Contender(name="PG"), Contender(name="DG-K", gate=kondo.Gate(rate=0.25))
        >>> members = [
        ...     Member(series=each.name, seed=0, learning_rate=1e-4, contender=each)
        ...     for each in (dense, gated)
        ... ]
        >>> shape = Shape(num_prompts=2, repeats=4)
        >>> population = Population(model, task, members, start, device=cpu, shape=shape)
        >>> population.step()
        >>> population.num_rows, population.num_steps
        (8, 1)
    """

    shown = "train reward"
    overlaps = False
    """A step is one graph that fills the device."""

    def __init__(
        self,
        model: StackedDecoder,
        task: TextTask,
        members: Sequence[Member],
        start: Start,
        *,
        device: torch.device,
        shape: Shape,
    ):
        if not members:
            raise ValueError("members must not be empty; a population trains at least one.")
        for name, own, wanted in (
            ("prompt_length", model.prompt_length, task.prompt_length),
            ("answer_length", model.answer_length, task.answer_length),
        ):
            if own != wanted:
                raise ValueError(f"model must have the task's {name}, {wanted}, got {own}.")
        check_rows(len(members) * shape.num_rows, device)
        self._check_queues(members)
        self.model, self.task, self.device, self.shape = model, task, device, shape
        self.members = sorted(
            members,
            key=lambda member: (self._rows(member), repr(member.contender), repr(member)),
        )
        seeds = [member.seed for member in self.members]
        self.draws = Draws(seeds, device)
        self.parameters = {name: value.to(device) for name, value in start.of(seeds).items()}
        frictions = [member.friction for member in self.members]
        self.frictions = Frictions(frictions, self.parameters, self.draws)
        self.crews = [_Crew(self, some) for some in self._slices()]
        self.sampled: Sampled | None = None
        self.rewards = torch.zeros(len(seeds), self.num_rows, device=device)
        self.num_steps = self.since_log = 0
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._means = torch.zeros(len(MEANS), len(seeds), dtype=torch.float64, device=device)
        self._totals = torch.zeros(len(TOTALS), len(seeds), dtype=torch.int64, device=device)
        self._backward = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        self._program = Captured(self._do_step, device)
        self._held_out = HeldOut(
            model, self.parameters, task, self.draws, shape.num_held_out, greedy=shape.greedy
        )

    def _check_queues(self, members: Sequence[Member]) -> None:
        if any(member.friction.queue for member in members):
            raise ValueError(
                "members must have no queue: actors and learner take turns here; "
                "kondo_lab.training.asynchronous trains with one."
            )

    @property
    def num_rows(self) -> int:
        """N, completions of a step and member."""
        return self.shape.num_rows

    def _rows(self, member: Member) -> int:
        """Return how many rows a member's forward has."""
        return fixed_rows(member.contender, self.num_rows, self.shape.repeats) or self.num_rows

    def _slices(self) -> Iterator[slice]:
        """Yield the members of each crew."""
        length = self.model.prompt_length + self.model.answer_length
        begin = 0
        for _, same in itertools.groupby(self.members, key=lambda member: member.contender):
            several = list(same)
            most = max(1, self.shape.max_tokens // (self._rows(several[0]) * length))
            for first in range(0, len(several), most):
                yield slice(begin + first, begin + min(first + most, len(several)))
            begin += len(several)

    def step(self) -> None:
        """Make one update of every member; on a GPU this only queues the work."""
        self._program()
        self.num_steps += 1
        self.since_log += 1

    def begin_step(self) -> None:
        """Make the step: it asks the device for nothing, so that none of it is left to do."""
        self.step()

    def end_step(self) -> None:
        """Do nothing."""

    def _do_step(self) -> None:
        self._step.add_(1)
        actors = self.frictions.actors(self.parameters, self._step)
        self.sampled, self.rewards, entropy = self.act(actors, self._step)
        self._learn(entropy)

    def act(self, actors: Parameters, step: Tensor) -> tuple[Sampled, Tensor, Tensor]:
        """Return what the learner gets of a step: answers, rewards, the actors' entropy [P]."""
        shape = self.shape
        drawn = sample(
            self.model,
            actors,
            self.task.prompts(self.draws, "prompts", step, shape.num_prompts),
            repeats=shape.repeats,
            draws=self.draws,
            step=step,
            temperature=self.frictions.temperature,
        )
        sampled = self.frictions.hand_over(
            drawn, step, shape.repeats, lambda prompts: self.task.demonstrations(prompts)
        )
        paid = self.task.reward(sampled.prompts, sampled.completions)
        # The entropy is that of the actors, whatever became of their answers.
        return sampled, self.frictions.corrupt(paid, step), mean_entropy(drawn)

    def _learn(self, entropy: Tensor) -> None:
        """Update every member on the answers and rewards that stand here."""
        sampled = self.sampled
        assert sampled is not None
        found = experience(sampled, self.rewards, self.shape.repeats) | self._delight_quantiles()
        found["entropy"] = entropy
        done = [crew.step(self._step) for crew in self.crews]
        found |= {name: torch.cat([each[name] for each in done]) for name in done[0]}
        found["tokens generated"] = sampled.mask.sum(dim=(1, 2))
        self._means.add_(torch.stack([found[name].double() for name in MEANS]))
        self._totals.add_(torch.stack([found[name] for name in TOTALS]))
        self._backward.add_(found["kept rows"])

    def _delight_quantiles(self) -> dict[str, Tensor]:
        assert self.sampled is not None
        by_token = _delight(self.sampled, self.rewards, self.shape.repeats)
        ranked = by_token.sum(dim=2).sort(dim=1).values
        return {
            name: ranked[:, round(quantile * (self.num_rows - 1))]
            for name, quantile in _QUANTILES.items()
        }

    def evaluate(self) -> dict[str, Tensor]:
        """Return metric -> [P]: mean rewards on held-out prompts, the same ones every time."""
        return self._held_out()

    def read(self) -> dict[str, list[float]]:
        """Return metric -> one number per member: means since the last call, and totals."""
        means = (self._means / self.since_log).tolist()
        values = dict(zip(MEANS, means, strict=True))
        values |= dict(zip(TOTALS, self._totals.double().tolist(), strict=True))
        self._means.zero_()
        self.since_log = 0
        return values

    def read_backward(self) -> list[int]:
        """Return the rows each member has paid a backward pass for."""
        paid: list[int] = self._backward.tolist()
        return paid

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, loadable with weights_only=True."""
        return {
            "num_steps": self.num_steps,
            "since_log": self.since_log,
            "parameters": self.parameters,
            "counters": self._counters,
            "actors": self.frictions.state_dict(),
            "adams": [crew.adam.state_dict() for crew in self.crews],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for the same model, task and members."""
        self.num_steps, self.since_log = state["num_steps"], state["since_log"]
        for name, value in self.parameters.items():
            value.copy_(state["parameters"][name])
        self.frictions.load_state_dict(state["actors"])
        for own, saved in zip(self._counters, state["counters"], strict=True):
            own.copy_(saved)
        for crew, saved in zip(self.crews, state["adams"], strict=True):
            crew.adam.load_state_dict(saved)

    @property
    def _counters(self) -> list[Tensor]:
        return [self._step, self._means, self._totals, self._backward]


def check_rows(num_rows: int, device: torch.device) -> None:
    """Refuse more rows than attention kernels on a GPU count in one dimension of their grid."""
    if device.type == "cuda" and num_rows > _MOST_ROWS:
        raise ValueError(
            f"members must have at most {_MOST_ROWS} rows together on a GPU, members times "
            f"num_prompts times repeats, got {num_rows}; train several populations."
        )
