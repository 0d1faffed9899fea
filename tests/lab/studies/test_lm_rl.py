import dataclasses
import math

import pandas as pd
import pytest
import torch

import kondo
from kondo.run_files import DamagedFileError
from kondo_lab import progress
from kondo_lab.draws import Draws
from kondo_lab.language import loop
from kondo_lab.language.contenders import Batch, Contender, decide, loss
from kondo_lab.language.sampler import Sampled
from kondo_lab.part import Context, Record
from kondo_lab.studies import records, runner
from kondo_lab.studies.lm_rl import (
    STUDY,
    assignments,
    expected_seconds,
    run,
    starts,
    training,
    tuning,
)
from kondo_lab.studies.lm_rl.settings import FULL, SMALL, Field, Settings, scaled, settings
from lab.studies import toy

TINY_GRID = dataclasses.replace(
    SMALL.main,
    task="addition",
    level=1,
    num_prompts=3,
    repeats=4,
    warm_steps=4,
    warm_batch=4,
    tune_steps=2,
    num_steps=3,
)
TINY = dataclasses.replace(
    SMALL,
    grids=(TINY_GRID,),
    walls=(
        dataclasses.replace(
            TINY_GRID,
            task="sorting",
            other_seeds=0,
            clocked_rates=(0.1,),
        ),
        dataclasses.replace(
            TINY_GRID,
            task="sorting",
            level=2,
            other_seeds=0,
            num_seeds=1,
            tune_seeds=0,
            tuned_on="sorting-1-toy",
            clocked_rates=(0.1,),
        ),
    ),
    rates=(0.1,),
    warm_every=2,
    num_held_out=6,
    evaluations=3,
    wall_evaluations=2,
    rounds=1,
    denominator_steps=2,
    denominator_rates=(0.1,),
    most_rows=12 * 16,
)
"""Every part, in seconds: what is learned is of no interest."""


def context(folder, part="part"):
    return Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=lambda: False,
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
    return out, outcome.analysis, records.read(out / runner.RECORDS)


def by_part(table, name):
    return table[table["part"] == name]


def test_every_part_leaves_records_and_no_weights(tiny):
    out, _, table = tiny
    assert set(table["part"]) == {part.name for part in run.parts(TINY)}
    assert not list(out.rglob("*.pt"))


def test_everyone_meets_in_the_main_grid_with_a_tuned_rate(tiny):
    table = tiny[2]
    names = assignments.grid_names(TINY, TINY.main)
    assert len(names) > 1, "members must not fit one population, so that parts are split"
    grid = table[table["part"].isin(names)]
    assert set(grid["series"]) == {each.name for each in TINY.everyone()}
    tuned = tuning.chosen(table[table["part"].isin(assignments.tune_names(TINY, TINY.main))])
    for each in TINY.everyone():
        own = grid[grid["series"] == each.name]
        assert set(own["seed"]) == set(TINY.seeds(TINY.main, each))
        assert set(own["setting"]) == {tuned[tuning.tuned_name(each)]}
        assert sorted(own["step"].unique()) == [0, 1, 2, 3]


def test_tuning_and_reported_seeds_differ(tiny):
    table = tiny[2]
    for field in (*TINY.grids, *TINY.walls):
        tuned = table[table["part"].isin(assignments.tune_names(TINY, field))]
        assert not set(tuned["seed"]) & set(range(100))
    reported = table[~table["part"].str.startswith(("tune", "warm"))]
    assert reported["seed"].max() < 100


def test_the_headline_is_run_by_the_clock_by_both_dense_paths(tiny):
    table = tiny[2]
    field = TINY.walls[0]
    parts = table[table["part"].isin(assignments.wall_names(TINY, field))]
    names = {each.name for each in TINY.clocked(field)}
    assert {"GRPO", "DG, eta 1", "DG-K 10%", "PODS 10%", "random 10%"} <= names
    assert set(parts["series"]) == {*names, "GRPO plain"}
    seconds = parts[parts["metric"] == "seconds loop"]
    assert (seconds["value"] > 0).all()
    assert set(seconds["seed"]) == {0, 1}


def test_the_larger_model_takes_over_the_learning_rates(tiny):
    table = tiny[2]
    first, second = TINY.walls
    assert assignments.tune_names(TINY, second) == assignments.tune_names(TINY, first)
    rates = tuning.chosen(table[table["part"].isin(assignments.tune_names(TINY, first))])
    own = table[table["part"].isin(assignments.wall_names(TINY, second))]
    tuned = {each.name: tuning.tuned_name(each) for each in TINY.clocked(second)}
    for series, values in own.groupby("series")["setting"]:
        assert set(values) == {rates[tuned[series.removesuffix(" plain")]]}


def test_saved_time_buys_no_fewer_prompts_than_dense_has(tiny):
    table = tiny[2]
    field = TINY.walls[0]
    more = table[table["part"].isin(assignments.more_runs(TINY, field))]
    assert set(more["series"]) == {"DG-K 10%", "PODS 10%"}
    for _, own in more.groupby("series"):
        (prompts,) = own["setting"].unique()
        assert field.num_prompts <= prompts <= TINY.most_times * field.num_prompts
        last = own[own["step"] == field.num_steps].iloc[0]
        assert last["forward"] == field.num_steps * prompts * field.repeats


def test_every_contender_is_timed_stage_by_stage(tiny):
    own = by_part(tiny[2], assignments.seconds_name(TINY.main))
    names = {each.name for each in TINY.everyone()}
    assert set(own["series"]) == names | {"PG plain", "GRPO plain", "DG, eta 1 plain"}
    for stage in ("generate", "train", "learner", "loop"):
        for quantile in ("p20", "p50", "p80"):
            found = own[own["metric"] == f"seconds {stage} {quantile}"]
            assert set(found["series"]) == set(own["series"])


def test_denominators_differ_in_nothing_else():
    full, kept = assignments.denominators(TINY)
    assert (full.denominator, kept.denominator) == ("full", "kept")
    assert dataclasses.replace(kept, name=full.name, denominator="full") == full
    assert full == Contender(name=full.name, gate=kondo.Gate(rate=0.1))


def test_the_analysis_draws_and_tells(tiny):
    analysis = tiny[1]
    assert set(analysis.figures) == {
        "curves-addition-1-toy-populations",
        "curves-sorting-1-toy-by-the-clock",
        "curves-sorting-2-toy-by-the-clock",
        "frontier",
        "speed-ups",
        "learning-rates",
    }
    assert {line.series for line in analysis.headline} >= {"GRPO", "DG-K 10%", "PODS 10%"}
    assert all(line.paper is None for line in analysis.headline)
    assert any("supervised starts of 3 seeds" in told for told in analysis.findings)
    assert any("Best learning rate of DG-K" in told for told in analysis.findings)


def test_what_is_there_is_analysed_when_a_run_was_cut_short(tiny):
    table = tiny[2]
    names = [part.name for part in run.parts(TINY)]
    for cut in (1, 3, len(assignments.grid_names(TINY, TINY.main)) + 3, len(names) - 1):
        part_of_it = table[table["part"].isin(names[:cut])]
        assert STUDY.analyse(part_of_it, TINY).findings


def test_a_start_that_is_lost_is_made_again(tmp_path):
    starts.train(TINY, TINY_GRID, context(tmp_path))
    first = starts.load(TINY, TINY_GRID, context(tmp_path)).parameters
    (path,) = tmp_path.glob("*.pt")
    path.unlink()
    again = starts.load(TINY, TINY_GRID, context(tmp_path))
    assert again.seeds == (0, 1, 1000)
    for name, value in again.parameters.items():
        assert torch.equal(value, first[name])


def test_a_grid_asks_for_its_tuning_part_first(tmp_path):
    (part,) = (each for each in run.parts(TINY) if each.name == "grid-addition-1-toy-1")
    with pytest.raises(ValueError, match="finished parts, got 'tune-addition-1-toy-1'"):
        part.run(context(tmp_path))


def test_contenders_get_the_rates_that_tuning_found_for_them(tmp_path):
    best = {"PG": 1e-3, "GRPO": 3e-4, "DG-K 10%": 1e-3, "DG-K tokens 10%": 3e-4}
    names = assignments.tune_names(TINY, TINY.main)
    assert len(names) == 2
    for name, series in zip(names, (["PG", "GRPO"], ["DG-K 10%", "DG-K tokens 10%"]), strict=True):
        table = tuned(
            {
                (one, rate, 1000): [0.0, 0.9 if rate == best[one] else 0.1]
                for one in series
                for rate in (3e-4, 1e-3)
            },
            part=name,
        )
        records.write(tmp_path / f"{name}.csv.gz", table)
    rates = training.rates_in(TINY, TINY.main, context(tmp_path))
    best |= {"DG-K exact 10%": 1e-3, "DG-K tokens exact 10%": 3e-4}
    known = [each for each in TINY.everyone() if each.name in best]
    assert {each.name: rates(each) for each in known} == best


def tuned(rewards, part="tune"):
    """Tuning records from {(series, rate, seed): rewards of the evaluations}."""
    return records.frame(
        part=part,
        records=[
            Record(part, series, rate, seed, step, 0, 0, tuning.QUALITY, reward)
            for (series, rate, seed), several in rewards.items()
            for step, reward in enumerate(several)
        ],
    )


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


def test_an_exact_screen_has_the_free_ones_rate():
    names = [tuning.tuned_name(each) for each in FULL.everyone()]
    assert "DG-K exact 3%" not in names
    assert names.count("DG-K 3%") == 2
    assert names.count("DG-K tokens 3%") == 2
    assert len(set(names)) == len(FULL.everyone()) - 9  # the filter has dense GRPO's


def test_the_zero_advantage_filter_has_dense_grpos_rate_since_it_has_its_gradient():
    by_name = {each.name: each for each in FULL.everyone()}
    assert tuning.tuned_name(by_name["zero-advantage filter"]) == "GRPO"
    draws, rewards = Draws([0], torch.device("cpu")), torch.tensor([[1.0, 0, 1, 1, 0, 0, 0, 1]])
    mask, old = torch.ones(1, 8, 3, dtype=torch.bool), -torch.rand(1, 8, 3)
    sampled = Sampled(torch.zeros(1, 8, 4, dtype=torch.int64), old, old, mask)
    gradients = []
    for name in ("GRPO", "zero-advantage filter"):
        contender, new = by_name[name], old.clone().requires_grad_()
        chosen = decide(contender, Batch(sampled, rewards, draws, 1, 2))
        loss(contender, new, sampled, chosen).sum().backward()
        gradients.append(new.grad)
        assert int(chosen.rows_kept) == (8 if name == "GRPO" else 4)
    assert torch.equal(*gradients)


def test_the_full_study_is_what_was_asked_for():
    everyone = {each.name for each in FULL.everyone()}
    for rate in ("1%", "3%", "10%", "30%"):
        assert {
            f"{kind} {rate}"
            for kind in (
                "DG-K",
                "DG-K exact",
                "DG-K tokens",
                "DG-K tokens exact",
                "DG-K cost",
                "|delight|",
                "random",
                "PODS",
                "entropy tokens",
                "surprisal",
                "advantage",
            )
        } <= everyone
    assert {"PG", "GRPO", "DG, eta 0.1", "DG, eta 10", "zero-advantage filter"} <= everyone
    for each in FULL.everyone():
        least = 5 if each in FULL.headliners() else 2
        assert len(FULL.seeds(FULL.main, each)) >= least
    assert [field.size for field in FULL.grids] == ["5m", "5m"]
    assert [field.size for field in FULL.walls] == ["25m", "85m", "300m"]


def test_full_size_parts_are_short_and_all_of_them_fit_half_an_hour():
    parts = run.parts(FULL)
    assert max(part.work for part in parts) < 180
    assert sum(part.work for part in parts) < 30 * 60
    half = run.parts(scaled(FULL, 0.5))
    assert [part.name for part in half] == [part.name for part in parts]
    assert sum(part.work for part in half) < 0.75 * sum(part.work for part in parts)


def test_cheaper_contenders_are_expected_to_take_less_time():
    field = FULL.walls[0]
    dense, gated = Contender(name="PG"), Contender(name="DG-K 3%", gate=kondo.Gate(rate=0.03))
    assert expected_seconds.loops(field, [gated], 10) < expected_seconds.loops(field, [dense], 10)
    assert expected_seconds.loops(field, [dense, gated], 10) > expected_seconds.loops(
        field, [dense], 10
    )


def test_no_population_has_more_rows_than_are_allowed():
    for field in (*FULL.grids, *FULL.walls):
        if field.tuned_on:
            continue
        members = assignments.tune_members(FULL, field)
        pieces = assignments.named_pieces("tune", FULL, field, members)
        parts = [members[piece] for piece in pieces.values()]
        assert [member for part in parts for member in part] == members
        assert all(len(part) * field.num_rows <= FULL.most_rows for part in parts)


def test_a_field_goes_by_its_task_level_and_size():
    assert Field(task="sorting", level=3, size="1m").name == "sorting-3-1m"
    assert SMALL.field("sorting-2-toy") is SMALL.main
    with pytest.raises(ValueError, match="name must be a field's, one of sorting-2-toy, addition"):
        SMALL.field("sorting-9-1m")


def test_a_field_may_have_some_of_the_headliners_only():
    largest = FULL.walls[-1]
    names = [each.name for each in FULL.clocked(largest)]
    assert names == [each.name for each in assignments.timed(FULL, largest)]
    assert names == ["GRPO", "DG-K 3%", "random 3%", "PODS 3%", "PODS 10%"]
    assert set(names) < {each.name for each in FULL.clocked(FULL.walls[0])}
    dense = [name for name in assignments.wall_names(FULL, largest) if "grpo" in name]
    assert dense == ["wall-sorting-3-300m-grpo-plain-0"]


def test_a_number_of_seeds_holds_for_every_part():
    chosen = settings("full", 2)
    assert isinstance(chosen, Settings)
    assert {len(chosen.seeds(chosen.main, each)) for each in chosen.everyone()} == {2}
    assert [field.num_seeds for field in chosen.walls] == [2, 2, 2]
    assert [field.other_seeds for field in chosen.walls] == [0, 0, 0]
    assert (chosen.denominator_seeds, chosen.more_seeds) == (2, 2)
    assert settings("small", None) == SMALL


def test_a_factor_must_be_positive():
    with pytest.raises(ValueError, match="factor must be > 0, got 0"):
        scaled(FULL, 0)


def test_evaluations_go_from_the_start_to_the_end():
    assert assignments.evenly(300, 30)[:3] == [0, 10, 20]
    assert assignments.evenly(3, 10) == [0, 1, 2, 3]


def test_diagnostics_of_the_headline_are_kept_and_of_others_the_last_ones(tiny):
    grid = tiny[2][tiny[2]["part"].isin(assignments.grid_names(TINY, TINY.main))]
    mixed = grid[grid["metric"] == "mixed groups"].groupby("series")["step"].unique()
    assert sorted(mixed["DG-K 10%"]) == [1, 2, 3]
    assert sorted(mixed["surprisal 10%"]) == [3]
    paid = grid[grid["metric"] == "tokens differentiated"].groupby("series")["step"].unique()
    assert sorted(paid["surprisal 10%"]) == [1, 2, 3]


def test_warm_records_count_demonstrations(tiny):
    own = by_part(tiny[2], assignments.warm_name(TINY.main))
    assert set(own["metric"]) == {tuning.QUALITY, training.WARM_LOSS}
    assert set(own["step"]) <= {2, 4}
    assert (own["forward"] == 4 * own["step"]).all()
    assert isinstance(own, pd.DataFrame)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"no archive at all"])
def test_a_damaged_start_is_named_with_what_to_do(tmp_path, content):
    field = TINY.main
    own = context(tmp_path)
    path = own.checkpoint.with_name(f"start-{field.name}.pt")
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"{path.name}.*Delete it; the same command"):
        starts.load(TINY, field, own)
