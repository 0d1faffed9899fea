"""Records of a plane -> seconds to the target by point, the best of each role, and the aim."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import pandas as pd

from kondo_lab.evidence import runs
from kondo_lab.evidence.runs import LEARNER, LOOP, ROLLOUTS, ROWS, Reach, Run
from kondo_lab.evidence.study import Analysis, Claim, Estimate, FrontierPoint, Headline, headline
from kondo_lab.studies.lm_rl import assignments, plane_drawing
from kondo_lab.studies.lm_rl.comparisons import aim_verdict
from kondo_lab.studies.lm_rl.plane import AGAINST, Trial, best, best_runs, rival_runs, trials
from kondo_lab.studies.lm_rl.settings import Plane, Role, Settings
from kondo_lab.training.fields import slug

AIMS = {LEARNER: 5.0, LOOP: 2.5}
"""Speed-ups to aim for at the largest model that learns, over the best dense point."""
AIMED_SIZE = "300m"
_line = partial(headline, "beyond the papers")


def add_planes(found: Analysis, records: pd.DataFrame, settings: Settings) -> None:
    """Add numbers, figures and findings of every plane that has records."""
    for plane in settings.planes:
        tried = trials(records, plane)
        if not tried:
            continue
        by_role = {role: best_runs(records, plane, role) for role in assignments.roles(plane)}
        reported = {role: several for role, several in by_role.items() if several}
        for point, rate, several in rival_runs(records, plane):
            found.headline.extend(_rival_lines(plane, rate, several, settings.target))
            found.findings.append(_rival_told(plane, rate, several, settings.target))
            if point.role in reported:
                rivals = (reported[point.role], several)
                reported[point.role] = min(rivals, key=partial(_loop_seconds, settings.target))
        found.headline.extend(_trial_lines(plane, tried, settings.target))
        found.findings.extend(_choices(plane, tried, settings.target))
        found.headline.extend(_best_lines(plane, reported, settings.target))
        found.findings.extend(_speed_ups(plane, reported, settings.target))
        found.claims.extend(_aims(plane, reported, settings.target))
        found.frontier.extend(_frontier(plane, reported, settings.target))
        name = slug("plane", plane.name)
        found.figures[name] = plane_drawing.plane(tried, reported, settings.target, plane.name)


def _trial_lines(plane: Plane, tried: Sequence[Trial], target: float) -> Iterator[Headline]:
    """Yield every point and learning rate, on the tuning seed: a bound where it never got there."""
    for point, rate, run in tried:
        place = f"{plane.name}, tuning seed, learning rate {rate:g}"
        there = math.isfinite(runs.time_to(run, target, LOOP))
        metric = "" if there else ", at least: never"
        for axis in (LOOP, LEARNER, ROLLOUTS, ROWS):
            (paid,) = runs.reach([run], target, axis).paid
            yield _line(point.name, f"{axis} to {target:g}{metric}", place, paid)
        yield _line(point.name, "smoothed reward where the run ended", place, float(run.reward[-1]))


def _loop_seconds(target: float, several: Sequence[Run]) -> float:
    return runs.reach(several, target, LOOP).mean.mean


def _rival_lines(
    plane: Plane, rate: float, several: Sequence[Run], target: float
) -> Iterator[Headline]:
    """Yield what a rival took, with all seeds."""
    for axis in (LOOP, LEARNER, ROLLOUTS, ROWS):
        own = runs.reach(several, target, axis)
        metric = f"{axis} to {target:g}, rival{_least(own)}"
        place = f"{plane.name}, learning rate {rate:g}"
        yield _line(several[0].series, metric, place, own.mean)


def _least(own: Reach) -> str:
    """Say that a mean is a bound, where seeds never got there."""
    missed = own.seeds - own.reached
    return f", at least: {missed} of {own.seeds} seeds never" if missed else ""


def _rival_told(plane: Plane, rate: float, several: Sequence[Run], target: float) -> str:
    own = runs.reach(several, target, LOOP)
    return (
        f"{plane.name}: {several[0].series} with a learning rate of {rate:g}, which the tuning "
        f"seed did not choose, took {own.mean.mean:.3g} ± {own.mean.se:.2g} loop seconds to "
        f"{target:g} ({own.reached} of {own.seeds} seeds)."
    )


def _choices(plane: Plane, tried: Sequence[Trial], target: float) -> Iterator[str]:
    """Yield which point of every role was the best on the tuning seed."""
    for role in assignments.roles(plane):
        if not any(trial.point.role == role for trial in tried):
            continue
        point, rate, run = best(tried, role, target)
        time = runs.time_to(run, target, LOOP)
        when = f"in {time:.2f} loop seconds" if math.isfinite(time) else "never"
        yield (
            f"{plane.name}: of {role} points the best on the tuning seed is {point.name} with a "
            f"learning rate of {rate:g}, which reached {target:g} {when}."
        )


def _best_lines(
    plane: Plane, reported: Mapping[Role, Sequence[Run]], target: float
) -> Iterator[Headline]:
    for role, several in reported.items():
        for axis in (LOOP, LEARNER, ROLLOUTS, ROWS):
            own = runs.reach(several, target, axis)
            metric = f"{axis} to {target:g}, best {role} point{_least(own)}"
            yield _line(several[0].series, metric, plane.name, own.mean)
        if role != "dense" and "dense" in reported:
            for axis in (LOOP, LEARNER):
                theirs = runs.reach(reported["dense"], target, axis)
                own = runs.reach(several, target, axis)
                ratio, seeds = runs.speed_up(theirs, own), _common(theirs, own)
                bound = f", {ratio.bound}" if ratio.bound else ""
                metric = f"{axis} to {target:g}, speed-up over the best dense point{bound}"
                yield _line(
                    several[0].series, metric, plane.name, Estimate(ratio.value, ratio.se, seeds)
                )


def _common(first: Reach, second: Reach) -> int:
    return len(first.times.keys() & second.times.keys())


def _speed_ups(
    plane: Plane, reported: Mapping[Role, Sequence[Run]], target: float
) -> Iterator[str]:
    """Yield how much sooner than the best dense point the others are, and what came of the aim."""
    if "dense" not in reported:
        return
    dense = reported["dense"]
    for role, several in reported.items():
        if role == "dense":
            continue
        told = []
        for axis, aim in AIMS.items():
            theirs, own = (runs.reach(each, target, axis) for each in (dense, several))
            ratio, seeds = runs.speed_up(theirs, own), _common(theirs, own)
            verdict = ""
            if plane.size == AIMED_SIZE and role == "gated":
                verdict = f" (aim {aim:g}x: {aim_verdict(ratio, seeds, aim)})"
            told.append(
                f"{ratio} in {axis}{verdict}, {theirs.mean.mean:.3g} and {own.mean.mean:.3g}"
            )
        own = runs.reach(several, target, LOOP)
        yield (
            f"{plane.name}: {several[0].series} reached a held-out reward of {target:g} "
            f"({own.reached} of {own.seeds} seeds) sooner than {dense[0].series}, the best dense "
            f"point, by {'; by '.join(told)}. {AGAINST}"
        )


def _aims(plane: Plane, reported: Mapping[Role, Sequence[Run]], target: float) -> Iterator[Claim]:
    """Yield whether the best gated point is as much sooner as was aimed for, by its size."""
    if plane.size != AIMED_SIZE or not {"dense", "gated"} <= reported.keys():
        return
    for axis, aim in AIMS.items():
        theirs, own = (runs.reach(reported[role], target, axis) for role in ("dense", "gated"))
        ratio, seeds = runs.speed_up(theirs, own), _common(theirs, own)
        yield Claim(
            f"{plane.name}: an unbiased gate reaches {target:g} at least {aim:g} times sooner in "
            f"{axis} than the best dense point",
            aim_verdict(ratio, seeds, aim),
            f"{ratio}, {seeds} seeds",
        )


def _frontier(
    plane: Plane, reported: Mapping[Role, Sequence[Run]], target: float
) -> Iterator[FrontierPoint]:
    for several in reported.values():
        seen, paid = (runs.reach(several, target, axis) for axis in (ROLLOUTS, ROWS))
        rate = next(each.rate for each in plane.points if each.name == several[0].series)
        yield FrontierPoint(
            task=plane.name,
            series=several[0].series,
            rate=rate,
            target=f"held-out reward {target:g}",
            forward=_mean_of_those_there(seen),
            backward=_mean_of_those_there(paid),
            reached=seen.reached,
            seeds=seen.seeds,
            final_error=1 - runs.end_rewards(several).mean,
        )


def _mean_of_those_there(reach: Reach) -> float:
    there = [time for time in reach.times.values() if math.isfinite(time)]
    return sum(there) / len(there) if there else math.nan
