"""Records -> which correction survives what: a table, figures, and verdicts."""

from collections.abc import Iterator
from functools import partial

import pandas as pd

from kondo_lab.evidence import findings
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.lm_frictions import assignments, drawing, verdicts
from kondo_lab.studies.lm_frictions.captions import captions
from kondo_lab.studies.lm_frictions.outcomes import Outcomes, base_of, outcomes
from kondo_lab.studies.lm_frictions.settings import COMBINED, Settings
from kondo_lab.training import tuning
from kondo_lab.training.asynchronous import LAG
from kondo_lab.training.corrections import needs_behaviour
from kondo_lab.training.fields import Field, slug

DIAGNOSTICS = ("entropy", "effective sample size", "gradient norm")
"""Of the steps after the last evaluation but one."""
_line = partial(headline, "beyond the papers")


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers, its figures and its verdicts."""
    found = Analysis()
    findings.add_starts(found, records, settings)
    tuned = records[records["part"].isin(assignments.tune_names(settings))]
    found.findings.extend(_rates(tuned, settings))
    without = _without_behaviour(tuned, settings)
    found.findings.extend(_further_tuning(records, settings))
    told: dict[str, str] = {}
    for field in settings.fields:
        own = outcomes(records, settings, field)
        if own is None:
            continue
        found.headline.extend(_lines(own, records, settings))
        found.findings.extend(_best(own))
        found.findings.extend(_lags(own, records, settings))
        found.claims.extend(verdicts.claims(own, without))
        found.figures[slug("table", field.name)] = drawing.table(own)
        figure = drawing.strengths(own)
        if figure is not None:
            found.figures[slug("strengths", field.name)] = figure
        refreshes = list(verdicts.sweep(own, "refresh").values())
        told |= captions(found.headline, found.claims, field.name, refreshes)
    curves = drawing.curves(records, settings)
    if curves is not None:
        found.figures[slug("curves", settings.main.name)] = curves
    return with_captions(found, told)


def _rates(tuned: pd.DataFrame, settings: Settings) -> Iterator[str]:
    """Yield the learning rates, and whose is at the edge of those tried."""
    if tuned.empty:
        return
    name, rates = settings.main.name, assignments.chosen_rates(tuned)
    told = ", ".join(f"{series} {rate:g}" for series, rate in rates.items())
    yield f"{name}: learning rates: {told}."
    means = assignments.mean_rewards(tuned)
    at_edge = findings.edges(means, settings.main.learning_rates)
    if at_edge:
        yield (
            f"{name}: the best learning rate is at the edge of those tried for "
            f"{', '.join(at_edge)}."
        )


def _further_tuning(records: pd.DataFrame, settings: Settings) -> Iterator[str]:
    """Yield what learning rates beyond the edge, and a decay, come to on the tuning seed."""
    own = records[records["part"] == assignments.further_name(settings)]
    if own.empty:
        return
    tuned = records[records["part"].isin(assignments.tune_names(settings))]
    constant = assignments.mean_rewards(tuned)
    for series, means in assignments.mean_rewards(own).items():
        told = ", ".join(f"{rate:g} {reward:.3f}" for rate, reward in means.items())
        before = constant[series.removesuffix(assignments.DECAYED)]
        best = tuning.best_rate(before)
        yield (
            f"{settings.main.name}: {series}: mean reward over the frictions that tune, by "
            f"learning rate: {told}; with the constant rate {best:g} it is {before[best]:.3f}."
        )


def _lags(found: Outcomes, records: pd.DataFrame, settings: Settings) -> Iterator[str]:
    """Yield how stale batches were where actors and learner ran at the same time."""
    own = records[records["part"].isin(assignments.names(settings, found.field))]
    own = own[own["metric"] == LAG]
    cells = own["series"].map(lambda series: assignments.split(series)[1])
    for cell, late in own.groupby(cells, sort=False)["value"]:
        yield (
            f"{found.field.name}, {cell}: batches were drawn {late.mean():.1f} updates before "
            f"they were trained on, {late.min():.1f} to {late.max():.1f} between two evaluations."
        )


def _without_behaviour(tuned: pd.DataFrame, settings: Settings) -> dict[str, float]:
    """Return rule without the actors' log-probs -> reward under all frictions when tuned."""
    if tuned.empty:
        return {}
    rewards, rates = assignments.tuned_rewards(tuned), assignments.chosen_rates(tuned)
    return {
        each.name: rewards[each.name][COMBINED.name][rates[each.name]]
        for each in settings.everyone()
        if not needs_behaviour(each) and COMBINED.name in rewards.get(each.name, {})
    }


def reference(found: Outcomes, cell: str) -> tuple[str, str] | None:
    """Return where the best arm with correct log-probs stands: (friction, arm)."""
    friction = next(own for own in found.cells if own.name == cell)
    base = base_of(friction, found.cells)
    if base is None:
        return None
    best = found.best(base.name, lambda name: name in found.needing)
    return None if best is None else (base.name, best)


def _lines(found: Outcomes, records: pd.DataFrame, settings: Settings) -> Iterator[Headline]:
    last = _last(records, settings, found.field)
    for cell, ends in found.ends.items():
        best = reference(found, cell)
        for name, by_seed in ends.items():
            line = partial(_line, name, x=f"{found.field.name}: {cell}")
            rewards = list(by_seed.values())
            yield line("held-out reward at temperature 1, at the end", ours=estimate(rewards))
            apart = found.apart((cell, name), best) if best is not None else []
            if apart:
                metric = "reward at the end less that of the best with correct log-probs"
                yield line(metric, ours=estimate(apart))
            series = f"{name}{assignments.UNDER}{cell}"
            for metric in DIAGNOSTICS:
                if (metric, series) in last.index:
                    values = last.loc[(metric, series)]
                    yield line(f"{metric} at the end", ours=estimate(list(values)))


def _last(records: pd.DataFrame, settings: Settings, field: Field) -> pd.Series:
    """Return the last value of the diagnostics, indexed by metric, series and seed."""
    own = records[records["part"].isin(assignments.names(settings, field))]
    own = own[own["metric"].isin(DIAGNOSTICS)].sort_values("step")
    last: pd.Series = own.groupby(["metric", "series", "seed"])["value"].last()
    return last


def _best(found: Outcomes) -> Iterator[str]:
    """Yield, friction by friction, who ends highest, with and without the actors' log-probs."""
    for cell in found.ends:
        told = []
        for kind, wanted in (("with", True), ("without", False)):

            def is_wanted(name: str, wanted: bool = wanted) -> bool:
                return (name in found.needing) == wanted

            best = found.best(cell, is_wanted)
            reward = None if best is None else found.reward(cell, best)
            if reward is not None:
                told.append(f"{kind} the actors' log-probs {best} ({_told(reward)})")
        yield f"{found.field.name}, {cell}: highest at the end {' and '.join(told)}."


def _told(reward: Estimate) -> str:
    """Return a reward with its standard error; one seed has none."""
    return f"{reward.mean:.3f} ± {reward.se:.3f}" if reward.seeds > 1 else f"{reward.mean:.3f}"
