"""Records -> final returns beside dense, what they cost, and how far the gradients were off."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kondo_lab.evidence import plotting, statistics
from kondo_lab.evidence.captions import with_captions
from kondo_lab.evidence.comparison import ends
from kondo_lab.evidence.study import Analysis, Claim, Estimate, Headline, headline
from kondo_lab.studies.control import run
from kondo_lab.studies.control.captions import captions
from kondo_lab.studies.control.claims import task_claims, told
from kondo_lab.studies.control.run import COSINE, DENSE, ENTROPY, GRADIENT_ERROR, RATE, RETURN
from kondo_lab.studies.control.settings import Settings, Task

beyond = partial(headline, "beyond the papers")
MOST_SHOWN = 6
"""Contenders that a panel can tell apart."""
KINDS_SHOWN = ("dense", "random", "delight", "unbiased", "noise")
"""First words of the contenders in colour where there are more."""


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Compare every contender with dense on every task that was run."""
    done = [task for task in settings.tasks if task.name in set(records["part"])]
    names = list(run.contenders(settings))
    lines: list[Headline] = []
    findings: list[str] = []
    claims: list[Claim] = []
    for task in done:
        own = records[records["part"] == task.name]
        present = _present(own, task, names)
        lines += _headline(own, task, present)
        findings.append(_table(own, task, present))
        claims += _claims(own, task, settings, present)
    draw = partial(_figure, records, done, names)
    returns = "mean return of 100 episodes"
    figures = {
        "returns-by-samples": draw(RETURN, returns, "Return by samples: higher is better"),
        "returns-by-rows": draw(
            RETURN, returns, "Return by rows differentiated: upper left is better", x="backward"
        ),
        "entropies": draw(ENTROPY, "entropy (nats)", "Entropy of the policy by samples"),
    }
    found = Analysis(headline=lines, claims=claims, findings=findings, figures=figures)
    first = done[0].name if done else ""
    return with_captions(found, captions(lines, claims, run.promised(settings), first))


def over_run(records: pd.DataFrame, part: str, series: str, metric: str) -> Estimate:
    """Return the mean over seeds of each run's mean over its logged points that have a number."""
    chosen = statistics.select(records, part, series, metric)
    by_seed = chosen.groupby("seed")["value"].mean()  # NaN is left out
    return statistics.estimate(by_seed.tolist())


def paid_until(records: pd.DataFrame, task: Task, series: str) -> statistics.Reach:
    """Return what each seed had paid when its return first rose to the task's target."""
    known = records[(records["metric"] == RETURN) & records["value"].notna()]
    falling = known.assign(value=-known["value"])
    return statistics.first_reach(falling, task.name, series, RETURN, -task.target)


def _headline(records: pd.DataFrame, task: Task, names: Sequence[str]) -> Iterator[Headline]:
    for name in names:
        at_end = partial(statistics.final, records, task.name, name)
        mean = partial(over_run, records, task.name, name)
        numbers = {
            "return at the end": at_end(RETURN),
            "return, mean over the run": mean(RETURN),
            RATE: at_end(RATE),
            f"rows differentiated to a return of {task.target:g}": _paid(records, task, name),
            f"{COSINE}, mean over the run": mean(COSINE),
            f"{GRADIENT_ERROR}, mean over the run": mean(GRADIENT_ERROR),
            "entropy at the end": at_end(ENTROPY),
        }
        for metric, found in numbers.items():
            yield beyond(name, f"{task.name}: {metric}", "", found)


def _paid(records: pd.DataFrame, task: Task, name: str) -> Estimate:
    """Return the mean rows differentiated until the target; NaN unless every seed reached it.

    A mean over the seeds that got there would flatter a contender that seldom does.
    """
    reach = paid_until(records, task, name)
    if reach.reached < reach.seeds:
        return Estimate(math.nan, math.nan, reach.seeds)
    return statistics.estimate([cost.backward for cost in reach.costs.values()])


def _table(records: pd.DataFrame, task: Task, names: Sequence[str]) -> str:
    """Return the final returns of a task in one sentence."""
    final = ends(records, task.name, names, RETURN)
    shares = ends(records, task.name, names, RATE)
    each = "; ".join(f"{n} {told(final[n])} ({shares[n].mean:.0%} of the rows)" for n in names)
    return f"{task.training.task}, return at the end: {each}."


def _claims(
    records: pd.DataFrame, task: Task, settings: Settings, names: Sequence[str]
) -> Sequence[Claim]:
    """Return the claims about a task that was run; none without dense."""
    if DENSE not in names:
        return []
    final = ends(records, task.name, names, RETURN)
    promised = {name: final[name] for name in run.promised(settings) if name in final}
    highest = {name: own for name, own in final.items() if name.startswith("delight ")}
    return task_claims(task, final[DENSE], promised, highest)


def _shown(names: Sequence[str]) -> list[str]:
    """Return who has a colour and a name in figures: one of each kind; all where they are few."""
    if len(names) <= MOST_SHOWN:
        return list(names)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition(" ")[0], name)
    return [name for kind, name in first.items() if kind in KINDS_SHOWN]


def _figure(
    records: pd.DataFrame,
    tasks: Sequence[Task],
    names: Sequence[str],
    metric: str,
    label: str,
    says: str,
    x: plotting.Axis = "forward",
) -> Figure:
    """Draw a metric of all contenders, one panel a task, against samples or rows."""
    figure, axes = plotting.grid(1, len(tasks), width=max(3.7, 6.0 / len(tasks)), height=3.5)
    shown = _shown(names)
    for ax, task in zip(axes[0], tasks, strict=True):
        _curves(ax, records, task, names, shown, metric, x)
        ax.set_title(task.training.task)
        ax.set_xlabel("samples" if x == "forward" else "rows differentiated (log scale)")
        ax.set_xscale("linear" if x == "forward" else "log")
        ax.xaxis.set_major_formatter(plotting.counts)
        plotting.label_ends(ax)
    axes[0, 0].set_ylabel(label)
    grey = [name for name in names if name not in shown]
    others = f" Grey: {', '.join(grey)}." if grey else ""
    plotting.head(figure, says, plotting.seeds_note(records) + others)
    return figure


def _curves(
    ax: Axes,
    records: pd.DataFrame,
    task: Task,
    names: Sequence[str],
    shown: Sequence[str],
    metric: str,
    x: plotting.Axis,
) -> None:
    present = _present(records, task, names)
    for name in present:
        if name not in shown:
            curve = statistics.curve(records, task.name, name, metric)
            ax.plot(curve[x], curve["mean"], color=plotting.FAINT, linewidth=1)
    own = [name for name in present if name in shown]
    plotting.curves(ax, records, task.name, own, metric, x=x)


def _present(records: pd.DataFrame, task: Task, names: Sequence[str]) -> list[str]:
    known = set(records.loc[records["part"] == task.name, "series"])
    return [name for name in names if name in known]
