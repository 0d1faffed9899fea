import torch

from kondo_lab.models.networks import MLP
from kondo_lab.tasks import seeds
from kondo_lab.tasks.digits import DigitsBandit
from tolerances import assert_close


def policy():
    return MLP(64, 10, width=16, generator=seeds.generator(0, "weights"))


class Always(MLP):
    """Names the same digit for every image."""

    def __init__(self, digit):
        super().__init__(64, 10, width=4, generator=torch.Generator())
        self.digit = digit

    def forward(self, images):
        return 100.0 * torch.nn.functional.one_hot(torch.tensor(self.digit), 10).float().expand(
            len(images), 10
        )


def test_images_are_split_once_and_for_all():
    first, second = DigitsBandit(batch=3, seed=0), DigitsBandit(batch=3, seed=1)
    assert first.images.shape == (1438, 64)
    assert first.test_images.shape == (359, 64)
    assert torch.equal(first.test_images, second.test_images)
    assert (float(first.images.min()), float(first.images.max())) == (0.0, 1.0)
    # No image is on both sides. Six images occur twice in the bundled set, so rows are counted.
    both = torch.cat([first.images, first.test_images])
    assert len(both) == 1797
    assert sorted(torch.cat([first.labels, first.test_labels]).bincount().tolist()) == [
        174, 177, 178, 179, 180, 181, 181, 182, 182, 183,
    ]  # fmt: skip


def test_reward_is_one_for_the_label_and_the_advantage_subtracts_expected_confidence():
    task = DigitsBandit(batch=500, seed=0)
    rollout = task.rollout(policy())
    known = {tuple(i): int(y) for i, y in zip(task.images.tolist(), task.labels, strict=True)}
    labels = torch.tensor([known[tuple(image)] for image in rollout.rows["images"].tolist()])
    assert torch.equal(rollout.rewards, (rollout.rows["actions"] == labels).float())
    assert 0 < float(rollout.rewards.mean()) < 0.5
    probs = policy()(rollout.rows["images"]).softmax(1)
    assert_close(rollout.advantages, rollout.rewards - probs.square().sum(1))


def test_a_policy_that_says_three_is_right_on_threes_alone():
    task = DigitsBandit(batch=10, seed=0)
    expected = 1 - float((task.test_labels == 3).float().mean())
    assert_close(task.held_out_error(Always(3)), expected, torch.float32)


def test_rollout_log_probs_are_those_of_the_current_weights():
    model = policy()
    rollout = DigitsBandit(batch=50, seed=0).rollout(model)
    assert_close(rollout.log_probs, model.log_prob(rollout.rows))


def test_same_seed_gives_the_same_experience_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    tasks = [DigitsBandit(batch=20, seed=seed) for seed in (7, 7, 8)]
    model = policy()
    (first, again), (same, _), (other, _) = (
        [task.rollout(model) for _ in range(2)] for task in tasks
    )
    assert torch.equal(first.rows["images"], same.rows["images"])
    assert torch.equal(first.rows["actions"], same.rows["actions"])
    assert not torch.equal(first.rows["images"], other.rows["images"])
    assert not torch.equal(first.rows["images"], again.rows["images"])
    assert torch.equal(torch.get_rng_state(), before)


def test_images_do_not_depend_on_the_policy():
    # Methods of one seed are compared on the same images, whatever they answer and draw.
    class DrawsMore(MLP):
        def sample(self, images, generator):
            torch.rand(5, generator=generator)
            return super().sample(images, generator)

    drawn = []
    for model in (policy(), DrawsMore(64, 10, width=4, generator=torch.Generator())):
        task = DigitsBandit(batch=20, seed=7)
        drawn.append([task.rollout(model).rows["images"] for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
