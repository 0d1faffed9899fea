"""How long a step takes, stage by stage, and how many rollouts the saved time buys."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kondo_lab.language.contenders import Contender
from kondo_lab.language.loop import Learner, Path, Step
from kondo_lab.language.updates import LEARNER, LOOP, STAGES
from kondo_lab.part import Record

EQUAL_TIME = 0.02
"""Loop times this close, relatively, are equal."""


class StageSeconds(NamedTuple):
    """How long a stage of a contender's step takes."""

    contender: str
    """Its name; with " plain" behind it for that path."""
    stage: str
    p20: float
    p50: float
    p80: float
    tokens: float
    """Differentiated per step, the mean over rounds."""


def seconds_per_step(
    learner: Learner,
    others: Sequence[Contender],
    *,
    rounds: int,
    progress: Callable[[float, str], None] = lambda share, note: None,
) -> list[StageSeconds]:
    """Measure one step of every contender in turn, round after round; dense ones also plain.

    The learner's rate must be 0: Adam does its work, and the weights stay, so that all contenders
    meet the same policy, and in a round the same prompts and completions. The learner is left with
    the contender and path it had; its counters move on.

    Args:
        learner: with learning_rate 0.
        others: whom to measure.
        rounds: samples of each.
        progress: called after every round.
    """
    if learner.learning_rate != 0:
        raise ValueError(
            f"learning_rate must be 0 to measure seconds, got {learner.learning_rate}: the policy "
            f"would change between contenders."
        )
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}.")
    plain = [each for each in others if each.kind in ("dense", "soft")]
    turns: list[tuple[Contender, Path]] = [(each, "product") for each in others]
    turns += [(each, "plain") for each in plain]
    found: dict[str, list[Step]] = {}
    before, first = (learner.contender, learner.path), learner.num_steps
    try:
        learner.warm_up()
        # A rehearsal on the same completions, which is overwritten: packs have many shapes, and of
        # each the first one is recorded.
        for number in range(2 * rounds):
            step = first + number % rounds
            for turn in turns:
                learner.num_steps = step  # the same experience for all
                learner.contender, learner.path = turn
                found.setdefault(_title(*turn), []).append(learner.step())
            progress((number + 1) / (2 * rounds), f"round {number + 1}")
        found = {name: steps[rounds:] for name, steps in found.items()}
    finally:
        learner.contender, learner.path = before
    return [
        StageSeconds(name, stage, *_percentiles([step.seconds[stage] for step in steps]), tokens)
        for name, steps in found.items()
        for tokens in [statistics.fmean(step.learned.tokens for step in steps)]
        for stage in (*STAGES, LEARNER, LOOP)
    ]


def seconds_records(part: str, found: Sequence[StageSeconds], learner: Learner) -> list[Record]:
    """Return measured seconds as records, three metrics per stage."""
    return [
        Record(
            part=part,
            series=line.contender,
            setting=math.nan,
            seed=learner.seed,
            step=0,
            forward=learner.shape.num_rows,
            backward=0,
            metric=metric,
            value=value,
        )
        for line in found
        for metric, value in (
            (f"seconds {line.stage} p20", line.p20),
            (f"seconds {line.stage} p50", line.p50),
            (f"seconds {line.stage} p80", line.p80),
            *([("tokens differentiated", line.tokens)] if line.stage == LOOP else []),
        )
    ]


def _title(contender: Contender, path: Path) -> str:
    return contender.name if path == "product" else f"{contender.name} plain"


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.tensor(values, dtype=torch.float64).quantile(at).tolist()
    return p20, p50, p80


def prompts_for_seconds(
    seconds_of: Callable[[int], float], target: float, *, fewest: int, most: int, tries: int = 4
) -> int:
    """Return how many prompts a step can hold so that it takes as long as `target`.

    What a cheap learner saves can buy rollouts. Seconds are nearly a straight line in the number of
    prompts: each try aims at where the line through the latest two measurements meets the target.

    Args:
        seconds_of: measures a step with so many prompts, e.g. the p50 of its loop.
        target: seconds of the dense contender's step.
        fewest: the dense contender's prompts; the answer where even these take longer.
        most: what memory holds.
        tries: measurements after the first.

    Returns:
        The largest number measured that took no longer than the target, within 2%.

    Example:
        >>> from kondo_lab.language.step_seconds import prompts_for_seconds
        >>> prompts_for_seconds(lambda number: 1 + 0.1 * number, 5.0, fewest=10, most=1000)
        40
    """
    if not 1 <= fewest <= most:
        raise ValueError(f"fewest must lie between 1 and most ({most}), got {fewest}.")
    number, measured = fewest, [(fewest, seconds_of(fewest))]
    aim = fewest * target / measured[0][1]
    for _ in range(tries):
        number = min(max(round(aim), fewest), most)
        if number in dict(measured):
            break
        measured.append((number, seconds_of(number)))
        (a, seconds_a), (b, seconds_b) = measured[-2:]
        slope = (seconds_b - seconds_a) / (b - a)
        if slope <= 0:  # noise: the two cannot be told apart
            break
        aim = b + (target - seconds_b) / slope
    fitting = [each for each, spent in measured if spent <= target * (1 + EQUAL_TIME)]
    return max(fitting, default=fewest)


def prompts_for_equal_time(
    make: Callable[[int], Learner],
    contender: Contender,
    target: float,
    *,
    fewest: int,
    most: int,
    rounds: int,
) -> int:
    """Return how many prompts of `contender` take as long as `target`, the dense loop's p50.

    Args:
        make: number of prompts -> a learner with learning_rate 0.
        contender: whose loop is measured.
        target: see `prompts_for_seconds`.
        fewest: see there.
        most: see there.
        rounds: of each measurement.
    """

    def seconds_of(num_prompts: int) -> float:
        found = seconds_per_step(make(num_prompts), [contender], rounds=rounds)
        (line,) = (x for x in found if (x.contender, x.stage) == (contender.name, LOOP))
        return line.p50

    return prompts_for_seconds(seconds_of, target, fewest=fewest, most=most)
