"""A supervised start: cross-entropy on demonstrations, so that reinforcement has something to pay.

    loss = - mean over completion tokens of log pi(demonstrated token)

Members differ by seed: of their weights and of their prompts. All arms of a seed start from
the same weights, which can be saved and loaded.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kondo.run_files import load_state, save_state
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.models.networks import Parameters
from kondo_lab.models.sampler import completion_mask, sample
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.base import TextTask
from kondo_lab.training.cuda_graphs import Captured
from kondo_lab.training.optimiser import StackedAdam, beside

WARMUP = 0.1
"""Share of the supervised steps in which the learning rate rises."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Trained weights of some seeds."""

    seeds: tuple[int, ...]
    parameters: Parameters
    """Of one member per seed, in their order."""

    def of(self, seeds: Sequence[int]) -> Parameters:
        """Return copies, one member for each of `seeds`, which may repeat."""
        missing = sorted(set(seeds) - set(self.seeds))
        if missing:
            raise ValueError(
                f"seeds must be among those that were trained, {list(self.seeds)}, got {missing}; "
                f"warm them up first."
            )
        device = self.parameters["head"].device
        places = torch.tensor([self.seeds.index(seed) for seed in seeds], device=device)
        return {name: value.index_select(0, places) for name, value in self.parameters.items()}

    def save(self, path: Path) -> None:
        """Write them so that a cut-off write leaves the old file."""
        save_state(path, {"seeds": list(self.seeds), "parameters": self.parameters})

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "Start":
        """Read what `save` wrote."""
        state = load_state(path, device)
        return cls(tuple(state["seeds"]), state["parameters"])


class WarmPoint(NamedTuple):
    """Where a warm start stood after a step."""

    step: int
    loss: list[float]
    """[seeds], of the last batch."""
    reward: list[float]
    """[seeds], at temperature 1 on held-out prompts."""


def warm_start(
    model: StackedDecoder,
    task: TextTask,
    seeds: Sequence[int],
    *,
    num_steps: int,
    batch: int,
    learning_rate: float,
    device: torch.device,
    measure_steps: Sequence[int] = (),
    num_prompts: int = 64,
    until: float = math.inf,
    progress: Callable[[float, str], None] = lambda share, note: None,
) -> tuple[Start, list[WarmPoint]]:
    """Train one member per seed on demonstrations, for a fixed number of steps or to a reward.

    Args:
        model: of all members.
        task: whose demonstrations.
        seeds: different ones.
        num_steps: updates. As many as lead to rewards of 20-50%: of less nothing can be learned
            by reinforcement, of more little is left to learn.
        batch: demonstrations per step and member, fresh ones each.
        learning_rate: at its highest; see `learning_rate_at`.
        device: where the members live.
        measure_steps: after which steps to measure the held-out reward; the last is always among
            them.
        num_prompts: held-out prompts of a measurement.
        until: a seed's weights are those of the first measured step at which its reward is this
            high, and of the last step if there is none. No step is made once all seeds have theirs.
        progress: told the share done and a note, at the measured steps.

    Returns:
        The weights, and what was measured on the way.
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must be different, and at least one, got {list(seeds)}.")
    draws = Draws(seeds, device)
    parameters = {name: value.contiguous() for name, value in model.initialise(draws).items()}
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    adam = StackedAdam(parameters, [learning_rate] * len(seeds), max_norm=1.0)
    rate = torch.tensor(learning_rate, device=device)
    adam.set_rate(rate)
    step = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros(len(seeds), device=device)

    def update() -> None:
        step.add_(1)
        losses = demonstration_loss(model, leaves, task, draws, step, batch)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        rate.copy_(learning_rate_at(step, num_steps, highest=learning_rate, warmup=WARMUP))
        adam.step(dict(zip(leaves, gradients, strict=True)))
        loss.copy_(losses.detach())

    program, points = Captured(update, device), []
    there = torch.zeros(len(seeds), dtype=torch.bool, device=device)
    kept = {name: value.clone() for name, value in parameters.items()}
    for number in range(1, num_steps + 1):
        program()
        if number in measure_steps or number == num_steps:
            reward = mean_reward(model, parameters, task, draws, num_prompts)
            points.append(WarmPoint(number, loss.tolist(), reward.tolist()))
            share = sum(points[-1].reward) / len(seeds)
            progress(number / num_steps, f"reward {100 * share:.0f}%")
            for name, value in parameters.items():
                kept[name] = torch.where(beside(there, value), kept[name], value)
            there |= reward >= until
            if there.all():
                break
    return Start(tuple(seeds), kept), points


def demonstration_loss(
    model: StackedDecoder,
    parameters: Parameters,
    task: TextTask,
    draws: Draws,
    step: int | Tensor,
    batch: int,
) -> Tensor:
    """Return the cross-entropy [P] of fresh demonstrations, a mean over their tokens."""
    prompts = task.prompts(draws, "demonstrated", step, batch)
    completions = task.demonstrations(prompts)
    log_probs = model.log_prob(parameters, torch.cat([prompts, completions], dim=-1))
    mask = completion_mask(completions)
    total = torch.where(mask, log_probs, 0.0).sum(dim=(1, 2))
    return -total / mask.sum(dim=(1, 2))


def learning_rate_at(step: Tensor, num_steps: int, *, highest: float, warmup: float) -> Tensor:
    """Return the learning rate of a step counted from 1: linear up, then a half cosine down to 0.

    rate(t) = highest * min(t / w, (1 + cos(pi * (t - w) / (num_steps + 1 - w))) / 2),
    where w = warmup * num_steps.

    Example:
        >>> import torch
        >>> from kondo_lab.training.supervised import learning_rate_at
        >>> learning_rate_at(torch.tensor([1, 2, 10]), 10, highest=1.0, warmup=0.2)
        tensor([0.5000, 1.0000, 0.0302])
    """
    if not 0 < warmup < 1:
        raise ValueError(f"warmup must lie in (0, 1), a share of the steps, got {warmup}.")
    rising = warmup * num_steps
    down = ((step - rising) / (num_steps + 1 - rising)).clamp(min=0)
    return highest * torch.minimum(step / rising, (1 + torch.cos(math.pi * down)) / 2)


def mean_reward(
    model: StackedDecoder,
    parameters: Parameters,
    task: TextTask,
    draws: Draws,
    num_prompts: int,
    *,
    greedy: bool = False,
) -> Tensor:
    """Return the mean reward [P] of one completion of each of `num_prompts` held-out prompts.

    A member gets the same prompts each time: they are drawn by its seed.
    """
    prompts = task.prompts(draws, "held out", 0, num_prompts, held_out=True)
    sampled = sample(
        model, parameters, prompts, draws=None if greedy else draws, stream="held-out completions"
    )
    return task.reward(prompts, sampled.completions).mean(dim=1)


class HeldOut:
    """Mean rewards on held-out prompts, the same ones every time, of parameters as they stand.

    Replayed from a CUDA graph after the first calls: a token at a time, evaluations are mostly the
    launching of kernels. The arguments are those of `mean_reward`; without `greedy` only the answer
    that is drawn is paid for, which takes half the time.
    """

    def __init__(
        self,
        model: StackedDecoder,
        parameters: Parameters,
        task: TextTask,
        draws: Draws,
        num_prompts: int,
        *,
        greedy: bool = True,
    ):
        self._inputs, self._greedy = (model, parameters, task, draws, num_prompts), greedy
        self._rewards: dict[str, Tensor] = {}
        self._program = Captured(self._measure, parameters["head"].device)

    def __call__(self) -> dict[str, Tensor]:
        """Return metric -> [P]: of the likeliest answer, where asked for, and of one drawn."""
        self._program()
        return {name: value.clone() for name, value in self._rewards.items()}

    def _measure(self) -> None:
        self._rewards = {"held-out sampled reward": mean_reward(*self._inputs)}
        if self._greedy:
            self._rewards["held-out reward"] = mean_reward(*self._inputs, greedy=True)
