"""The papers' update rules by their names in the legends."""

from kondo_lab.population.member import Update

PG = Update()
DG = Update(gate="soft")
PPO = Update(loss="ppo", clip=0.1, beta=0.1)
PMPO = Update(loss="pmpo", preferred=0.6, beta=0.1)
PRICE_0 = Update(gate="price", price=0.0)


def kondo(rate: float) -> Update:
    """Return the papers' gate at a rate: the batch's quantile, ties kept."""
    return Update(gate="quantile", rate=rate)


def kondo_count(rate: float) -> Update:
    """Return the gate that never keeps more than the rate, as `kondo.Gate(rate=...)`.

    Where delight has no ties, as on images, it keeps what `kondo` keeps, and the number of rows
    need not be asked for at every step.
    """
    return Update(gate="top", rate=rate)


def percent(rate: float) -> str:
    """Return the legend of `kondo(rate)`, such as DG-K 3%."""
    return f"DG-K {100 * rate:g}%"
