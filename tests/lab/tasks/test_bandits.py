import math

import pytest
import torch

from kondo_lab.draws import Draws
from kondo_lab.tasks.bandits import ImageBandit, KArmedBandit, TabularBandit
from kondo_lab.tasks.digits import DigitsBandit
from kondo_lab.tasks.images import Images
from tolerances import assert_close

IMAGES = torch.tensor([[0, 255], [51, 0], [255, 102]], dtype=torch.uint8)
LABELS = torch.tensor([1, 0, 2])


def images(**changes):
    parts = {"images": IMAGES, "labels": LABELS, "test_images": IMAGES, "test_labels": LABELS}
    return Images(**parts | {"white": 255} | changes)


def test_an_image_bandit_shows_its_images_with_their_labels():
    task = ImageBandit("three", images(), num_actions=3)
    inputs, labels = task.draw(Draws([0]), 0, 300)
    seen = {
        (tuple(row), label)
        for row, label in zip(inputs[0].tolist(), labels[0].tolist(), strict=True)
    }
    shown = [tuple(row) for row in (IMAGES.double() / 255).float().tolist()]
    assert seen == set(zip(shown, [1, 0, 2], strict=True))
    assert labels[0].bincount().min() > 60  # uniform: 100 expected, standard deviation 8
    assert task.data.images.dtype == torch.uint8
    assert_close(task.test_inputs, IMAGES.double() / 255, torch.float32)
    assert torch.equal(task.test_labels, LABELS)
    assert (task.num_inputs, task.num_actions) == (2, 3)


def test_both_digits_bandits_have_the_same_images_and_split():
    population, single = ImageBandit.digits(), DigitsBandit(batch=1, seed=0)
    assert torch.equal(population.data.shown(population.data.images), single.images)
    assert torch.equal(population.data.labels, single.labels)
    assert torch.equal(population.test_inputs, single.test_images)
    assert torch.equal(population.test_labels, single.test_labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": IMAGES.float()}, r"images must be \[n, D\] uint8 with n >= 1, got torch.float"),
        ({"test_images": IMAGES[:0]}, r"test_images must be .* got torch.uint8 of shape \(0, 2\)"),
        ({"labels": LABELS[:2]}, r"labels of images must be \[3\] int64"),
        ({"test_labels": LABELS + 1}, r"labels of test_images must be in 0 .. 2"),
        ({"white": 16}, r"images must be at most 16 \(white\), got 255"),
    ],
)
def test_images_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ImageBandit("bad", images(**changes), num_actions=3)


def test_a_tabular_bandit_keeps_its_correct_arms():
    task, draws = TabularBandit(num_contexts=40, num_arms=3), Draws([3, 4])
    correct = task.correct(draws)
    assert correct.shape == (2, 40)
    assert not torch.equal(correct[0], correct[1])
    for step in (0, 1):
        contexts, labels = task.draw(draws, step, 100)
        assert torch.equal(labels, correct.gather(1, contexts))


def test_arms_without_noise_pay_their_means():
    draws, actions = Draws([3, 4]), torch.tensor([[0, 1, 2], [2, 2, 1]])
    assert KArmedBandit(3, correct=1).reward(actions, draws, 0).tolist() == [[0, 1, 0], [0, 0, 1]]
    rewards = KArmedBandit(3, correct=1, gap=0.25).reward(actions, draws, 0)
    assert rewards.tolist() == [[0.75, 1, 0.75], [0.75, 0.75, 1]]


def test_gambling_arm_0_pays_one_surely_and_arm_1_by_chance(device):
    task = KArmedBandit(2, gap=0.5, noise_std=[0.0, 2.0], device=device)
    actions = (torch.arange(20000, device=device) % 2).expand(2, -1)
    rewards = task.reward(actions, Draws([3, 4], device), 7)
    assert (rewards.dtype, rewards.device.type) == (torch.float32, device.type)
    assert (rewards[:, 0::2] == 1).all()
    lucky = rewards[:, 1::2].flatten()
    # Five standard errors of 20000 draws.
    assert abs(float(lucky.mean()) - 0.5) < 5 * 2 / math.sqrt(20000)
    assert abs(float(lucky.std()) - 2) < 5 * 2 / math.sqrt(40000)
    # Pr(R > 1) = Phi(-gap / sigma) = Phi(-0.25) = 0.4013
    assert abs(float((lucky > 1).float().mean()) - 0.4013) < 5 * 0.5 / math.sqrt(20000)


def test_members_may_differ_in_gap_and_noise():
    draws, actions = Draws([3, 4]), torch.ones(2, 50, dtype=torch.int64)
    both = KArmedBandit(2, gap=[0.1, 0.2], noise_std=torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    for member, (gap, std) in enumerate([(0.1, 1.0), (0.2, 3.0)]):
        alone = KArmedBandit(2, gap=gap, noise_std=[0, std]).reward(actions, draws, 0)
        assert torch.equal(both.reward(actions, draws, 0)[member], alone[member])
    with pytest.raises(ValueError, match=r"actions must be of the 2 members .* got shape \(3, 5\)"):
        both.reward(torch.zeros(3, 5, dtype=torch.int64), Draws([1, 2, 3]), 0)


def test_actions_may_have_any_shape_after_the_member():
    task, draws = KArmedBandit(2, noise_std=1.0), Draws([3, 4])
    actions = torch.arange(24).view(2, 3, 4) % 2
    rewards = task.reward(actions, draws, 0)
    assert torch.equal(rewards.flatten(1), task.reward(actions.flatten(1), draws, 0))
    assert task.reward(torch.tensor([0, 1]), draws, 0).shape == (2,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KArmedBandit(1), "num_arms must be >= 2, got 1"),
        (lambda: KArmedBandit(2, correct=2), "correct must be an arm, 0 .. 1, got 2"),
        (lambda: KArmedBandit(2, gap=0.0), "gap must be > 0, .* got 0.0"),
        (lambda: KArmedBandit(2, noise_std=[0, -1]), r"noise_std must be >= 0, .* got \[0, -1\]"),
        (lambda: KArmedBandit(2, noise_std=[0, 1, 2]), r"noise_std must be .*\[2\] or \[P, 2\]"),
        (lambda: TabularBandit(num_contexts=0, num_arms=2), "num_contexts must be >= 1, got 0"),
        (lambda: TabularBandit(num_contexts=1, num_arms=1), "num_arms must be >= 2, got 1"),
    ],
)
def test_impossible_bandits_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
