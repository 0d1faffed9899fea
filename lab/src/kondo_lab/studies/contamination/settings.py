"""Sizes of the study."""

import dataclasses

from kondo_lab.evidence.study import Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that can change the results."""

    arms: int = 10
    """K; arm 0 is right, or, where a success is rare, arm 0 is right and arm 1 favoured."""
    shares: tuple[float, ...] = (0.01, 0.1, 0.3)
    """rho, the contaminated share of the samples."""
    share: float = 0.1
    """rho of what is sampled, weighed by families, and seen over many contexts."""
    etas: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Temperatures of DG; the paper's is 1 and must be among them."""
    errors: tuple[float, ...] = (0.5, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """delta = 1 - pi(y*) of the exact sums, from poor policies to good ones."""

    sampled_errors: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 1e-3)
    seeds: int
    batch: int = 100
    batches: int
    """A seed draws so many at each error."""

    powers: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """alpha of the sign-blind weights pi^alpha."""
    thresholds: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """tau of the sign-blind weights 1{pi > tau} and min(1, pi / tau)."""
    rare_error: float = 1e-3
    """delta at which sign-blind weights are compared."""

    solved: tuple[float, ...] = (0.5, 0.9, 0.99)
    """Shares of the contexts in which the policy errs with probability delta; 1/2 in the rest."""


def settings(size: Size, seeds: int | None) -> Settings:
    """Return the settings of a size."""
    if size == "small":
        return Settings(seeds=seeds or 5, batches=40)
    return Settings(seeds=seeds or 30, batches=1000)
