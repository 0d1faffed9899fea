"""Records -> Figures 8 and 9 of the DG paper: curves, final and average error by H and M."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.comparison import against_paper, beats, ends, finals, settings_of
from kondo_lab.studies.reversal_dg import paper
from kondo_lab.studies.reversal_dg.run import COMPARED, at_learning_rate
from kondo_lab.studies.reversal_dg.settings import Settings
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline

ONLINE = "online error"
OTHERS = ("PG", "PPO", "PMPO")
SWEEPS = {
    "lengths": ("DG Fig 9a", "DG Fig 9c", "length H"),
    "vocabularies": ("DG Fig 9b", "DG Fig 9d", "vocabulary M"),
}
"""Figure of the error at the end, of the average error, and what the axis says."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there, found = set(records["part"]), Analysis()
    if "curves" in there:
        found.headline.extend(_curve_lines(records, settings))
        found.figures["fig8-learning-curves"] = _curves_figure(records, settings)
    sweeps = [part for part in SWEEPS if part in there]
    for part in sweeps:
        for learning_rate in settings.sweep_learning_rates:
            names = {name: at_learning_rate(name, settings, learning_rate) for name in COMPARED}
            found.headline.extend(_sweep_lines(records, settings, part, names))
            found.findings.append(_finding(records, part, names))
    for learning_rate in settings.sweep_learning_rates if sweeps else ():
        drawn = _sweeps_figure(records, settings, sweeps, learning_rate)
        found.figures[f"fig9-learning-rate-{learning_rate:g}"] = drawn
    return found


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.num_steps >= 10_000 and settings.length == 10


def _known(settings: Settings, part: str) -> dict[str, dict[float, float]]:
    if not _full(settings):
        return {}
    return paper.FIG_9A if part == "lengths" else paper.FIG_9B


def _curve_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    found = ends(records, "curves", COMPARED)
    order = beats("DG Fig 8", ONLINE, settings.curve_steps, ["DG"], OTHERS, found)
    if not _full(settings):
        return order
    points = against_paper(records, "curves", "DG Fig 8", ONLINE, paper.FIG_8, by="step")
    return [*points, *order]


def averages(records: pd.DataFrame, part: str, series: str) -> dict[float, Estimate]:
    """Return setting -> mean error over the whole run; each point stands for the steps before."""
    found = {}
    for setting in settings_of(records, part, series):
        chosen = statistics.select(records, part, series, ONLINE, setting=setting)
        values = []
        for _, own in chosen.sort_values("step").groupby("seed"):
            width = np.diff(own["step"], prepend=0)
            values.append(float(np.average(own["value"], weights=width)))
        found[setting] = statistics.estimate(values)
    return found


def exponent(found: dict[float, Estimate]) -> float:
    """Return the slope of log average error against log setting, by least squares."""
    xs, ys = zip(*((x, value.mean) for x, value in found.items()), strict=True)
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def _sweep_lines(
    records: pd.DataFrame, settings: Settings, part: str, names: dict[str, str]
) -> list[Headline]:
    """Return a sweep's lines at one learning rate; `names` are method -> series."""
    figure, average, _ = SWEEPS[part]
    lines, metric = [], f"{ONLINE} at the end"
    found = {series: finals(records, part, series) for series in names.values()}
    for name, series in names.items():
        known = _known(settings, part).get(name, {})
        for setting, value in found[series].items():
            theirs = known.get(setting)
            lines.append(headline(figure, series, metric, setting, value, expected=theirs))
    dg, others = names["DG"], [names[name] for name in OTHERS]
    hardest = max(found[dg])
    at_hardest = {series: values[hardest] for series, values in found.items()}
    lines += beats(figure, metric, hardest, [dg], others, at_hardest)
    slopes = {series: exponent(averages(records, part, series)) for series in found}
    for series, slope in slopes.items():
        ours = Estimate(slope, seeds=settings.sweep_seeds)
        lines.append(headline(average, series, "exponent of the average error", "", ours))
    return [*lines, *beats(average, "exponent", "", [dg], others, slopes)]


def _finding(records: pd.DataFrame, part: str, names: dict[str, str]) -> str:
    hardest = max(settings_of(records, part, names["DG"]))
    found = ends(records, part, names.values(), setting=hardest)
    told = ", ".join(f"{series} {100 * at.mean:.1f}%" for series, at in found.items())
    return f"Error at the end, {SWEEPS[part][2]} = {hardest:g}: {told}."


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=5.5, height=4)
    ax, known = axes[0][0], paper.FIG_8 if _full(settings) else None
    plotting.curves(ax, records, "curves", list(COMPARED), ONLINE, known=known)
    plotting.log_percent(ax, "sequence error")
    ax.set_xlabel("step of 100 sequences (crosses: the paper)")
    ax.legend()
    return figure


def _sweeps_figure(
    records: pd.DataFrame, settings: Settings, sweeps: list[str], learning_rate: float
) -> Figure:
    """Draw the error at the end (above) and on average (below) at one learning rate."""
    figure, axes = plotting.grid(2, len(sweeps))
    for column, part in enumerate(sweeps):
        final, average = axes[0][column], axes[1][column]
        for name, colour in zip(COMPARED, plotting.WHEEL, strict=False):
            series = at_learning_rate(name, settings, learning_rate)
            plotting.by_setting(final, finals(records, part, series), name, colour=colour)
            points = _known(settings, part).get(name, {})
            plotting.crosses(final, points, color=colour, markersize=7)
            found = averages(records, part, series)
            label = f"{name}, exponent {exponent(found):.2f}"
            plotting.by_setting(average, found, label, colour=colour)
        final.set_ylabel("error at the end")
        average.set(ylabel="average error", xscale="log", yscale="log")
        for ax in (final, average):
            ax.set_xlabel(SWEEPS[part][2])
            ax.legend(fontsize=8)
    axes[0][0].set_title(f"learning rate {learning_rate:g} (crosses: the paper)")
    return figure
