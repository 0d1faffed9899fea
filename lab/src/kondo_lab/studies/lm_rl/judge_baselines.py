"""Verdicts on the runs of `baselines`, by rules that were written before them.

    python -m kondo_lab.studies.lm_rl.judge_baselines RULES.csv RUNS.jsonl.gz ARMS.csv VERDICTS.csv

A rule says that `one` gets to the target for 1 / `factor` of what `other` pays on `axis`, or less.
Where `other` is several arms it is the one whose reported seeds pay least, a mean: chosen by the
numbers that are judged, which favours it. Seeds are paired, they share start and prompts:

    x = log(other / one) - log(factor), a seed;    Student's t, one-sided, of mean x against 0

p is by Holm within family, role, axis and factor. Met: p of mean x > 0 is below alpha; missed: that
of mean x < 0 is; open: neither, or fewer seeds than least_seeds. A seed without the target counts
with all that it paid: then a rule is not met if it is of `one`, and not missed if of `other`.

ARMS.csv gets what each arm paid, of its reported seeds: mean and standard error.
"""

import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import ttest_1samp

from kondo_lab.evidence import records, runs
from kondo_lab.evidence.statistics import estimate
from kondo_lab.studies.lm_rl.baselines import TARGET, Line, paid, run_of

AXES = (runs.LOOP, runs.LEARNER, runs.ROLLOUTS, runs.ROWS)
Arms = dict[tuple[str, str, str], dict[int, Line]]
"""Task, model and arm -> seed -> its reported run."""


def there(line: Line) -> bool:
    """Return whether a run has got to the target."""
    return bool((run_of(line).reward >= TARGET).any())


def summary(arms: Arms) -> pd.DataFrame:
    """Return what every arm paid to the target."""
    found = []
    for (task, model, arm), own in sorted(arms.items()):
        lines = list(own.values())
        row = {"task": task, "model": model, "arm": arm, "n": len(own)}
        row |= {"reached": sum(map(there, lines)), "learning rate": lines[0]["learning_rate"]}
        for axis in AXES:
            known = estimate([paid(line, axis) for line in lines])
            row |= {axis: known.mean, f"{axis} se": known.se}
        found.append(row)
    return pd.DataFrame(found)


def compared(rule: dict[str, str], arms: Arms) -> dict[str, object]:
    """Return a rule's numbers; of arms that were not run, none but n = 0."""
    place, axis = (rule["task"], rule["model"]), rule["axis"]
    one = arms.get((*place, rule["one"]), {})
    others = {name: arms.get((*place, name), {}) for name in rule["other"].split("|")}
    if not one or not all(others.values()):
        return {"n": 0}
    means = {n: np.mean([paid(e, axis) for e in own.values()]) for n, own in others.items()}
    against = min(means, key=lambda name: means[name])
    other = others[against]
    seeds = sorted(one.keys() & other.keys())
    ratios = np.array([paid(other[seed], axis) / paid(one[seed], axis) for seed in seeds])
    apart = np.log(ratios) - math.log(float(rule["factor"]))
    p, opposite = (
        float(ttest_1samp(apart, 0.0, alternative=which).pvalue) for which in ("greater", "less")
    )
    reached = [all(there(own[seed]) for seed in seeds) for own in (one, other)]
    return {
        "n": len(seeds),
        "against": against,
        "ratio": float(np.exp(np.log(ratios).mean())),
        "least": float(ratios.min()),
        "most": float(ratios.max()),
        "one_reached": sum(there(one[seed]) for seed in seeds),
        "other_reached": sum(there(other[seed]) for seed in seeds),
        "p": p if reached[0] else 1.0,
        "p_opposite": opposite if reached[1] else 1.0,
    }


def judge(rules: pd.DataFrame, arms: Arms) -> pd.DataFrame:
    """Return the rules with their numbers and verdicts; those of arms that were not run last."""
    numbers = pd.DataFrame([compared(rule, arms) for rule in rules.to_dict("records")])
    found = pd.concat([rules, numbers], axis=1)
    run = found[found["n"] > 0].copy()
    for name in ("p", "p_opposite"):
        for _, family in run.groupby(["family", "role", "axis", "factor"]):
            own = family[name].sort_values()
            by_holm = (own * np.arange(len(own), 0, -1)).cummax().clip(upper=1.0)
            run.loc[own.index, f"{name}_holm"] = by_holm
    sure = [run[name] < run["alpha"].astype(float) for name in ("p_holm", "p_opposite_holm")]
    enough = run["n"] >= run["least_seeds"].astype(int)
    run["verdict"] = np.select([~enough, sure[0], sure[1]], ["open", "met", "missed"], "open")
    return pd.concat([run, found[found["n"] == 0].assign(verdict="not run")])


if __name__ == "__main__":
    found: Arms = defaultdict(dict)
    for line in records.lines(Path(sys.argv[2])):
        if line["role"] == "reported":
            found[line["task"], line["model"], line["arm"]][line["seed"]] = line
    given = pd.read_csv(sys.argv[1], dtype=str, keep_default_na=False)
    for table, path in ((summary(found), sys.argv[3]), (judge(given, found), sys.argv[4])):
        table.to_csv(Path(path), index=False, float_format="%.4g", lineterminator="\n")
