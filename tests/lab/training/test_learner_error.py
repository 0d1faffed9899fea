"""The error of the learner itself, whoever acted."""

import math

import pytest
import torch

from kondo_lab.training import learner_error
from kondo_lab.training.arms import Arm
from kondo_lab.training.losses import ImportanceWeighted
from kondo_lab.training.member import Frictions
from lab.training import toys
from tolerances import assert_close

ROUGH = Frictions(delay=5, bug=0.5, corruption=1.0)


def population(program, **options):
    members = [toys.member(Arm(), seed=seed, frictions=ROUGH, **options) for seed in (0, 1)]
    found = toys.population(program, members)
    for _ in range(4):
        found.step()
    return found


def test_the_error_on_images_is_one_minus_the_labels_probability(monkeypatch):
    monkeypatch.setattr(learner_error, "IMAGES_AT_ONCE", 7)
    trained = population(toys.bandit_program())
    data = trained.program.task.data
    found = learner_error.image_error(trained, 25)
    for number in range(2):
        twin = toys.single(trained.program, trained.parameters, number)
        probs = twin(data.shown(data.images[:25]).double()).softmax(dim=1)
        right = probs.gather(1, data.labels[:25, None])
        assert_close(
            found[learner_error.LEARNER_ERROR][number], 1 - right.mean(), dtype=torch.float32
        )
    assert found[learner_error.DIVERGED].tolist() == [0, 0]


def test_no_more_images_are_asked_for_than_there_are():
    trained = population(toys.bandit_program())
    few, all_of_them = (learner_error.image_error(trained, n) for n in (40, 1000))
    assert_close(few[learner_error.LEARNER_ERROR], all_of_them[learner_error.LEARNER_ERROR])


def test_the_error_on_sequences_is_of_the_learners_own_answers_to_fresh_prompts():
    trained = population(toys.sequence_program())
    rolled = trained.rolled
    found = learner_error.sequence_error(trained, 4000)[learner_error.LEARNER_ERROR]
    assert trained.rolled is rolled
    # By hand: the mean reward of every answer to every prompt, weighted by its probability.
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 3)
    for number in range(2):
        twin = toys.single(trained.program, trained.parameters, number)
        prompts = tokens.repeat_interleave(27, dim=0)
        answers = tokens.repeat(27, 1)
        with torch.no_grad():
            probs = twin.log_prob({"prompts": prompts, "answers": answers}).sum(dim=1).exp()
        rewards = (answers == prompts.flip(1)).double().mean(dim=1)
        expected = 1 - float((probs * rewards).sum()) / 27
        assert abs(float(found[number]) - expected) < 5 * 0.5 / math.sqrt(4000)


def test_looks_at_different_steps_draw_different_prompts_and_leave_training_alone():
    trained, untouched = (population(toys.sequence_program()) for _ in range(2))
    first = learner_error.sequence_error(trained, 50)[learner_error.LEARNER_ERROR]
    again = learner_error.sequence_error(trained, 50)[learner_error.LEARNER_ERROR]
    assert torch.equal(first, again)
    trained.num_steps += 1
    other = learner_error.sequence_error(trained, 50)[learner_error.LEARNER_ERROR]
    assert not torch.equal(first, other)
    for each in (trained, untouched):
        each.step()
    for name, value in untouched.parameters.items():
        assert torch.equal(trained.parameters[name], value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_policy_that_is_not_finite_has_diverged_and_names_no_label(bad):
    trained = population(toys.bandit_program())
    trained.parameters["2.bias"][1, 0, 0] = bad
    found = learner_error.image_error(trained, 40)
    assert found[learner_error.DIVERGED].tolist() == [0, 1]
    errors = found[learner_error.LEARNER_ERROR].tolist()
    assert errors[0] < 1
    assert errors[1] == 1
    sequences = population(toys.sequence_program())
    sequences.parameters["head"][0] = bad
    assert learner_error.sequence_error(sequences, 20)[learner_error.DIVERGED].tolist() == [1, 0]


def test_importance_weighted_pg_is_named_by_its_cap():
    assert learner_error.capped(math.inf) == "IS-PG"
    assert learner_error.capped(10.0) == "IS-PG cap 10"
    assert learner_error.importance_weighted().loss.max_weight == math.inf
    assert learner_error.importance_weighted(10.0) == Arm(loss=ImportanceWeighted(10.0))
