"""kondo.advantage: one baseline per function, centred only."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from core.strategies import permutations, tensors
from oracles import core as oracle
from tolerances import assert_close

# Rewards of a plausible size: their mean must not drown the difference of two of them.
rewards_of = st.floats(-100, 100, allow_nan=False, allow_subnormal=False)
rewards_and_groups = st.lists(
    st.tuples(rewards_of, st.integers(-2, 3)), min_size=1, max_size=17
).map(
    lambda rows: (
        torch.tensor([r for r, _ in rows], dtype=torch.float64),
        torch.tensor([g for _, g in rows]),
    )
)
# Every group twice over, so that nobody is alone.
rewards_and_pairs = rewards_and_groups.map(lambda p: (torch.cat([p[0], -p[0]]), p[1].repeat(2)))

CENTRED = {
    "batch_mean": kondo.advantage.batch_mean,
    "group_mean": lambda r: kondo.advantage.group_mean(r, r.numel()),
    "leave_one_out": lambda r: kondo.advantage.leave_one_out(r, r.numel()),
}
EVERY = CENTRED | {
    "zero": kondo.advantage.zero,
    "constant": kondo.advantage.constant,
    "expected_confidence": lambda r: kondo.advantage.expected_confidence(
        r, torch.full((r.numel(), 4), 0.25, requires_grad=True)
    ),
    "oracle": lambda r: kondo.advantage.oracle(r, torch.ones(r.numel(), requires_grad=True)),
    "normalise_by_std": kondo.advantage.normalise_by_std,
}


def test_zero_literal():
    rewards = torch.tensor([1.0, 0.0, -2.0])
    advantages = kondo.advantage.zero(rewards)
    assert advantages.tolist() == [1.0, 0.0, -2.0]
    advantages.add_(1)  # a copy: the caller's rewards stay
    assert rewards.tolist() == [1.0, 0.0, -2.0]


def test_constant_literal():
    rewards = torch.tensor([1.0, 0.0])
    assert kondo.advantage.constant(rewards).tolist() == [0.5, -0.5]
    assert kondo.advantage.constant(rewards, baseline=-1.0).tolist() == [2.0, 1.0]


def test_expected_confidence_literal(device):
    # 0.5^2 + 0.5^2 = 0.5;  1^2 + 0^2 = 1;  0.7^2 + 0.3^2 = 0.58.
    probs = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.7, 0.3]], device=device)
    advantages = kondo.advantage.expected_confidence(
        torch.tensor([1.0, 1.0, 0.0], device=device), probs
    )
    assert_close(advantages, torch.tensor([0.5, 0.0, -0.58]))


def test_oracle_literal():
    # 1 - 0.75 = 0.25, 0 - 0.75 = -0.75.
    advantages = kondo.advantage.oracle(torch.tensor([1.0, 0.0]), torch.tensor([0.75, 0.75]))
    assert advantages.tolist() == [0.25, -0.75]


def test_batch_mean_literal():
    # mean = (3 + 0 + 0) / 3 = 1.
    assert kondo.advantage.batch_mean(torch.tensor([3.0, 0.0, 0.0])).tolist() == [2.0, -1.0, -1.0]


def test_group_mean_literal(device):
    # Groups (1, 0), (3, 5): means 0.5 and 4.
    rewards = torch.tensor([1.0, 0.0, 3.0, 5.0], device=device)
    expected = [0.5, -0.5, -1.0, 1.0]
    assert kondo.advantage.group_mean(rewards, 2).tolist() == expected
    # The same groups, named 7 and -1 and interleaved.
    groups = torch.tensor([7, -1, 7, -1], device=device)
    interleaved = kondo.advantage.group_mean(rewards[[0, 2, 1, 3]], groups)
    assert interleaved.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_leave_one_out_literal(device):
    # The others' means: (0 + 2) / 2 = 1, (1 + 2) / 2 = 1.5, (1 + 0) / 2 = 0.5.
    rewards = torch.tensor([1.0, 0.0, 2.0], device=device)
    assert kondo.advantage.leave_one_out(rewards, 3).tolist() == [0.0, -1.5, 1.5]


def test_normalise_by_std_literal():
    # Mean 0, variance (4 + 0 + 4) / 2 = 4, std 2; epsilon 2 makes the divisor 4.
    advantages = torch.tensor([2.0, 0.0, -2.0])
    assert_close(kondo.advantage.normalise_by_std(advantages), torch.tensor([1.0, 0.0, -1.0]))
    by_four = kondo.advantage.normalise_by_std(advantages, epsilon=2.0)
    assert by_four.tolist() == [0.5, 0.0, -0.5]


@given(tensors(rewards_of))
def test_batch_mean_against_the_oracle(rewards):
    expected = torch.tensor(oracle.batch_mean(rewards.tolist()), dtype=torch.float64)
    assert_close(kondo.advantage.batch_mean(rewards), expected)


@given(rewards_and_groups)
def test_group_mean_against_the_oracle(given_groups):
    rewards, groups = given_groups
    expected = oracle.group_mean(rewards.tolist(), groups.tolist())
    actual = kondo.advantage.group_mean(rewards, groups)
    assert_close(actual, torch.tensor(expected, dtype=torch.float64))


@given(rewards_and_pairs)
def test_leave_one_out_against_the_oracle(given_groups):
    rewards, groups = given_groups
    expected = oracle.leave_one_out(rewards.tolist(), groups.tolist())
    actual = kondo.advantage.leave_one_out(rewards, groups)
    assert_close(actual, torch.tensor(expected, dtype=torch.float64))


@given(tensors(rewards_of, min_size=2))
def test_normalise_by_std_against_the_oracle(advantages):
    expected = advantages / (oracle.sample_std(advantages.tolist()) + 1e-6)
    assert_close(kondo.advantage.normalise_by_std(advantages), expected, torch.float32)


@given(rewards_and_pairs, st.data())
def test_permuting_samples_permutes_advantages(given_groups, data):
    rewards, groups = given_groups
    order = data.draw(permutations(rewards.numel()))
    for baseline in (kondo.advantage.group_mean, kondo.advantage.leave_one_out):
        assert_close(baseline(rewards[order], groups[order]), baseline(rewards, groups)[order])


@given(rewards_and_pairs)
def test_splitting_by_group_changes_nothing(given_groups):
    rewards, groups = given_groups
    for baseline in (kondo.advantage.group_mean, kondo.advantage.leave_one_out):
        whole = baseline(rewards, groups)
        for group in groups.unique():
            mine = groups == group
            assert_close(baseline(rewards[mine], groups[mine]), whole[mine])


@pytest.mark.parametrize("name", CENTRED)
@given(tensors(rewards_of, min_size=2), st.floats(-10, 10), st.floats(0.1, 10))
def test_centred_advantages_ignore_a_shift_and_follow_a_scale(name, rewards, shift, scale):
    # Not divided by a standard deviation: ten times the reward is ten times the advantage.
    moved = CENTRED[name](scale * rewards + shift)
    assert_close(moved, scale * CENTRED[name](rewards))


@pytest.mark.parametrize("name", CENTRED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(rewards_of, st.integers(2, 40))
def test_equal_rewards_have_an_advantage_of_exactly_zero(name, dtype, reward, size):
    # Zero-advantage groups must cost nothing; an advantage of 1e-9 would buy them backward passes.
    assert CENTRED[name](torch.full((size,), reward, dtype=dtype)).tolist() == [0.0] * size


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_are_detached_and_at_least_float32(name, dtype):
    rewards = torch.tensor([1.0, 0.0, 3.0], dtype=dtype, requires_grad=True)
    advantages = EVERY[name](rewards)
    assert not advantages.requires_grad
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("name", EVERY)
def test_bad_rewards_are_refused(name):
    with pytest.raises(ValueError, match="must be floating point"):
        EVERY[name](torch.tensor([1, 2]))


@pytest.mark.parametrize("shape", [(0,), (), (2, 2)])
@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"normalise_by_std"}))
def test_rewards_are_one_per_sample(name, shape):
    if name == "group_mean" and len(shape) == 2:
        pytest.skip("leading dimensions are batches of their own")
    with pytest.raises(ValueError, match=r"rewards must have shape \[N\]"):
        EVERY[name](torch.ones(shape))


@pytest.mark.parametrize("baseline", [kondo.advantage.group_mean, kondo.advantage.leave_one_out])
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (3, "must divide the number of rewards, 4, got 3"),
        (0, "must divide"),
        (-2, "must divide"),
        (torch.tensor([0, 1]), r"integer tensor of shape \[4\], got torch.int64 \[2\]"),
        (torch.ones(4), "got torch.float32"),
        (torch.ones(4, dtype=torch.bool), "got torch.bool"),
        ([0, 0, 1, 1], "groups must be an integer tensor or an int, got list"),
    ],
)
def test_bad_groups_are_named(baseline, groups, message):
    with pytest.raises(ValueError, match=message):
        baseline(torch.ones(4), groups)


@pytest.mark.parametrize("groups", [1, torch.tensor([0, 0, 1])])
def test_leave_one_out_needs_company(groups):
    with pytest.raises(ValueError, match="at least two samples each"):
        kondo.advantage.leave_one_out(torch.ones(3), groups)
    assert kondo.advantage.group_mean(torch.ones(3), groups).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        (torch.ones(2), r"shape \[2, K\], got \[2\]"),
        (torch.ones(3, 1), r"shape \[2, K\], got \[3, 1\]"),
        (torch.tensor([[0.5, 0.5], [2.0, -3.0]]), "sums from -1 to 1; apply softmax"),
        (torch.tensor([[1, 0], [0, 1]]), "action_probs must be floating point"),
    ],
)
def test_bad_action_probs_are_named(probs, message):
    with pytest.raises(ValueError, match=message):
        kondo.advantage.expected_confidence(torch.ones(2), probs)


def test_bad_expected_rewards_are_named():
    with pytest.raises(ValueError, match=r"expected_rewards .* \[2\], got \[1\]"):
        kondo.advantage.oracle(torch.ones(2), torch.ones(1))


def test_one_advantage_has_no_standard_deviation():
    with pytest.raises(ValueError, match="at least two values, got 1"):
        kondo.advantage.normalise_by_std(torch.ones(1))


def test_leading_dimensions_are_batches_of_their_own():
    rewards = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(0))
    found = kondo.advantage.group_mean(rewards, 4)
    for member in range(3):
        for batch in range(2):
            expected = kondo.advantage.group_mean(rewards[member, batch], 4)
            assert torch.equal(found[member, batch], expected)


def test_a_group_size_and_the_groups_themselves_agree():
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_size = kondo.advantage.group_mean(rewards, 6)
    assert_close(by_size, kondo.advantage.group_mean(rewards, torch.arange(24) // 6))


def test_a_reward_that_is_missing_leaves_the_mean_alone():
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.1, 0.1, math.nan])
    found = kondo.advantage.group_mean(rewards, 3, skip_nan=True)
    assert found.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="infinite one in unit 1"):
        kondo.advantage.group_mean(torch.tensor([1.0, math.inf]), 2, skip_nan=True)
    with pytest.raises(ValueError, match="skip_nan needs groups as a size"):
        kondo.advantage.group_mean(rewards, torch.zeros(6, dtype=torch.int64), skip_nan=True)
