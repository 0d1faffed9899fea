"""Delight = advantage x surprisal: what a backward pass on this unit is worth.

In: log-probs of the taken actions and their advantages. Out: detached tensors of the same shape.
"""

import math

import torch
from torch import Tensor

from kondo.core._checks import at_least_float32, check_float, prepare_units

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
    return _surprisal(log_probs, mode_log_probs)[0]


def _surprisal(log_probs: Tensor, mode_log_probs: Tensor | None) -> tuple[Tensor, bool]:
    """Return the surprisal, and whether all of it is finite. One device sync."""
    log_probs = check_float("log_probs", log_probs).detach()
    allowed = ROUNDING.get(log_probs.dtype, 1e-2)
    ceiling: Tensor | float = 0.0
    if mode_log_probs is not None:
        ceiling = at_least_float32(_check_modes(mode_log_probs, log_probs.shape).detach())
    unlikely = ceiling - at_least_float32(log_probs)
    if not unlikely.numel():
        return unlikely, True
    least, most = torch.stack(unlikely.aminmax()).tolist()
    broken = least < -allowed
    if math.isnan(least):  # hides what is below it
        broken = bool((unlikely < -allowed).any())
    if broken:
        what = "0" if mode_log_probs is None else "mode_log_probs"
        worst = -float(unlikely.nan_to_num().min())
        raise ValueError(
            f"log_probs must not exceed {what}, got an excess of {worst:.4g}. If these are "
            f"densities (continuous actions) give mode_log_probs, the log-density at the policy's "
            f"mode; if they are probabilities, compute the log-softmax in float32."
        )
    return unlikely.clamp_min(0), math.isfinite(most)


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
    unlikely, is_finite = _surprisal(log_probs, mode_log_probs)
    if not is_finite:
        # 0 x inf would be NaN; 0 x NaN must stay NaN, since it is somebody's bug.
        unlikely = torch.where((advantages == 0) & unlikely.isinf(), 0.0, unlikely)
    return advantages * unlikely
