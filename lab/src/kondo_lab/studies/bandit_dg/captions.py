"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, furthest, stated, verdict_told
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.bandit_dg.run import CE, DG, ERROR, PG

SEARCHED = "share of drawn sets of contexts where PG is closer to CE"


def captions(lines: Sequence[Headline], claims: Sequence[Claim]) -> dict[str, str]:
    """Return a sentence for every figure."""
    return {
        "prop1-cosine-gap": _gap(lines, claims),
        "fig5-one-context": _errors(lines, "DG Fig 5", (PG,)),
        "fig6-many-contexts": _errors(lines, "DG Fig 6", (CE, PG)),
        "prop2-eta": _temperatures(lines, claims),
    }


def _gap(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    gaps = [line for line in lines if line.metric.startswith("cosine-gap ratio")]
    otherwise = "Direction, length and noise of DG's gradient over PG's, by error of the policy."
    if not gaps:
        return otherwise
    large = [line for line in gaps if line.metric == gaps[-1].metric]  # batches grow
    line = min(large, key=lambda each: float(each.x))
    sentence = (
        f"At a policy error of {line.x:g} DG's cosine gap is {{0}} times PG's with the larger "
        f"batch; the closed form gives {line.expected:.3g}"
    )
    verdict = verdict_told(claims, "where the batch is large")
    return stated(sentence, [line], otherwise=otherwise, verdict=verdict)


def _errors(lines: Sequence[Headline], figure: str, others: Sequence[str]) -> str:
    own = [line for line in lines if line.figure == figure]
    end = furthest(own, DG, ERROR)
    return compared(
        "" if end is None else f"After {end.x} steps DG's error is",
        end,
        {f"{name}'s": furthest(own, name, ERROR) for name in others},
        otherwise="Error and direction by step, with exact gradients.",
    )


def _temperatures(lines: Sequence[Headline], claims: Sequence[Claim]) -> str:
    searched = [line for line in lines if line.metric == SEARCHED]
    if not searched:
        return "DG by temperature: where PG is closer to cross-entropy, and error."
    closer = [line for line in searched if line.ours > 0]
    verdict = verdict_told(claims, "for eta > 1/2").removeprefix("; ")
    told = f" ({verdict} for temperatures above 1/2)" if verdict else ""
    if not closer:
        return f"PG is closer to cross-entropy than DG in no drawn set of contexts{told}."
    highest = closer[-1]
    at = str(highest.x).removeprefix("eta=")
    return (
        f"PG is closer to cross-entropy than DG in up to {highest.ours:.1%} of the drawn sets at "
        f"temperature {at}, and in none at higher temperatures{told}."
    )
