"""Signals to gate on other than delight, for comparison. All share delight's interface:

    priority(log_probs, advantages, *, mask=None) -> like log_probs, detached

A unit whose priority is exactly 0 is never paid for, as with delight. Bind options with
`functools.partial`, e.g. `partial(kondo.priorities.additive, alpha=0.3)`.
"""

import torch
from torch import Tensor

from kondo.core import delight as _delight
from kondo.core._checks import prepare_units


def advantage(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return U: how good, whatever the surprise.

    Example:
        >>> import torch, kondo
        >>> kondo.priorities.advantage(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([ 0.5000, -0.5000])
    """
    return prepare_units(log_probs, advantages, mask)[1].clone()


def abs_advantage(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return |U|: how far from expected, blind to the sign.

    Example:
        >>> import torch, kondo
        >>> kondo.priorities.abs_advantage(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([0.5000, 0.5000])
    """
    return prepare_units(log_probs, advantages, mask)[1].abs()


def abs_delight(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return |U| l: how far from expected and how unlikely, blind to the sign.

    Where the reward does not depend on a token and U is symmetric about 0, a gate by |U| l keeps
    both signs alike: their gradients cancel. Elsewhere they do not: at a high price it keeps what
    is rare, unlikely tokens of rare successes (towards a more random policy) or of rare failures
    (towards a less random one). A gate by |U| alone expects nothing, whatever U's distribution.

    Example:
        >>> import torch, kondo
        >>> kondo.priorities.abs_delight(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([0.5000, 1.0000])
    """
    return _delight.delight(log_probs, advantages, mask=mask).abs()


def surprisal(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return l = -log pi(a|s): how unlikely, whatever it was worth.

    Example:
        >>> import torch, kondo
        >>> kondo.priorities.surprisal(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([1., 2.])
    """
    return _delight.surprisal(prepare_units(log_probs, advantages, mask)[0])


def uniform(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return independent draws from (0, 1]: random dropping at the same rate.

    Example:
        >>> import torch, kondo
        >>> draw = kondo.priorities.uniform(torch.zeros(3), torch.ones(3))
        >>> bool(((draw > 0) & (draw <= 1)).all())
        True
    """
    log_probs, advantages, mask = prepare_units(log_probs, advantages, mask)
    device = generator.device if generator is not None else log_probs.device
    draw = 1 - torch.rand(log_probs.shape, generator=generator, device=device)
    draw = draw.to(log_probs.device)
    return draw if mask is None else torch.where(mask, draw, 0.0)


def additive(
    log_probs: Tensor, advantages: Tensor, *, alpha: float = 0.5, mask: Tensor | None = None
) -> Tensor:
    """Return alpha * U + (1 - alpha) * l, the mix that no fixed alpha makes right.

    It ranks a success of the preferred action above a failure of a rare one only for
    alpha > L / (1 + L), L = log(p (K - 1) / (1 - p)), which tends to 1 as the policy improves.

    Example:
        >>> import torch, kondo
        >>> kondo.priorities.additive(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([0.7500, 0.7500])

    Reference: https://arxiv.org/abs/2603.20526, Proposition 2
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}; 1 is advantage, 0 is surprisal.")
    log_probs, advantages, _ = prepare_units(log_probs, advantages, mask)
    unlikely = _delight.surprisal(log_probs)
    if alpha == 1.0:
        unlikely = torch.zeros_like(unlikely)  # 0 x inf would be NaN
    return alpha * advantages + (1 - alpha) * unlikely
