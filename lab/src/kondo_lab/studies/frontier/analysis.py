"""What every gate pays, what it reaches, and which gates no other one beats."""

import math
from collections.abc import Sequence
from functools import partial

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.study import Analysis, Estimate, FrontierPoint, Headline, headline
from kondo_lab.studies import reversals
from kondo_lab.studies.frontier import compared_gates, drawing
from kondo_lab.studies.frontier.captions import caption
from kondo_lab.studies.frontier.claims import claims
from kondo_lab.studies.frontier.points import ONLINE, TEST, Point, Task, front, measure
from kondo_lab.studies.frontier.run import REVERSAL
from kondo_lab.studies.frontier.settings import Settings

COST_RATIOS = (1, 2, 4)
"""c: forward passes that a backward pass costs."""

# Kondo Fig 1 at a million forward passes, and Fig 3: speed-up over PG to 5% test error.
PAPER_ONLINE = {"PG": 0.037, "DG-K 3%": 0.0236, "DG": 0.0163}
PAPER_SPEED_UP = {"DG-K 3%": {1: 2.74, 2: 3.98, 4: 6.30}, "DG": {1: 2.25, 2: 2.25, 4: 2.25}}
# Kondo Fig 8 near steps that were read off: (series, step) -> online error.
PAPER_REVERSAL = {
    ("DG", 1021): 0.0044,
    ("DG-K 3%", 1053): 0.0071,
    ("price 0", 1145): 0.012,
    ("DG-K 3%", 2000): 0.0022,
    ("PG", 2000): 0.23,
}


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    tasks = (
        Task(settings.images, TEST, settings.image_target),
        Task(REVERSAL, ONLINE, settings.reversal_target),
    )
    found = Analysis()
    for task in tasks:
        if task.part not in set(records["part"]):
            continue
        points = [measure(records, task, line) for line in compared_gates.lines(settings)]
        found.headline.extend(_lines(task, points))
        found.findings.extend(_findings(task, points))
        found.claims.extend(claims(task, points, COST_RATIOS))
        found.figures[task.part] = drawing.figure(task, points, COST_RATIOS)
        found.captions[task.part] = caption(found.headline, task, COST_RATIOS[1])
        for point in points:
            place = (task.part, point.line.series, point.line.rate, task.label, *point.reach.mean)
            counts = (point.reach.reached, point.reach.seeds)
            found.frontier.append(FrontierPoint(*place, *counts, point.error.mean))
        if task.part == "mnist":
            found.headline.extend(_paper_mnist(records, task, points))
        elif settings.images == "mnist":  # the full size
            found.headline.extend(_paper_reversal(records))
    return found


def _lines(task: Task, points: Sequence[Point]) -> list[Headline]:
    line = partial(headline, "beyond the paper")
    found = []
    for point in points:
        series, paid = point.line.series, Estimate(point.backward, seeds=point.error.seeds)
        found.append(line(series, f"{task.part}: {task.metric} at the end", "", point.error))
        found.append(line(series, f"{task.part}: backward passes of the run", "", paid))
    metric = f"{task.part}: least counted cost to {task.label}, in forward passes"
    for ratio in COST_RATIOS:
        best = _cheapest(points, ratio)
        if best is not None:
            cost = Estimate(best.cost(ratio), seeds=best.reach.reached)
            found.append(line(best.line.series, metric, f"c = {ratio}", cost))
    return found


def _cheapest(points: Sequence[Point], ratio: float) -> Point | None:
    """Return the cheapest gate that gets every seed to the target; None if none does."""
    able = [point for point in points if point.reach.reached == point.reach.seeds]
    return min(able, key=lambda point: point.cost(ratio), default=None)


def _paper_mnist(records: pd.DataFrame, task: Task, points: Sequence[Point]) -> list[Headline]:
    known = {point.line.series: point for point in points}
    found, seen = [], "1M forward passes"
    for series, paper in PAPER_ONLINE.items():
        ours = statistics.final(records, task.part, series, ONLINE)
        found.append(headline("Kondo Fig 1", series, ONLINE, seen, ours, expected=paper))
    metric = f"speed-up over PG to {task.label}"
    for series, by_ratio in PAPER_SPEED_UP.items():
        for ratio, paper in by_ratio.items():
            gain = known["PG"].cost(ratio) / known[series].cost(ratio)
            if not math.isnan(gain):
                own, at = Estimate(gain, seeds=known[series].reach.reached), f"c = {ratio}"
                found.append(headline("Kondo Fig 3", series, metric, at, own, expected=paper))
    return found


def _paper_reversal(records: pd.DataFrame) -> list[Headline]:
    found = []
    for (series, step), paper in PAPER_REVERSAL.items():
        ours = statistics.at(records, REVERSAL, series, ONLINE, step)
        found.append(headline("Kondo Fig 8", series, ONLINE, f"step {step}", ours, expected=paper))
    return reversals.fitted(found)


def _findings(task: Task, points: Sequence[Point]) -> list[str]:
    names = ", ".join(
        f"{point.line.series} ({100 * point.error.mean:.3g}% for {point.backward:,.0f})"
        for point in front(points)
    )
    found = [f"{task.part}: {task.metric} at the end for backward passes, not beaten: {names}."]
    for ratio in COST_RATIOS:
        best = _cheapest(points, ratio)
        if best is None:
            return [*found, f"{task.part}: no gate got every seed to {task.label}."]
        found.append(
            f"{task.part}, a backward pass costs {ratio} forward: {best.line.series} gets to "
            f"{task.label} for least, a counted {best.cost(ratio):,.0f} forward passes; "
            f"{_against_pg(points, best, ratio)}."
        )
    return found


def _against_pg(points: Sequence[Point], best: Point, ratio: float) -> str:
    pg = next(point for point in points if point.line.series == "PG")
    if pg.reach.reached == 0:
        return "no seed of PG gets there"
    share = best.cost(ratio) / pg.cost(ratio)
    return f"{share:.3g} of what PG pays ({pg.reach.reached} of {pg.reach.seeds} seeds get there)"
