"""Records -> what selecting and skipping bought: statements with verdicts, planes, and figures."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from kondo_lab.evidence import findings, runs
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.claims import together
from kondo_lab.evidence.runs import ROLLOUTS, ROWS, Run
from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Analysis, Claim, Estimate, Headline, headline
from kondo_lab.studies.lm_rl import assignments, comparisons, drawing
from kondo_lab.studies.lm_rl.captions import captions
from kondo_lab.studies.lm_rl.plane_analysis import add_planes
from kondo_lab.studies.lm_rl.settings import Settings
from kondo_lab.training import tuning
from kondo_lab.training.alone import PLAIN
from kondo_lab.training.fields import Field
from kondo_lab.training.language_arms import JOIN, LOSSES, named

_line = partial(headline, "beyond the papers")
ENTROPY = "entropy"
ENTROPY_SHOWN = (
    "PG",
    named("delight", "PG"),
    named("answer delight", "PG"),
    named("working delight", "PG"),
    named("mean delight", "PG"),
    named("random", "PG"),
)
"""Whose entropies are drawn."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers, figures and findings."""
    found = Analysis(headline=[], figures={}, findings=[], frontier=[])
    findings.add_starts(found, records, settings)
    by_field = {
        field: runs.grid_runs(records, assignments.grid_names(settings, field))
        for field in settings.populations
    }
    for field, by_series in by_field.items():
        if by_series:
            own = records[records["part"].isin(assignments.grid_names(settings, field))]
            found.headline.extend(_lines(field, by_series, own))
            where, arms = f"{field.name}, populations", settings.everyone()
            found.findings.extend(findings.failure_findings(where, by_series, own, arms))
    if by_field[settings.main]:
        _add_selection(found, records, settings, by_field[settings.main])
    if any(by_field[field] for field in settings.rare):
        _add_rare(found, settings, by_field)
    add_planes(found, records, settings)
    _add_seconds(found, records, settings)
    found.findings.extend(_learning_rates(records, settings))
    rare, planes = ([own.name for own in some] for some in (settings.rare, settings.planes))
    told = captions(found.headline, found.claims, settings.main.name, rare, planes)
    return with_captions(found, told)


def _loss_of(series: str) -> str:
    return series.rpartition(JOIN)[2]


def _lines(
    field: Field, by_series: Mapping[str, Sequence[Run]], records: pd.DataFrame
) -> Iterator[Headline]:
    """Yield every cell: rewards at the end, differences seed by seed, rows kept, entropies."""
    ends = comparisons.ends(by_series)
    entropy = _at_ends(records)
    for name, several in by_series.items():
        line = partial(_line, name, x=field.name)
        yield line("held-out reward at temperature 1, at the end", ours=runs.end_rewards(several))
        loss = _loss_of(name)
        for other, told in ((loss, f"dense {loss}"), (named("random", loss), "random rows")):
            apart = comparisons.difference(ends, name, other)
            if apart is not None and other != name:
                yield line(f"reward at the end less that of {told}, seed by seed", ours=apart)
        kept = [float(own.costs[ROWS][-1] / own.costs[ROLLOUTS][-1]) for own in several]
        yield line("share of rows with a kept token", ours=estimate(kept))
        for when in ("first", "last"):
            values = entropy[when].get(name, {}).values()
            if values:
                metric = f"entropy at the {when} evaluation, nats a token"
                yield line(metric, ours=estimate(list(values)))


def _at_ends(records: pd.DataFrame) -> dict[str, dict[str, dict[int, float]]]:
    """Return "first" and "last" -> series -> seed -> entropy at that evaluation."""
    own = records[records["metric"] == ENTROPY].sort_values("step")
    found: dict[str, dict[str, dict[int, float]]] = {"first": {}, "last": {}}
    for (series, seed), values in own.groupby(["series", "seed"])["value"]:
        for when, place in (("first", 0), ("last", -1)):
            found[when].setdefault(str(series), {})[int(seed)] = float(values.iloc[place])
    return found


def _add_selection(
    found: Analysis,
    records: pd.DataFrame,
    settings: Settings,
    by_series: Mapping[str, Sequence[Run]],
) -> None:
    """Add the table of selections and losses, the statements, and the entropies."""
    main = settings.main
    own = records[records["part"].isin(assignments.grid_names(settings, main))]
    ends, entropies = comparisons.ends(by_series), _at_ends(own)["last"]
    asked = (
        (comparisons.selection_statements(), ends, "reward at the end"),
        (comparisons.entropy_statements(), entropies, "entropy at the end"),
    )
    for statements, values, what in asked:
        for statement in statements:
            claim = comparisons.claim(statement, values, what)
            if claim is not None:
                found.findings.append(_sentence(main, claim))
    found.claims.extend(_delight_claims(main, ends))
    dense = {loss: runs.end_rewards(by_series[loss]) for loss in LOSSES if loss in by_series}
    table: dict[str, dict[str, Estimate]] = {}
    for name, several in by_series.items():
        selection, join, loss = name.rpartition(JOIN)
        if join and loss in dense:
            table.setdefault(selection, {})[loss] = runs.end_rewards(several)
    if table:
        found.figures["selections"] = drawing.selections(table, dense)
    curves = {name: _by_step(own, name, ENTROPY) for name in ENTROPY_SHOWN if name in by_series}
    if curves:
        panels = {main.name: curves}
        found.figures["entropy"] = drawing.by_step(
            panels, "entropy, nats a token", "Entropy of the policy by what selects samples"
        )


def _sentence(field: Field, claim: Claim) -> str:
    return f"{field.name}: {claim.statement}: {claim.verdict} ({claim.measured})."


def _delight_claims(field: Field, ends: comparisons.Values) -> Iterator[Claim]:
    """Yield, loss by loss, whether the selection of delight ends above every other one."""
    for loss in LOSSES:
        asked = [
            comparisons.claim(statement, ends, "reward at the end")
            for statement in comparisons.selection_statements()
            if statement.ours == named("delight", loss)
        ]
        known = [claim for claim in asked if claim is not None]
        if known:
            yield together(
                f"{field.name}, {loss}: rows of highest delight end at a higher reward than those "
                "of any other signal",
                known,
            )


def _by_step(
    records: pd.DataFrame, series: str, metric: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (steps, values) of every seed."""
    own = records[(records["series"] == series) & (records["metric"] == metric)]
    return [
        (one["step"].to_numpy(), one["value"].to_numpy())
        for _, one in own.sort_values("step").groupby("seed")
    ]


def _add_rare(
    found: Analysis, settings: Settings, by_field: Mapping[Field, Mapping[str, Sequence[Run]]]
) -> None:
    """Add rewards from rare starts beside those of the main field, of the same arms."""
    shown = [name for field in settings.rare for name in field.only]
    panels = {
        f"starts at {100 * settings.start_reward(field):g}%": {
            name: [(own.steps, own.reward) for own in several]
            for name, several in by_series.items()
            if name in shown
        }
        for field, by_series in by_field.items()
        if by_series
    }
    found.figures["starts"] = drawing.by_step(
        panels, "held-out reward", "Reward by how often the first policy is right"
    )
    for field in settings.rare:
        ends = comparisons.ends(by_field[field])
        told = [
            f"{name} {runs.end_rewards(several).mean:.3f}"
            for name, several in by_field[field].items()
        ]
        if told:
            found.findings.append(f"{field.name}: rewards at the end: {', '.join(told)}.")
        for name in ends:
            if name != "GRPO":
                statement = comparisons.Statement(name, "GRPO")
                claim = comparisons.claim(statement, ends, "reward at the end")
                if claim is not None:
                    found.findings.append(_sentence(field, claim))


def _add_seconds(found: Analysis, records: pd.DataFrame, settings: Settings) -> None:
    """Add seconds of a step of the largest model, quantiles of rounds, and ratios of medians."""
    own = records[records["part"] == assignments.seconds_name(settings.timed)]
    if own.empty:
        return
    name = settings.timed.name
    for line in own[own["metric"].str.startswith("seconds")].itertuples():
        found.headline.append(
            _line(str(line.series), str(line.metric), f"{name}, a step", line.value)
        )
    median = own.pivot_table(index="series", columns="metric", values="value")
    dense = f"GRPO{PLAIN}"
    for series in median.index:
        if series != dense and dense in median.index:
            told = []
            for stage in ("learner", "loop"):
                column = f"seconds {stage} p50"
                ratio = median.loc[dense, column] / median.loc[series, column]
                metric = f"{stage} speed-up over dense GRPO"
                found.headline.append(_line(str(series), metric, f"{name}, a step", float(ratio)))
                told.append(
                    f"{stage} {ratio:.2f}x ({1e3 * median.loc[dense, column]:.0f} and "
                    f"{1e3 * median.loc[series, column]:.0f} ms)"
                )
            found.findings.append(
                f"{name}, seconds of a step without learning: {series} over dense GRPO: "
                f"{', '.join(told)}."
            )


def _learning_rates(records: pd.DataFrame, settings: Settings) -> Iterator[str]:
    """Yield the tuned learning rates of selections, and whose is at the edge of those tried."""
    tuned = findings.tuned_rewards(records, settings, settings.main)
    if tuned:
        told = ", ".join(f"{name} {tuning.best_rate(own):g}" for name, own in tuned.items())
        yield f"{settings.main.name}: learning rates: {told}. Unbiased gates have GRPO's."
        yield from findings.edge_findings(records, settings)
