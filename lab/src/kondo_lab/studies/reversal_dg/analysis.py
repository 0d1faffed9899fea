"""Records -> Figures 8 and 9 of the DG paper: curves, final and average error; variants."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, seed_blocks, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import against_paper, beats, ends, finals, settings_of
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies import reversal_numbers as paper
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_dg.captions import captions
from kondo_lab.studies.reversal_dg.claims import claims
from kondo_lab.studies.reversal_dg.run import COMPARED, EXACT_TIES, VARIANTS, VARIED
from kondo_lab.studies.reversal_dg.settings import Settings

ONLINE = reversals.ONLINE
FIG_8 = reversals.judged(paper.DG_FIG_8)
OTHERS = ("PG", "PPO", reversals.FLOAT32)
"""Compared with DG's, as in the paper."""
SWEEPS = {
    "lengths": ("DG Fig 9a", "DG Fig 9c", "length H"),
    "vocabularies": ("DG Fig 9b", "DG Fig 9d", "vocabulary M"),
}
"""Figure of the error at the end, of the average error, and what the axis says."""
AVERAGE = "average error"


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures, of the seeds that are there."""
    records = seed_blocks.joined(records)
    copied, records = reversals.without_ppo(records), reversals.with_ppo(records)
    there, found = set(records["part"]), Analysis()
    if "curves" in there:
        found.headline.extend(_curve_lines(records, settings))
        found.figures["fig8-learning-curves"] = _curves_figure(records, settings)
    sweeps = [part for part in SWEEPS if part in there]
    for part in sweeps:
        lines = reversals.fitted(_sweep_lines(records, settings, part))
        found.headline.extend(reversals.uncounted(lines) if part in copied else lines)
        found.findings.append(_finding(records, part))
    if sweeps:
        found.figures["fig9-lengths-and-vocabularies"] = _sweeps_figure(records, settings, sweeps)
    if "variants" in there:
        found.headline.extend(_variant_lines(records))
        found.figures["variants"] = _variants_figure(records)
    found.claims.extend(claims(found.headline))
    told = captions(found.headline, found.claims)
    return with_captions(found, told)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.num_steps >= 10_000 and settings.length == 10


def _known(settings: Settings, part: str) -> dict[str, reversals.Points]:
    if not _full(settings):
        return {}
    return reversals.judged(paper.DG_FIG_9A if part == "lengths" else paper.DG_FIG_9B)


def _curve_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    found = ends(records, "curves", COMPARED)
    order = beats("DG Fig 8", ONLINE, settings.curve_steps, ["DG"], OTHERS, found)
    if not _full(settings):
        return order
    points = against_paper(records, "curves", "DG Fig 8", ONLINE, FIG_8, by="step")
    ties = [
        headline(
            "DG Fig 8",
            EXACT_TIES,
            ONLINE,
            x,
            statistics.at(records, "curves", EXACT_TIES, ONLINE, x),
        )
        for x in FIG_8[reversals.FLOAT32]
    ]
    return [*reversals.fitted(points), *ties, *order]


def averages_by_seed(
    records: pd.DataFrame, part: str, series: str
) -> dict[float, dict[int, float]]:
    """Return setting -> {seed: mean error over the run}; each point stands for the steps before."""
    found = {}
    for setting in settings_of(records, part, series):
        chosen = statistics.select(records, part, series, ONLINE, setting=setting)
        found[setting] = {
            int(seed): float(np.average(own["value"], weights=np.diff(own["step"], prepend=0)))
            for seed, own in chosen.sort_values("step").groupby("seed")
        }
    return found


def averages(records: pd.DataFrame, part: str, series: str) -> dict[float, Estimate]:
    """Return setting -> mean error over the whole run, mean over seeds."""
    by_seed = averages_by_seed(records, part, series)
    return {setting: statistics.estimate(list(own.values())) for setting, own in by_seed.items()}


def exponent(found: Mapping[float, Mapping[int, float]]) -> Estimate:
    """Return the slope of log average error against log setting, by least squares, seed by seed.

    Args:
        found: setting -> {seed: average error}. Seeds that were run at every setting count.
    """
    seeds = sorted(set.intersection(*(set(own) for own in found.values())))
    logs = np.log(list(found))
    return statistics.estimate(
        [float(np.polyfit(logs, np.log([own[n] for own in found.values()]), 1)[0]) for n in seeds]
    )


def _sweep_lines(records: pd.DataFrame, settings: Settings, part: str) -> list[Headline]:
    figure, average, _ = SWEEPS[part]
    lines, metric = [], f"{ONLINE} at the end"
    found = {series: finals(records, part, series) for series in COMPARED}
    for series, values in found.items():
        known = _known(settings, part).get(series, {})
        for setting, value in values.items():
            theirs = known.get(setting)
            lines.append(headline(figure, series, metric, setting, value, expected=theirs))
    hardest = max(found["DG"])
    at_hardest = {series: values[hardest] for series, values in found.items()}
    lines += beats(figure, metric, hardest, ["DG"], OTHERS, at_hardest)
    slopes = {series: exponent(averages_by_seed(records, part, series)) for series in COMPARED}
    for series, slope in slopes.items():
        lines.append(headline(average, series, "exponent of the average error", "", slope))
    orders = beats(average, "exponent", "", ["DG"], OTHERS, slopes)
    return [*lines, *reversals.open_if_few(orders)]


def _variant_lines(records: pd.DataFrame) -> list[Headline]:
    """Return the average error of every variant, and whether DG's is the lowest."""
    found = {series: averages(records, "variants", series) for series in VARIED}
    lines, others = [], [series for series in VARIED if series != "DG"]
    for place, variant in enumerate(VARIANTS):
        here = {series: values[place] for series, values in found.items()}
        metric = f"{AVERAGE}, {variant.name}"
        lines += [headline("DG App D", series, metric, "", value) for series, value in here.items()]
        lines += beats("DG App D", metric, "", ["DG"], others, here)
    return lines


def _finding(records: pd.DataFrame, part: str) -> str:
    hardest = max(settings_of(records, part, "DG"))
    found = ends(records, part, COMPARED, setting=hardest)
    told = ", ".join(f"{series} {100 * at.mean:.1f}%" for series, at in found.items())
    seeds = found["DG"].seeds
    return f"Error at the end, {SWEEPS[part][2]} = {hardest:g}, {seeds} seeds: {told}."


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=5.5, height=4)
    ax, known = axes[0][0], FIG_8 if _full(settings) else None
    plotting.curves(ax, records, "curves", list(COMPARED), ONLINE, known=known)
    plotting.log_percent(ax, "sequence error")
    ax.set_xlabel("step of 100 sequences")
    plotting.label_ends(ax)
    note = f"{plotting.seeds_note(records[records['part'] == 'curves'])} Crosses: the paper."
    plotting.head(figure, "Reversal: error by step, lower is better", note)
    return figure


def _sweeps_figure(records: pd.DataFrame, settings: Settings, sweeps: list[str]) -> Figure:
    """Draw the error at the end (above) and on average (below)."""
    figure, axes = plotting.grid(2, len(sweeps))
    for column, part in enumerate(sweeps):
        final, average = axes[0][column], axes[1][column]
        for name in COMPARED:
            colour, dash = plotting.series_style(name, list(COMPARED))
            draw = partial(plotting.by_setting, colour=colour, linestyle=dash)
            draw(final, finals(records, part, name), name)
            points = _known(settings, part).get(name, {})
            plotting.crosses(final, points, color=colour, markersize=7)
            found = averages(records, part, name)
            slope = exponent(averages_by_seed(records, part, name)).mean
            draw(average, found, f"{name}, slope {slope:.2f}")
        final.set_ylabel("error at the end")
        average.set(ylabel="average error", xscale="log", yscale="log")
        run_at = settings_of(records, part, "DG")
        average.set_xticks(run_at, [f"{x:g}" for x in run_at])
        average.minorticks_off()
        plotting.log_ticks(average.yaxis)
        for ax in (final, average):
            ax.set_xlabel(SWEEPS[part][2])
            plotting.label_ends(ax)
    plotting.head(
        figure,
        "Reversal: error at the end (above) and on average (below), lower is better",
        "Mean over seeds, bars: one standard error. Crosses: the paper.",
    )
    return figure


def _variants_figure(records: pd.DataFrame) -> Figure:
    """Draw the curves of every variant."""
    columns = len(VARIANTS) // 2
    figure, axes = plotting.grid(2, columns, width=3.1, height=2.7)
    for place, (ax, variant) in enumerate(zip(axes.flat, VARIANTS, strict=True)):
        plotting.curves(ax, records, "variants", list(VARIED), ONLINE, setting=place)
        plotting.log_percent(ax, "error")
        ax.set_title(variant.name.replace(", ", ",\n"), fontsize=8)
        ax.set_xlabel("step")
        plotting.label_ends(ax)
    says = "Reversal: error by step of every variant, lower is better"
    plotting.head(figure, says, plotting.seeds_note(records[records["part"] == "variants"]))
    return figure
