"""Completions of a population, with the log-probs they were drawn with.

The token is argmax(logits + Gumbel noise), an exact draw from the softmax. A completion is real up
to its END; after it everything is PAD, and the mask is False. The host is not asked whether all
rows have ended, see `generate`.

Shapes: P members, G prompts, N = G * repeats rows (the completions of a prompt stand together),
Lp tokens of a prompt, La of a completion.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kondo_lab.models.attend import ATTENTION
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.models.generate import generate
from kondo_lab.models.networks import Parameters
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text.alphabet import END, PAD


class Sampled(NamedTuple):
    """Completions, and what the policy thought of them when it drew them."""

    tokens: Tensor
    """int64 [P, N, Lp + La]: prompts and completions, what `StackedDecoder.log_prob` reads."""
    log_probs: Tensor
    """[P, N, La] in the head's dtype; 0 after the END."""
    entropies: Tensor
    """[P, N, La]: of the distribution at each token; 0 after the END."""
    mask: Tensor
    """bool [P, N, La]: the policy drew this token, END included."""

    @property
    def prompts(self) -> Tensor:
        """int64 [P, N, Lp]."""
        return self.tokens[..., : -self.mask.shape[-1]]

    @property
    def completions(self) -> Tensor:
        """int64 [P, N, La]."""
        return self.tokens[..., -self.mask.shape[-1] :]


@torch.no_grad()
def sample(
    model: StackedDecoder,
    parameters: Parameters,
    prompts: Tensor,
    *,
    repeats: int = 1,
    draws: Draws | None = None,
    step: int | Tensor = 0,
    stream: str = "completions",
    temperature: Tensor | None = None,
) -> Sampled:
    """Draw `repeats` completions of every prompt.

    Args:
        model: of the members.
        parameters: of P members.
        prompts: int64 [P, G, Lp].
        repeats: completions per prompt.
        draws: random sources of the members; None takes the likeliest token each time (greedy).
        step: when, for the draws; a 0-d tensor stays on the device.
        stream: which numbers of the draws to take.
        temperature: [P] > 0: members draw from softmax(logits / temperature), and log-probs and
            entropies are those of this distribution. None is 1.

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.draws import Draws
        >>> from kondo_lab.models.decoder import StackedDecoder
        >>> from kondo_lab.models.sampler import sample
        >>> model = StackedDecoder("toy", prompt_length=3, answer_length=4, num_tokens=10)
        >>> draws = Draws([0, 1])
        >>> prompts = draws.integers("prompts", 0, 10, 6, 3)
        >>> sampled = sample(model, model.initialise(draws), prompts, repeats=2, draws=draws)
        >>> sampled.tokens.shape, sampled.log_probs.shape
        (torch.Size([2, 12, 7]), torch.Size([2, 12, 4]))
    """
    if repeats < 1:
        raise ValueError(f"repeats must be >= 1 completions per prompt, got {repeats}.")
    if prompts.dim() != 3 or prompts.shape[-1] != model.prompt_length:
        raise ValueError(
            f"prompts must have shape [members, prompts, {model.prompt_length}], got "
            f"{list(prompts.shape)}."
        )
    alive = torch.ones(
        len(prompts), prompts.shape[1] * repeats, dtype=torch.bool, device=prompts.device
    )
    drawn: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def choose(place: int, logits: Tensor) -> Tensor:
        nonlocal alive
        if place > 0:
            alive = alive & (drawn[-1][0] != END)
        if temperature is not None:
            logits = logits / temperature[:, None, None]
        log_softmax = logits.log_softmax(dim=-1)
        scores = log_softmax
        if draws is not None:
            scores = scores + _gumbel(draws, f"{stream} {place}", step, *scores.shape[1:])
        token = torch.where(alive, scores.argmax(dim=-1), PAD)
        chosen = log_softmax.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        log_probs = torch.where(alive, chosen, 0.0)
        drawn.append((token, log_probs, torch.where(alive, entropy(log_softmax), 0.0), alive))
        return token

    with sdpa_kernel(ATTENTION):
        weights = model.weights(parameters)
        generate(weights, prompts, choose, answer_length=model.answer_length, repeats=repeats)
    found = Sampled(*(torch.stack(parts, 2) for parts in zip(*drawn, strict=True)))
    asked = prompts.repeat_interleave(repeats, 1)
    return found._replace(tokens=torch.cat([asked, found.tokens], dim=2))


def completion_mask(completions: Tensor) -> Tensor:
    """Return bool like completions [..., La]: True up to their first END, which counts itself.

    Example:
        >>> import torch
        >>> from kondo_lab.models.sampler import completion_mask
        >>> completion_mask(torch.tensor([[5, 7, 1, 0], [5, 7, 6, 9]])).int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    ends = (completions == END).long()
    return ends.cumsum(dim=-1) == ends


def entropy(log_probs: Tensor) -> Tensor:
    """Return -sum_v p log p over the last dimension; 0 where a probability is 0."""
    found: Tensor = torch.special.entr(log_probs.exp()).sum(dim=-1)
    return found


def _gumbel(draws: Draws, stream: str, step: int | Tensor, rows: int, num_tokens: int) -> Tensor:
    return draws.uniform(stream, step, rows, num_tokens).log_().neg_().log_().neg_()
