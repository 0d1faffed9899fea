import math

import pytest
import torch
from torch.distributions import Categorical, Independent

from kondo_lab.models.actor_critic import Actor
from tolerances import assert_close


def actor(continuous, seed=0):
    return Actor(
        3, 2, continuous=continuous, width=16, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize(("continuous", "kind"), [(False, Categorical), (True, Independent)])
def test_an_actor_gives_one_distribution_per_row_and_starts_close_to_uniform(continuous, kind):
    found = actor(continuous)(torch.randn(5, 3))
    assert isinstance(found, kind)
    assert found.batch_shape == (5,)
    uniform = 2 * 0.5 * math.log(2 * math.pi * math.e) if continuous else math.log(2)
    assert float((found.entropy() - uniform).detach().abs().max()) < 0.01


@pytest.mark.parametrize("continuous", [False, True])
def test_samples_have_the_distribution_and_its_log_probs(continuous):
    model = actor(continuous)
    with torch.no_grad():  # far from uniform, so that a mistake shows
        model.layers[-1].bias.copy_(torch.tensor([1.0, -0.5]))
    observations = torch.zeros(20_000, 3)
    sampled = model.act(observations, torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(observations)
    assert_close(sampled.log_probs, found.log_prob(sampled.actions))
    assert_close(sampled.entropy, found.entropy())
    mean = found.mean[0] if continuous else found.probs[0, 1]
    assert float((sampled.actions.float().mean(0) - mean).abs().max()) < 0.03
    if continuous:
        assert float((sampled.actions.std(0) - 1).abs().max()) < 0.03


def test_weights_and_samples_come_from_the_generators_alone():
    torch.manual_seed(1)
    one = actor(True)
    torch.manual_seed(2)
    other = actor(True)
    assert torch.equal(one.layers[0].weight, other.layers[0].weight)
    assert not torch.equal(one.layers[0].weight, actor(True, seed=1).layers[0].weight)
    before = torch.random.get_rng_state()
    one.act(torch.zeros(4, 3), torch.Generator())
    assert torch.equal(torch.random.get_rng_state(), before)
