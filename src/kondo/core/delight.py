"""Delight = advantage x surprisal: what a backward pass on this unit is worth.

In: log-probs of the taken actions and their advantages. Out: detached tensors of the same shape.
"""

import math

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, prepare_units

# A log-prob can exceed 0 by rounding. Beyond this it is not rounding but a density or a bug.
ROUNDING = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 0.05, torch.bfloat16: 0.25}


def surprisal(log_probs: Tensor, *, mode_log_probs: Tensor | None = None) -> Tensor:
    """Return how unlikely each taken action was under the policy.

    Discrete actions:    l = -log pi(a|s)                  >= 0
    Continuous actions:  l = log pi(mode|s) - log pi(a|s)  >= 0

    A density can exceed 1, so -log pi(a|s) can be negative and would turn the gate upside down.
    Measured from the mode it cannot. Values above zero by no more than rounding (0.01 for float32
    and float64, 0.05 for float16, 0.25 for bfloat16) are clamped to a surprisal of 0.

    Args:
        log_probs: [...] float, log pi(a|s) of the taken actions; not differentiated.
        mode_log_probs: like log_probs, log pi(mode|s); give it for densities. Not differentiated.

    Returns:
        [...] surprisal, detached, float32 or float64. NaN stays NaN.

    Raises:
        ValueError: a log-prob exceeds 0 (or its mode's) by more than rounding.

    Example:
        >>> import torch, kondo
        >>> kondo.surprisal(torch.tensor([0.0, -0.5, -2.0]))
        tensor([0.0000, 0.5000, 2.0000])

    Reference: https://arxiv.org/abs/2603.14608
    """
    log_probs = check_float("log_probs", log_probs).detach()
    ceiling: Tensor | None = None
    if mode_log_probs is not None:
        ceiling = _check_modes(mode_log_probs, log_probs.shape).detach()
    check_excess(log_probs, ceiling)
    return clamped(log_probs, ceiling)


def clamped(log_probs: Tensor, ceiling: Tensor | None = None) -> Tensor:
    """Return the surprisal of log-probs that nobody checks."""
    top = 0.0 if ceiling is None else at_least_float32(ceiling)
    return (top - at_least_float32(log_probs)).clamp_min(0)


def excess(log_probs: Tensor, ceiling: Tensor | None = None) -> Tensor:
    """Return by how much log-probs exceed their ceiling beyond rounding, 0-d; NaN if any is."""
    if not log_probs.numel():
        return log_probs.new_zeros(())
    above = log_probs if ceiling is None else log_probs - ceiling
    return at_least_float32(above).amax() - ROUNDING.get(log_probs.dtype, 1e-2)


def check_excess(log_probs: Tensor, ceiling: Tensor | None = None) -> None:
    """Raise a ValueError for log-probs above their ceiling. One device sync, more on failure."""
    above = float(excess(log_probs, ceiling))
    if math.isnan(above):  # hides what is beside it
        bare = torch.nan_to_num(log_probs, nan=-math.inf, neginf=-math.inf)
        above = float(excess(bare, ceiling))
    if above > 0:
        worst = above + ROUNDING.get(log_probs.dtype, 1e-2)
        what = "0" if ceiling is None else "mode_log_probs"
        raise ValueError(
            f"log_probs must not exceed {what}, got an excess of {worst:.4g}. If these are "
            f"densities (continuous actions) give mode_log_probs, the log-density at the policy's "
            f"mode (to kondo.backward as screen=(log_probs, mode_log_probs), or give it a "
            f"kondo.DistributionPolicy); if they are probabilities, compute the log-softmax in "
            f"float32."
        )


def _check_modes(mode_log_probs: Tensor, shape: torch.Size) -> Tensor:
    if check_float("mode_log_probs", mode_log_probs).shape != shape:
        raise ValueError(
            f"mode_log_probs must have the shape of log_probs, {list(shape)}, got "
            f"{list(mode_log_probs.shape)}; give the mode's log-density for every taken action."
        )
    return mode_log_probs


def delight(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    mode_log_probs: Tensor | None = None,
) -> Tensor:
    """Return delight, chi = U * l: positive for rare successes, negative for rare failures.

    chi is exactly 0 where U = 0, even where the surprisal is infinite, and 0 where `mask` is
    False, whatever stands there. NaN in a unit that counts stays NaN: the gate names it.

    Args:
        log_probs: [N] or [N, T] float, log pi(a|s); not differentiated.
        advantages: like log_probs, or [N] for one advantage per row; not differentiated. Centred,
            not divided by a standard deviation (see `kondo.advantage.normalise_by_std`).
        mask: like log_probs, or [N]; bool, True means "counts".
        mode_log_probs: like log_probs; for densities, see `kondo.surprisal`.

    Returns:
        Delight like log_probs, detached, float32 or float64.

    Example:
        >>> import torch, kondo
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-0.5, float("-inf")]])
        >>> kondo.delight(log_probs, torch.tensor([2.0, 0.0]))
        tensor([[2., 4.],
                [0., 0.]])

    Reference: https://arxiv.org/abs/2603.14608
    """
    log_probs, advantages, mask = prepare_units(log_probs, advantages, mask)
    if mask is not None and mode_log_probs is not None:
        mode_log_probs = torch.where(mask, _check_modes(mode_log_probs, log_probs.shape), 0.0)
    return product(advantages, surprisal(log_probs, mode_log_probs=mode_log_probs))


def product(advantages: Tensor, unlikely: Tensor) -> Tensor:
    """Return U * l, exactly 0 where U = 0."""
    # 0 x inf would be NaN; 0 x NaN must stay NaN, since it is somebody's bug.
    return advantages * torch.where((advantages == 0) & unlikely.isinf(), 0.0, unlikely)


def gradient_norm(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return |U| (1 - pi): a proxy of the norm of a unit's gradient, blind to the sign.

    The gradient of U log pi(a|s) with respect to the logits of a softmax is U (e_a - pi(.|s)). Its
    norm lies between |U| (1 - pi(a|s)) and sqrt(2) times that. The signal of `kondo.UnbiasedGate`.

    | unit          | value, as a gate sees it                                                     |
    |---------------|------------------------------------------------------------------------------|
    | sample, token | abs(U) (1 - pi)                                                              |
    | sequence      | sqrt(sum over its tokens of U^2 (1 - pi)^2), one value per row               |
    | density       | abs(U) sqrt(1 + 2 l), with l = log pi(mode) - log pi(a); of a sequence the   |
    |               | sum over its tokens                                                          |

    For a normal density 2 l is the squared norm of the gradient with respect to the mean, in units
    of the standard deviation. The 1 stands for the gradient of the standard deviation, which is not
    0 at the mode.

    Example:
        >>> import torch, kondo
        >>> kondo.signals.gradient_norm(torch.tensor([0.25, 0.75]).log(), torch.tensor([2.0, -2.0]))
        tensor([1.5000, 0.5000])
    """
    check_units(log_probs, advantages, mask)
    return gradient_norm_unchecked(log_probs, advantages, mask=mask)


def check_units(log_probs: Tensor, advantages: Tensor, mask: Tensor | None) -> None:
    """Raise a ValueError for log-probs that count and exceed 0 by more than rounding."""
    check_excess(prepare_units(log_probs, advantages, mask)[0])


# The same functions without that check, which the step makes together with its own; and those that
# it takes for sequences and for densities.


def delight_unchecked(
    log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Return delight of log-probs that the caller holds to be at most 0."""
    log_probs, advantages, _ = prepare_units(log_probs, advantages, mask)
    return product(advantages, clamped(log_probs))


def gradient_norm_unchecked(
    log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Return the proxy of log-probs that the caller holds to be at most 0."""
    log_probs, advantages, _ = prepare_units(log_probs, advantages, mask)
    return advantages.abs() * -torch.expm1(-clamped(log_probs))


def norm_of_rows(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the proxy for unit "sequence", one value per row."""
    each = gradient_norm_unchecked(log_probs, advantages, mask=mask)
    norm: Tensor = torch.linalg.vector_norm(each, dim=-1)
    return norm


def norm_of_densities(
    log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Return the proxy for densities measured from the mode."""
    log_probs, advantages, _ = prepare_units(log_probs, advantages, mask)
    return product(advantages, (1 + 2 * clamped(log_probs)).sqrt()).abs()
