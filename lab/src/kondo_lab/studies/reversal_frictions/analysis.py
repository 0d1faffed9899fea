"""Records -> the error by strength of each friction, and by length with all of them."""

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.studies import plotting, statistics
from kondo_lab.studies.comparison import beats, interpolated_longest, settings_of
from kondo_lab.studies.learner_error import DIVERGED, LEARNER_ERROR, capped
from kondo_lab.studies.reversal_frictions.run import (
    EACH,
    NONE,
    TOGETHER,
    compared_together,
    methods,
    named,
    sweeps,
)
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.studies.study import Analysis, Estimate, Headline, headline

FIGURE = "Distributed, four frictions"
SOLVED = 0.25
"""A length counts as solved where the learner's error is below this."""
PAPER_FACTOR = 10.0
"""Error over DG's, "about", from the abstract; version 2 says "often nearly"."""
PAPER_LENGTHS = 2.0
"""DG's longest length over the others', at least, of "2 to 3 times" in the abstract."""
LAST_SHARE = 0.1
"""The error at the end is the mean over this last share of the steps."""
MARGIN = 1.5
"""Factor by which a log axis of errors goes past the smallest there can be, and past 1."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    there, found = set(records["part"]), Analysis()
    if EACH in there:
        found.headline.extend(_each_lines(records, settings))
        found.figures["error-by-friction"] = _each_figure(records, settings)
        found.findings.extend(_each_finding(records, settings, kind) for kind in sweeps(settings))
    if TOGETHER in there:
        found.headline.extend(_together_lines(records, settings))
        found.figures["all-frictions-by-length"] = _together_figure(records, settings)
        found.findings.append(_together_finding(records, settings))
    found.findings.extend(_divergence_findings(records))
    return found


def _full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.length == 10 and settings.num_steps >= 4_000


def baselines(settings: Settings) -> tuple[str, ...]:
    """Return the methods that the paper compares DG with."""
    return ("PG", "PPO", "PMPO", capped(settings.cap))


def _last_looks(records: pd.DataFrame, part: str, series: str, setting: float) -> pd.DataFrame:
    """Return the errors of all seeds in the last tenth of the steps, one record a look."""
    own = statistics.select(records, part, series, LEARNER_ERROR, setting=setting)
    return own[own["step"] > (1 - LAST_SHARE) * own["step"].max()]


def by_seed(records: pd.DataFrame, part: str, series: str, setting: float) -> dict[int, float]:
    """Return each seed's mean error over the last tenth of the steps."""
    late = _last_looks(records, part, series, setting)
    return {int(seed): float(values.mean()) for seed, values in late.groupby("seed")["value"]}


def at_end(records: pd.DataFrame, part: str, series: str, setting: float) -> Estimate:
    """Return the mean of `by_seed`."""
    return statistics.estimate(list(by_seed(records, part, series, setting).values()))


def least_error(
    records: pd.DataFrame, settings: Settings, part: str, series: str, setting: float
) -> float:
    """Return the smallest error that `at_end` can tell from none: one wrong token in all it saw.

    1 / (seeds · looks · prompts · H): at each look a seed answers every prompt with H tokens.
    """
    length = setting if part == TOGETHER else settings.length
    looks = len(_last_looks(records, part, series, setting))
    return 1 / (looks * settings.test_prompts * length)


def _lines_of(
    records: pd.DataFrame,
    settings: Settings,
    part: str,
    names: dict[str, str],
    where: str,
    x: float,
) -> list[Headline]:
    """Return the errors at one place, how much above DG's, and the orders; method -> series."""
    metric = f"{LEARNER_ERROR}, {where}"
    found = {method: at_end(records, part, series, x) for method, series in names.items()}
    lines = [headline(FIGURE, method, metric, x, value) for method, value in found.items()]
    lines += beats(FIGURE, metric, x, ["DG"], baselines(settings), found)
    best = min(baselines(settings), key=lambda method: found[method].mean)
    # A DG that makes no mistake in all its tests is at most this good as far as they can tell.
    least = least_error(records, settings, part, names["DG"], x)
    ours = found[best].mean / max(found["DG"].mean, least)
    known = PAPER_FACTOR if _full(settings) else None
    name = f"{best} / DG, the best of the others"
    return [*lines, headline(FIGURE, name, metric, x, ours, expected=known, rule="about")]


def _each_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    strengths = {name: sweep.strengths for name, sweep in sweeps(settings).items()}
    for friction, of_friction in {NONE: [0.0], **strengths}.items():
        names = {method: named(method, friction) for method in methods(settings)}
        for strength in of_friction:
            lines += _lines_of(records, settings, EACH, names, friction, strength)
    return lines


def _each_finding(records: pd.DataFrame, settings: Settings, friction: str) -> str:
    strengths = sweeps(settings)[friction].strengths
    told = []
    for method in methods(settings):
        series = named(method, friction)
        found = [at_end(records, EACH, series, strength).mean for strength in strengths]
        told.append(f"{method} {', '.join(f'{100 * value:.2f}' for value in found)}")
    at = ", ".join(f"{strength:g}" for strength in strengths)
    return f"Error in percent under {friction} of {at}: {'; '.join(told)}."


def longest(records: pd.DataFrame, series: str) -> Estimate:
    """Return the longest length solved with all frictions, mean over the seeds of all lengths.

    A seed that solves not even the shortest length counts with 0.
    """
    lengths = settings_of(records, TOGETHER, series)
    errors = pd.DataFrame({x: by_seed(records, TOGETHER, series, x) for x in lengths}).dropna()
    found = errors.sort_index().apply(
        lambda own: interpolated_longest(own.to_dict(), SOLVED), axis=1
    )
    return statistics.estimate(found.tolist())


def _together_lines(records: pd.DataFrame, settings: Settings) -> list[Headline]:
    lines = []
    names = {method: method for method in compared_together(settings)}
    for length in settings_of(records, TOGETHER, "DG"):
        lines += _lines_of(records, settings, TOGETHER, names, "all frictions, by H", length)
    solved = {method: longest(records, method) for method in names}
    metric = "longest length with error below 25%, all frictions"
    lines += [headline(FIGURE, method, metric, "", value) for method, value in solved.items()]
    known = PAPER_LENGTHS if _full(settings) else None
    for method in baselines(settings):
        theirs = solved[method].mean
        ours = solved["DG"].mean / theirs if theirs > 0 else math.inf
        lines.append(
            headline(FIGURE, f"DG / {method}", metric, "", ours, expected=known, rule="at least")
        )
    return lines


def _together_finding(records: pd.DataFrame, settings: Settings) -> str:
    solved = {method: longest(records, method).mean for method in compared_together(settings)}
    told = ", ".join(f"{method} {value:.1f}" for method, value in solved.items())
    return f"Longest length solved with all frictions together: {told}."


def _divergence_findings(records: pd.DataFrame) -> list[str]:
    last = records[records["metric"] == DIVERGED].groupby(["part", "series", "setting"])["value"]
    lost = [f"{series} at {setting:g}" for (_, series, setting), v in last if v.max() > 0]
    return [f"Parameters that are no longer finite: {', '.join(lost)}."] if lost else []


def _draw(
    ax: Axes,
    found: Mapping[str, Mapping[float, Estimate]],
    *,
    least: Mapping[float, float],
    label: str,
) -> None:
    """Draw method -> {x: error} on a log axis, an error of 0 at `least`, {x: `least_error`}.

    The axis ends just below the smallest of these, and there it cuts bars that reach to 0.
    """
    shown = {
        name: {x: value._replace(mean=max(value.mean, least[x])) for x, value in values.items()}
        for name, values in found.items()
    }
    plotting.sweep(ax, shown)
    ax.set_xlabel(label)
    plotting.log_percent(ax, "error of the learner")
    # Left to itself a log axis follows bars to 0 for hundreds of decades, and has no ticks then.
    ax.set_ylim(min(least.values()) / MARGIN, MARGIN)


def _each_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(2, 2)
    for ax, (friction, sweep) in zip(axes.flat, sweeps(settings).items(), strict=True):
        places = {0.0: NONE} | dict.fromkeys(sweep.strengths, friction)
        found = {
            method: {x: at_end(records, EACH, named(method, kind), x) for x, kind in places.items()}
            for method in methods(settings)
        }
        least = {
            x: least_error(records, settings, EACH, named("DG", kind), x)
            for x, kind in places.items()
        }
        _draw(ax, found, least=least, label=sweep.label)
        ax.set_xscale("symlog", linthresh=min(sweep.strengths))
        ax.set_title(friction)
    axes[0, 1].legend(fontsize=7)  # under bugs few errors are small: there is room below
    return figure


def _together_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    figure, axes = plotting.grid(1, 2, width=4.8, height=4)
    names, lengths = list(compared_together(settings)), settings_of(records, TOGETHER, "DG")
    found = {name: {x: at_end(records, TOGETHER, name, x) for x in lengths} for name in names}
    least = {length: least_error(records, settings, TOGETHER, "DG", length) for length in lengths}
    _draw(axes[0, 0], found, least=least, label="length H, all frictions")
    axes[0, 0].axhline(SOLVED, color="black", linewidth=0.8, linestyle=":")
    axes[0, 0].legend(fontsize=7)
    ax = axes[0, 1]
    plotting.curves(ax, records, TOGETHER, names, LEARNER_ERROR, setting=settings.length)
    plotting.log_percent(ax, "error of the learner")
    ax.set_xlabel(f"learner step, H = {settings.length}, all frictions")
    return figure
