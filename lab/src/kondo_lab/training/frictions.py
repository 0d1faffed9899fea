"""Frictions: experience that the learner's own policy did not draw, or that was paid wrongly.

    act       with parameters of some steps ago                     [delay]
    replace   some rows by the right answer, a random one, zeros    [discovery, random, bug]
    pay       and replace some rewards by a coin                    [corruption]
    judge     log-probs of what was done, under the learner

What the actor reported is kept as `behaviour`, for the losses that correct by it; delight is of the
learner. `bug`, [P, N], tells the bugs' rows. Members without frictions keep what they acted with.

All that changes lives in tensors that stay where they are, and no value is read back, so that a
step can be captured in a CUDA graph.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kondo_lab.models.networks import Parameters
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.member import Frictions, Member
from kondo_lab.training.programs import Program, Rolled

KINDS = ("discovery", "random", "bug")
"""Replaced rows, the first that hits counts."""


def make(program: Program, members: Sequence[Member], parameters: Parameters) -> "Actors | None":
    """Return who acts for the members; None where all of them act themselves.

    `parameters` are fresh: what stale actors begin with.
    """
    frictions = [member.frictions for member in members]
    if all(friction == Frictions() for friction in frictions):
        return None
    return Actors(program, frictions, parameters)


class Actors:
    """The actors of P members, each with its own frictions."""

    def __init__(
        self, program: Program, frictions: Sequence[Frictions], parameters: Parameters
    ) -> None:
        device = next(iter(parameters.values())).device
        self._program = program
        self._kinds = {
            kind: torch.tensor([[getattr(f, kind)] for f in frictions], device=device)
            for kind in KINDS
            if any(getattr(f, kind) > 0 for f in frictions)
        }
        self._corruption = None
        if any(f.corruption > 0 for f in frictions):
            self._corruption = torch.tensor([[f.corruption] for f in frictions], device=device)
        told = [1.0 if f.reported is None else f.reported for f in frictions]
        self._reported = torch.tensor([[[math.log(each)]] for each in told], device=device)
        self._honest = None
        """[P, 1, 1], whose replaced rows report what the acting policy says of them."""
        if self._kinds and any(f.reported is None for f in frictions):
            self._honest = torch.tensor([[[f.reported is None]] for f in frictions], device=device)
        self._foreign = torch.tensor([[[f.foreign]] for f in frictions], device=device)
        self._any_foreign = any(f.foreign for f in frictions)
        self.past = None
        """What stale actors remember."""
        if any(f.delay > 0 for f in frictions):
            self.past = Snapshots(parameters, frictions)

    @torch.no_grad()
    def __call__(self, parameters: Parameters, draws: Draws, step: Tensor) -> Rolled:
        """Return the experience of `step`, for the learners of these parameters."""
        acting = parameters if self.past is None else self.past(parameters, draws, step)
        rolled = self._program.act(acting, draws, step)
        rolled = self._replace_rows(acting, rolled, draws, step)
        rewards = self._replace_rewards(self._program.pay(rolled), draws, step)
        return self._judge(parameters, rolled) | {"rewards": rewards}

    def _replace_rows(
        self, acting: Parameters, rolled: Rolled, draws: Draws, step: Tensor
    ) -> Rolled:
        """Put the right answer, a random one or zeros in place of some."""
        if not self._kinds:
            return rolled
        program, log_probs = self._program, rolled["log_probs"]
        sampled = program.actions(rolled)
        actions = sampled
        replaced = torch.zeros(sampled.shape[:2], dtype=torch.bool, device=sampled.device)
        bug = replaced
        for kind in reversed(self._kinds):  # what comes first is written last
            hit = draws.uniform(f"friction/{kind}", step, sampled.shape[1]) < self._kinds[kind]
            new = self._rows(kind, rolled, draws, step)
            actions = torch.where(hit.unsqueeze(2), new, actions)
            replaced = replaced | hit
            bug = hit if kind == "bug" else bug & ~hit
        rolled = program.with_actions(rolled, actions) | {"bug": bug}
        reported = self._reported.to(log_probs.dtype)
        if self._honest is not None:
            own = program.judge(acting, rolled)["log_probs"]
            reported = torch.where(self._honest, own, reported)
        told = torch.where(replaced.unsqueeze(2), reported, log_probs)
        return rolled | {"log_probs": told}

    def _rows(self, kind: str, rolled: Rolled, draws: Draws, step: Tensor) -> Tensor:
        program = self._program
        sampled = program.actions(rolled)
        if kind == "discovery":
            return program.right(rolled)
        if kind == "random":
            shape = sampled.shape[1:]
            return draws.integers("friction/random answers", step, program.num_choices, *shape)
        return torch.zeros_like(sampled)

    def _replace_rewards(self, rewards: Tensor, draws: Draws, step: Tensor) -> Tensor:
        """Toss a coin in place of some rewards [P, ...]."""
        if self._corruption is None:
            return rewards
        flat = rewards.flatten(1)
        wrong = draws.uniform("friction/corruption", step, flat.shape[1]) < self._corruption
        coin = draws.integers("friction/coin", step, 2, flat.shape[1]).to(flat.dtype)
        return torch.where(wrong, coin, flat).view_as(rewards)

    def _judge(self, parameters: Parameters, rolled: Rolled) -> Rolled:
        """Keep what the actors reported, and say what the learners think of it."""
        if not self._any_foreign:
            return rolled
        judged = self._program.judge(parameters, rolled)
        own = {
            name: torch.where(self._foreign, value, rolled[name]) for name, value in judged.items()
        }
        return rolled | own | {"behaviour": rolled["log_probs"]}


class Snapshots:
    """Parameters of the last D + 1 steps of every member, D its own delay.

    One ring per parameter holds the slots of all members one after another, [sum(D + 1), ...]: a
    member that is never stale takes one slot, whatever the other members need. Before a member has
    made D steps, its older slots hold what it began with.
    """

    def __init__(self, parameters: Parameters, frictions: Sequence[Frictions]):
        device = next(iter(parameters.values())).device
        sizes = [f.delay + 1 for f in frictions]
        self._sizes = torch.tensor(sizes, device=device)
        self._first = self._sizes.cumsum(0) - self._sizes
        self._uniform = torch.tensor([f.uniform_delay for f in frictions], device=device)
        self.rings = {
            name: value.repeat_interleave(self._sizes, dim=0) for name, value in parameters.items()
        }

    def __call__(self, parameters: Parameters, draws: Draws, step: Tensor) -> Parameters:
        """Remember the parameters, and return those to act with at `step`, counted from 1."""
        made = step - 1
        # In float64: float32 would round the largest draw times a size up to the size itself.
        drawn = (draws.uniform("friction/age", step).double() * self._sizes).long()
        age = torch.where(self._uniform, drawn, self._sizes - 1)
        to_write = self._first + made % self._sizes
        to_read = self._first + (made - age) % self._sizes
        for name, ring in self.rings.items():
            ring.index_copy_(0, to_write, parameters[name])
        return {name: ring.index_select(0, to_read) for name, ring in self.rings.items()}
