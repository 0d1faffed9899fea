"""MLPs over images: P at once, and one in plain PyTorch.

`StackedMLP` has a leading member dimension in every parameter, and batches every product. `MLP` is
its single-run twin, a policy: same shapes, same initialisation where it is "uniform", same outputs
(tested). It samples actions together with their log-probs, and returns differentiable log-probs of
given actions: `log_prob`, what `kondo.backward` takes.

Shapes: P members, N rows, D inputs, K actions.
"""

import itertools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kondo_lab.tasks.draws import Draws

Parameters = dict[str, Tensor]
"""Name -> [P, ...]."""

Rows = dict[str, Tensor]
"""What a policy saw and did: name -> [N, ...]."""

Initialisation = Literal["uniform", "lecun normal"]
"""Of an MLP: PyTorch's default, or that of JAX's libraries."""

TRUNCATED_STD = 0.87962566
"""Standard deviation of a standard normal cut at two."""


class StackedMLP:
    """ReLU networks with two hidden layers over flat inputs.

    | initialisation | weights                                              | biases             |
    |----------------|------------------------------------------------------|--------------------|
    | uniform        | uniform within 1 / sqrt(fan-in)                      | the same           |
    | lecun normal   | normal of variance 1 / fan-in, cut at two deviations | 0                  |
    """

    def __init__(
        self,
        num_inputs: int,
        num_actions: int,
        *,
        width: int,
        initialisation: Initialisation = "uniform",
    ):
        self.sizes = (num_inputs, width, width, num_actions)
        self.num_actions = num_actions
        self.initialisation = initialisation

    def initialise(self, draws: Draws) -> Parameters:
        """Return fresh parameters."""
        parameters = {}
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(self.sizes)):
            weight, bias = f"weight {layer}", f"bias {layer}"
            if self.initialisation == "uniform":
                drawn = _uniform(draws, weight, fan_in, fan_out), _uniform(draws, bias, 1, fan_out)
                fresh = tuple(value / math.sqrt(fan_in) for value in drawn)
            else:
                cut = truncated_normal(draws, weight, fan_in, fan_out)
                fresh = cut, cut.new_zeros(len(cut), 1, fan_out)
            parameters[f"{layer}.weight"], parameters[f"{layer}.bias"] = fresh
        return parameters

    def logits(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """Return [P, N, K] of inputs [P, N, D]."""
        hidden = inputs.to(parameters["0.weight"].dtype)
        last = len(self.sizes) - 2
        for layer in range(last + 1):
            weight, bias = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
            hidden = torch.baddbmm(bias, hidden, weight)
            if layer < last:
                hidden = hidden.relu()
        return hidden

    def shared_logits(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """Return [P, N, K] of the same inputs [N, D] for every member."""
        weight = parameters["0.weight"]
        members, fan_in, fan_out = weight.shape
        # One product for all members: repeating the inputs for each would cost P times the memory.
        flat = inputs.to(weight.dtype) @ weight.permute(1, 0, 2).reshape(fan_in, members * fan_out)
        hidden = flat.view(-1, members, fan_out).transpose(0, 1) + parameters["0.bias"]
        for layer in range(1, len(self.sizes) - 1):
            weight, bias = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
            hidden = torch.baddbmm(bias, hidden.relu(), weight)
        return hidden


class ActionSample(NamedTuple):
    """Actions of a bandit policy."""

    actions: Tensor
    """[N] int64."""
    log_probs: Tensor
    """[N], of the weights that sampled."""
    action_probs: Tensor
    """[N, K], for baselines that need the whole distribution."""


class MLP(nn.Module):
    """ReLU network with two hidden layers over flat inputs, PyTorch's default initialisation.

    Weights are drawn from the given generator; torch's global one is not touched.
    """

    def __init__(
        self, num_inputs: int, num_actions: int, *, width: int, generator: torch.Generator
    ):
        super().__init__()
        with torch.device("meta"):  # the constructors would draw from the global generator
            self.layers = nn.Sequential(
                nn.Linear(num_inputs, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, num_actions),
            )
        self.to_empty(device="cpu")
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                bound = 1 / math.sqrt(layer.in_features)
                nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, K] of images [N, inputs]."""
        logits: Tensor = self.layers(images)
        return logits

    def log_prob(self, rows: Rows) -> Tensor:
        """Return log pi(action | image), [N], of rows {"images", "actions"}; differentiable."""
        log_probs = self.forward(rows["images"]).log_softmax(dim=-1)
        return log_probs.gather(1, rows["actions"].unsqueeze(1)).squeeze(1)

    @torch.no_grad()
    def sample(self, images: Tensor, generator: torch.Generator) -> ActionSample:
        """Draw one action per image."""
        log_probs = self.forward(images).log_softmax(dim=-1)
        probs = log_probs.exp()
        actions = torch.multinomial(probs, 1, generator=generator)
        return ActionSample(actions.squeeze(1), log_probs.gather(1, actions).squeeze(1), probs)


def categorical(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return [...] int64 drawn from log_probs [..., K], by inverting the distribution at `uniform`.

    The last step of the cumulated probabilities is taken as their total, so that rounding cannot
    point past the end.
    """
    cumulated = log_probs.exp().cumsum(dim=-1)
    below = cumulated[..., :-1] < (uniform * cumulated[..., -1]).unsqueeze(-1)
    return below.sum(dim=-1)


def _uniform(draws: Draws, name: str, *shape: int) -> Tensor:
    """Return [P, *shape], uniform on -1 .. 1."""
    return 2 * draws.uniform(name, 0, *shape) - 1


def truncated_normal(
    draws: Draws, name: str, rows: int, columns: int, *, fan_in: int | None = None
) -> Tensor:
    """Return [P, rows, columns]: normal of variance 1 / fan-in, cut at two deviations.

    None takes the rows as the fan-in.
    """
    low = math.erf(-2 / math.sqrt(2))
    draw = draws.uniform(name, 0, rows, columns)
    standard = math.sqrt(2) * torch.erfinv(low + (-2 * low) * draw)
    return standard / (TRUNCATED_STD * math.sqrt(fan_in or rows))
