"""Closed form beside Monte Carlo, the two figures of the paper, and where eta may stand."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import finals, means
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline, ordering
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.bandit_dg.captions import captions
from kondo_lab.studies.bandit_dg.claims import claims
from kondo_lab.studies.bandit_dg.run import (
    ALONG,
    CE,
    DG,
    ERROR,
    GAP,
    OFF,
    PG,
    PG_CLOSER,
    POOLED_GAP,
)
from kondo_lab.studies.bandit_dg.settings import Settings

GAP_TO_PG = "1 - cosine to the true gradient"
GAP_TO_CE = "1 - cosine to the CE gradient"
LEAST_SHOWN = 1e-8
"""Of 1 - cosine: what is smaller is rounding."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there, found = set(records["part"]), Analysis()
    lines, figures, eta = found.headline, found.figures, settings.eta
    if "gap" in there:
        lines += _gap_lines(records, settings)
        figures["prop1-cosine-gap"] = _gap_figure(records, settings)
    if "single" in there:
        orders = {ERROR: [DG, PG], GAP: [DG, PG]}
        steps = [settings.single_steps // 3, settings.single_steps]
        lines += _figure_lines(records, "single", "DG Fig 5", orders, steps, eta)
        figures["fig5-one-context"] = _curves(
            records, "single", (PG, DG), eta, "One context: exact gradients", GAP_TO_PG
        )
        found.findings.append(_single_finding(records, settings))
    if "table" in there:
        orders = {ERROR: [CE, DG, PG], GAP: [DG, PG]}
        steps = [settings.table_steps // 10, settings.table_steps]
        lines += _figure_lines(records, "table", "DG Fig 6", orders, steps, eta)
        figures["fig6-many-contexts"] = _curves(
            records, "table", (PG, DG, CE), eta, "Many contexts: exact gradients", GAP_TO_CE
        )
    if "search" in there:
        lines += _search_lines(records, settings)
        found.findings.append(_search_finding(records, settings))
    if {"table", "search"} <= there:
        figures["prop2-eta"] = _eta_figure(records, settings)
    found.claims.extend(claims(found.headline))
    return with_captions(found, captions(found.headline, found.claims))


def theory(settings: Settings, error: float) -> dict[str, float]:
    """Return DG / PG of each measured number: (w- / c)^2, c and w-^2."""
    _, failure, shrink = bandit.dg_weights(
        1 - error, settings.arms, settings.baseline, settings.eta
    )
    gap = (failure / shrink) ** 2
    return {GAP: gap, POOLED_GAP: gap, ALONG: shrink, OFF: failure**2}


def ratio(records: pd.DataFrame, metric: str, error: float) -> Estimate:
    """Return DG / PG of a number at one policy: mean over mean, error from the ratios by seed."""
    dg, pg = (
        statistics.select(records, "gap", name, metric, setting=error).set_index("seed")["value"]
        for name in (DG, PG)
    )
    return statistics.estimate((dg / pg).tolist())._replace(mean=float(dg.mean() / pg.mean()))


def _gap_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    large = settings.batch * settings.gap_pooled
    names = {
        GAP: f"cosine-gap ratio, K={settings.arms}, B={settings.batch}",
        POOLED_GAP: f"cosine-gap ratio, K={settings.arms}, B={large}",
        ALONG: "c",
        OFF: "perpendicular-variance ratio",
    }
    lines = []
    for metric, name in names.items():
        for error in settings.gap_errors:
            found = ratio(records, metric, error)
            known = theory(settings, error)[metric]
            lines.append(
                headline(
                    "DG Prop 1", "DG/PG", name, error, found, expected=known, against="formula"
                )
            )
    return lines


def _figure_lines(
    records: pd.DataFrame,
    part: str,
    figure: str,
    orders: dict[str, list[str]],
    steps: list[int],
    eta: float,
) -> list[Headline]:
    """Return each series' number at each step, and whether they end in the paper's order."""
    lines = []
    at = partial(statistics.at, records, part, setting=eta)
    for metric, order in orders.items():
        for step in steps:
            found = {name: at(name, metric, step) for name in order}
            lines += [headline(figure, name, metric, step, value) for name, value in found.items()]
        lines.append(ordering(figure, metric, steps[-1], order=order, ours=found))
    return lines


def _single_finding(records: pd.DataFrame, settings: Settings) -> str:
    target = 0.1
    costs = {
        name: statistics.first_reach(records, "single", name, ERROR, target) for name in (PG, DG)
    }
    steps = {name: reach.mean.forward / settings.batch for name, reach in costs.items()}
    return (
        f"Figure 5: {100 * target:g}% error after {steps[DG]:.0f} steps of DG and "
        f"{steps[PG]:.0f} of PG ({costs[DG].reached} and {costs[PG].reached} of "
        f"{costs[PG].seeds} seeds reach it)."
    )


def _largest_share(records: pd.DataFrame, eta: float) -> float:
    """Return the share of sets where PG was closer to CE, of the worst number of contexts."""
    chosen = records[
        (records["metric"] == PG_CLOSER) & np.isclose(records["setting"], eta, rtol=1e-5)
    ]
    return float(chosen.groupby("series")["value"].mean().max())


def _search_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    metric = "share of drawn sets of contexts where PG is closer to CE"
    lines = []
    for eta in settings.search_etas:
        figure, known = ("DG Prop 2", 0.0) if eta > 0.5 else ("beyond the paper", None)
        ours = Estimate(_largest_share(records, eta), seeds=settings.search_seeds)
        lines.append(
            headline(
                figure, "DG, PG", metric, f"eta={eta:g}", ours, expected=known, against="formula"
            )
        )
    return lines


def _search_finding(records: pd.DataFrame, settings: Settings) -> str:
    broken = [eta for eta in settings.search_etas if _largest_share(records, eta) > 0]
    sets = settings.search_seeds * settings.search_populations * len(settings.search_contexts)
    where = f"up to eta = {max(broken):g}" if broken else "at no eta"
    return (
        f"Of {sets:,} drawn sets of contexts at each eta, PG was closer to CE than DG {where}: "
        f"eta > 1/2 is sufficient, and the draws leave room below it."
    )


def _gap_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 1, width=6.4, height=4.0)
    ax = axes[0, 0]
    errors = np.geomspace(min(settings.gap_errors), max(settings.gap_errors), 100)
    names = {POOLED_GAP: "cosine gap, (w-/c)^2", ALONG: "length, c", OFF: "perp. variance, w-^2"}
    for colour, (metric, name) in zip(plotting.WHEEL, names.items(), strict=False):
        found = [ratio(records, metric, error).mean for error in settings.gap_errors]
        ax.plot(settings.gap_errors, found, "o", color=colour)
        ax.plot(errors, [theory(settings, e)[metric] for e in errors], color=colour, label=name)
    ax.set(xscale="log", yscale="log", xlabel="error of the policy, 1 - p", ylabel="DG / PG")
    plotting.label_ends(ax)
    says = f"Direction, length and noise of DG's gradient over PG's, {settings.arms} arms"
    plotting.head(figure, says, "Lines: closed form. Dots: measured. Below 1: less than PG.")
    return figure


def _curves(
    records: pd.DataFrame, part: str, names: tuple[str, ...], eta: float, says: str, label: str
) -> Figure:
    figure, axes = plotting.grid(1, 2)
    titles = ("error: lower is better", "1 - cosine: lower is better")
    for ax, metric, text, title in zip(
        axes[0], (ERROR, GAP), ("error", label), titles, strict=True
    ):
        for name in names:
            if (name, metric) == (CE, GAP):
                continue  # zero, off a log axis
            curve = statistics.curve(records, part, name, metric, setting=eta)
            plotting.line(ax, curve, name, names, x="step")
        ax.set(yscale="log", xlabel="step", ylabel=text, title=title)
        # Where a direction is exact, rounding sends the curve down by dozens of decades.
        ax.set_ylim(bottom=max(LEAST_SHOWN, ax.get_ylim()[0]))
        plotting.label_ends(ax)
    plotting.head(figure, says, plotting.seeds_note(records[records["part"] == part]))
    return figure


def _eta_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2)
    _draw_lead(axes[0, 0], records, settings)
    _draw_etas(axes[0, 1], records, settings)
    says = "DG by temperature: where PG is closer to cross-entropy (CE), and error"
    note = f"Left, dashed: temperature 1/2. Right: error after {settings.table_steps} steps"
    plotting.head(figure, says, f"{note}, bars: one standard error.")
    return figure


def _draw_lead(ax: Axes, records: pd.DataFrame, settings: Settings) -> None:
    etas = settings.search_etas
    for number, contexts in enumerate(settings.search_contexts):
        colour = plotting.sequential(number / max(1, len(settings.search_contexts) - 1))
        shares = means(records, "search", f"N={contexts}", PG_CLOSER, etas)
        ax.plot(etas, shares, "o-", color=colour, label=f"N = {contexts}")
    ax.axvline(0.5, color=plotting.DARK, linestyle="--", linewidth=1)
    ax.set(xscale="log", title="where PG is closer than DG", xlabel="temperature eta")
    ax.set_ylabel("share of sets of N contexts")
    plotting.label_ends(ax)


def _draw_etas(ax: Axes, records: pd.DataFrame, settings: Settings) -> None:
    found = finals(records, "table", DG, ERROR)
    plotting.by_setting(ax, found, DG, colour=plotting.method_colour(DG))
    for name in (PG, CE):
        level = statistics.final(records, "table", name, ERROR).mean
        xs = [min(found), max(found)]
        ax.plot(xs, [level, level], color=plotting.method_colour(name), ls="--", label=name)
    ax.set(xscale="log", xlabel="temperature eta", title="error: lower is better")
    plotting.log_percent(ax, "error")
    plotting.label_ends(ax)
