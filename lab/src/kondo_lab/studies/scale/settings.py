"""Sizes of the study."""

import dataclasses

from kondo_lab.evidence.study import Size
from kondo_lab.studies.scale.simulation import Network

SOURCE, EVERY_ROW = "at source", "send all"
NEVER = 10**9
NETWORKS = (
    Network(name="1 Gbit/s, 1 ms", bandwidth=1e9 / 8, latency=1e-3),
    Network(name="10 Gbit/s, 0.2 ms", bandwidth=1e10 / 8, latency=2e-4),
    Network(name="100 Gbit/s, 0.05 ms", bandwidth=1e11 / 8, latency=5e-5),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results, the machine apart."""

    tasks: tuple[str, ...]
    """Setups of `kondo_lab.training.actors`; each is a part."""
    rate: float = 0.03
    """Of the real runs and of the costs."""

    rounds: int
    """Times everything is timed."""

    # Real runs on this machine; each is watched after its last actor is up and has warmed up.
    real_actors: tuple[int, ...]
    real_seconds: float
    warm_up_seconds: float = 1.0
    seeds: int

    # Simulated systems.
    actors: tuple[int, ...]
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 1.0)
    networks: tuple[Network, ...] = NETWORKS
    speeds: tuple[float, ...] = (1.0, 10.0)
    """Of the learner, against the core the costs were measured on."""
    actors_per_machine: int = 16
    rollouts: int
    """Simulated after the warm-up, at least; with many actors, one of each order under way."""

    def __post_init__(self) -> None:
        if self.rate not in self.rates:
            raise ValueError(
                f"rates must hold the rate of the real runs, {self.rate}, got {self.rates}."
            )


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size; `seeds` is the number of real runs of each kind."""
    if size == "small":
        return Settings(
            tasks=("digits",),
            rounds=5,
            real_actors=(1, 2),
            real_seconds=2.0,
            seeds=seeds or 1,
            actors=(10, 100, 1000),
            networks=NETWORKS[1:2],
            rollouts=500,
        )
    return Settings(
        tasks=("digits", "reversal"),
        rounds=30,
        real_actors=(1, 2, 4, 8),
        real_seconds=10.0,
        seeds=seeds or 3,
        actors=(10, 30, 100, 300, 1000, 3000, 10_000),
        rollouts=2000,
    )
