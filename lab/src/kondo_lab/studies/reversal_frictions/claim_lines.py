"""The claims of the abstract as lines of the headline, each with a verdict.

    a   every friction alone: the error of the others is about 10 times DG's
    b   all four together: the others need about 10 times the samples to get to an error
    c   that ratio grows with the length
    d   all four together: DG solves lengths at least 2 times those of the others

A line matches where the claim is met, differs where it is missed, and is noisy where it is open.

"About 10 times" is 5 or more, as everywhere (`agreement`). An error near 0 is known to no better
than its own size, and so is a ratio to it. Claim a is judged by the errors themselves: it is met
where the other's exceeds 5 times DG's by more than two standard errors of the difference, missed
where it is lower by more than that, open in between. Where neither error can be told from none
there is nothing to compare, and the line is open.

Every line of fewer than 3 seeds is open. So is claim d where DG does not solve the shortest length
that was tried: the lengths below it are read off a line, and their ratio is one of errors.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from kondo_lab.evidence import statistics
from kondo_lab.evidence.agreement import WITHIN, judge_order
from kondo_lab.evidence.comparison import settings_of
from kondo_lab.evidence.study import Estimate, Headline, Verdict, headline, ordering
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_frictions import compute, errors
from kondo_lab.studies.reversal_frictions.run import (
    ALL,
    EACH,
    NONE,
    OWN,
    TOGETHER,
    cells,
    corrected,
    methods,
    named,
    of,
)
from kondo_lab.studies.reversal_frictions.settings import Settings
from kondo_lab.training.learner_error import LEARNER_ERROR

FIGURE = "Distributed, four frictions"
BEST = "lowest of the others"
NO_GROWTH = "no growth"
PAPER_FACTOR = 10.0
"""Of errors, and of samples: "about", from the abstract; version 2 says "often nearly"."""
PAPER_LENGTHS = 2.0
"""DG's longest length over the others', at least, of "2 to 3 times" in the abstract."""
WORDS: dict[Verdict, str] = {"matches": "met", "differs": "missed", "noisy": "open", "": ""}


def full(settings: Settings) -> bool:
    """Whether the paper's numbers are about this run."""
    return settings.length == 10 and settings.num_steps >= 10_000


def baselines(settings: Settings) -> list[str]:
    """Return the methods that DG is compared with: all that know nothing of delight."""
    return [name for name in methods(settings) if not name.startswith("DG")]


def over_dg(method: str) -> str:
    """Return the series of a ratio to DG."""
    return f"{method} / DG"


def error_metric(reward: str, friction: str) -> str:
    """Return what the error under a friction is called."""
    return f"{LEARNER_ERROR}, {reward}, {friction}"


def solved_metric(reward: str, friction: str) -> str:
    """Return what the share of seeds that solve it is called."""
    return f"seeds below {100 * errors.SOLVED:g}%, {reward}, {friction}"


def samples_metric(reward: str, target: float) -> str:
    """Return what the samples to an error are called."""
    return f"samples to {100 * target:g}%, {reward}, {ALL}"


def reached_metric(reward: str, target: float) -> str:
    """Return what the share of seeds that get there is called."""
    return f"seeds that get to {100 * target:g}%, {reward}, {ALL}"


def growth_metric(reward: str, target: float) -> str:
    """Return what the slope is called."""
    return f"log10 of samples to {100 * target:g}% per token of H, {reward}, {ALL}"


def lengths_metric(reward: str) -> str:
    """Return what the longest length is called."""
    return f"longest H with error below {100 * reversals.SOLVED:g}%, {reward}, {ALL}"


def _factors(
    settings: Settings, metric: str, x: float, found: Mapping[str, Estimate], least: float
) -> list[Headline]:
    """Return how many times DG's the errors of the others are."""
    others = {name: found[name] for name in baselines(settings)}
    others[BEST] = min(others.values(), key=lambda own: own.mean)
    lines = []
    for name, own in others.items():
        factor = errors.ratio(own, found["DG"], least)
        line = headline(FIGURE, over_dg(name), metric, x, factor)
        if full(settings):
            verdict = tenfold(own, found["DG"], least)
            line = line._replace(expected=PAPER_FACTOR, against="abstract", verdict=verdict)
        lines.append(line)
    return lines


def tenfold(theirs: Estimate, ours: Estimate, least: float) -> Verdict:
    """Return whether an error is about 10 times ours, 5 times at least.

    Example:
        >>> from kondo_lab.studies.reversal_frictions.claim_lines import tenfold
        >>> from kondo_lab.evidence.study import Estimate
        >>> tenfold(Estimate(0.7, 0.02, 10), Estimate(0.005, 0.004, 10), 1e-5)
        'matches'
        >>> tenfold(Estimate(0.4, 0.2, 10), Estimate(0.005, 0.004, 10), 1e-5)
        'noisy'
        >>> tenfold(Estimate(0.0, 0.0, 10), Estimate(0.0, 0.0, 10), 1e-5)
        'noisy'
    """
    if max(theirs.mean, ours.mean) <= least or math.isnan(theirs.se + ours.se):
        return "noisy"
    times = PAPER_FACTOR * math.exp(-WITHIN["about"])
    low = Estimate(times * max(ours.mean, least), times * ours.se, ours.seeds)
    high = theirs._replace(mean=max(theirs.mean, least))
    return judge_order(["low", "high"], {"low": low, "high": high})


def each_lines(records: pd.DataFrame, settings: Settings, reward: str) -> list[Headline]:
    """Return claim a, and the errors that it is made of."""
    lines, part = [], of(EACH, reward)
    for friction, strength, _ in cells(settings):
        names = {method: named(method, friction) for method in methods(settings)}
        metric = error_metric(reward, friction)
        found = {m: errors.at_end(records, part, own, strength) for m, own in names.items()}
        lines += [headline(FIGURE, m, metric, strength, own) for m, own in found.items()]
        lines += [
            headline(
                FIGURE,
                method,
                solved_metric(reward, friction),
                strength,
                errors.solved(records, part, own, strength),
            )
            for method, own in names.items()
        ]
        least = errors.least_error(records, settings, part, names["DG"], strength)
        factors = _factors(settings, metric, strength, found, least)
        if friction == NONE:  # the abstract speaks of frictions
            factors = [f._replace(expected=None, against="", verdict="") for f in factors]
        lines += factors
    return reversals.open_if_few(lines)


def own_lines(records: pd.DataFrame, settings: Settings, reward: str) -> list[Headline]:
    """Return the errors where replaced rows report what the actor's policy says of them."""
    lines, part = [], of(OWN, reward)
    places = [("bugs", strength) for strength in settings.bugs] + [(ALL, float(settings.length))]
    for friction, x in places:
        honest = f"{friction}, own probability"
        for method in corrected(settings):
            at = (records, part, named(method, friction), x)
            metric = error_metric(reward, honest)
            lines.append(headline(FIGURE, method, metric, x, errors.at_end(*at)))
            metric = solved_metric(reward, honest)
            lines.append(headline(FIGURE, method, metric, x, errors.solved(*at)))
    return lines


def together_lines(records: pd.DataFrame, settings: Settings, reward: str) -> list[Headline]:
    """Return the errors with all frictions by length, and claims b, c and d."""
    lines, part = [], of(TOGETHER, reward)
    metric = error_metric(reward, ALL)
    for length in settings_of(records, part, "DG"):
        found = {m: errors.at_end(records, part, m, length) for m in methods(settings)}
        lines += [headline(FIGURE, m, metric, length, own) for m, own in found.items()]
        lines += [
            headline(
                FIGURE,
                method,
                solved_metric(reward, ALL),
                length,
                errors.solved(records, part, method, length),
            )
            for method in found
        ]
        least = errors.least_error(records, settings, part, "DG", length, length=length)
        lines += _factors(settings, metric, length, found, least)
    for target in settings.targets:
        lines += _compute_lines(records, settings, reward, target)
    return reversals.open_if_few(lines + _length_lines(records, settings, reward))


def _compute_lines(
    records: pd.DataFrame, settings: Settings, reward: str, target: float
) -> list[Headline]:
    """Return the samples to an error over DG's at every length, and how they grow with it."""
    part, lines = of(TOGETHER, reward), []
    paid = {
        method: {
            float(x): compute.costs(records, part, method, target, setting=x)
            for x in settings.lengths
        }
        for method in methods(settings)
    }
    for method, by_length in paid.items():
        metric = reached_metric(reward, target)
        for x, own in by_length.items():
            there = statistics.estimate([float(cost.reached) for cost in own.values()])
            lines.append(headline(FIGURE, method, metric, x, there))
    for method in baselines(settings):
        found = {x: compute.gains(paid[method][x], paid["DG"][x]) for x in paid["DG"]}
        for x, own_gains in found.items():
            judged = full(settings) and x == settings.length
            lines.append(
                _bounded(
                    over_dg(method),
                    samples_metric(reward, target),
                    x,
                    compute.ratio(own_gains.values()),
                    expected=PAPER_FACTOR if judged else None,
                )
            )
        reached = compute.always_reached(paid["DG"])
        grown = compute.slope({x: found[x] for x in reached})
        if grown is not None:
            lines += _growth(
                settings, over_dg(method), growth_metric(reward, target), reached, grown
            )
    return lines


def _bounded(
    series: str, metric: str, x: float | str, found: compute.Bounded, *, expected: float | None
) -> Headline:
    """Return a line of a number that may be a bound, which its series then says."""
    line = headline(
        FIGURE,
        with_bound(series, found),
        metric,
        x,
        found.estimate,
        expected=expected,
        against="abstract",
        rule="about",
    )
    return line._replace(verdict=found.verdict(line.verdict))


def with_bound(series: str, found: compute.Bounded) -> str:
    """Return the series of a number, with the side on which the truth lies if it is a bound."""
    return f"{series}, {found.words}" if found.words else series


def _growth(
    settings: Settings, series: str, metric: str, lengths: Sequence[float], found: compute.Bounded
) -> list[Headline]:
    """Return a slope, and whether it is above 0 by more than two standard errors."""
    where = f"H {' '.join(f'{x:g}' for x in lengths)}"
    lines = [_bounded(series, metric, where, found, expected=None)]
    if full(settings):
        order = (NO_GROWTH, series)
        ours = {NO_GROWTH: Estimate(0.0, 0.0, found.estimate.seeds), series: found.estimate}
        line = ordering(FIGURE, metric, where, order=order, ours=ours, against="abstract")
        lines.append(line._replace(verdict=found.verdict(line.verdict)))
    return lines


def longest(records: pd.DataFrame, part: str, series: str) -> Estimate:
    """Return the longest length solved with all frictions, mean over the seeds of all lengths.

    Read as in the other studies of reversal, see `reversals.longest_of`.
    """
    lengths = settings_of(records, part, series)
    ends = pd.DataFrame({x: errors.by_seed(records, part, series, x) for x in lengths}).dropna()
    found = ends.sort_index().apply(lambda own: reversals.longest_of(own.to_dict()), axis=1)
    return statistics.estimate(found.tolist())


def times_as_long(ours: Estimate, theirs: Estimate) -> Estimate:
    """Return ours / theirs: infinite where theirs is 0, NaN where both are."""
    if theirs.mean > 0:
        return errors.ratio(ours, theirs, 0.0)
    return Estimate(math.inf if ours.mean > 0 else math.nan, seeds=min(ours.seeds, theirs.seeds))


def _length_lines(records: pd.DataFrame, settings: Settings, reward: str) -> list[Headline]:
    part, metric = of(TOGETHER, reward), lengths_metric(reward)
    solved = {method: longest(records, part, method) for method in methods(settings)}
    lines = [headline(FIGURE, method, metric, "", own) for method, own in solved.items()]
    # Without the longer lengths DG's longest is only the longest that was tried.
    tried = settings_of(records, part, "DG")
    known = PAPER_LENGTHS if full(settings) and tried[-1] >= max(settings.long_lengths) else None
    for method in baselines(settings):
        factor = times_as_long(solved["DG"], solved[method])
        at = (FIGURE, f"DG / {method}", metric, "", factor)
        line = headline(*at, expected=known, against="abstract", rule="at least")
        if known is not None and solved["DG"].mean < tried[0]:
            line = line._replace(verdict="noisy")
        lines.append(line)
    return lines


def findings(lines: Sequence[Headline], settings: Settings, reward: str) -> list[str]:
    """Return the verdicts in words."""
    told = []
    for friction in dict.fromkeys(cell.friction for cell in cells(settings)):
        metric = error_metric(reward, friction)
        told += _told(lines, settings, f"Error, {reward}, {friction}", metric, _counted)
    for target in settings.targets:
        metric = samples_metric(reward, target)
        start = f"Samples to {100 * target:g}% with all frictions, {reward}, H = {settings.length}"
        here = [line for line in lines if line.x == settings.length]
        told += _told(here, settings, start, metric, _number)
        metric = f"order of {growth_metric(reward, target)}"
        start = f"Samples to {100 * target:g}% grow with H more than DG's, {reward}"
        told += _told(lines, settings, start, metric, _counted)
    return told


def _told(
    lines: Sequence[Headline],
    settings: Settings,
    start: str,
    metric: str,
    words: Callable[[Sequence[Headline]], str],
) -> list[str]:
    """Return a sentence about the ratios of every baseline to DG; none where nothing is judged."""
    own = [line for line in lines if line.metric == metric and line.verdict]
    by_name = {
        name: [line for line in own if _ratio_of(line) == over_dg(name)]
        for name in (*baselines(settings), BEST)
    }
    told = [f"{over_dg(name)} {words(found)}" for name, found in by_name.items() if found]
    return [f"{start}: {'; '.join(told)}."] if told else []


def _ratio_of(line: Headline) -> str:
    """Return whose ratio a line is about, without its bound."""
    return line.series.removeprefix(f"{NO_GROWTH} < ").partition(", ")[0]


def _counted(lines: Sequence[Headline]) -> str:
    verdicts = [WORDS[line.verdict] for line in lines]
    counts = [f"{word} at {verdicts.count(word)}" for word in WORDS.values() if word in verdicts]
    return f"{', '.join(counts)} of {len(lines)}" if len(lines) > 1 else verdicts[0]


def _number(lines: Sequence[Headline]) -> str:
    (line,) = lines
    bound = line.series.rpartition(", ")[0] and f"{line.series.rpartition(', ')[2]} "
    error = "" if line.se is None else f" ± {line.se:.2g}"
    return f"{bound}{line.ours:.3g}{error} ({WORDS[line.verdict]})"
