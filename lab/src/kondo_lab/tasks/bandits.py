"""Bandits for populations: images, contexts without content, and arms alone."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kondo_lab.draws import Draws
from kondo_lab.tasks import digits, mnist
from kondo_lab.tasks.base import at_least, label_reward
from kondo_lab.tasks.images import Images


class ImageBandit:
    """Images drawn uniformly with replacement; the right action is the image's label.

    The bytes stay on the device and become floats after they are drawn: a quarter of the memory.

    Args:
        name: as a legend says it.
        data: with labels 0 .. num_actions-1.
        num_actions: labels there are.
        device: where the images are kept.
    """

    def __init__(
        self, name: str, data: Images, *, num_actions: int, device: torch.device | str = "cpu"
    ):
        _check_images(data, num_actions)
        self.name = name
        self.data = data.to(device)
        self.num_inputs = data.images.shape[1]
        self.num_actions = num_actions

    @classmethod
    def digits(cls, device: torch.device | str = "cpu") -> "ImageBandit":
        """Return the bandit of the 8 x 8 digits bundled with scikit-learn."""
        return cls("digits", digits.load(), num_actions=digits.NUM_DIGITS, device=device)

    @classmethod
    def mnist(cls, folder: Path | None = None, device: torch.device | str = "cpu") -> "ImageBandit":
        """Return the bandit of MNIST; see `mnist.load` for where the files are looked for."""
        return cls("mnist", mnist.load(folder), num_actions=mnist.NUM_DIGITS, device=device)

    @property
    def test_inputs(self) -> Tensor:
        """[m, num_inputs] float32 in [0, 1]: the images never drawn, converted anew each time."""
        return self.data.shown(self.data.test_images)

    @property
    def test_labels(self) -> Tensor:
        """[m] int64."""
        return self.data.test_labels

    def draw(self, draws: Draws, step: int | Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return images [P, batch, num_inputs] and labels [P, batch]."""
        drawn = draws.integers("task/images", step, len(self.data.labels), batch)
        return self.data.shown(self.data.images[drawn]), self.data.labels[drawn]

    def reward(self, labels: Tensor, actions: Tensor) -> Tensor:
        """Return 1{action = label}."""
        return label_reward(labels, actions)


class TabularBandit:
    """Many contexts that share nothing; each has one correct arm, drawn once per member.

    Args:
        num_contexts: contexts, drawn uniformly with replacement.
        num_arms: arms of each.
    """

    name = "tabular"

    def __init__(self, *, num_contexts: int, num_arms: int):
        at_least("num_contexts", num_contexts, 1)
        at_least("num_arms", num_arms, 2)
        self.num_inputs, self.num_actions = num_contexts, num_arms

    def correct(self, draws: Draws) -> Tensor:
        """Return the correct arm of each context, [P, num_contexts] int64; no step moves it."""
        return draws.integers("task/correct", 0, self.num_actions, self.num_inputs)

    def draw(self, draws: Draws, step: int | Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return contexts and labels, both [P, batch] int64."""
        contexts = draws.integers("task/contexts", step, self.num_inputs, batch)
        return contexts, self.correct(draws).gather(1, contexts)

    def reward(self, labels: Tensor, actions: Tensor) -> Tensor:
        """Return 1{action = label}."""
        return label_reward(labels, actions)


class KArmedBandit:
    """K arms, no context: arm a pays N(mean_a, noise_std_a^2).

    The correct arm has mean 1, the others 1 - gap. With gap 1 and no noise this is R = 1{A = y*}.
    Noise on a wrong arm alone is gambling: `KArmedBandit(2, gap=0.1, noise_std=[0, 1])` pays 1 for
    arm 0 and N(0.9, 1) for arm 1.

    Args:
        num_arms: K.
        correct: the best arm.
        gap: > 0; a number, or one per member.
        noise_std: >= 0; a number for all arms, [K], or [P, K] where members differ.
        device: where the rewards are made.
    """

    name = "bandit"

    def __init__(
        self,
        num_arms: int,
        *,
        correct: int = 0,
        gap: float | Sequence[float] | Tensor = 1.0,
        noise_std: float | Sequence[float] | Tensor = 0.0,
        device: torch.device | str = "cpu",
    ):
        at_least("num_arms", num_arms, 2)
        if not 0 <= correct < num_arms:
            raise ValueError(f"correct must be an arm, 0 .. {num_arms - 1}, got {correct}.")
        gaps = torch.as_tensor(gap, dtype=torch.float32, device="cpu")
        if gaps.ndim > 1 or not bool((gaps > 0).all()):
            raise ValueError(f"gap must be > 0, a number or one per member, got {gap}.")
        stds = torch.as_tensor(noise_std, dtype=torch.float32, device="cpu")
        fits = stds.ndim == 0 or (stds.ndim <= 2 and stds.shape[-1] == num_arms)
        if not fits or not bool((stds >= 0).all()):
            raise ValueError(
                f"noise_std must be >= 0, a number, [{num_arms}] or [P, {num_arms}], got "
                f"{noise_std}."
            )
        self.num_arms, self.correct = num_arms, correct
        is_wrong = torch.arange(num_arms) != correct
        self.means = (1 - gaps.view(-1, 1) * is_wrong).to(device)
        """[1 or P, K]."""
        self.noise_std = stds.expand(stds.shape[0] if stds.ndim == 2 else 1, num_arms).to(device)
        """[1 or P, K]."""
        self._is_noisy = bool((stds > 0).any())

    def reward(self, actions: Tensor, draws: Draws, step: int | Tensor) -> Tensor:
        """Return float32 rewards in the shape of actions.

        Args:
            actions: [P, ...] int64.
            draws: of the same P members.
            step: when; an arm pulled again at the same step and place pays the same.
        """
        rewards = _of_arms(self.means, actions)
        if not self._is_noisy:
            return rewards
        noise = draws.normal("task/noise", step, *actions.shape[1:])
        return rewards + _of_arms(self.noise_std, actions) * noise


def _of_arms(table: Tensor, actions: Tensor) -> Tensor:
    """Return the entries of a table [1 or P, K] at actions [P, ...]."""
    if len(table) not in (1, len(actions)):
        raise ValueError(
            f"actions must be of the {len(table)} members that gap or noise_std was given for, got "
            f"shape {tuple(actions.shape)}."
        )
    rows = table.expand(len(actions), -1)
    return rows.gather(1, actions.reshape(len(actions), -1)).view_as(actions)


def _check_images(data: Images, num_actions: int) -> None:
    for name, images, labels in (
        ("images", data.images, data.labels),
        ("test_images", data.test_images, data.test_labels),
    ):
        if images.dtype != torch.uint8 or images.ndim != 2 or len(images) == 0:
            raise ValueError(
                f"{name} must be [n, D] uint8 with n >= 1, got {images.dtype} of shape "
                f"{tuple(images.shape)}."
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"labels of {name} must be [{len(images)}] int64, got {labels.dtype} of shape "
                f"{tuple(labels.shape)}."
            )
        if int(labels.min()) < 0 or int(labels.max()) >= num_actions:
            raise ValueError(f"labels of {name} must be in 0 .. {num_actions - 1}.")
        if int(images.max()) > data.white:
            raise ValueError(
                f"{name} must be at most {data.white} (white), got {int(images.max())}."
            )
