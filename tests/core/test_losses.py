"""kondo.losses: value and derivative per unit, and nothing but log_probs is differentiated."""

import math
from functools import partial

import pytest
import torch

import kondo
from kondo import losses
from oracles import core as oracle
from oracles.sequences import delight_weights, sequence_weights
from tolerances import assert_close

# name -> (loss, oracle with the same options); every loss is called (log_probs, advantages, old).
CASES = {
    "pg": (lambda lp, u, old: losses.pg(lp, u), lambda lp, u, old: oracle.pg(lp, u)),
    "dg": (
        lambda lp, u, old: losses.dg(lp, u, eta=0.7),
        lambda lp, u, old: oracle.dg(lp, u, 0.7),
    ),
    "ppo": (losses.ppo, partial(oracle.ppo, clip=0.2, beta=0.0)),
    "ppo_kl": (
        partial(losses.ppo, clip=0.1, beta=0.3),
        partial(oracle.ppo, clip=0.1, beta=0.3),
    ),
    "pmpo": (
        lambda lp, u, old: losses.pmpo(lp, u),
        partial(oracle.pmpo, alpha=0.5, gamma=1e-9, beta=0.0),
    ),
    "pmpo_kl": (
        lambda lp, u, old: losses.pmpo(lp, u, alpha=0.6, gamma=0.05, beta=0.1, old_log_probs=old),
        partial(oracle.pmpo, alpha=0.6, gamma=0.05, beta=0.1),
    ),
    "is_pg": (losses.is_pg, partial(oracle.is_pg, max_weight=math.inf)),
    "is_pg_truncated": (
        partial(losses.is_pg, max_weight=1.1),
        partial(oracle.is_pg, max_weight=1.1),
    ),
    "awr": (
        lambda lp, u, old: losses.awr(lp, u, beta=0.5, max_weight=4.0),
        lambda lp, u, old: oracle.awr(lp, u, 0.5, 4.0),
    ),
}


def batch(dtype=torch.float64, shape=(7, 5)):
    """Return log_probs, advantages and old log_probs: both signs, ratios on both sides of 1."""
    generator = torch.Generator().manual_seed(1)
    log_probs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.01
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    shift = 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    old = (log_probs + shift).clamp_max(0)
    return log_probs.to(dtype), advantages.to(dtype), old.to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_against_the_closed_form(name, device):
    loss, reference = CASES[name]
    log_probs, advantages, old = (t.to(device) for t in batch())
    expected, slope = oracle.elementwise(reference, log_probs, advantages, old)
    log_probs.requires_grad_()
    actual = loss(log_probs, advantages, old)
    assert_close(actual, expected)
    # Units weighed differently, so that a derivative leaking between units would show.
    weights = torch.linspace(1, 2, actual.numel(), dtype=torch.float64).reshape(actual.shape)
    (actual * weights.to(device)).sum().backward()
    assert_close(log_probs.grad, slope * weights)


@pytest.mark.parametrize("name", CASES)
def test_only_log_probs_are_differentiated(name):
    log_probs, advantages, old = (t.requires_grad_() for t in batch())
    CASES[name][0](log_probs, advantages, old).sum().backward()
    assert log_probs.grad.abs().sum() > 0
    assert advantages.grad is None
    assert old.grad is None


@pytest.mark.parametrize("name", CASES)
def test_one_advantage_per_row_serves_every_token(name):
    log_probs, advantages, old = batch()
    rows = advantages[:, 0]
    whole = CASES[name][0](log_probs, rows.unsqueeze(1).expand_as(log_probs), old)
    assert_close(CASES[name][0](log_probs, rows, old), whole)


@pytest.mark.parametrize("name", CASES)
def test_permuting_and_splitting_change_nothing(name):
    tensors = batch()
    whole = CASES[name][0](*tensors)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    assert_close(CASES[name][0](*(t[order] for t in tensors)), whole[order])
    parts = [CASES[name][0](*(t[rows] for t in tensors)) for rows in (slice(3), slice(3, 7))]
    assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, half):
    log_probs, advantages, old = batch(half)
    truth, slope = oracle.elementwise(CASES[name][1], log_probs, advantages, old)
    log_probs.requires_grad_()
    loss = CASES[name][0](log_probs, advantages, old)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert_close(loss, truth)
    assert log_probs.grad.dtype == half
    assert_close(log_probs.grad, slope)


def test_pg_literal():
    # -0.5 * -1 = 0.5; --1 * -2 = -2.
    loss = losses.pg(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -1.0]))
    assert loss.tolist() == [0.5, -2.0]


def test_dg_literal():
    # chi = 2 * 1 = 2 and -2 * 1 = -2; sigmoid(2) = 0.880797, sigmoid(-2) = 0.119203;
    # loss = -w U log pi = 0.880797 * 2 = 1.761594 and 0.119203 * -2 = -0.238406.
    loss = losses.dg(torch.tensor([-1.0, -1.0]), torch.tensor([2.0, -2.0]))
    assert_close(loss, torch.tensor([1.7615942, -0.2384058]))


def test_ppo_literal_of_both_branches():
    # r = 2 or 1/2, clip 0.2.
    # U = 1:  min(2, 1.2) = 1.2 clipped;  min(0.5, 0.8) = 0.5 free.
    # U = -1: min(-2, -1.2) = -2 free;    min(-0.5, -0.8) = -0.8 clipped.
    old = torch.full((4,), -1.0, dtype=torch.float64)
    ratios = torch.tensor([2.0, 0.5, 2.0, 0.5], dtype=torch.float64)
    log_probs = (old + ratios.log()).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss = losses.ppo(log_probs, advantages, old)
    loss.sum().backward()
    assert_close(loss, torch.tensor([-1.2, -0.5, 2.0, 0.8], dtype=torch.float64))
    # -r U where free, nothing where clipped.
    assert_close(log_probs.grad, torch.tensor([0.0, -0.5, 2.0, 0.0], dtype=torch.float64))


def test_ppo_at_the_old_policy_has_the_gradient_of_pg():
    log_probs, advantages, _ = batch()
    log_probs.requires_grad_()
    losses.ppo(log_probs, advantages, log_probs.detach()).sum().backward()
    assert_close(log_probs.grad, -advantages)


def test_ppo_with_an_infinite_clip_never_clips():
    log_probs, advantages, old = batch()
    free = losses.ppo(log_probs, advantages, old, clip=math.inf)
    assert_close(free, -(log_probs - old).exp() * advantages)


def test_pmpo_literal():
    # U > 0: -0.5 * -1 = 0.5;  U < 0 and U = 0: 0.5 log(0.1 + e^-1) = 0.5 log 0.467879 = -0.379772.
    log_probs = torch.full((3,), -1.0)
    loss = losses.pmpo(log_probs, torch.tensor([3.0, -2.0, 0.0]), gamma=0.1)
    assert_close(loss, torch.tensor([0.5, -0.3797729, -0.3797729]))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_pmpo_with_its_positive_share_is_the_papers_subset_means(alpha):
    log_probs, advantages, _ = batch()
    positive = advantages > 0
    share = positive.double().mean().item()
    loss = losses.pmpo(log_probs, advantages, alpha=alpha, gamma=1e-3, positive_share=share)
    good = -log_probs[positive].mean()
    bad = torch.log(1e-3 + log_probs[~positive].exp()).mean()
    assert_close(loss.mean(), alpha * good + (1 - alpha) * bad)


def test_pmpo_of_an_impossible_action_is_bounded():
    log_probs = torch.tensor([-math.inf, -1e4], requires_grad=True)
    loss = losses.pmpo(log_probs, torch.tensor([-1.0, -1.0]))
    loss.sum().backward()
    assert_close(loss, torch.full((2,), 0.5 * math.log(1e-9)))
    assert log_probs.grad.tolist() == [0.0, 0.0]


def test_is_pg_literal():
    # rho = e^(-1 - -2) = e; truncated at 2. Loss -rho * U * log pi = e * 3 and 2 * 3.
    log_probs, advantages = torch.tensor([-1.0]), torch.tensor([3.0])
    behaviour = torch.tensor([-2.0])
    assert_close(losses.is_pg(log_probs, advantages, behaviour), torch.tensor([3 * math.e]))
    capped = losses.is_pg(log_probs, advantages, behaviour, max_weight=2.0)
    assert_close(capped, torch.tensor([6.0]))


def test_awr_literal():
    # exp(0) = 1, exp(1 / 0.5) = 7.389056, exp(2 / 0.5) = 54.6 capped at 20; times 2.
    log_probs = torch.full((3,), -2.0)
    loss = losses.awr(log_probs, torch.tensor([0.0, 1.0, 2.0]), beta=0.5)
    assert_close(loss, torch.tensor([2.0, 14.7781122, 40.0]))


@pytest.mark.parametrize("eta", [0.1, 1.0, 10.0])
def test_dg_is_pg_times_the_sigmoid_of_delight(eta):
    log_probs, advantages, _ = batch()
    weight = torch.sigmoid(kondo.delight(log_probs, advantages) / eta)
    dg = losses.dg(log_probs, advantages, eta=eta)
    assert_close(dg, weight * losses.pg(log_probs, advantages))


def test_dg_is_the_soft_gate_at_price_zero():
    log_probs, advantages, _ = batch()
    advantages[0] = 0.0  # a unit without delight: weight 0 and 1/2 agree, since pg is 0 there
    gate = kondo.Gate(price=0.0, temperature=1.0, soft=True)
    weight = gate(kondo.delight(log_probs, advantages)).weight
    assert_close(weight * losses.pg(log_probs, advantages), losses.dg(log_probs, advantages))


def test_dg_at_a_high_temperature_is_half_of_pg():
    log_probs, advantages, _ = batch()
    half = losses.pg(log_probs, advantages) / 2
    assert_close(losses.dg(log_probs, advantages, eta=1e9), half, torch.float32)


@pytest.mark.parametrize(
    ("half", "excess"), [(torch.float16, 0.04), (torch.bfloat16, 0.2)], ids=str
)
def test_dg_forgives_the_rounding_that_delight_forgives(half, excess):
    # A bfloat16 log-prob of 0.2 is rounding and has no surprise: w = sigmoid(0) = 1/2.
    log_probs, advantages = torch.tensor([excess], dtype=half), torch.ones(1, dtype=half)
    assert kondo.delight(log_probs, advantages).item() == 0.0
    assert_close(losses.dg(log_probs, advantages), -log_probs.float() / 2)


def test_sequence_is_pg_literal():
    # Ratios 2 and 1.25: w = 2.5, capped at 2. Ratios 0.5 and 0.5: w = 0.25.
    pi = torch.tensor([[0.5, 0.5], [0.2, 0.3]], dtype=torch.float64)
    mu = torch.tensor([[0.25, 0.4], [0.4, 0.6]], dtype=torch.float64)
    advantages = torch.tensor([1.0, -3.0], dtype=torch.float64)
    log_probs = pi.log().requires_grad_()
    loss = losses.sequence_is_pg(log_probs, advantages, mu.log(), max_weight=2.0)
    weight = torch.tensor([[2.0], [0.25]], dtype=torch.float64)
    assert_close(loss, -weight * advantages[:, None] * pi.log())
    loss.sum().backward()
    assert_close(log_probs.grad, (-weight * advantages[:, None]).expand(2, 2))


def test_sequence_is_pg_of_single_decisions_is_is_pg():
    log_probs, advantages, old = batch(shape=(7,))
    index = torch.arange(7)
    found = losses.sequence_is_pg(log_probs, advantages, old, sequence_index=index, max_weight=1.1)
    assert_close(found, losses.is_pg(log_probs, advantages, old, max_weight=1.1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_sequence_is_pg_differentiates_log_probs_alone(dtype):
    tensors = [part.requires_grad_() for part in batch(dtype)]
    log_probs, advantages, old = tensors
    index = torch.arange(7)[:, None].expand(7, 5).clone()
    index[:, 4] = -1
    loss = losses.sequence_is_pg(*tensors, sequence_index=index, max_weight=1.1)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.sum().backward()
    weight = sequence_weights(log_probs, old.detach(), index >= 0, 1.1)[:, None]
    expected = torch.where(index >= 0, -weight * advantages.detach().double(), 0.0)
    assert_close(log_probs.grad, expected)
    assert advantages.grad is None
    assert old.grad is None


def test_sequence_is_pg_stays_finite_where_the_ratio_overflows():
    """400 tokens, each four times as likely as it was: 4^400."""
    log_probs = torch.full((1, 400), -1.0, requires_grad=True)
    loss = losses.sequence_is_pg(log_probs, torch.zeros(1), log_probs.detach() - math.log(4.0))
    assert bool((loss == 0).all())  # an infinite weight times an advantage of 0 would be NaN
    losses.sequence_is_pg(log_probs, torch.ones(1), log_probs.detach() - 1.4).sum().backward()
    assert_close(log_probs.grad, torch.full((1, 400), -2.0))


def test_sequence_dg_literal():
    # Delight 2 * (1 + 3) = 8, and -1 * (0.5 + 0.25) = -0.75; eta 2.
    log_probs = torch.tensor([[-1.0, -3.0], [-0.5, -0.25]], dtype=torch.float64)
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    weight = 1 / (1 + torch.tensor([[-4.0], [0.375]], dtype=torch.float64).exp())
    found = losses.sequence_dg(log_probs, advantages, eta=2.0)
    assert_close(found, -weight * advantages[:, None] * log_probs)


def test_sequence_dg_of_single_decisions_is_dg():
    log_probs, advantages, _ = batch(shape=(7,))
    found = losses.sequence_dg(log_probs, advantages, sequence_index=torch.arange(7), eta=0.7)
    assert_close(found, losses.dg(log_probs, advantages, eta=0.7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_sequence_dg_differentiates_log_probs_alone(dtype):
    log_probs, by_token, _ = batch(dtype)
    log_probs, advantages = log_probs.requires_grad_(), by_token[:, 0].clone().requires_grad_()
    index = torch.arange(7)[:, None].expand(7, 5).clone()
    index[:, 4] = -1
    loss = losses.sequence_dg(log_probs, advantages, sequence_index=index, eta=0.7)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.sum().backward()
    rows = advantages.detach().double()
    weight = delight_weights(log_probs, rows, index >= 0, 0.7)[:, None]
    assert_close(log_probs.grad, torch.where(index >= 0, -weight * rows[:, None], 0.0))
    assert advantages.grad is None


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        *((losses.sequence_is_pg, place) for place in range(3)),
        *((losses.sequence_dg, place) for place in range(2)),
    ],
)
def test_no_nan_leaves_elements_of_no_sequence(loss, place):
    outside = torch.zeros(7, 5, dtype=torch.bool)
    outside[:, 3] = True
    index = torch.where(outside, -1, torch.arange(7)[:, None])
    found = []
    for broken in (False, True):
        own = [part.clone() for part in batch()][: 3 if loss is losses.sequence_is_pg else 2]
        if broken:
            own[place][outside] = math.nan
        log_probs = own[0].requires_grad_()
        terms = loss(*own, sequence_index=index)
        terms.sum().backward()
        found.append((terms.detach(), log_probs.grad))
    (expected, gradient), (terms, own) = found
    assert_close(terms, expected)
    assert_close(own, gradient)
    assert bool((own[outside] == 0).all())


def test_is_pg_stays_finite_where_the_ratio_overflows():
    loss = losses.is_pg(-ONES, 0 * ONES, -1000 * ONES, max_weight=2.0)
    assert bool((loss == 0).all())


@pytest.mark.parametrize("index", [None, torch.zeros(1, 2, dtype=torch.int64)])
def test_no_advantage_is_no_loss_even_where_an_uncapped_ratio_is_infinite(index):
    log_probs = -ONES.unsqueeze(0).requires_grad_()
    given = (log_probs, torch.zeros(1), -1000 * ONES.unsqueeze(0))
    sequence = losses.sequence_is_pg(*given, sequence_index=index, max_weight=math.inf)
    for loss in (sequence, losses.is_pg(*given)):
        (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
        assert bool((loss == 0).all())
        assert bool((gradient == 0).all())


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.pg(torch.tensor([1]), ONES), "log_probs must be floating point"),
        (lambda: losses.pg(-ONES, torch.ones(3)), r"advantages must have shape \[2\]"),
        (lambda: losses.dg(-ONES, ONES, eta=0.0), "eta must be > 0, got 0.0"),
        (lambda: losses.dg(-ONES, ONES, eta=math.nan), "eta must be > 0, got nan"),
        (lambda: losses.dg(ONES, ONES), "log_probs must not exceed 0"),
        (lambda: losses.ppo(-ONES, ONES, -ONES, clip=-0.1), "clip must be > 0"),
        (lambda: losses.ppo(-ONES, ONES, torch.ones(1)), r"old_log_probs .* \[2\], got \[1\]"),
        (lambda: losses.ppo(-ONES, ONES, -ONES, beta=-1.0), "beta must be >= 0, got -1.0"),
        (lambda: losses.pmpo(-ONES, ONES, alpha=1.5), r"alpha must lie in \[0, 1\], got 1.5"),
        (lambda: losses.pmpo(-ONES, ONES, gamma=0.0), "gamma must be > 0"),
        (lambda: losses.pmpo(-ONES, ONES, positive_share=1.0), r"positive_share .* \(0, 1\)"),
        (lambda: losses.pmpo(-ONES, ONES, beta=0.1), "old_log_probs must be given"),
        (lambda: losses.pmpo(-ONES, ONES, beta=-0.1), "beta must be >= 0"),
        (
            lambda: losses.pmpo(-ONES, ONES, beta=0.1, old_log_probs=torch.ones(3)),
            r"old_log_probs .* \[2\], got \[3\]",
        ),
        (lambda: losses.is_pg(-ONES, ONES, torch.tensor([1, 2])), "behaviour_log_probs must be"),
        (lambda: losses.is_pg(-ONES, ONES, -ONES, max_weight=0.0), "max_weight must be > 0"),
        (lambda: losses.sequence_is_pg(-ONES, ONES, -ONES), r"sequence_index .* got None .* \[2\]"),
        (
            lambda: losses.sequence_is_pg(-ONES, ONES, -ONES, sequence_index=ONES),
            r"sequence_index must be int64 .* \[2\], got torch.float32",
        ),
        (
            lambda: losses.sequence_is_pg(-ONES, ONES, -ONES, sequence_index=torch.tensor([0])),
            r"sequence_index must be int64 .* \[2\], got torch.int64 of shape \[1\]",
        ),
        (
            lambda: losses.sequence_is_pg(
                -ONES.view(1, 2), ONES[:1], -ONES.view(1, 2), max_weight=0
            ),
            "max_weight must be > 0",
        ),
        (
            lambda: losses.sequence_is_pg(-ONES.view(1, 2), ONES[:1], -ONES),
            r"behaviour_log_probs .* \[1, 2\], got \[2\]",
        ),
        (lambda: losses.awr(-ONES, ONES, beta=0.0), "beta must be > 0"),
        (lambda: losses.awr(-ONES, ONES, max_weight=-1.0), "max_weight must be > 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_dg_of_a_density_measures_surprisal_from_the_mode():
    # log pi = 1, mode 3: l = 2, delight 2, loss = -sigmoid(2) * 1
    loss = losses.dg(torch.tensor([1.0]), torch.ones(1), mode_log_probs=torch.tensor([3.0]))
    assert_close(loss, -1 / (1 + torch.exp(torch.tensor([-2.0]))))
