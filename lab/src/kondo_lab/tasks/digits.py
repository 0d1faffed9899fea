"""Digits as a contextual bandit: see an image, name a digit, be told right or wrong.

The images are the 1797 of 8 x 8 pixels bundled with scikit-learn: nothing is downloaded.
"""

from typing import TYPE_CHECKING

import torch
from sklearn.datasets import load_digits

import kondo
from kondo_lab.tasks import seeds
from kondo_lab.tasks.base import label_reward
from kondo_lab.tasks.images import Images
from kondo_lab.tasks.rollout import Rollout

if TYPE_CHECKING:
    from kondo_lab.models.networks import MLP

INSTEAD_OF_MNIST = (
    "the small size trains on the 1,797 digits of 8 x 8 pixels that come with scikit-learn, "
    "instead of MNIST."
)
"""What a run says where these images stand in for MNIST's."""
NUM_PIXELS = 64
NUM_DIGITS = 10
HELD_OUT_SHARE = 0.2
# The split is the same for every seed, so that test errors of different runs compare.
SPLIT_SEED = 0


def load() -> Images:
    """Return the bundled images, a fifth of them held out for testing."""
    digits = load_digits()
    images = torch.as_tensor(digits.data, dtype=torch.uint8)
    labels = torch.as_tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=seeds.generator(SPLIT_SEED, "split"))
    held_out = round(HELD_OUT_SHARE * len(labels))
    test, train = order[:held_out], order[held_out:]
    return Images(images[train], labels[train], images[test], labels[test], white=16)


class DigitsBandit:
    """Images drawn with replacement, one action each, reward 1{action = label}; for one policy.

    The advantage is R - sum_a pi(a|x)^2, the papers' baseline, which needs no label.

    Args:
        batch: images per rollout.
        seed: of the images drawn and the actions taken.
    """

    unit: kondo.Unit = "sample"

    def __init__(self, *, batch: int, seed: int):
        self.batch = batch
        self._image_generator = seeds.generator(seed, "images")
        self._action_generator = seeds.generator(seed, "actions")
        data = load()
        self.images, self.labels = data.shown(data.images), data.labels
        self.test_images, self.test_labels = data.shown(data.test_images), data.test_labels

    def rollout(self, policy: "MLP") -> Rollout:
        """Show `batch` training images to the policy."""
        drawn = torch.randint(len(self.labels), (self.batch,), generator=self._image_generator)
        images = self.images[drawn]
        actions, log_probs, probs = policy.sample(images, self._action_generator)
        rewards = label_reward(self.labels[drawn], actions)
        advantages = kondo.advantage.expected_confidence(rewards, probs)
        return Rollout({"images": images, "actions": actions}, log_probs, rewards, advantages)

    @torch.no_grad()
    def held_out_error(self, policy: "MLP") -> float:
        """Return the share of held-out images whose most likely action is wrong."""
        wrong = policy(self.test_images).argmax(dim=-1) != self.test_labels
        return float(wrong.float().mean())
