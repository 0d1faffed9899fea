"""Reinforcement of P language models in one program, each with a contender's update.

    prompts -> completions -> rewards              all members, one sampler
    decide -> kept rows -> loss -> clip -> Adam    crew by crew

    crew    neighbours with the same contender, as many as fit into one forward

The whole step is one CUDA graph: no count is asked of the device. Where a contender keeps a fixed
number of rows only these go through forward and backward; where it keeps tokens, or a number of
rows that is not known beforehand, all rows do, with weight 0 for what is not kept, and the records
say what would have been enough.

Shapes: P members, G prompts, N = G * repeats rows, La tokens of a completion.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kondo.core.advantage import group_mean
from kondo.core.delight import delight
from kondo_lab.draws import Draws
from kondo_lab.gates import unchecked
from kondo_lab.language.contenders import (
    Chosen,
    Contender,
    decide,
    fixed_rows,
    loss,
    take_rows,
)
from kondo_lab.language.sampler import Sampled, sample
from kondo_lab.language.supervised import HeldOut, StackedAdam, Start
from kondo_lab.language.transformer import StackedLM
from kondo_lab.population.cuda_graphs import Captured
from kondo_lab.text.base import TextTask

MEANS = (
    "train reward",
    "entropy",
    "mixed groups",
    "completion length",
    "delight q05",
    "delight q50",
    "delight q95",
    "kept rows",
    "kept tokens",
    "kept delight share",
    "gradient norm",
)
"""Metrics of every logged step: means over the steps since the previous one.

Entropy is per token, in nats; mixed groups is the share of prompts whose completions differ in
reward; delight is that of whole completions, U times -log pi(completion). The kept delight share is
sum of weight * delight / sum of delight over the tokens whose delight is above 0; a step without
any counts with 0.
"""
TOTALS = ("tokens generated", "tokens differentiated")
"""Metrics of every logged step: sums since the start. Differentiated are, of each row with a kept
token, the prompt and the completion up to its last kept token."""
_QUANTILES = (0.05, 0.5, 0.95)
_MOST_ROWS = 65_535
_TINY = 1e-300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One training run inside a population."""

    series: str
    """The line in the figure it belongs to."""
    seed: int
    """Of its start, prompts and completions."""
    learning_rate: float
    """Of Adam."""
    contender: Contender
    setting: float = math.nan
    """What the study sweeps, written into its records."""


class _Crew:
    """Neighbouring members that decide by the same contender and train in one forward."""

    def __init__(self, population: "Population", members: slice):
        own = population.members[members]
        self.members, self.contender = members, own[0].contender
        self.draws = population.draws.part(members)
        # Leaves that share the population's memory: the sampler reads what Adam writes.
        parameters = {name: value[members] for name, value in population.parameters.items()}
        self.leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        self.adam = StackedAdam(parameters, max_norm=population.max_norm)
        self.rates = parameters["head"].new_tensor([member.learning_rate for member in own])

    def decide(self, population: "Population", step: Tensor) -> Chosen:
        """Choose what the members train on."""
        sampled, rewards = self._own(population)
        log_probs = sampled.log_probs
        if self.contender.screen == "exact":
            log_probs = population.model.score(self.leaves, sampled.tokens).log_probs
        return decide(
            self.contender,
            log_probs,
            rewards,
            sampled.mask,
            self.draws,
            step,
            population.repeats,
            sampled.entropies,
            prompt_length=population.model.prompt_length,
        )

    def gradients(self, population: "Population", chosen: Chosen) -> dict[str, Tensor]:
        """Return the gradient of the members' losses, of kept rows alone where they are known."""
        sampled, _ = self._own(population)
        tokens = sampled.tokens if chosen.rows is None else take_rows(sampled.tokens, chosen.rows)
        losses = loss(
            self.contender,
            population.model.log_prob(self.leaves, tokens),
            sampled.log_probs,
            chosen,
            sampled.mask,
            rows=chosen.rows,
        )
        found = torch.autograd.grad(losses.sum(), list(self.leaves.values()))
        return dict(zip(self.leaves, found, strict=True))

    def delight_share(self, population: "Population", chosen: Chosen) -> Tensor:
        """Return [P]: how much of the tokens' positive delight the weights let through."""
        sampled, rewards = self._own(population)
        worth = _delight(sampled, rewards, population.repeats).clamp(min=0).double()
        through = (chosen.weight * worth).sum(dim=(1, 2))
        return through / worth.sum(dim=(1, 2)).clamp(min=_TINY)

    def _own(self, population: "Population") -> tuple[Sampled, Tensor]:
        assert population.sampled is not None
        own = Sampled(*(part[self.members] for part in population.sampled))
        return own, population.rewards[self.members]


def _delight(sampled: Sampled, rewards: Tensor, group: int) -> Tensor:
    """Return the delight of every token, [P, N, T]."""
    centred = group_mean(rewards, group).unsqueeze(2).expand_as(sampled.log_probs)
    return unchecked(delight)(sampled.log_probs, centred)


class Population:
    """P members of one model and task.

    Args:
        model: of every member.
        task: what they are paid for.
        members: any number, in any order; no member's result depends on the others.
        start: weights of every member's seed.
        device: where all of it lives.
        num_prompts: G, prompts of a step and member.
        repeats: completions of each prompt, a group.
        max_norm: of a member's gradient; see `StackedAdam`.
        max_tokens: most tokens of a training forward, but those of at least one member. A token
            costs about 32 * num_layers * width bytes in bfloat16: a 5m model 13 GB by default.
        num_held_out: prompts of an evaluation.

    Example:
        >>> import kondo, torch
        >>> from kondo_lab.language.contenders import Contender
        >>> from kondo_lab.language.transformer import StackedLM
        >>> from kondo_lab.language.population import Member, Population
        >>> from kondo_lab.language.supervised import warm_start
        >>> from kondo_lab.text import NUM_TOKENS, make
        >>> task, cpu = make("addition", 1), torch.device("cpu")
        >>> model = StackedLM(
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
        >>> population = Population(
        ...     model, task, members, start, device=cpu, num_prompts=2, repeats=4
        ... )
        >>> population.step()
        >>> population.num_rows, population.num_steps
        (8, 1)
    """

    shown = "train reward"
    overlaps = False
    """A step is one graph that fills the device."""

    def __init__(
        self,
        model: StackedLM,
        task: TextTask,
        members: Sequence[Member],
        start: Start,
        *,
        device: torch.device,
        num_prompts: int = 32,
        repeats: int = 8,
        max_norm: float = 1.0,
        max_tokens: int = 1 << 18,
        num_held_out: int = 128,
    ):
        if not members:
            raise ValueError("members must not be empty; a population trains at least one.")
        for name, own, wanted in (
            ("prompt_length", model.prompt_length, task.prompt_length),
            ("answer_length", model.answer_length, task.answer_length),
        ):
            if own != wanted:
                raise ValueError(f"model must have the task's {name}, {wanted}, got {own}.")
        check_rows(len(members) * num_prompts * repeats, device)
        self.model, self.task, self.device = model, task, device
        self.num_prompts, self.repeats = num_prompts, repeats
        self.max_norm = max_norm
        self.members = sorted(
            members,
            key=lambda member: (self._rows(member), repr(member.contender), repr(member)),
        )
        seeds = [member.seed for member in self.members]
        self.draws = Draws(seeds, device)
        self.parameters = {name: value.to(device) for name, value in start.of(seeds).items()}
        self.crews = [_Crew(self, some) for some in self._slices(max_tokens)]
        self.sampled: Sampled | None = None
        self.rewards = torch.zeros(len(seeds), self.num_rows, device=device)
        self.num_steps = self.since_log = 0
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._means = torch.zeros(len(MEANS), len(seeds), dtype=torch.float64, device=device)
        self._totals = torch.zeros(len(TOTALS), len(seeds), dtype=torch.int64, device=device)
        self._backward = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        self._program = Captured(self._do_step, device)
        self._held_out = HeldOut(model, self.parameters, task, self.draws, num_held_out)

    @property
    def num_rows(self) -> int:
        """N, completions of a step and member."""
        return self.num_prompts * self.repeats

    def _rows(self, member: Member) -> int:
        """Return how many rows a member's forward has."""
        return fixed_rows(member.contender, self.num_rows, self.repeats) or self.num_rows

    def _slices(self, max_tokens: int) -> Iterator[slice]:
        """Yield the members of each crew."""
        length = self.model.prompt_length + self.model.answer_length
        begin = 0
        for _, same in itertools.groupby(self.members, key=lambda member: member.contender):
            several = list(same)
            most = max(1, max_tokens // (self._rows(several[0]) * length))
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

    def roll(self, step: Tensor) -> None:
        """Draw prompts, complete them and pay."""
        prompts = self.task.prompts(self.draws, "prompts", step, self.num_prompts)
        self.sampled = sample(
            self.model,
            self.parameters,
            prompts,
            repeats=self.repeats,
            draws=self.draws,
            step=step,
        )
        asked = prompts.repeat_interleave(self.repeats, 1)
        self.rewards = self.task.reward(asked, self.sampled.completions)

    def _do_step(self) -> None:
        self._step.add_(1)
        self.roll(self._step)
        found = self._rolled_means()
        kept: dict[str, list[Tensor]] = {
            name: [] for name in ("kept rows", "kept tokens", "kept delight share", "gradient norm")
        }
        differentiated = []
        for crew in self.crews:
            chosen = crew.decide(self, self._step)
            norms = crew.adam.step(crew.gradients(self, chosen), crew.rates)
            kept["kept rows"].append(chosen.rows_kept)
            kept["kept tokens"].append(chosen.tokens_kept)
            kept["kept delight share"].append(crew.delight_share(self, chosen))
            kept["gradient norm"].append(norms)
            differentiated.append(chosen.tokens_differentiated)
        found |= {name: torch.cat(parts) for name, parts in kept.items()}
        self._means.add_(torch.stack([found[name].double() for name in MEANS]))
        assert self.sampled is not None
        generated = self.sampled.mask.sum(dim=(1, 2))
        self._totals.add_(torch.stack([generated, torch.cat(differentiated)]))
        self._backward.add_(found["kept rows"])

    def _rolled_means(self) -> dict[str, Tensor]:
        """Return metric -> [P] of what was sampled in this step."""
        assert self.sampled is not None
        sampled, rewards = self.sampled, self.rewards
        num_tokens = sampled.mask.sum(dim=(1, 2))
        groups = rewards.view(len(rewards), self.num_prompts, self.repeats)
        delight = _delight(sampled, rewards, self.repeats).sum(dim=2).sort(dim=1).values
        places = [round(quantile * (self.num_rows - 1)) for quantile in _QUANTILES]
        low, middle, high = (delight[:, place] for place in places)
        return {
            "train reward": rewards.mean(dim=1),
            "entropy": sampled.entropies.sum(dim=(1, 2)) / num_tokens,
            "mixed groups": (groups.amax(dim=2) != groups.amin(dim=2)).double().mean(dim=1),
            "completion length": num_tokens / self.num_rows,
            "delight q05": low,
            "delight q50": middle,
            "delight q95": high,
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
            "adams": [crew.adam.state_dict() for crew in self.crews],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for the same model, task and members."""
        self.num_steps, self.since_log = state["num_steps"], state["since_log"]
        for name, value in self.parameters.items():
            value.copy_(state["parameters"][name])
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
