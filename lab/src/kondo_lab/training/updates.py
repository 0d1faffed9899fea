"""The papers' update rules by their names in the legends."""

from functools import partial

from kondo import Gate, losses
from kondo_lab.training.gates import Everything, QuantileGate
from kondo_lab.training.losses import PreferenceOptimisation
from kondo_lab.training.member import Update

PG = Update()
DG = Update(gate=Everything(eta=1.0))
PPO = Update(loss=partial(losses.ppo, clip=0.1))
"""On-policy, with one update a batch, every ratio is 1: its gradient is PG's."""
PMPO = Update(loss=PreferenceOptimisation(alpha=0.6, beta=0.1))
PMPO_FLOAT32 = Update(loss=PMPO.loss, equal_rewards="rounded")
"""With advantages as the author's float32 code has them: PMPO looks at their signs alone, and so
prefers, or not, answers to a prompt that all earned the same."""
PRICE_0 = Update(gate=Gate(price=0.0))


def kondo(rate: float) -> Update:
    """Return the papers' gate at a rate: the batch's quantile, ties kept."""
    return Update(gate=QuantileGate(rate=rate))


def kondo_count(rate: float) -> Update:
    """Return the gate that never keeps more than the rate, `kondo.Gate(rate=...)`.

    Where delight has no ties, as on images, it keeps what `kondo` keeps, and the number of rows
    need not be asked for at every step.
    """
    return Update(gate=Gate(rate=rate))


def percent(rate: float) -> str:
    """Return the legend of `kondo(rate)`, such as DG-K 3%."""
    return f"DG-K {100 * rate:g}%"
