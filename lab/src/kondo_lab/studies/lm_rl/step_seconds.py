"""How long a step takes, stage by stage."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kondo_lab.training.alone import PLAIN, Learner, Path, Step
from kondo_lab.training.arms import Arm
from kondo_lab.training.record import Log, Run
from kondo_lab.training.timed_step import LEARNER, LOOP, STAGES


def seconds_per_step(
    learner: Learner,
    others: Sequence[Arm],
    *,
    rounds: int,
    dense_paths: Sequence[Path] = ("product", "plain"),
    progress: Callable[[float, str], None] = lambda share, note: None,
) -> dict[str, list[Step]]:
    """Measure one step of every arm in turn, round after round; dense ones by their paths.

    The learner's rate must be 0: Adam does its work, and the weights stay, so that all arms
    meet the same policy, and in a round the same prompts and completions. The learner is left with
    the arm and path it had; its counters move on.

    Returns:
        Name of the arm, with " plain" behind it for that path -> its steps, one per round.
    """
    rate = learner.members[0].learning_rate
    if rate != 0:
        raise ValueError(
            f"learning_rate must be 0 to measure seconds, got {rate}: the policy would change "
            f"between arms."
        )
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}.")
    dense = [each for each in others if each.kind in ("dense", "soft")]
    turns: dict[str, tuple[Arm, Path]] = {
        each.name: (each, "product")
        for each in others
        if each not in dense or "product" in dense_paths
    }
    if "plain" in dense_paths:
        turns |= {each.name + PLAIN: (each, "plain") for each in dense}
    found: dict[str, list[Step]] = {name: [] for name in turns}
    before, first = (learner.arm, learner.path), learner.num_steps
    try:
        learner.warm_up()
        # A rehearsal on the same completions, which is overwritten: packs have many shapes, and of
        # each the first one is recorded.
        for number in range(2 * rounds):
            for name, turn in turns.items():
                learner.num_steps = first + number % rounds  # the same experience for all
                learner.arm, learner.path = turn
                found[name].append(learner.step())
            progress((number + 1) / (2 * rounds), f"round {number + 1}")
    finally:
        learner.arm, learner.path = before
    return {name: steps[rounds:] for name, steps in found.items()}


def seconds_runs(part: str, found: Mapping[str, Sequence[Step]], learner: Learner) -> list[Run]:
    """Return what `seconds_per_step` measured, three quantiles per stage."""
    log = Log(part, task=learner.program.task.title)
    for series, steps in found.items():
        values = {
            f"seconds {stage} p{percent}": float(
                np.percentile([step.seconds[stage] for step in steps], percent)
            )
            for stage in (*STAGES, LEARNER, LOOP)
            for percent in (20, 50, 80)
        }
        values["tokens differentiated"] = statistics.fmean(step.learned.tokens for step in steps)
        log.add(series, learner.members[0].seed, values, rollouts=learner.num_rows)
    return log.runs()
