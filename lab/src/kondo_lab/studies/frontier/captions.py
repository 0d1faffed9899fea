"""What a task's figure shows, by the headline's lines."""

from collections.abc import Sequence

from kondo_lab.evidence.captions import compared, decided, known, percent
from kondo_lab.evidence.claims import find
from kondo_lab.evidence.study import Headline
from kondo_lab.studies.frontier.points import Task


def caption(lines: Sequence[Headline], task: Task, ratio: float) -> str:
    """Return which gate reaches the target for the least, and where it ends beside PG.

    Args:
        lines: of the headline.
        task: whose figure.
        ratio: forward passes that a backward pass costs.
    """
    metric = f"{task.part}: least counted cost to {task.label}, in forward passes"
    at, end = f"c = {ratio:g}", f"{task.part}: {task.metric} at the end"
    cheapest = next((line for line in lines if line.metric == metric and line.x == at), None)
    otherwise = f"{task.metric} at the end by backward passes, and cost to {task.label}, by gate."
    if cheapest is None or not known(cheapest) or not decided(cheapest):
        return otherwise[:1].upper() + otherwise[1:]
    name = cheapest.series
    subject = (
        f"{name} reaches {task.label} for the least, {cheapest.ours:,.0f} counted forward passes "
        f"({at}), and ends at"
    )
    others = {"PG's": find(lines, "PG", end)} if name != "PG" else {}
    otherwise = f"{subject.removesuffix(', and ends at')}."
    return compared(subject, find(lines, name, end), others, otherwise=otherwise, show=percent)
