"""A choice that was made elsewhere, as a gate."""

import math

from torch import Tensor

from kondo.core.contract import BaseGate, Choice, Randomness


class Prechosen(BaseGate):
    """Keep the units that were chosen elsewhere, whatever their values.

    Args:
        keep: bool, in the shape of the values it will be shown.
        weight: float like keep, factor of each kept unit's loss; 1 by default.
        price: what a report shows as the price.

    Example:
        >>> import torch
        >>> from kondo.core.prechosen import Prechosen
        >>> Prechosen(torch.tensor([True, False]))(torch.tensor([0.5, 2.0])).keep
        tensor([ True, False])
    """

    def __init__(self, keep: Tensor, *, weight: Tensor | None = None, price: float = -math.inf):
        self.keep, self.weight, self.price = keep, weight, price

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Keep them, where they count; nothing is drawn."""
        keep = self.keep.to(values.device).reshape(values.shape) & mask
        choice = Choice.of(keep, mask, self.price, values.dtype)
        if self.weight is None:
            return choice
        weight = self.weight.to(values.device).reshape(values.shape) * keep
        return choice._replace(weight=weight)
