"""What a gate looks at: signals and their noise. Losses are in test_gradients."""

import functools

import numpy as np
import pytest
import torch

import kondo
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything
from kondo_lab.training.member import Frictions
from lab.training import toys
from tolerances import assert_close

SEEDS = (0, 1, 2)


def begun(arm, program=None):
    """A population that has decided on its first step."""
    members = [toys.member(arm, seed=seed) for seed in SEEDS]
    population = toys.population(program or toys.bandit_program(batch=30), members)
    population.begin_step()
    return population


@pytest.mark.parametrize(
    "signal",
    [
        kondo.delight,
        kondo.signals.abs_delight,
        kondo.signals.advantage,
        kondo.signals.abs_advantage,
        kondo.signals.surprisal,
        functools.partial(kondo.signals.additive, alpha=0.25),
    ],
)
def test_gates_look_at_their_signal(signal):
    population = begun(Arm(gate=kondo.Gate(rate=0.2, signal=signal)))
    for number in range(len(SEEDS)):
        advantages, weight, _, rows, kept = toys.decision_of(population, number)
        log_probs = population.rolled["log_probs"][number, :, 0]
        expected = kondo.Gate(rate=0.2)(signal(log_probs, advantages[:, 0])).keep
        assert torch.equal(weight[:, 0].bool(), expected)
        assert sorted(rows[:kept].tolist()) == expected.nonzero()[:, 0].tolist()


def test_a_sequences_delight_is_the_sum_of_its_tokens():
    program = toys.sequence_program(num_prompts=10)
    population = begun(Arm(gate=kondo.Gate(rate=0.25)), program)
    for number in range(len(SEEDS)):
        advantages, weight, *_ = toys.decision_of(population, number)
        chi = (-population.rolled["log_probs"][number] * advantages).sum(dim=1)
        assert torch.equal(weight[:, 0].bool(), kondo.Gate(rate=0.25)(chi).keep)


def test_what_costs_just_the_price_is_not_bought():
    right = Arm(gate=kondo.Gate(price=1.0, signal=kondo.signals.advantage), baseline="zero")
    cheaper = Arm(gate=kondo.Gate(price=0.5, signal=kondo.signals.advantage), baseline="zero")
    assert begun(right).groups[0].decisions[0].kept.tolist() == [0, 0, 0]
    population = begun(cheaper)
    rewards = population.rolled["rewards"].flatten(1).sum(dim=1)
    assert population.groups[0].decisions[0].kept.tolist() == rewards.tolist()
    assert (rewards > 0).all()


def test_a_uniform_priority_keeps_every_row_as_often():
    population = begun(Arm(gate=kondo.Gate(rate=0.2, signal=kondo.signals.uniform)))
    counts = torch.zeros(len(SEEDS), 30)
    for _ in range(100):
        population.begin_step()
        counts += population.groups[0].decisions[0].weight.squeeze(2)
    assert (counts.sum(dim=1) == 600).all()
    error = (100 * 0.2 * 0.8) ** 0.5
    assert ((counts - 20).abs() < 5 * error).all()


def soft_input(population, number):
    """What a soft gate at temperature 1 has looked at."""
    return torch.logit(toys.decision_of(population, number)[1][:, 0])


def test_delight_noise_is_a_multiple_of_the_batchs_own_deviation():
    program = toys.bandit_program(batch=2000)
    clean = begun(Arm(unit="token", gate=Everything(eta=1.0)), program)
    noisy = begun(Arm(unit="token", gate=Everything(eta=1.0), delight_noise=0.5), program)
    for number in range(len(SEEDS)):
        chi = soft_input(clean, number)
        noise = soft_input(noisy, number) - chi
        relative = float(noise.std() / chi.std())
        assert abs(relative - 0.5) < 5 * 0.5 / (2 * 2000) ** 0.5
        assert abs(float(noise.mean())) < 5 * float(noise.std()) / 2000**0.5
        correlation = torch.corrcoef(torch.stack([noise, chi]))[0, 1]
        assert abs(float(correlation)) < 5 / 2000**0.5


@pytest.mark.parametrize("screened", ["both", "surprisal"])
def test_logit_noise_reaches_the_gates_surprisal_and_baseline_or_the_surprisal_alone(screened):
    clean = begun(Arm(unit="token", gate=Everything(eta=1.0)))
    noisy = begun(Arm(unit="token", gate=Everything(eta=1.0), logit_noise=0.5, screened=screened))
    drawn = noisy.draws.normal("logit noise", 1, 30, 4)
    for number in range(len(SEEDS)):
        advantages = toys.decision_of(noisy, number)[0]
        assert torch.equal(advantages, toys.decision_of(clean, number)[0])
        log_q = (noisy.rolled["distribution"][number] + 0.5 * drawn[number]).log_softmax(dim=-1)
        estimated = advantages
        if screened == "both":
            baseline = log_q.exp().square().sum(dim=1, keepdim=True)
            estimated = noisy.rolled["rewards"][number] - baseline
        surprisal = -log_q.gather(1, noisy.rolled["actions"][number])
        expected = torch.sigmoid(estimated * surprisal)
        assert_close(toys.decision_of(noisy, number)[1], expected)
        assert not torch.equal(expected, toys.decision_of(clean, number)[1])


def test_noise_reaches_the_label_of_the_oracle_baseline_and_no_constant():
    for baseline, noise_free in (("oracle", False), ("constant", True), ("zero", True)):
        weights = [
            begun(
                Arm(
                    unit="token",
                    gate=Everything(eta=1.0),
                    logit_noise=0.5,
                    baseline=baseline,
                    screened=screened,
                )
            )
            for screened in ("both", "surprisal")
        ]
        both, alone = (toys.decision_of(population, 0)[1] for population in weights)
        assert torch.equal(both, alone) is noise_free


def test_members_without_noise_are_untouched_by_noisy_neighbours():
    levels = (0.0, 0.5)
    members = [
        toys.member(Arm(unit="token", gate=Everything(eta=1.0), delight_noise=level))
        for level in levels
    ]
    population = toys.population(toys.bandit_program(), members)
    alone = toys.population(toys.bandit_program(), members[:1])
    population.begin_step()
    alone.begin_step()
    weights = [
        toys.decision_of(population, toys.place(population, member))[1] for member in members
    ]
    assert_close(weights[0], toys.decision_of(alone, 0)[1])
    assert not torch.isclose(weights[0], weights[1]).any()


def test_held_out_images_are_counted_in_parts():
    program = toys.bandit_program()
    population = toys.population(program, [toys.member(Arm(), seed=seed) for seed in SEEDS])
    # More than a part of a thousand, and not a multiple of it.
    data = program.task.data
    program.task.data = data._replace(
        test_images=data.test_images.repeat(60, 1), test_labels=data.test_labels.repeat(60)
    )
    found = program.evaluator(population.parameters, population.draws)()["test error"]
    images, labels = program.task.test_inputs.double(), program.task.test_labels
    assert len(labels) == 1200
    for number in range(len(SEEDS)):
        guess = toys.single(program, population.parameters, number)(images).argmax(dim=1)
        assert_close(found[number], (guess != labels).double().mean(), dtype=torch.float32)


@pytest.mark.parametrize("make", [toys.bandit_program, toys.sequence_program])
@pytest.mark.parametrize(
    ("friction", "message"),
    [
        ({"temperature": 0.5}, "temperature must be 1 for .*Program; text alone has one"),
        ({"broken": 0.5}, "broken must be 0 for .*Program; text alone can break"),
    ],
)
def test_what_text_alone_has_is_refused(make, friction, message):
    member = toys.member(Arm(), frictions=Frictions(**friction))
    population = toys.population(make(), [member])
    with pytest.raises(ValueError, match=message):
        population.step()


def float32_left_over(reward, answers=10):
    """What plain float32 leaves of equal rewards, added up in order, times 1 / answers."""
    reward = np.float32(reward)
    total = reward
    for _ in range(answers - 1):
        total = np.float32(total + reward)
    return np.float32(reward - np.float32(total * np.float32(1 / answers)))


def advantages_of(arm, rewards):
    """Advantages [G, A, T] of rewards [G, A] in one member's batch."""
    prompts, answers = rewards.shape
    program = toys.sequence_program(num_prompts=prompts, num_answers=answers)
    rolled = {
        "rewards": rewards.unsqueeze(0),
        "log_probs": torch.zeros(1, prompts * answers, 3),
    }
    found = program.advantages(arm, rolled)
    assert found.shape == (1, prompts * answers, 1)  # one for all tokens of an answer
    return found.expand(1, prompts * answers, 3).view(prompts, answers, 3)


def test_equal_rewards_leave_nothing_or_what_float32_leaves_of_them():
    left = {
        0.1: -1.4901161e-08,
        0.3: 2.9802322e-08,
        0.5: 0.0,
        0.6: 5.9604645e-08,
        0.7: 5.9604645e-08,
    }
    rewards = torch.tensor(list(left)).unsqueeze(1).repeat(1, 10)
    exact = advantages_of(Arm(), rewards)
    assert torch.equal(exact, torch.zeros_like(exact))
    rounded = advantages_of(Arm(equal_rewards="rounded"), rewards)
    for row, (reward, literal) in zip(rounded, left.items(), strict=True):
        assert row.dtype == torch.float32
        assert torch.equal(row, torch.full_like(row, float(float32_left_over(reward))))
        assert torch.equal(row, torch.full_like(row, literal))


def test_rewards_that_differ_have_their_mean_taken_off_either_way():
    rewards = torch.rand(4, 10, generator=torch.Generator().manual_seed(0))
    expected = rewards.double() - rewards.double().mean(dim=1, keepdim=True)
    for arm in (Arm(), Arm(equal_rewards="rounded")):
        found = advantages_of(arm, rewards)
        assert_close(found, expected.unsqueeze(2).expand(4, 10, 3))


def test_what_equal_rewards_leave_is_part_of_an_update():
    exact, rounded = Arm(), Arm(equal_rewards="rounded")
    assert exact != rounded
    assert rounded == Arm(equal_rewards="rounded")
    members = [
        toys.member(arm, seed=seed, learning_rate=rate)
        for rate in (0.1, 0.2)
        for seed in SEEDS
        for arm in (exact, rounded)
    ]
    population = toys.population(toys.sequence_program(), members)
    (group,) = population.groups
    assert [rule.arm.equal_rewards for rule in group.rules] == ["rounded", "zero"]
