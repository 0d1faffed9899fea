"""Frictions: experience that the learner's own policy did not draw, or that was paid wrongly.

    weights -> acting weights      [delay, refresh, bits]      -> act      [temperature]
            -> replaced rows       [broken, bug, random, discovery]
            -> reported log-probs  [noisy, one]                -> pay, corrupted rewards
            -> judge: log-probs of what was done, under the learner, where the program asks for it

What the actors reported is then kept as `behaviour`, for the losses that correct by it; delight is
of the learner. `bug`, [P, N], tells the bugs' rows. A strength of 0 changes no bit of a member,
whatever the others have.

All that changes lives in tensors that stay where they are, and no value is read back, so that a
step can be captured in a CUDA graph.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kondo_lab.models.networks import Parameters
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.member import Frictions, Member
from kondo_lab.training.optimiser import beside
from kondo_lab.training.programs import Program, Rolled

KINDS = ("discovery", "random", "bug")
"""Replaced rows, the first that hits counts."""
RING_BYTES = 64 * 2**30
"""Most memory of past weights of one population."""
_UNQUANTISED = ("tokens", "positions", "head")


def make(program: Program, members: Sequence[Member], parameters: Parameters) -> "Actors | None":
    """Return who acts for the members; None where all of them act themselves.

    `parameters` are fresh: what stale actors begin with.
    """
    frictions = [member.frictions for member in members]
    if all(each.is_none for each in frictions):
        return None
    return Actors(program, frictions, parameters)


class Actors:
    """The actors of P members, each with its own frictions."""

    def __init__(
        self, program: Program, frictions: Sequence[Frictions], parameters: Parameters
    ) -> None:
        some = next(iter(parameters.values()))
        device, dtype = some.device, some.dtype
        self._program = program

        def strengths(name: str, neutral: float = 0, kind: torch.dtype | None = None) -> Any:
            """Return [P, 1], or None where nobody has this friction."""
            values = [[getattr(each, name)] for each in frictions]
            if all(value == [neutral] for value in values):
                return None
            return torch.tensor(values, dtype=kind, device=device)

        def where(flags: Sequence[bool]) -> Tensor | None:
            """Return [P, 1, 1], or None where nobody is meant."""
            return torch.tensor(flags, device=device).view(-1, 1, 1) if any(flags) else None

        self._kinds = {kind: own for kind in KINDS if (own := strengths(kind)) is not None}
        self._broken = strengths("broken")
        self._rewards = {name: strengths(name) for name in ("corruption", "flipped", "biased")}
        told = [1.0 if f.replaced is None else f.replaced for f in frictions]
        self._replaced = torch.tensor([[[math.log(each)]] for each in told], device=device)
        self._honest = where([f.replaced is None for f in frictions]) if self._kinds else None
        """[P, 1, 1], whose replaced rows report what the acting policy says of them."""
        self._judged = where([f.foreign or not f.reports_truly for f in frictions])
        """[P, 1, 1], whose log-probs are not those that the learner would report."""
        self._noise = strengths("noise", kind=dtype)
        self._one = where([f.reported == "one" for f in frictions])
        missing = where([f.reported == "missing" for f in frictions])
        self.missing = None if missing is None else missing.flatten()
        """bool [P]: no log-probs are reported; None where all are."""
        self._temperature = strengths("temperature", 1.0, dtype)
        levels = [float(2 ** (f.bits - 1) - 1) if f.bits else 0.0 for f in frictions]
        self._levels = torch.tensor(levels, dtype=dtype, device=device) if any(levels) else None
        self._refresh = strengths("refresh", 1)
        self._stale: Parameters = {}
        if self._refresh is not None:
            self._stale = {name: value.clone() for name, value in parameters.items()}
        self.past = None
        """What actors with a delay remember."""
        if any(f.delay > 0 for f in frictions):
            self.past = Snapshots(parameters, frictions)

    @torch.no_grad()
    def __call__(self, parameters: Parameters, draws: Draws, step: Tensor) -> Rolled:
        """Return the experience of `step`, counted from 1, for learners of these parameters."""
        program, acting = self._program, self.acting(parameters, draws, step)
        rolled = program.act(acting, draws, step, temperature=self._temperature)
        rolled = self._break_rows(rolled, draws, step)
        rolled = self._replace_rows(acting, rolled, draws, step)
        rolled = self._report(rolled, draws, step)
        rewards = self._corrupt(program.pay(rolled), draws, step)
        return self._judge(parameters, rolled) | {"rewards": rewards}

    def acting(self, parameters: Parameters, draws: Draws, step: Tensor) -> Parameters:
        """Return the weights that act at `step`, given the learners'."""
        if self._refresh is not None:
            fresh = (step - 1) % self._refresh == 0
            for name, own in self._stale.items():
                own.copy_(torch.where(beside(fresh, own), parameters[name], own))
            parameters = self._stale
        if self.past is not None:
            parameters = self.past(parameters, draws, step)
        if self._levels is None:
            return parameters
        return {
            name: value if name in _UNQUANTISED else rounded(value, self._levels)
            for name, value in parameters.items()
        }

    def _break_rows(self, rolled: Rolled, draws: Draws, step: Tensor) -> Rolled:
        """Put a broken answer in place of some."""
        if self._broken is None:
            return rolled
        hit = draws.uniform("friction broken", step, self._program.num_rows) < self._broken
        return self._program.broken(rolled, hit, draws, step)

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
        rolled = program.with_actions(rolled, actions, replaced) | {"bug": bug}
        reported = self._replaced.to(log_probs.dtype)
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

    def _report(self, rolled: Rolled, draws: Draws, step: Tensor) -> Rolled:
        """Return what the learner gets to know of the actors' log-probs."""
        log_probs = rolled["log_probs"]
        if self._noise is not None:
            drawn = draws.normal("reported", step, *log_probs.shape[1:]).to(log_probs.dtype)
            noisy = log_probs + drawn * self._noise.unsqueeze(2)
            # Not "+ 0 * noise" for the others: a log-prob of -0 would change its sign.
            log_probs = torch.where(self._noise.unsqueeze(2) > 0, noisy, log_probs)
        if self._one is not None:
            log_probs = torch.where(self._one, 0.0, log_probs)
        if "mask" in rolled:
            log_probs = torch.where(rolled["mask"], log_probs, 0.0)
        return rolled | {"log_probs": log_probs}

    def _corrupt(self, rewards: Tensor, draws: Draws, step: Tensor) -> Tensor:
        """Return the rewards [P, ...] that the learner gets."""
        flat = rewards.flatten(1)
        for name, share in self._rewards.items():
            if share is None:
                continue
            if name == "corruption":
                hit = draws.uniform("friction/corruption", step, flat.shape[1]) < share
                wrong = draws.integers("friction/coin", step, 2, flat.shape[1]).to(flat.dtype)
            else:
                hit = draws.uniform(f"friction {name}", step, flat.shape[1]) < share
                wrong = 1 - flat if name == "flipped" else torch.ones_like(flat)
            flat = torch.where(hit, wrong, flat)
        return flat.view_as(rewards)

    def _judge(self, parameters: Parameters, rolled: Rolled) -> Rolled:
        """Keep what the actors reported, and say what the learners think of it."""
        if self._judged is None or not self._program.judges:
            return rolled
        judged = self._program.judge(parameters, rolled)
        own = {
            name: torch.where(self._judged, value, rolled[name]) for name, value in judged.items()
        }
        return rolled | own | {"behaviour": rolled["log_probs"]}

    def state_dict(self) -> dict[str, Parameters]:
        """Return what the next step depends on: weights that actors have or may still get."""
        return {"stale": self._stale, "past": {} if self.past is None else self.past.rings}

    def load_state_dict(self, state: dict[str, Parameters]) -> None:
        """Restore, in place, what `state_dict` returned."""
        for kind, own in self.state_dict().items():
            for name, value in own.items():
                value.copy_(state[kind][name])


class Snapshots:
    """Parameters of the last D + 1 steps of every member, D its own delay.

    One ring per parameter holds the slots of all members one after another, [sum(D + 1), ...]: a
    member that is never stale takes one slot, whatever the other members need. Before a member has
    made D steps, its older slots hold what it began with.
    """

    def __init__(self, parameters: Parameters, frictions: Sequence[Frictions]):
        device = next(iter(parameters.values())).device
        sizes = [f.delay + 1 for f in frictions]
        needed = sum(value[0].nbytes for value in parameters.values()) * sum(sizes)
        if needed > RING_BYTES:
            raise ValueError(
                f"delay must be so short that {sum(sizes)} versions of the weights of "
                f"{len(sizes)} members fit {RING_BYTES / 2**30:.0f} GiB, got "
                f"{needed / 2**30:.1f} GiB; train fewer of them in one population."
            )
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


def rounded(weights: Tensor, levels: Tensor) -> Tensor:
    """Return weights [P, in, out] as integers up to `levels` [P], times one scale per output.

    scale = max |w| / levels,  w -> round(w / scale) * scale;  levels of 0 leave w. Integers of b
    bits have 2^(b - 1) - 1 levels.

    Example:
        >>> import torch
        >>> from kondo_lab.training.frictions import rounded
        >>> rounded(torch.tensor([[[3.0], [0.9]]]), torch.tensor([3.0]))
        tensor([[[3.],
                 [1.]]])
    """
    highest = weights.abs().amax(dim=-2, keepdim=True)
    scale = highest / beside(levels, weights).clamp(min=1)
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.where(beside(levels > 0, weights), (weights / scale).round() * scale, weights)
