"""Records -> Figures 1 to 5, the paper's numbers beside ours, and the quality-cost frontier."""

import itertools
import math
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.agreement import Rule
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import against_paper, beats, ends, finals, settings_of
from kondo_lab.evidence.study import (
    Analysis,
    Estimate,
    FrontierPoint,
    Headline,
    headline,
    ordering,
)
from kondo_lab.studies.mnist_kondo import paper, speed_ups, tolerance
from kondo_lab.studies.mnist_kondo.captions import captions
from kondo_lab.studies.mnist_kondo.claims import claims
from kondo_lab.studies.mnist_kondo.run import DELIGHT_NOISE, LOGIT_NOISE, NOISES, SIGNALS
from kondo_lab.studies.mnist_kondo.settings import Settings
from kondo_lab.studies.mnist_kondo.speed_ups import ONLINE, TARGET, TEST
from kondo_lab.training import arms

COSTS = range(9)
DEAREST = COSTS[-1]
FALL = "online error at the end over that at two thirds of the steps"
BEARS = 1.25
"""Noise counts as borne while the final error stays below this many times the noise-free one."""
PLATEAU = 0.9
"""Errors count as settled where the last third of the steps takes off less than a tenth."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there, found = set(records["part"]), Analysis()
    lines, figures = found.headline, found.figures
    if "curves" in there:
        lines += _curve_lines(records, settings) + _speed_lines(records, settings)
        figures["fig1-learning-curves"] = _curves_figure(records, settings)
        figures["fig3-speed-up"] = _speed_figure(records, settings)
        found.frontier.extend(_curve_frontier(records, settings))
        found.findings.append(_speed_finding(records, settings))
    if "rates" in there:
        lines += _rate_lines(records, settings)
        found.findings.append(_plateau_finding(records, settings))
        figures["fig2-rates"] = _rates_figure(records, settings)
        found.frontier.extend(_rate_frontier(records, settings))
    if "noise" in there:
        lines += _noise_lines(records, settings)
        found.findings.append(_noise_finding(records, settings))
        figures["fig4-noise"] = _noise_figure(records, settings)
    if "priorities" in there:
        lines += _priority_lines(records, settings)
        figures["fig5-priorities"] = _priorities_figure(records, settings)
    found.claims.extend(claims(found.headline))
    told = captions(found.headline, found.claims, arms.dg_k(settings.rate), settings.rate)
    return with_captions(found, told)


def _series(settings: Settings) -> tuple[str, str, str]:
    return "PG", "DG", arms.dg_k(settings.rate)


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.data == "mnist" and settings.num_steps >= 10_000


def _curve_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    names, end = _series(settings), settings.num_steps * settings.batch
    lines = []
    if _full(settings):
        lines += against_paper(records, "curves", "Kondo Fig 1", ONLINE, paper.FIG_1, by="forward")
    pg, dg, gated = names
    order, found = [dg, gated, pg], ends(records, "curves", names)
    lines.append(ordering("Kondo Fig 1", ONLINE, end, order=order, ours=found))
    tests = ends(records, "curves", names, TEST)
    return lines + [headline("Kondo Fig 1", name, TEST, end, tests[name]) for name in names]


def _speed_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    """Return every reading at every cost ratio; the paper's numbers stand beside one of them.

    That one was chosen with the paper's numbers in view, so it counts as fitted.

    DG's speed-up is one number at every ratio, and the gate's nine follow from one: DG is judged
    at 0, the gate at 0 and at the highest ratio.
    """
    lines = []
    for definition in speed_ups.DEFINITIONS:
        found = _passes(records, settings, definition)
        for series, ratio in itertools.product(_series(settings)[1:], COSTS):
            ours = speed_ups.speed_up(found["PG"], found[series], ratio)
            if not math.isfinite(ours.mean):
                continue
            judged = _full(settings) and definition == speed_ups.JUDGED
            known = paper.FIG_3[series][ratio] if judged else None
            at = ("Kondo Fig 3", series, definition.words, ratio)
            line = headline(*at, ours, expected=known, against="fitted")
            counts = ratio == 0 or (ratio == DEAREST and series != "DG")
            lines.append(line if counts else line._replace(against="", verdict=""))
    return lines + (_reading_of_fig_1() if _full(settings) else [])


def _passes(
    records: pd.DataFrame, settings: Settings, definition: speed_ups.Definition
) -> dict[str, speed_ups.Passes]:
    """Return series -> the passes until the target, as a definition counts them."""
    metric, rule = definition
    return {
        name: speed_ups.passes(speed_ups.curves(records, name, metric), rule)
        for name in _series(settings)
    }


def _reading_of_fig_1() -> list[Headline]:
    """Return the speed-ups by the mean curves of the paper's own Figure 1."""
    found = {name: speed_ups.of_points(points, _rate(name)) for name, points in paper.FIG_1.items()}
    metric = f"{speed_ups.OF_FIGURE_1.words}, of the paper's own Fig 1"
    return [
        headline("Kondo Fig 3", name, metric, 0, speed_ups.speed_up(found["PG"], own, 0).mean)
        for name, own in found.items()
        if name != "PG"
    ]


def _rate(series: str) -> float:
    """Return the share of backward passes of the paper's series."""
    return 0.03 if series.startswith("DG-K") else 1.0


def _speed_finding(records: pd.DataFrame, settings: Settings) -> str:
    reach = partial(statistics.first_reach, records, "curves")
    found = {name: reach(name, TEST, TARGET) for name in _series(settings)}
    told = [f"{name} {one.reached} of {one.seeds}" for name, one in found.items()]
    return f"Seeds that reached 5% test error: {', '.join(told)}."


def _curve_frontier(records: pd.DataFrame, settings: Settings) -> list[FrontierPoint]:
    rates = {"PG": 1.0, "DG": 1.0, arms.dg_k(settings.rate): settings.rate}
    return [
        statistics.frontier_point(
            records, "curves", series, TEST, TARGET, task=settings.data, rate=rates[series]
        )
        for series in _series(settings)
    ]


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 3)
    panels: tuple[tuple[plotting.Axis, str, str], ...] = (
        ("forward", ONLINE, "(a) by forward passes"),
        ("backward", ONLINE, "(b) by backward passes"),
        ("forward", TEST, "(c) held-out images"),
    )
    for ax, (x, metric, title) in zip(axes[0], panels, strict=True):
        for name in _series(settings):
            curve = statistics.curve(records, "curves", name, metric)
            plotting.line(ax, curve, name, _series(settings), x=x)
            known = paper.FIG_1.get(name) if _full(settings) and metric == ONLINE else None
            if known and x == "forward":
                plotting.crosses(ax, known, color=plotting.method_colour(name), markersize=4)
        plotting.log_percent(ax, metric)
        ax.set(xscale="log", xlabel=f"{x} passes (log scale)", title=title)
        ax.xaxis.set_major_formatter(plotting.counts)
        plotting.label_ends(ax)
    note = f"{plotting.seeds_note(records[records['part'] == 'curves'])} Crosses: the paper."
    plotting.head(figure, "MNIST: error by passes, lower left is better", note)
    return figure


def _speed_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(2, len(speed_ups.RULES), width=4.0, height=3.2)
    for ax, definition in zip(axes.flat, speed_ups.DEFINITIONS, strict=True):
        passes = _passes(records, settings, definition)
        ax.plot(COSTS, [1] * len(COSTS), color=plotting.method_colour("PG"), label="PG")
        for name in _series(settings)[1:]:
            colour = plotting.method_colour(name)
            found = [speed_ups.speed_up(passes["PG"], passes[name], ratio) for ratio in COSTS]
            means = [value.mean for value in found]
            ax.plot(COSTS, means, color=colour, label=name)
            plotting.band(ax, list(COSTS), means, [value.se for value in found], colour=colour)
            if _full(settings):
                ax.plot(COSTS, paper.FIG_3[name], "x", color=colour)
        judged = " (compared)" if definition == speed_ups.JUDGED else ""
        ax.set_title(f"{definition.metric}, {definition.rule}{judged}", fontsize=9)
        ax.set(xlabel="c: forward passes that a backward costs", ylabel="speed-up to 5% error")
        plotting.label_ends(ax)
    says = "MNIST: counted speed-up over PG by the cost of a backward pass, higher is better"
    note = "Band: one standard error. Crosses: the paper, which does not say how it counts."
    plotting.head(figure, says, note)
    return figure


def best_learning_rate(records: pd.DataFrame, series: str, settings: Settings) -> float:
    """Return the learning rate with the lowest final error over the first half of the seeds."""
    first = records[records["seed"] < settings.rate_seeds // 2]
    errors = finals(first, "rates", series)
    return min(errors, key=lambda rate: errors[rate].mean)


def _reported(records: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    return records[records["seed"] >= settings.rate_seeds // 2]


def _rate_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    seen = f"online error after {settings.rate_steps * settings.batch:,} forward passes"
    known = paper.FIG_2_EVENTUALLY if _full(settings) else None
    reported = _reported(records, settings)
    for rate in settings.rates:
        series = arms.dg_k(rate)
        chosen = best_learning_rate(records, series, settings)
        found = statistics.final(reported, "rates", series, ONLINE, setting=chosen)
        metric = f"{seen}, learning rate {chosen:g}"
        lines.append(headline("Kondo Fig 2", series, metric, rate, found, expected=known))
        fall = _last_third(reported, series, chosen, settings)
        lines.append(headline("Kondo Fig 2", series, FALL, rate, Estimate(fall, seeds=found.seeds)))
    return lines


def _last_third(records: pd.DataFrame, series: str, chosen: float, settings: Settings) -> float:
    """Return the error at the end over that at two thirds of the steps."""
    place = (records, "rates", series, ONLINE)
    before = statistics.at(*place, 2 / 3 * settings.rate_steps, setting=chosen)
    return statistics.final(*place, setting=chosen).mean / before.mean


def _plateau_finding(records: pd.DataFrame, settings: Settings) -> str:
    falls = {}
    for series in map(arms.dg_k, settings.rates):
        chosen = best_learning_rate(records, series, settings)
        falls[series] = _last_third(_reported(records, settings), series, chosen, settings)
    told = ", ".join(f"{series} {fall:.2f}" for series, fall in falls.items())
    still = [series for series, fall in falls.items() if fall < PLATEAU]
    verdict = f"still falling: {', '.join(still)}" if still else "all have settled"
    return f"Figure 2, error at the end over that at two thirds of the steps: {told}; {verdict}."


def _rate_frontier(records: pd.DataFrame, settings: Settings) -> list[FrontierPoint]:
    points = []
    for rate in settings.rates:
        series = arms.dg_k(rate)
        point = statistics.frontier_point(
            _reported(records, settings),
            "rates",
            series,
            ONLINE,
            TARGET,
            task=f"{settings.data}, learning rate tuned per rate",
            rate=rate,
            setting=best_learning_rate(records, series, settings),
        )
        # Everything kept at weight 1 is PG.
        points.append(point._replace(series="PG") if rate == 1.0 else point)
    return points


def _rates_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2)
    names = [arms.dg_k(rate) for rate in settings.rates]
    reported = _reported(records, settings)
    passes: tuple[plotting.Axis, ...] = ("forward", "backward")
    for ax, x in zip(axes[0], passes, strict=True):
        for place, series in enumerate(names):
            chosen = best_learning_rate(records, series, settings)
            curve = statistics.curve(reported, "rates", series, ONLINE, setting=chosen)
            colour = plotting.sequential(0.15 + 0.75 * place / max(1, len(names) - 1))
            label = f"{series} (lr {chosen:g})"
            plotting.line(ax, curve, label, [label], x=x, color=colour, linestyle="-")
        plotting.log_percent(ax, ONLINE)
        ax.set(xscale="log", xlabel=f"{x} passes (log scale)")
        ax.xaxis.set_major_formatter(plotting.counts)
        plotting.label_ends(ax)
    own = reported[reported["part"] == "rates"]
    note = f"{plotting.seeds_note(own)} In brackets: the best learning rate."
    plotting.head(figure, "MNIST: error by passes and rate, lower left is better", note)
    return figure


def _noise_series(settings: Settings, way: str) -> list[str]:
    return [f"{name}, {way}" for name in ("DG", arms.dg_k(settings.rate))]


def _borne(records: pd.DataFrame, settings: Settings, way: str) -> dict[str, tolerance.Borne]:
    """Return the noise that DG and the gate bear, by series."""
    return {
        series: tolerance.borne(records, "noise", series, BEARS)
        for series in _noise_series(settings, way)
    }


def _noise_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    for way in NOISES:
        figure = "Kondo Fig 4a" if way == DELIGHT_NOISE else "Kondo Fig 4b"
        borne = _borne(records, settings, way)
        for series, own in borne.items():
            lines += [
                headline(figure, series, ONLINE, level, found)
                for level, found in finals(records, "noise", series).items()
            ]
            is_dg = series.startswith("DG,")
            metric = f"noise at which the error is {BEARS:g}x"
            known = paper.FIG_4_TOLERATED.get(way) if is_dg and _full(settings) else None
            # "Tolerates about 50%" names no end; "robust until about 1" does.
            rule: Rule = "at least" if way == DELIGHT_NOISE else "equals"
            line = headline(figure, series, metric, "", own.shown, expected=known, rule=rule)
            verdict = own.judged(known, rule) if known is not None else line.verdict
            lines.append(line._replace(verdict=verdict))
        if way in paper.FIG_4_TOLERATED:
            gated, dense = _noise_series(settings, way)[::-1]
            found = {series: own.estimate for series, own in borne.items()}
            line = ordering(figure, "noise borne", "", order=[gated, dense], ours=found)
            less = tolerance.judge_less(borne[gated], borne[dense])
            lines.append(line._replace(verdict=less))
    return lines


def _noise_finding(records: pd.DataFrame, settings: Settings) -> str:
    told = [
        f"{series} {own.bounds} of {own.estimate.seeds}"
        for way in NOISES
        for series, own in _borne(records, settings, way).items()
    ]
    return (
        f"Seeds whose error never gets to {BEARS:g}x, counted with the highest noise: "
        f"{'; '.join(told)}."
    )


def _noise_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, len(NOISES))
    labels = {
        DELIGHT_NOISE: "noise on delight, in its standard deviations",
        LOGIT_NOISE: "noise on logits, standard deviation",
    }
    for ax, way in zip(axes[0], NOISES, strict=True):
        found = {name: finals(records, "noise", name) for name in _noise_series(settings, way)}
        plotting.sweep(ax, {name.partition(",")[0]: own for name, own in found.items()})
        plotting.log_percent(ax, f"{ONLINE}, last tenth")
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set_xlim(left=-0.02)  # no noise is negative
        ax.set_xlabel(labels.get(way, "noise on logits, in the surprisal alone"))
        plotting.label_ends(ax)
    note = plotting.seeds_note(records[records["part"] == "noise"], "bars: one standard error")
    plotting.head(figure, "MNIST: error by noise in the gate, lower is better", note)
    return figure


def _priority_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = [
        headline("Kondo Fig 5a", series, ONLINE, rate, found)
        for series in SIGNALS
        for rate, found in finals(records, "priorities", series).items()
    ]
    mixes = finals(records, "priorities", "additive mix")
    line = partial(headline, "Kondo Fig 5b", "additive mix")
    lines += [line(ONLINE, mix, found) for mix, found in mixes.items()]
    own = tolerance.borne(records, "priorities", "additive mix", 2.0)
    known = paper.FIG_5_COLLAPSE if _full(settings) else None
    metric = "weight of surprisal at which the error is 2x"
    twice = line(metric, "", own.shown, expected=known)
    verdict = own.judged(known, "equals") if known is not None else twice.verdict
    lines.append(twice._replace(verdict=verdict))
    for rate in settings.priority_rates:
        errors = ends(records, "priorities", ("delight", "surprisal"), setting=rate)
        lines += beats("Kondo Fig 5a", ONLINE, rate, ["delight"], ["surprisal"], errors)
    return lines


def _priorities_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2)
    by_rate, by_mix = axes[0]
    found = {series: finals(records, "priorities", series) for series in SIGNALS}
    plotting.sweep(by_rate, found)
    by_rate.set(xscale="log", xlabel="rate: share kept (log scale)")
    mixes = finals(records, "priorities", "additive mix")
    plotting.by_setting(by_mix, mixes, "additive mix", colour=plotting.ORANGE)
    if settings.rate in settings_of(records, "priorities", "delight"):
        level = found["delight"][settings.rate].mean
        xs, colour = [min(mixes), max(mixes)], plotting.method_colour("delight")
        by_mix.plot(xs, [level, level], color=colour, label="delight")
    by_mix.set_xlabel("weight of surprisal in the mix")
    for ax in axes[0]:
        plotting.log_percent(ax, f"{ONLINE}, last tenth")
        plotting.label_ends(ax)
    note = plotting.seeds_note(records[records["part"] == "priorities"], "bars: one standard error")
    plotting.head(figure, "MNIST: error by what ranks the samples, lower is better", note)
    return figure
