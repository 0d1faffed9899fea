import math

import pytest
import torch

from kondo_lab.evidence import progress, records, runner
from kondo_lab.studies import registry
from kondo_lab.studies import softmax_bandit as bandit
from kondo_lab.studies.contamination import run, theory
from kondo_lab.studies.contamination.settings import settings
from kondo_lab.tasks.draws import Draws
from lab.studies import toy
from tolerances import assert_close

SMALL = settings("small", None)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    out = tmp_path_factory.mktemp("runs") / "contamination"
    study = registry.find("contamination")
    outcome = runner.run(toy.order(out, study), progress.make_console())
    return outcome.analysis, records.table(records.read(out / runner.RECORDS))


def by_hand(delta, rho, num_arms, weight, nu):
    """The mean gradient and the true one, arm by arm in plain Python."""
    pi = [1 - delta] + [delta / (num_arms - 1)] * (num_arms - 1)
    mean, true = ([0.0] * num_arms for _ in range(2))
    for arm in range(num_arms):
        u = 0.5 if arm == 0 else -0.5
        drawn = (1 - rho) * pi[arm] + rho * nu[arm]
        for place in range(num_arms):
            score = (place == arm) - pi[place]
            mean[place] += drawn * weight(arm, pi[arm], u, drawn) * u * score
            true[place] += pi[arm] * u * score
    return mean, true


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def double(value):
    return torch.tensor([value], dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


WEIGHTS = {
    "PG": lambda arm, p, u, drawn: 1.0,
    "IS": lambda arm, p, u, drawn: p / drawn,
    "DG eta=1": lambda arm, p, u, drawn: sigmoid(u * -math.log(p)),
    "DG eta=0.25": lambda arm, p, u, drawn: sigmoid(4 * u * -math.log(p)),
}
SOURCES = {"one arm": [0, 1, 0, 0, 0], "all wrong arms": [0, 0.25, 0.25, 0.25, 0.25]}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("delta", "rho"), [(0.3, 0.1), (0.01, 0.3), (1e-4, 0.01)])
def test_closed_cosines_are_those_counted_arm_by_arm(name, kind, delta, rho):
    expected = cosine(*by_hand(delta, rho, 5, WEIGHTS[name], SOURCES[kind]))
    probs = bandit.peaked(1 - delta, 5)
    nu = theory.source(kind, 5)
    assert nu.tolist() == SOURCES[kind]
    drawn = theory.mixture(probs, nu, rho)
    weight = run.weights(SMALL, probs, drawn)[name]
    values = theory.advantages(5)
    found = theory.expected(probs, drawn, weight * values)
    assert_close(theory.cosine(found, theory.expected(probs, probs, values)), expected)
    if name == "IS":
        assert_close(expected, 1.0)
    else:
        success, failure = float(weight[0]), float(weight[1])
        closed = theory.closed_cosine(delta, rho, 5, success=success, failure=failure, kind=kind)
        assert_close(closed, expected)


def test_contamination_spread_evenly_points_along_the_true_gradient():
    assert_close(cosine(*by_hand(0.01, 0.5, 5, WEIGHTS["PG"], SOURCES["all wrong arms"])), 1.0)


def test_pg_has_a_limit_that_is_not_zero_and_dg_at_eta_1_the_same():
    for name in ("PG", "DG eta=1"):
        found = cosine(*by_hand(1e-13, 0.1, 5, WEIGHTS[name], SOURCES["one arm"]))
        assert abs(found - math.sqrt(5 / 8)) < 1e-4
    assert_close(theory.limit_cosine(5), math.sqrt(5 / 8))
    cold = cosine(*by_hand(1e-6, 0.1, 5, WEIGHTS["DG eta=0.25"], SOURCES["one arm"]))
    assert cold > 1 - 1e-9


@pytest.mark.parametrize("eta", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("prob", [0.9, 0.1, 1e-6])
def test_the_gate_on_a_failure_is_below_its_bound(eta, prob):
    gate = 1 / (1 + prob ** (-1 / (2 * eta)))
    found = theory.dg_weight(double(prob), double(-0.5), eta)
    assert_close(found[0], gate)
    assert gate < theory.gate_bound(prob, eta) < 2 * gate
    squared = theory.overlap(double(prob), torch.ones(1).double(), eta)
    assert gate**2 < squared


def test_signal_over_contamination_by_hand():
    delta, rho = 0.2, 0.25
    probs = bandit.peaked(1 - delta, 3)
    nu = theory.source("one arm", 3)
    own, _ = by_hand(delta, 0.0, 3, WEIGHTS["PG"], [0, 1, 0])
    foreign, _ = by_hand(delta, 1.0, 3, WEIGHTS["PG"], [0, 1, 0])
    expected = 0.75 * math.hypot(*own) / (0.25 * math.hypot(*foreign))
    assert_close(theory.signal_over_contamination(probs, nu, rho, torch.ones(3).double()), expected)


def test_the_second_moment_is_that_off_the_true_gradient():
    delta, num_arms = 0.1, 6
    probs = bandit.peaked(1 - delta, num_arms)
    drawn = theory.mixture(probs, theory.source("one arm", num_arms), 0.2)
    found = theory.failure_second_moment(probs, drawn, torch.full((num_arms,), 0.5).double())
    failures = 0.8 * delta + 0.2
    assert_close(found, failures * 0.25 * 0.25 * (num_arms - 2) / (num_arms - 1))


def test_samples_come_from_the_mixture():
    probs, nu = bandit.peaked(0.7, 4), theory.source("one arm", 4)
    actions = run.draw(Draws(range(4)), "x", probs, nu, 0.3, 50_000)
    drawn = theory.mixture(probs, nu, 0.3)
    for arm in range(4):
        share = float((actions == arm).double().mean())
        p = float(drawn[arm])
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / actions.numel())


def test_coefficients_of_the_losses_are_weight_times_advantage():
    probs = double([0.6, 0.1, 0.3])
    values = double([0.5, -0.5, -0.5])
    behaviour = double([0.3, 0.5, 0.2])
    for name, loss in run._losses(SMALL, behaviour.log()).items():
        if name not in WEIGHTS:
            continue
        expected = [
            WEIGHTS[name](arm, p, u, drawn) * u
            for arm, (p, u, drawn) in enumerate(
                zip(probs[0].tolist(), values[0].tolist(), behaviour[0].tolist(), strict=True)
            )
        ]
        found = run.coefficients(loss, probs.log(), values)
        assert_close(found[0], torch.tensor(expected, dtype=torch.float64))


def test_sampled_numbers_match_the_closed_forms(small):
    lines = [line for line in small[0].headline if line.expected is not None]
    exact = [line for line in lines if not line.metric.startswith("order of cosine")]
    assert len(exact) > 60
    assert {line.verdict for line in exact} == {"matches"}


def test_the_corollary_holds_of_the_signal_and_at_eta_1_not_of_the_cosine(small):
    verdicts = {
        line.metric: line.verdict for line in small[0].headline if "order of" in line.metric
    }
    for eta in ("0.25", "0.5", "1", "2"):
        assert verdicts[
            f"order of signal over contamination, DG eta={eta} / PG, as delta falls"
        ] == ("matches")
    assert verdicts["order of cosine, DG eta=0.25 / PG, as delta falls"] == "matches"
    assert verdicts["order of cosine, DG eta=1 / PG, as delta falls"] == "differs"


def test_sign_blind_weights_trade_and_dg_does_not(small):
    table = small[1][small[1]["part"] == "worlds"]
    found = table.pivot_table(index="series", columns="metric", values="value")
    dg = found.loc["DG eta=1"]
    for name in run.sign_blind(SMALL):
        kept = found.loc[name]
        assert kept[run.KEPT_SUCCESS] == kept[run.KEPT_FAILURE]
        better = kept[run.FAILURE] >= dg[run.FAILURE]
        assert not (better and kept[run.SUCCESS] > 0.1 * dg[run.SUCCESS])
    assert dg[run.KEPT_FAILURE] < 0.03
    assert dg[run.KEPT_SUCCESS] == 1
    assert found.loc["IS", run.SUCCESS] < 0.01 * dg[run.SUCCESS]


def test_over_many_contexts_pg_is_lost_and_dg_is_not(small):
    table = small[1]
    last = table[
        (table["metric"] == f"{run.COSINE}, 0.99 solved") & (table["setting"] == SMALL.errors[-1])
    ].set_index("series")["value"]
    assert last["PG"] < 0.4
    assert last["DG eta=1"] > 0.99


def test_every_figure_is_drawn(small):
    assert list(small[0].figures) == [
        "cosine-and-signal",
        "samples-and-second-moment",
        "sign-blind-weights",
        "many-contexts",
    ]
