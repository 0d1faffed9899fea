"""Records -> errors, passes and seconds of each method, and how much faster than PG it learns."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.study import Analysis, Estimate, Headline, headline
from kondo_lab.studies.demo.claims import claims
from kondo_lab.studies.demo.run import ONLINE, STAGES, TASKS, TEST, compared
from kondo_lab.studies.demo.settings import Settings

LEARNER = {"gate": plotting.PURPLE, "forward": plotting.FAINT, "backward": plotting.DARK}
"""The learner's stages and their colours."""
HATCHES = {"forward": "//"}


class Row(NamedTuple):
    """One method on one task. Counts and seconds are of one seed's run, averaged over seeds."""

    method: str
    dense: bool
    steps: int
    samples: float
    backward_passes: float
    error: Estimate
    test_error: Estimate | None
    seconds: dict[str, float]
    """By stage."""

    @property
    def learner_seconds(self) -> float:
        """Gate + forward + backward."""
        return sum(self.seconds[stage] for stage in LEARNER)

    def milliseconds(self, stage: str) -> float:
        """Return a stage's time in one step."""
        return 1e3 * self.seconds[stage] / self.steps

    def speed_up(self, baseline: "Row") -> float:
        """Return the baseline's learner seconds over this method's."""
        return baseline.learner_seconds / self.learner_seconds

    def loop_speed_up(self, baseline: "Row") -> float:
        """Return the same with sampling and optimiser counted in."""
        return sum(baseline.seconds.values()) / sum(self.seconds.values())


def rows(records: pd.DataFrame, settings: Settings, task: str) -> list[Row]:
    """Return a row per method, the baseline PG first."""
    found = []
    for method in compared(settings):
        name = method.name
        last = statistics.curve(records, task, name, ONLINE).iloc[-1]
        metrics = records[(records["part"] == task) & (records["series"] == name)]["metric"]
        final = {metric: statistics.final(records, task, name, metric) for metric in set(metrics)}
        found.append(
            Row(
                method=name,
                dense=method.trains_all_rows,
                steps=int(last["step"]),
                samples=float(last["forward"]),
                backward_passes=float(last["backward"]),
                error=final[ONLINE],
                test_error=final.get(TEST),
                seconds={stage: final[f"seconds {stage}"].mean for stage in STAGES},
            )
        )
    return found


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the demo's table, figure and findings."""
    trained = set(records["part"])
    tables = {task: rows(records, settings, task) for task in TASKS if task in trained}
    lines = [line for task, table in tables.items() for line in _lines(task, table)]
    return Analysis(
        headline=lines,
        claims=claims(lines),
        figures={"figure": _figure(records, tables)},
        captions={"figure": " ".join(_caption(*each) for each in tables.items())},
        findings=[
            _finding(task, row, table)
            for task, table in tables.items()
            for row in table
            if not row.dense
        ],
    )


def _lines(task: str, table: Sequence[Row]) -> list[Headline]:
    baseline, lines = table[0], []
    for row in table:
        seeds = row.error.seeds
        numbers = {
            "final error": row.error,
            TEST: row.test_error,
            "backward passes": Estimate(row.backward_passes, seeds=seeds),
            "learner speed-up": Estimate(row.speed_up(baseline), seeds=seeds),
            "loop speed-up": Estimate(row.loop_speed_up(baseline), seeds=seeds),
        }
        for metric, value in numbers.items():
            if value is not None:
                lines.append(headline(task, row.method, metric, row.samples, value))
    return lines


def percent(value: Estimate) -> str:
    """Return an error as percent with its standard error, if there is one."""
    digits = 1 if value.mean >= 0.1 else 2
    mean = f"{100 * value.mean:.{digits}f}"
    return mean if math.isnan(value.se) else f"{mean} ±{100 * value.se:.{digits}f}"


def _caption(task: str, table: Sequence[Row]) -> str:
    baseline = table[0]
    gated = [
        f"{row.method} {percent(row.error)}%, with a learner {row.speed_up(baseline):.1f} times as "
        f"fast as {baseline.method}'s"
        for row in table
        if not row.dense
    ]
    dense = [f"{row.method} {percent(row.error)}%" for row in table if row.dense]
    return f"Final error on {task}: {', '.join([*dense, *gated])}."


def _finding(task: str, row: Row, table: Sequence[Row]) -> str:
    baseline = table[0]
    others = " and ".join(f"{one.method} {percent(one.error)}%" for one in table if one.dense)
    paid = row.backward_passes / baseline.backward_passes
    return (
        f"{task}: {row.method} paid for {paid:.1%} of the backward passes of dense PG. "
        f"Final error {percent(row.error)}% ({others}). {_speed(row, baseline, paid)}"
    )


def _speed(row: Row, baseline: Row, paid: float) -> str:
    faster = row.speed_up(baseline)
    kept = row.milliseconds("forward") + row.milliseconds("backward")
    dense = 1e3 * baseline.learner_seconds / baseline.steps
    times = (
        f"choosing units took {row.milliseconds('gate'):.1f} ms a step and the kept rows "
        f"{kept:.1f} ms, against {dense:.1f} ms dense"
    )
    loop = (
        "With sampling and Adam counted in, the whole loop ran at "
        f"{row.loop_speed_up(baseline):.2f}x."
    )
    if faster <= 1:
        return (
            f"Its learner was slower than dense, {faster:.2f}x: {times}. Both are fixed costs of "
            f"a step, and this model is too small to earn them back. {loop}"
        )
    limit = f", where the count of kept rows alone would allow {1 / paid:.0f}x" if paid else ""
    return f"Its learner ran at {faster:.2f}x{limit}: {times}. {loop}"


def _figure(records: pd.DataFrame, tables: dict[str, list[Row]]) -> Figure:
    """Draw a row of panels per task: error by samples, by backward passes, and a step's time."""
    figure, axes = plotting.grid(len(tables), 3)
    for (task, table), (by_samples, by_backward, times) in zip(tables.items(), axes, strict=True):
        _curves(by_samples, records, task, table, "forward")
        by_samples.set(xlabel="samples seen", title=f"{task}: error by samples")
        by_samples.xaxis.set_major_formatter(plotting.counts)
        plotting.label_ends(by_samples)
        _curves(by_backward, records, task, table, "backward")
        by_backward.set(xscale="log", xlabel="backward passes paid (log scale)")
        by_backward.set_title(f"{task}: error by backward passes")
        plotting.label_ends(by_backward)
        _times(times, table)
        times.set_title(f"{task}: time of a step")
    says = "Error by samples and by backward passes (lower left is better), and a step's time"
    plotting.head(figure, says, plotting.seeds_note(records))
    return figure


def _curves(
    ax: Axes, records: pd.DataFrame, task: str, table: Sequence[Row], x: plotting.Axis
) -> None:
    names = [row.method for row in table]
    lowest = 1.0
    for name in names:
        curve = statistics.curve(records, task, name, ONLINE)
        plotting.line(ax, curve, name, names, x=x)
        lowest = min([lowest, *curve["mean"][curve["mean"] > 0]])
    plotting.log_percent(ax, ONLINE)
    ax.set_ylim(0.7 * lowest, 1.15)


def _times(ax: Axes, table: Sequence[Row]) -> None:
    """Draw the milliseconds of one learner step as stacked bars."""
    shown = table[::-1]  # first method on top
    names = [row.method for row in shown]
    left = [0.0] * len(shown)
    for stage, colour in LEARNER.items():
        widths = [row.milliseconds(stage) for row in shown]
        look: dict[str, Any] = {"color": colour, "hatch": HATCHES.get(stage), "label": stage}
        ax.barh(names, widths, left=left, height=0.6, edgecolor="white", linewidth=0, **look)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for name, end, row in zip(names, left, shown, strict=True):
        text = f"{row.speed_up(table[0]):.2f}x"
        ax.annotate(text, (end, name), xytext=(4, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, 1.2 * max(left))
    ax.set_xlabel("milliseconds of a learner step")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=3, fontsize=9)
