import math

import pytest
import torch

from kondo_lab.models.sampler import sample
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text import NUM_TOKENS, make
from kondo_lab.training import supervised
from kondo_lab.training.optimiser import StackedAdam
from kondo_lab.training.supervised import (
    Start,
    learning_rate_at,
    mean_reward,
    warm_start,
)
from lab.training import language_toys as toys
from lab.training.toys import HostIsBlind
from tolerances import assert_close


def quick(seeds=(0, 1), *, num_steps=60, device=toys.CPU, **options):
    settings = {"num_steps": num_steps, "batch": 16, "learning_rate": 1e-2, "device": device}
    return warm_start(toys.model(), toys.Echo(), list(seeds), **(settings | options))


def test_the_learning_rate_rises_and_falls():
    steps = torch.arange(1, 101)
    rates = learning_rate_at(steps, 100, highest=0.5, warmup=0.1)
    assert_close(rates[:10], steps[:10] / 10 * 0.5)
    falling = [0.25 * (1 + math.cos(math.pi * (t - 10) / 91)) for t in range(10, 101)]
    assert_close(rates[9:], torch.tensor(falling))
    assert rates.argmax() == 9
    assert 0 < rates[-1] < 1e-3


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_a_warmup_that_is_no_share_is_refused(warmup):
    with pytest.raises(ValueError, match=r"warmup must lie in \(0, 1\)"):
        learning_rate_at(torch.tensor(1), 10, highest=1.0, warmup=warmup)


def test_the_loss_is_the_mean_surprisal_of_demonstrated_tokens():
    task = make("addition", 1)
    own = toys.model(
        prompt_length=task.prompt_length, answer_length=task.answer_length, num_tokens=NUM_TOKENS
    )
    parameters, draws = toys.parameters(own), Draws([0, 1])
    found = supervised.demonstration_loss(own, parameters, task, draws, 3, 5)
    prompts = task.prompts(draws, "demonstrated", 3, 5)
    shown = task.demonstrations(prompts)
    log_probs = own.log_prob(parameters, torch.cat([prompts, shown], dim=-1))
    for member in range(2):
        surprisals = [
            -log_probs[member, row, place]
            for row in range(5)
            for place in range(shown[member, row].tolist().index(1) + 1)
        ]
        assert len(surprisals) < log_probs[member].numel()  # some of them are shorter
        assert_close(found[member], torch.stack(surprisals).mean())


def test_a_warm_start_leads_to_rewards_that_can_be_learned_from():
    start, points = quick(measure_steps=[1, 20])
    assert [point.step for point in points] == [1, 20, 60]
    first, _, last = points
    for member in range(2):
        assert last.loss[member] < 0.6 * first.loss[member]
        assert first.reward[member] < 0.15
        assert last.reward[member] > 0.3
    assert start.seeds == (0, 1)
    assert not torch.equal(start.parameters["head"][0], start.parameters["head"][1])


def test_a_seed_starts_alike_in_any_company():
    both, _ = quick([3, 4], num_steps=5)
    alone, _ = quick([4], num_steps=5)
    for name, value in both.of([4]).items():
        assert_close(value, alone.parameters[name])


def test_progress_tells_the_reward():
    told = []
    quick(num_steps=4, measure_steps=[2], progress=lambda *news: told.append(news))
    assert [share for share, _ in told] == [0.5, 1.0]
    assert all(note.startswith("reward ") for _, note in told)


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_must_be_different(seeds):
    with pytest.raises(ValueError, match="seeds must be different, and at least one"):
        quick(seeds, num_steps=1)


def test_a_start_gives_every_arm_of_a_seed_a_copy():
    parameters = toys.parameters(toys.model(), [5, 9])
    start = Start((5, 9), parameters)
    several = start.of([9, 5, 9])
    for name, value in several.items():
        assert torch.equal(value, parameters[name][[1, 0, 1]])
        value.zero_()
        assert (parameters[name] != 0).any()
    with pytest.raises(ValueError, match=r"seeds must be among those that were trained, \[5, 9\]"):
        start.of([5, 6])


def test_a_start_is_saved_and_loaded(tmp_path, device):
    start = Start((5, 9), toys.parameters(toys.model(), [5, 9], dtype=torch.float32))
    start.save(tmp_path / "start.pt")
    loaded = Start.load(tmp_path / "start.pt", device)
    assert loaded.seeds == (5, 9)
    assert loaded.parameters.keys() == start.parameters.keys()
    for name, value in loaded.parameters.items():
        assert value.device.type == device.type
        assert torch.equal(value.cpu(), start.parameters[name])


@pytest.mark.parametrize("greedy", [True, False])
def test_the_mean_reward_is_that_of_held_out_prompts(greedy):
    own, task, draws = toys.model(), toys.Echo(), Draws([0, 1])
    parameters = quick()[0].parameters
    found = mean_reward(own, parameters, task, draws, 50, greedy=greedy)
    prompts = task.prompts(draws, "held out", 0, 50, held_out=True)
    assert (prompts[..., 1] == 2).all()
    sampled = sample(
        own,
        parameters,
        prompts,
        draws=None if greedy else draws,
        stream="held-out completions",
    )
    right = [[row[2:4] == [row[0], 1] for row in rows.tolist()] for rows in sampled.tokens]
    assert_close(found, torch.tensor(right).double().mean(dim=1), dtype=torch.float32)
    assert torch.equal(found, mean_reward(own, parameters, task, draws, 50, greedy=greedy))


def test_the_host_is_not_asked_by_a_step():
    own, task, draws = toys.model(), toys.Echo(), Draws([0, 1])
    parameters = toys.parameters(own, dtype=torch.float32)
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    adam, rate = StackedAdam(parameters, [1.0, 1.0], max_norm=1.0), torch.tensor(1.0)
    adam.set_rate(rate)
    with HostIsBlind():
        step = torch.tensor(2)
        losses = supervised.demonstration_loss(own, leaves, task, draws, step, 4)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        rate.copy_(learning_rate_at(step, 10, highest=1.0, warmup=0.2))
        adam.step(dict(zip(leaves, gradients, strict=True)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_device_starts_where_the_cpu_does():
    here, points = quick(num_steps=8)
    there, others = quick(num_steps=8, device=torch.device("cuda"))
    for name, value in there.parameters.items():
        # Eight steps of Adam on gradients that are rounded differently.
        assert_close(value, here.parameters[name], dtype=torch.bfloat16)
    losses = (torch.tensor(each[-1].loss) for each in (others, points))
    assert_close(*losses, dtype=torch.float16)


def test_a_seed_stops_where_its_reward_is_high_enough():
    options = {"num_steps": 30, "measure_steps": range(1, 31), "num_prompts": 50}
    _, full = quick([0, 1], **options)
    rewards = torch.tensor([point.reward for point in full])  # [30, 2]

    def first(level):
        return (rewards >= level).int().argmax(dim=0).tolist()

    reached = [level for level in rewards[:, 0].tolist() if level <= rewards[:, 1].max()]
    until = next(level for level in reached if len(set(first(level))) == 2)
    start, points = quick([0, 1], until=until, **options)
    assert len(points) == max(first(until)) + 1
    found = mean_reward(toys.model(), start.parameters, toys.Echo(), Draws([0, 1]), 50)
    assert found.tolist() == [float(rewards[n, seed]) for seed, n in enumerate(first(until))]


def test_a_seed_that_never_gets_there_has_its_last_weights():
    start, points = quick([0, 1], num_steps=6, measure_steps=[3], until=2.0)
    last, _ = quick([0, 1], num_steps=6)
    assert [point.step for point in points] == [3, 6]
    for name, value in start.parameters.items():
        assert torch.equal(value, last.parameters[name])
