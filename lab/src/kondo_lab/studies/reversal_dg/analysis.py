"""Records -> Figures 8 and 9 of the DG paper: curves, final and average error by H and M."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.comparison import against_paper, finals, settings_of
from kondo_lab.studies.reversal_dg import paper
from kondo_lab.studies.reversal_dg.run import COMPARED, at_learning_rate
from kondo_lab.studies.reversal_dg.settings import Settings
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline, ordering

ONLINE = "online error"
SWEEPS = {"lengths": ("DG Fig 9a", "length H"), "vocabularies": ("DG Fig 9b", "vocabulary M")}
AVERAGES = {"lengths": "DG Fig 9c", "vocabularies": "DG Fig 9d"}


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = set(records["part"])
    lines: list[Headline] = []
    figures: dict[str, Figure] = {}
    findings: list[str] = []
    if "curves" in there:
        lines += _curve_lines(records, settings)
        figures["fig8-learning-curves"] = _curves_figure(records, settings)
    sweeps = [part for part in SWEEPS if part in there]
    for part in sweeps:
        for learning_rate in settings.sweep_learning_rates:
            names = {name: at_learning_rate(name, settings, learning_rate) for name in COMPARED}
            lines += _sweep_lines(records, settings, part, names)
            findings.append(_finding(records, part, names))
    for learning_rate in settings.sweep_learning_rates if sweeps else ():
        drawn = _sweeps_figure(records, settings, sweeps, learning_rate)
        figures[f"fig9-learning-rate-{learning_rate:g}"] = drawn
    return Analysis(headline=lines, figures=figures, findings=findings)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.num_steps >= 10_000 and settings.length == 10


def _known(settings: Settings, part: str) -> dict[str, dict[float, float]]:
    if not _full(settings):
        return {}
    return paper.FIG_9A if part == "lengths" else paper.FIG_9B


def _curve_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    ends = {name: statistics.final(records, "curves", name, ONLINE).mean for name in COMPARED}
    order = [
        ordering("DG Fig 8", ONLINE, settings.curve_steps, paper=["DG", name], ours=ends)
        for name in ("PG", "PPO", "PMPO")
    ]
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
    figure = SWEEPS[part][0]
    lines = []
    ends = {series: finals(records, part, series) for series in names.values()}
    for name, series in names.items():
        known = _known(settings, part).get(name, {})
        lines += [
            headline(
                figure, series, f"{ONLINE} at the end", setting, value, paper=known.get(setting)
            )
            for setting, value in ends[series].items()
        ]
    hardest = max(ends[names["DG"]])
    means = {series: found[hardest].mean for series, found in ends.items()}
    slopes = {series: exponent(averages(records, part, series)) for series in ends}
    others = [[names["DG"], names[name]] for name in ("PG", "PPO", "PMPO")]
    lines += [
        ordering(figure, f"{ONLINE} at the end", hardest, paper=pair, ours=means) for pair in others
    ]
    lines += [
        headline(
            AVERAGES[part],
            series,
            "exponent of the average error",
            "",
            Estimate(slope, seeds=settings.sweep_seeds),
        )
        for series, slope in slopes.items()
    ]
    lines += [ordering(AVERAGES[part], "exponent", "", paper=pair, ours=slopes) for pair in others]
    return lines


def _finding(records: pd.DataFrame, part: str, names: dict[str, str]) -> str:
    hardest = max(settings_of(records, part, names["DG"]))
    told = ", ".join(
        f"{series} {100 * finals(records, part, series)[hardest].mean:.1f}%"
        for series in names.values()
    )
    return f"Error at the end, {SWEEPS[part][1]} = {hardest:g}: {told}."


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=5.5, height=4)
    ax = axes[0][0]
    for name, colour in zip(COMPARED, plotting.WHEEL, strict=False):
        curve = statistics.curve(records, "curves", name, ONLINE)
        plotting.line(ax, curve, name, list(COMPARED), x="step", color=colour, linestyle="-")
        points = paper.FIG_8[name] if _full(settings) else {}
        ax.plot(list(points), list(points.values()), "x", color=colour)
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
            final.plot(list(points), list(points.values()), "x", color=colour, markersize=7)
            found = averages(records, part, series)
            plotting.by_setting(
                average, found, f"{name}, exponent {exponent(found):.2f}", colour=colour
            )
        final.set_ylabel("error at the end")
        average.set(ylabel="average error", xscale="log", yscale="log")
        for ax in (final, average):
            ax.set_xlabel(SWEEPS[part][1])
            ax.legend(fontsize=8)
    axes[0][0].set_title(f"learning rate {learning_rate:g} (crosses: the paper)")
    return figure
