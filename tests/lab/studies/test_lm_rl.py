import dataclasses
import math
from functools import partial

import pytest
import torch

import kondo
from kondo.run_files import DamagedFileError
from kondo_lab.evidence import part_files, progress, records, runner
from kondo_lab.studies.lm_rl import STUDY, assignments, plane, run
from kondo_lab.studies.lm_rl.settings import (
    FULL,
    SMALL,
    Plane,
    Point,
    Settings,
    mark_of,
    settings,
)
from kondo_lab.training import alone as loop
from kondo_lab.training import expected_seconds, field_parts, fields, starts, tuning
from kondo_lab.training import run as population_run
from kondo_lab.training.fields import Field
from kondo_lab.training.language_arms import CLIPPED, text_arm
from kondo_lab.training.part import Context, Stopped
from kondo_lab.training.record import Log
from lab.made_up import table_of
from lab.studies import toy

TINY_MAIN = dataclasses.replace(
    SMALL.main,
    level=1,
    num_prompts=3,
    repeats=4,
    warm_steps=4,
    warm_batch=4,
    tune_steps=2,
    num_steps=3,
)
TINY_PLANE = Plane(
    **{field.name: getattr(TINY_MAIN, field.name) for field in dataclasses.fields(TINY_MAIN)},
    points=(
        Point(num_rows=8, num_steps=4, learning_rates=(3e-4, 1e-3)),
        Point(num_rows=16, num_steps=3, learning_rates=(1e-3,)),
        Point(num_rows=16, rate=0.3, num_steps=3, learning_rates=(1e-3,)),
        Point(num_rows=16, rate=0.3, rule="PODS", num_steps=3, learning_rates=(1e-3,)),
    ),
    rivals=(Point(num_rows=16, num_steps=2, learning_rates=(3e-4,)),),
)
TINY = dataclasses.replace(
    SMALL,
    main=TINY_MAIN,
    rare=(
        dataclasses.replace(
            SMALL.rare[0],
            **{
                **{name: getattr(TINY_MAIN, name) for name in ("level", "num_prompts", "repeats")},
                **{
                    name: getattr(TINY_MAIN, name)
                    for name in ("warm_steps", "warm_batch", "num_steps")
                },
                "tuned_on": TINY_MAIN.name,
            },
        ),
    ),
    planes=(TINY_PLANE, dataclasses.replace(TINY_PLANE, level=2, num_seeds=1)),
    timed=dataclasses.replace(SMALL.timed, warm_steps=4, warm_batch=4, num_prompts=3, repeats=4),
    warm_every=2,
    num_held_out=6,
    evaluations=3,
    wall_evaluations=3,
    timed_rounds=1,
    most_rows=12 * 20,
)
"""Every part, in seconds: what is learned is of no interest."""


def context(folder, part="part", stopped=lambda: False):
    return Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=stopped,
        checkpoint=folder / f"{part}.checkpoint",
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The whole study, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "lm-rl"
    study = dataclasses.replace(STUDY, settings=lambda size, seeds: TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "WARM_UP_CALLS", 1)  # nothing is recorded or chosen on a CPU
        outcome = runner.run(toy.order(out, study), progress.make_console())
    return out, outcome.analysis, records.table(records.read(out / runner.RECORDS))


def by_part(table, name):
    return table[table["part"] == name]


def test_every_part_leaves_records_and_no_weights(tiny):
    out, _, table = tiny
    names = [part.name for part in run.parts(TINY)]
    assert len(set(names)) == len(names)
    assert set(table["part"]) == set(names)
    assert not list(out.rglob("*.pt"))


def test_everyone_meets_in_the_main_field_with_a_tuned_rate(tiny):
    table = tiny[2]
    names = assignments.grid_names(TINY, TINY.main)
    assert len(names) > 2, "members must not fit one population, so that parts are split"
    grid = table[table["part"].isin(names)]
    assert set(grid["series"]) == {each.name for each in TINY.everyone()}
    tuned = tuning.chosen(table[table["part"].isin(fields.tune_names(TINY, TINY.main))])
    for each in TINY.everyone():
        own = grid[grid["series"] == each.name]
        assert set(own["seed"]) == set(TINY.seeds(TINY.main, each))
        assert set(own["setting"]) == {tuned[tuning.tuned_name(each)]}
        assert sorted(own["step"].unique()) == [0, 1, 2, 3]
        assert tuning.GREEDY not in set(own["metric"])


def test_seeds_that_only_some_have_come_in_a_block_of_their_own():
    assert assignments.seed_blocks(FULL, FULL.main) == [range(3), range(3, 5)]
    assert assignments.seed_blocks(FULL, FULL.rare[0]) == [range(3)]
    later = assignments.grid_members(FULL, FULL.main, range(3, 5))
    assert {each.series for each in later} == {
        each.name for each in FULL.everyone() if len(FULL.seeds(FULL.main, each)) == 5
    }
    assert len(later) == 24
    assert len(assignments.grid_members(FULL, FULL.main, range(3))) == 66


def test_tuning_and_reported_seeds_differ(tiny):
    table = tiny[2]
    tuned = table["part"].str.startswith(("tune", "plane"))
    assert set(table[tuned]["seed"]) == {1000}
    reported = table[~tuned & ~table["part"].str.startswith("warm")]
    assert reported["seed"].max() < 100


def test_a_point_is_tried_with_its_learning_rates(tiny):
    point = TINY_PLANE.points[0]
    own = by_part(tiny[2], assignments.point_name(TINY_PLANE, point))
    assert set(own["series"]) == {"dense 8"}
    for rate in point.learning_rates:
        one = own[own["setting"] == rate]
        assert (one[one["metric"] == "seconds loop"]["value"] > 0).all()
        assert (one["forward"] == 8 * one["step"]).all()
        assert (one["backward"] == 8 * one["step"]).all()
        # Both rates begin at the same start.
        assert (
            one[one["step"] == 0]["value"].tolist() == own[own["step"] == 0]["value"].tolist()[:1]
        )


def test_the_best_point_of_a_role_is_run_with_all_seeds(tiny):
    table = tiny[2]
    for field in TINY.planes:
        for role in ("dense", "gated", "PODS"):
            point, rate, _ = plane.best(plane.trials(table, field), role, TINY.target)
            own = by_part(table, assignments.best_name(field, role))
            assert set(own["series"]) == {point.name}
            assert set(own["setting"]) == {rate}
            assert set(own["seed"]) == set(range(field.num_seeds))
            longest = round(TINY.longer * point.num_steps)
            assert own["step"].max() <= longest
            kept = own["backward"].max() / own["forward"].max()
            assert kept == 1 if role == "dense" else kept < 0.5


def test_a_rival_is_run_with_all_seeds_at_its_own_learning_rate(tiny):
    (point,) = TINY_PLANE.rivals
    own = by_part(tiny[2], assignments.rival_name(TINY_PLANE, point))
    assert set(own["series"]) == {"dense 16"}
    assert set(own["setting"]) == {3e-4}
    assert set(own["seed"]) == set(range(TINY_PLANE.num_seeds))
    assert own["step"].max() <= round(TINY.longer * point.num_steps)


def test_runs_by_the_clock_end_at_the_target(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "WARM_UP_CALLS", 1)
    easy = dataclasses.replace(TINY, target=0.0)
    (part, *_) = (each for each in run.parts(easy) if each.name.startswith("plane"))
    found = table_of(part.run(context(tmp_path)), part=part.name)
    # The mean of two evaluations is looked at: not before the second.
    assert found.groupby("setting")["step"].max().tolist() == [1, 1]


def test_a_part_by_the_clock_stops_between_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "WARM_UP_CALLS", 1)
    (part, *_) = (each for each in run.parts(TINY) if each.name.startswith("plane"))
    asked = []

    def stopped():
        asked.append(True)
        return len(asked) > 1

    with pytest.raises(Stopped):
        part.run(context(tmp_path, stopped=stopped))
    assert len(asked) == 2


def test_no_run_by_the_clock_goes_on_from_the_checkpoint_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "WARM_UP_CALLS", 1)
    long = dataclasses.replace(TINY, target=2.0)  # nobody gets there: every run is a whole one
    place = field_parts.Place(long, TINY_PLANE, "best", context(tmp_path))

    def entropies():
        found = run._by_clock(place, long, TINY_PLANE.points[0], [(1e-3, 0), (1e-3, 1)], 4)
        return [(own.seed, row["step"], row.get("entropy")) for own in found for row in own.curve]

    expected = entropies()
    monkeypatch.setattr(population_run, "CHECKPOINT_SECONDS", -1.0)  # one at every logged step
    assert entropies() == expected
    assert place.context.checkpoint.exists()
    assert entropies() == expected  # a part that is killed leaves one behind


def test_a_best_part_asks_for_the_points_of_its_role_first(tmp_path):
    (part,) = (each for each in run.parts(TINY) if each.name == "best-sorting-1-toy-gated")
    with pytest.raises(ValueError, match="finished parts, got 'plane-sorting-1-toy-unbiased-30-of"):
        part.run(context(tmp_path))


def test_the_largest_model_is_timed_dense_without_the_product(tiny):
    own = by_part(tiny[2], assignments.seconds_name(TINY.timed))
    assert set(own["series"]) == {"GRPO plain", "unbiased 10%", "unbiased 3%"}
    for stage in ("generate", "train", "learner", "loop"):
        for quantile in ("p20", "p50", "p80"):
            found = own[own["metric"] == f"seconds {stage} {quantile}"]
            assert set(found["series"]) == set(own["series"])


def test_the_analysis_draws_and_tells(tiny):
    analysis = tiny[1]
    assert set(analysis.figures) == {
        "selections",
        "entropy",
        "starts",
        "plane-sorting-1-toy",
        "plane-sorting-2-toy",
    }
    assert {line.series for line in analysis.headline} >= {each.name for each in TINY.everyone()}
    assert all(line.expected is None for line in analysis.headline)
    told = " ".join(analysis.findings)
    assert "supervised starts of 3 seeds" in told
    assert "delight by PG has a higher reward at the end than random by PG: open" in told
    assert "answer delight by PG has a lower entropy at the end than delight by PG: open" in told
    assert "of gated points the best on the tuning seed is unbiased 30% of 16" in told
    assert {point.task for point in analysis.frontier} == {"sorting-1-toy", "sorting-2-toy"}


def test_what_is_there_is_analysed_when_a_run_was_cut_short(tiny):
    table = tiny[2]
    names = [part.name for part in run.parts(TINY)]
    for cut in range(1, len(names), 3):
        part_of_it = table[table["part"].isin(names[:cut])]
        assert STUDY.analyse(part_of_it, TINY).findings


def test_a_start_that_is_lost_is_made_again(tmp_path):
    starts.train(TINY, TINY_MAIN, context(tmp_path))
    first = starts.load(TINY, TINY_MAIN, context(tmp_path)).parameters
    (path,) = tmp_path.glob("*.pt")
    path.unlink()
    again = starts.load(TINY, TINY_MAIN, context(tmp_path))
    assert again.seeds == (0, 1, 1000)
    for name, value in again.parameters.items():
        assert torch.equal(value, first[name])


def test_starts_are_read_again_where_their_file_has_changed(tmp_path):
    starts.train(TINY, TINY_MAIN, context(tmp_path))
    first = starts.load(TINY, TINY_MAIN, context(tmp_path))
    assert starts.load(TINY, TINY_MAIN, context(tmp_path)) is first
    (path,) = tmp_path.glob("*.pt")
    other = dataclasses.replace(first, parameters={"head": torch.zeros(3, 1)})
    path.unlink()
    other.save(path)
    assert set(starts.load(TINY, TINY_MAIN, context(tmp_path)).parameters) == {"head"}


def test_fields_of_one_name_share_their_starts():
    assert FULL.planes[0].name == FULL.main.name
    assert starts.seeds_of(FULL, FULL.planes[0]) == starts.seeds_of(FULL, FULL.main)
    for name in ("task", "level", "size", "warm_steps", "warm_batch", "warm_rate", "start"):
        assert getattr(FULL.planes[0], name) == getattr(FULL.main, name)
    names = [part.name for part in run.parts(FULL)]
    assert names.count("warm-sorting-3-25m") == 1
    assert [field.name for field in FULL.fields] == [
        "sorting-3-25m",
        "sorting-3-25m-from-5%",
        "sorting-3-25m-from-1%",
        "sorting-3-300m",
        "sorting-3-85m",
        "sorting-3-1b-from-10%",
    ]


def test_a_grid_asks_for_its_tuning_part_first(tmp_path):
    (part, *_) = (each for each in run.parts(TINY) if each.name.startswith("grid"))
    with pytest.raises(ValueError, match="finished parts, got 'tune-sorting-1-toy-1'"):
        part.run(context(tmp_path))


def test_arms_get_the_rates_that_tuning_found_for_them(tmp_path):
    best = {"PG": 1e-3, "GRPO": 3e-4, "delight by PG": 1e-3}
    names = fields.tune_names(TINY, TINY.main)
    assert len(names) > 1
    (tmp_path / "parts").mkdir()
    for number, name in enumerate(names):
        runs = tuning_runs(
            {
                (one, rate, 1000): [0.0, 0.9 if rate == best[one] else 0.1]
                for one in (best if number == 0 else ["PG"])
                for rate in (3e-4, 1e-3)
            },
            part=name,
        )
        records.write(part_files.path_of(tmp_path, name), runs)
    own = dataclasses.replace(context(tmp_path), finished=partial(part_files.table, tmp_path))
    rates = field_parts.rates_in(TINY, TINY.main, own)
    best |= {"unbiased by GRPO": 3e-4, "noise 1.5 by GRPO": 3e-4}
    known = [each for each in TINY.everyone() if each.name in best]
    assert {each.name: rates(each) for each in known} == best


def tuning_runs(rewards, part="tune"):
    """Tuning runs from {(series, rate, seed): rewards of the evaluations}."""
    log = Log(part, about={"study": "lm-rl", "device": "cpu", "commit": None})
    for (series, rate, seed), several in rewards.items():
        for step, reward in enumerate(several):
            log.add(series, seed, {tuning.QUALITY: reward}, x=rate, step=step)
    return log.runs()


def tuned(rewards):
    """Return the table of `tuning_runs`."""
    return table_of(tuning_runs(rewards), part="tune")


def test_the_rate_of_the_highest_reward_at_the_end_is_chosen():
    table = tuned(
        {
            # Step 0 is the start, and of the others the last three count.
            ("PG", 0.1, 0): [9, 0.0, 0.2, 0.4, 0.6],
            ("PG", 0.1, 1): [9, 0.0, 0.4, 0.4, 0.4],
            ("PG", 0.3, 0): [9, 9.0, 0.2, 0.2, 0.9],
            ("PG", 0.3, 1): [9, 9.0, 0.1, 0.1, 0.4],
            ("DG", 0.1, 0): [0, 0, 0, 0.3],
            ("DG", 0.3, 0): [0, 0, 0, 0.6],
        }
    )
    assert tuning.chosen(table) == {"PG": 0.1, "DG": 0.3}
    found = tuning.rewards_by_rate(table)
    assert found["PG"][0.1] == pytest.approx(0.4)
    assert found["PG"][0.3] == pytest.approx((1.3 + 0.6) / 6)


def test_of_equal_rewards_the_smaller_rate_is_chosen_and_nan_never():
    assert tuning.best_rate({0.3: 0.5, 0.1: 0.5, 1.0: 0.4}) == 0.1
    assert tuning.best_rate({0.1: math.nan, 0.3: 0.0}) == 0.3


def test_unbiased_gates_have_dense_grpos_rate_and_all_others_their_own():
    names = [tuning.tuned_name(each) for each in FULL.everyone()]
    assert names.count("GRPO") == 3
    assert len(set(names)) == len(FULL.everyone()) - 2


def test_the_full_study_is_what_was_asked_for():
    everyone = {each.name for each in FULL.everyone()}
    for loss in ("PG", "GRPO"):
        kinds = ("delight", "|advantage|", "variance", "gradient norm", "random")
        assert {loss, *(f"{kind} by {loss}" for kind in kinds)} <= everyone
    assert {
        "delight tokens by PG",
        "random tokens by PG",
        "price 0 by PG",
        "Bernoulli by PG",
        "mean delight by PG",
        "sigmoid within kept by PG",
        "answer delight by PG",
        "working delight by PG",
        "unbiased by GRPO",
        "noise 1.5 by GRPO",
    } <= everyone
    assert len(everyone) == 22
    assert (FULL.num_held_out, FULL.target, FULL.rate) == (1024, 0.92, 0.1)
    assert [(each.size, each.num_seeds) for each in FULL.planes] == [
        ("25m", 5),
        ("300m", 3),
        ("85m", 3),
    ]
    assert [FULL.start_reward(field) for field in FULL.populations] == [0.3, 0.05, 0.01]
    for field in FULL.rare:
        assert len(FULL.of(field)) == len(field.only) == 5
    rows = {(point.num_rows, point.rate) for point in FULL.planes[0].points}
    assert {(256, 1.0), (4096, 1.0), (2048, 0.03), (8192, 0.01)} <= rows
    assert FULL.timed.size == "1b"


def test_noisy_points_try_a_lower_learning_rate_and_others_a_higher_one():
    rates = {point.name: point.learning_rates for point in FULL.planes[0].points}
    assert rates["dense 512"] == rates["unbiased 3% of 2048"] == (1.5e-5, 3e-5)
    assert rates["dense 1024"] == rates["unbiased 10% of 2048"] == (3e-5, 5e-5)
    assert all(3e-5 in own for own in rates.values())


def test_points_have_whole_groups():
    uneven = dataclasses.replace(TINY_PLANE.points[0], num_rows=18)
    with pytest.raises(ValueError, match="points must have whole groups of 4 rows, got dense 18"):
        dataclasses.replace(TINY_PLANE, points=(uneven,))


def test_points_say_what_they_keep():
    gated, pods = (
        Point(num_rows=2048, rate=0.1, num_steps=1, learning_rates=()),
        TINY_PLANE.points[3],
    )
    dense = dataclasses.replace(gated, rate=1.0)
    assert (dense.name, dense.role) == ("dense 2048", "dense")
    assert (gated.name, gated.role, gated.num_kept) == ("unbiased 10% of 2048", "gated", 205)
    assert (pods.name, pods.role) == ("PODS 30% of 16", "PODS")
    assert dense.arm == text_arm(name="dense 2048", loss=CLIPPED, divided=True)
    assert repr(gated.arm.gate) == repr(kondo.UnbiasedGate(rate=0.1))
    assert (gated.arm.denominator, pods.arm.denominator) == ("full", "kept")


def test_full_size_parts_are_short_and_the_claims_come_first():
    parts = {part.name: part.work for part in run.parts(FULL)}
    assert max(parts.values()) < 80
    assert sum(parts.values()) < 15 * 60
    names = list(parts)
    order = [
        "tune-sorting-3-25m-1",
        "grid-0-2-sorting-3-25m-1",
        "plane-sorting-3-25m-dense-256",
        "plane-sorting-3-300m-dense-512",
        "best-sorting-3-300m-dense",
        "best-sorting-3-25m-dense",
        "grid-3-4-sorting-3-25m-1",
        "plane-sorting-3-85m-dense-512",
        "grid-0-2-sorting-3-25m-from-5-1",
        "seconds-sorting-3-1b-from-10",
    ]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)


def test_cheaper_arms_are_expected_to_take_less_time():
    field = FULL.planes[0]
    dense, gated = text_arm(name="PG"), text_arm(name="DG-K 3%", gate=kondo.Gate(rate=0.03))
    assert expected_seconds.loops(field, [gated], 10) < expected_seconds.loops(field, [dense], 10)
    assert expected_seconds.loops(field, [dense, gated], 10) > expected_seconds.loops(
        field, [dense], 10
    )
    point = field.points[3]
    assert run.point_seconds(field, point, 1) < run.point_seconds(field, point, 2)


def test_no_population_has_more_rows_than_are_allowed():
    members = fields.tune_members(FULL, FULL.main)
    pieces = fields.named_pieces("tune", FULL, FULL.main, members)
    parts = [members[piece] for piece in pieces.values()]
    assert [member for part in parts for member in part] == members
    for part in parts:
        assert len(part) * max(FULL.main.num_rows, FULL.num_held_out) <= FULL.most_rows


def test_a_field_goes_by_its_task_level_size_and_start():
    assert Field(task="sorting", level=3, size="1m").name == "sorting-3-1m"
    assert Field(task="sorting", level=3, size="1m", start=0.3).name == "sorting-3-1m"
    assert Field(task="sorting", level=3, size="1m", start=0.05).name == "sorting-3-1m-from-5%"
    assert SMALL.field("sorting-2-toy") is SMALL.main
    with pytest.raises(ValueError, match="name must be a field's, one of sorting-2-toy, sorting"):
        SMALL.field("sorting-9-1m")


def test_the_mark_is_the_tasks():
    assert mark_of(FULL.main) == ">"
    assert mark_of(Field(task="addition", level=1, size="toy")) == "="
    with pytest.raises(ValueError, match="field must have a task with a mark, got 'countdown'"):
        mark_of(Field(task="countdown", level=1, size="toy"))


def test_a_number_of_seeds_holds_for_every_part():
    chosen = settings("full", 2)
    assert isinstance(chosen, Settings)
    assert {len(chosen.seeds(chosen.main, each)) for each in chosen.everyone()} == {2}
    assert [field.num_seeds for field in (*chosen.rare, *chosen.planes)] == [2, 2, 2, 2, 2]
    assert settings("small", None) == SMALL


def test_evaluations_go_from_the_start_to_the_end():
    assert fields.evenly(300, 30)[:3] == [0, 10, 20]
    assert fields.evenly(3, 10) == [0, 1, 2, 3]


def test_of_diagnostics_the_last_ones_are_kept_and_entropies_of_every_evaluation(tiny):
    grid = tiny[2][tiny[2]["part"].isin(assignments.grid_names(TINY, TINY.main))]
    steps = {
        metric: sorted(grid[grid["metric"] == metric]["step"].unique())
        for metric in ("mixed groups", "entropy", "tokens differentiated")
    }
    assert steps == {
        "mixed groups": [3],
        "entropy": [1, 2, 3],
        "tokens differentiated": [1, 2, 3],
    }


def test_warm_records_count_demonstrations(tiny):
    own = by_part(tiny[2], fields.warm_name(TINY.main))
    assert set(own["metric"]) == {tuning.QUALITY, field_parts.WARM_LOSS}
    assert set(own["step"]) <= {2, 4}
    assert (own["forward"] == 4 * own["step"]).all()


def test_a_field_may_look_at_its_start_more_often(tmp_path):
    often = dataclasses.replace(TINY_MAIN, warm_every=1, start=1.0)
    steps = [point.step for point in starts.train(TINY, often, context(tmp_path))]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"no archive at all"])
def test_a_damaged_start_is_named_with_what_to_do(tmp_path, content):
    field = TINY.main
    own = context(tmp_path)
    path = own.checkpoint.with_name(f"start-{field.name}.pt")
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"{path.name}.*Delete it; the same command"):
        starts.load(TINY, field, own)
