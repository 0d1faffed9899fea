"""Draft screens: cheap stand-ins for the policy, whose log-probs a gate decides by.

    stale       the policy's parameters as they were some steps ago
    quantised   its parameters of now, rounded to a few bits
    narrow      a narrower network that learns the policy's action probabilities as it goes

A draft gives the gate its surprisal, and of bandits the baseline sum_a pi(a)^2 (`Arm.screened` says
whether it counts). Beside them stands the exact screen of text: a forward of the learners, which
its samplers do not save. Kept rows are trained by the policy itself, with its own advantages, so a
bad draft costs good rows, never a wrong gradient.

All that changes lives in tensors that stay where they are, and no value is read back, so that a
step can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kondo_lab.models.networks import Parameters, StackedMLP
from kondo_lab.tasks.draws import Draws
from kondo_lab.training.member import Member
from kondo_lab.training.optimiser import beside
from kondo_lab.training.programs import BanditProgram, Program, Rolled

DRAFT_LEARNING_RATE = 1e-3
"""Of a narrow draft's Adam."""
DRAFT_SEED = 1_000_003
"""Added to a member's seed: a draft must not begin as a part of the policy's own weights."""


def make(
    program: Program, members: Sequence[Member], parameters: Parameters
) -> "Exact | Narrow | None":
    """Return the screen of members that share an arm's program; None where log-probs are there.

    It is a `decisions.Screen`: it gives the log-probs of what the policy sampled, and learns if the
    draft does. `parameters` are views that follow the policy.
    """
    arm = members[0].arm
    numbers = [member.arm.draft for member in members]
    match arm.screen:
        case "exact" | "free" if arm.gate is None:
            return None
        case "exact":
            return None if program.judges else Exact(program, parameters)
        case "free":
            if program.judges:
                raise ValueError(
                    f"screen must be exact for {type(program).__name__}, whose log-probs are the "
                    f"learner's, got free."
                )
            return None
        case "stale":
            return Stale(program, parameters, periods=numbers)
        case "quantised":
            return Quantised(program, parameters, bits=numbers)
        case "narrow":
            seeds = [member.seed for member in members]
            return Narrow(program, parameters, width=arm.draft, seeds=seeds)


class Exact:
    """The policy itself, in a forward of its own."""

    def __init__(self, program: Program, parameters: Parameters):
        self._program, self._parameters = program, parameters

    def __call__(self, rolled: Rolled, step: Tensor) -> Rolled:
        """Return what the policy says now."""
        return self._program.judge(self._parameters, rolled)

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


class Stale(Exact):
    """The policy as it was when last copied: at step 1 and every `period` steps after it."""

    def __init__(self, program: Program, parameters: Parameters, *, periods: Sequence[int]):
        super().__init__(program, parameters)
        self._periods = _per_member(periods, parameters)
        self._copy = {name: value.clone() for name, value in parameters.items()}

    @torch.no_grad()
    def __call__(self, rolled: Rolled, step: Tensor) -> Rolled:
        """Return what the copy says, renewed where it is due."""
        due = (step - 1) % self._periods == 0
        for name, old in self._copy.items():
            old.copy_(torch.where(beside(due, old), self._parameters[name], old))
        return self._program.judge(self._copy, rolled)

    def state_dict(self) -> dict[str, Any]:
        """Return the copy."""
        return {"copy": self._copy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the copy."""
        for name, value in self._copy.items():
            value.copy_(state["copy"][name])


class Quantised(Exact):
    """The policy with every parameter rounded to a few bits, anew at each step."""

    def __init__(self, program: Program, parameters: Parameters, *, bits: Sequence[int]):
        super().__init__(program, parameters)
        self._bits = _per_member(bits, parameters)

    @torch.no_grad()
    def __call__(self, rolled: Rolled, step: Tensor) -> Rolled:
        """Return what the rounded parameters say."""
        rounded = {name: quantise(value, self._bits) for name, value in self._parameters.items()}
        return self._program.judge(rounded, rolled)


class Narrow:
    """The policy's network with fewer hidden units, distilled on the images of every step.

        loss = -sum_a pi(a) log q(a), mean over the batch

    It screens a batch before it learns from it. Bandits alone: they keep the whole distribution.
    """

    def __init__(
        self, program: Program, parameters: Parameters, *, width: int, seeds: Sequence[int]
    ):
        if not isinstance(program, BanditProgram):
            raise ValueError(
                f"screen must be exact, stale or quantised for {type(program).__name__}, got "
                "narrow, which learns from the action distributions that bandits keep."
            )
        like = next(iter(parameters.values()))
        task = program.task
        self._network = StackedMLP(
            task.num_inputs,
            task.num_actions,
            width=width,
            initialisation=program.network.initialisation,
        )
        fresh = self._network.initialise(Draws([DRAFT_SEED + s for s in seeds], like.device))
        self._leaves = {name: value.to(like).requires_grad_() for name, value in fresh.items()}
        self._optimiser = torch.optim.Adam(
            list(self._leaves.values()),
            lr=DRAFT_LEARNING_RATE,
            fused=True,
            capturable=like.device.type == "cuda",
        )

    def __call__(self, rolled: Rolled, step: Tensor) -> Rolled:
        """Return what the draft says, then let it learn."""
        inputs, target = rolled["inputs"], rolled["distribution"].exp()
        outputs = self._network.logits(self._leaves, inputs).log_softmax(dim=-1)
        # A sum over members: each gets the gradient of its own mean alone.
        loss = -(target * outputs).sum() / inputs.shape[1]
        gradients = torch.autograd.grad(loss, list(self._leaves.values()))
        for leaf, gradient in zip(self._leaves.values(), gradients, strict=True):
            leaf.grad = gradient
        self._optimiser.step()
        said = outputs.detach()
        return {"distribution": said, "log_probs": said.gather(2, rolled["actions"])}

    def state_dict(self) -> dict[str, Any]:
        """Return its weights and Adam's moments."""
        weights = {name: leaf.detach() for name, leaf in self._leaves.items()}
        return {"weights": weights, "optimiser": self._optimiser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore its weights and Adam's moments."""
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                leaf.copy_(state["weights"][name])
        self._optimiser.load_state_dict(state["optimiser"])


def quantise(values: Tensor, bits: Tensor) -> Tensor:
    """Return values [p, ...] rounded to 2^(bits-1) - 1 equal steps on either side of zero.

    The largest magnitude of each member's tensor is kept exactly: symmetric, per tensor.

    Args:
        values: [p, ...].
        bits: [p], at least 2.

    Example:
        >>> import torch
        >>> from kondo_lab.training.draft_screens import quantise
        >>> quantise(torch.tensor([[0.3, -0.9, 1.2]]), torch.tensor([2]))
        tensor([[ 0.0000, -1.2000,  1.2000]])
    """
    largest = beside(values.abs().flatten(1).amax(dim=1), values)
    step = largest / (beside(2.0 ** (bits - 1), values) - 1)
    # A tensor of zeros has no step; it is its own rounding.
    return torch.where(step > 0, torch.round(values / step) * step, 0.0)


def _per_member(numbers: Sequence[int], parameters: Parameters) -> Tensor:
    """Return [p] int64 where the parameters are."""
    return torch.tensor(numbers, device=next(iter(parameters.values())).device)
