"""Draft screens: the gate sees the old, the rounded or the narrower network, nothing else."""

import copy
import dataclasses

import pytest
import torch

import kondo
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import draft_screens
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything
from lab.training import toys
from tolerances import TOLERANCES, assert_close

RATE = 0.25
DRAFTS = {
    "stale": Arm(gate=kondo.Gate(rate=RATE), screen="stale", draft=3),
    "quantised": Arm(gate=kondo.Gate(rate=RATE), screen="quantised", draft=3),
    "narrow": Arm(gate=kondo.Gate(rate=RATE), screen="narrow", draft=2),
}
drafts = pytest.mark.parametrize("kind", DRAFTS)


def population_of(*arms, seeds=(0, 1), program=None):
    members = [toys.member(arm, seed=seed) for arm in arms for seed in seeds]
    return toys.population(program or toys.bandit_program(), members)


def is_close(found, expected):
    return torch.allclose(found, expected, **TOLERANCES[found.dtype])


def frozen(parameters):
    return {name: value.detach().clone() for name, value in parameters.items()}


def seen_by(population):
    """Log-probs of the draft of the population's only rule, from now on, step by step."""
    ((rule,),) = (group.rules for group in population.groups)
    seen, screen = [], rule.screen

    def spy(rolled, step):
        said = screen(rolled, step)
        seen.append(said["log_probs"])
        return said

    rule.screen = spy
    return seen


def distribution_of(population, parameters):
    """Log-probs of every action on the last step's images, by one single policy per member."""
    found = []
    for number, inputs in enumerate(population.rolled["inputs"]):
        policy = toys.single(population.program, parameters, number)
        with torch.no_grad():
            found.append(policy.layers(inputs.double()).log_softmax(dim=-1))
    return torch.stack(found)


def log_probs_of(population, parameters):
    """Of the last step's actions."""
    actions = population.rolled["actions"]
    return distribution_of(population, parameters).gather(2, actions)


def rounded_by_hand(values, bits):
    steps = 2 ** (bits - 1) - 1
    step = max(abs(value) for value in values) / steps
    return [round(value / step) * step if step else 0.0 for value in values]


def test_quantise_rounds_each_member_by_its_own_largest_value():
    values = torch.tensor(
        [[0.3, -0.9, 1.2, 0.05], [30.0, -7.0, 0.0, 9.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    bits = [2, 3, 8]
    found = draft_screens.quantise(values, torch.tensor(bits))
    expected = [rounded_by_hand(row, b) for row, b in zip(values.tolist(), bits, strict=True)]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quantise_leaves_as_many_levels_as_the_bits_have(bits):
    values = torch.linspace(-1, 1, 2001, dtype=torch.float64).view(1, 69, 29)
    found = draft_screens.quantise(values, torch.tensor([bits]))
    assert found.shape == values.shape
    assert len(found.unique()) == 2**bits - 1
    half = 0.5 / (2 ** (bits - 1) - 1)
    assert float((found - values).abs().max()) <= half + TOLERANCES[torch.float64]["atol"]


def test_a_quantised_screen_sees_rounded_parameters_of_now():
    few, many = (Arm(gate=kondo.Gate(rate=RATE), screen="quantised", draft=b) for b in (3, 6))
    population = population_of(few, many)
    seen = seen_by(population)
    for _ in range(4):
        now = frozen(population.parameters)
        population.step()
        bits = torch.tensor([member.arm.draft for member in population.members])
        rounded = {name: draft_screens.quantise(value, bits) for name, value in now.items()}
        assert_close(seen[-1], log_probs_of(population, rounded))
        assert not is_close(seen[-1], log_probs_of(population, now))


def test_a_stale_screen_sees_the_parameters_of_its_last_copy():
    often, seldom = (Arm(gate=kondo.Gate(rate=RATE), screen="stale", draft=k) for k in (2, 3))
    population = population_of(often, seldom, seeds=(0,))
    seen, past = seen_by(population), []
    for step in range(8):  # copies are due before steps 0, 2, 4, 6 and 0, 3, 6
        past.append(frozen(population.parameters))
        population.step()
        for number, member in enumerate(population.members):
            copied = past[step - step % member.arm.draft]
            assert_close(seen[-1][number], log_probs_of(population, copied)[number])
    assert (past[0]["0.weight"] != past[-1]["0.weight"]).any()


def test_a_narrow_screen_is_an_mlp_distilled_with_adam():
    population = population_of(DRAFTS["narrow"], seeds=(5,))
    seen = seen_by(population)
    task = population.program.task
    network = draft_screens.StackedMLP(task.num_inputs, task.num_actions, width=2)
    fresh = network.initialise(Draws([5 + draft_screens.DRAFT_SEED]))
    layers = []
    for number in range(3):
        weight, bias = (fresh[f"{number}.{kind}"][0].double() for kind in ("weight", "bias"))
        layer = torch.nn.Linear(*weight.shape, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias.squeeze(0))
        layers += [layer, torch.nn.ReLU()]
    alone = torch.nn.Sequential(*layers[:-1])
    adam = torch.optim.Adam(alone.parameters(), lr=draft_screens.DRAFT_LEARNING_RATE)
    for _ in range(5):
        population.step()
        rolled = {name: value[0] for name, value in population.rolled.items()}
        log_q = alone(rolled["inputs"].double()).log_softmax(dim=-1)
        assert_close(seen[-1][0], log_q.detach().gather(1, rolled["actions"]))
        adam.zero_grad()
        torch.nn.functional.cross_entropy(log_q, rolled["distribution"].exp()).backward()
        adam.step()


def test_a_draft_gives_the_gate_its_surprisal_and_its_baseline():
    population = population_of(
        Arm(unit="token", gate=Everything(eta=1.0), screen="quantised", draft=2)
    )
    for _ in range(3):
        now = frozen(population.parameters)
        population.step()
        bits = torch.full((len(population.members),), 2)
        rounded = {name: draft_screens.quantise(value, bits) for name, value in now.items()}
        log_q = distribution_of(population, rounded)
        rewards, pi = population.rolled["rewards"], population.rolled["distribution"].exp()
        of_draft, own = (rewards - p.square().sum(dim=2, keepdim=True) for p in (log_q.exp(), pi))
        surprisal = -log_q.gather(2, population.rolled["actions"])
        for number in range(len(population.members)):
            advantages, weight, *_ = toys.decision_of(population, number)
            assert_close(weight, torch.sigmoid(of_draft * surprisal)[number])
            assert not is_close(weight, torch.sigmoid(own * surprisal)[number])
            assert_close(advantages, own[number])  # what trains is not the draft's


@drafts
def test_kept_rows_are_trained_with_the_policys_own_advantages(kind):
    population = population_of(DRAFTS[kind])
    seen, differs = [], False
    ((rule,),) = (group.rules for group in population.groups)
    screen = rule.screen

    def spy(rolled, step):
        said = screen(rolled, step)
        seen.append(said["distribution"])
        return said

    rule.screen = spy
    for _ in range(5):
        population.step()
        rewards, pi = population.rolled["rewards"], population.rolled["distribution"].exp()
        own, of_draft = (
            rewards - p.square().sum(dim=2, keepdim=True) for p in (pi, seen[-1].exp())
        )
        for number in range(len(population.members)):
            assert_close(toys.decision_of(population, number).advantages, own[number])
        differs |= not is_close(of_draft, own)
    assert differs


@drafts
def test_the_baseline_can_stay_the_policys_own(kind):
    population = population_of(dataclasses.replace(DRAFTS[kind], screened="surprisal"))
    seen = seen_by(population)
    differs = False
    for _ in range(8):
        population.step()
        rewards, pi = population.rolled["rewards"], population.rolled["distribution"].exp()
        advantages = (rewards - pi.square().sum(dim=2, keepdim=True)).squeeze(2)
        draft = (-advantages * seen[-1].squeeze(2)).topk(3, dim=1).indices
        exact = (-advantages * population.rolled["log_probs"].squeeze(2)).topk(3, dim=1).indices
        for number in range(len(population.members)):
            found = toys.decision_of(population, number)
            kept = set(found[1].squeeze(1).nonzero().squeeze(1).tolist())
            assert kept == set(draft[number].tolist())
            assert_close(found[0].squeeze(1), advantages[number])
            differs |= kept != set(exact[number].tolist())
    assert differs


def test_a_screen_one_step_old_is_the_policy():
    exact = Arm(gate=kondo.Gate(rate=RATE))
    fresh = Arm(gate=kondo.Gate(rate=RATE), screen="stale", draft=1)
    population = population_of(exact, fresh, seeds=(3,))
    for _ in range(10):
        population.step()
    for value in population.parameters.values():
        assert_close(value[0], value[1])


@drafts
def test_a_run_goes_on_from_its_state(kind):
    arm = dataclasses.replace(DRAFTS[kind], draft=5)  # the copy of step 6 is then 2 steps old
    whole, first, second = (population_of(arm) for _ in range(3))
    for _ in range(7):
        whole.step()
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    seen = [seen_by(population) for population in (whole, second)]
    for _ in range(3):
        whole.step()
        second.step()
    for expected, found in zip(*seen, strict=True):
        assert torch.equal(found, expected)
    for name, value in whole.parameters.items():
        assert torch.equal(second.parameters[name], value)


def test_what_has_the_same_shapes_is_screened_together():
    def program(screen, draft):
        return Arm(gate=kondo.Gate(rate=RATE), screen=screen, draft=draft).program

    assert program("stale", 10) == program("stale", 100)
    assert program("quantised", 2) == program("quantised", 8)
    assert program("narrow", 2) != program("narrow", 3)
    assert len({program(screen, 2) for screen in DRAFTS}) == 3


@drafts
def test_a_member_is_the_same_beside_others(kind):
    others = [
        *DRAFTS.values(),
        Arm(gate=kondo.Gate(rate=RATE)),
        Arm(gate=kondo.Gate(rate=RATE), logit_noise=1.0),
    ]
    alone, among = population_of(DRAFTS[kind], seeds=(1,)), population_of(*others, seeds=(0, 1))
    for _ in range(6):
        alone.step()
        among.step()
    number = toys.place(among, alone.members[0])
    for name, value in alone.parameters.items():
        assert_close(among.parameters[name][number], value[0])


def test_noise_on_some_logits_leaves_the_other_members_to_the_bit():
    plain, noisy = (Arm(gate=kondo.Gate(rate=RATE), logit_noise=noise) for noise in (0.0, 1.0))
    assert plain.program != noisy.program
    population = population_of(plain, noisy, seeds=(0,))
    population.begin_step()
    number = toys.place(population, toys.member(plain, seed=0))
    rolled = {name: value[number : number + 1] for name, value in population.rolled.items()}
    advantages = population.program.advantages(plain, rolled)
    chi = kondo.delight(rolled["log_probs"], advantages).sum(dim=2)
    kept = toys.decision_of(population, number)[1].squeeze(1) > 0
    assert torch.equal(kept, kondo.Gate(rate=RATE)(chi[0]).keep)


def test_deciding_by_a_draft_reads_nothing_back():
    population = population_of(*DRAFTS.values())
    population.step()  # Adam makes its state at its first step
    with toys.HostIsBlind():
        population.begin_step()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), toys.HostIsBlind():
        torch.ones(1).item()


def test_drafts_on_a_device_are_those_on_the_cpu(device):
    members = [toys.member(arm, series=kind) for kind, arm in DRAFTS.items()]
    here = toys.population(toys.bandit_program(), members)
    there = toys.population(toys.bandit_program(device), members, device=device)
    for name, value in there.parameters.items():
        value.copy_(here.parameters[name])
    for _ in range(10):  # past the steps before a recording
        here.step()
        there.step()
    for name, value in there.parameters.items():
        assert_close(value, here.parameters[name], dtype=torch.float32)


@pytest.mark.parametrize("kind", ["stale", "quantised"])
def test_sequences_can_be_screened_by_drafts_of_the_policy(kind):
    population = population_of(DRAFTS[kind], program=toys.sequence_program())
    seen = seen_by(population)
    population.step()
    assert seen[0].shape == population.rolled["log_probs"].shape
    # Before the first update an old copy is the policy; a rounded one is not.
    same = is_close(seen[0], population.rolled["log_probs"])
    assert same == (kind == "stale")


def test_sequences_keep_no_distribution_to_distil():
    with pytest.raises(ValueError, match=r"screen must be exact, stale or quantised.*got narrow"):
        population_of(DRAFTS["narrow"], program=toys.sequence_program())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": 3}, "draft must be 0 for the exact screen, got 3"),
        ({"screen": "stale"}, "draft must be >= 1 for stale, got 0"),
        ({"screen": "narrow", "draft": -1}, "draft must be >= 1 for narrow, got -1"),
        ({"screen": "quantised", "draft": 1}, "draft must be >= 2 for quantised, got 1"),
        (
            {"screen": "stale", "draft": 2, "logit_noise": 0.5},
            "logit_noise must be 0 for a draft screen, got 0.5 with stale",
        ),
    ],
)
def test_an_arm_refuses_screens_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Arm(gate=kondo.Gate(rate=RATE), **options)


def test_a_draft_that_remembers_cannot_look_aside():
    population = population_of(DRAFTS["narrow"])
    population.step()
    with (
        pytest.raises(ValueError, match="a draft screen cannot look aside"),
        population.aside(torch.tensor(100)),
    ):
        pass
