"""Signals: what a unit is worth. All share the interface of `kondo.delight`:

    signal(log_probs, advantages, *, mask=None) -> like log_probs, detached

A unit whose value is exactly 0 is never kept, as with delight. Bind options with
`functools.partial`, e.g. `kondo.Gate(rate=0.1, signal=partial(kondo.signals.additive, alpha=0.3))`.

A signal that reads nothing of log_probs but their shape says so with an attribute,
`needs_log_probs = False`; `kondo.backward` then makes no screening forward for it. What the signals
of `kondo` bring besides is noted at the end of this module, see `Known`.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from kondo.arguments import first_unit, prepare_units
from kondo.core.base_gate import Signal, Unit
from kondo.core.delight import (
    check_units,
    clamped,
    delight,
    delight_unchecked,
    gradient_norm,
    gradient_norm_unchecked,
    norm_of_densities,
    norm_of_rows,
)
from kondo.core.fingerprint import name_of
from kondo.core.unit_values import Known, known_of, needs_log_probs, note, unit_values, value_name

__all__ = [
    "Known",
    "Signal",
    "Unit",
    "abs_advantage",
    "abs_delight",
    "additive",
    "advantage",
    "gradient_norm",
    "known_of",
    "name_of",
    "needs_log_probs",
    "surprisal",
    "uniform",
    "unit_values",
    "value_name",
]

_Signal = TypeVar("_Signal", bound=Callable[..., Tensor])


def _needs_no_log_probs(signal: _Signal) -> _Signal:
    vars(signal)["needs_log_probs"] = False
    return signal


@_needs_no_log_probs
def advantage(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return U: how good, whatever the surprise. The signal of `kondo.VarianceGate`.

    A gate sees that of the row for unit "sequence", not a sum over its tokens: a long answer would
    outrank a short one that was worth as much. The same holds for `abs_advantage`.

    Example:
        >>> import torch, kondo
        >>> kondo.signals.advantage(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([ 0.5000, -0.5000])
    """
    return prepare_units(log_probs, advantages, mask)[1].clone()


@_needs_no_log_probs
def abs_advantage(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return |U|: how far from expected, blind to the sign.

    Example:
        >>> import torch, kondo
        >>> kondo.signals.abs_advantage(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
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
        >>> kondo.signals.abs_delight(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([0.5000, 1.0000])
    """
    return delight(log_probs, advantages, mask=mask).abs()


def surprisal(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return l = -log pi(a|s): how unlikely, whatever it was worth.

    Example:
        >>> import torch, kondo
        >>> kondo.signals.surprisal(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([1., 2.])
    """
    check_units(log_probs, advantages, mask)
    return _surprisal(log_probs, advantages, mask=mask)


@_needs_no_log_probs
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
        >>> draw = kondo.signals.uniform(torch.zeros(3), torch.ones(3))
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
        >>> kondo.signals.additive(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5]))
        tensor([0.7500, 0.7500])

    Reference: https://arxiv.org/abs/2603.20526, Proposition 2
    """
    check_units(log_probs, advantages, mask)
    return _additive(log_probs, advantages, alpha=alpha, mask=mask)


# The same functions without that check, which the step makes together with its own.


def _abs_delight(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    return delight_unchecked(log_probs, advantages, mask=mask).abs()


def _surprisal(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    return clamped(prepare_units(log_probs, advantages, mask)[0])


def _additive(
    log_probs: Tensor, advantages: Tensor, *, alpha: float = 0.5, mask: Tensor | None = None
) -> Tensor:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}; 1 is advantage, 0 is surprisal.")
    log_probs, advantages, _ = prepare_units(log_probs, advantages, mask)
    unlikely = clamped(log_probs)
    if alpha == 1.0:
        unlikely = torch.zeros_like(unlikely)  # 0 x inf would be NaN
    return alpha * advantages + (1 - alpha) * unlikely


def _advantage_of_rows(
    log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Return U of every row, [..., N]; 0 where nothing counts.

    Advantages that differ within a row are refused. On a GPU, where nothing is read, such a row has
    a value of NaN.
    """
    given = advantages
    log_probs, advantages, mask = prepare_units(log_probs, advantages, mask)
    if mask is None:
        mask = torch.ones_like(log_probs, dtype=torch.bool)
    if not log_probs.shape[-1]:
        return log_probs.new_zeros(log_probs.shape[:-1])
    if given.ndim < log_probs.ndim:  # the most common: nothing to compare, and no device sync
        return torch.where(mask.any(dim=-1), given.detach().to(advantages), 0.0)
    highest = torch.where(mask, advantages, -torch.inf).amax(dim=-1)
    lowest = torch.where(mask, advantages, torch.inf).amin(dim=-1)
    differs = highest > lowest
    if differs.is_cuda:  # nothing is read: whoever chooses by these values refuses NaN
        return torch.where(differs, torch.nan, torch.where(mask.any(dim=-1), highest, 0.0))
    if bool(differs.any()):
        raise ValueError(
            f"advantages must be the same at all tokens of a row, got {float(lowest[differs][0])} "
            f"and {float(highest[differs][0])} in {first_unit(differs)}; give one per row, or gate "
            f'tokens: signal=kondo.signals.advantage, unit="token".'
        )
    return torch.where(mask.any(dim=-1), highest, 0.0)


def _abs_advantage_of_rows(
    log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    return _advantage_of_rows(log_probs, advantages, mask=mask).abs()


note(delight, Known(delight_unchecked, zero_without_advantage=True))
note(abs_delight, Known(_abs_delight, zero_without_advantage=True))
note(gradient_norm, Known(gradient_norm_unchecked, norm_of_rows, norm_of_densities, True))
note(advantage, Known(of_sequences=_advantage_of_rows))
note(abs_advantage, Known(of_sequences=_abs_advantage_of_rows))
note(surprisal, Known(_surprisal))
note(additive, Known(_additive))
