import dataclasses
import math

import numpy as np
import pytest

from kondo_lab.evidence import progress, records, runner, runs
from kondo_lab.evidence.claims import Difference
from kondo_lab.evidence.runs import Run
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.lm_gates import STUDY, analysis, drawing, equal_seconds, run
from kondo_lab.studies.lm_gates.arena import Arena
from kondo_lab.studies.lm_gates.settings import FULL, SMALL, TUNED_BY_LM_RL, settings
from kondo_lab.training import alone as loop
from kondo_lab.training import tuning
from kondo_lab.training.fields import tune_names
from lab.studies import toy
from tolerances import assert_close

_FIELD = dataclasses.replace(
    SMALL.walls[0],
    level=1,
    num_prompts=3,
    repeats=4,
    warm_steps=4,
    warm_batch=4,
    tune_steps=2,
    num_steps=3,
    other_seeds=2,
)
TINY = dataclasses.replace(
    SMALL,
    walls=(_FIELD, dataclasses.replace(_FIELD, task="addition", tune_seeds=1)),
    tuned_before=_FIELD.name,
    warm_every=2,
    num_held_out=6,
    wall_evaluations=3,
)
"""Every part, in seconds: what is learned is of no interest."""
CLAIMED = ("unbiased 10%", "noise 1.5")
EVERYONE = {
    "GRPO plain",
    *CLAIMED,
    "DG-K 10%",
    "PODS 10%",
    "random 10%",
    "unbiased |delight| 10%",
    "unbiased |advantage| 10%",
    "noise 3",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The whole study, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "lm-gates"
    study = dataclasses.replace(STUDY, settings=lambda size, seeds: TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "WARM_UP_CALLS", 1)  # nothing is recorded or chosen on a CPU
        outcome = runner.run(toy.order(out, study), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


def walls(table, field):
    return table[table["part"].isin(run.wall_names(TINY, field))]


def test_everyone_is_run_on_both_tasks_and_what_is_claimed_with_more_seeds(tiny):
    for field in TINY.walls:
        own = walls(tiny[1], field)
        assert set(own["series"]) == EVERYONE
        for series, seeds in own.groupby("series")["seed"]:
            more = series in ("GRPO plain", *CLAIMED)
            assert set(seeds) == set(range(3 if more else 2))


def test_gates_with_a_rate_keep_it_and_a_bound_of_the_noise_keeps_what_it_takes(tiny):
    own = walls(tiny[1], TINY.walls[0])
    last = own[own["step"] == 3].drop_duplicates(["series", "seed"])
    share = (last.set_index(["series", "seed"])["backward"] / last["forward"].iloc[0]).unstack()
    assert (share.loc["GRPO plain"].dropna() == 1).all()
    assert (share.loc["DG-K 10%"].dropna() <= 1 / 12 + 1e-9).all()
    assert (share.loc["unbiased 10%"].dropna() <= 1 / 12 + 1e-9).all()
    assert (share.loc["noise 1.5"] >= share.loc["noise 3"]).loc[[0, 1]].all()


def test_rates_that_are_known_are_taken_and_the_others_tuned(tiny):
    given, found = (walls(tiny[1], field) for field in TINY.walls)
    assert set(given["setting"]) == {3e-4}
    assert tune_names(TINY, TINY.walls[0]) == []
    names = tune_names(TINY, TINY.walls[1])
    tuned = tuning.chosen(tiny[1][tiny[1]["part"].isin(names)])
    assert set(tuned) == {"GRPO", "DG-K 10%", "PODS 10%", "random 10%"}
    for series, values in found.groupby("series")["setting"]:
        mine = "GRPO" if series.startswith(("GRPO", "unbiased", "noise")) else series
        assert set(values) == {tuned[mine]}


def test_the_analysis_draws_and_tells(tiny):
    found = tiny[0]
    assert set(found.figures) == {"rewards"}
    assert len(found.figures["rewards"].axes) == 6
    for field in TINY.walls:
        for name in CLAIMED:
            (told,) = (each for each in found.findings if each.startswith(f"{field.name}: {name} "))
            assert "over 3 seeds. Lower by at most one standard error: " in told
        lines = {line.metric for line in found.headline if line.x == field.name}
        assert {
            "held-out reward at temperature 1, at the end",
            "reward at the end less dense GRPO's, seed by seed",
            "share of rows kept",
            "entropy at the end, nats a token",
            "learner seconds",
            "learner seconds of the same steps, speed-up",
        } <= lines


def test_what_is_there_is_analysed_when_a_run_was_cut_short(tiny):
    names = [part.name for part in run.parts(TINY)]
    for cut in range(1, len(names), 3):
        part_of_it = tiny[1][tiny[1]["part"].isin(names[:cut])]
        assert STUDY.analyse(part_of_it, TINY).findings


def test_first_seeds_of_both_tasks_come_before_further_ones():
    names = [part.name for part in run.parts(FULL)]
    assert names[:3] == ["warm-sorting-3-25m", "warm-addition-3-25m", "tune-addition-3-25m-1"]
    seeds = [int(name.rsplit("-", 1)[1]) for name in names[3:]]
    assert seeds == sorted(seeds)
    assert len(names) - 3 == 2 * (9 * 3 + 3 * 2)


def test_the_full_size_is_what_was_asked_for():
    assert [field.name for field in FULL.walls] == ["sorting-3-25m", "addition-3-25m"]
    assert {field.num_rows for field in FULL.walls} == {2048}
    for field in FULL.walls:
        assert {each.name for each in FULL.clocked(field)} == EVERYONE - {"GRPO plain"} | {"GRPO"}
        assert all(len(FULL.seeds(field, each)) >= 3 for each in FULL.clocked(field))
    # The expected seconds are an upper bound: runs of lm-rl took 0.8 of them.
    assert sum(part.work for part in run.parts(FULL)) < 600


def test_known_rates_are_those_that_lm_rl_has_chosen(pytestconfig):
    path = pytestconfig.rootpath / "results/lm-rl-v1" / runner.RECORDS
    table = records.table(records.read(path))
    tuned = tuning.chosen(table[table["part"].str.startswith(f"tune-{FULL.tuned_before}-")])
    assert {name: tuned[name] for name, _ in TUNED_BY_LM_RL} == dict(TUNED_BY_LM_RL)


def test_a_number_of_seeds_holds_for_everyone():
    chosen = settings("full", 4)
    for field in chosen.walls:
        assert {len(chosen.seeds(field, each)) for each in chosen.everyone()} == {4}
    assert settings("small", None) == SMALL


@pytest.mark.parametrize(
    ("mean", "se", "seeds", "verdict"),
    [
        (-0.009, 0.010, 5, "met"),
        (0.050, 0.010, 5, "met"),
        (-0.015, 0.010, 5, "open"),  # 1.5 standard errors, of which chance makes 2.13
        (-0.022, 0.010, 5, "missed"),
        (-0.022, 0.010, 3, "open"),  # with three seeds chance makes 2.92
        (-0.030, 0.010, 3, "missed"),
        (-0.500, 0.010, 2, "open"),
        (0.000, math.nan, 1, "open"),
    ],
)
def test_a_claim_is_met_missed_or_open(mean, se, seeds, verdict):
    assert Difference(Estimate(mean, se, seeds)).verdict == verdict


def test_what_may_be_lost_at_most_follows_from_the_error():
    assert_close(Difference(Estimate(-0.010, 0.010, 5)).largest_loss, 0.0313)
    assert Difference(Estimate(0.100, 0.010, 5)).largest_loss == 0


def made(series, seed, rewards, *, rows, learner=1.0):
    """A run of 100 rollouts a step; `rows` are those kept by step."""
    steps = np.arange(len(rewards))
    costs = {
        runs.ROLLOUTS: 100.0 * steps,
        runs.ROWS: np.cumsum([0.0, *rows]),
        runs.LEARNER: learner * steps,
        runs.LOOP: (1 + learner) * steps,
    }
    return Run(series, seed, steps, np.array(rewards, dtype=float), costs)


def arena(**seeds):
    """Dense and gated runs from {"dense" or "gated": {seed: reward at the end}}."""
    name, rows = {"dense": "GRPO plain", "gated": "noise 1.5"}, {"dense": 100, "gated": 20}
    several = {
        name[kind]: [
            made(name[kind], seed, [0.3, end], rows=[rows[kind]], learner=rows[kind] / 25)
            for seed, end in ends.items()
        ]
        for kind, ends in seeds.items()
    }
    return Arena(FULL.walls[0], several)


def test_differences_are_taken_seed_by_seed():
    # Starts differ by 0.4; the gate is 0.02 and 0.04 below dense on the seeds of both.
    found = analysis.difference(
        arena(dense={0: 0.9, 1: 0.5, 2: 0.1}, gated={0: 0.88, 1: 0.46}), "noise 1.5"
    )
    assert_close(found.estimate.mean, -0.03)
    assert_close(found.estimate.se, 0.01)
    assert found.estimate.seeds == 2
    assert analysis.difference(arena(dense={0: 0.9}, gated={1: 0.9}), "noise 1.5") is None


def unequal(*, gated_learner):
    """Dense and gated runs of four steps; a dense step takes 4 learner and 5 loop seconds."""
    name, rows = "noise 1.5", [20] * 4
    dense = made("GRPO plain", 0, [0.2, 0.5, 0.8, 0.8, 1.1], rows=[100] * 4, learner=4.0)
    gated = made(name, 0, [0.2, 0.4, 0.6, 0.9, 0.9], rows=rows, learner=gated_learner)
    alone = made(name, 7, [0.2, 0.9, 0.9, 0.9, 0.9], rows=rows, learner=gated_learner)
    return Arena(FULL.walls[0], {"GRPO plain": [dense], name: [gated, alone]})


def test_at_equal_seconds_dense_is_read_where_the_gate_ends():
    # Means of the last three evaluations after the start. Dense, by learner seconds:
    #   seconds  0    4    6                8    12
    #   reward   0.2  0.5  (0.5 + 0.8) / 2  0.7  0.9
    # The gate ends at a reward of (0.6 + 0.9 + 0.9) / 3 = 0.8. It has paid:
    #   learner  1.5, 3, 4.5, 6   -> (3 + 4.5 + 6) / 3 = 4.5: dense 0.5 + 0.25 * 0.15 = 0.5375
    #   loop     2.5, 5, 7.5, 10  -> 7.5, where dense paid 5, 7.5, 10: dense 0.65
    both = unequal(gated_learner=1.5)
    assert_close(equal_seconds.differences(both, "noise 1.5", runs.LEARNER), [0.2625])
    assert_close(equal_seconds.differences(both, "noise 1.5", runs.LOOP), [0.15])
    assert_close(equal_seconds.differences(both, both.dense, runs.LOOP), [0.0])
    found = analysis.at_equal_seconds(both, "noise 1.5")
    assert {axis: own.estimate.seeds for axis, own in found.items()} == {
        runs.LOOP: 1,
        runs.LEARNER: 1,
    }


def test_smoothed_rewards_end_at_the_reward_at_the_end():
    (own,) = unequal(gated_learner=1.0).runs["GRPO plain"]
    assert equal_seconds.smoothed(own, runs.LOOP)[1][-1] == own.end


def test_nothing_is_said_of_the_time_after_dense_ended():
    slow = unequal(gated_learner=4.1)
    assert equal_seconds.differences(slow, "noise 1.5", runs.LEARNER) is None
    assert analysis.at_equal_seconds(slow, "noise 1.5") == {}
    other = arena(dense={0: 0.9}, gated={1: 0.9})
    assert equal_seconds.differences(other, "noise 1.5", runs.LOOP) is None


def test_shares_of_kept_rows_are_those_between_evaluations():
    own = made("noise 1.5", 0, [0.3, 0.5, 0.9], rows=[25, 5])
    assert_close(drawing.kept_shares(own), np.array([0.25, 0.05]))


def test_seconds_of_the_same_steps_are_compared_whatever_was_learned():
    both = arena(dense={0: 0.9, 1: 0.9}, gated={0: 0.1, 1: 0.1})
    learner, whole = analysis.whole_run(both, "noise 1.5")
    assert (learner.value, learner.bound) == (pytest.approx(5.0), "")
    assert whole.value == pytest.approx(5 / 1.8)


def test_the_figure_has_the_seeds_that_all_contenders_have():
    figure = drawing.rewards([arena(dense={0: 0.9, 1: 0.1}, gated={0: 0.8})])
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0.3, 0.9]


def test_a_finding_says_what_was_lost_kept_and_saved():
    both = arena(dense={0: 0.90, 1: 0.92, 2: 0.94}, gated={0: 0.90, 1: 0.91, 2: 0.95})
    told = analysis._verdict(both, "noise 1.5", analysis.difference(both, "noise 1.5"))
    assert told == (
        "sorting-3-25m: noise 1.5 ends at 0.920 ± 0.015, dense GRPO at 0.920 ± 0.012; seed by seed "
        "+0.000 ± 0.006 over 3 seeds. Lower by at most one standard error: met. A loss of more "
        "than 0.017 is excluded (95%, one-sided). It keeps 20.0% of the rows, 20.0% at first and "
        "20.0% at last. For the same steps dense GRPO's learner takes 5.00x ± 0 as long, its loop "
        "2.78x ± 0. Less dense GRPO's reward at the same loop seconds +0.397 ± 0.011 over 3 seeds; "
        "at the same learner seconds +0.496 ± 0.013 over 3 seeds (not fixed in advance)."
    )
