"""One model end to end through the product, with clocks: sample, pay, learn, step.

    generate   prompts and completions, with the log-probs they were drawn with
    reward     of every completion
    learn      screen, select, train: see `updates`
    optimiser  norm, clip, Adam

At the end of each stage the clock waits for the device. The learner's seconds are those after the
reward, bookkeeping included. `kondo_lab.training.run.train` makes the steps.
"""

import statistics
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kondo import lm
from kondo_lab.models.networks import Parameters
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import diagnostics
from kondo_lab.training.cuda_graphs import Captured
from kondo_lab.training.member import Member
from kondo_lab.training.programs import Rolled, TextProgram
from kondo_lab.training.timed_step import (
    LEARNER,
    LOOP,
    Clock,
    Learned,
    plain_backward,
    product_backward,
)

WARM_UP_CALLS = 5
"""Of each stage before the first step: graphs are recorded and kernels chosen there."""
GRAPH_TOKENS = 16_384
"""On a GPU, packs of at most so many tokens are replayed from CUDA graphs. Larger ones take longer
to compute than to launch, and would have to be recorded again wherever their number of tokens
changes from step to step."""

Path = Literal["product", "plain", "filtered"]
"""By kondo, or without it: all rows, or those with a weight and an advantage."""
PLAIN = " plain"
"""Behind a dense arm's name: the same update as somebody without a gate would write it."""


class Step(NamedTuple):
    """One step's numbers."""

    seconds: dict[str, float]
    """Of every stage, of the learner and of the loop."""
    learned: Learned
    means: dict[str, float]
    """What describes the experience and the gradient, by metric."""


class Learner:
    """One model, its sampler, its arm and its optimiser.

    Where nothing was kept Adam steps with a gradient of 0, as a population's member does: its
    moments decay and move on.

    Args:
        program: task, model, and how much is sampled.
        parameters: of one member, [1, ...]; trained in place.
        member: whose run it is. A learning rate of 0 does all the work and changes nothing, to
            measure seconds.
        path: by `timed_step.product_backward` or `plain_backward`; it and the arm may be exchanged
            between steps.
        compiled: compile the layers in place.
    """

    shown = "held-out reward"
    overlaps = False

    def __init__(
        self,
        program: TextProgram,
        parameters: Parameters,
        member: Member,
        *,
        path: Path = "product",
        compiled: bool = False,
    ):
        given = parameters["head"].shape[0]
        if given != 1:
            raise ValueError(
                f"parameters must be those of one member, [1, ...], got {given} members; "
                f"kondo_lab.training.population trains several."
            )
        _check_member(member)
        self.program, self.members = program, [member]
        self.arm, self.path = member.arm, path
        self.device = parameters["head"].device
        self.draws = Draws([member.seed], self.device)
        self.module = program.network.as_module(parameters, 0)
        if compiled:
            for layer in self.module.backbone.layers:
                layer.compile(dynamic=True)
        on_gpu = self.device.type == "cuda"
        self.policy = lm.CausalLM(
            self.module.backbone,
            head=self.module.head,
            max_tokens=program.shape.max_tokens,
            attention="varlen" if on_gpu else "auto",
            graph_tokens=GRAPH_TOKENS if on_gpu else 0,
        )
        self.optimiser = torch.optim.Adam(
            self.module.parameters(), lr=member.learning_rate, fused=True
        )
        self.num_steps, self.is_warm = 0, False
        self.totals: dict[str, float] = {}
        """Of all steps, by metric."""
        self._recent: list[dict[str, float]] = []
        self._parameters = parameters
        self._step = torch.zeros((), dtype=torch.int64, device=self.device)
        self._rolled: Rolled = {}
        self._generate = Captured(self._sample, self.device)
        self._pay = Captured(self._reward, self.device)
        self._held_out = program.evaluator(parameters, self.draws)

    @property
    def num_rows(self) -> int:
        """N, completions of a step."""
        return self.program.num_rows

    def _sample(self) -> None:
        """Draw what a population's member of this seed would draw."""
        self._rolled = self.program.act(self._parameters, self.draws, self._step)

    def _reward(self) -> None:
        self._rolled["rewards"] = self.program.pay(self._rolled)

    def restart(self, parameters: Parameters, member: Member) -> None:
        """Begin another run of the same arm: other weights, seed or learning rate.

        All of it is written in place, so that what was recorded for the first run serves this one.

        Args:
            parameters: of one member, [1, ...], where the run starts.
            member: whose run it is.
        """
        if member.arm != self.arm:
            raise ValueError(
                f"member must have the learner's arm, {self.arm.name!r}, got "
                f"{member.arm.name!r}; make another Learner."
            )
        _check_member(member)
        for name, value in self._parameters.items():
            value.copy_(parameters[name])
        self.draws.restart([member.seed])
        self.optimiser.state.clear()
        for group in self.optimiser.param_groups:
            group["lr"] = member.learning_rate
        self.members, self.num_steps, self.totals, self._recent = [member], 0, {}, []

    def evaluate(self) -> dict[str, Tensor]:
        """Return metric -> [1]: mean rewards on held-out prompts, the same ones every time."""
        return self._held_out()

    def begin_step(self) -> None:
        """Make the step, after a warm-up before the first."""
        if not self.is_warm:
            self.warm_up()
        self.step()

    def end_step(self) -> None:
        """Do nothing."""

    def step(self) -> Step:
        """Make one step, and add it to the totals."""
        clock = Clock(self.device)
        with clock.stage(LOOP):
            with clock.stage("generate"):
                self._step.fill_(self.num_steps + 1)  # steps are counted from 1
                self._generate()
            with clock.stage("reward"):
                self._pay()
            with clock.stage(LEARNER):
                learned = self._backward()
                with clock.stage("optimiser"):
                    norm = self._update(learned)
        self.num_steps += 1
        done = Step(clock.seconds | learned.seconds, learned, self._means(learned, norm))
        self._count(done)
        return done

    def warm_up(self) -> None:
        """Run every stage a few times and leave no trace: graphs are recorded, kernels chosen."""
        self._step.fill_(self.num_steps + 1)
        for _ in range(WARM_UP_CALLS):
            self._generate()
            self._pay()
            self._backward()
            self._held_out()  # recording empties the allocator's cache: not between timed steps
        self.optimiser.zero_grad()
        self.is_warm = True

    def _backward(self) -> Learned:
        self.optimiser.zero_grad()
        inputs = self.program, self._rolled, self.draws, self.num_steps + 1
        if self.path == "product":
            return product_backward(self.arm, self.policy, *inputs)
        most, filtered = self.program.shape.max_tokens, self.path == "filtered"
        return plain_backward(self.arm, self.module, *inputs, max_tokens=most, filtered=filtered)

    def _update(self, learned: Learned) -> float:
        """Clip and step; return the norm before."""
        if not learned.kept:
            for parameter in self.module.parameters():
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.program.max_norm)
        self.optimiser.step()
        return float(norm)

    def _means(self, learned: Learned, norm: float) -> dict[str, float]:
        numbers = diagnostics.of_experience(self._rolled, self.program.group)
        read = torch.cat([number.double() for number in numbers.values()]).tolist()
        return dict(zip(numbers, read, strict=True)) | {
            "kept rows": learned.rows,
            "kept tokens": learned.kept,
            "gradient norm": norm,
        }

    def _count(self, done: Step) -> None:
        generated = done.means["completion length"] * self.num_rows
        numbers = {f"seconds {name}": spent for name, spent in done.seconds.items()} | {
            "tokens generated": round(generated),
            "tokens differentiated": done.learned.tokens,
            "rows differentiated": done.learned.rows,
            "empty steps": done.learned.kept == 0,
        }
        for name, number in numbers.items():
            self.totals[name] = self.totals.get(name, 0.0) + number
        self._recent.append(done.means)

    def read(self) -> dict[str, list[float]]:
        """Return metric -> [1]: seconds and counts of all steps, means since the last call.

        What evaluation, logging and the warm-up take is in no number of seconds.
        """
        recent, self._recent = self._recent, []
        means = {name: statistics.fmean(each[name] for each in recent) for name in recent[0]}
        return {name: [value] for name, value in (self.totals | means).items()}

    def read_backward(self) -> list[int]:
        """Return the rows that a backward pass was paid for."""
        return [int(self.totals.get("rows differentiated", 0))]

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, loadable with weights_only=True."""
        return {
            "num_steps": self.num_steps,
            "totals": dict(self.totals),
            "recent": self._recent,
            "module": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for the same model."""
        self.num_steps, self.totals = state["num_steps"], dict(state["totals"])
        self._recent = list(state["recent"])
        self.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])


def _check_member(member: Member) -> None:
    """Raise a ValueError for what only populations do."""
    if not member.frictions.is_none:
        raise ValueError(
            f"member must have no friction, got {member.frictions}; "
            f"kondo_lab.training.population trains with frictions."
        )
    if member.decay_steps:
        raise ValueError(
            f"member must have decay_steps=0, got {member.decay_steps}; "
            f"kondo_lab.training.population decays learning rates."
        )
