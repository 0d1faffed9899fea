"""The compared updates. Each is a gate and a loss for `kondo.backward`; nothing else differs."""

import dataclasses
from collections.abc import Callable

from torch import Tensor

from kondo import BaseGate, Gate, losses
from kondo_lab.training.gates import Everything


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to update a policy."""

    name: str
    """As in the papers' legends."""
    loss: Callable[..., Tensor]
    """Per-unit loss."""
    make_gate: Callable[[], BaseGate]
    """Returns a fresh gate: a gate may remember past batches, and runs must not share it."""
    dense: bool
    """Whether the update has no gate: choosing units then costs it nothing."""


PG = Method(name="PG", loss=losses.pg, make_gate=Everything, dense=True)
DG = Method(name="DG", loss=losses.dg, make_gate=Everything, dense=True)


def dg_k(rate: float) -> Method:
    """Return the Kondo gate at a fixed rate, DG-K(rate): plain PG on the kept units."""
    return Method(
        name=f"DG-K ({100 * rate:g}%)",
        loss=losses.pg,
        make_gate=lambda: Gate(rate=rate),
        dense=False,
    )
