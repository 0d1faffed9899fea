"""Labelled images as bytes, split once into training and test."""

from typing import NamedTuple

import torch
from torch import Tensor


class Images(NamedTuple):
    """n training and m test images of D pixels."""

    images: Tensor
    """[n, D] uint8."""
    labels: Tensor
    """[n] int64."""
    test_images: Tensor
    """[m, D] uint8."""
    test_labels: Tensor
    """[m] int64."""
    white: int
    """The largest value of a pixel."""

    def to(self, device: torch.device | str) -> "Images":
        """Return the same images on a device."""
        return Images(
            self.images.to(device),
            self.labels.to(device),
            self.test_images.to(device),
            self.test_labels.to(device),
            self.white,
        )

    def shown(self, images: Tensor) -> Tensor:
        """Return what a policy sees: pixels as float32 in [0, 1]."""
        return images.float().div_(self.white)
