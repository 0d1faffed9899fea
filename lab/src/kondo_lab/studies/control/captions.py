"""What the figures show, by the headline's lines and the claims."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, count, decided, seeds_told, starting
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.control.run import DENSE

WITHIN = " ends within one standard error of dense"


def captions(
    lines: Sequence[Headline], claims: Sequence[Claim], promised: Sequence[str], task: str
) -> dict[str, str]:
    """Return a sentence for every figure.

    Args:
        lines: of the headline.
        claims: about all tasks.
        promised: contenders that should end where dense does, the first of which is told of.
        task: the first that was run.
    """
    own = next((name for name in promised if any(line.series == name for line in lines)), "")
    highest = next((line.series for line in lines if line.series.startswith("delight ")), "")
    entropy = f"{task}: entropy at the end"
    rows = f"{task}: rows differentiated to a return of "
    reached = starting(lines, own, rows)
    target = "" if reached is None else reached.metric.removeprefix(rows)
    return {
        "returns-by-samples": _returns(lines, claims, own),
        "returns-by-rows": compared(
            f"On {task} {own} reaches a return of {target} with this many rows differentiated:",
            reached,
            {"dense's": starting(lines, DENSE, rows)},
            otherwise="Return by rows differentiated.",
            show=count,
        ),
        "entropies": compared(
            f"On {task} {highest} ends with an entropy, in nats, of",
            find(lines, highest, entropy),
            {"dense's": find(lines, DENSE, entropy)},
            otherwise="Entropy of the policy by samples.",
        ),
    }


def _returns(lines: Sequence[Headline], claims: Sequence[Claim], own: str) -> str:
    asked = [
        (claim.statement.removesuffix(f", {own}{WITHIN}").removeprefix("on "), claim)
        for claim in claims
        if own and claim.statement.endswith(f", {own}{WITHIN}")
    ]
    ends = [line for line in lines if line.series == own]
    if not asked or not decided(*ends):
        return "Return by samples."
    told = "; ".join(f"{task} {claim.measured} ({claim.verdict})" for task, claim in asked)
    met = sum(claim.verdict == "met" for _, claim in asked)
    return (
        f"On {met} of {len(asked)} tasks {own} ends within one standard error of dense; {own} and "
        f"dense: {told}; {seeds_told(*ends)}."
    )
