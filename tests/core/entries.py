"""Every gate and every loss that the conformance suites hold to their contracts, one line each.

`test_every_gate` and `test_every_loss` run them; others choose among them.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import kondo
from kondo.lm import BudgetGate
from oracles import core as oracle
from oracles.sequences import delight_weights, sequence_weights

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def page_gate():
    """Return the gate of the page, "Add a gate", from its own code."""
    _, text = PAGE.read_text().split("## Add a gate")
    (code,) = re.findall(r"^ *```python\n(.*?)^ *```", text.split("\n## ")[0], flags=re.M | re.S)
    found = {"__name__": "page"}
    exec(code, found)
    (gate,) = (each for each in found.values() if isinstance(each, type))
    return gate()


def above_mean(values, mask, generator):
    """Choose as a function that somebody else wrote."""
    mean = torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return kondo.Choice.of((values > mean) & mask & (values != 0), mask, dtype=values.dtype)


def budget(shape):
    """Return a gate that is bound to rows of one token each."""
    return BudgetGate(budget=0.5).for_rows(torch.ones(*shape, 1, dtype=torch.bool))


# name -> text for `kondo.parse_gate`, or a function that returns a gate for values [..., M].
GATES: dict[str, str | Callable[[tuple[int, ...]], object]] = {
    "rate": "delight:0.4",
    "price": "price:0.1",
    "drawn rate": "delight:0.4,temperature=0.5",
    "drawn price": "price:0.1,temperature=0.5",
    "reserve": "delight:0.5,reserve=0.5",
    "quota": "delight:0.5,negative_quota=0.5",
    "quota and reserve": "delight:0.5,negative_quota=0.5,reserve=0.3",
    "drawn and weighted": "delight:0.4,temperature=0.5,inverse_propensity=True",
    "reserve and weighted": "delight:0.6,reserve=0.5,inverse_propensity=True",
    "window": "delight:0.4,window=4,warmup=1",
    "drawn window": "delight:0.2,temperature=0.3,window=5",
    "weighted window": "delight:0.2,temperature=0.5,window=3,inverse_propensity=True",
    "unbiased": "unbiased:0.4",
    "noise": "noise:1.5",
    "floor": "unbiased:0.4,max_weight=5.0",
    "noise and floor": "noise:1.5,max_weight=3.0",
    "unbiased window": "unbiased:0.4,window=4",
    "variance": "variance:0.4",
    "budget": budget,
    "function": lambda shape: above_mean,
    "page": lambda shape: page_gate(),
}
REMEMBERS = [name for name in GATES if "window" in name]


def make_gate(name: str, shape: tuple[int, ...] = ()) -> kondo.BaseGate:
    """Return a new gate of the list, for values of this shape."""
    entry = GATES[name]
    gate = kondo.parse_gate(entry if isinstance(entry, str) else entry(shape))
    assert gate is not None
    return gate


def of_units(loss: Callable[..., tuple[float, float]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return an oracle of whole batches from one of single units."""
    return lambda log_probs, advantages, old, mask: oracle.elementwise(
        loss, log_probs, advantages, old
    )


def of_sequences(weights: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return an oracle of whole batches from the weight of each row."""

    def values_and_slopes(log_probs, advantages, old, mask):
        weight = weights(log_probs, advantages, old, mask).to(log_probs.device)[:, None]
        slopes = torch.where(mask, -weight * advantages.detach().double(), 0.0)
        return slopes * log_probs.detach().double(), slopes

    return values_and_slopes


class Loss(NamedTuple):
    """A loss, its oracle, and the name under which it takes the log-probs of another policy."""

    call: Callable[..., Tensor]
    oracle: Callable[..., tuple[Tensor, Tensor]]
    """(log_probs, advantages, old, mask) -> values and derivatives by log_probs."""
    other: str | None = None


L = kondo.losses
LOSSES = {
    "pg": Loss(L.pg, of_units(lambda lp, u, _: oracle.pg(lp, u))),
    "dg": Loss(partial(L.dg, eta=0.7), of_units(lambda lp, u, _: oracle.dg(lp, u, 0.7))),
    "ppo": Loss(L.ppo, of_units(partial(oracle.ppo, clip=0.2, beta=0.0)), "old_log_probs"),
    "ppo with kl": Loss(
        partial(L.ppo, clip=0.1, beta=0.3),
        of_units(partial(oracle.ppo, clip=0.1, beta=0.3)),
        "old_log_probs",
    ),
    "pmpo": Loss(L.pmpo, of_units(partial(oracle.pmpo, alpha=0.5, gamma=1e-9, beta=0.0))),
    "pmpo with kl": Loss(
        partial(L.pmpo, alpha=0.6, gamma=0.05, beta=0.1),
        of_units(partial(oracle.pmpo, alpha=0.6, gamma=0.05, beta=0.1)),
        "old_log_probs",
    ),
    "is_pg": Loss(
        L.is_pg, of_units(partial(oracle.is_pg, max_weight=math.inf)), "behaviour_log_probs"
    ),
    "is_pg, capped": Loss(
        partial(L.is_pg, max_weight=1.1),
        of_units(partial(oracle.is_pg, max_weight=1.1)),
        "behaviour_log_probs",
    ),
    "awr": Loss(
        partial(L.awr, beta=0.5, max_weight=4.0),
        of_units(lambda lp, u, _: oracle.awr(lp, u, 0.5, 4.0)),
    ),
    "sequence_dg": Loss(
        partial(L.sequence_dg, eta=0.7),
        of_sequences(lambda lp, u, old, mask: delight_weights(lp, u, mask, 0.7)),
    ),
    "sequence_is_pg": Loss(
        partial(L.sequence_is_pg, max_weight=1.1),
        of_sequences(lambda lp, u, old, mask: sequence_weights(lp, old, mask, 1.1)),
        "behaviour_log_probs",
    ),
}
