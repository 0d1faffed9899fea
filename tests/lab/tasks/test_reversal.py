import torch

from kondo_lab.models.decoder_module import Decoder
from kondo_lab.tasks import seeds
from kondo_lab.tasks.reversal import Reversal, ReversalTask
from tolerances import assert_close

# Backwards, the prompt reads 4 3 2 1.
PROMPTS = torch.tensor([[1, 2, 3, 4]] * 5)
ANSWERS = torch.tensor(
    [
        [4, 3, 2, 1],  # all right
        [4, 3, 0, 1],  # wrong in place 3: prefix 2 of 4, bag 3 of 4
        [0, 3, 2, 1],  # wrong in place 1: prefix 0 of 4, bag 3 of 4
        [4, 0, 0, 0],  # prefix 1 of 4, bag 1 of 4
        [1, 2, 3, 4],  # a copy, not a reversal: nothing
    ]
)


def paid(prompts, answers, reward):
    rule = ReversalTask(length=4, num_tokens=5, reward=reward)
    return rule.reward(prompts, answers)


def task(seed, **changes):
    sizes = {"length": 4, "num_tokens": 3, "num_prompts": 5, "num_answers": 6} | changes
    return Reversal(seed=seed, **sizes)


def policy():
    return Decoder.fresh(prompt_length=4, num_tokens=3, generator=seeds.generator(0, "weights"))


def test_reward_to_first_error():
    assert paid(PROMPTS, ANSWERS, "to_first_error").tolist() == [1.0, 0.5, 0.0, 0.25, 0.0]


def test_reward_of_a_bag_of_tokens():
    assert paid(PROMPTS, ANSWERS, "bag_of_tokens").tolist() == [1.0, 0.75, 0.75, 0.25, 0.0]


def test_rollout_pays_each_answer_to_its_own_prompt():
    rollout = task(0).rollout(policy())
    prompts, answers = rollout.rows["prompts"], rollout.rows["answers"]
    assert prompts.shape == answers.shape == rollout.log_probs.shape == (30, 4)
    for first in range(0, 30, 6):  # six answers to one prompt stand together
        assert (prompts[first : first + 6] == prompts[first]).all()
    assert len(prompts.unique(dim=0)) > 1
    assert torch.equal(rollout.rewards, paid(prompts, answers, "to_first_error"))
    means = rollout.rewards.view(5, 6).mean(dim=1, keepdim=True)
    assert_close(rollout.advantages, (rollout.rewards.view(5, 6) - means).flatten())


def test_rollout_uses_the_reward_it_was_given():
    rollout = task(0, reward="bag_of_tokens").rollout(policy())
    prompts, answers = rollout.rows["prompts"], rollout.rows["answers"]
    assert torch.equal(rollout.rewards, paid(prompts, answers, "bag_of_tokens"))
    assert not torch.equal(rollout.rewards, paid(prompts, answers, "to_first_error"))


def test_rollout_log_probs_are_those_of_the_current_weights():
    model = policy()
    rollout = task(0).rollout(model)
    assert_close(rollout.log_probs, model.log_prob(rollout.rows))


def test_same_seed_gives_the_same_experience_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    runs = [task(seed) for seed in (7, 7, 8)]
    model = policy()
    (first, again), (same, _), (other, _) = (
        [run.rollout(model).rows["answers"] for _ in range(2)] for run in runs
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_held_out_since_every_prompt_is_new():
    assert task(0).held_out_error(policy()) is None
