"""What the author's JAX code computes, as literal numbers, beside what ours computes.

The numbers were made with jax 0.10.2, optax 0.2.8 and flax 0.12.8 on a CPU; each test has the few
lines that make them again. None needs JAX, and none has code of the author's.
"""

import math

import numpy as np
import pytest
import torch

import kondo
from kondo_lab.models import networks
from kondo_lab.models.architecture import Architecture
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.training import arms
from kondo_lab.training.losses import ImportanceWeighted, PreferenceOptimisation
from kondo_lab.training.programs import SequenceProgram
from tolerances import assert_close

# A batch of four tokens over three actions.
LOGITS = [[0.5, -1.0, 0.25], [2.0, 0.0, -2.0], [-0.5, 0.5, 1.5], [0.0, 0.0, 0.0]]
ACTIONS = [0, 2, 1, 2]
ADVANTAGES = [0.6, -0.4, 0.3, -0.5]
SAMPLER = [-0.7, -3.0, -0.9, -1.2]
"""The sampler's log-probs, not those of the logits."""


def gradient(loss):
    """Return the gradient, by the logits, of the mean of a loss of the taken actions' log-probs."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    log_probs = logits.log_softmax(dim=1).gather(1, torch.tensor(ACTIONS)[:, None])[:, 0]
    loss(log_probs).mean().backward()
    return logits.grad


# Groups of ten answers with equal rewards of 0, .1, ..., 1.
SEPARATE = [
    *(0.0, -1.4901161193847656e-08, -2.9802322387695312e-08, 2.9802322387695312e-08),
    *(-5.960464477539063e-08, 0.0, 5.960464477539063e-08, 5.960464477539063e-08),
    *(-1.1920928955078125e-07, 0.0, 0.0),
]
FUSED = [
    *(0.0, -1.4901161193847656e-08, -2.9802322387695312e-08, 2.2351741790771484e-08),
    *(-5.960464477539063e-08, 7.450580596923828e-09, 4.470348358154297e-08),
    *(8.195638656616211e-08, -1.1920928955078125e-07, -2.2351741790771484e-08),
    1.4901161193847656e-08,
]


def preferred_by_xla(length):
    """Return the counts k at which ten equal rewards of k of `length` tokens leave U > 0.

    In float32, each operation rounded: k * (1 / H), ten of them added in order, times 0.1.
    """
    found = []
    for count in range(length + 1):
        reward = np.float32(count) * np.float32(1 / length)
        total = np.float32(0)
        for _ in range(10):
            total = np.float32(total + reward)
        if reward - np.float32(total * np.float32(0.1)) > 0:
            found.append(count)
    return found


PREFERRED = {
    10: [3, 6, 7],
    25: [1, 2, 4, 8, 9, 16, 17, 18],
    30: [5, 9, 10, 17, 18, 20, 21],
    50: [1, 2, 4, 8, 9, 16, 17, 18, 31, 32, 33, 34, 35, 36, 37, 39],
}
"""H -> counts of right tokens at which a group of ten equal answers has U > 0 under XLA."""


def left_by_ours(length, reward, arm):
    """Advantages [H + 1] of groups of ten equal answers with k = 0 .. H right tokens.

    The rewards are those of the real task, the advantages those that training uses.
    """
    task = ReversalTask(length=length, num_tokens=2, reward=reward)
    network = StackedDecoder(
        Architecture(ff_width=4), prompt_length=length, answer_length=length, num_tokens=2
    )
    program = SequenceProgram(task, network, num_prompts=length + 1, num_answers=10)
    prompts = torch.zeros(1, length + 1, length, dtype=torch.int64)
    wrong = torch.arange(length) >= torch.arange(length + 1)[:, None]
    answers = wrong.long()[None, :, None].expand(1, length + 1, 10, length)
    rolled = {"prompts": prompts, "answers": answers}
    rolled["rewards"] = program.pay(rolled)
    assert_close(rolled["rewards"][0, :, 0], torch.arange(length + 1) / length)
    rolled["log_probs"] = torch.zeros(1, (length + 1) * 10, length)
    left = program.advantages(arm, rolled).view(length + 1, 10)  # one for all tokens of an answer
    assert torch.equal(left, left[:, :1].expand_as(left))
    return left[:, 0]


def test_ten_equal_rewards_leave_what_xla_leaves():
    """Advantages of equal rewards are not 0: XLA sums in order and multiplies by 0.1.

    r = jnp.repeat((jnp.arange(11) / 10).astype(jnp.float32)[:, None], 10, axis=1)
    jax.jit(lambda r: r - r.mean(axis=1, keepdims=True))(r)[:, 0]      # SEPARATE; eager is the same
    """
    assert left_by_ours(10, "to_first_error", arms.PMPO_FLOAT32).tolist() == SEPARATE


@pytest.mark.parametrize("reward", ["to_first_error", "bag_of_tokens"])
@pytest.mark.parametrize("length", PREFERRED)
def test_our_preferred_groups_are_those_of_xla_at_every_count(length, reward):
    """A mean over H tokens is a product with the rounded 1 / H, not a division.

    tokens = jnp.array([[[1.0] * k + [0.0] * (H - k)] * 10 for k in range(H + 1)], jnp.float32)
    r = tokens.mean(axis=2)
    (r - r.mean(axis=1, keepdims=True))[:, 0] > 0                      # PREFERRED
    """
    assert preferred_by_xla(length) == PREFERRED[length]
    left = left_by_ours(length, reward, arms.PMPO_FLOAT32)
    assert left.gt(0).nonzero().flatten().tolist() == PREFERRED[length]
    assert left_by_ours(length, reward, arms.PMPO).tolist() == [0.0] * (length + 1)


def test_a_program_that_fuses_rewards_and_advantages_leaves_something_else():
    """In one program XLA does not round the rewards: even ten right answers have U > 0.

    tokens = jnp.array([[[1.0] * k + [0.0] * (10 - k)] * 10 for k in range(11)], jnp.float32)

    @jax.jit
    def advantages(tokens):
        rewards = tokens.mean(axis=2)
        return rewards - rewards.mean(axis=1, keepdims=True)

    advantages(tokens)[:, 0]                                           # FUSED

    So which equal groups count as preferred depends on how a compiler cuts the program. Ours is
    the program that does not fuse.
    """
    ours = left_by_ours(10, "bag_of_tokens", arms.PMPO_FLOAT32)
    assert ours.gt(0).nonzero().flatten().tolist() == [3, 6, 7]
    assert [k for k in range(11) if FUSED[k] > 0] == [3, 5, 6, 7, 10]


def test_our_group_mean_leaves_nothing():
    rewards = (torch.arange(11) / 10).repeat_interleave(10)
    assert kondo.advantage.group_mean(rewards, 10).tolist() == [0.0] * 110


# Losses.

PG = [
    [-0.07507234066724777, 0.01671862229704857, 0.0583537258207798],
    [-0.08668132871389389, -0.011731041595339775, 0.09841237962245941],
    [0.006752293091267347, -0.05664536729454994, 0.04989307373762131],
    [-0.0416666679084301, -0.0416666679084301, 0.0833333283662796],
]
RATIO = [
    [-0.07551565766334534, 0.016817346215248108, 0.05869830772280693],
    [-0.0276411771774292, -0.003740826388821006, 0.031382005661726],
    [0.004064441192895174, -0.03409682214260101, 0.030032383278012276],
    [-0.04611273482441902, -0.04611273482441902, 0.09222547709941864],
]
PPO = [
    [-0.0880277156829834, 0.019603785127401352, 0.06842393428087234],
    [0.021670332178473473, 0.0029327603988349438, -0.024603094905614853],
    [0.006315205246210098, -0.05297861248254776, 0.04666340723633766],
    [-0.03777940198779106, -0.03777940198779106, 0.07555881142616272],
]
PMPO = {
    0.0: [
        [0.05421891808509827, -0.012074559926986694, -0.042144354432821274],
        [-0.0939047634601593, -0.012708627618849277, 0.1066133975982666],
        [0.05626910924911499, -0.4720447063446045, 0.4157755970954895],
        [-0.03611111268401146, -0.03611111268401146, 0.07222223281860352],
    ],
    5.9604645e-08: [
        [-0.11260851472616196, 0.025077933445572853, 0.08753058314323425],
        [0.195032998919487, 0.02639484591782093, -0.22142785787582397],
        [0.020256880670785904, -0.16993609070777893, 0.14967922866344452],
        [-0.125, -0.125, 0.25],
    ],
}
"""Advantage of the first two tokens -> gradient."""


def test_on_policy_the_ratio_objective_has_the_gradient_of_pg():
    """What the author calls PG is -mean(pi / mu A) by tokens, without a clip.

    log_probs = lambda z: jax.nn.log_softmax(z)[jnp.arange(4), actions]
    jax.grad(lambda z: -(log_probs(z) * A).mean())(logits)                               # PG
    own = jax.lax.stop_gradient(log_probs(logits))
    jax.grad(lambda z: -(jnp.exp(log_probs(z) - own) * A).mean())(logits)                # PG again
    """
    advantages = torch.tensor(ADVANTAGES)
    losses = (
        lambda lp: kondo.losses.pg(lp, advantages),
        lambda lp: kondo.losses.ppo(lp, advantages, lp.detach(), clip=math.inf),
        lambda lp: kondo.losses.ppo(lp, advantages, lp.detach(), clip=0.1),
        lambda lp: kondo.losses.is_pg(lp, advantages, lp.detach(), max_weight=math.inf),
    )
    for loss in losses:
        assert_close(gradient(loss), torch.tensor(PG))


def test_off_policy_the_ratio_objective_is_pg_with_uncapped_token_weights():
    """jax.grad(lambda z: -(jnp.exp(log_probs(z) - sampler) * A).mean())(logits)         # RATIO"""
    advantages, sampler = torch.tensor(ADVANTAGES), torch.tensor(SAMPLER)
    weighted = ImportanceWeighted()
    losses = (
        lambda lp: kondo.losses.ppo(lp, advantages, sampler, clip=math.inf),
        lambda lp: kondo.losses.is_pg(lp, advantages, sampler, max_weight=math.inf),
        lambda lp: weighted(lp, advantages, old_log_probs=sampler, whole_rows=False),
    )
    for loss in losses:
        assert_close(gradient(loss), torch.tensor(RATIO))


def test_ppo_off_policy():
    """PPO with eps = beta = 0.1.

    def loss(z):
        ratio = jnp.exp(log_probs(z) - sampler)
        kept = jnp.minimum(ratio * A, jnp.clip(ratio, 0.9, 1.1) * A)
        return -kept.mean() + 0.1 * (sampler - log_probs(z)).mean()
    """
    advantages, sampler = torch.tensor(ADVANTAGES), torch.tensor(SAMPLER)
    ours = gradient(lambda lp: kondo.losses.ppo(lp, advantages, sampler, clip=0.1, beta=0.1))
    assert_close(ours, torch.tensor(PPO))


@pytest.mark.parametrize("rounding", PMPO)
def test_pmpo_looks_at_the_sign_of_what_rounding_left(rounding):
    """PMPO with alpha = 0.6, beta = 0.1, gamma = 1e-9; a rounding of 6e-8 turns the update round.

    def loss(z):
        own, preferred = log_probs(z), A > 0
        up = jnp.where(preferred, -own, 0.0).sum() / preferred.sum()
        down = jnp.where(~preferred, jnp.log(1e-9 + jnp.exp(own)), 0.0).sum() / (~preferred).sum()
        return 0.6 * up + 0.4 * down + 0.1 * (sampler - own).mean()
    """
    advantages = torch.tensor([rounding, rounding, 0.3, -0.5])
    share = (advantages > 0).float().mean()
    loss = PreferenceOptimisation(beta=0.1, alpha=0.6)
    ours = gradient(
        lambda lp: loss(lp, advantages, old_log_probs=torch.tensor(SAMPLER), positive_share=share)
    )
    assert_close(ours, torch.tensor(PMPO[rounding]))


# What is below the losses.


def test_adam():
    """Optax's eps stands outside the root, after the bias correction, as torch's does.

    optimiser = optax.adam(1e-2)
    x = jnp.array([1.0, -2.0, 0.5, 0.0], jnp.float32)
    """
    gradients = [[0.1, -2.0, 1e-9, 0.0], [-0.3, 0.5, 1e-9, 1e-8], [0.2, 1.0, -1e-9, 0.0]]
    optax = [
        [0.9900000691413879, -1.9900000095367432, 0.49909090995788574, 0.0],
        [0.9949418902397156, -1.9853054285049438, 0.4981818199157715, -0.003082753624767065],
        [0.9947540163993835, -1.9848310947418213, 0.497943639755249, -0.0051882010884583],
    ]
    x = torch.tensor([1.0, -2.0, 0.5, 0.0], requires_grad=True)
    optimiser = torch.optim.Adam([x], lr=1e-2)
    for given, expected in zip(gradients, optax, strict=True):
        x.grad = torch.tensor(given)
        optimiser.step()
        assert_close(x.detach(), torch.tensor(expected))


def test_log_softmax():
    """jax.nn.log_softmax of equal, far apart, huge and masked logits."""
    logits = [[0.0, 0.0, 0.0], [100.0, 0.0, -100.0], [1e4, 1e4 - 1, 0.0], [-1e30, 0.0, 1.0]]
    xla = [
        [-1.0986123085021973] * 3,
        [0.0, -100.0, -200.0],
        [-0.31326162815093994, -1.31326162815094, -10000.3134765625],
        [-1.0000000150474662e30, -1.31326162815094, -0.31326162815093994],
    ]
    assert_close(torch.tensor(logits).log_softmax(dim=1), torch.tensor(xla))


class Given:
    """Draws that are the given numbers."""

    def __init__(self, uniform):
        self.numbers = uniform

    def uniform(self, name, step, fan_in, fan_out):
        return self.numbers.expand(1, fan_in, fan_out)


def test_truncated_normal_weights_are_those_of_lecun_normal():
    """lecun_normal: variance 1 / fan-in, cut at two deviations of what is drawn, zero biases.

    low, high = jax.lax.erf(-jnp.sqrt(2.0)), jax.lax.erf(jnp.sqrt(2.0))      # -2 / sqrt(2)
    standard = jnp.sqrt(2.0) * jax.lax.erf_inv(low + (high - low) * q)
    standard * jnp.sqrt(1 / 784) / 0.87962566103423978
    """
    quantiles = torch.tensor([0.001, 0.1, 0.25, 0.5, 0.75, 0.999])
    lecun = [-0.080497928, -0.048073709, -0.0259490199, 0.0, 0.0259490199, 0.080497928]
    ours = networks.truncated_normal(Given(quantiles), "any", 784, 6)
    assert_close(ours[0, 0], torch.tensor(lecun))
    # The largest of jax.nn.initializers.lecun_normal()(jax.random.key(0), (784, 100)).
    bound = 2 / (0.87962566103423978 * math.sqrt(784))
    assert bound > 0.08120113611221313
    assert_close(torch.tensor(bound), torch.tensor(0.08120337388132545))
    deviation = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
    assert math.isclose(deviation, 0.87962566103423978, rel_tol=1e-12)
