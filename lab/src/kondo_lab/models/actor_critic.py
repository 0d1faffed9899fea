"""The policy and the value function: two tanh networks that share nothing."""

import math

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from kondo_lab.tasks.control import Sampled

SMALL_OUTPUT = 0.01
"""Of the policy's last weights: it starts close to uniform."""


def tanh_network(
    num_inputs: int,
    num_outputs: int,
    *,
    width: int,
    generator: torch.Generator,
    last_gain: float = 1.0,
) -> nn.Sequential:
    """Return a network with two hidden layers, weights orthogonal and biases 0.

    Args:
        num_inputs: numbers of a row.
        num_outputs: numbers it returns.
        width: of the hidden layers.
        generator: for the weights.
        last_gain: factor of the last layer's weights.
    """
    with torch.device("meta"):  # the constructors would draw from the global generator
        layers = [
            nn.Linear(num_inputs, width),
            nn.Linear(width, width),
            nn.Linear(width, num_outputs),
        ]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        layer.to_empty(device="cpu")
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        nn.init.zeros_(layer.bias)
    first, second, last = layers
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


class Actor(nn.Module):
    """Observations [n, D] -> a distribution over actions.

    Args:
        num_inputs: D.
        num_outputs: actions to choose from, or numbers of a continuous one.
        continuous: whether actions are normal, with a standard deviation that no input changes.
        width: of the hidden layers.
        generator: for the weights.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        continuous: bool,
        width: int,
        generator: torch.Generator,
    ):
        super().__init__()
        self.layers = tanh_network(
            num_inputs, num_outputs, width=width, generator=generator, last_gain=SMALL_OUTPUT
        )
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if continuous else None

    def forward(self, observations: Tensor) -> Distribution:
        """Return the distribution of each row's action."""
        outputs = self.layers(observations)
        if self.log_std is None:
            return Categorical(logits=outputs, validate_args=False)
        normal = Normal(outputs, self.log_std.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)

    @torch.no_grad()
    def act(self, observations: Tensor, generator: torch.Generator) -> Sampled:
        """Sample an action for every row. `torch.distributions` knows no generators."""
        found = self(observations)
        if isinstance(found, Categorical):
            actions = torch.multinomial(found.probs, 1, generator=generator).squeeze(1)
        else:
            noise = torch.randn(found.mean.shape, generator=generator)
            actions = found.mean + found.stddev * noise
        return Sampled(actions, found.log_prob(actions), found.entropy())
