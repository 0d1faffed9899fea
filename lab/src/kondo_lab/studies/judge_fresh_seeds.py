"""Verdicts on the runs of `fresh_seeds`, by rules that were written before them.

    python -m kondo_lab.studies.judge_fresh_seeds RULES.csv RECORDS.jsonl.gz ... VERDICTS.csv

    error   `factor` x one's learner error, over the last tenth, is below the other's: Mann-Whitney
    length  one's longest H with that error below 25% is above `factor` x the other's: the same
    gain    `factor` x one's samples to an online error of 25% are below the other's: the same
    solved  more seeds of one end with a learner error below 5%: Fisher
    reach   more seeds of one get to an online error of 25%: Fisher
    growth  other's median cost to 25% over one's is larger at the second x than at the first, by
            10,000 resamples of the seeds; a backward pass costs as much as `factor` samples

p is one-sided, by Holm within family, role, test and factor; missed: the opposite is as sure. A run
that never gets there costs infinity, and in growth whichever bound makes it harder to call.
"""

import math
import statistics
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import fisher_exact, mannwhitneyu

from kondo_lab.evidence import records
from kondo_lab.studies.reversals import longest_of

Row: TypeAlias = dict[str, str]
Curve: TypeAlias = list[dict[str, float]]
Runs: TypeAlias = dict[tuple[str, str, float], dict[int, Curve]]
ERROR, ONLINE = "learner error", "online error"
TARGET, SOLVED, PROMPTS, DRAWS = 0.25, 0.05, 500, 10_000


def _end(curve: Curve, tokens: float) -> float:
    """Return the error at the end, at least that of one wrong token in all that was asked."""
    late = [row[ERROR] for row in curve if ERROR in row and row["step"] > 0.9 * curve[-1]["step"]]
    return max(statistics.mean(late), 1 / (len(late) * PROMPTS * tokens))


def _numbers(runs: Runs, rule: Row, who: str, x: float) -> list[float]:
    """Return a number for each seed of an arm, or of "arm | first half"."""
    arm, _, half = who.partition(" | ")
    by_x = {at: own for (part, a, at), own in runs.items() if (part, a) == (rule["part"], arm)}
    if rule["test"] == "length":
        several = [{h: _end(own[s], h) for h, own in by_x.items()} for s in sorted(by_x[x])]
        found = [longest_of(each) for each in several]
    elif rule["test"] in ("error", "solved"):
        tokens = {"own": x, "stale": math.inf}.get(rule["part"], 10.0)
        found = [_end(curve, tokens) for _, curve in sorted(by_x[x].items())]
    else:
        c = float(rule["factor"]) if rule["test"] == "growth" else 0.0
        curves = [[r for r in curve if r[ONLINE] <= TARGET] for _, curve in sorted(by_x[x].items())]
        found = [r[0]["rollouts"] + c * r[0]["passes"] if r else math.inf for r in curves]
    middle = len(found) // 2
    return {"first half": found[:middle], "second half": found[middle:]}.get(half, found)


def _compared(rule: Row, one: list[float], other: list[float]) -> tuple[float, float]:
    """Return p of what the rule says and of the opposite."""
    if rule["test"] in ("solved", "reach"):
        limit = SOLVED if rule["test"] == "solved" else math.inf
        table = [[sum(v < limit for v in w), sum(v >= limit for v in w)] for w in (one, other)]
        both = [fisher_exact(table, alternative=which) for which in ("greater", "less")]
    else:
        small, large = float(rule["factor"]) * np.array(one), np.array(other)
        if rule["test"] == "length":
            small, large = float(rule["factor"]) * large, np.array(one)
        ranks = partial(mannwhitneyu, small, large, method="asymptotic")
        both = [ranks(alternative=which) for which in ("less", "greater")]
    return float(both[0].pvalue), float(both[1].pvalue)


def _growth(runs: Runs, rule: Row) -> tuple[list[float], tuple[float, float]]:
    """Return the gains at both x, p of growth and of its opposite."""
    xs, arm = [float(x) for x in rule["x"].split()], rule["other"].partition(" | ")[0]
    cost = [[np.array(_numbers(runs, rule, rule[w], x)) for w in ("other", "one")] for x in xs]
    share = 1 + float(rule["factor"])
    most = [share * max(c[-1]["rollouts"] for c in runs[rule["part"], arm, x].values()) for x in xs]
    seeds = min(len(each) for pair in cost for each in pair)
    drawn = np.random.default_rng(0).integers(seeds, size=(DRAWS, seeds))

    def gain(at: int, which: np.ndarray, least: bool) -> np.ndarray:
        theirs, ours = (np.median(each[which], axis=-1) for each in cost[at])
        found = np.minimum(theirs, most[at] if least else math.inf) / np.minimum(ours, 1e99)
        return np.where(ours < math.inf, found, 0.0 if least else math.inf)

    down = float(np.sum(gain(0, drawn, False) >= gain(1, drawn, True)))
    up = float(np.sum(gain(0, drawn, True) <= gain(1, drawn, False)))
    gains = [float(gain(at, np.arange(seeds), True)) for at in (0, 1)]
    return gains, ((1 + down) / (DRAWS + 1), (1 + up) / (DRAWS + 1))


def judge(rules: list[Row], runs: Runs) -> pd.DataFrame:
    """Return the rules with n, medians (growth: gains at both x), counts, p and verdict."""
    found = pd.DataFrame(rules)
    names = ["n", "n_other", "median", "median_other", "below", "below_other", "p", "p_opposite"]
    for place, rule in enumerate(rules):
        x, test = float(rule["x"].split()[0]), rule["test"]
        one, other = (_numbers(runs, rule, rule[who], x) for who in ("one", "other"))
        middle = [statistics.median(one), statistics.median(other)]
        if test == "growth":
            middle, p = _growth(runs, rule)
        else:
            p = _compared(rule, one, other)
        limit = SOLVED if test in ("error", "solved") else math.inf
        below = [sum(value < limit for value in each) for each in (one, other)]
        found.loc[place, names] = [len(one), len(other), *middle, *below, *p]
    for name in ("p", "p_opposite"):
        for _, family in found.groupby(["family", "role", "test", "factor"]):
            own = family[name].sort_values()
            by_holm = (own * np.arange(len(own), 0, -1)).cummax().clip(upper=1.0)
            found.loc[own.index, f"{name}_holm"] = by_holm
    sure = [found[name] < found["alpha"].astype(float) for name in ("p_holm", "p_opposite_holm")]
    enough = found[["n", "n_other"]].min(axis=1) >= found["least_seeds"].astype(int)
    verdict = np.select([~enough, sure[0], sure[1]], ["open", "met", "missed"], "open")
    return found.assign(verdict=verdict)


if __name__ == "__main__":
    found: Runs = defaultdict(dict)
    for path in map(Path, sys.argv[2:-1]):
        for run in records.lines(path):
            part = run["part"].removesuffix("-pg")
            found[part, run["arm"], run["x"]][run["seed"]] = run["curve"]
    given = pd.read_csv(sys.argv[1], dtype=str, keep_default_na=False).to_dict("records")
    verdicts = judge(given, found)
    verdicts.to_csv(sys.argv[-1], index=False, float_format="%.4g", lineterminator="\n")
