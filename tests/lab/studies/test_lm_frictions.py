import dataclasses
import math
from pathlib import Path

import pandas as pd
import pytest

from kondo_lab.evidence import plotting, progress, records, runner
from kondo_lab.evidence.claims import Difference
from kondo_lab.evidence.statistics import estimate
from kondo_lab.studies.lm_frictions import (
    STUDY,
    analysis,
    assignments,
    drawing,
    page,
    run,
    verdicts,
)
from kondo_lab.studies.lm_frictions.outcomes import Outcomes, base_of, outcomes
from kondo_lab.studies.lm_frictions.settings import (
    CLAIMED,
    COMBINED,
    COMBINED_WRONG,
    FIRST,
    FULL,
    PAPERS,
    SMALL,
    WEAKEST,
    Sweep,
    queued,
    refreshed,
    reported,
    settings,
    shared,
)
from kondo_lab.training import frictions, tuning
from kondo_lab.training.corrections import corrections, needs_behaviour
from kondo_lab.training.member import NONE, Frictions
from lab.studies import toy
from tolerances import assert_close

_TINY = {
    "level": 1,
    "num_prompts": 3,
    "repeats": 4,
    "warm_steps": 4,
    "warm_batch": 4,
    "tune_steps": 2,
    "num_steps": 3,
    "num_seeds": 2,
}
_MAIN = dataclasses.replace(
    SMALL.main, **_TINY, only=("GRPO uncorrected", "PPO clip 0.2", "DG, eta 1", "price 0")
)
_FEW = dataclasses.replace(
    SMALL.fields[1], **(_TINY | {"num_seeds": 1}), tuned_on=_MAIN.name, start=0.05
)
TINY = dataclasses.replace(
    SMALL,
    main=_MAIN,
    sweeps=(
        Sweep(
            kind="first",
            field=_MAIN,
            cells=(NONE, COMBINED, COMBINED_WRONG, refreshed(3)),
            seeds=(0, 1),
        ),
        Sweep(kind="later", field=_MAIN, cells=(refreshed(2), shared("broken", 0.5)), seeds=(0, 1)),
        Sweep(kind="first", field=_FEW, cells=(NONE, shared("discovery", 0.2)), seeds=(0,)),
        Sweep(kind="queue 1", field=_MAIN, cells=(queued(1),), seeds=(0,), only=PAPERS),
        Sweep(kind="lags", field=_MAIN, cells=(Frictions(name="lag 2", delay=2),), seeds=(0, 1)),
    ),
    warm_every=2,
    num_held_out=6,
    evaluations=3,
    most_rows=7 * 12,
)
"""Every part, in seconds: what is learned is of no interest."""
RATIOS, PLAIN = "PPO clip 0.2", "GRPO uncorrected"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The whole study, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "lm-frictions"
    study = dataclasses.replace(STUDY, settings=lambda size, seeds: TINY)
    outcome = runner.run(toy.order(out, study), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


def test_everyone_meets_every_friction_that_can_matter_to_it(tiny):
    own = tiny[1][tiny[1]["part"].isin(assignments.names(TINY, _MAIN))]
    met = {}
    for series, seeds in own.groupby("series")["seed"]:
        arm, cell = assignments.split(series)
        met.setdefault(cell, set()).add(arm)
        assert set(seeds) == ({0} if cell == queued(1).name else {0, 1})
    assert set(met) == {cell.name for cell in TINY.cells(_MAIN)}
    for cell in TINY.cells(_MAIN):
        there = {*PAPERS} if cell.queue else {*_MAIN.only}
        assert met[cell.name] == (there if cell.reports_truly else {RATIOS})


def test_rates_are_those_of_the_highest_mean_over_the_tuning_frictions(tiny):
    tuned = tiny[1][tiny[1]["part"].isin(assignments.tune_names(TINY))]
    assert set(tuned["seed"]) == {1000}
    chosen = assignments.chosen_rates(tuned)
    assert set(chosen) == {*_MAIN.only}
    for field in TINY.fields:
        own = tiny[1][tiny[1]["part"].isin(assignments.names(TINY, field))]
        for series, rates in own.groupby("series")["setting"]:
            assert set(rates) == {chosen[assignments.split(series)[0]]}


def test_the_mean_over_frictions_decides():
    lines = [
        ("PPO under a", 1e-4, 0.9),
        ("PPO under b", 1e-4, 0.1),
        ("PPO under a", 1e-5, 0.6),
        ("PPO under b", 1e-5, 0.6),
    ]
    table = pd.DataFrame(lines, columns=["series", "setting", "value"])
    table = table.assign(seed=1000, step=1, metric=tuning.QUALITY)
    assert assignments.chosen_rates(table) == {"PPO": 1e-5}


def test_further_rates_are_told_beside_the_best_that_was_not_lost_to_nan():
    def table(part, **rewards):
        lines = [("PPO under a", float(rate), reward) for rate, reward in rewards.items()]
        made = pd.DataFrame(lines, columns=["series", "setting", "value"])
        return made.assign(part=part, seed=1000, step=1, metric=tuning.QUALITY)

    tuned = table(assignments.tune_names(TINY)[0], **{"1e-5": math.nan, "1e-4": 0.4, "1e-3": 0.6})
    beyond = table(assignments.further_name(TINY), **{"3e-3": 0.1})
    (told,) = analysis._further_tuning(pd.concat([tuned, beyond]), TINY)
    assert told.endswith("0.003 0.100; with the constant rate 0.001 it is 0.600.")


def test_the_analysis_tells_and_draws(tiny):
    found = tiny[0]
    main, rare = (field.name for field in TINY.fields)
    assert set(found.figures) == {
        "table-sorting-1-toy",
        "strengths-sorting-1-toy",
        "table-sorting-1-toy-from-5",
        "curves-sorting-1-toy",
    }
    lines = {(line.series, line.x, line.metric) for line in found.headline}
    for cell in TINY.cells(_MAIN):
        if cell.queue:
            continue
        place = (RATIOS, f"{main}: {cell.name}")
        assert (*place, "held-out reward at temperature 1, at the end") in lines
        assert (
            *place,
            "reward at the end less that of the best with correct log-probs",
        ) in lines
        assert (*place, "effective sample size at the end") in lines
        assert (*place, "entropy at the end") in lines
    told = "\n".join(found.findings)
    assert f"{rare}: supervised starts of 1 seeds" in told
    assert f"{main}: learning rates: " in told
    claimed = "\n".join(map(sentence, found.claims))
    assert "grows with strength: open" in claimed
    assert "ends within 0.02 of PPO clip 0.2 with correct ones: open" in claimed
    assert "with wrong log-probs: open" in claimed
    assert "DG, eta 1 with decay: mean reward over the frictions that tune" in told
    assert "sorting-1-toy, asynchronous, queue 1: batches were drawn" in told


def test_what_is_there_is_analysed_when_a_run_was_cut_short(tiny):
    names = [part.name for part in run.parts(TINY)]
    for cut in range(1, len(names), 3):
        part_of_it = tiny[1][tiny[1]["part"].isin(names[:cut])]
        assert STUDY.analyse(part_of_it, TINY).findings


def test_parts_come_in_the_order_of_the_sweeps():
    names = [part.name for part in run.parts(FULL)]
    assert names[0] == "warm-sorting-3-25m"
    kinds = [name.rsplit("-", 1)[0] for name in names if not name.startswith("warm")]
    assert list(dict.fromkeys(kinds))[:10] == [
        "tune-sorting-3-25m",
        "further-sorting-3",
        "first-0-sorting-3-25m",
        "first-1-sorting-3-25m",
        "first-2-sorting-3-25m",
        "first-0-addition-3-25m",
        "later-0-sorting-3-25m",
        "first-0-sorting-3-25m-from-5",
        "first-0-sorting-3-25m-from-1",
        "claims-3-sorting-3-25m",
    ]
    wanted = {name for field in FULL.fields for name in assignments.names(FULL, field)}
    assert wanted == {name for name in names if not name.startswith(("warm", "tune", "further"))}
    assert len(names) == len(set(names))
    for field in FULL.fields:
        mine = assignments.names(FULL, field)
        warm = f"warm-{field.name.removesuffix('%')}"
        assert names.index(warm) < min(names.index(name) for name in mine)


def test_no_part_takes_more_than_two_minutes():
    assert max(part.work for part in run.parts(FULL)) < 120


def seeds_of(settings, field, cell, arm):
    """Seeds that an arm has under a friction, of all sweeps; each once."""
    found = [
        seed
        for sweep in settings.sweeps_in(field)
        if cell in sweep.cells and arm in {each.name for each in settings.under(sweep, cell)}
        for seed in sweep.seeds
    ]
    assert len(found) == len(set(found))
    return set(found)


def test_cells_that_carry_a_claim_have_five_seeds():
    sorting = FULL.main
    for cell in FIRST:
        for name in CLAIMED:
            needs = name in (RATIOS, "sequence ratios, cap 2")
            wanted = set(range(5)) if cell.reports_truly or needs else set()
            assert seeds_of(FULL, sorting, cell, name) == wanted
    for cell in WEAKEST:
        for name in (verdicts.UNCORRECTED, verdicts.PAPER):
            assert seeds_of(FULL, sorting, cell, name) == set(range(5))


def test_other_tasks_and_a_larger_model_have_three_seeds_of_the_claims():
    by_name = {field.name: field for field in FULL.fields}
    for name, cells in {
        "addition-3-25m": FIRST,
        "multiplication-2-25m": FIRST,
        "sorting-3-85m": (COMBINED, COMBINED_WRONG),
    }.items():
        for cell in cells:
            assert seeds_of(FULL, by_name[name], cell, RATIOS) == {0, 1, 2}


def test_the_full_size_is_what_was_asked_for():
    assert {field.num_rows for field in FULL.fields} == {512}
    assert sorted({FULL.start_reward(field) for field in FULL.fields}) == [0.01, 0.05, 0.3]
    assert len({field.name for field in FULL.fields}) == len(FULL.fields) == 6
    assert len(FULL.of(FULL.main)) == 16
    names = {each.name for each in FULL.everyone()}
    assert all({*sweep.only} <= names for sweep in (*FULL.sweeps, *SMALL.sweeps))
    for field in FULL.fields:
        cells = FULL.cells(field)
        assert len({cell.name for cell in cells}) == len(cells)
        most = max(seed for sweep in FULL.sweeps_in(field) for seed in sweep.seeds)
        assert most < field.num_seeds


def test_past_weights_of_lagging_actors_fit():
    for sweep in FULL.sweeps:
        for _, _, members in assignments.pieces(FULL, sweep, 0):
            versions = sum(1 + each.frictions.delay for each in members)
            assert versions == len(members) or versions * 101e6 < frictions.RING_BYTES


def test_queues_have_parts_of_their_own():
    for sweep in FULL.sweeps:
        sizes = {cell.queue for cell in sweep.cells}
        assert len(sizes) == 1


def test_a_number_of_seeds_holds_for_every_sweep():
    asked = settings("full", 4)
    assert {field.num_seeds for field in asked.fields} == {4}
    assert {sweep.seeds for sweep in asked.sweeps} == {(0, 1, 2, 3)}
    for cell in FIRST:
        assert seeds_of(asked, asked.main, cell, RATIOS) == {0, 1, 2, 3}
    assert settings("small", None) == SMALL


def test_rates_beyond_the_edge_are_tried_for_whom_they_may_help():
    means = {"PPO clip 0.2": {1e-4: 0.1, 3e-4: 0.2}, "DG, eta 1": {1e-4: 0.2, 3e-4: 0.1}}
    means["price 0"] = {1e-5: 0.1, 1e-4: 0.3, 3e-4: 0.1}
    found = assignments.beyond_members(TINY, means)
    rates = {(each.arm.name, each.learning_rate) for each in found}
    assert rates == {
        ("PPO clip 0.2", 9e-4),
        ("PPO clip 0.2", 3e-3),
        ("DG, eta 1", 3e-5),
        ("DG, eta 1", 1e-5),
    }
    assert {each.frictions.name for each in found} == {"no friction", "combined"}


def test_a_decay_begins_at_multiples_of_the_best_rate_and_ends_with_the_run():
    found = assignments.decay_members(FULL, lambda _: 1e-5)
    assert {each.decay_steps for each in found} == {100}
    assert {each.learning_rate for each in found} == {1e-5, 3e-5}
    assert {each.arm.name for each in found} == {*CLAIMED}
    assert {each.seed for each in found} == {1000}


MAIN_CELLS = FULL.cells(FULL.main)


def made(ends, cells=MAIN_CELLS):
    """Outcomes from {friction: {arm: rewards of seeds 0, 1, ...}}."""
    needing = frozenset(each.name for each in corrections() if needs_behaviour(each))
    by_seed = {
        cell: {name: dict(enumerate(values)) for name, values in of_cell.items()}
        for cell, of_cell in ends.items()
    }
    return Outcomes(FULL.main, tuple(cells), by_seed, needing, floor=0.002)


def test_the_highest_is_so_on_the_seeds_that_all_have():
    found = made({"combined": {"PPO clip 0.2": [0.9, 0.1], "GSPO": [0.8], "DG, eta 1": [0.7, 0.7]}})
    assert found.best("combined", lambda name: name in found.needing) == "PPO clip 0.2"
    assert found.best("combined", lambda name: name != "GSPO") == "DG, eta 1"
    assert found.best("combined", lambda name: False) is None
    assert found.best("refresh 64", lambda name: True) is None


def told(ends, tuned=None):
    return "\n".join(map(sentence, verdicts.claims(made(ends), tuned or {})))


def sentence(claim):
    return f"{claim.statement}: {claim.verdict} ({claim.measured})"


@pytest.mark.parametrize(
    ("plain", "delight", "factor", "verdict"),
    [
        ((0.0, 0.0, 0.0), (0.9, 0.92, 0.91), "11", "met"),
        ((0.0, 0.0, 0.0), (0.9, 0.92, 0.87), "9.9", "open"),
        ((0.8, 0.8, 0.8), (0.9, 0.92, 0.88), "2", "missed"),
        ((0.0, 0.0, 0.9), (0.9, 0.92, 0.88), "4.7", "open"),
        ((0.0, 0.0), (0.99, 0.99), "1e+02", "open"),
        ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0), "2.5e+02", "met"),  # an error of 0 is not believed
    ],
)
def test_ten_times_the_error_is_met_missed_or_open(plain, delight, factor, verdict):
    found = told({"refresh 64": {PLAIN: plain, verdicts.PAPER: delight}})
    assert (
        f"refresh 64: the error of {PLAIN} is at least 10 times that of DG, eta 1: {verdict} "
        f"({factor} times;"
    ) in found


@pytest.mark.parametrize(
    ("strongest", "verdict"),
    [((0.0, 0.01, 0.0), "met"), ((0.9, 0.91, 0.9), "missed"), ((0.0, 0.9, 0.8), "open")],
)
def test_gains_grow_from_the_weakest_strength_to_the_strongest(strongest, verdict):
    level = {PLAIN: (0.8, 0.8, 0.8), verdicts.PAPER: (0.8, 0.81, 0.8)}
    high = {PLAIN: strongest, verdicts.PAPER: (0.8, 0.81, 0.8)}
    found = told({"refresh 4": level, "refresh 16": high, "refresh 64": high, "no friction": high})
    assert "at refresh 64 less that at refresh 4:" in found
    assert f"grows with strength: {verdict} (" in found


def test_a_strength_with_fewer_seeds_decides_nothing():
    level = {PLAIN: (0.8, 0.8, 0.8), verdicts.PAPER: (0.8, 0.81, 0.8)}
    once = {PLAIN: (0.0,), verdicts.PAPER: (0.99,)}
    high = {PLAIN: (0.0, 0.01, 0.0), verdicts.PAPER: (0.8, 0.81, 0.8)}
    found = told({"coin 10%": level, "coin 30%": high, "coin 60%": once})
    assert "at coin 30% less that at coin 10%:" in found
    assert "grows with strength: met (" in found


def test_the_aim_is_about_the_rule_that_tuning_preferred():
    ends = {
        "combined": {
            RATIOS: (0.90, 0.92, 0.91),
            "DG, eta 1": (0.99, 0.99, 0.99),
            "DG without drift": (0.885, 0.91, 0.90),  # -0.015, -0.01, -0.01
        },
        "combined, wrong log-probs": {RATIOS: (0.70, 0.75, 0.71)},
    }
    found = told(ends, {"DG, eta 1": 0.5, "DG without drift": 0.6, "price 0": 0.9})
    assert (
        "combined: DG without drift, the best rule without the actors' log-probs on the tuning "
        "seed, ends within 0.02 of PPO clip 0.2 with correct ones: met (-0.012 ± 0.002 over 3 "
        "seeds)"
    ) in found
    assert "wrong log-probs: met (+0.178 ± 0.009 over 3 seeds)" in found
    ends["combined"]["DG without drift"] = (0.60, 0.64, 0.62)
    found = told(ends, {"DG without drift": 0.6})
    assert "with correct ones: missed (" in found
    assert "with wrong log-probs: missed (" in found


def test_ahead_is_more_than_chance():
    assert verdicts.ahead(Difference(estimate([0.1, 0.11, 0.12]))) == "met"
    assert verdicts.ahead(Difference(estimate([0.0, 0.1, 0.2]))) == "open"
    assert verdicts.ahead(Difference(estimate([-0.1, -0.1, 0.1]))) == "open"
    assert verdicts.ahead(Difference(estimate([-0.1, -0.11, -0.12]))) == "missed"
    assert verdicts.ahead(Difference(estimate([0.1, 0.1]))) == "open"


def test_strengths_of_a_kind_are_those_of_this_friction_alone():
    found = made({cell.name: {PLAIN: (0.5,)} for cell in MAIN_CELLS})
    assert verdicts.sweep(found, "refresh") == {
        1: "no friction",
        4: "refresh 4",
        16: "refresh 16",
        64: "refresh 64",
    }
    assert list(verdicts.sweep(found, "broken")) == [0, 0.03, 0.1, 0.3]
    assert list(verdicts.sweep(found, "corruption")) == [0, 0.1, 0.3, 0.6]
    assert list(verdicts.sweep(found, "temperature")) == [0.8, 1, 1.15, 1.3]


def test_wrong_reports_are_compared_with_the_best_of_true_ones():
    cells = (refreshed(16), *reported(refreshed(16)), NONE)
    assert all(base_of(cell, cells) == cells[0] for cell in cells[:4])
    ends = {"refresh 16": {RATIOS: (0.8,), "GSPO": (0.9,), PLAIN: (0.95,)}}
    ends |= {cells[1].name: {RATIOS: (0.1,), PLAIN: (0.95,)}}
    found = made(ends, cells)
    assert analysis.reference(found, cells[1].name) == ("refresh 16", "GSPO")
    assert base_of(COMBINED_WRONG, cells) is None


def rows(cell, arm, value):
    return {
        "part": "first-0-sorting-3-25m-1",
        "series": f"{arm} under {cell}",
        "setting": 1e-5,
        "seed": 0,
        "step": 100,
        "metric": tuning.QUALITY,
        "value": value,
    }


def test_who_does_not_look_at_log_probs_has_the_reward_of_true_ones():
    lines = [
        rows("combined", PLAIN, 0.6),
        rows("combined", RATIOS, 0.9),
        rows("combined, wrong log-probs", RATIOS, 0.5),
        rows("no friction", RATIOS, math.nan),
    ]
    found = outcomes(pd.DataFrame(lines), FULL, FULL.main)
    wrong = found.ends["combined, wrong log-probs"]
    assert wrong == {PLAIN: {0: 0.6}, RATIOS: {0: 0.5}}
    assert found.ends["no friction"] == {RATIOS: {0: 0.0}}  # lost to NaN
    assert_close(found.error("combined", RATIOS, 0), 0.1)
    assert outcomes(pd.DataFrame(lines[:1]), FULL, FULL.fields[1]) is None


def test_the_claims_arms_can_be_told_apart_in_figures_and_others_are_grey():
    names = [each.name for each in corrections()]
    assert len({drawing.look(name) for name in CLAIMED}) == len(CLAIMED)
    assert {drawing.look(name) for name in names if name not in CLAIMED} == {(plotting.FAINT, "-")}


def test_the_page_has_the_tables_of_the_committed_records():
    root = Path(__file__).parents[3]
    made = page.tables(
        records.table(records.read(root / "results/lm-frictions-v1/runs.jsonl.gz")), FULL
    )
    text = (root / "docs/results/studies/lm-frictions.md").read_text(encoding="utf-8")
    assert [name for name, markdown in made.items() if markdown not in text] == []
