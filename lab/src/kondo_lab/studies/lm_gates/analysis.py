"""Records -> whether gates end where dense GRPO ends: differences seed by seed, and verdicts."""

from collections.abc import Iterator
from functools import partial

import pandas as pd

from kondo_lab.evidence import findings, runs
from kondo_lab.evidence.claims import Difference
from kondo_lab.evidence.runs import LEARNER, LOOP, Run, SpeedUp
from kondo_lab.evidence.statistics import estimate
from kondo_lab.evidence.study import Analysis, Claim, Estimate, Headline, headline
from kondo_lab.studies.lm_gates import drawing, equal_seconds
from kondo_lab.studies.lm_gates.arena import AIMED_AT, Arena, of_seeds, over_dense, targets
from kondo_lab.studies.lm_gates.captions import caption
from kondo_lab.studies.lm_gates.run import wall_names
from kondo_lab.studies.lm_gates.settings import Settings
from kondo_lab.training import tuning
from kondo_lab.training.fields import tune_names

_line = partial(headline, "beyond the papers")


def analyse(records: pd.DataFrame, settings: Settings) -> Analysis:
    """Return the study's numbers, its figure and its verdicts."""
    found = Analysis(headline=[], figures={}, findings=[], frontier=[])
    findings.add_starts(found, records, settings)
    arenas = []
    for field in settings.walls:
        names = wall_names(settings, field)
        arena = Arena(field, runs.clock_runs(records, names))
        if arena.dense in arena.runs:
            arenas.append(arena)
            _add_arena(found, arena, records[records["part"].isin(names)], settings)
    if arenas:
        found.figures["rewards"] = drawing.rewards(arenas)
        fields = [arena.field.name for arena in arenas]
        told = caption(found.headline, found.claims, settings.claimed, fields)
        found.captions["rewards"] = told
    found.findings.extend(_learning_rates(records, settings))
    found.findings.extend(findings.edge_findings(records, settings))
    return found


def _add_arena(found: Analysis, arena: Arena, records: pd.DataFrame, settings: Settings) -> None:
    others = {name: difference(arena, name) for name in arena.runs if name != arena.dense}
    known = {name: own for name, own in others.items() if own is not None}
    found.headline.extend(_lines(arena, records, known))
    for name in settings.claimed:
        if name in known:
            statement = (
                f"{arena.field.name}: {name} ends lower than dense GRPO by at most one standard "
                "error"
            )
            found.claims.append(Claim(statement, known[name].verdict, str(known[name])))
            found.findings.append(_verdict(arena, name, known[name]))
    lower = [
        f"{name} ({own})"
        for name, own in known.items()
        if name not in settings.claimed and own.estimate.mean < -own.estimate.se
    ]
    if lower:
        found.findings.append(
            f"{arena.name}: lower than dense GRPO at the end by more than one standard error, of "
            f"the others: {'; '.join(lower)}."
        )
    found.findings.extend(
        findings.failure_findings(arena.name, arena.runs, records, settings.everyone())
    )


def difference(arena: Arena, series: str) -> Difference | None:
    """Return how much higher a series ends than dense GRPO; None where no seed is of both.

    Arms of a seed share start, prompts and held-out prompts, so differences are taken seed by
    seed, and the standard error is theirs.
    """
    dense = {own.seed: own.end for own in arena.runs[arena.dense]}
    apart = [own.end - dense[own.seed] for own in arena.runs[series] if own.seed in dense]
    return Difference(estimate(apart)) if apart else None


def at_equal_seconds(arena: Arena, series: str) -> dict[str, Difference]:
    """Return, by kind of seconds, how far ahead of dense GRPO a series is at its own end.

    The claim is about equal steps. This was not fixed in advance, and has no verdict.
    """
    by_axis = {axis: equal_seconds.differences(arena, series, axis) for axis in (LOOP, LEARNER)}
    return {axis: Difference(estimate(apart)) for axis, apart in by_axis.items() if apart}


def _kept(several: list[Run]) -> dict[str, Estimate]:
    """Return the share of the rows kept at first, at last and over the run, over seeds."""
    shares = [drawing.kept_shares(own) for own in several]
    whole = [float(own.costs[runs.ROWS][-1] / own.costs[runs.ROLLOUTS][-1]) for own in several]
    return {
        "share of rows kept, to the first evaluation": estimate([float(own[0]) for own in shares]),
        "share of rows kept, to the last evaluation": estimate([float(own[-1]) for own in shares]),
        "share of rows kept": estimate(whole),
    }


def _lines(
    arena: Arena, records: pd.DataFrame, differences: dict[str, Difference]
) -> Iterator[Headline]:
    greedy = tuning.end_reward(records, tuning.GREEDY)
    entropy = _last(records, "entropy")
    level = targets(arena).get(AIMED_AT)
    for name, several in arena.runs.items():
        line = partial(_line, name, x=arena.field.name)
        yield line("held-out reward at temperature 1, at the end", ours=runs.end_rewards(several))
        yield line("greedy held-out reward at the end", ours=estimate(list(greedy.loc[name])))
        if name in differences:
            metric = "reward at the end less dense GRPO's, seed by seed"
            yield line(metric, ours=differences[name].estimate)
            for axis, own in at_equal_seconds(arena, name).items():
                metric = f"reward at the end less dense GRPO's at the same {axis}"
                yield line(metric, ours=own.estimate)
        for metric, share in _kept(several).items():
            yield line(metric, ours=share)
        yield line("entropy at the end, nats a token", ours=estimate(list(entropy.loc[name])))
        for axis in (LEARNER, LOOP):
            yield line(axis, ours=estimate([float(own.costs[axis][-1]) for own in several]))
        if name != arena.dense:
            yield from _speed_lines(arena, name, level)


def _speed_lines(arena: Arena, name: str, level: float | None) -> Iterator[Headline]:
    """Yield speed-ups over dense GRPO: of the same steps, and to 90% of the way."""
    ratios = dict(zip((LEARNER, LOOP), whole_run(arena, name), strict=True))
    told = {f"{axis} of the same steps, speed-up": ratio for axis, ratio in ratios.items()}
    if level is not None:
        to_target = over_dense(arena, name, level)
        for axis, ratio in zip((LEARNER, LOOP), to_target, strict=True):
            bound = f", {ratio.bound}" if ratio.bound else ""
            told[f"{axis} to {level:.2f}, speed-up{bound}"] = ratio
    dense = {own.seed for own in arena.runs[arena.dense]}
    seeds = len(of_seeds(arena.runs[name], dense))
    for metric, ratio in told.items():
        yield _line(name, metric, arena.field.name, Estimate(ratio.value, ratio.se, seeds))


def whole_run(arena: Arena, name: str) -> tuple[SpeedUp, SpeedUp]:
    """Return dense GRPO's learner and loop seconds over a series', of runs of the same steps."""
    below = -1.0  # every reward is above: what is reached is the end of the run
    ratios = []
    for axis in (LEARNER, LOOP):
        ends = [
            runs.Reach(own.ends, own.ends)
            for own in (runs.reach(arena.runs[each], below, axis) for each in (arena.dense, name))
        ]
        ratios.append(runs.speed_up(*ends))
    return ratios[0], ratios[1]


def _last(records: pd.DataFrame, metric: str) -> pd.Series:
    """Return a metric at the last step of every run, indexed by series and seed."""
    own = records[records["metric"] == metric].sort_values("step")
    last: pd.Series = own.groupby(["series", "seed"])["value"].last()
    return last


def _verdict(arena: Arena, name: str, own: Difference) -> str:
    """Say whether a gate ends where dense GRPO does, and at which price."""
    ours, dense = (_told(runs.end_rewards(arena.runs[each])) for each in (name, arena.dense))
    first, last, share = (100 * kept.mean for kept in _kept(arena.runs[name]).values())
    learner, loop = whole_run(arena, name)
    sentence = (
        f"{arena.field.name}: {name} ends at {ours}, dense GRPO at {dense}; seed by seed {own}. "
        f"Lower by at most one standard error: {own.verdict}."
    )
    if own.estimate.seeds > 1:
        sentence += f" A loss of more than {own.largest_loss:.3f} is excluded (95%, one-sided)."
    return (
        f"{sentence} It keeps {share:.1f}% of the rows, {first:.1f}% at first and {last:.1f}% at "
        f"last. For the same steps dense GRPO's learner takes {learner} as long, its loop {loop}."
        f"{_told_at_equal_seconds(arena, name)}"
    )


def _told_at_equal_seconds(arena: Arena, name: str) -> str:
    """Return a sentence to follow a verdict; empty where nothing is known."""
    known = at_equal_seconds(arena, name)
    told = "; ".join(f"at the same {axis} {own}" for axis, own in known.items())
    return f" Less dense GRPO's reward {told} (not fixed in advance)." if told else ""


def _told(reward: Estimate) -> str:
    """Return a reward with its standard error; one seed has none."""
    return f"{reward.mean:.3f} ± {reward.se:.3f}" if reward.seeds > 1 else f"{reward.mean:.3f}"


def _learning_rates(records: pd.DataFrame, settings: Settings) -> Iterator[str]:
    """Yield, field by field, the learning rates of the arms that have one of their own."""
    for field in settings.walls:
        rates = dict(settings.given_rates(field))
        tuned = records[records["part"].isin(tune_names(settings, field))]
        if len(tuned):
            rates |= tuning.chosen(tuned)
        if rates:
            told = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
            source = "tuned here" if len(tuned) else "of an earlier run"
            yield f"{field.name}: learning rates, {source}: {told}. Unbiased gates have GRPO's."
