"""Populations on token reversal, with the papers' transformer."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.claims import LEAST_SEEDS
from kondo_lab.evidence.comparison import interpolated_longest
from kondo_lab.evidence.study import Estimate, Headline
from kondo_lab.models.architecture import Architecture
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.tasks.base import Credit
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.training import run
from kondo_lab.training.member import Member
from kondo_lab.training.part import Context
from kondo_lab.training.population import Population
from kondo_lab.training.programs import SequenceProgram
from kondo_lab.training.record import Run

Points = Mapping[float, float]
"""x -> what was read off a figure there."""

NUM_PROMPTS = 10
NUM_ANSWERS = 10
FEED_FORWARD = 256
"""Feed-forward width of the studies of reversal; `reversal-fit` compares others."""
LEARNING_RATE = 1e-4
"""Of Adam in the studies of reversal. `reversal-fit` does not decide between it and 2e-4."""
ONLINE = "online error"
SOLVED = 0.25
"""A length counts as solved where the error is below this, the reward above 0.75."""
SOLVED_SO_FAR = True
"""Whether the paper's Figure 10 is taken to mean the mean reward since the start of training, or
else the reward at the moment. The first fits better with this model in `reversal-fit`, 0.20 against
0.29; both are shown."""
FLOAT32 = "PMPO float32"
"""Series of PMPO with advantages as the author's code has them: the one to compare with papers."""


def population(
    context: Context,
    members: Sequence[Member],
    *,
    length: int,
    num_tokens: int = 2,
    reward: Credit = "to_first_error",
    feed_forward: int = FEED_FORWARD,
    reverse: bool = True,
    increment: bool = False,
) -> Population:
    """Return a population of transformers: d = 64, 2 layers, 2 heads.

    `reverse` and `increment` choose a variant of the task, see ReversalTask.
    """
    task = ReversalTask(
        length=length, num_tokens=num_tokens, reward=reward, reverse=reverse, increment=increment
    )
    network = StackedDecoder(
        Architecture(ff_width=feed_forward),
        prompt_length=length,
        answer_length=length,
        num_tokens=num_tokens,
    )
    program = SequenceProgram(task, network, num_prompts=NUM_PROMPTS, num_answers=NUM_ANSWERS)
    return Population(program, members, device=context.device)


def judged(known: Mapping[str, Points]) -> dict[str, Points]:
    """Return the papers' numbers by our series: their PMPO is our `FLOAT32`."""
    return {FLOAT32 if name == "PMPO" else name: points for name, points in known.items()}


def without_ppo(records: pd.DataFrame) -> set[str]:
    """Return the parts that PG was run in and PPO was not."""
    parts = {name: set(records[records["series"] == name]["part"]) for name in ("PG", "PPO")}
    return parts["PG"] - parts["PPO"]


def with_ppo(records: pd.DataFrame) -> pd.DataFrame:
    """Return records in which PG's runs stand for PPO too, in the parts that PPO was not run in.

    On its own samples, with one update a batch and no KL term, PPO's gradient is PG's (tested).
    `uncounted` keeps these runs from being counted twice.
    """
    same = records[(records["series"] == "PG") & records["part"].isin(without_ppo(records))]
    return pd.concat([records, same.assign(series="PPO")], ignore_index=True)


def uncounted(lines: Sequence[Headline]) -> list[Headline]:
    """Return the lines of a part that PPO was not run in: PPO's keep their numbers, no verdict.

    They are PG's runs again. What the paper has stays beside them.
    """
    return [
        line._replace(against="", verdict="") if "PPO" in line.series.split(" < ") else line
        for line in lines
    ]


def fitted(lines: Sequence[Headline]) -> list[Headline]:
    """Return lines of a figure that width and learning rate were fitted to (`reversal-fit`).

    Their numbers agree with the paper's by choice, so they do not count as the paper's. Orders of
    methods were not fitted.
    """
    return [
        line._replace(against="fitted")
        if line.against == "paper" and not line.metric.startswith("order of ")
        else line
        for line in lines
    ]


def open_if_few(lines: Sequence[Headline]) -> list[Headline]:
    """Return the lines; those with a verdict that rest on too few seeds are noisy."""
    return [
        line._replace(verdict="noisy") if line.verdict and line.seeds < LEAST_SEEDS else line
        for line in lines
    ]


def train(
    populations: Sequence[Population],
    context: Context,
    *,
    part: str,
    num_steps: int,
    precision: str,
    log_steps: Sequence[int] | None = None,
    **options: Any,
) -> list[Run]:
    """Train with products of this precision, logged at every fortieth of the way unless told."""
    if log_steps is None:
        log_steps = [num_steps * place // 40 for place in range(1, 41)]
    with run.matmul_precision(precision):
        return run.train(
            populations, context, part=part, num_steps=num_steps, log_steps=log_steps, **options
        )


def longest_of(errors: Mapping[float, float]) -> float:
    """Return the longest length with an error below `SOLVED`, of one seed's {length: error}.

    Between two lengths the error is taken to be linear, below the shortest one as well: nothing to
    write has no error. Where all are solved it is the longest there is.

    Example:
        >>> from kondo_lab.studies.reversals import longest_of
        >>> longest_of({10.0: 0.0, 20.0: 0.5}), longest_of({10.0: 0.5})
        (15.0, 5.0)
    """
    return interpolated_longest({0.0: 0.0} | dict(errors), SOLVED)


def longest_solved(
    records: pd.DataFrame, part: str, series: str, forward: float, *, average: bool
) -> Estimate:
    """Return the longest length solved after that many forward passes, mean over seeds.

    Settings are lengths, read as `longest_of` does.

    Args:
        average: judge by the mean reward since the start of training, instead of by the reward at
            that moment (since the logged step before).
    """
    own = (records["part"] == part) & (records["series"] == series) & (records["metric"] == ONLINE)
    chosen = records[own & (records["forward"] <= forward)].sort_values("forward")
    found = []
    for _, own in chosen.groupby("seed"):
        by_length = own.groupby("setting")["value"]
        errors = by_length.mean() if average else by_length.last()
        found.append(longest_of(dict(errors)))
    return statistics.estimate(found)
