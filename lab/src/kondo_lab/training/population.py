"""The loop: all members step together; what can share kernels does.

    experience   draw, act, pay; through actors with frictions     all members at once
    decide       per rule: values, gate, kept rows                  `decisions.decide`
    train        gather kept rows, loss, gradient, clip, Adam       per group and number of rows

    rule         neighbours with the same arm: one gate, one loss
    group        rules whose rows have the same size: one forward, one backward, one Adam

A gate may keep a different number of rows for each member and step. The rows of a group are padded
to the next size in a short list (weight 0, so the gradient is exact), and only that many go through
forward and backward. Text members do not ask the device for a number: where a rate does not fix it,
all rows go through, with weight 0 for what is not kept, and the whole step is one CUDA graph.

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
from kondo_lab.training import diagnostics, draft_screens, frictions
from kondo_lab.training.arms import Arm
from kondo_lab.training.cuda_graphs import Captured
from kondo_lab.training.decisions import Decision, decide, loss
from kondo_lab.training.member import Member
from kondo_lab.training.optimiser import StackedAdam, equal_neighbours
from kondo_lab.training.programs import Program, Rolled, TextProgram
from kondo_lab.training.supervised import Start


class _Rule:
    """Neighbouring members with the same arm."""

    def __init__(self, population: "Population", members: slice):
        own = population.members[members]
        self.members, self.arm = members, own[0].arm
        self.gate = copy.deepcopy(self.arm.gate)
        self.draws = population.draws.part(members)
        # Views that follow the population.
        parameters = {name: value[members] for name, value in population.parameters.items()}
        self.screen = draft_screens.make(population.program, own, parameters)

    def decide(self, program: Program, rolled: Rolled, step: Tensor) -> Decision:
        """Choose the members' rows."""
        mine = of_members(rolled, self.members)
        return decide(program, self.arm, self.gate, mine, self.draws, step, screen=self.screen)


class _Group:
    """Rules whose rows have the same size."""

    def __init__(self, population: "Population", rules: list[_Rule]):
        self.rules, program = rules, population.program
        self.members = slice(rules[0].members.start, rules[-1].members.stop)
        self.size, _ = row_shape(rules[0].arm, program)
        # Leaves that share the population's memory: the sampler reads what Adam writes.
        self.leaves = {
            name: value[self.members].detach().requires_grad_()
            for name, value in population.parameters.items()
        }
        own = population.members[self.members]
        self.optimiser = StackedAdam(
            self.leaves,
            [member.learning_rate for member in own],
            decay_steps=[member.decay_steps for member in own],
            max_norm=program.max_norm,
        )
        fixed = [rule.arm.fixed_rows(program.num_rows, program.group) for rule in rules]
        self.varies = None in fixed and not program.is_text
        """Whether the number of kept rows must be asked for."""
        self.chooses = not rules[0].arm.trains_all_rows and (self.varies or None not in fixed)
        self.decisions: list[Decision] = []
        self.order: Tensor | None = None
        self._programs: dict[int, Captured] = {}

    def decide(self, program: Program, rolled: Rolled, step: Tensor) -> None:
        """Choose the rows of every rule."""
        self.decisions = [rule.decide(program, rolled, step) for rule in self.rules]
        orders = [decision.rows for decision in self.decisions if decision.rows is not None]
        self.order = torch.cat(orders) if self.chooses else None

    def train(self, population: "Population", num_rows: int) -> None:
        """Update on the first `num_rows` rows of every member, by a program of that size."""
        if num_rows not in self._programs:

            def update() -> None:
                self.update(population, num_rows)

            self._programs[num_rows] = Captured(update, population.device)
        self._programs[num_rows]()

    def forget_programs(self) -> None:
        """Drop captured programs: they write to the moments Adam had when they were recorded."""
        self._programs.clear()

    def gradients(
        self, population: "Population", num_rows: int, *, arm: Arm | None = None
    ) -> tuple[Tensor, ...]:
        """Return the gradient of the summed losses: one tensor [p, ...] per parameter.

        `arm` replaces the rules' own, e.g. by the exact gradient, on the same rows.
        """
        _, losses = self._losses(population, num_rows, arm)
        return torch.autograd.grad(losses.sum(), list(self.leaves.values()))

    def _losses(
        self, population: "Population", num_rows: int, arm: Arm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the group's rows, with their graph, and each member's loss."""
        program, missing = population.program, population.missing
        mine = of_members(population.rolled, self.members)
        rows = None if self.order is None else self.order[:, :num_rows]
        outputs = program.outputs(self.leaves, mine, rows)
        found = []
        for rule, decision in zip(self.rules, self.decisions, strict=True):
            start = rule.members.start - self.members.start
            own = slice(start, start + rule.members.stop - rule.members.start)
            experience = of_members(mine, own)
            of_rule, used = None if rows is None else rows[own], arm or rule.arm
            log_probs = program.taken(used, outputs[own], experience, of_rule)
            unknown = None if missing is None else missing[rule.members]
            found.append(
                loss(program, used, log_probs, experience, decision, of_rule, missing=unknown)
            )
        return outputs, torch.cat(found) if found[1:] else found[0]

    def update(self, population: "Population", num_rows: int) -> dict[str, Tensor]:
        """Move the members; return metric -> [p] of what was trained, where it is measured."""
        outputs, losses = self._losses(population, num_rows)
        leaves = list(self.leaves.values())
        program, step = population.program, population.step_number
        if not program.is_text:
            found = torch.autograd.grad(losses.sum(), leaves)
            self.optimiser.step(dict(zip(self.leaves, found, strict=True)), step)
            return {}
        by_token, *each = torch.autograd.grad(losses.sum(), [outputs, *leaves])
        norms = self.optimiser.step(dict(zip(self.leaves, each, strict=True)), step)
        assert norms is not None
        (decision,) = self.decisions
        rolled = of_members(population.rolled, self.members)
        rows = None if self.order is None else self.order[:, :num_rows]
        measured = diagnostics.of_decision(program, rolled, decision, by_token, rows)
        return measured | {"gradient norm": norms}

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
        start: weights of every member's seed; fresh ones by default.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.bandits import ImageBandit
        >>> from kondo_lab.training import arms
        >>> from kondo_lab.training.member import each_seed
        >>> from kondo_lab.training.population import Population
        >>> from kondo_lab.training.programs import BanditProgram
        >>> members = each_seed({"PG": arms.PG, "DG": arms.DG}, seeds=3, learning_rate=1e-3)
        >>> program = BanditProgram(ImageBandit.digits(), width=16, batch=10)
        >>> population = Population(program, members, device=torch.device("cpu"))
        >>> population.step()
        >>> population.num_steps
        1
    """

    def __init__(
        self,
        program: Program,
        members: Sequence[Member],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        start: Start | None = None,
    ):
        if not members:
            raise ValueError("members must not be empty; a population trains at least one.")
        self._check_queues(members)
        if isinstance(program, TextProgram):
            program.check_rows(len(members), device)
        self.program, self.device = program, device
        self.members = sorted(
            members,
            key=lambda member: (
                row_shape(member.arm, program),
                repr(member.arm.order),
                member.learning_rate,
            ),
        )
        seeds = [member.seed for member in self.members]
        self.draws = Draws(seeds, device)
        fresh = program.network.initialise(self.draws) if start is None else start.of(seeds)
        self.parameters: Parameters = {
            name: value.to(device, dtype).contiguous() for name, value in fresh.items()
        }
        self.actors = frictions.make(program, self.members, self.parameters)
        self.missing = None if self.actors is None else self.actors.missing
        self.groups = self._make_groups()
        self.num_steps = self.since_log = 0
        self.rolled: Rolled = {}
        self.step_number = torch.zeros((), dtype=torch.int64, device=device)
        """Of the step under way, counted from 1."""
        self._sums: dict[str, Tensor] = {}
        self._backward = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        self._busiest = torch.zeros(len(self.groups), dtype=torch.int64, device=device)
        self._varies = any(group.varies for group in self.groups)
        self._begin = Captured(self._begin_step, device)
        self._evaluate = program.evaluator(self.parameters, self.draws)

    def _check_queues(self, members: Sequence[Member]) -> None:
        if any(member.frictions.queue for member in members):
            raise ValueError(
                "members must have no queue: actors and learner take turns here; "
                "kondo_lab.training.asynchronous trains with one."
            )

    def _make_groups(self) -> list[_Group]:
        programs = [member.arm.program for member in self.members]
        rules: list[_Rule] = []
        for members, _ in equal_neighbours(programs):
            most = self.program.most_members(
                row_shape(self.members[members.start].arm, self.program)[0]
            )
            size = members.stop - members.start if most is None else most
            rules += [
                _Rule(self, slice(first, min(first + size, members.stop)))
                for first in range(members.start, members.stop, size)
            ]
        if self.program.is_text:  # as many as fit into one forward: a group each
            return [_Group(self, [rule]) for rule in rules]
        shapes = [row_shape(rule.arm, self.program) for rule in rules]
        return [_Group(self, rules[some]) for some, _ in equal_neighbours(shapes)]

    @property
    def shown(self) -> str:
        """Metric that progress shows."""
        return self.program.shown

    @property
    def overlaps(self) -> bool:
        """Whether it gets a stream of its own on a GPU; a step of text fills the device."""
        return not self.program.is_text

    @property
    def num_rows(self) -> int:
        """Samples of a step and member."""
        return self.program.num_rows

    def step(self) -> None:
        """Make one update of every member."""
        self.begin_step()
        self.end_step()

    def begin_step(self) -> None:
        """Do what needs no answer from the device: on a GPU this only queues the work."""
        self._begin()

    def end_step(self) -> None:
        """Update on the kept rows, where their number had to be asked for."""
        if self._varies:
            busiest = self._busiest.tolist()
            for group, kept in zip(self.groups, busiest, strict=True):
                group.train(self, group.num_rows(kept, self.program.num_rows))
        self.num_steps += 1
        self.since_log += 1

    def _begin_step(self) -> None:
        self.step_number.add_(1)
        self.roll(self.step_number)
        if self._varies:
            self._count({"online error": self._error()}, [])
            for number, group in enumerate(self.groups):
                most = [decision.kept.max() for decision in group.decisions]
                self._busiest[number].copy_(torch.stack(most).max() if most[1:] else most[0])
        else:
            self.learn()

    def experience(self, parameters: Parameters, step: Tensor) -> Rolled:
        """Return the experience of `step`, of actors who get these parameters."""
        if self.actors is not None:
            return self.actors(parameters, self.draws, step)
        rolled = self.program.act(parameters, self.draws, step)
        return rolled | {"rewards": self.program.pay(rolled)}

    def roll(self, step: Tensor) -> None:
        """Draw the experience of `step` and let every group decide on it."""
        self.rolled = self.experience(self.parameters, step)
        for group in self.groups:
            group.decide(self.program, self.rolled, step)

    def learn(self) -> None:
        """Update every member on what was decided."""
        of_groups = [group.update(self, group.size) for group in self.groups]
        if not self.program.is_text:
            self._count({"online error": self._error()}, of_groups)
            return
        group = self.program.group
        found = diagnostics.of_experience(self.rolled, group)
        found |= diagnostics.of_delight(self.rolled, group)
        found["tokens generated"] = self.rolled["mask"].sum(dim=(1, 2))
        self._count(found, of_groups)

    def _error(self) -> Tensor:
        return 1 - self.rolled["rewards"].flatten(1).double().mean(dim=1)

    def _count(self, found: dict[str, Tensor], of_groups: list[dict[str, Tensor]]) -> None:
        """Add to the sums of all metrics, and the rows that were paid for."""
        for name in of_groups[0] if of_groups else ():
            found[name] = torch.cat([own[name] for own in of_groups])
        for name, value in found.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(value, dtype=torch.float64)
            self._sums[name].add_(value)
        for group in self.groups:
            for rule, decision in zip(group.rules, group.decisions, strict=True):
                self._backward[rule.members].add_(decision.kept)

    @contextmanager
    def aside(self, step: Tensor) -> Iterator[None]:
        """Roll and decide on the experience of `step` inside; put this step's own back after.

        Captured programs read this step's experience where it lies, so it must not be lost. A
        rolling gate remembers what it decides on, hence cannot look aside.
        """
        gates = [rule.gate for rule in self._rules if rule.gate is not None]
        rolling = any(adapters.adapter_of(gate).remembers for gate in gates)
        drafted = any(rule.screen is not None for rule in self._rules)
        stale = self.actors is not None and self.actors.past is not None
        for has_it, what, who in (
            (rolling, "a rolling gate", "it remembers"),
            (drafted, "a draft screen", "it remembers"),
            (stale, "stale actors", "they remember"),
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

    def read(self) -> dict[str, list[float]]:
        """Return metric -> one number per member: means since the last call, and totals."""
        values = {}
        for name, total in self._sums.items():
            if name in diagnostics.TOTALS:
                values[name] = total.tolist()
            else:
                values[name] = (total / self.since_log).tolist()
                total.zero_()
        self.since_log = 0
        return values

    def evaluate(self) -> dict[str, Tensor]:
        """Return held-out metric -> [P]."""
        return self._evaluate()

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
            "counters": [self.step_number, self._backward],
            "sums": self._sums,
            "optimisers": [group.optimiser.state_dict() for group in self.groups],
            "gates": [rule.gate.state_dict() if rule.gate else {} for rule in self._rules],
            "screens": [rule.screen.state_dict() if rule.screen else None for rule in self._rules],
            "actors": None if self.actors is None else self.actors.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for the same program and members."""
        self.num_steps, self.since_log = state["num_steps"], state["since_log"]
        for name, value in self.parameters.items():
            value.copy_(state["parameters"][name])
        for own, saved in zip((self.step_number, self._backward), state["counters"], strict=True):
            own.copy_(saved)
        self._sums = {name: value.clone() for name, value in state["sums"].items()}
        for group, adam in zip(self.groups, state["optimisers"], strict=True):
            group.optimiser.load_state_dict(adam)
            group.forget_programs()
        self._begin = Captured(self._begin_step, self.device)
        for rule, gate, screen in zip(self._rules, state["gates"], state["screens"], strict=True):
            if rule.gate is not None:
                rule.gate.load_state_dict(gate)
            if rule.screen is not None:
                rule.screen.load_state_dict(screen)
        if self.actors is not None:
            self.actors.load_state_dict(state["actors"])

    @property
    def _rules(self) -> list[_Rule]:
        return [rule for group in self.groups for rule in group.rules]


def of_members(rolled: Rolled, members: slice) -> Rolled:
    """Return the experience of some members; of all of them as it is."""
    if members == slice(0, len(rolled["log_probs"])):
        return rolled
    return {name: value[members] for name, value in rolled.items()}


def row_shape(arm: Arm, program: Program) -> tuple[int, bool]:
    """Return how many rows an arm trains on at least, and whether it chooses them.

    Groups are made by it. A gate with rate 1 trains on all rows too, but in an order of its own.
    """
    num_rows = program.num_rows
    if arm.trains_all_rows:
        return num_rows, False
    fixed = arm.fixed_rows(num_rows, program.group)
    if fixed is not None or program.is_text:
        return (num_rows if fixed is None else fixed), fixed is not None
    rate = getattr(arm.gate, "rate", None)
    return (1 if rate is None else sampling.count_for(rate, num_rows)), True
