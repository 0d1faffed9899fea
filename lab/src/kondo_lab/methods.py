"""The compared updates. Each is a gate and a loss for `kondo.backward`; nothing else differs."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from kondo.core import losses
from kondo.core.contract import Choice as GateOutput
from kondo.core.gates import Gate
from kondo.engine.differentiate import Loss
from kondo.engine.select import GateLike


def keep_all(
    delight: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
) -> GateOutput:
    """Keep every unit that counts: dense training through the same door.

    `Gate(rate=1.0)` would skip units of zero delight, whose gradient is zero. An ordinary training
    loop does not know that and pays for them, so the dense baseline must pay too.
    """
    keep = torch.ones_like(delight, dtype=torch.bool) if mask is None else mask
    weight = keep.to(delight.dtype)
    return GateOutput(
        keep=keep,
        weight=weight,
        price=torch.tensor(-math.inf, dtype=torch.float64),
        rate=torch.tensor(float(keep.any()), dtype=torch.float64),
        probability=weight,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to update a policy."""

    name: str
    """As in the papers' legends."""
    loss: Loss
    """Per-unit loss."""
    make_gate: Callable[[], GateLike]
    """Returns a fresh gate: a gate may remember past batches, and runs must not share it."""
    dense: bool
    """Whether the update has no gate: choosing units then costs it nothing."""


PG = Method(name="PG", loss=losses.pg, make_gate=lambda: keep_all, dense=True)
DG = Method(name="DG", loss=losses.dg, make_gate=lambda: keep_all, dense=True)


def dg_k(rate: float) -> Method:
    """Return the Kondo gate at a fixed rate, DG-K(rate): plain PG on the kept units."""
    return Method(
        name=f"DG-K ({100 * rate:g}%)",
        loss=losses.pg,
        make_gate=lambda: Gate(rate=rate),
        dense=False,
    )
