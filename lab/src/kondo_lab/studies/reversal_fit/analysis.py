"""Records -> how far each pair is from the papers, figure by figure and in all.

    score of a figure = sqrt(mean over its numbers of log(ours / paper)^2)
    score of a pair   = sqrt(mean over the figures of score^2)

Numbers are means over seeds. Errors below 0.001, ours and the paper's, count as 0.001: a run of few
seeds does not tell smaller ones. Every figure counts as much as any other, whatever the number of
points that were read off it. Kondo Figure 10 is read in two ways, so a pair has two scores; the
lower of them ranks it. `resamples` says how sure the ranking is.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.claims import LEAST_SEEDS
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies import reversal_numbers as paper
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_fit import resamples
from kondo_lab.studies.reversal_fit.captions import captions
from kondo_lab.studies.reversal_fit.claims import STATEMENT, WON, claims
from kondo_lab.studies.reversal_fit.run import (
    LONGEST,
    PREFIX,
    SOLVED,
    TOKENS,
    VOCABULARIES,
    joined,
    named,
    prefix_methods,
)
from kondo_lab.studies.reversal_fit.settings import Pair, Settings
from kondo_lab.training import arms

ONLINE = reversals.ONLINE
SMALLEST = 1e-3
"""Errors below it count as this."""
NOW, SO_FAR = "reward at the moment", "mean reward since the start"
"""What makes a length solved in Kondo Figure 10."""
LENGTH = "longest length solved, by "
SCORE = "root mean square of log(ours / paper)"
USED = Pair(reversals.FEED_FORWARD, reversals.LEARNING_RATE).name
"""The pair of the other studies of reversal."""
READ_AS = {"PMPO float32": "PMPO"}
"""Series of ours -> the paper's, where the names differ."""
CURVES = {
    PREFIX: ("Kondo Fig 8", paper.GATE_FIG_8),
    TOKENS: ("DG Fig 8", paper.DG_FIG_8),
}
ENDS = {
    VOCABULARIES: ("DG Fig 9b", paper.DG_FIG_9B),
    LONGEST: ("DG Fig 9a", paper.DG_FIG_9A),
}
"""Part -> figure, and its numbers by series and step, or by series and setting at the end."""


class Compared(NamedTuple):
    """A number of the paper beside that of one pair."""

    figure: str
    method: str
    metric: str
    x: float
    expected: float
    by_seed: Mapping[int, float]
    """Ours."""

    @property
    def ours(self) -> Estimate:
        """The mean over seeds."""
        return statistics.estimate(list(self.by_seed.values()))


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the scores, the ranking, and all numbers that were compared."""
    records = joined(records)
    numbers = {pair: compared(records, settings, pair) for pair in settings.pairs}
    found = Analysis()
    totals = {pair: scores(own) for pair, own in numbers.items()}
    ranked = sorted(totals, key=lambda pair: min(totals[pair][1].values()))
    if not any(totals[pair][0] for pair in ranked):
        return found
    won = resamples.shares_won({pair: _counted(own) for pair, own in numbers.items()}, _total)
    found.findings.append(_best(ranked[0], totals[ranked[0]][1]))
    found.findings.append(_sure(ranked, won, numbers))
    found.findings.extend(_row(place, pair, totals[pair]) for place, pair in enumerate(ranked, 1))
    for pair in ranked:
        found.headline.extend(_score_lines(pair, totals[pair]))
        found.headline.append(headline("all figures", pair.name, WON, "", won[pair]))
    # The pair in use stands against the best of the others: both need their seeds.
    judged = [*ranked[:2], *(pair for pair in ranked[2:] if pair.name == USED)]
    few = _figures_of_few([each for pair in judged for each in numbers[pair]], LEAST_SEEDS)
    found.claims.extend(claims(found.headline, USED, few))
    for pair in ranked:
        found.headline.extend(_number_lines(pair, numbers[pair]))
    found.figures["scores"] = _scores_figure(settings, totals)
    if PREFIX in set(records["part"]):
        found.figures["fig8-learning-curves"] = _curves_figure(records, settings)
    told = captions(found.headline, found.claims, STATEMENT, SCORE)
    return with_captions(found, told)


def compared(records: pd.DataFrame, settings: Settings, pair: Pair) -> list[Compared]:
    """Return every number of the papers that was run, beside ours at this pair."""
    steps = {PREFIX: settings.prefix_steps, TOKENS: settings.token_steps}
    found: list[Compared] = []
    for part, (figure, known) in CURVES.items():
        for method, own, points in _known(records, part, pair, known):
            at = partial(statistics.at, part=part, series=named(method, pair), metric=ONLINE)
            for x, value in points.items():
                if x <= steps[part]:
                    ours = {seed: at(table, step=x).mean for seed, table in own.items()}
                    found.append(Compared(figure, method, ONLINE, x, value, ours))
    for part, (figure, known) in ENDS.items():
        run_at = set(records[records["part"] == part]["setting"])
        for method, own, points in _known(records, part, pair, known):
            end = partial(statistics.final, part=part, series=named(method, pair), metric=ONLINE)
            for x, value in points.items():
                if x in run_at:
                    ours = {seed: end(table, setting=x).mean for seed, table in own.items()}
                    found.append(Compared(figure, method, ONLINE, x, value, ours))
    return [*found, *_lengths(records, settings, pair)]


def _lengths(records: pd.DataFrame, settings: Settings, pair: Pair) -> Iterator[Compared]:
    """Yield the numbers of Kondo Figure 10, read both ways."""
    end = settings.solved_steps * reversals.NUM_PROMPTS * reversals.NUM_ANSWERS
    for method, own, points in _known(records, SOLVED, pair, paper.GATE_FIG_10):
        for forward, value in points.items():
            for reading in (NOW, SO_FAR) if forward <= end else ():
                ours = {
                    seed: reversals.longest_solved(
                        table, SOLVED, named(method, pair), forward, average=reading == SO_FAR
                    ).mean
                    for seed, table in own.items()
                }
                yield Compared("Kondo Fig 10", method, LENGTH + reading, forward, value, ours)


def _known(
    records: pd.DataFrame, part: str, pair: Pair, known: Mapping[str, Mapping[float, float]]
) -> Iterator[tuple[str, dict[int, pd.DataFrame], Mapping[float, float]]]:
    """Yield (method, its records by seed, the paper's {x: number}) of every method of a part."""
    ending = f", {pair.name}"
    own = records[(records["part"] == part) & records["series"].str.endswith(ending)]
    for series, of_series in own.groupby("series", sort=False):
        method = str(series).removesuffix(ending)
        by_seed = {int(seed): table for seed, table in of_series.groupby("seed")}
        yield method, by_seed, known[READ_AS.get(method, method)]


def score(numbers: Iterable[Compared]) -> float:
    """Return sqrt(mean log(ours / paper)^2); errors below SMALLEST count as that."""
    several = list(numbers)
    ours = np.array([[each.ours.mean] for each in several])
    return float(_score(ours, np.array([each.expected for each in several]))[0])


def _score(ours: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the score [R] of R times the numbers [n, R] beside the paper's [n]."""
    theirs = np.maximum(expected, SMALLEST)[:, None]
    ratios = np.maximum(ours, SMALLEST) / theirs  # lengths are above it anyway
    return np.asarray(np.sqrt((np.log(ratios) ** 2).mean(axis=0)))


def scores(numbers: Sequence[Compared]) -> tuple[dict[str, float], dict[str, float]]:
    """Return (figure -> score, reading of Kondo Figure 10 -> score of the pair).

    Exact ties of PMPO do not count. Of the two readings each stands in its own score of the pair;
    without that figure both are the same.
    """
    figures = {name: score(own) for name, own in _counted(numbers).items()}
    totals = _totals({name: np.array(value) for name, value in figures.items()})
    return figures, {reading: float(total) for reading, total in totals.items()}


def _counted(numbers: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Return the numbers that count by figure; each reading of Kondo Figure 10 is one."""
    by_figure: dict[str, list[Compared]] = {}
    for each in numbers:
        if each.method != "PMPO":
            reading = each.metric.removeprefix(LENGTH)
            name = each.figure if reading == each.metric else f"{each.figure}, {reading}"
            by_figure.setdefault(name, []).append(each)
    return by_figure


def _totals(figures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return reading -> root mean square over the figures, of scores of any shape."""
    found = {}
    for reading, other in ((NOW, SO_FAR), (SO_FAR, NOW)):
        own = [value**2 for name, value in figures.items() if not name.endswith(other)]
        found[reading] = np.sqrt(np.mean(own, axis=0)) if own else np.array(math.nan)
    return found


def _total(resampled: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the better score [R] of figure -> (numbers [n, R], the paper's [n])."""
    figures = {name: _score(*own) for name, own in resampled.items()}
    return np.asarray(np.minimum(*_totals(figures).values()))


def _best(pair: Pair, totals: Mapping[str, float]) -> str:
    reading = min(totals, key=lambda name: totals[name])
    return (
        f"Best pair: feed-forward {pair.feed_forward}, learning rate {pair.learning_rate:g}, with "
        f"solved read as {reading}: score {totals[reading]:.3f}."
    )


def _sure(
    ranked: Sequence[Pair], won: Mapping[Pair, float], numbers: Mapping[Pair, Sequence[Compared]]
) -> str:
    """Return how often each pair wins if seeds are drawn anew, and what that does not cover."""
    winners = [pair for pair in ranked if won[pair] > 0]
    told = ", ".join(f"{pair.name} {won[pair]:.0%}" for pair in winners)
    single = {pair: _figures_of_few(numbers[pair], 2) for pair in winners}
    without = "".join(
        f" Of one seed, so without a spread, {pair.name}: {', '.join(figures)}."
        for pair, figures in single.items()
        if figures
    )
    return f"Lowest score in {resamples.RESAMPLES} resamples of the seeds: {told}.{without}"


def _figures_of_few(numbers: Sequence[Compared], least: int) -> list[str]:
    """Return the figures with fewer than `least` seeds."""
    return sorted({each.figure for each in numbers if len(each.by_seed) < least})


def _row(place: int, pair: Pair, found: tuple[dict[str, float], dict[str, float]]) -> str:
    figures, totals = found
    told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    both = ", ".join(f"{value:.3f} ({reading})" for reading, value in totals.items())
    return f"{place}. {pair.name}: {both}; {told}."


def _score_lines(pair: Pair, found: tuple[dict[str, float], dict[str, float]]) -> list[Headline]:
    figures, totals = found
    lines = [headline(name, pair.name, SCORE, "", value) for name, value in figures.items()]
    for reading, value in totals.items():
        lines.append(headline(f"all figures, {reading}", pair.name, SCORE, "", value))
    return lines


def _number_lines(pair: Pair, numbers: Iterable[Compared]) -> list[Headline]:
    """Return ours beside the paper's, without a verdict: what is fitted proves nothing."""
    lines = []
    for each in numbers:
        series = named(each.method, pair)
        line = headline(each.figure, series, each.metric, each.x, each.ours)
        lines.append(line._replace(expected=each.expected))
    return lines


def _scores_figure(
    settings: Settings, totals: Mapping[Pair, tuple[dict[str, float], dict[str, float]]]
) -> Figure:
    """Draw the scores by learning rate, a line for each width, a panel for each figure."""
    every = {pair: own[0] | own[1] for pair, own in totals.items()}
    names = list(next(iter(every.values())))
    figure, axes = plotting.grid(2, math.ceil(len(names) / 2), width=3.2, height=2.9)
    for ax, name in zip(axes.flat, names, strict=False):
        for width, colour in zip(settings.feed_forwards, plotting.WHEEL, strict=False):
            values = [every[Pair(width, rate)][name] for rate in settings.learning_rates]
            ax.plot(settings.learning_rates, values, "o-", color=colour, label=f"ff {width}")
        ax.set_title(f"all, {name}" if name in (NOW, SO_FAR) else name, fontsize=8)
        top = 1.1 * max(own[name] for own in every.values())
        ax.set(xlabel="learning rate", ylabel="distance to the paper", ylim=(0, top))
        ax.set_xticks(settings.learning_rates, [f"{rate:g}" for rate in settings.learning_rates])
    for ax in list(axes.flat)[len(names) :]:
        ax.set_axis_off()
    says = "Distance to the paper's figures by learning rate and width, lower is better"
    plotting.head(figure, says, "ff: width of the feed-forward layers.", legend=axes[0][0])
    return figure


def _curves_figure(records: pd.DataFrame, settings: Settings) -> Figure:
    """Draw Kondo Figure 8: a panel for each width and method, a line for each learning rate."""
    methods = ["DG", arms.dg_k(settings.rate), "PG", "PMPO float32"]
    methods = [name for name in methods if name in prefix_methods(settings)]
    widths, rates = settings.feed_forwards, settings.learning_rates
    figure, axes = plotting.grid(len(widths), len(methods), width=2.9, height=2.5)
    for (row, width), (column, method) in (
        (row, column) for row in enumerate(widths) for column in enumerate(methods)
    ):
        ax = axes[row][column]
        for rate, share in zip(rates, np.linspace(0, 1, len(rates)), strict=True):
            series = named(method, Pair(width, rate))
            own = statistics.curve(records, PREFIX, series, ONLINE)
            ax.plot(
                own["step"], own["mean"], color=plotting.sequential(share), label=f"lr {rate:g}"
            )
        known = paper.GATE_FIG_8[READ_AS.get(method, method)]
        points = {x: value for x, value in known.items() if x <= settings.prefix_steps}
        plotting.crosses(ax, points, color="black", markersize=4)
        plotting.log_percent(ax, "error")
        ax.set_title(f"{method}, ff {width}", fontsize=9)
        ax.set_xlabel("step")
    note = "Means over seeds. Crosses: the paper. lr: learning rate, ff: feed-forward width."
    says = "Kondo Figure 8 by learning rate and width"
    plotting.head(figure, says, note, legend=axes[0][0])
    return figure
