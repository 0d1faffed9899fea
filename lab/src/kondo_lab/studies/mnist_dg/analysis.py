"""Records -> Figures 2, 3 and 4 of the DG paper, beside its numbers, and the appendix."""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import against_paper
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline, ordering
from kondo_lab.studies.mnist_dg import appendix, paper
from kondo_lab.studies.mnist_dg.captions import captions
from kondo_lab.studies.mnist_dg.claims import claims
from kondo_lab.studies.mnist_dg.run import BASELINES, TO_CE, TO_PG, part_name, series
from kondo_lab.studies.mnist_dg.settings import Settings

ONLINE = "online error"
CURVES = ("PG, zero baseline", "DG, zero baseline", "cross-entropy")
PROBED = "expected"
"""Baseline of Figure 4."""
METHODS = {"PG": "#5a5a5a", "DG": "#0072b2"}
"""And their colours."""
DIRECTIONS = {TO_PG: paper.FIG_4A, TO_CE: paper.FIG_4B}
END = 0.98
"""What is logged after this share of the steps is the error at the end."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there = [samples for samples in settings.samples if part_name(samples) in set(records["part"])]
    found = Analysis()
    if 1 in there:
        found.headline.extend(_curve_lines(records, settings))
        found.figures["fig2-learning-curves"] = _curves_figure(records, settings)
        found.findings.append(_finding(records, settings))
    if there:
        found.headline.extend(_sample_lines(records, settings, there))
        found.figures["fig3-samples-per-image"] = _samples_figure(records, settings, there)
    probed = [samples for samples in there if samples in (1, max(settings.samples))]
    if probed:
        found.headline.extend(_cosine_lines(records, settings, probed))
        found.figures["fig4-directions"] = _cosine_figure(records, settings, probed)
    swept = appendix.there(records)
    if swept:
        found.headline.extend(appendix.lines(records, settings, swept))
        found.figures["appendix-sweeps"] = appendix.figure(records, settings, swept)
    found.claims.extend(claims(found.headline))
    told = captions(found.headline, found.claims)
    return with_captions(found, told)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.data == "mnist" and settings.num_steps >= 10_000


def _of(records: pd.DataFrame, several: list[int]) -> pd.DataFrame:
    """Return the records with these numbers of samples per image."""
    return records[records["part"].isin([part_name(samples) for samples in several])]


def _end(records: pd.DataFrame, settings: Settings, name: str, samples: int) -> Estimate:
    """Return the online error over the last 2% of the steps."""
    chosen = statistics.select(records, part_name(samples), name, ONLINE)
    late = chosen[chosen["step"] > END * settings.num_steps]
    return statistics.estimate(late.groupby("seed")["value"].mean().tolist())


def _curve_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    if _full(settings):
        lines += against_paper(records, part_name(1), "DG Fig 2", ONLINE, paper.FIG_2, by="step")
    found = {name: _end(records, settings, name, 1) for name in CURVES}
    order, end = CURVES[::-1], settings.num_steps
    return [*lines, ordering("DG Fig 2", ONLINE, end, order=order, ours=found)]


def _sample_lines(records: pd.DataFrame, settings: Settings, there: list[int]) -> list[Headline]:
    lines, metric = [], "online error at the end"
    for samples in there:
        for baseline in BASELINES:
            found = {}
            for name in (series("PG", baseline), series("DG", baseline)):
                found[name] = _end(records, settings, name, samples)
                known = paper.FIG_3[name].get(samples) if _full(settings) else None
                line = headline("DG Fig 3", name, metric, samples, found[name], expected=known)
                lines.append(line)
            pair = list(found)[::-1]
            lines.append(ordering("DG Fig 3", ONLINE, samples, order=pair, ours=found))
    if 1 in there:
        exact = _end(records, settings, "exact PG", 1)
        known = paper.EXACT_PG if _full(settings) else None
        lines.append(headline("DG Fig 3", "exact PG", metric, "", exact, expected=known))
    return lines


def _cosine_lines(records: pd.DataFrame, settings: Settings, probed: list[int]) -> list[Headline]:
    lines = []
    for figure, (metric, known) in zip(("DG Fig 4a", "DG Fig 4b"), DIRECTIONS.items(), strict=True):
        for method, samples in itertools.product(METHODS, probed):
            name, points = series(method, PROBED), known.get((method, samples), {})
            for step in points if _full(settings) else [settings.num_steps]:
                found = statistics.at(records, part_name(samples), name, metric, step)
                titled, theirs = f"{method} S={samples}", points.get(step)
                lines.append(headline(figure, titled, metric, step, found, expected=theirs))
    return lines


def _finding(records: pd.DataFrame, settings: Settings) -> str:
    ends = {name: _end(records, settings, name, 1).mean for name in CURVES}
    pg, dg, cross_entropy = (ends[name] for name in CURVES)
    return (
        f"Zero baseline, one sample per image: online error at the end PG {100 * pg:.2f}%, "
        f"DG {100 * dg:.2f}%, cross-entropy {100 * cross_entropy:.2f}%."
    )


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=6.4, height=4)
    ax, known = axes[0][0], paper.FIG_2 if _full(settings) else None
    plotting.curves(ax, records, part_name(1), list(CURVES), ONLINE, known=known)
    plotting.log_percent(ax, ONLINE)
    ax.set_xlabel("step")
    plotting.label_ends(ax)
    note = f"{plotting.seeds_note(_of(records, [1]))} Crosses: the paper."
    plotting.head(figure, "MNIST: online error by step, lower is better", note)
    return figure


def _samples_figure(records: pd.DataFrame, settings: Settings, there: list[int]) -> Figure:
    figure, axes = plotting.grid(2, 2, width=5.0, height=3.2)
    for ax, baseline in zip(axes.flat, BASELINES, strict=True):
        for method, colour in METHODS.items():
            name = series(method, baseline)
            found = {float(samples): _end(records, settings, name, samples) for samples in there}
            plotting.by_setting(ax, found, method, colour=colour)
            if _full(settings):
                plotting.crosses(ax, paper.FIG_3[name], color=colour)
        if 1 in there:
            level = _end(records, settings, "exact PG", 1).mean
            xs = [min(there), max(there)]
            ax.plot(xs, [level, level], color="black", linestyle=":", label="exact PG")
        ax.set_xscale("log")
        plotting.log_percent(ax, f"{ONLINE} at the end")
        ax.set(title=f"{baseline} baseline", xlabel="samples per image (log)")
        plotting.label_ends(ax)
    says = "MNIST: error at the end by samples per image, lower is better"
    note = plotting.seeds_note(_of(records, there), "bars: one standard error")
    plotting.head(figure, says, f"{note} Crosses: the paper.")
    return figure


def _cosine_figure(records: pd.DataFrame, settings: Settings, probed: list[int]) -> Figure:
    figure, axes = plotting.grid(1, 2, width=4.8, height=4.4)
    for ax, (metric, known) in zip(axes[0], DIRECTIONS.items(), strict=True):
        for (method, colour), samples in itertools.product(METHODS.items(), probed):
            name, label = series(method, PROBED), f"{method} S={samples}"
            curve = statistics.curve(records, part_name(samples), name, metric)
            dash = "-" if samples == 1 else (0, (4, 1))
            plotting.line(ax, curve, label, [label], x="step", color=colour, linestyle=dash)
            points = known.get((method, samples), {}) if _full(settings) else {}
            plotting.crosses(ax, points, color=colour)
        ax.set(yscale="log", ylabel=f"{metric} (log scale)", xlabel="step")
        plotting.log_ticks(ax.yaxis)
        plotting.label_ends(ax)
    says = "MNIST: distance to the exact directions by step, lower is better"
    note = f"{plotting.seeds_note(_of(records, probed))} S: samples per image. Crosses: the paper."
    plotting.head(figure, says, note)
    return figure
