import pytest
import torch

from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.tasks.digits import DigitsBandit
from kondo_lab.tasks.draws import Draws
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
