"""What a trainer logs about a gate. The mean gate is not among it: by symmetry it hardly moves."""

import torch
from torch import Tensor

from kondo.arguments import at_least_float32, check_float, check_mask
from kondo.core.base_gate import Choice

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# Quantiles are read from at most this many units, spread over the batch: a log needs no more.
_MAX_SORTED = 65_536
_PRIME = 2_654_435_761

# A weight is 1 / probability if their product is this near to 1.
_SAME_WEIGHT = 1e-3

# A soft gate within this distance of 1/2 treats the unit as plain PG would.
_NEUTRAL = 0.1


@torch.no_grad()
def diagnostics(
    values: Tensor,
    choice: Choice,
    *,
    mask: Tensor | None = None,
    eta: float = 1.0,
    name: str = "delight",
) -> dict[str, float]:
    """Summarise one gated batch as plain numbers, over the units that count.

    With w_i = sigmoid(chi_i / eta), the weight DG would give:

    | key                    | meaning                                                           |
    |------------------------|-------------------------------------------------------------------|
    | `rate`, `price`        | realised rate; price in the signal's units                        |
    | `delight_q05` ... `q95`| quantiles of the values                                           |
    | `delight_rms`          | their scale, for choosing eta                                     |
    | `gate_spread`          | standard deviation of w: near 0, DG is plain PG at another rate   |
    | `off_neutral`          | share of units with w further than 0.1 from 1/2                   |
    | `positive_share`       | share of units of positive value                                  |
    | `positives_kept`       | share of the units of positive value that were kept               |
    | `kept_positive_share`  | share of the kept units whose value is positive; 1: only          |
    |                        | successes are trained on                                          |
    | `zero_share`           | share of units of value exactly 0 (zero-advantage groups)         |
    | `noise`                | sum of squared gradients of the estimate over that of all units   |
    | `bias_positive`        | share of the positive values that the expected estimate leaves    |
    |                        | out; 0 for an unbiased gate                                       |
    | `bias_negative`        | the same share of the negative values                             |
    | `effective_units`      | how many units of equal value would be as noisy                   |
    | `nan_count`            | NaN units hidden by the mask; a NaN that counts is an error       |

    Shares of nothing are NaN. With v_i the values, a_i the weights (0 where not kept), p_i the
    probabilities and e_i the expected weights,

        noise = sum_i a_i^2 v_i^2 / sum_i v_i^2         bias = 1 - sum_i e_i |v_i| / sum_i |v_i|
        effective_units = (sum_i a_i |v_i|)^2 / sum_i a_i^2 v_i^2

    e_i is 1 where units are weighted by 1 / p_i, else p_i times the weight that a kept unit has.
    Where no unit was kept by a draw, the bias of one is not known, NaN. Noise and bias are in terms
    of values: they are those of gradients if values are in proportion to the norms of gradients.
    Infinite values are left out of the sums.

    Args:
        values: [...] float, delight or what another signal returned.
        choice: what the gate returned for them.
        mask: like values, bool.
        eta: temperature at which w is judged.
        name: what the values are, the prefix of the keys of their quantiles and scale.

    Example:
        >>> import torch, kondo
        >>> delight = torch.tensor([2.0, -1.0, 0.0, 1.0])
        >>> out = kondo.diagnostics(delight, kondo.Gate(rate=0.25)(delight))
        >>> out["positives_kept"], out["zero_share"]
        (0.5, 0.25)
    """
    if not eta > 0:
        raise ValueError(f"eta must be > 0, got {eta}; it is the temperature w is judged at.")
    chi = at_least_float32(check_float("values", values).detach())
    mask = check_mask(mask, values.shape)
    nan_count = int(chi.isnan().sum())
    keep, weight, chance = choice.keep, choice.weight, choice.probability
    if mask is not None:
        chi, keep, weight, chance = (part[mask] for part in (chi, keep, weight, chance))
    chi, keep, weight, chance = (part.reshape(-1) for part in (chi, keep, weight, chance))
    soft = torch.sigmoid(chi / eta)
    positive = chi > 0
    kept_positive = (keep & positive).sum()
    finite = chi[chi.isfinite()]
    numbers = {
        f"{name}_rms": finite.square().mean().sqrt(),
        "gate_spread": (soft - soft.mean()).square().mean().sqrt(),
        "off_neutral": ((soft - 0.5).abs() > _NEUTRAL).double().mean(),
        "positive_share": positive.double().mean(),
        "positives_kept": kept_positive / positive.sum(),
        "kept_positive_share": kept_positive / keep.sum(),
        "zero_share": (chi == 0).double().mean(),
        **_risk(chi, keep, weight, chance),
    }
    measured = torch.stack([v.double() for v in numbers.values()]).tolist()
    return {
        "rate": float(choice.rate),
        "price": float(choice.price),
        **_quantiles(chi, name),
        **dict(zip(numbers, measured, strict=True)),
        "nan_count": float(nan_count),
    }


def _risk(chi: Tensor, keep: Tensor, weight: Tensor, chance: Tensor) -> dict[str, Tensor]:
    """Return how noisy the estimate is, and what its mean leaves out; all [M]."""
    size = torch.where(chi.isfinite(), chi.double().abs(), 0.0)
    weight, chance = weight.double(), chance.double()
    drawn = (chance > 0) & (chance < 1)
    # Of a unit that was not drawn the weight is not known; the others tell what it would have been.
    telling = keep & drawn
    inverse = ((weight * chance - 1).abs() < _SAME_WEIGHT) | ~telling
    of_drawn = torch.where(inverse.all(), 1.0, chance)
    of_drawn = torch.where(telling.any(), of_drawn, torch.nan)
    expected = torch.where(drawn, of_drawn, weight)

    def left_out(some: Tensor) -> Tensor:
        total = torch.where(some, size, 0.0).sum()
        return 1 - torch.where(some, expected * size, 0.0).sum() / total

    bought = weight * size
    return {
        "noise": bought.square().sum() / size.square().sum(),
        "bias_positive": left_out(chi > 0),
        "bias_negative": left_out(chi < 0),
        "effective_units": bought.sum().square() / bought.square().sum(),
    }


def _quantiles(chi: Tensor, name: str) -> dict[str, float]:
    names = [f"{name}_q{round(100 * q):02d}" for q in QUANTILES]
    if chi.numel() == 0:
        return dict.fromkeys(names, float("nan"))
    if chi.numel() > _MAX_SORTED:
        # Steps of a large prime visit every column of [N, T] alike; a fixed stride may see one.
        spots = torch.arange(_MAX_SORTED, device=chi.device) * _PRIME % chi.numel()
        chi = chi[spots]
    sample = chi.sort().values
    spots = torch.tensor(QUANTILES, device=chi.device) * (sample.numel() - 1)
    return dict(zip(names, sample[spots.round().long()].tolist(), strict=True))
