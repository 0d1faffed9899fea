"""A member's gradient is the engine's on the same rows with the same kept set."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import kondo
from kondo_lab.training import arms
from kondo_lab.training.arms import Arm
from kondo_lab.training.losses import CrossEntropy, ExactPG, PreferenceOptimisation
from kondo_lab.training.programs import BanditProgram
from lab.training import toys
from tolerances import assert_close

PROGRAMS = {"bandit": toys.bandit_program, "sequences": toys.sequence_program}
programs = pytest.mark.parametrize("kind", PROGRAMS)
SEEDS = range(3)


def rolled_population(kind, arm, *, steps=6):
    """Some members after a few updates, with fresh experience and a decision on it."""
    members = [toys.member(arm, seed=seed) for seed in SEEDS]
    population = toys.population(PROGRAMS[kind](), members)
    for _ in range(steps):
        population.step()
    toys.roll(population)
    # As if another policy had acted: the ratios of PPO are not 1, and some are clipped.
    sampled = population.rolled["log_probs"]
    noise = torch.randn(sampled.shape, generator=torch.Generator().manual_seed(0)) / 4
    sampled += noise
    return population


def kept_counts(population):
    return torch.cat([decision.kept for decision in population.groups[0].decisions])


def found_gradients(population, num_rows=None):
    (group,) = population.groups
    num_rows = num_rows or group.num_rows(
        int(kept_counts(population).max()), population.program.num_rows
    )
    found = dict(zip(group.leaves, group.gradients(population, num_rows), strict=True))
    assert any(bool((gradient != 0).any()) for gradient in found.values())
    return found


def rows_of(population, number):
    """A member's batch as the single policy takes it."""
    program, rolled = population.program, population.rolled
    if isinstance(program, BanditProgram):
        images, actions = rolled["inputs"][number].double(), rolled["actions"][number]
        return {"images": images, "actions": actions.squeeze(1)}
    asked = rolled["prompts"][number].repeat_interleave(program.num_answers, dim=0)
    return {"prompts": asked, "answers": rolled["answers"][number].flatten(0, 1)}


def per_unit(population, number):
    """A member's advantages and old log-probs, as the single policy's log-probs are shaped."""
    advantages = toys.decision_of(population, number)[0]
    old = population.rolled["log_probs"][number]
    if isinstance(population.program, BanditProgram):
        return advantages.squeeze(1), old.squeeze(1)
    return advantages.expand_as(old), old


def core_loss(arm, advantages, old):
    """The core's loss of an arm, and what else it takes by row."""
    if not isinstance(arm.loss, PreferenceOptimisation):
        return arm.loss, {} if arm.loss is kondo.losses.pg else {"old_log_probs": old}
    share = float((advantages > 0).double().mean())
    pmpo = partial(
        kondo.losses.pmpo,
        alpha=arm.loss.alpha,
        beta=arm.loss.beta,
        positive_share=share if 0 < share < 1 else None,
    )
    return pmpo, {"old_log_probs": old}


def assert_gradients(found, number, policy):
    for name, expected in toys.gradients(policy).items():
        assert_close(found[name][number].view(expected.shape), expected)


def same_set(keep):
    """A gate that keeps given rows."""

    def gate(delight, mask, generator):
        weight = keep.to(delight.dtype)
        rate = keep.double().mean()
        return kondo.Choice(keep, weight, torch.zeros(()).double(), rate, weight)

    return gate


@programs
@pytest.mark.parametrize("name", [n for n, u in toys.ARMS.items() if not u.trains_all_rows])
def test_gated_gradients_are_the_engines(kind, name):
    arm = toys.ARMS[name]
    population = rolled_population(kind, arm)
    found = found_gradients(population)
    for number in range(len(SEEDS)):
        keep = toys.decision_of(population, number).keep.squeeze(1)
        advantages, old = per_unit(population, number)
        loss, loss_inputs = core_loss(arm, advantages, old)
        twin = toys.single(population.program, population.parameters, number)
        report = kondo.backward(
            twin.log_prob,
            rows_of(population, number),
            advantages,
            gate=same_set(keep),
            loss=loss,
            loss_inputs=loss_inputs,
            unit="sample" if kind == "bandit" else "sequence",
        )
        assert report.rows_trained == int(kept_counts(population)[number])
        assert_gradients(found, number, twin)


@programs
@pytest.mark.parametrize(
    ("arm", "gate"),
    [
        (Arm(gate=kondo.Gate(rate=0.3)), partial(kondo.Gate, rate=0.3)),
        (Arm(gate=kondo.Gate(price=0.0)), partial(kondo.Gate, price=0.0)),
        (Arm(gate=kondo.Gate(price=0.25)), partial(kondo.Gate, price=0.25)),
    ],
    ids=["top", "price 0", "price 0.25"],
)
def test_a_gated_step_is_kondo_backward(kind, arm, gate):
    members = [toys.member(arm, seed=seed) for seed in SEEDS]
    population = toys.population(PROGRAMS[kind](), members)
    for _ in range(6):
        population.step()
    toys.roll(population)
    found = found_gradients(population)
    for number in range(len(SEEDS)):
        advantages, _ = per_unit(population, number)
        twin = toys.single(population.program, population.parameters, number)
        report = kondo.backward(
            twin.log_prob,
            rows_of(population, number),
            advantages,
            gate=gate(),
            unit="sample" if kind == "bandit" else "sequence",
        )
        assert report.kept == int(kept_counts(population)[number])
        assert_gradients(found, number, twin)


@programs
@pytest.mark.parametrize("name", ["PG", "PPO", "PMPO"])
def test_dense_gradients_are_those_of_the_mean_loss(kind, name):
    arm = toys.ARMS[name]
    population = rolled_population(kind, arm)
    found = found_gradients(population)
    for number in range(len(SEEDS)):
        advantages, old = per_unit(population, number)
        loss, loss_inputs = core_loss(arm, advantages, old)
        twin = toys.single(population.program, population.parameters, number)
        log_probs = twin.log_prob(rows_of(population, number))
        loss(log_probs, advantages, **loss_inputs).mean().backward()
        assert_gradients(found, number, twin)


@programs
@pytest.mark.parametrize("name", ["IS", "IS capped"])
def test_importance_weights_are_of_an_action_or_of_a_whole_answer(kind, name):
    arm = toys.ARMS[name]
    population = rolled_population(kind, arm)
    found = found_gradients(population)
    for number in range(len(SEEDS)):
        advantages, old = per_unit(population, number)
        twin = toys.single(population.program, population.parameters, number)
        log_probs = twin.log_prob(rows_of(population, number))
        ratio = log_probs.detach().exp() / old.exp()
        if kind == "sequences":
            ratio = ratio.prod(dim=1, keepdim=True)
        weight = ratio.clamp_max(arm.loss.max_weight)
        assert ratio.min() < 0.9
        assert ratio.max() > 1.1
        (-weight * advantages * log_probs).mean().backward()
        assert_gradients(found, number, twin)
        if kind == "bandit":
            cap = None if name == "IS" else arm.loss.max_weight
            own = kondo.losses.is_pg(log_probs, advantages, old, max_weight=cap)
            assert_close(own, -weight * advantages * log_probs.detach())


@programs
@pytest.mark.parametrize("name", ["DG", "DG cool"])
def test_soft_gradients_are_those_of_dg(kind, name):
    arm = toys.ARMS[name]
    members = [toys.member(arm, seed=seed) for seed in SEEDS]
    population = toys.population(PROGRAMS[kind](), members)
    population.step()
    toys.roll(population)
    found = found_gradients(population)
    for number in range(len(SEEDS)):
        advantages, _ = per_unit(population, number)
        twin = toys.single(population.program, population.parameters, number)
        log_probs = twin.log_prob(rows_of(population, number))
        kondo.losses.dg(log_probs, advantages, eta=arm.gate.eta).mean().backward()
        assert_gradients(found, number, twin)


@pytest.mark.parametrize("name", ["PG", "DG", "quantile"])
def test_several_actions_per_image_are_averaged_and_gated_together(name):
    arm = toys.ARMS[name]
    program = toys.bandit_program(samples=3)
    members = [toys.member(arm, seed=seed) for seed in SEEDS]
    population = toys.population(program, members)
    population.step()
    toys.roll(population)
    found = found_gradients(population)
    for number in range(len(SEEDS)):
        rolled = {key: value[number] for key, value in population.rolled.items()}
        twin = toys.single(program, population.parameters, number)
        log_probs = twin(rolled["inputs"].double()).log_softmax(dim=-1)
        confidence = log_probs.detach().exp().square().sum(dim=1, keepdim=True)
        rewards = (rolled["actions"] == rolled["labels"]).double()
        advantages = rewards - confidence
        taken = log_probs.gather(1, rolled["actions"])
        chi = (-taken * advantages).detach()
        if name == "DG":
            weight = torch.sigmoid(chi)
        elif name == "quantile":
            count = max(1, round(arm.gate.rate * program.num_rows))
            delight = chi.sum(dim=1)
            weight = (delight >= delight.sort().values[-count] - 1e-6)[:, None].double()
            assert int(kept_counts(population)[number]) == int(weight.sum())
        else:
            weight = torch.ones_like(chi)
        (-(weight * advantages) * taken).mean().backward()
        assert_gradients(found, number, twin)


@pytest.mark.parametrize("loss", [ExactPG(), CrossEntropy()], ids=repr)
@pytest.mark.parametrize("gate", [None, kondo.Gate(rate=0.25)], ids=repr)
def test_exact_gradients_are_of_the_labels_also_for_another_rule(loss, gate):
    rule = Arm(gate=gate)
    members = [toys.member(rule, seed=seed) for seed in SEEDS]
    population = toys.population(toys.bandit_program(), members)
    population.step()
    toys.roll(population)
    (group,) = population.groups
    exact = group.gradients(population, population.program.num_rows, arm=Arm(loss=loss))
    found = dict(zip(group.leaves, exact, strict=True))
    for number in range(len(SEEDS)):
        twin = toys.single(population.program, population.parameters, number)
        logits = twin(population.rolled["inputs"][number].double())
        labels = population.rolled["labels"][number].squeeze(1)
        if loss == CrossEntropy():
            F.cross_entropy(logits, labels).backward()
        else:
            (-logits.softmax(dim=1).gather(1, labels[:, None]).mean()).backward()
        assert_gradients(found, number, twin)


@programs
@pytest.mark.parametrize("name", ["quantile", "top", "price 0", "draw", "gated PPO", "gated PMPO"])
def test_padding_adds_nothing(kind, name):
    population = rolled_population(kind, toys.ARMS[name])
    least = int(kept_counts(population).max())
    exact = found_gradients(population, least)
    for num_rows in range(least, population.program.num_rows + 1):
        for name, gradient in found_gradients(population, num_rows).items():
            assert_close(gradient, exact[name])


@programs
def test_where_nothing_is_kept_the_gradient_is_zero(kind):
    # Beside a member that keeps rows, so that the other's are padding.
    members = [toys.member(Arm(gate=kondo.Gate(price=price))) for price in (0.0, 1e6)]
    population = toys.population(PROGRAMS[kind](), members)
    toys.roll(population)
    nothing = toys.place(population, members[1])
    counts = kept_counts(population)
    assert counts[nothing] == 0
    assert counts[1 - nothing] > 0
    for gradient in found_gradients(population).values():
        assert (gradient[nothing] == 0).all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("baseline", ["expected", "zero", "constant", "oracle"])
def test_bandit_advantages_are_reward_minus_the_baseline(baseline):
    arm = Arm(baseline=baseline)
    population = toys.population(toys.bandit_program(samples=2), [toys.member(arm)])
    toys.roll(population)
    rolled = {key: value[0] for key, value in population.rolled.items()}
    probs = rolled["distribution"].exp()
    for row in range(population.program.num_rows):
        label = int(rolled["labels"][row])
        level = {
            "expected": sum(float(p) ** 2 for p in probs[row]),
            "zero": 0.0,
            "constant": 0.5,
            "oracle": float(probs[row, label]),
        }[baseline]
        for sample in range(2):
            reward = 1.0 if int(rolled["actions"][row, sample]) == label else 0.0
            found = toys.decision_of(population, 0)[0][row, sample]
            assert_close(found.double(), reward - level)


def test_sequence_advantages_are_centred_by_prompt_and_equal_rewards_leave_nothing():
    program = toys.sequence_program(num_prompts=2, num_answers=10)
    rewards = torch.tensor([[[0.6] * 10, [1.0] * 5 + [0.0] * 5]])
    assert rewards[0, 0].mean() != rewards[0, 0, 0]  # the mean of ten times 0.6 is rounded
    rolled = {"rewards": rewards, "log_probs": torch.zeros(1, 20, 3)}
    advantages = program.advantages(Arm(), rolled)
    expected = torch.tensor([0.0] * 10 + [0.5] * 5 + [-0.5] * 5)
    assert torch.equal(advantages, expected.view(1, 20, 1))


@programs
def test_ppo_without_a_kl_term_is_pg_on_its_own_samples(kind):
    """Ratios are 1 up to rounding, hence never clipped, and their gradient is the log-probs'."""
    found = []
    for arm in (arms.PG, arms.PPO):
        members = [toys.member(arm, seed=seed) for seed in SEEDS]
        population = toys.population(PROGRAMS[kind](), members)
        for _ in range(6):
            population.step()
        toys.roll(population)
        found.append(found_gradients(population))
    pg, ppo = found
    for name, gradient in pg.items():
        assert_close(ppo[name], gradient)
