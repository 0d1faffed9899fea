import dataclasses
import itertools
import math

import pytest
import torch

pytest.importorskip("gymnasium", reason="the extra kondo-lab[control] is not installed")

import kondo
from kondo_lab.studies.control.training import Run, Training, compare, gae
from oracles import control as oracle
from tolerances import assert_close

REINFORCE = Training(
    task="CartPole-v1", num_envs=8, horizon=50, iterations=4, gamma=0.99, learning_rate=1e-2
)
PPO = Training(
    task="Pendulum-v1",
    num_envs=4,
    horizon=60,
    iterations=2,
    gamma=0.9,
    gae_lambda=0.95,
    learning_rate=1e-3,
    epochs=3,
    minibatches=4,
    clip=0.2,
    reward_scale=0.1,
)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_advantages_are_the_oracles(gae_lambda):
    torch.manual_seed(0)
    rewards, values = torch.randn(12, 3).double(), torch.randn(13, 3).double()
    ended = torch.rand(12, 3) < 0.3
    terminated = ended & (torch.rand(12, 3) < 0.5)
    assert (ended & ~terminated).any()
    assert terminated.any()
    found = gae(
        rewards, values, terminated=terminated, ended=ended, gamma=0.9, gae_lambda=gae_lambda
    )
    for column in range(3):
        parts = (each[:, column].tolist() for each in (rewards, values, terminated, ended))
        wanted = oracle.gae(*parts, 0.9, gae_lambda)
        assert_close(found[:, column], torch.tensor(wanted, dtype=torch.float64))


def test_gradients_are_compared_as_vectors():
    # (3, 4) and (4, 3): cosine 24 / 25; distance^2 2, norm^2 25.
    found = compare(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]))
    assert found.cosine == pytest.approx(24 / 25)
    assert found.error == pytest.approx(2 / 25)
    nothing = compare(torch.zeros(2), torch.ones(2))
    assert math.isnan(nothing.cosine)
    assert nothing.error == 1


def last(training, make_gate, seed=0, **options):
    *_, progress = Run(training, make_gate, seed).train(**options)
    return progress


def dense(_):
    return None


@pytest.mark.parametrize("training", [REINFORCE, PPO])
def test_a_dense_run_differentiates_every_row_it_is_shown(training):
    progress = last(training, dense, compared=[training.iterations])
    assert progress.iteration == training.iterations
    # The only steps that do not count are those after an end.
    steps = training.batch * training.iterations
    assert 0.9 * steps <= progress.samples <= steps
    assert progress.passes == training.epochs * progress.samples == progress.differentiated
    assert (progress.rate, progress.gradient_error) == (1.0, 0.0)
    assert progress.cosine == pytest.approx(1)


@pytest.mark.parametrize("training", [REINFORCE, PPO])
def test_a_gated_run_pays_for_the_rows_it_keeps(training):
    progress = last(training, lambda _: kondo.UnbiasedGate(rate=0.2), compared=[1])
    assert progress.rate == pytest.approx(0.2, abs=0.01)
    assert progress.differentiated == pytest.approx(0.2 * progress.passes, rel=0.05)
    assert math.isnan(progress.cosine)  # not in the last iteration


def test_comparing_gradients_changes_nothing():
    gate = lambda _: kondo.UnbiasedGate(rate=0.2)  # noqa: E731
    found = [last(REINFORCE, gate, compared=some) for some in ((), range(5))]
    assert found[0][:-2] == found[1][:-2]


def test_runs_of_a_seed_begin_alike_whatever_the_gate_and_are_repeatable():
    gates = {"dense": dense, "delight": lambda _: kondo.Gate(rate=0.1)}
    firsts = {n: next(iter(Run(REINFORCE, gate, 1).train())) for n, gate in gates.items()}
    assert firsts["dense"].entropy == firsts["delight"].entropy
    assert firsts["dense"].samples == firsts["delight"].samples
    again, other = last(REINFORCE, gates["delight"], 1), last(REINFORCE, gates["delight"], 2)
    assert last(REINFORCE, gates["delight"], 1)[:-2] == again[:-2] != other[:-2]


class FirstOnly(kondo.BaseGate):
    """Keep everything in the first step, and nothing afterwards."""

    def __init__(self):
        self.calls = 0

    def choose(self, values, mask, generator=None):
        self.calls += 1
        return kondo.Choice.of(mask & (self.calls == 1), mask)


def test_a_step_that_keeps_nothing_leaves_the_policy_alone():
    run = Run(REINFORCE, lambda _: FirstOnly(), 0)
    iterations = iter(run.train())
    assert next(iterations).rate > 0
    before = [p.clone() for p in run._actor.parameters()]
    assert next(iterations).rate == 0
    for now, then in zip(run._actor.parameters(), before, strict=True):  # Adam has momentum
        assert torch.equal(now, then)


def test_reinforce_learns_to_balance_and_ppo_to_swing():
    longer = dataclasses.replace(REINFORCE, num_envs=32, horizon=100, iterations=12)
    returns = [p.mean_return for p in Run(longer, dense, 0).train()]
    assert returns[-1] > returns[0] + 60
    # A positive clip and several epochs make larger steps than one epoch does.
    entropies = [p.entropy for p in itertools.islice(Run(PPO, dense, 0).train(), 2)]
    assert entropies[0] != entropies[1]
