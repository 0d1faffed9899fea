"""Records -> the error by delay, what correcting costs, and who diverged."""

from collections.abc import Mapping
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import beats, ends, finals, settings_of
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.mnist_stale.captions import captions
from kondo_lab.studies.mnist_stale.claims import claims
from kondo_lab.studies.mnist_stale.run import OLDEST, REINFORCE, UNIFORM, methods
from kondo_lab.studies.mnist_stale.settings import Settings
from kondo_lab.training.learner_error import DIVERGED, LEARNER_ERROR, capped

FIGURE = "Distributed, MNIST with staleness"
TEST = "test error"
PAPER_DELAY = 1000
EXACT = capped(float("inf"))
PAPER = {"DG": 0.02, EXACT: 0.08}
"""Error at a delay of 1000, read by a third party whose other numbers are sometimes wrong."""
PAPER_FACTOR = 4.0
"""Error of importance-weighted PG over DG's; at which delay is not said."""
NAMES = {OLDEST: "the oldest parameters", UNIFORM: "any of the last parameters"}


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = [part for part in (OLDEST, UNIFORM) if part in set(records["part"])]
    found = Analysis()
    for part in there:
        found.headline.extend(_error_lines(records, settings, part))
        found.headline.extend(_factor_lines(records, settings, part))
        found.findings.append(_factor_finding(records, settings, part))
    found.findings.extend(_divergence_findings(records, settings, there))
    found.figures["error-by-delay"] = _delay_figure(records, settings, there)
    if OLDEST in there:
        found.figures["learning-curves"] = _curves_figure(records, settings)
    found.claims.extend(claims(found.headline))
    told = captions(
        found.headline, found.claims, f"{LEARNER_ERROR}, {NAMES[OLDEST]}, by delay", EXACT
    )
    return with_captions(found, told)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.data == "mnist" and settings.num_steps >= 10_000


def _error_lines(records: pd.DataFrame, settings: Settings, part: str) -> list[Headline]:
    lines = []
    papers = (OLDEST, LEARNER_ERROR, PAPER_DELAY)
    for name in methods(settings):
        for metric in (LEARNER_ERROR, TEST):
            what = f"{metric}, {NAMES[part]}, by delay"
            for delay, found in finals(records, part, name, metric).items():
                at_paper = _full(settings) and (part, metric, delay) == papers
                known = PAPER.get(name) if at_paper else None
                lines.append(
                    headline(
                        FIGURE, name, what, delay, found, expected=known, against="third party"
                    )
                )
    return lines


def _factor_lines(records: pd.DataFrame, settings: Settings, part: str) -> list[Headline]:
    """Return each method's error over DG's, and whether DG is below the paper's others."""
    lines = []
    metric = f"{LEARNER_ERROR}, {NAMES[part]}"
    for delay in settings_of(records, part, "DG"):
        found = ends(records, part, methods(settings), LEARNER_ERROR, delay)
        line = partial(headline, FIGURE, metric=f"{metric}, by delay", x=delay)
        for name in methods(settings):
            if name == "DG":
                continue
            at_paper = _full(settings) and (part, name, delay) == (OLDEST, EXACT, PAPER_DELAY)
            ours = statistics.ratio(found[name], found["DG"])
            known = PAPER_FACTOR if at_paper else None
            series = f"{name} / DG"
            lines.append(line(series, ours=ours, expected=known, against="abstract", rule="about"))
        others = _distinct(settings, found)
        lines += beats(FIGURE, metric, delay, ["DG"], others, found, against="abstract")
    return lines


def _distinct(settings: Settings, found: Mapping[str, Estimate]) -> list[str]:
    """Return the paper's other methods, one of those that are the same update at a delay.

    Without a delay all importance weights are 1, and with a short one none reaches the cap.
    """
    others = (EXACT, capped(settings.cap), REINFORCE)
    once = {found[name]: name for name in reversed(others)}
    return [name for name in others if name in once.values()]


def _factor_finding(records: pd.DataFrame, settings: Settings, part: str) -> str:
    told = []
    for name in methods(settings):
        found = finals(records, part, name, LEARNER_ERROR)
        by_delay = ", ".join(f"{100 * found[delay].mean:.2f}" for delay in sorted(found))
        told.append(f"{name} {by_delay}")
    delays = ", ".join(f"{delay:g}" for delay in settings_of(records, part, "DG"))
    return f"Error in percent with {NAMES[part]}, delays {delays}: {'; '.join(told)}."


def _divergence_findings(records: pd.DataFrame, settings: Settings, there: list[str]) -> list[str]:
    told = []
    for part in there:
        for name in methods(settings):
            for delay, found in finals(records, part, name, DIVERGED).items():
                if found.mean > 0:
                    count = round(found.mean * found.seeds)
                    told.append(f"{name} at {delay:g} ({count} of {found.seeds} seeds, {part})")
    return [f"Parameters that are no longer finite: {', '.join(told)}."] if told else []


def _delay_figure(records: pd.DataFrame, settings: Settings, there: list[str]) -> Figure:
    figure, axes = plotting.grid(1, len(there), width=4.8, height=4)
    for ax, part in zip(axes[0], there, strict=True):
        error = partial(finals, records, part, metric=LEARNER_ERROR)
        plotting.sweep(ax, {name: error(name) for name in methods(settings)})
        if _full(settings) and part == OLDEST:
            for name, value in PAPER.items():
                colour, _ = plotting.series_style(name, list(methods(settings)))
                plotting.crosses(ax, {PAPER_DELAY: value}, color=colour)
        ax.set_xscale("symlog", linthresh=1)
        ax.set(xlabel="delay in learner steps", title=NAMES[part])
        ax.set_xlim(left=-0.2)  # no delay is negative
        plotting.log_percent(ax, "error of the learner at the end")
        plotting.label_ends(ax)
    note = plotting.seeds_note(records, "bars: one standard error")
    says = "MNIST: error by delay of the actors, lower is better"
    plotting.head(figure, says, f"{note} Crosses: a third party's reading of the paper.")
    return figure


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    shown = [delay for delay in settings.delays if delay in (0, 100, 1000)]
    figure, axes = plotting.grid(1, len(shown), width=4.0)
    names = list(methods(settings))
    for ax, delay in zip(axes[0], shown, strict=True):
        plotting.curves(ax, records, OLDEST, names, LEARNER_ERROR, setting=delay)
        plotting.log_percent(ax, "error of the learner")
        ax.set(xlabel="learner step", title=f"delay {delay}")
        plotting.label_ends(ax)
    says = "MNIST: error while training with delayed actors, lower is better"
    plotting.head(figure, says, plotting.seeds_note(records[records["part"] == OLDEST]))
    return figure
