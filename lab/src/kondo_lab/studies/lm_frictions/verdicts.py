"""The claims, each met, missed or open.

    tenfold   log10(error of GRPO uncorrected / error of DG, eta 1) >= 1 under each friction
    growth    this logarithm is larger at a friction's highest strength than at its lowest
    aim       a rule without the actors' log-probs ends within 0.02 of PPO with correct ones, and
              ahead of PPO with wrong ones, under all frictions together

Errors are 1 - held-out reward at the end. All differences are taken seed by seed.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from kondo_lab.evidence.claims import Difference, above_zero
from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Claim, ClaimVerdict
from kondo_lab.studies.lm_frictions.outcomes import Outcomes
from kondo_lab.studies.lm_frictions.settings import COMBINED, COMBINED_WRONG
from kondo_lab.training.member import NONE, Frictions

UNCORRECTED, PAPER, CORRECTED = "GRPO uncorrected", "DG, eta 1", "PPO clip 0.2"
"""The paper's baseline, its rule, and what is done where log-probs are known."""
FACTOR = 10.0
"""Error of the uncorrected baseline over DG's, from the abstract, which says "about"."""
WITHIN = 0.02
"""Reward by which a rule may end lower than PPO with correct log-probs."""
SWEPT = {
    "refresh": "steps between refreshes",
    "temperature": "temperature of the actors",
    "broken": "share of broken answers",
    "corruption": "share of rewards by coin",
}
"""Strengths that are swept -> what they are called."""


def sweep(found: Outcomes, strength: str) -> dict[float, str]:
    """Return strength -> the friction that has it and nothing else; no friction is the lowest."""
    return {
        float(getattr(cell, strength)): cell.name
        for cell in sorted(found.cells, key=lambda own: float(getattr(own, strength)))
        if _alone(cell, strength)
    }


def _alone(cell: Frictions, strength: str) -> bool:
    neutral = {strength: getattr(NONE, strength), "name": NONE.name}
    return dataclasses.replace(cell, **neutral) == NONE


def ahead(own: Difference) -> ClaimVerdict:
    """Return whether a difference is above 0 by more than chance makes it one time in twenty."""
    return above_zero(own.estimate)


def reached(own: Difference) -> ClaimVerdict:
    """Return whether a difference is at least 0.

    Met if its mean is: unlike in `Difference.verdict` a large standard error is no help. Missed if
    it is lower by more than chance makes it one time in twenty. Open between the two, and with
    fewer than three seeds.
    """
    return "open" if own.verdict == "met" and own.estimate.mean < 0 else own.verdict


def gains(found: Outcomes, cell: str, seeds: Sequence[int]) -> list[float]:
    """Return log10(error of GRPO uncorrected / error of DG), seed by seed."""
    return [
        math.log10(found.error(cell, UNCORRECTED, seed) / found.error(cell, PAPER, seed))
        for seed in seeds
    ]


def tenfold(found: Outcomes, cell: str) -> tuple[float, Difference] | None:
    """Return the factor between errors, and by how much its log10 is above that of 10."""
    seeds = found.common((cell, UNCORRECTED), (cell, PAPER))
    if not seeds:
        return None
    logs = gains(found, cell, seeds)
    factor = 10 ** (sum(logs) / len(logs))
    return factor, Difference(estimate([log - math.log10(FACTOR) for log in logs]))


def growth(found: Outcomes, strength: str) -> tuple[str, str, Difference] | None:
    """Return the weakest and the strongest friction of a kind, and how much the gain grows.

    Of the strengths that have the most seeds: one that was tried with fewer decides nothing.
    """
    swept = [cell for cell in sweep(found, strength).values() if cell != NONE.name]
    seeds = {cell: found.common((cell, UNCORRECTED), (cell, PAPER)) for cell in swept}
    most = max(map(len, seeds.values()), default=0)
    cells = [cell for cell, own in seeds.items() if own and len(own) == most]
    if len(cells) < 2:
        return None
    weakest, strongest = cells[0], cells[-1]
    common = sorted({*seeds[weakest]} & {*seeds[strongest]})
    if not common:
        return None
    low, high = (gains(found, cell, common) for cell in (weakest, strongest))
    apart = [after - before for before, after in zip(low, high, strict=True)]
    return weakest, strongest, Difference(estimate(apart))


def claims(found: Outcomes, tuned: Mapping[str, float]) -> Iterator[Claim]:
    """Yield the claims about a field.

    Args:
        found: of the field.
        tuned: rule without the actors' log-probs -> its reward under all frictions on the tuning
            seed: the aim is about the highest, so that it is not chosen by what is reported.
    """
    where = found.field.name
    for cell in found.cells:
        ratio = tenfold(found, cell.name)
        if ratio is not None and not cell.is_none and cell.reports_truly:
            yield Claim(
                f"{where}, {cell.name}: the error of {UNCORRECTED} is at least {FACTOR:g} times "
                f"that of {PAPER}",
                reached(ratio[1]),
                f"{ratio[0]:.2g} times; log10 less 1: {ratio[1]}",
            )
    for strength, called in SWEPT.items():
        grown = growth(found, strength)
        if grown is not None:
            weakest, strongest, own = grown
            yield Claim(
                f"{where}, {called}: the factor between the errors of {UNCORRECTED} and {PAPER} "
                "grows with strength",
                ahead(own),
                f"log10 of it at {strongest} less that at {weakest}: {own}",
            )
    yield from _aim(found, tuned)


def _aim(found: Outcomes, tuned: Mapping[str, float]) -> Iterator[Claim]:
    where, cell = found.field.name, COMBINED.name
    known = [name for name in tuned if name in found.ends.get(cell, {})]
    if not known:
        return
    rule = max(known, key=lambda name: tuned[name])
    close = found.apart((cell, rule), (cell, CORRECTED))
    if close:
        own = Difference(estimate(close))
        within = Difference(estimate([apart + WITHIN for apart in close]))
        yield Claim(
            f"{where}, {cell}: {rule}, the best rule without the actors' log-probs on the tuning "
            f"seed, ends within {WITHIN:g} of {CORRECTED} with correct ones",
            reached(within),
            str(own),
        )
    wrong = found.apart((cell, rule), (COMBINED_WRONG.name, CORRECTED))
    if wrong:
        own = Difference(estimate(wrong))
        yield Claim(
            f"{where}, {cell}: {rule} ends ahead of {CORRECTED} with wrong log-probs",
            ahead(own),
            str(own),
        )
