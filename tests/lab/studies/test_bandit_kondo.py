import io
import math

import pytest
import torch
from rich.console import Console

from kondo_lab.evidence import runner
from kondo_lab.studies import registry
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.bandit_kondo import analysis, run
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    order = runner.Order(
        study=registry.find("bandit-kondo"),
        size="small",
        num_seeds=None,
        out=tmp_path_factory.mktemp("runs") / "bandit-kondo",
        device=torch.device("cpu"),
        command="kondo run bandit-kondo --small",
    )
    outcome = runner.run(order, Console(file=io.StringIO()))
    return outcome.analysis, order.out


def lines(analysis, **wanted):
    return [
        line
        for line in analysis.headline
        if all(getattr(line, field) == value for field, value in wanted.items())
    ]


def test_every_number_matches_the_proposition(small):
    differing = [line for line in small[0].headline if line.verdict == "differs"]
    # Eight seeds cross a threshold a little early or late, and have no standard error.
    assert {line.metric for line in differing} <= {"backward passes to cosine 0.95"}
    assert all(abs(line.ours / line.expected - 1) < 0.25 for line in differing)


@pytest.mark.parametrize(("p", "expected"), [(0.5, 0.687), (0.9, 0.815), (0.99, 0.872)])
def test_the_threshold_found_by_ranking_is_the_papers(small, p, expected):
    (line,) = lines(small[0], series="additive, K=10", x=p)
    assert (line.expected, round(line.ours, 3)) == (expected, expected)


@pytest.mark.parametrize("p", [0.9, 0.99])
@pytest.mark.parametrize("num_arms", [2, 100, 1000])
def test_the_threshold_is_found_to_the_last_halving(small, p, num_arms):
    (line,) = lines(small[0], series=f"additive, K={num_arms}", x=p)
    gap = math.log(p * (num_arms - 1) / (1 - p))
    assert_close(line.ours, gap / (1 + gap), torch.float32)  # files hold 6 digits


def test_delight_keeps_no_failure_before_a_success(small):
    (line,) = lines(small[0], series="delight")
    assert line.ours == 0


def test_the_gate_has_no_perpendicular_variance_and_pg_has_its_closed_form(small):
    (gated,) = [
        line
        for line in small[0].headline
        if line.series == "DG-K price 0" and line.metric.startswith("perpendicular")
    ]
    assert gated.ours == 0
    for line in lines(small[0], metric="perpendicular variance", series="PG, K=10"):
        expected = (1 - line.x) * 0.25 * 8 / 9
        assert abs(line.ours - expected) < 5 * line.se + 1e-12
        assert line.ours > 0.01


def test_pb_backward_passes_are_paid(small):
    for line in lines(small[0], metric="backward passes of a batch of 100"):
        assert abs(line.ours - 100 * line.x) < 5 * line.se


def test_the_run_leaves_figures_and_tables(small):
    names = {path.name for path in small[1].iterdir()}
    assert {"prop1-cosine.png", "headline.csv", "curves.csv.gz", "manifest.json"} <= names


def test_stopped_early_the_parts_that_are_there_are_analysed(small):
    from kondo_lab.evidence import records

    table = records.table(records.read(small[1] / "runs.jsonl.gz"))
    settings = registry.find("bandit-kondo").settings("small", None)
    found = analysis.analyse(table[table["part"] == "ranking"], settings)
    assert set(found.figures) == {"prop2-mixing-threshold"}


def test_closed_forms_are_the_sums_they_stand_for():
    """Over arms, with no algebra: perpendicular variance, and the cosine gap's leading term."""
    p, num_arms, b = 0.3, 5, 0.4
    probs = [p] + [(1 - p) / 4] * 4
    score = [[(a == k) - probs[k] for k in range(num_arms)] for a in range(num_arms)]
    true = [p * s for s in score[0]]
    length = sum(t * t for t in true)
    off = 0.0
    for a in range(num_arms):
        u = (a == 0) - b
        along = sum(u * s * t for s, t in zip(score[a], true, strict=True)) / length
        rest = [u * s - along * t for s, t in zip(score[a], true, strict=True)]
        off += probs[a] * sum(r * r for r in rest)
    assert_close(bandit.perpendicular_variance(p, num_arms, b), off)
    assert_close(bandit.pg_cosine_gap(p, num_arms, b, 50), off / (2 * 50 * length))


def test_a_gradient_is_the_mean_of_scores():
    probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    found = bandit.gradient(torch.tensor([[2.0, -1.0]]), torch.tensor([[0, 2]]), probs)
    # (2 (e_0 - pi) - (e_2 - pi)) / 2 = (2 e_0 - e_2 - pi) / 2
    assert_close(found, torch.tensor([[0.75, -0.15, -0.6]], dtype=torch.float64))


def test_actions_fall_where_the_uniform_number_does():
    probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    uniform = torch.tensor([[0.1, 0.49, 0.51, 0.79, 0.81, 0.999]])
    assert bandit.draw_actions(probs, uniform).tolist() == [[0, 0, 1, 1, 2, 2]]


def test_the_cosine_gap_is_zero_along_half_turn_two_and_one_for_nothing():
    vectors = torch.tensor([[3.0, 0.0], [0.0, 1.0], [-2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    direction = torch.tensor([2.0, 0.0], dtype=torch.float64)
    assert bandit.cosine_gap(vectors, direction).tolist() == [0.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize(("p", "num_arms"), [(0.0, 3), (1.0, 3), (0.5, 1)])
def test_a_policy_gives_every_arm_some_probability(p, num_arms):
    with pytest.raises(ValueError, match="p must lie in"):
        bandit.peaked(p, num_arms)


def test_the_sigmoid_is_the_best_weight_and_what_the_gate_draws(small):
    own = lines(small[0], figure="Kondo Eq 1")
    assert {line.verdict for line in own} == {"matches"}
    (best,) = [line for line in own if line.metric.startswith("best weight")]
    assert best.ours == 0
    drawn = {(line.series, line.x): line.expected for line in own if "drawn" in line.metric}
    assert_close(drawn["eta=1, price=0", 1.0], 1 / (1 + math.exp(-1)))
    assert_close(drawn["eta=0.001, price=0", 0.3], 1.0)  # the hard rule
    assert_close(drawn["eta=1000, price=0", 3.0], 1 / (1 + math.exp(-0.003)))  # a constant gate
    assert not [x for _, x in drawn if x == 0]  # our gate never keeps these


@pytest.mark.parametrize(("delight", "price", "eta"), [(1.0, 0.0, 1.0), (-0.7, 0.5, 2.0)])
def test_the_best_weight_is_found_by_enumeration(delight, price, eta):
    expected = 1 / (1 + math.exp(-(delight - price) / eta))
    assert abs(run.best_weight(delight, price, eta, 10_000) - expected) < 1e-4
