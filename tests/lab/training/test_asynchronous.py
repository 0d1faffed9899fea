import dataclasses
import threading
from itertools import pairwise

import pytest
import torch

from kondo_lab.training.asynchronous import LAG, TURNS, AsynchronousPopulation, running
from kondo_lab.training.corrections import corrections
from kondo_lab.training.member import NONE, Frictions
from kondo_lab.training.population import Population
from lab.training import language_toys as toys

EVERY = {each.name: each for each in corrections()}


def member(name, queue, **options):
    return toys.member(EVERY[name], Frictions(queue=queue) if queue else NONE, **options)


def make(members, kind=AsynchronousPopulation):
    return toys.population(members, kind=kind, num_prompts=3, repeats=4, num_held_out=5)


def steps(population, count):
    for _ in range(count):
        population.step()


def both(queue):
    return [member(name, queue) for name in ("PPO clip 0.2", "GRPO uncorrected")]


def test_the_first_steps_take_turns_and_are_those_of_a_population():
    own, other = make(both(2)), make(both(0), Population)
    with running(own):
        for _ in range(TURNS):
            own.step()
            other.step()
        assert own.read()[LAG] == [0.0, 0.0]
    for name, value in own.parameters.items():
        assert torch.equal(value, other.parameters[name])


@pytest.mark.parametrize("queue", [1, 3])
def test_batches_are_late_by_no_more_than_the_queue_allows(queue):
    with running(make(both(queue))) as own:
        for _ in range(TURNS):
            own.step()
        own.read()
        found = []
        for _ in range(20):
            own.step()
            found += own.read()[LAG][:1]
    assert all(0 <= lag <= queue + 1 for lag in found)
    # A batch is drawn before the update that it waits for, at the latest while that is made.
    assert max(found) >= 1
    assert own.num_steps == TURNS + 20


def test_every_batch_is_drawn_once_and_trained_on_in_order():
    with running(make(both(2))) as own:
        seen, load = [], own._load

        def watched(batch):
            seen.append(batch.rolled["tokens"].clone())
            load(batch)

        own._load = watched
        for _ in range(TURNS + 6):
            own.step()
    program = own.program
    for step, tokens in enumerate(seen, start=1):
        drawn = program.task.prompts(own.draws, "prompts", torch.tensor(step), 3)
        assert torch.equal(tokens[:, ::4, : program.prompt_length], drawn)


def test_the_actors_have_weights_that_were_published_whole():
    with running(make(both(1))) as own:
        drawn, experience = [], own.experience

        def watched(actors, step):
            drawn.append({name: value.clone() for name, value in actors.items()})
            return experience(actors, step)

        own.experience = watched
        published = [{name: value.clone() for name, value in own.parameters.items()}]
        for _ in range(TURNS + 10):
            own.step()
            published.append({name: value.clone() for name, value in own.parameters.items()})
    for actors in drawn:
        same = [all(torch.equal(actors[name], one[name]) for name in one) for one in published]
        assert sum(same) == 1


def test_actors_end_with_the_population():
    before = threading.active_count()
    with running(make(both(1))) as own:
        for _ in range(TURNS + 1):
            own.step()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_failure_of_the_actors_reaches_the_learner():
    with running(make(both(1))) as own:
        for _ in range(TURNS + 1):
            own.step()

        def broken(*_):
            raise ValueError("no more prompts")

        own.experience = broken
        with pytest.raises(RuntimeError, match="ValueError: no more prompts"):
            steps(own, 10)


def test_a_state_goes_on_with_the_next_batch():
    with running(make(both(1))) as own:
        for _ in range(TURNS + 3):
            own.step()
        own.close()
        own._lags[-1] = 5  # whatever the clock made of it
        state = own.state_dict()
    with running(make(both(1))) as other:
        other.load_state_dict(state)
        for name, value in other.parameters.items():
            assert torch.equal(value, own.parameters[name])
        steps(other, TURNS)  # which take turns: their lag is 0
        before = own.read()[LAG][0] * own.num_steps
        assert before >= 5
        assert other.read()[LAG] == [before / other.num_steps] * 2
        steps(other, 2)
        assert other.num_steps == 2 * TURNS + 5


def test_queues_must_be_one():
    mixed = [member("PPO clip 0.2", 1), member("GRPO uncorrected", 2)]
    with pytest.raises(ValueError, match="one queue of at least 1 batch, got \\[1, 2\\]"):
        make(mixed)
    with pytest.raises(ValueError, match="got \\[0\\]"):
        make(both(0))
    with pytest.raises(ValueError, match="take turns here"):
        make(both(1), Population)


def test_a_decay_takes_the_learning_rate_to_zero():
    constant, decayed = (member("GRPO uncorrected", 0, decay_steps=steps) for steps in (0, 2))
    decayed = dataclasses.replace(decayed, series="decayed")
    own = make([constant, decayed], Population)
    place = {each.series: index for index, each in enumerate(own.members)}
    heads = [own.parameters["head"].clone()]
    for _ in range(3):
        own.step()
        heads.append(own.parameters["head"].clone())
    moved = [(after - before).abs().amax(dim=(1, 2)) for before, after in pairwise(heads)]
    mine, others = place["decayed"], place["GRPO uncorrected"]
    assert moved[0][mine] == moved[0][others] > 0
    assert moved[1][mine] > 0
    assert moved[2][mine] == 0 < moved[2][others]
