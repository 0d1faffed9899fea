"""Records -> what skipping bought: rewards, times to targets, speed-ups, and what went wrong."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import pandas as pd

from kondo_lab.language import timed_step
from kondo_lab.language.contenders import Contender, percent
from kondo_lab.language.step_seconds import PLAIN
from kondo_lab.language.transformer import SIZES
from kondo_lab.studies.lm_rl import assignments, drawing, failures, runs, tuning
from kondo_lab.studies.lm_rl.runs import AXES, DENSE, LEARNER, LOOP, Arena, Reach, SpeedUp
from kondo_lab.studies.lm_rl.settings import Field, Settings, Training
from kondo_lab.studies.statistics import estimate
from kondo_lab.studies.study import Analysis, Estimate, FrontierPoint, Headline, headline

FIGURE = "beyond the papers"
AIM_DENSE, AIM_OTHERS = 5.0, 1.5
"""Speed-ups to aim for in learner seconds to the higher target: over dense GRPO, and over the best
alternative at an equal rate."""
AIMED_AT = "90% of the way"
FILTER = "zero-advantage filter"
ALTERNATIVES = ("PODS", "random")


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers and figures."""
    found = Analysis(headline=[], figures={}, findings=[], frontier=[])
    arenas = runs.arenas(records, settings)
    add_starts(found, records, settings)
    for arena in arenas:
        _add_arena(found, arena, records, settings)
    _add_seconds(found, records, settings)
    points = speed_ups_by_size(arenas, settings)
    if points[LEARNER]:
        found.figures["sizes"] = drawing.sizes(points)
    for arena in arenas:
        if arena.by_clock:
            _add_more(found, arena, records, settings)
    _add_learning_rates(found, records, settings)
    return found


_line = partial(headline, FIGURE)


def add_starts(found: Analysis, records: pd.DataFrame, settings: Training) -> None:
    """Say where supervised starts ended."""
    quality = records[records["metric"] == tuning.QUALITY]
    for field in settings.fields:
        own = quality[quality["part"] == assignments.warm_name(field)]
        if own.empty:
            continue
        enough = settings.start_reward(field)
        ends = start_rewards(own, enough).values()
        short = sum(reward < enough for reward in ends)
        missed = f"; {short} never got to {enough:g}" if short else ""
        found.findings.append(
            f"{field.name}: supervised starts of {len(ends)} seeds end at rewards of "
            f"{min(ends):.2f} to {max(ends):.2f}{missed}."
        )


def start_rewards(points: pd.DataFrame, enough: float) -> dict[int, float]:
    """Return seed -> its reward where its start ended: the first that is enough, or the last."""
    ends = {}
    for seed, own in points.sort_values("step").groupby("seed"):
        there = own[own["value"] >= enough]
        ends[int(seed)] = float((there if len(there) else own.iloc[-1:])["value"].iloc[0])
    return ends


def _add_arena(found: Analysis, arena: Arena, records: pd.DataFrame, settings: Settings) -> None:
    levels = runs.targets(arena)
    shown = [name for name in _headline_names(settings) if name in arena.runs]
    names = assignments.wall_names if arena.by_clock else assignments.grid_names
    own = records[records["part"].isin(names(settings, arena.field))]
    rates = {each.name: each.rate for each in settings.everyone()}
    found.headline.extend(_end_lines(arena, own, shown))
    for name, level in levels.items():
        found.headline.extend(_reach_lines(arena, shown, name, level))
    if arena.dense in arena.runs:
        found.findings.extend(_verdicts(arena, settings, levels))
    if _aim_is_timed(arena, levels):
        for level in levels.values():
            found.headline.extend(_speed_lines(arena, settings, shown, level))
    found.frontier.extend(_frontier(arena, rates, levels))
    found.findings.extend(failure_findings(arena, own, settings.everyone()))
    found.figures[f"curves-{assignments.slug(arena.name)}"] = drawing.curves(arena, shown, levels)
    if arena.field == settings.main:
        found.figures["frontier"] = drawing.frontier(arena, rates)


def _headline_names(settings: Settings) -> list[str]:
    return [*(each.name for each in settings.headliners()), DENSE + PLAIN]


def _end_lines(arena: Arena, records: pd.DataFrame, shown: Iterable[str]) -> Iterator[Headline]:
    """Yield rewards at the end, sampled and greedy."""
    greedy = tuning.end_reward(records, tuning.GREEDY)
    for name in shown:
        sampled = runs.end_rewards(arena.runs[name])
        yield _line(name, "held-out reward at temperature 1, at the end", arena.name, sampled)
        ends = estimate(list(greedy.loc[name]))
        yield _line(name, "greedy held-out reward at the end", arena.name, ends)


def _reach_lines(arena: Arena, shown: Iterable[str], name: str, level: float) -> Iterator[Headline]:
    """Yield what was paid to a target. Seeds that never got there count with their whole run."""
    for series in shown:
        for axis in AXES:
            if axis in arena.runs[series][0].costs:
                own = runs.reach(arena.runs[series], level, axis)
                missed = own.seeds - own.reached
                least = f", at least: {missed} of {own.seeds} seeds never" if missed else ""
                metric = f"{axis} to {level:.2f}, {name}{least}"
                yield _line(series, metric, arena.name, own.mean)


def _aim_is_timed(arena: Arena, levels: Mapping[str, float]) -> bool:
    """Whether there is a target, and seconds to it."""
    return AIMED_AT in levels and LEARNER in arena.runs[arena.dense][0].costs


def _speed_lines(
    arena: Arena, settings: Settings, shown: Iterable[str], level: float
) -> Iterator[Headline]:
    """Yield speed-ups to a target: over dense, and of DG-K over its best alternative."""
    by_axis = {axis: reaches(arena, level, axis) for axis in (LEARNER, LOOP)}
    pairs = [(name, arena.dense, axis) for name in shown for axis in by_axis]
    for rate in settings.headline_rates:
        ours, rival = f"DG-K {percent(rate)}", _rival(by_axis[LEARNER], rate)
        if ours in arena.runs and rival is not None:
            pairs.append((ours, rival, LEARNER))
    for name, other, axis in pairs:
        if name != other:
            theirs, own = by_axis[axis][other], by_axis[axis][name]
            ratio = runs.speed_up(theirs, own)
            bound = f", {ratio.bound}" if ratio.bound else ""
            metric = f"{axis} to {level:.2f}, speed-up over {other}{bound}"
            seeds = len(own.times.keys() & theirs.times.keys())
            yield _line(name, metric, arena.name, Estimate(ratio.value, ratio.se, seeds))


def _rival(by_learner: Mapping[str, Reach], rate: float) -> str | None:
    """Return the alternative at an equal rate that took the fewest learner seconds."""
    names = [*(f"{kind} {percent(rate)}" for kind in ALTERNATIVES), FILTER]
    return runs.fastest(by_learner, names)


def _verdicts(arena: Arena, settings: Settings, levels: Mapping[str, float]) -> Iterator[str]:
    """Yield what came of the aims: a sentence for every rate of DG-K, one for the best gate."""
    if not _aim_is_timed(arena, levels):
        missing = "seconds of a step were not measured" if levels else "dense GRPO did not learn"
        yield f"{arena.name}: {missing}, so there is no time to a target."
        return
    level, half_way = levels[AIMED_AT], levels["half way"]
    for rate in settings.headline_rates:
        if f"DG-K {percent(rate)}" in arena.runs:
            yield _verdict(arena, f"DG-K {percent(rate)}", rate, level)
    best = runs.fastest(reaches(arena, level, LEARNER), _gates(settings))
    if best is not None:
        learner, loop = over_dense(arena, best, level)
        half_learner, half_loop = over_dense(arena, best, half_way)
        yield (
            f"{arena.name}: of all gates {best} was the first at {level:.2f}, a speed-up over "
            f"{arena.dense} of {learner} in learner seconds and of {loop} by the whole loop (half "
            f"way there, at {half_way:.2f}: {half_learner} and {half_loop}). "
            f"{_at_the_end(arena, best)}"
        )


def _gates(settings: Settings) -> list[str]:
    """Return the headliners that skip anything, in their order."""
    return [each.name for each in settings.headliners() if each.rate < 1 or each.kind == "filter"]


def reaches(arena: Arena, level: float, axis: str) -> dict[str, Reach]:
    """Return when every series reached a target, by what it had paid."""
    return {series: runs.reach(several, level, axis) for series, several in arena.runs.items()}


def over_dense(arena: Arena, ours: str, level: float) -> tuple[SpeedUp, SpeedUp]:
    """Return speed-ups to a target over dense GRPO, in learner seconds and by the whole loop."""
    both = (reaches(arena, level, axis) for axis in (LEARNER, LOOP))
    learner, loop = (runs.speed_up(reached[arena.dense], reached[ours]) for reached in both)
    return learner, loop


def _verdict(arena: Arena, ours: str, rate: float, level: float) -> str:
    learner, loop = over_dense(arena, ours, level)
    by_learner = reaches(arena, level, LEARNER)
    own, rival = by_learner[ours], _rival(by_learner, rate)
    least = "at least " if own.reached < own.seeds else ""
    sentence = (
        f"{arena.name}: {ours} reached a held-out reward of {level:.2f} in {least}"
        f"{own.mean.mean:.3g} learner seconds ({own.reached} of {own.seeds} seeds), "
        f"a speed-up over {arena.dense} of {learner}{_aim(learner, AIM_DENSE)}, and by the "
        f"whole loop of {loop}."
    )
    if rival is not None:
        ratio = runs.speed_up(by_learner[rival], own)
        sentence += f" Over {rival}, the best alternative: {ratio}{_aim(ratio, AIM_OTHERS)}."
    return f"{sentence} {_at_the_end(arena, ours)}"


def _at_the_end(arena: Arena, ours: str) -> str:
    """Say whether the reward at the end is worse than dense's by more than one standard error.

    Of the seeds that both have: starts differ, and of a run that was cut short some series have
    fewer. The error is that of a difference of independent means; one seed has none.
    """
    several, others = arena.runs[ours], arena.runs[arena.dense]
    both = {own.seed for own in several} & {own.seed for own in others}
    if not both:
        return f"No seed is of both {ours} and {arena.dense}: their ends are not compared."
    end, dense = (runs.end_rewards(runs.of_seeds(own, both)) for own in (several, others))
    if len(both) == 1:
        word = "lower" if end.mean < dense.mean else "not lower"
        return (
            f"Reward at the end {end.mean:.3f}, {arena.dense} {dense.mean:.3f} on the one seed of "
            f"both: {word}; one seed has no standard error."
        )
    worse = end.mean < dense.mean - math.hypot(end.se, dense.se)
    return (
        f"Reward at the end {end.mean:.3f} ± {end.se:.3f}, {arena.dense} {dense.mean:.3f} ± "
        f"{dense.se:.3f} on {len(both)} seeds of both: {'worse' if worse else 'not worse'} by more "
        f"than one standard error."
    )


def _aim(ratio: SpeedUp, aim: float) -> str:
    """Say whether a speed-up is what was aimed for; a bound on the wrong side proves nothing."""
    met = ratio.value >= aim and ratio.bound in ("", "at least")
    # One seed has no error, and the tables say that there was one.
    sure = math.isnan(ratio.se) or ratio.value - ratio.se >= aim
    verdict = "not met" if not met else "met" if sure else "met by less than a standard error"
    return f" (aim {aim:g}x: {verdict})"


def _frontier(
    arena: Arena, rates: Mapping[str, float], levels: Mapping[str, float]
) -> Iterator[FrontierPoint]:
    for name, level in levels.items():
        for series, several in arena.runs.items():
            seen, paid = (runs.reach(several, level, axis) for axis in (runs.ROLLOUTS, runs.ROWS))
            yield FrontierPoint(
                task=arena.name,
                series=series,
                rate=rates.get(series, 1.0),
                target=f"held-out reward {level:.3f}, {name}",
                forward=_mean_of_those_there(seen),
                backward=_mean_of_those_there(paid),
                reached=seen.reached,
                seeds=seen.seeds,
                final_error=1 - runs.end_rewards(several).mean,
            )


def _mean_of_those_there(reach: Reach) -> float:
    there = [time for time in reach.times.values() if math.isfinite(time)]
    return sum(there) / len(there) if there else math.nan


def failure_findings(
    arena: Arena, records: pd.DataFrame, contenders: Sequence[Contender]
) -> list[str]:
    """Return a sentence for every kind of failure, which names all series that show it."""
    by_kind: dict[str, list[str]] = {}
    for failure in failures.found(arena, records, contenders):
        by_kind.setdefault(failure.kind, []).append(f"{failure.series} ({failure.evidence})")
    return [f"{arena.name}: {kind}: {'; '.join(told)}." for kind, told in by_kind.items()]


def step_speed_ups(records: pd.DataFrame, field: Field) -> dict[str, tuple[float, float]]:
    """Return series -> speed-up of learner and loop of a step over dense GRPO's faster path."""
    seconds = runs.step_seconds(records, field)
    if DENSE not in seconds.index:
        return {}
    both = seconds[[timed_step.LEARNER, timed_step.LOOP]]
    ratios = both.loc[DENSE] / both
    return dict(zip(ratios.index, ratios.itertuples(index=False, name=None), strict=True))


def _add_seconds(found: Analysis, records: pd.DataFrame, settings: Settings) -> None:
    """Set learner and loop speed-ups of a step beside what Amdahl's law leaves of them."""
    by_field = {
        field: ratios for field in settings.fields if (ratios := step_speed_ups(records, field))
    }
    for field, ratios in by_field.items():
        dense = runs.step_seconds(records, field).loc[DENSE]
        share = dense[timed_step.LEARNER] / dense[timed_step.LOOP]
        for series in _headline_names(settings):
            for stage, ratio in zip(("learner", "loop"), ratios.get(series, ()), strict=False):
                metric = f"{stage} speed-up over GRPO"
                found.headline.append(_line(series, metric, f"{field.name}, a step", ratio))
        for rate in settings.headline_rates:
            if f"DG-K {percent(rate)}" in ratios:
                learner, whole = ratios[f"DG-K {percent(rate)}"]
                found.findings.append(
                    f"{field.name}, seconds of a step: DG-K {percent(rate)} has a learner "
                    f"{learner:.2f}x as fast as dense GRPO's "
                    f"({1e3 * dense[timed_step.LEARNER]:.3g} ms by its faster path) and a loop "
                    f"{whole:.2f}x as fast. The learner is "
                    f"{100 * share:.0f}% of the dense loop, so a free learner would give "
                    f"{1 / (1 - share):.2f}x."
                )
    if by_field:
        by_name = {field.name: ratios for field, ratios in by_field.items()}
        found.figures["speed-ups"] = drawing.speed_ups(by_name)


def speed_ups_by_size(
    arenas: Iterable[Arena], settings: Settings
) -> dict[str, dict[str, dict[int, SpeedUp]]]:
    """Return axis -> gate -> weights of the model -> speed-up over dense GRPO to the higher target.

    By the clock, of gates that were run with models of at least two sizes.
    """
    gates = _gates(settings)
    points: dict[str, dict[str, dict[int, SpeedUp]]] = {LEARNER: {}, LOOP: {}}
    for arena in arenas:
        levels, size = runs.targets(arena), SIZES[arena.field.size].num_weights
        if arena.by_clock and _aim_is_timed(arena, levels):
            for gate in arena.runs.keys() & set(gates):
                both = over_dense(arena, gate, levels[AIMED_AT])
                for axis, ratio in zip((LEARNER, LOOP), both, strict=True):
                    points[axis].setdefault(gate, {})[size] = ratio
    return {
        axis: {gate: by_gate[gate] for gate in gates if len(by_gate.get(gate, ())) > 1}
        for axis, by_gate in points.items()
    }


def _add_more(found: Analysis, arena: Arena, records: pd.DataFrame, settings: Settings) -> None:
    """Compare runs whose saved time bought rollouts with runs that saved it, by loop seconds."""
    level = runs.targets(arena).get(AIMED_AT)
    names = assignments.more_runs(settings, arena.field)
    for series, several in runs.clock_runs(records, names).items():
        if level is None or series not in arena.runs:
            continue
        times = f"{several[0].costs[runs.ROLLOUTS][-1] / several[0].steps[-1]:.0f}"
        more, by_loop = runs.reach(several, level, LOOP), reaches(arena, level, LOOP)
        faster, over_own = (runs.speed_up(by_loop[other], more) for other in (arena.dense, series))
        dense = runs.of_seeds(arena.runs[arena.dense], more.times)
        ends = [runs.end_rewards(each).mean for each in (several, dense)]
        least = "at least " if more.reached < more.seeds else ""
        found.findings.append(
            f"{arena.name}: {series} with {times} rollouts a step instead of "
            f"{arena.field.num_rows}, a loop as long as dense GRPO's, reached {level:.2f} in "
            f"{least}{more.mean.mean:.3g} loop seconds ({more.reached} of {more.seeds} seeds), "
            f"a speed-up of {faster} over {arena.dense}, and over the same without of "
            f"{over_own}; reward at the end {ends[0]:.3f}, {arena.dense} of the same seeds "
            f"{ends[1]:.3f}."
        )
        metric = f"{LOOP} to {level:.2f}, saved time buys rollouts"
        found.headline.append(_line(series, metric, arena.name, more.mean))


def _add_learning_rates(found: Analysis, records: pd.DataFrame, settings: Settings) -> None:
    """Say which learning rates were chosen, and what the denominator does to the best one."""
    tuned = tuned_rewards(records, settings, settings.main)
    best = best_by_rate(records, settings)
    found.findings.extend(edge_findings(records, settings))
    for kind, by_rate in best.items():
        told = ", ".join(f"{percent(rate)}: {by_rate[rate]:g}" for rate in sorted(by_rate))
        found.findings.append(f"Best learning rate of DG-K with the {kind} denominator: {told}.")
        for rate, learning_rate in sorted(by_rate.items()):
            metric = f"best learning rate, {kind} denominator"
            found.headline.append(_line(f"DG-K {percent(rate)}", metric, "", learning_rate))
    if tuned:
        shown = {name: tuned[name] for name in _headline_names(settings) if name in tuned}
        found.figures["learning-rates"] = drawing.learning_rates(shown, best)


def edge_findings(records: pd.DataFrame, settings: Training) -> Iterator[str]:
    """Yield, field by field, whose best learning rate is at the edge of those tried."""
    for field in settings.fields:
        if field.tuned_on:
            continue
        at_edge = edges(tuned_rewards(records, settings, field), field.learning_rates)
        if at_edge:
            yield (
                f"{field.name}: the best learning rate is at the edge of those tried for "
                f"{', '.join(at_edge)}."
            )


def tuned_rewards(
    records: pd.DataFrame, settings: Training, field: Field
) -> dict[str, dict[float, float]]:
    """Return series -> learning rate -> reward at the end of tuning."""
    own = records[records["part"].isin(assignments.tune_names(settings, field))]
    return tuning.rewards_by_rate(own) if len(own) else {}


def edges(tuned: Mapping[str, Mapping[float, float]], rates: tuple[float, ...]) -> list[str]:
    """Return whose best learning rate is the lowest or highest that was tried."""
    outer = {min(rates), max(rates)}
    return [
        series
        for series, rewards in tuned.items()
        if any(math.isclose(tuning.best_rate(rewards), rate, rel_tol=1e-5) for rate in outer)
    ]


def best_by_rate(records: pd.DataFrame, settings: Settings) -> dict[str, dict[float, float]]:
    """Return denominator -> rate -> the learning rate of the highest reward."""
    own = records[records["part"].isin(assignments.denominator_names(settings))]
    rewards = tuning.rewards_by_rate(own) if len(own) else {}
    best: dict[str, dict[float, float]] = {}
    for each in assignments.denominators(settings):
        if each.name in rewards:
            best.setdefault(each.denominator, {})[each.rate] = tuning.best_rate(rewards[each.name])
    return best
