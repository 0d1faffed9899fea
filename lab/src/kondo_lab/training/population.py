"""The loop: all members step together; what can share kernels does.

    begin step   draw, act, pay, decide           all members, one captured program
    end step     gather kept rows, loss, Adam     one captured program per group and number of rows

    rule         neighbours with the same update: one gate, one loss
    group        rules whose rows have the same size: one forward, one backward, one Adam

A gate may keep a different number of rows for each member and step. The rows of a group are padded
to the next size in a short list (weight 0, so the gradient is exact), and only that many go through
forward and backward.

As in the author's code, Adam steps also where nothing was kept: its moments decay and move on.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kondo import adapters, sampling
from kondo_lab.models.networks import Parameters
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import draft_screens, frictions
from kondo_lab.training.cuda_graphs import Captured
from kondo_lab.training.member import Member, Update
from kondo_lab.training.programs import Decision, Program, Rolled, decide


class _Rule:
    """Neighbouring members with the same update program."""

    def __init__(self, population: "Population", members: slice):
        own = population.members[members]
        self.members, self.update = members, own[0].update
        self.gate = copy.deepcopy(self.update.gate)
        self.draws = population.draws.part(members)
        self.screen = draft_screens.make(
            population.program,
            own,
            {name: value[members] for name, value in population.parameters.items()},
        )

    def decide(self, program: Program, rolled: Rolled, step: Tensor) -> Decision:
        """Choose the members' rows."""
        mine = {name: value[self.members] for name, value in rolled.items()}
        return decide(program, self.update, self.gate, mine, self.draws, step, screen=self.screen)


class _Group:
    """Rules whose rows have the same size."""

    def __init__(self, population: "Population", rules: list[_Rule]):
        self.rules = rules
        self.members = slice(rules[0].members.start, rules[-1].members.stop)
        self.size, _ = row_shape(rules[0].update, population.program.num_rows)
        # Leaves that share the population's memory: the sampler reads what Adam writes.
        self.leaves = {
            name: value[self.members].detach().requires_grad_()
            for name, value in population.parameters.items()
        }
        rates = [member.learning_rate for member in population.members[self.members]]
        self._equal_rates = list(_equal_neighbours(rates))
        self.optimiser = torch.optim.Adam(
            [
                {"params": [leaf.detach()[members] for leaf in self.leaves.values()], "lr": rate}
                for members, rate in self._equal_rates
            ],
            fused=True,
            capturable=population.device.type == "cuda",
        )
        self.decisions: list[Decision] = []
        self.order: Tensor | None = None
        self._programs: dict[int, Captured] = {}

    def decide(self, program: Program, rolled: Rolled, step: Tensor) -> None:
        """Choose the rows of every rule."""
        self.decisions = [rule.decide(program, rolled, step) for rule in self.rules]
        orders = [decision.order for decision in self.decisions if decision.order is not None]
        self.order = torch.cat(orders) if orders else None

    def train(self, population: "Population", num_rows: int) -> None:
        """Update on the first `num_rows` rows of every member, by a program of that size."""
        if num_rows not in self._programs:
            self._programs[num_rows] = Captured(
                lambda: self._train(population, num_rows), population.device
            )
        self._programs[num_rows]()

    def forget_programs(self) -> None:
        """Drop captured programs: they write to the moments Adam had when they were recorded."""
        self._programs.clear()

    def gradients(
        self, population: "Population", num_rows: int, *, loss_of: Update | None = None
    ) -> tuple[Tensor, ...]:
        """Return the gradient of the summed losses, one tensor [p, ...] per parameter.

        `loss_of` replaces the rules' own updates, e.g. by the exact gradient, on the same rows.
        """
        program, rolled = population.program, population.rolled
        mine = {name: value[self.members] for name, value in rolled.items()}
        rows = None if self.order is None else self.order[:, :num_rows]
        outputs = program.outputs(self.leaves, mine, rows)
        losses = []
        for rule, decision in zip(self.rules, self.decisions, strict=True):
            start = rule.members.start - self.members.start
            own = slice(start, start + rule.members.stop - rule.members.start)
            experience = {name: value[own] for name, value in mine.items()}
            of_rule = None if rows is None else rows[own]
            update = loss_of or rule.update
            losses.append(program.loss(update, outputs[own], experience, decision, of_rule))
        return torch.autograd.grad(torch.stack(losses).sum(), list(self.leaves.values()))

    def _train(self, population: "Population", num_rows: int) -> None:
        gradients = self.gradients(population, num_rows)
        for (members, _), entry in zip(self._equal_rates, self.optimiser.param_groups, strict=True):
            for parameter, gradient in zip(entry["params"], gradients, strict=True):
                parameter.grad = gradient[members]
        self.optimiser.step()

    @property
    def varies(self) -> bool:
        """Whether the number of kept rows must be asked for."""
        return not all(
            rule.update.trains_all_rows or rule.update.keeps_a_count for rule in self.rules
        )

    def num_rows(self, busiest: int, all_rows: int) -> int:
        """Return the size to pad to when the busiest member keeps `busiest` rows."""
        if busiest <= self.size:
            return self.size
        return int(min(all_rows, 2 ** math.ceil(math.log2(busiest))))


class Population:
    """P members of one program.

    Args:
        program: task and network.
        members: any number, in any order; no member's result depends on the others.
        device: where all of it lives.
        dtype: of the parameters; float64 for tests.

    Example:
        >>> import torch
        >>> from kondo_lab.training.member import Member, Update
        >>> from kondo_lab.training.programs import BanditProgram
        >>> from kondo_lab.training.population import Population
        >>> from kondo_lab.tasks.bandits import ImageBandit
        >>> members = [
        ...     Member(series="PG", seed=seed, learning_rate=1e-3, update=Update())
        ...     for seed in range(3)
        ... ]
        >>> program = BanditProgram(ImageBandit.digits(), width=16, batch=10)
        >>> population = Population(program, members, device=torch.device("cpu"))
        >>> population.step()
        >>> population.num_steps
        1
    """

    shown = "online error"
    overlaps = True

    def __init__(
        self,
        program: Program,
        members: Sequence[Member],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        if not members:
            raise ValueError("members must not be empty; a population trains at least one.")
        self.program, self.device = program, device
        self.members = sorted(
            members,
            key=lambda member: (
                row_shape(member.update, program.num_rows),
                repr(member.update.order),
                member.learning_rate,
            ),
        )
        self.draws = Draws([member.seed for member in self.members], device)
        fresh = program.network.initialise(self.draws)
        self.parameters: Parameters = {
            name: value.to(dtype).contiguous() for name, value in fresh.items()
        }
        self.groups = self._make_groups()
        self.actors = frictions.make(program, self.members, self.parameters)
        self.num_steps = 0
        self.since_log = 0
        self.rolled: Rolled = {}
        size = len(self.members)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._error = torch.zeros(size, dtype=torch.float64, device=device)
        self._backward = torch.zeros(size, dtype=torch.int64, device=device)
        self._busiest = torch.zeros(len(self.groups), dtype=torch.int64, device=device)
        self._begin = Captured(self._begin_step, device)

    def _make_groups(self) -> list[_Group]:
        programs = [member.update.program for member in self.members]
        rules = [_Rule(self, members) for members, _ in _equal_neighbours(programs)]
        shapes = [row_shape(rule.update, self.program.num_rows) for rule in rules]
        return [_Group(self, rules[some]) for some, _ in _equal_neighbours(shapes)]

    def step(self) -> None:
        """Make one update of every member."""
        self.begin_step()
        self.end_step()

    def begin_step(self) -> None:
        """Draw, act, pay and decide; on a GPU this only queues the work."""
        self._begin()

    def end_step(self) -> None:
        """Update on the kept rows."""
        asked = any(group.varies for group in self.groups)
        busiest = self._busiest.tolist() if asked else [0] * len(self.groups)
        for group, kept in zip(self.groups, busiest, strict=True):
            group.train(self, group.num_rows(kept, self.program.num_rows))
        self.num_steps += 1
        self.since_log += 1

    def _begin_step(self) -> None:
        self._step.add_(1)
        self.roll(self._step)
        self._error.add_(1 - self.rolled["rewards"].flatten(1).double().mean(dim=1))
        for number, group in enumerate(self.groups):
            kept = torch.cat([decision.kept for decision in group.decisions])
            self._backward[group.members].add_(kept)
            self._busiest[number].copy_(kept.max())

    def roll(self, step: Tensor) -> None:
        """Draw the experience of `step` and let every group decide on it."""
        if self.actors is None:
            self.rolled = self.program.act(self.parameters, self.draws, step)
            self.rolled["rewards"] = self.program.pay(self.rolled)
        else:
            self.rolled = self.actors(self.parameters, self.draws, step)
        for group in self.groups:
            group.decide(self.program, self.rolled, step)

    @contextmanager
    def aside(self, step: Tensor) -> Iterator[None]:
        """Roll and decide on the experience of `step` inside; put this step's own back after.

        Captured programs read this step's experience where it lies, so it must not be lost. A
        rolling gate remembers what it decides on, hence cannot look aside.
        """
        gates = [rule.gate for rule in self._rules if rule.gate is not None]
        rolling = any(adapters.adapter_of(gate).remembers for gate in gates)
        drafted = any(rule.screen is not None for rule in self._rules)
        for has_it, what, who in (
            (rolling, "a rolling gate", "it remembers"),
            (drafted, "a draft screen", "it remembers"),
            (self._past is not None, "stale actors", "they remember"),
        ):
            if has_it:
                raise ValueError(f"a population with {what} cannot look aside; {who}.")
        rolled = self.rolled
        decided = [(group.decisions, group.order) for group in self.groups]
        try:
            self.roll(step)
            yield
        finally:
            self.rolled = rolled
            for group, (decisions, order) in zip(self.groups, decided, strict=True):
                group.decisions, group.order = decisions, order

    @property
    def num_rows(self) -> int:
        """Samples of a step and member."""
        return self.program.num_rows

    def read(self) -> dict[str, list[float]]:
        """Return each member's online error: the mean of 1 - reward since the last call."""
        error: list[float] = (self._error / self.since_log).tolist()
        self._error.zero_()
        self.since_log = 0
        return {self.shown: error}

    def evaluate(self) -> dict[str, Tensor]:
        """Return the held-out errors of the members, by metric."""
        return self.program.evaluate(self.parameters)

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
            "counters": [self._step, self._error, self._backward],
            "optimisers": [group.optimiser.state_dict() for group in self.groups],
            "gates": [rule.gate.state_dict() if rule.gate else {} for rule in self._rules],
            "screens": [rule.screen.state_dict() if rule.screen else None for rule in self._rules],
            "past": None if self._past is None else self._past.rings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for the same program and members."""
        self.num_steps, self.since_log = state["num_steps"], state["since_log"]
        for name, value in self.parameters.items():
            value.copy_(state["parameters"][name])
        counters = (self._step, self._error, self._backward)
        for own, saved in zip(counters, state["counters"], strict=True):
            own.copy_(saved)
        for group, adam in zip(self.groups, state["optimisers"], strict=True):
            group.optimiser.load_state_dict(adam)
            group.forget_programs()
        self._begin = Captured(self._begin_step, self.device)
        for rule, gate, screen in zip(self._rules, state["gates"], state["screens"], strict=True):
            if rule.gate is not None:
                rule.gate.load_state_dict(gate)
            if rule.screen is not None:
                rule.screen.load_state_dict(screen)
        if self._past is not None:
            for name, ring in self._past.rings.items():
                ring.copy_(state["past"][name])

    @property
    def _rules(self) -> list[_Rule]:
        return [rule for group in self.groups for rule in group.rules]

    @property
    def _past(self) -> frictions.Snapshots | None:
        """Parameters that stale actors still act with."""
        return None if self.actors is None else self.actors.past


def row_shape(update: Update, num_rows: int) -> tuple[int, bool]:
    """Return how many rows an update trains on at least, and whether it chooses them.

    Groups are made by it. A gate with rate 1 trains on all rows too, but in an order of its own.
    """
    if update.trains_all_rows:
        return num_rows, False
    rate = getattr(update.gate, "rate", None)
    return (1 if rate is None else sampling.count_for(rate, num_rows)), True


def _equal_neighbours(keys: Sequence[Any]) -> Iterator[tuple[slice, Any]]:
    """Yield the slices of equal neighbours."""
    start = 0
    for stop in range(1, len(keys) + 1):
        if stop == len(keys) or keys[stop] != keys[start]:
            yield slice(start, stop), keys[start]
            start = stop
