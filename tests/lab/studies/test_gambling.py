import dataclasses
import io
import math

import numpy as np
import pytest
import torch
from rich.console import Console

import kondo
from kondo_lab.evidence import runner
from kondo_lab.studies import registry
from kondo_lab.studies.gambling import bandit, rules, run
from kondo_lab.training.record import Log
from tolerances import assert_close


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole study at small size, through the real runner."""
    order = runner.Order(
        study=registry.find("gambling"),
        size="small",
        num_seeds=None,
        out=tmp_path_factory.mktemp("runs") / "gambling",
        device=torch.device("cpu"),
        command="kondo run gambling --small",
    )
    outcome = runner.run(order, Console(file=io.StringIO()))
    return outcome.analysis, order.out


@pytest.fixture
def settings():
    return registry.find("gambling").settings("small", 2)


def phi(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def ours(analysis, series, metric, x):
    (line,) = [
        line
        for line in analysis.headline
        if (line.series, line.metric, line.x) == (series, metric, x)
    ]
    return line.ours


def test_luck_is_as_frequent_as_the_closed_form_says(small):
    found = [line for line in small[0].headline if line.metric == "Pr(U > 0 | bad arm)"]
    assert len(found) == 9
    for line in found:
        p = float(line.series.removeprefix("p="))
        expected = phi(-p / line.x) if line.x else 0.0
        assert_close(line.expected, expected)
        assert abs(line.ours - expected) < 0.03


def test_noise_on_one_arm_draws_the_gate_and_dg_to_it_but_not_pg(small):
    ends = {
        name: ours(small[0], name, "bad arms at the end, two-arms", 10.0)
        for name in ("PG", "DG", "DG-K price 0", "DG-K 3%")
    }
    assert ends["PG"] < 0.05
    assert min(ends["DG"], ends["DG-K price 0"], ends["DG-K 3%"]) > 0.8


def test_a_critic_holds_and_capping_surprisal_does_not(small):
    metric = "bad arms at the end, mitigations"
    assert ours(small[0], "price 0, critic gates and trains", metric, 10.0) < 0.1
    assert ours(small[0], "10%, surprisal capped at 0.5", metric, 10.0) > 0.8


def test_the_run_leaves_figures_and_tables(small):
    names = {path.name for path in small[1].iterdir()}
    assert {"noise-sweep.png", "many-arms.png", "mitigations.png", "headline.csv"} <= names


def h(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) - x * phi(-x)


@pytest.mark.parametrize("ratio", [0.7, 1.0, 2.0])
def test_the_gate_at_price_zero_rests_where_its_closed_form_is_zero(ratio):
    def above(chi):
        return (chi > 0).astype(float)

    bad = bandit.rest_point(above, 0.5, bad_noise=0.5 * ratio, good_noise=0.0)
    nearby = [1 / (1 + math.exp(-(math.log(bad / (1 - bad)) + move))) for move in (-0.1, 0.1)]
    pulls = [p - ratio * h((1 - p) / ratio) for p in nearby]  # in units of Delta
    assert pulls[0] * pulls[1] < 0


def test_the_gate_rests_on_the_bad_arm_alone_beyond_the_root_of_two_pi():
    def above(chi):
        return (chi > 0).astype(float)

    assert bandit.rest_point(above, 0.5, bad_noise=0.5 * 2.6, good_noise=0.0) == 1.0
    assert bandit.rest_point(above, 0.5, bad_noise=0.5 * 2.4, good_noise=0.0) < 0.97


def test_pg_rests_at_the_good_arm_and_a_gate_that_keeps_nothing_where_it_starts():
    assert bandit.rest_point(np.ones_like, 0.5, bad_noise=5.0, good_noise=0.0) == 0.0
    assert bandit.rest_point(np.zeros_like, 0.5, bad_noise=5.0, good_noise=0.0) == 0.5


@pytest.mark.parametrize("inverse_propensity", [False, True])
def test_a_reserve_takes_the_samples_with_the_highest_draws(inverse_propensity):
    # 10 of 20 in reserve, of which half: the five best for certain, then the highest draws.
    advantages = torch.linspace(-1, 2, 20).unsqueeze(0)
    uniform = torch.rand(1, 20, generator=torch.Generator().manual_seed(4))
    gate = kondo.Gate(rate=0.5, reserve=0.5, inverse_propensity=inverse_propensity)
    samples = batch(log_probs=torch.full((1, 20), -1.0), advantages=advantages, uniform=uniform)
    coefficients, paid = rules.Rule(name="", gate=gate).coefficients(samples)
    drawn = uniform[0, :15].topk(5).indices
    assert paid[0].nonzero().flatten().tolist() == sorted([*drawn.tolist(), *range(15, 20)])
    weight = (coefficients / advantages)[0]
    assert_close(weight[drawn], torch.full((5,), 3.0 if inverse_propensity else 1.0))
    assert_close(weight[15:], torch.ones(5))


FREE, DEAR = kondo.Gate(price=0.0), kondo.Gate(price=5.0)
BOTH_SIGNS = kondo.Gate(price=5.0, signal=kondo.signals.abs_delight)


def batch(**changes):
    samples = rules.Samples(
        log_probs=torch.tensor([[-0.1, -2.0, -2.0]]),
        advantages=torch.tensor([[0.1, 3.0, -3.0]]),
        uniform=torch.empty(0),
        critic=torch.tensor([[0.1, -0.4, -0.4]]),
        deviation=torch.tensor([[0.0, 2.0, 2.0]]),
    )
    return samples._replace(**changes)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (rules.PG, [0.1, 3.0, -3.0]),
        (rules.priced(0.0), [0.1, 3.0, 0.0]),
        (rules.Rule(name="", gate=FREE, signal=rules.by_critic), [0.1, 0, 0]),
        (rules.Rule(name="", gate=FREE, gate_signal=rules.by_critic), [0.1, 0, 0]),
        (
            rules.Rule(name="", gate=FREE, signal=rules.lower_confidence),
            [0.1, 1, 0],
        ),
        (
            rules.Rule(name="", gate=FREE, gate_signal=rules.lower_confidence),
            [0.1, 3.0, 0.0],
        ),
        (
            rules.Rule(name="", gate=FREE, signal=rules.scaled_by_noise),
            [0.1, 1, 0],
        ),
        (rules.Rule(name="", gate=FREE, signal=rules.clipped), [0.1, 1, 0]),
        (rules.Rule(name="", gate=BOTH_SIGNS), [0.0, 3.0, -3.0]),
        (rules.Rule(name="", gate=DEAR, surprisal_cap=0.5), [0.0, 0.0, 0.0]),
    ],
)
def test_rules_by_hand(rule, expected):
    coefficients, paid = rule.coefficients(batch())
    assert_close(coefficients, torch.tensor([expected]))
    assert paid.tolist() == [[value != 0 for value in expected]]


def test_dg_weighs_as_the_librarys_loss_does():
    samples = batch()
    log_probs = samples.log_probs.clone().requires_grad_()
    kondo.losses.dg(log_probs, samples.advantages).sum().backward()
    assert_close(rules.DG.coefficients(samples)[0], -log_probs.grad)


def test_history_has_each_arms_mean_and_deviation():
    history = run.History(1, 3, torch.device("cpu"))
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    history.add(torch.tensor([[0, 1, 1]]), rewards)
    history.add(torch.tensor([[1]]), torch.tensor([[6.0]], dtype=torch.float64))
    assert_close(history.mean(), torch.tensor([[1.0, 4.0, 13 / 4]], dtype=torch.float64))
    assert_close(history.deviation(), torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("rule", [rules.PG, *rules.mitigations()[4:7], rules.mitigations()[-1]])
def test_every_rule_draws_the_same_number_of_rewards(settings, rule):
    settings = dataclasses.replace(settings, steps=20)
    trainer = run.Trainer(settings, bandit.gamble(0.5), rule, (1.0,), torch.device("cpu"))
    assert trainer.num_actions * rule.repeats * trainer.num_steps == 20 * 100
    for _ in range(trainer.num_steps):
        trainer.step()
    log = Log("part")
    trainer.add_to(log, "series")
    assert {row["rollouts"] for run in log.runs() for row in run.curve} == {20 * 100}


def test_a_member_does_not_depend_on_who_runs_beside_it(settings):
    ends = []
    for ratios, seeds in (((3.0,), 1), ((0.0, 3.0), 2)):
        chosen = dataclasses.replace(settings, steps=15, seeds=seeds)
        trainer = run.Trainer(
            chosen, bandit.gamble(0.5), rules.rated(0.1), ratios, torch.device("cpu")
        )
        for _ in range(15):
            trainer.step()
        ends.append(trainer.logits[-seeds].detach())
    assert_close(ends[0], ends[1])


def test_arms_pay_their_mean_and_only_noisy_ones_more():
    arms = bandit.gamble(0.5, num_arms=3, gamblers=1)
    rewards = arms.rewards(
        torch.tensor([[0, 1, 2]]), torch.tensor([[2.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    )
    assert rewards.tolist() == [[1.0, 2.5, 0.5]]
    assert (arms.best, bandit.good_gamble(0.5).best) == (0, 1)


def test_as_many_gamblers_as_arms_is_an_error():
    with pytest.raises(ValueError, match="gamblers must be below"):
        bandit.gamble(0.5, num_arms=3, gamblers=3)


def test_a_landmine_is_the_last_arm_and_costs_its_penalty():
    arms = bandit.landmine(0.5, 1.0, num_arms=4)
    assert arms.means == (1.0, 0.5, 0.5, -0.5)
    assert arms.noisy == (False, False, False, True)
    assert arms.best == 0


def test_a_broken_actor_replaces_its_share_by_the_last_arm(settings):
    arms = bandit.landmine(0.5, 1.0, num_arms=4)
    trainer = run.Trainer(
        settings, arms, rules.PG, (0.0,), torch.device("cpu"), actor=run.Actor(bug=0.25)
    )
    spoilt = torch.cat([trainer._spoilt(torch.zeros(2, 100, dtype=torch.int64))])
    assert set(spoilt.unique().tolist()) == {0, 3}
    assert abs((spoilt == 3).double().mean().item() - 0.25) < 0.1
    honest = run.Trainer(settings, arms, rules.PG, (0.0,), torch.device("cpu"))
    assert not honest._spoilt(torch.zeros(2, 100, dtype=torch.int64)).any()


@pytest.mark.parametrize("fresh", [False, True])
def test_sampler_noise_is_fixed_or_fresh_and_leaves_the_learner_alone(settings, fresh):
    arms = bandit.gamble(0.5, num_arms=4, gamblers=0)
    actor = run.Actor(noise=1.0, fresh=fresh)
    trainer = run.Trainer(settings, arms, rules.PG, (0.0,), torch.device("cpu"), actor=actor)
    with torch.no_grad():
        probs = trainer.logits.softmax(dim=1)
        first = trainer._sampler(probs)
        trainer.done = 1
        second = trainer._sampler(probs)
    assert_close(first.sum(dim=1), torch.ones(2, dtype=torch.float64))
    assert (first - probs).abs().max() > 0.05
    assert torch.equal(first, second) != fresh
    assert_close(trainer.logits.detach(), torch.zeros_like(trainer.logits))


def test_actors_are_told_case_by_case(small):
    told = [sentence for sentence in small[0].findings if sentence.startswith("Actors, ")]
    assert len(told) == 2 + 2 * 2  # landmines; fixed and fresh noise of two strengths
    # Without noise a landmine is shunned by all; a lucky one draws the gate to it, not PG.
    metric = f"{run.FINAL}, actors"
    assert ours(small[0], "DG-K price 0, landmine", metric, 0.0) < 0.1
    assert ours(small[0], "DG-K price 0, landmine", metric, 10.0) > 0.5
    assert ours(small[0], "PG, landmine", metric, 10.0) < 0.1
