"""`kondo.DistributionPolicy` and screens of densities: the kept set, its gradient, errors."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

import kondo
from oracles import engine as oracle
from steps import run_step
from tolerances import assert_close

ROWS = 40
SPREAD = 0.1  # a normal so narrow that log-densities are positive near its mean


class Gaussian(nn.Module):
    """Observations [n, 3] -> two independent normals."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(3, 2)
        self.log_std = nn.Parameter(torch.full((2,), math.log(SPREAD)))

    def forward(self, observations):
        return Independent(Normal(self.mean(observations), self.log_std.exp()), 1)


def gaussian_problem():
    """Return a model, rows (observations, actions) and advantages, in float64."""
    torch.manual_seed(0)
    model = Gaussian().double()
    observations = torch.randn(ROWS, 3).double()
    with torch.no_grad():
        actions = model(observations).sample()
    return model, (observations, actions), torch.randn(ROWS).double()


def squared_distances(model, batch):
    """Sum of squared distances from the mean in standard deviations: twice the surprisal."""
    observations, actions = batch
    apart = (actions - model.mean(observations)) / model.log_std.exp()
    return apart.square().sum(1).detach()


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_gaussian_is_gated_by_its_distance_from_the_mode_and_has_the_dense_gradient():
    model, batch, advantages = gaussian_problem()
    log_probs = model(batch[0]).log_prob(batch[1])
    assert (log_probs > 0).any()  # what a plain function is refused for

    # surprisal = log pi(mode) - log pi(a) = half the squared distance
    chi = advantages * squared_distances(model, batch) / 2
    keep = oracle.keep_top(chi, torch.ones(ROWS, dtype=torch.bool), 0.2)
    wanted = oracle.gradients(model, oracle.dense_gated_loss(log_probs, advantages, keep, ROWS))

    report = run_step(
        kondo.DistributionPolicy(model), batch, advantages, gate=kondo.Gate(rate=0.2), micro_batch=3
    )
    assert (report.kept, report.rows_trained, report.rows_screened) == (8, 8, ROWS)
    for name, gradient in grads(model).items():
        assert_close(gradient, wanted[name])


def kept_prices(model, batch, advantages, **options):
    """Run one step; return its price and gradients."""
    model.zero_grad()
    report = run_step(
        kondo.DistributionPolicy(model), batch, advantages, gate=kondo.Gate(rate=0.2), **options
    )
    return report.price, grads(model)


def test_all_ways_to_name_the_mode_agree():
    model, batch, advantages = gaussian_problem()
    policy = kondo.DistributionPolicy(model)
    with torch.no_grad():
        log_probs, modes = policy.screen(batch)
    price, wanted = kept_prices(model, batch, advantages)
    chi = kondo.delight(log_probs, advantages, mode_log_probs=modes)
    assert price == pytest.approx(float(chi.sort(descending=True).values[7]))
    screens = {
        "pair": (log_probs, modes),
        "list": [log_probs, modes],
        "policy": policy,
        "its screen": policy.screen,
        "difference": log_probs - modes,
    }
    for name, screen in screens.items():
        found, gradient = kept_prices(model, batch, advantages, screen=screen)
        assert found == price, name
        for key, value in gradient.items():
            assert torch.equal(value, wanted[key]), name


def test_a_pair_works_with_a_plain_function_too():
    model, batch, advantages = gaussian_problem()
    with torch.no_grad():
        pair = kondo.DistributionPolicy(model).screen(batch)
    _, wanted = kept_prices(model, batch, advantages)
    model.zero_grad()
    run_step(
        lambda rows: model(rows[0]).log_prob(rows[1]),
        batch,
        advantages,
        gate=kondo.Gate(rate=0.2),
        screen=pair,
    )
    for name, gradient in grads(model).items():
        assert torch.equal(gradient, wanted[name])


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_a_partial_screen_of_densities_keeps_the_same(rate):
    model, batch, advantages = gaussian_problem()
    found = []
    for rows in ("all", "promising"):
        model.zero_grad()
        report = run_step(
            kondo.DistributionPolicy(model),
            batch,
            advantages,
            gate=kondo.Gate(rate=rate),
            screen_rows=rows,
        )
        found.append((report.kept, report.price, grads(model)["mean.weight"].tolist()))
    assert found[0] == found[1]


def test_a_dense_step_is_bit_equal_to_the_plain_one():
    model, batch, advantages = gaussian_problem()
    log_probs = model(batch[0]).log_prob(batch[1])
    wanted = oracle.gradients(model, -(log_probs * advantages).sum() / ROWS)
    run_step(kondo.DistributionPolicy(model), batch, advantages)
    for name, gradient in grads(model).items():
        assert torch.equal(gradient, wanted[name])


def seen_by_a_signal(distribution, actions, **options):
    """Return the log-probs that a gate's signal is shown."""
    shown = []

    def signal(log_probs, advantages, *, mask=None):
        shown.append(log_probs.clone())
        return advantages

    weight = nn.Parameter(torch.zeros(()))
    policy = kondo.DistributionPolicy(lambda seen: distribution(seen + weight))
    batch = (torch.linspace(-1, 1, len(actions)), actions)
    gate = kondo.Gate(rate=0.5, signal=signal)
    run_step(policy, batch, torch.ones(len(actions)), gate=gate, **options)
    return shown[0], batch[0]


def test_discrete_actions_are_screened_by_their_probability():
    actions = torch.tensor([0.0, 1.0, 1.0, 0.0])
    shown, logits = seen_by_a_signal(lambda seen: Bernoulli(logits=seen), actions)
    assert_close(shown, torch.where(actions == 1, logits, -logits).sigmoid().log())

    actions = torch.tensor([0, 1, 1, 0])
    shown, logits = seen_by_a_signal(
        lambda seen: Categorical(logits=torch.stack([seen, 0 * seen], 1)), actions
    )
    assert_close(shown, torch.where(actions == 0, logits, -logits).sigmoid().log())


def test_several_bits_are_one_discrete_action():
    actions = torch.ones(4, 3)
    shown, logits = seen_by_a_signal(
        lambda seen: Independent(Bernoulli(logits=seen[:, None].expand(-1, 3)), 1), actions
    )
    assert_close(shown, 3 * logits.sigmoid().log())


def test_a_multivariate_normal_is_a_density():
    actions = torch.zeros(4, 2)
    shown, seen = seen_by_a_signal(
        lambda seen: MultivariateNormal(seen[:, None].expand(-1, 2), torch.eye(2) / 100), actions
    )
    assert_close(shown, -100 * seen.square())


def test_the_proxy_of_a_gradient_has_its_rule_for_densities():
    model, batch, advantages = gaussian_problem()
    norms = advantages.abs() * (1 + squared_distances(model, batch)).sqrt()
    gate = kondo.Gate(rate=0.2, signal=kondo.signals.gradient_norm)
    report = run_step(kondo.DistributionPolicy(model), batch, advantages, gate=gate)
    assert report.price == pytest.approx(float(norms.sort(descending=True).values[7]))


def test_a_plan_judges_the_noise_of_densities_from_their_mode():
    model, batch, advantages = gaussian_problem()
    norms = advantages.abs() * (1 + squared_distances(model, batch)).sqrt()
    chance = kondo.UnbiasedGate(rate=0.2)(norms).probability
    plan = kondo.plan(
        kondo.DistributionPolicy(model), batch, advantages=advantages, rates=(0.2,), repeats=1
    )
    wanted = (norms.square() / chance).sum() / norms.square().sum()
    assert plan.rates[0].noise == pytest.approx(float(wanted))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rate", [0.2, 0.9])  # the promising rows are enough, or all are screened
@pytest.mark.parametrize("how", ["given", "all", "promising"])
def test_the_entropy_of_a_density_is_that_of_its_own_log_probs(how, rate, masked):
    model, batch, advantages = gaussian_problem()

    def wide(seen):  # by another factor in each row
        return Independent(Normal(model.mean(seen), 1 + seen[:, :2].abs()), 1)

    gate, policy = kondo.Gate(rate=rate), kondo.DistributionPolicy(wide)
    with torch.no_grad():
        found = wide(batch[0])
        own, at_mode = found.log_prob(batch[1]), found.log_prob(found.mode)
    assert float(own.mean()) != pytest.approx(float((own - at_mode).mean()), rel=0.1)
    mask = torch.arange(ROWS) % 3 > 0 if masked else torch.ones(ROWS, dtype=torch.bool)
    report = run_step(
        policy,
        batch,
        advantages,
        gate=gate,
        mask=mask if masked else None,
        screen=(own, at_mode) if how == "given" else None,
        screen_rows="promising" if how == "promising" else None,
    )
    some = how == "promising" and rate == 0.2
    seen = own[mask & (advantages > 0)] if some else own[mask]
    assert (report.rows_screened < ROWS) == (some or how == "given")
    assert report.diagnostics["entropy"] == pytest.approx(float(-seen.mean()), rel=1e-5)


def test_log_probs_that_are_given_alone_have_the_entropy_of_discrete_actions():
    model, batch, advantages = gaussian_problem()
    gate, policy = kondo.Gate(rate=0.2), kondo.DistributionPolicy(model)
    known = torch.full((ROWS,), -0.5)
    report = run_step(policy, batch, advantages, gate=gate, screen=known)
    assert report.diagnostics["entropy"] == pytest.approx(0.5)


def test_a_draft_may_be_another_distribution():
    model, batch, advantages = gaussian_problem()
    wide = kondo.DistributionPolicy(
        lambda seen: Independent(Normal(torch.zeros(len(seen), 2), 1), 1)
    )
    report = run_step(
        kondo.DistributionPolicy(model), batch, advantages, gate=kondo.Gate(rate=0.2), screen=wide
    )
    chi = advantages * batch[1].square().sum(1) / 2
    assert report.price == pytest.approx(float(chi.sort(descending=True).values[7]), rel=1e-5)


class Unnamed(Distribution):
    """A distribution that names neither support nor mode."""

    def __init__(self, mean):
        self.mean_value = mean
        super().__init__(mean.shape, validate_args=False)

    def log_prob(self, value):
        return -(value - self.mean_value).square()


def squashed(seen):
    return TransformedDistribution(Normal(seen, 1.0), [TanhTransform()])


ERRORS = {
    "not callable": (
        lambda: kondo.DistributionPolicy(Normal(0.0, 1.0)),
        "distribution must be callable on observations",
    ),
    "not a distribution": (
        lambda: seen_by_a_signal(lambda seen: seen, torch.zeros(4)),
        r"must return a torch\.distributions\.Distribution, got Tensor",
    ),
    "not independent": (
        lambda: seen_by_a_signal(
            lambda seen: Normal(seen[:, None].expand(-1, 2), 1.0), torch.zeros(4, 2)
        ),
        r"must have shape \[4\], one value per row, got \[4, 2\].*Independent\(distribution, 1\)",
    ),
    "no mode": (
        lambda: seen_by_a_signal(squashed, torch.zeros(4)),
        r"TransformedDistribution has none; give kondo\.backward screen=\(log_probs, mode_log",
    ),
    "nothing named": (
        lambda: seen_by_a_signal(Unnamed, torch.zeros(4)),
        "Unnamed has none",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_distribution_that_cannot_be_gated_is_refused(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mode_of_infinite_density_is_named():
    policy = kondo.DistributionPolicy(
        lambda rows: torch.distributions.Beta(rows.exp().clamp(max=0.5), rows.exp().clamp(max=0.5))
    )
    batch = torch.zeros(5), torch.full((5,), 0.3)
    with pytest.raises(ValueError, match="must have a finite density at its mode, and Beta"):
        kondo.backward(policy, batch, torch.ones(5), gate=kondo.Gate(rate=0.5))


def test_a_distribution_without_a_mode_is_fine_with_a_screen_or_without_a_gate():
    pair = (torch.tensor([0.0, -1.0, -2.0, -3.0]), torch.ones(4))
    shown, _ = seen_by_a_signal(squashed, torch.zeros(4), screen=pair)
    assert shown.tolist() == [-1.0, -2.0, -3.0, -4.0]
    weight = nn.Parameter(torch.zeros(()))
    policy = kondo.DistributionPolicy(lambda seen: squashed(seen + weight))
    run_step(policy, (torch.ones(4), torch.zeros(4)), torch.ones(4))
    assert weight.grad is not None


BAD_STEPS = {
    "not a pair of rows": (
        {"batch": {"observations": torch.zeros(ROWS, 3)}},
        r"batch must be a pair \(observations, actions\)",
    ),
    "tokens": ({"unit": "token", "advantages": torch.zeros(ROWS, 2)}, 'unit must be "sample"'),
    "three tensors": (
        {"screen": (torch.zeros(ROWS),) * 3},
        r"a pair \(log_probs, mode_log_probs\)",
    ),
    "no tensors": ({"screen": (0.0, 1.0)}, r"got \['float', 'float'\]"),
    "two shapes": (
        {"screen": (torch.zeros(ROWS), torch.zeros(1))},
        rf"of one shape, got \[{ROWS}\] and \[1\]",
    ),
    "a callable that returns a pair": (
        {"screen": lambda rows: (torch.zeros(ROWS), torch.zeros(ROWS))},
        r"screen\(rows\) must return log-probs, got a tuple of 2; .*screen=\(log_probs, mode_log",
    ),
    "above the mode": (
        {"screen": (torch.ones(ROWS), torch.zeros(ROWS))},
        "excess of 1.*log-density at the policy's mode",
    ),
    "whole numbers": (
        {"screen": (torch.zeros(ROWS, dtype=torch.int64),) * 2},
        "screen must be floating point",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_of_densities_names_what_is_wrong(name):
    change, message = BAD_STEPS[name]
    model, batch, advantages = gaussian_problem()
    given = {"batch": batch, "advantages": advantages} | change
    with pytest.raises(ValueError, match=message):
        run_step(kondo.DistributionPolicy(model), **given, gate=kondo.Gate(rate=0.2))
