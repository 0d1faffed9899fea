"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import decided, percent, seeds_told, stated
from kondo_lab.evidence.claims import NOTHING, find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.asynchrony.claims import ENDS
from kondo_lab.studies.asynchrony.run import FIXED, ON_RAY, ONLINE, REPLAYED, named
from kondo_lab.training.learner_error import LEARNER_ERROR

MEAN_AGE = "mean age of the weights on Ray"


def captions(lines: Sequence[Headline], claims: Sequence[Claim]) -> dict[str, str]:
    """Return a sentence for every figure."""
    return {"ages": _ages(lines), "errors": _errors(lines, claims), "curves": _curves(lines)}


def _ages(lines: Sequence[Headline]) -> str:
    told = [f"{line.ours:.1f} ({line.series})" for line in lines if line.metric == MEAN_AGE]
    return f"Mean age of the weights on Ray, in versions, by crew: {', '.join(told)}."


def _errors(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    by_statement = {claim.statement: claim for claim in claims}
    own = [line for line in lines if line.metric.startswith(LEARNER_ERROR)]
    found = {how: by_statement.get(statement) for how, statement in ENDS.items()}
    told = [
        f"{how} {claim.measured.partition(' errors')[0]} ({claim.verdict})"
        for how, claim in found.items()
        if claim is not None and claim.measured != NOTHING
    ]
    if not told or not decided(*own):
        return "Learner error at the end, of actors on Ray and of three simulations of them."
    seeds = seeds_told(*own)
    return f"Errors within two standard errors of those on Ray: {', '.join(told)}; {seeds}."


def _curves(lines: Sequence[Headline]) -> str:
    """Tell of the run that a fixed delay predicts worst."""
    otherwise = "Online error by learner step, of actors on Ray and of three simulations of them."
    ending = f", {FIXED} - {ON_RAY}"
    apart = [
        line
        for line in lines
        if line.series.endswith(ending) and line.metric.startswith(f"{ONLINE}, crew ")
    ]
    if not decided(*apart):
        return otherwise
    worst = max(apart, key=lambda line: abs(line.ours))
    method = worst.series.removesuffix(ending)
    crew = worst.metric.removeprefix(f"{ONLINE}, crew ").partition(",")[0]
    own = [find(lines, named(method, how), worst.metric) for how in (ON_RAY, REPLAYED, FIXED)]
    sentence = (
        f"A fixed delay is furthest off for {method} with crew {crew}: online error {{0}} on Ray, "
        "{1} with replayed ages, {2} with a fixed delay"
    )
    return stated(sentence, own, otherwise=otherwise, show=percent)
