"""Records -> the error by delay, what correcting costs, and who diverged."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.comparison import finals, settings_of
from kondo_lab.studies.learner_error import DIVERGED, LEARNER_ERROR, capped
from kondo_lab.studies.mnist_stale.run import OLDEST, REINFORCE, UNIFORM, methods
from kondo_lab.studies.mnist_stale.settings import Settings
from kondo_lab.studies.study import Analysis, Headline, headline, ordering

FIGURE = "Distributed, MNIST with staleness"
TEST = "test error"
PAPER_DELAY = 1000
PAPER = {"DG": 0.02, capped(float("inf")): 0.08}
"""Error at a delay of 1000, read by a third party whose other numbers are sometimes wrong."""
PAPER_FACTOR = 4.0
"""Error of importance-weighted PG over DG's; at which delay is not said."""
NAMES = {OLDEST: "the oldest parameters", UNIFORM: "any of the last parameters"}


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = [part for part in (OLDEST, UNIFORM) if part in set(records["part"])]
    lines: list[Headline] = []
    findings: list[str] = []
    figures: dict[str, Figure] = {}
    for part in there:
        lines += _error_lines(records, settings, part)
        lines += _factor_lines(records, settings, part)
        findings.append(_factor_finding(records, settings, part))
    findings += _divergence_findings(records, settings, there)
    figures["error-by-delay"] = _delay_figure(records, settings, there)
    if OLDEST in there:
        figures["learning-curves"] = _curves_figure(records, settings)
    return Analysis(headline=lines, figures=figures, findings=findings)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.data == "mnist" and settings.num_steps >= 10_000


def _error_lines(records: pd.DataFrame, settings: Settings, part: str) -> list[Headline]:
    lines = []
    for name in methods(settings):
        for metric in (LEARNER_ERROR, TEST):
            for delay, found in finals(records, part, name, metric).items():
                known = None
                if _full(settings) and (part, metric, delay) == (
                    OLDEST,
                    LEARNER_ERROR,
                    PAPER_DELAY,
                ):
                    known = PAPER.get(name)
                what = f"{metric}, {NAMES[part]}, by delay"
                lines.append(headline(FIGURE, name, what, delay, found, paper=known))
    return lines


def factor(records: pd.DataFrame, part: str, series: str, delay: float) -> float:
    """Return a method's learner error over DG's."""
    own, dg = (
        statistics.final(records, part, name, LEARNER_ERROR, setting=delay).mean
        for name in (series, "DG")
    )
    return own / dg


def _factor_lines(records: pd.DataFrame, settings: Settings, part: str) -> list[Headline]:
    lines = []
    exact = capped(float("inf"))
    for delay in settings_of(records, part, "DG"):
        for name in methods(settings):
            if name == "DG":
                continue
            at_paper = _full(settings) and (part, name, delay) == (OLDEST, exact, PAPER_DELAY)
            metric = f"{LEARNER_ERROR}, {NAMES[part]}, by delay"
            ours = factor(records, part, name, delay)
            known = PAPER_FACTOR if at_paper else None
            lines.append(headline(FIGURE, f"{name} / DG", metric, delay, ours, paper=known))
        means = {
            name: statistics.final(records, part, name, LEARNER_ERROR, setting=delay).mean
            for name in methods(settings)
        }
        lines += [
            ordering(
                FIGURE, f"{LEARNER_ERROR}, {NAMES[part]}", delay, paper=["DG", name], ours=means
            )
            for name in (exact, capped(settings.cap), REINFORCE)
        ]
    return lines


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
        for name, colour in zip(methods(settings), plotting.WHEEL, strict=False):
            found = finals(records, part, name, LEARNER_ERROR)
            plotting.by_setting(ax, found, name, colour=colour)
        if _full(settings) and part == OLDEST:
            points = [PAPER_DELAY] * len(PAPER)
            ax.plot(points, list(PAPER.values()), "kx", label="the paper, weak")
        ax.set_xscale("symlog", linthresh=1)
        ax.set(xlabel="delay in learner steps", title=NAMES[part])
        plotting.log_percent(ax, "error of the learner at the end")
    axes[0, 0].legend(fontsize=8)
    return figure


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    shown = [delay for delay in settings.delays if delay in (0, 100, 1000)]
    figure, axes = plotting.grid(1, len(shown))
    for ax, delay in zip(axes[0], shown, strict=True):
        _draw_curves(ax, records, settings, delay)
        ax.set_title(f"delay {delay}")
    axes[0, 0].legend(fontsize=8)
    return figure


def _draw_curves(ax: Axes, records: pd.DataFrame, settings: Settings, delay: int) -> None:
    names = list(methods(settings))
    for name, colour in zip(names, plotting.WHEEL, strict=False):
        curve = statistics.curve(records, OLDEST, name, LEARNER_ERROR, setting=delay)
        plotting.line(ax, curve, name, names, x="step", color=colour, linestyle="-")
    plotting.log_percent(ax, "error of the learner")
    ax.set_xlabel("learner step")
