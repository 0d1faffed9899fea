import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from kondo.core.adapters import adapter_of
from kondo_lab.evidence import page_tables, progress, records, runner
from kondo_lab.evidence.study import Estimate
from kondo_lab.studies.reversal_frictions import (
    STUDY,
    analysis,
    bug_rows,
    claim_lines,
    compute,
    errors,
    page,
    run,
)
from kondo_lab.studies.reversal_frictions.compute import Bounded, Cost, Gain
from kondo_lab.studies.reversal_frictions.settings import SMALL, Settings, settings
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Frictions
from kondo_lab.training.part import Context
from lab.made_up import Record, table_of
from lab.studies import toy
from lab.training import toys
from tolerances import assert_close

PART = "together-prefix"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "reversal-frictions"
    outcome = runner.run(toy.order(out, STUDY), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS)), out


def looked_at(errors_of, *, series="DG", part=PART, samples=100):
    """Records from {(setting, seed): errors at steps 1, 2, ...}, of so many samples a step."""
    return table_of(
        part=part,
        made=[
            Record(part, series, x, seed, step, samples * step, step, "learner error", value)
            for (x, seed), values in errors_of.items()
            for step, value in enumerate(values, start=1)
        ],
    )


def trained(settings, part, monkeypatch, tmp_path):
    """The populations that a part would train."""
    caught = []
    monkeypatch.setattr(
        run.reversals, "train", lambda populations, *_, **__: caught.extend(populations)
    )
    context = Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=lambda: False,
        checkpoint=tmp_path / "part.pt",
    )
    (chosen,) = (each for each in run.parts(settings) if each.name == part)
    chosen.run(context)
    return caught


def test_each_friction_is_met_alone_and_none_by_some(monkeypatch, tmp_path):
    populations = trained(SMALL, "each-bag-seeds-0-0", monkeypatch, tmp_path)
    expected = {
        "none": Frictions(),
        "staleness": Frictions(delay=10, uniform_delay=True),
        "bugs": Frictions(bug=0.1),
        "corruption": Frictions(corruption=0.1),
        "discovery": Frictions(discovery=0.01),
    }
    assert len(populations) == len(run.methods(SMALL))
    for population in populations:
        assert population.program.task.credit == "bag_of_tokens"
        assert population.program.task.answer_length == SMALL.length
        for member in population.members:
            method, friction = member.series.rsplit(", ", 1)
            assert member.frictions == expected[friction]
            assert member.arm == run.methods(SMALL)[method]


def test_all_frictions_are_met_together_at_every_length(monkeypatch, tmp_path):
    populations = trained(SMALL, "together-prefix-seeds-0-0", monkeypatch, tmp_path)
    assert [p.program.task.answer_length for p in populations] == [3, 2, 1]
    for population in populations:
        assert population.program.task.credit == "to_first_error"
        assert {member.series for member in population.members} == set(run.methods(SMALL))
        for member in population.members:
            assert member.frictions == SMALL.together
            assert member.setting == population.program.task.answer_length
    both = SMALL.together
    assert min(both.delay, both.bug, both.corruption, both.discovery) > 0


def test_own_probabilities_are_reported_to_the_rules_that_read_them(monkeypatch, tmp_path):
    populations = trained(SMALL, "own-prefix-seeds-0-0", monkeypatch, tmp_path)
    members = [member for population in populations for member in population.members]
    assert {member.frictions.replaced for member in members} == {None}
    assert {member.series.rsplit(", ", 1)[0] for member in members} == {
        "PG by token ratio",
        "PPO",
        "IS-PG cap 10",
    }
    assert {member.setting for member in members} == {0.1, SMALL.length}
    assert {member.frictions.delay for member in members} == {0, SMALL.together.delay}


def test_the_parts_cover_every_seed_once_and_the_first_of_each_kind_come_first():
    chosen = Settings()
    names = [part.name for part in run.parts(chosen)]
    assert names[:2] == ["each-prefix-seeds-0-4", "together-prefix-seeds-0-4"]
    for kind in ("each", "together", "own"):
        for reward in ("prefix", "bag"):
            own = [name for name in names if name.startswith(f"{kind}-{reward}-")]
            assert own == [f"{kind}-{reward}-seeds-0-4", f"{kind}-{reward}-seeds-5-9"]
    first_again = names.index("each-prefix-seeds-5-9")
    assert {run.without_seeds(name) for name in names[:first_again]} == {
        run.without_seeds(name) for name in names
    }


def test_a_part_trains_its_own_seeds(monkeypatch, tmp_path):
    chosen = Settings(lengths=(2,), num_seeds=3, seeds_per_part=2, long_lengths=(3,))
    (population,) = trained(chosen, "together-prefix-seeds-2-2", monkeypatch, tmp_path)
    assert {member.seed for member in population.members} == {2}


def test_the_work_of_a_part_is_its_members_steps_at_the_pace():
    by_name = {part.name: part.work for part in run.parts(Settings())}
    members = len(run.methods(Settings())) * 15 * 5
    assert_close(by_name["each-bag-seeds-0-4"], members * 10_000 / run.PACE)


def test_the_length_of_the_sweeps_is_among_those_of_all_together():
    for chosen in (Settings(), SMALL):
        assert chosen.length in chosen.lengths
        for sweep in run.sweeps(chosen).values():
            assert list(sweep.strengths) == sorted(sweep.strengths)


def test_the_whole_study_runs_draws_and_fills_the_page(small):
    found, table, out = small
    assert {"error-by-friction-prefix", "all-frictions-bag", "why-bugs"} <= set(found.figures)
    assert set(found.captions) == set(found.figures)
    assert {"online error", "learner error", "diverged"} <= set(table["metric"])
    series = {line.series for line in found.headline}
    assert {*run.methods(SMALL), "lowest of the others / DG", "DG / PPO"} <= series
    for line in found.headline:
        assert line.expected is None
    made = page.tables(page_tables.read(out / runner.HEADLINE), SMALL)
    assert "Not run yet." not in made.values()
    places = ("each", "together", "samples", "steps", "own")
    assert set(made) == {"why", *(f"{p} {r}" for p in places for r in ("prefix", "bag"))}
    assert all(
        "(0/1)" in made[name] or "(1/1)" in made[name]
        for name in made
        if not name.startswith(("samples", "steps"))
    )


def test_a_run_that_was_stopped_is_analysed_by_what_it_has(small):
    _, table, _ = small
    some = table[table["part"].isin(["each-prefix-seeds-0-0"])]
    found = analysis.analyse(some, SMALL)
    assert list(found.figures) == ["error-by-friction-prefix"]


def test_the_page_has_a_place_for_every_table_whatever_was_run():
    root = Path(__file__).parents[3]
    text = (root / "docs/results/studies/reversal-frictions.md").read_text("utf-8")
    nothing = pd.DataFrame({"metric": [], "x": [], "series": []})
    made = page.tables(nothing, Settings())
    assert set(made.values()) == {"Not run yet."}
    assert page_tables.fill(text, made).count("Not run yet.") == len(made) == 11


def test_the_end_is_the_mean_of_the_last_tenth():
    ends = ([0.2, 0.4], [0.0, 0.02], [0.04, 0.08])
    table = looked_at({(4, seed): [1.0] * 18 + end for seed, end in enumerate(ends)})
    found = errors.at_end(table, PART, "DG", 4)
    assert_close(found.mean, (0.3 + 0.01 + 0.06) / 3)
    assert found.seeds == 3
    assert_close(errors.solved(table, PART, "DG", 4).mean, 1 / 3)


def test_a_ratio_has_the_relative_errors_of_both_and_never_less_than_can_be_told():
    found = errors.ratio(Estimate(0.4, 0.08, 3), Estimate(0.02, 0.002, 5), 0.001)
    assert_close(found.mean, 20.0)
    assert_close(found.se, 20 * math.sqrt(0.2**2 + 0.1**2))
    assert found.seeds == 3
    assert_close(errors.ratio(Estimate(0.0), Estimate(0.0), 0.001).mean, 1.0)
    assert_close(errors.ratio(Estimate(0.4), Estimate(0.0), 0.001).mean, 400.0)
    assert math.isnan(errors.ratio(Estimate(0.4), Estimate(0.1), 0.001).se)


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        # 0.6 - 5 x 0.05 = 0.35, its standard error hypot(0.1, 5 x 0.02) = 0.1414.
        (Estimate(0.6, 0.1, 9), Estimate(0.05, 0.02, 9), "matches"),
        (Estimate(0.6, 0.16, 9), Estimate(0.05, 0.02, 9), "noisy"),
        (Estimate(0.2, 0.1, 9), Estimate(0.11, 0.02, 9), "differs"),
        (Estimate(0.3, 0.1, 9), Estimate(0.11, 0.02, 9), "noisy"),
        # Neither makes an error that can be told from none.
        (Estimate(0.0, 0.0, 9), Estimate(0.0, 0.0, 9), "noisy"),
        (Estimate(1e-4, 0.0, 9), Estimate(5e-5, 0.0, 9), "noisy"),
        (Estimate(0.0, 0.0, 9), Estimate(0.1, 0.0, 9), "differs"),
        # Of single seeds nobody knows the error.
        (Estimate(0.6), Estimate(0.1), "noisy"),
    ],
)
def test_tenfold_is_judged_by_the_difference_to_five_times_dgs_error(theirs, ours, verdict):
    assert claim_lines.tenfold(theirs, ours, 1e-4) == verdict


def test_samples_are_counted_to_the_first_fall_and_all_of_them_where_there_is_none():
    table = looked_at({(4, 0): [0.4, 0.1, 0.3], (4, 1): [0.5, 0.4, 0.3]})
    found = compute.costs(table, PART, "DG", 0.2, setting=4)
    assert found[0].reached
    assert_close(found[0].samples, 100 + 100 * 0.5)  # half of the way in logarithms
    assert found[1] == Cost(300.0, False)


@pytest.mark.parametrize(
    ("theirs", "ours", "ratio", "words"),
    [
        ([(1000, True), (100, True)], [(100, True), (100, True)], math.sqrt(10), ""),
        ([(1000, False), (100, True)], [(100, True), (100, True)], math.sqrt(10), "at least"),
        ([(100, True)], [(1000, False)], 0.1, "at most"),
        ([(1000, False)], [(1000, False)], 1.0, "either side"),
    ],
)
def test_the_ratio_is_a_geometric_mean_and_says_which_bound_it_is(theirs, ours, ratio, words):
    costs = [{n: Cost(*cost) for n, cost in enumerate(each)} for each in (theirs, ours)]
    found = compute.ratio(compute.gains(*costs).values())
    assert_close(found.estimate.mean, ratio)
    assert found.words == words
    if len(theirs) == 2:  # logs 1 and 0: standard error 1/2
        assert_close(found.estimate.se, ratio * math.log(10) / 2)


@pytest.mark.parametrize(
    ("larger", "smaller", "verdicts"),
    [
        (False, False, ["matches", "differs", "noisy"]),
        (True, False, ["matches", "noisy", "noisy"]),
        (False, True, ["noisy", "differs", "noisy"]),
        (True, True, ["noisy", "noisy", "noisy"]),
    ],
)
def test_what_a_bound_cannot_tell_is_open(larger, smaller, verdicts):
    found = Bounded(Estimate(1.0), larger, smaller)
    assert [found.verdict(own) for own in ("matches", "differs", "noisy")] == verdicts


def test_the_slope_is_that_of_least_squares_and_bounds_turn_with_its_factors():
    lengths, rng = (4.0, 6.0, 10.0), np.random.default_rng(0)
    logs = rng.normal(size=(3, 2))
    gains = {
        x: {seed: Gain(logs[n, seed], False, False) for seed in range(2)}
        for n, x in enumerate(lengths)
    }
    slopes = [np.polyfit(lengths, logs[:, seed], 1)[0] for seed in range(2)]
    found = compute.slope(gains)
    assert_close(found.estimate.mean, float(np.mean(slopes)))
    assert_close(found.estimate.se, abs(slopes[0] - slopes[1]) / 2)
    assert found.words == ""

    def bounded(x, *, larger, smaller):
        changed = {seed: gain._replace() for seed, gain in gains[x].items()}
        changed[0] = Gain(changed[0].log10, larger, smaller)
        return compute.slope(gains | {x: changed}).words

    assert bounded(10.0, larger=True, smaller=False) == "at least"
    assert bounded(10.0, larger=False, smaller=True) == "at most"
    assert bounded(4.0, larger=True, smaller=False) == "at most"
    assert bounded(4.0, larger=False, smaller=True) == "at least"
    assert compute.slope({x: gains[x] for x in lengths[:2]}) is None


def test_growth_is_judged_over_the_lengths_that_dg_always_reaches():
    paid = {4.0: {0: Cost(1, True)}, 6.0: {0: Cost(1, True), 1: Cost(9, False)}}
    assert compute.always_reached(paid) == [4.0]


def together_table(full, errors_of, *, steps=10, seeds=3):
    """All seeds of all methods at all lengths: {(series, length): errors by look}."""
    rows = [
        Record(PART, name, x, seed, step * 1000, step * 1000, 1, metric, value)
        for (name, x), values in errors_of.items()
        for seed in range(seeds)
        for step, look in zip(range(1, steps + 1), values, strict=True)
        for metric, value in (("learner error", look * (1 + seed / 100)), ("diverged", 0.0))
    ]
    return table_of(rows, part=PART)


def falls_at(place, *, to=0.0, steps=10):
    """Errors that are 0.9 before a look, and `to` from it on."""
    return [0.9 if step < place else to for step in range(1, steps + 1)]


def test_the_claims_are_judged_at_full_size():
    full = Settings(lengths=(4, 6, 10), long_lengths=(10,), targets=(0.25,))
    table = together_table(
        full,
        {
            (name, x): falls_at({"DG": 1, "DG-K 3%": 1, "PPO": x}.get(name, 11), to=0.001)
            for name in run.methods(full)
            for x in full.lengths
        },
    )
    found = analysis.analyse(table, full)
    lines = {(line.series, line.metric, line.x): line for line in found.headline}
    error = lines["PG / DG", "learner error, prefix, all frictions", 10.0]
    assert (error.expected, error.against, error.verdict) == (10.0, "abstract", "matches")
    assert_close(error.ours, 900.0)
    best = lines["lowest of the others / DG", "learner error, prefix, all frictions", 10.0]
    assert_close(best.ours, 1.0)
    assert best.verdict == "differs"
    never = lines["PG / DG, at least", "samples to 25%, prefix, all frictions", 10.0]
    assert_close(never.ours, 10.0)  # all 10,000 samples over 1,000
    assert never.verdict == "matches"
    metric = "log10 of samples to 25% per token of H, prefix, all frictions"
    order = lines["no growth < PPO / DG", f"order of {metric}", "H 4 6 10"]
    assert order.verdict == "matches"
    # PG never gets there at any length: its slope of 0 may be anything.
    order = lines["no growth < PG / DG", f"order of {metric}", "H 4 6 10"]
    assert order.verdict == "noisy"
    told = " ".join(found.findings)
    assert "PG / DG at least 10" in told
    assert "(met)" in told
    at_step = "learner error at a step, prefix, all frictions, H = 10"
    shown = {
        x: line.ours
        for (name, metric, x), line in lines.items()
        if (name, metric) == ("PPO", at_step)
    }
    # PPO falls at the tenth look; the seeds' errors are 1, 1.01 and 1.02 times that of the first.
    assert list(shown) == [2000, 4000, 6000, 10_000]
    assert_close(list(shown.values()), [0.909, 0.909, 0.909, 0.00101])


def test_the_abstract_says_nothing_of_no_friction():
    alone = Settings(delays=(30,), bugs=(), corruptions=(), discoveries=())
    part = run.of(run.EACH, "prefix")
    rows = [
        Record(
            part,
            run.named(name, cell.friction),
            cell.strength,
            seed,
            10_000,
            1,
            1,
            "learner error",
            error,
        )
        for cell in run.cells(alone)
        for name in run.methods(alone)
        for seed in range(3)
        for error in [0.01 if name == "DG" else 0.5 + seed / 100]
    ]
    lines = claim_lines.each_lines(table_of(rows, part=part), alone, "prefix")
    judged = {line.metric.rpartition(", ")[2] for line in lines if line.against == "abstract"}
    assert judged == {"staleness"}
    factors = [line for line in lines if line.series == "PG / DG"]
    assert [(line.x, line.verdict) for line in factors] == [(0.0, ""), (30, "matches")]


def test_the_longest_lengths_are_judged_where_longer_ones_were_tried():
    errors_of = {
        (name, x): falls_at(1 if name == "DG" or x == 4 else 11)
        for name in run.methods(Settings())
        for x in (4, 10)
    }
    for longer, expected in (((10,), 2.0), ((14,), None)):
        full = Settings(lengths=(4, 10), long_lengths=longer, targets=(0.25,))
        found = analysis.analyse(together_table(full, errors_of), full)
        metric = "longest H with error below 25%, prefix, all frictions"
        by_name = {line.series: line for line in found.headline if line.metric == metric}
        assert by_name["DG"].ours == 10
        assert by_name["DG / PG"].expected == expected
        assert by_name["DG / PG"].verdict == ("matches" if expected else "")


def test_a_length_is_solved_below_a_quarter_and_between_lengths_interpolated():
    table = looked_at({(4, 0): [0.05], (8, 0): [0.45], (4, 1): [0.9], (8, 1): [0.9], (8, 2): [0.0]})
    found = claim_lines.longest(table, PART, "DG")
    assert found.seeds == 2  # the third seed was run at one length alone
    # Below the shortest length the error falls to nothing, as in the other studies of reversal.
    assert_close(found.mean, (4 + 4 * 0.2 / 0.4 + 4 * 0.25 / 0.9) / 2)


def lengths_lines(errors_by_method, *, seeds=3):
    """The lines about the longest length, of {method: {length: error}}; others err by 0.9."""
    full = Settings(lengths=(4, 10), long_lengths=(10,), targets=(0.25,))
    errors_of = {
        (name, x): [errors_by_method.get(name, {}).get(x, 0.9)] * 10
        for name in run.methods(full)
        for x in (4, 10)
    }
    found = analysis.analyse(together_table(full, errors_of, seeds=seeds), full)
    metric = "longest H with error below 25%, prefix, all frictions"
    (claim,) = (
        each
        for each in found.claims
        if "twice as long" in each.statement and each.statement.startswith("prefix")
    )
    return {line.series: line for line in found.headline if line.metric == metric}, claim


def test_dg_is_not_longer_where_nobody_solves_anything():
    lines, claim = lengths_lines({"DG": {4: 0.3}})
    # DG's error at the shortest length is a third of the others', but none of them solves it.
    assert_close(lines["DG / PG"].ours, 3.0, dtype=torch.float32)
    assert {lines[f"DG / {name}"].verdict for name in ("PG", "PPO")} == {"noisy"}
    assert claim.verdict == "open"
    lines, claim = lengths_lines({"DG": {4: 0.0, 10: 0.0}})
    assert lines["DG / PG"].verdict == "matches"
    assert claim.verdict == "met"
    lines, claim = lengths_lines({name: {4: 0.0} for name in run.methods(Settings())})
    assert claim.verdict == "missed"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"), [(0.0, 0.0, math.nan), (4.0, 0.0, math.inf), (6.0, 2.0, 3.0)]
)
def test_no_length_over_no_length_is_no_number(ours, theirs, expected):
    found = claim_lines.times_as_long(Estimate(ours, 0.1, 5), Estimate(theirs, 0.1, 4))
    assert math.isclose(found.mean, expected) or math.isnan(expected) == math.isnan(found.mean)
    assert found.seeds == 4


def test_two_seeds_are_too_few_for_any_claim():
    lines, claim = lengths_lines({"DG": {4: 0.0, 10: 0.0}}, seeds=2)
    assert lines["DG / PG"].verdict == "noisy"
    assert claim.verdict == "open"
    assert Settings().long_seeds >= 3


@pytest.mark.parametrize(("setting", "length"), [(4, 4), (25, 25), (30, None)])
def test_the_least_error_is_one_wrong_token_in_all_that_the_end_averages(setting, length):
    seeds, late = 3, 2
    looks = {(setting, seed): [0.5] * 18 + [0.0, 0.0] for seed in range(seeds)}
    looks[setting, 1][-1] = 1 / (Settings().test_prompts * (length or 10))
    table = looked_at(looks)
    found = errors.least_error(table, Settings(), PART, "DG", setting, length=length)
    assert_close(found, 1 / (seeds * late * 500 * (length or 10)))
    assert_close(found, errors.at_end(table, PART, "DG", setting).mean)


def test_the_log_axes_have_labels_though_bars_reach_to_zero():
    chosen = Settings(delays=(30,), bugs=(0.1,), corruptions=(0.1,), discoveries=(0.1,))
    # Over two seeds the bar of (0, e) is e/2 ± e/2; that of PG, which makes no mistake, is 0 ± 0.
    errors_of = {"PG": (0.0, 0.0), "DG": (0.0, 0.0004)}
    rows = [
        Record("each-prefix", run.named(name, kind), x, seed, 4000, 1, 1, metric, value)
        for name in run.methods(chosen)
        for kind, x, _ in run.cells(chosen)
        for seed, error in enumerate(errors_of.get(name, (0.0, 0.9)))
        for metric, value in (("learner error", error), ("diverged", 0.0))
    ]
    found = analysis.analyse(table_of(rows, part="each-prefix"), chosen)
    figure = found.figures["error-by-friction-prefix"]
    FigureCanvasAgg(figure).draw()
    least = 1 / (2 * 500 * 10)
    assert len(figure.axes) == 4
    for ax in figure.axes:
        low, high = ax.get_ylim()
        assert least / 2 < low < least
        assert 1 < high < 2
        shown = {tick.label1.get_text() for tick in ax.yaxis.get_major_ticks()}
        assert {"0.01%", "0.1%", "1%", "10%", "100%"} <= shown
        drawn = {box.get_label(): box.lines[0].get_ydata() for box in ax.containers}
        assert len(drawn) == len(run.methods(chosen))
        assert_close([float(y) for y in drawn["PG"]], [least, least])
        assert_close([float(y) for y in drawn["DG"]], [0.0002, 0.0002])


def test_a_gate_that_is_told_of_bugs_weighs_them_by_the_sign_of_their_advantage():
    values = torch.tensor([[1.0, 2.0, -1.0, -2.0, 3.0, -3.0]])  # three rows of two tokens
    bug = torch.tensor([[False, True, True]])
    mask = torch.ones_like(values, dtype=torch.bool)

    def weights(**options):
        told = adapter_of(bug_rows.TellsBugs(**options)).bind(bug)
        return told.choose(values, mask).weight[0].tolist()

    soft = [1 / (1 + math.exp(-value)) for value in values[0].tolist()]
    assert_close(weights(eta=1.0), soft, dtype=torch.float32)
    assert_close(weights(eta=1.0, successes=0.0), [*soft[:4], 0.0, soft[5]], dtype=torch.float32)
    assert weights(failures=0.0) == [1, 1, 0, 0, 1, 0]
    assert weights(eta=1.0, successes=1.0, failures=1.0)[2:] == [1.0] * 4


def test_failed_bugs_are_kept_beside_the_best_rows():
    values = torch.tensor([[5.0, 1.0, -1.0, -2.0]])
    bugs = torch.tensor([[False, True, False, True]])
    gate = adapter_of(bug_rows.AddsFailedBugs(rate=0.25)).bind(bugs)
    choice = gate.choose(values, torch.ones_like(values, dtype=torch.bool))
    assert choice.keep.tolist() == [[True, False, False, True]]
    assert choice.weight.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_gates_that_want_bugs_say_so_where_there_are_none():
    population = toys.population(
        toys.sequence_program(), [toys.member(Arm(unit="token", gate=bug_rows.TellsBugs(1.0)))]
    )
    with pytest.raises(ValueError, match="frictions must have bugs"):
        population.begin_step()


def test_the_shares_of_bugs_are_those_of_a_count_by_hand():
    rules = (Arm(), Arm(unit="token", gate=bug_rows.TellsBugs(1.0, failures=0.0)))
    members = [toys.member(rule, frictions=Frictions(bug=0.5)) for rule in rules]
    population = toys.population(toys.sequence_program(), members)
    population.begin_step()
    found = bug_rows.shares(population)
    rolled = population.rolled
    for number, member in enumerate(population.members):
        up = down = total = 0.0
        for row in range(12):
            group = rolled["rewards"][number, row // 4]
            good = float(group[row % 4]) - float(group.mean())
            for log_prob in rolled["log_probs"][number, row].tolist():
                push = good * (1 - math.exp(log_prob))
                is_bug = bool(rolled["bug"][number, row])
                if member.arm.gate is not None:
                    push *= 0 if is_bug and good < 0 else 1 / (1 + math.exp(good * log_prob))
                total += abs(push)
                up += max(push, 0) * is_bug
                down += max(-push, 0) * is_bug
        assert_close(found["push of bugs that succeed"][number], up / total, dtype=torch.float32)
        assert_close(found["push of bugs that fail"][number], down / total, dtype=torch.float32)


def test_a_number_of_seeds_holds_for_every_part():
    chosen = settings("full", 4)
    assert (chosen.num_seeds, chosen.long_seeds, chosen.why_seeds) == (4, 4, 4)
