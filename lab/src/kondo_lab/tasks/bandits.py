"""Images as a bandit, for populations."""

from pathlib import Path

import torch
from torch import Tensor

from kondo_lab.tasks import digits, mnist
from kondo_lab.tasks.base import label_reward
from kondo_lab.tasks.draws import Draws
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
    def title(self) -> str:
        """Name of the images, as records have it."""
        return f"{self.name} bandit"

    @property
    def test_inputs(self) -> Tensor:
        """[m, num_inputs] float32 in [0, 1]: the held-out images, converted at each call."""
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
