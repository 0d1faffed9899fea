"""Who ends higher than whom: paired differences, seed by seed, and verdicts on statements.

    difference    reward at the end of one arm less that of another, of the seeds of both
    verdict       `claims.above_zero`

All arms of a seed share start, prompts and held-out prompts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kondo_lab.evidence.claims import LEAST_SEEDS, above_zero
from kondo_lab.evidence.runs import Run, SpeedUp
from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Claim, ClaimVerdict, Estimate
from kondo_lab.training.language_arms import LOSSES, named, selectors

Values = Mapping[str, Mapping[int, float]]
"""Series -> seed -> a number of its run."""


class Statement(NamedTuple):
    """One arm is said to have a higher, or lower, number than another."""

    ours: str
    other: str
    lower: bool = False
    """Whether ours is said to be the lower one."""


def difference(values: Values, ours: str, other: str) -> Estimate | None:
    """Return ours less the other, seed by seed; None where no seed is of both.

    Example:
        >>> from kondo_lab.studies.lm_rl.comparisons import difference
        >>> difference({"a": {0: 3.0, 1: 5.0}, "b": {0: 2.0, 1: 3.0, 2: 9.0}}, "a", "b")
        Estimate(mean=1.5, se=0.5, seeds=2)
    """
    if ours not in values or other not in values:
        return None
    both = sorted(values[ours].keys() & values[other].keys())
    return estimate([values[ours][seed] - values[other][seed] for seed in both]) if both else None


def aim_verdict(ratio: SpeedUp, seeds: int, aim: float) -> ClaimVerdict:
    """Return whether a speed-up is what was aimed for, by at least one standard error.

    A bound on the wrong side proves nothing: "at least 3x" leaves an aim of 5x open.
    """
    if seeds < LEAST_SEEDS or ratio.bound == "unknown" or ratio.value != ratio.value:
        return "open"
    if ratio.value < aim:
        return "open" if ratio.bound == "at least" else "missed"
    return "met" if ratio.value - ratio.se >= aim and ratio.bound != "at most" else "open"


def ends(runs: Mapping[str, Sequence[Run]]) -> Values:
    """Return series -> seed -> reward at the end."""
    return {name: {own.seed: own.end for own in several} for name, several in runs.items()}


def selection_statements() -> Iterator[Statement]:
    """Yield what is asked of rewards at the end: of selections at an equal loss, then of readings.

    The selection of delight is said to be the better one everywhere: that is what was to be tested.
    """
    others = [name for name in selectors(0.5) if name != "delight"]
    for loss in LOSSES:
        for other in reversed(others):
            yield Statement(named("delight", loss), named(other, loss))
    delight = named("delight", "PG")
    yield Statement(named("delight tokens", "PG"), named("random tokens", "PG"))
    for reading in (
        "price 0",
        "Bernoulli",
        "mean delight",
        "sigmoid within kept",
        "answer delight",
        "working delight",
    ):
        yield Statement(named(reading, "PG"), delight)


def entropy_statements() -> Iterator[Statement]:
    """Yield what the entropy account predicts of entropies at the end.

    Delight of tokens that do not matter adds entropy. If the working is where they are, delight of
    the answer alone ends less random than delight of all tokens, and than that of the working.
    """
    answer, delight = named("answer delight", "PG"), named("delight", "PG")
    yield Statement(answer, delight, lower=True)
    yield Statement(answer, named("working delight", "PG"), lower=True)
    yield Statement(named("random", "PG"), delight, lower=True)


def claim(statement: Statement, values: Values, what: str) -> Claim | None:
    """Return the statement with the difference and its verdict; None where no seed is of both."""
    apart = difference(values, statement.ours, statement.other)
    if apart is None:
        return None
    tested = apart._replace(mean=-apart.mean) if statement.lower else apart
    word = "lower" if statement.lower else "higher"
    error = f" ± {apart.se:.3f}" if apart.seeds > 1 else ""
    return Claim(
        f"{statement.ours} has a {word} {what} than {statement.other}",
        above_zero(tested),
        f"{apart.mean:+.3f}{error}, seed by seed, {apart.seeds} seeds",
    )
