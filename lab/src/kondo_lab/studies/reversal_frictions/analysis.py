"""Records -> the claims, which of the bugs' rows do harm, and the figures."""

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.reversal_frictions import bug_rows, by_step, claim_lines, drawing, errors
from kondo_lab.studies.reversal_frictions.captions import captions
from kondo_lab.studies.reversal_frictions.claims import claims
from kondo_lab.studies.reversal_frictions.run import (
    EACH,
    LONGER,
    OWN,
    TOGETHER,
    WHY,
    of,
    told_of_bugs,
    without_seeds,
)
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.training.learner_error import DIVERGED

WHY_FIGURE = "beyond the paper"
SHARES = (bug_rows.SUCCESS_SHARE, bug_rows.FAILURE_SHARE, bug_rows.KEPT_SHARE)


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures, of whatever parts there are."""
    # Hundreds of numbers are looked up: each in the records of its own part.
    parts = dict(iter(joined(records).groupby("part")))
    found = Analysis()
    for reward in settings.rewards:
        each, together, own = (parts.get(of(kind, reward)) for kind in (EACH, TOGETHER, OWN))
        lines: list[Headline] = []
        if each is not None:
            lines += claim_lines.each_lines(each, settings, reward)
            figure = drawing.each(each, settings, reward)
            found.figures[f"error-by-friction-{reward}"] = figure
        if together is not None:
            lines += claim_lines.together_lines(together, settings, reward)
            lines += by_step.lines(together, settings, reward, claim_lines.FIGURE)
            figure = drawing.together(together, settings, reward, lines)
            found.figures[f"all-frictions-{reward}"] = figure
        if own is not None:
            lines += claim_lines.own_lines(own, settings, reward)
        found.headline.extend(lines)
        found.findings.extend(claim_lines.findings(lines, settings, reward))
        why = parts.get(of(WHY, reward))
        if why is not None:
            found.headline.extend(_why_lines(why, settings, of(WHY, reward)))
            found.figures["why-bugs"] = drawing.why(why, settings, of(WHY, reward))
            found.findings.extend(_why_findings(why, settings, of(WHY, reward)))
    found.findings.extend(_divergence_findings(records))
    found.claims.extend(claims(found.headline, settings))
    told = captions(found.headline, found.claims, settings)
    return with_captions(found, told)


def joined(records: pd.DataFrame) -> pd.DataFrame:
    """Return records whose parts are of all seeds; longer lengths are with all others."""
    names = records["part"].map(without_seeds)
    names = names.str.replace(f"{LONGER}-", f"{TOGETHER}-", regex=False)
    return records.assign(part=names)


def _why_lines(records: pd.DataFrame, settings: Settings, part: str) -> list[Headline]:
    lines = []
    x = settings.why_bug
    for name in told_of_bugs(settings):
        numbers = {
            "learner error": errors.at_end(records, part, name),
            "seeds below 5%": errors.solved(records, part, name),
        }
        for metric in SHARES:
            own = statistics.select(records, part, name, metric).groupby("seed")["value"].mean()
            numbers[metric] = statistics.estimate([float(value) for value in own])
        for metric, value in numbers.items():
            lines.append(headline(WHY_FIGURE, name, f"{metric}, why", x, value))
    return lines


def less_than_dg(records: pd.DataFrame, part: str, name: str) -> Estimate:
    """Return a rule's error at the end less that of DG, seed by seed."""
    own, dg = (errors.by_seed(records, part, each) for each in (name, "DG"))
    return statistics.estimate([own[seed] - dg[seed] for seed in own])


def _why_findings(records: pd.DataFrame, settings: Settings, part: str) -> list[str]:
    told = []
    for name in told_of_bugs(settings):
        if name != "DG":
            found = less_than_dg(records, part, name)
            error = "" if found.seeds == 1 else f" ± {100 * found.se:.1f}"
            told.append(f"{name} {100 * found.mean:+.1f}{error}")
    share = f"{100 * settings.why_bug:g}%"
    return [f"Error less DG's in points, bugs in {share} of the rows: {'; '.join(told)}."]


def _divergence_findings(records: pd.DataFrame) -> list[str]:
    last = records[records["metric"] == DIVERGED].groupby(
        ["part", "series", "setting"], dropna=False
    )["value"]
    lost = [
        f"{series} at {setting:g} ({part})"
        for (part, series, setting), value in last
        if value.max() > 0
    ]
    return [f"Parameters that are no longer finite: {', '.join(lost)}."] if lost else []
