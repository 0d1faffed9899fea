"""What the study claims, judged by its headline lines."""

from collections.abc import Sequence

from kondo_lab.evidence.claims import by_lines
from kondo_lab.evidence.study import Claim, Headline
from kondo_lab.studies.reversal_frictions.claim_lines import (
    BEST,
    error_metric,
    growth_metric,
    lengths_metric,
    over_dg,
    samples_metric,
)
from kondo_lab.studies.reversal_frictions.run import ALL, sweeps
from kondo_lab.studies.reversal_frictions.settings import Settings


def claims(lines: Sequence[Headline], settings: Settings) -> list[Claim]:
    """Return the claims of the abstract, for each reward."""
    found = []
    for reward in settings.rewards:

        def of(metric: str, *, here: bool = False) -> list[Headline]:
            own = [line for line in lines if line.metric == metric]
            return [line for line in own if not here or line.x == settings.length]

        for friction in sweeps(settings):
            errors = of(error_metric(reward, friction))
            found.append(
                by_lines(
                    f"{reward}, {friction} alone: DG ends with about a tenth of the error of the "
                    f"best other",
                    [line for line in errors if line.series == over_dg(BEST)],
                )
            )
        together = of(error_metric(reward, ALL), here=True)
        samples = [
            line
            for target in settings.targets
            for line in of(samples_metric(reward, target), here=True)
        ]
        growth = [
            line
            for target in settings.targets
            for line in of(f"order of {growth_metric(reward, target)}")
        ]
        together_of = {
            "DG ends with about a tenth of the error of the best other": [
                line for line in together if line.series == over_dg(BEST)
            ],
            "the others need about 10 times DG's samples": samples,
            "that ratio grows with the length": growth,
            "DG solves sequences at least twice as long as the others": of(lengths_metric(reward)),
        }
        found += [
            by_lines(f"{reward}, all frictions together: {what}", own)
            for what, own in together_of.items()
        ]
    return found
