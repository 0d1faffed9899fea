"""kondo.losses one by one: literals, limits and what is refused. What holds for all of them is in
`test_every_loss`."""

import math

import pytest
import torch

import kondo
from core.strategies import loss_batch as batch
from kondo import losses
from tolerances import assert_close


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
