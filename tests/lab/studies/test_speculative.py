import copy
import csv
import dataclasses
import math

import pytest
import torch

import kondo
from kondo_lab.evidence import progress, records, runner
from kondo_lab.evidence.statistics import Cost, Reach
from kondo_lab.evidence.study import Estimate, Headline
from kondo_lab.studies.speculative import STUDY, analysis, claims, draft_agreement, drafts, points
from kondo_lab.studies.speculative.run import logged
from kondo_lab.studies.speculative.settings import settings
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything
from lab.made_up import Record, table_of
from lab.studies import toy
from lab.training import toys
from tolerances import assert_close

FULL = settings("full", None)
RATE = 0.25
EXACT = Arm(gate=kondo.Gate(rate=RATE))


def quick(size, num_seeds):
    """The small size, cut to a few steps."""
    return dataclasses.replace(
        settings(size, num_seeds), num_steps=20, target=0.95, linear_points=4, log_points=4
    )


def compared(*arms, seeds=(0, 1)):
    members = [toys.member(arm, seed=seed) for arm in arms for seed in seeds]
    program = toys.bandit_program()
    return draft_agreement.ComparedPopulation(program, members, device=toys.CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("speculative") / "run"
    study = dataclasses.replace(STUDY, settings=quick)
    runner.run(toy.order(out, study), progress.make_console())
    return out


@pytest.mark.parametrize(
    ("kept", "delight", "share"),
    [
        ([1, 1, 0, 0], [5.0, 4.0, 3.0, -1.0], 1.0),
        ([1, 0, 1, 0], [5.0, 4.0, 3.0, -1.0], 0.5),
        ([0, 0, 1, 1], [5.0, 4.0, 3.0, -1.0], 0.0),
        ([1, 0, 1, 0], [5.0, 4.0, 4.0, -1.0], 1.0),  # whichever of the equal rows
        ([1, 0, 0, 0], [5.0, 4.0, 3.0, -1.0], 0.5),  # keeps fewer
        ([1, 1, 0, 0], [5.0, 0.0, 0.0, 0.0], 0.5),  # the exact screen keeps fewer
        ([0, 0, 0, 0], [0.0, 0.0, 0.0, 0.0], 1.0),
    ],
)
def test_overlap_is_the_share_of_rows_the_exact_screen_keeps(kept, delight, share):
    found = draft_agreement.overlap(torch.tensor([kept]).bool(), torch.tensor([delight]), 0.5)
    assert_close(found, torch.tensor([share]))


def test_the_exact_screen_agrees_with_itself():
    population = compared(EXACT)
    for _ in range(10):
        population.step()
    assert population.read_agreement().tolist() == [1.0, 1.0]


def test_agreement_is_the_mean_overlap_since_the_last_reading():
    by_advantage = Arm(gate=kondo.Gate(rate=RATE, signal=kondo.signals.advantage))
    old = Arm(gate=kondo.Gate(rate=RATE), screen="stale", draft=50)
    population = compared(by_advantage, old)
    for steps in (6, 4):
        by_hand = torch.zeros(4)
        for _ in range(steps):
            population.step()
            rolled = population.rolled
            pi = rolled["distribution"].exp()
            advantages = (rolled["rewards"] - pi.square().sum(dim=2, keepdim=True)).squeeze(2)
            delight = -advantages * rolled["log_probs"].squeeze(2)
            for number in range(4):
                kept = toys.decision_of(population, number)[1].squeeze(1) > 0
                third = delight[number].sort(descending=True).values[2]
                by_hand[number] += int((delight[number][kept] >= third).sum()) / 3
        found = population.read_agreement()
        assert_close(found, by_hand / steps)
        assert float(found.min()) < 1


def test_agreement_survives_a_stop():
    whole, first, second = (
        compared(Arm(gate=kondo.Gate(rate=RATE), logit_noise=2.0)) for _ in "abc"
    )
    for _ in range(7):
        whole.step()
    for _ in range(4):
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(3):
        second.step()
    assert second.read_agreement().tolist() == whole.read_agreement().tolist()


def test_only_gates_of_one_size_are_compared():
    with pytest.raises(ValueError, match=r"keep a fixed count.*got \['Every.*', 'Gate\(price.*'\]"):
        compared(
            EXACT, Arm(unit="token", gate=Everything(eta=1.0)), Arm(gate=kondo.Gate(price=0.0))
        )
    plain = toys.population(toys.bandit_program(), [toys.member(Arm())])
    assert draft_agreement.probe(plain) == {}


def test_costs_of_the_screens():
    cost = {screen.series: screen.cost for screen in drafts.screens(FULL)}
    assert len(cost) == 1 + 3 + 3 + 3 + 4 + 3 + 1
    assert (cost["exact"], cost["100 steps old"], cost["advantage only"]) == (1, 1, 0)
    assert (cost["8 bits"], cost["2 bits"]) == (0.25, 0.0625)
    assert math.isnan(cost["noise 1"])
    assert math.isnan(cost["noise 1, surprisal alone"])
    forward = (784 * 16 + 16 * 16 + 16 * 10) / (784 * 100 + 100 * 100 + 100 * 10)
    assert cost["width 16"] == pytest.approx(3 * forward)


def test_every_screen_has_members_at_a_rate():
    members = drafts.gated(FULL, 0.03)
    found = {member.series: member.arm for member in members}
    assert len(found) == 18
    assert len({(m.series, m.seed) for m in members}) == len(members) == 180
    assert all(m.setting == 0.03 == m.arm.gate.rate and m.arm.kind == "top" for m in members)
    assert found["exact"] == Arm(gate=kondo.Gate(rate=0.03))
    assert (found["noise 0.3"].logit_noise, found["noise 0.3"].screened) == (0.3, "both")
    alone = found["noise 0.3, surprisal alone"]
    assert (alone.logit_noise, alone.screened) == (0.3, "surprisal")
    assert (found["10 steps old"].screen, found["10 steps old"].draft) == ("stale", 10)
    assert (found["3 bits"].screen, found["3 bits"].draft) == ("quantised", 3)
    assert (found["width 32"].screen, found["width 32"].draft) == ("narrow", 32)
    assert found["advantage only"].gate.signal is kondo.signals.advantage
    assert {(m.series, m.arm.kind) for m in drafts.dense(FULL)} == {
        ("PG", "dense"),
        ("DG", "soft"),
    }


def test_the_cost_to_a_target_counts_the_screen_and_the_kept_rows():
    screen = drafts.Screen("8 bits", "quantised", {}, 0.25)
    nothing = Estimate(0.0, 0.0, 1)
    reach = Reach({0: Cost(1000.0, 30.0), 1: Cost(2000.0, 60.0)}, 3)
    one = points.Point(screen, 0.03, nothing, nothing, nothing, nothing, reach)
    # A quarter of 1000 forwards, then 30 forwards and 30 backwards that cost 2 each; then twice it.
    assert one.cost(2) == Estimate(1.5 * 340, 0.5 * 340, 2)
    assert points.dense_cost(2, reach) == pytest.approx(Estimate(4500.0, 1500.0, 2))
    assert one._replace(reach=Reach({}, 3)).cost(2).mean == math.inf
    assert math.isnan(one._replace(screen=screen._replace(cost=math.nan)).cost(2).mean)


@pytest.fixture(scope="module")
def full_records():
    """Agreement 1 for the first tenth of the steps and then 0.5; errors halve every 1000 steps."""
    made = []
    cells = [(s.series, rate) for s in drafts.screens(FULL) for rate in FULL.rates]
    for series, rate in [*cells, ("PG", 1.0), ("DG", 1.0)]:
        half = 2000 if series == "PG" else 1000
        for seed in range(2):
            for step in logged(FULL):
                paid = 100 * step, round(100 * step * rate)
                values = dict.fromkeys(("online error", "test error"), 0.5 ** (step / half))
                if rate < 1:
                    values["kept agreement"] = 1.0 if step <= 1000 else 0.5
                made += [
                    Record("mnist", series, rate, seed, step, *paid, name, value)
                    for name, value in values.items()
                ]
    return table_of(made, part="mnist")


def test_the_analysis_tells_agreement_error_and_cost(full_records):
    found = analysis.analyse(full_records, FULL)
    lines = {(h.series, h.metric, h.x): h for h in found.headline}
    training = lines["8 bits", "kept agreement over training", 0.03]
    # Each value counts with its steps, though most values stand at the beginning.
    assert training.ours == pytest.approx(0.1 * 1 + 0.9 * 0.5)
    assert lines["8 bits", "kept agreement at the end", 0.03].ours == 0.5
    assert lines["8 bits", "test error at the end", 0.03].ours == pytest.approx(0.5**10)
    needed = 100 * 1000 * math.log2(20)
    cost = "counted cost to 5% test error, c = 2"
    assert lines["8 bits", cost, 0.1].ours == pytest.approx(needed * (0.25 + 3 * 0.1), rel=1e-3)
    assert lines["exact", cost, 0.03].ours == pytest.approx(needed * 1.09, rel=1e-3)
    assert lines["PG", cost, 1.0].ours == pytest.approx(2 * needed * 3, rel=1e-3)
    assert not any(series.startswith("noise") and metric == cost for series, metric, _ in lines)
    paper = lines["DG-K 3%", "online error", "1M forward passes"]
    assert (paper.figure, paper.expected, paper.ours) == (
        "Kondo Fig 1",
        0.0236,
        pytest.approx(0.5**10),
    )
    assert sum(h.expected is not None for h in found.headline) == 1
    assert "exact 55% / 0.0977%, noise 0.3 55% / 0.0977%, noise" in found.findings[0]
    least = "mnist, rate 3%: advantage only gets every seed to 5% test error for the least"
    assert found.findings[1].startswith(least)
    assert set(found.figures) == {"mnist-3", "mnist-10"}
    assert set(found.captions) == set(found.figures)


def line(series, metric, rate, ours, se=None, seeds=10):
    return Headline("beyond the paper", series, metric, rate, None, ours, se, seeds, "", "")


def test_a_screen_that_some_seeds_never_get_to_the_target_with_is_not_cheaper():
    kept, error, cost = (getattr(claims, name) for name in ("AGREED", "ERROR", "COST"))
    lines = [
        line("exact", error, 0.1, 0.02, 0.001),
        line("exact", cost, 0.1, 200.0, 9.0),
        *(line(f"{bits} bits", error, 0.1, 0.021, 0.001) for bits in (8, 5, 4, 2)),
        line("5 bits", cost, 0.1, 190.0, 9.0),  # within two standard errors of the difference
        line("8 bits", cost, 0.1, 60.0, 1.0),
        line("4 bits", cost, 0.1, 50.0, seeds=9),
        line("2 bits", cost, 0.1, math.inf, seeds=0),
        line("8 bits", kept, 0.1, 0.9, 0.01),
        line("4 bits", kept, 0.1, 0.6, 0.1),  # within two standard errors of one half
        line("exact", kept, 0.1, 1.0, 0.0),
    ]
    most, similar, cheaper = claims.claims(lines)
    assert most.verdict == "open"
    assert most.measured.endswith("4 bits at 0.1: 0.6 ± 0.1, expected 0.5, 1 too noisy to tell")
    assert similar.verdict == "met"
    assert cheaper.verdict == "missed"
    assert cheaper.measured.startswith(
        "1 of 4 match, 1 too noisy to tell, 2 differ: 4 bits at 0.1: 50"
    )


def test_a_screen_that_no_seed_gets_to_the_target_with_has_an_infinite_cost(full_records):
    lost = full_records["series"].eq("2 bits") & full_records["metric"].eq("test error")
    never = full_records.assign(value=full_records["value"].where(~lost, 0.5))
    cost = "counted cost to 5% test error, c = 2"
    found = {(h.series, h.x): h for h in analysis.analyse(never, FULL).headline if h.metric == cost}
    assert (found["2 bits", 0.1].ours, found["2 bits", 0.1].seeds) == (math.inf, 0)
    assert found["8 bits", 0.1].seeds == 2


def test_a_small_run_records_agreement_of_every_screen(folder):
    table = records.table(records.read(folder / runner.RECORDS))
    kept = table[table["metric"] == "kept agreement"]
    chosen = quick("small", None)
    assert set(kept["series"]) == {screen.series for screen in drafts.screens(chosen)}
    assert set(table["series"]) - set(kept["series"]) == {"PG", "DG"}
    assert kept["value"].between(0, 1).all()
    assert (kept[kept["series"] == "exact"]["value"] == 1).all()
    assert (kept[kept["series"] == "2 bits"]["value"] < 1).any()
    last = kept[kept["step"] == 20]
    assert set(last["backward"]) == {200}
    assert (folder / "digits-10.png").stat().st_size > 1000
    with (folder / runner.HEADLINE).open() as file:
        assert all(row["expected"] == "" for row in csv.DictReader(file))
