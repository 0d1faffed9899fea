"""Records -> Figures 8 and 10, speed-ups at growing (H, M), and vocabularies."""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, seed_blocks, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import against_paper, beats, ends, finals, settings_of
from kondo_lab.evidence.study import Analysis, Estimate, FrontierPoint, Headline, headline
from kondo_lab.studies import reversal_numbers as paper
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_kondo.captions import captions
from kondo_lab.studies.reversal_kondo.claims import claims
from kondo_lab.studies.reversal_kondo.run import EXACT_COUNT, EXACT_TIES, baselines, delightful
from kondo_lab.studies.reversal_kondo.settings import Settings
from kondo_lab.training import arms

ONLINE, SOLVED = reversals.ONLINE, reversals.SOLVED
FIG_8, FIG_10 = reversals.judged(paper.GATE_FIG_8), reversals.judged(paper.GATE_FIG_10)
SOLVED_SO_FAR = "longest length with mean reward above 0.75 so far"
SOLVED_NOW = "longest length with reward above 0.75 at that moment"
READINGS = {SOLVED_NOW: False, SOLVED_SO_FAR: True}
"""Metric -> whether it is the mean since the start of training."""
SPEED_COSTS = (0, 1, 2, 4, 8)
TARGETS = (SOLVED, 0.05)


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures, of the seeds that are there."""
    records = seed_blocks.joined(records)
    copied, records = reversals.without_ppo(records), reversals.with_ppo(records)
    there, found = set(records["part"]), Analysis()
    lines, figures = found.headline, found.figures
    if "curves" in there:
        lines += _curve_lines(records, settings)
        figures["fig8-learning-curves"] = _curves_figure(records, settings)
        found.findings.append(_ties_finding(records, settings))
        found.frontier.extend(_frontier(records, settings))
    if "lengths" in there:
        own = reversals.fitted(_length_lines(records, settings))
        lines += reversals.uncounted(own) if "lengths" in copied else own
        figures["fig10-lengths"] = _lengths_figure(records, settings)
    if {"lengths", "vocabularies"} <= there:
        lines += _speed_lines(records, settings)
        figures["speed-up-by-backward-cost"] = _speed_figure(records, settings)
    if "vocabularies" in there:
        lines += _vocabulary_lines(records, settings)
        figures["vocabularies"] = _vocabulary_figure(records, settings)
    found.claims.extend(claims(found.headline, settings.length))
    told = captions(found.headline, found.claims, arms.dg_k(settings.rate), SOLVED_SO_FAR)
    return with_captions(found, told)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.num_steps >= 10_000 and settings.length == 10


def _all_series(settings: Settings) -> list[str]:
    return [*delightful(settings), *baselines(), EXACT_TIES]


def _exact(settings: Settings) -> str:
    return f"{arms.dg_k(settings.rate)}, {EXACT_COUNT}"


def _paid(records: pd.DataFrame, series: str) -> Estimate:
    """Return the backward passes at the end of the curves."""
    chosen = statistics.select(records, "curves", series, ONLINE)
    return statistics.estimate(chosen.groupby("seed")["backward"].max().astype(float).tolist())


def _curve_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    exact, end, best = _exact(settings), settings.num_steps, delightful(settings)
    lines = []
    if _full(settings):
        known = against_paper(records, "curves", "Kondo Fig 8", ONLINE, FIG_8, by="step")
        lines += reversals.fitted(known)
    for series in (*list(best)[1:], exact):
        theirs = paper.GATE_FIG_8_BACKWARD.get(series) if _full(settings) else None
        metric, paid = "backward passes at the end", _paid(records, series)
        at = ("Kondo Fig 8", series, metric, "", paid)
        lines.append(headline(*at, expected=theirs, against="fitted"))
    found = ends(records, "curves", [*_all_series(settings), exact])
    lines += beats("Kondo Fig 8", ONLINE, end, best, baselines(), found)
    lines += [
        headline("Kondo Fig 8", EXACT_TIES, ONLINE, x, at) for x, at in _ties(records, settings)
    ]
    return [*lines, headline("beyond the paper", exact, ONLINE, end, found[exact])]


def _ties(records: pd.DataFrame, settings: Settings) -> Iterator[tuple[float, Estimate]]:
    """Yield PMPO with exact ties where the paper's PMPO was read off, if the run got there."""
    for step in [*FIG_8[reversals.FLOAT32], settings.num_steps]:
        if step <= settings.num_steps:
            yield step, statistics.at(records, "curves", EXACT_TIES, ONLINE, step)


def _ties_finding(records: pd.DataFrame, settings: Settings) -> str:
    told = []
    for series in (arms.dg_k(settings.rate), _exact(settings)):
        error = statistics.at(records, "curves", series, ONLINE, settings.num_steps // 10)
        paid = _paid(records, series)
        told.append(
            f"{series}: error {100 * error.mean:.2f} ± {100 * error.se:.2f}% at a tenth of the "
            f"steps, {paid.mean:,.0f} backward passes in all"
        )
    return "Equal answers to one prompt have equal delight. " + "; ".join(told) + "."


def _frontier(records: pd.DataFrame, settings: Settings) -> list[FrontierPoint]:
    rates = dict.fromkeys(_all_series(settings), 1.0)
    rates |= {
        arms.dg_k(settings.rate): settings.rate,
        _exact(settings): settings.rate,
        "DG-K price 0": math.nan,
    }
    task = f"reversal H={settings.length} M=2"
    return [
        statistics.frontier_point(
            records, "curves", series, ONLINE, target, task=task, rate=rates[series]
        )
        for target in TARGETS
        for series in rates
    ]


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2, width=5.2, height=4)
    names = [*_all_series(settings), _exact(settings)]
    panels: tuple[tuple[plotting.Axis, str], ...] = (
        ("step", "step of 100 sequences (log scale)"),
        ("backward", "backward passes (log scale)"),
    )
    for ax, (x, label) in zip(axes[0], panels, strict=True):
        for name in names:
            curve = statistics.curve(records, "curves", name, ONLINE)
            colour, _ = plotting.series_style(name, names)
            plotting.line(ax, curve, name, names, x=x)
            points = FIG_8.get(name, {}) if _full(settings) and x == "step" else {}
            plotting.crosses(ax, points, color=colour, markersize=4)
        plotting.log_percent(ax, "sequence error")
        ax.set(xscale="log", xlabel=label)
        ax.xaxis.set_major_formatter(plotting.counts)
        plotting.label_ends(ax)
    note = f"{plotting.seeds_note(records[records['part'] == 'curves'])} Crosses: the paper."
    plotting.head(figure, "Reversal: error by steps and backward passes, lower is better", note)
    return figure


def _logged(records: pd.DataFrame) -> list[int]:
    return sorted(int(x) for x in records[records["part"] == "lengths"]["forward"].unique())


def _length_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """Return Figure 10 in both readings; the settled one is judged."""
    lines = []
    end = _logged(records)[-1]
    every = sorted({x for points in FIG_10.values() for x in points}) if _full(settings) else [end]
    for metric, average in READINGS.items():
        is_judged = _full(settings) and average == settings.solved_so_far
        for series in _all_series(settings):
            known = FIG_10.get(series, {}) if is_judged else {}
            for x in every:
                found = reversals.longest_solved(records, "lengths", series, x, average=average)
                theirs = known.get(x)
                lines.append(headline("Kondo Fig 10", series, metric, x, found, expected=theirs))
    solved = {name: _shortfall(records, settings, name, end) for name in _all_series(settings)}
    lines += beats(
        "Kondo Fig 10", "- longest length", end, delightful(settings), baselines(), solved
    )
    return lines


def _shortfall(records: pd.DataFrame, settings: Settings, series: str, forward: float) -> Estimate:
    """Return minus the longest length solved, so that the best is the lowest."""
    average = settings.solved_so_far
    found = reversals.longest_solved(records, "lengths", series, forward, average=average)
    return found._replace(mean=-found.mean)


def _lengths_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    """Draw the longest length solved in both readings, and the error at the end by length."""
    figure, axes = plotting.grid(1, 3, width=4.4, height=4)
    for ax, (metric, average) in zip(axes[0], READINGS.items(), strict=False):
        _draw_longest(ax, records, settings, metric, average=average)
    errors = {name: finals(records, "lengths", name) for name in _all_series(settings)}
    plotting.sweep(axes[0][2], errors)
    axes[0][2].set(xlabel="length H", ylabel="sequence error at the end")
    axes[0][2].axhline(SOLVED, color="black", linewidth=0.8, linestyle=":")
    for ax in axes[0]:
        plotting.label_ends(ax)
    plotting.head(
        figure,
        "Reversal: longest length solved (higher is better), and error by length (lower is)",
        "Mean over seeds, band or bars: one standard error. Crosses: the paper. Dotted: solved.",
    )
    return figure


def _draw_longest(
    ax: Axes, records: pd.DataFrame, settings: Settings, metric: str, *, average: bool
) -> None:
    every = _logged(records)
    for name in _all_series(settings):
        colour, dash = plotting.series_style(name, _all_series(settings))
        found = [
            reversals.longest_solved(records, "lengths", name, forward, average=average)
            for forward in every
        ]
        means, errors = [each.mean for each in found], [each.se for each in found]
        ax.plot(every, means, dash, color=colour, label=name)
        plotting.band(ax, every, means, errors, colour=colour)
        plotting.crosses(ax, FIG_10.get(name, {}) if _full(settings) else {}, color=colour)
    ax.xaxis.set_major_formatter(plotting.counts)
    ax.set(xlabel="forward passes", ylabel="longest length solved")
    ax.set_title(metric.removeprefix("longest length with "), fontsize=9)


def _speed(
    records: pd.DataFrame, part: str, series: str, setting: float, ratio: float
) -> Estimate | None:
    """Return the counted speed-up over PG to the solved level, seed by seed.

    None unless all seeds got there.
    """
    baseline, own = (
        statistics.first_reach(records, part, name, ONLINE, SOLVED, setting=setting)
        for name in ("PG", series)
    )
    seeds = sorted(baseline.costs.keys() & own.costs.keys())
    if not seeds or any(reach.reached < reach.seeds for reach in (baseline, own)):
        return None
    return statistics.estimate(
        [
            statistics.speed_up(ratio, baseline=baseline.costs[seed], cost=own.costs[seed])
            for seed in seeds
        ]
    )


def _places(records: pd.DataFrame, settings: Settings) -> list[tuple[str, float, str]]:
    """Return (part, setting, name) of every (H, M) where PG and the gates were run."""
    lengths = set(settings.baseline_lengths) & set(settings.delight_lengths)
    by_length = [("lengths", float(length), f"H={length} M=2") for length in sorted(lengths)]
    by_size = [
        ("vocabularies", size, f"H={settings.length} M={size:g}")
        for size in settings_of(records, "vocabularies", "PG")
    ]
    return by_length + by_size


def _speed_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    for part, setting, name in _places(records, settings):
        metric = f"speed-up over PG to 25% error, {name}"
        for series in delightful(settings):
            for ratio in SPEED_COSTS:
                value = _speed(records, part, series, setting, ratio)
                if value is not None:
                    lines.append(headline("Kondo section 5", series, metric, ratio, value))
    return lines


def _speed_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    names = list(delightful(settings))
    figure, axes = plotting.grid(1, len(names), width=3.8)
    places = _places(records, settings)
    ratios = np.linspace(0, 8, 17)
    for ax, series in zip(axes[0], names, strict=True):
        for number, (part, setting, name) in enumerate(places):
            found = [_speed(records, part, series, setting, float(ratio)) for ratio in ratios]
            values = [each.mean for each in found if each is not None]
            if values:
                colour = plotting.sequential(number / max(1, len(places) - 1))
                ax.plot(ratios, values, color=colour, label=name)
        ax.axhline(1, color="#5a5a5a", linestyle=":")
        ax.set(title=series, xlabel="cost of a backward, in forwards")
        ax.set_ylabel("counted speed-up over PG")
        plotting.label_ends(ax)
    says = "Reversal: counted speed-up over PG to the solved level, higher is better"
    plotting.head(figure, says, "H: length, M: vocabulary. Only where all seeds solve it.")
    return figure


def _vocabulary_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    metric = f"{ONLINE} at the end, H={settings.length}, by M"
    return [
        headline("Kondo section 5", series, metric, size, found)
        for series in ("PG", *delightful(settings))
        for size, found in finals(records, "vocabularies", series).items()
    ]


def _vocabulary_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=5, height=3.8)
    names = ("PG", *delightful(settings))
    plotting.sweep(axes[0][0], {name: finals(records, "vocabularies", name) for name in names})
    axes[0][0].set(xscale="log", xlabel="vocabulary M (log scale)")
    axes[0][0].set_ylabel("sequence error at the end")
    sizes = settings_of(records, "vocabularies", "PG")
    axes[0][0].set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes[0][0].minorticks_off()
    plotting.label_ends(axes[0][0])
    note = plotting.seeds_note(
        records[records["part"] == "vocabularies"], "bars: one standard error"
    )
    plotting.head(figure, "Reversal: error by vocabulary, lower is better", note)
    return figure
