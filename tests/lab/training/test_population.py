import copy
import functools
import random

import pytest
import torch

import kondo
from kondo.run_files import save_state
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything, QuantileGate
from lab.training import toys
from tolerances import assert_close

STEPS = 15
PROGRAMS = {"bandit": toys.bandit_program, "sequences": toys.sequence_program}
ARMS = {"bandit": toys.ARMS | toys.BANDIT_ARMS, "sequences": toys.ARMS}
programs = pytest.mark.parametrize("kind", PROGRAMS)


def members_of(kind):
    """Two of each arm: another seed and another learning rate."""
    return [
        toys.member(arm, seed=seed, learning_rate=rate, series=name)
        for name, arm in ARMS[kind].items()
        for seed, rate in ((0, 0.01), (3, 0.02))
    ]


def trained(kind, members, *, steps=STEPS):
    """A population after its steps, and every step's kept counts and rewards by member."""
    population = toys.population(PROGRAMS[kind](), members)
    seen = {member: [] for member in population.members}
    for _ in range(steps):
        population.step()
        for number, member in enumerate(population.members):
            kept = int(toys.decision_of(population, number).kept)
            seen[member].append((kept, population.rolled["rewards"][number].tolist()))
    return population, seen


@functools.cache
def all_trained(kind):
    return trained(kind, members_of(kind))


@programs
def test_a_member_does_not_depend_on_the_others(kind):
    members = members_of(kind)
    together, seen = all_trained(kind)
    shuffled = list(members)
    random.Random(0).shuffle(shuffled)
    elsewhere, seen_elsewhere = trained(kind, shuffled[: len(shuffled) // 2])
    for member in members[1::2]:
        alone, seen_alone = trained(kind, [member])
        assert seen_alone[member] == seen[member]
        for name, value in alone.parameters.items():
            assert_close(together.parameters[name][toys.place(together, member)], value[0])
        if member in elsewhere.members:
            assert seen_elsewhere[member] == seen[member]
            for name, value in alone.parameters.items():
                found = elsewhere.parameters[name][toys.place(elsewhere, member)]
                assert_close(found, value[0])


@programs
def test_every_member_learns_something(kind):
    members = members_of(kind)
    start = toys.population(PROGRAMS[kind](), members)
    end, _ = all_trained(kind)
    assert end.members == start.members
    for name, value in end.parameters.items():
        moved = (value != start.parameters[name]).flatten(1).any(dim=1)
        assert moved.all(), name


@programs
def test_equal_seeds_see_the_same_inputs_at_every_step(kind):
    members = members_of(kind)
    population = toys.population(PROGRAMS[kind](), members)
    shown = "inputs" if kind == "bandit" else "prompts"
    before = None
    for _ in range(3):
        population.step()
        inputs = population.rolled[shown]
        first = {seed: inputs[[m.seed for m in population.members].index(seed)] for seed in (0, 3)}
        for number, member in enumerate(population.members):
            assert torch.equal(inputs[number], first[member.seed])
        assert not torch.equal(first[0], first[3])
        assert before is None or not torch.equal(before, first[0])
        before = first[0]


@programs
def test_backward_passes_are_the_kept_rows(kind):
    population, seen = all_trained(kind)
    rows = population.program.num_rows
    paid = population.read_backward()
    for member, count in zip(population.members, paid, strict=True):
        assert count == sum(kept for kept, _ in seen[member])
        if member.arm.trains_all_rows:
            assert count == STEPS * rows
        else:
            assert 0 < count <= STEPS * rows
        if member.arm.kind == "top":
            assert count <= STEPS * round(member.arm.gate.rate * rows)


@programs
@pytest.mark.parametrize("name", ["top", "quantile", "price 0", "draw", "rolling"])
def test_only_kept_rows_go_through_the_training_forward(kind, name, monkeypatch):
    arm = toys.ARMS[name]
    population = toys.population(
        PROGRAMS[kind](), [toys.member(arm, seed=seed) for seed in range(2)]
    )
    program, (group,) = population.program, population.groups
    given, outputs = [], program.outputs
    forward = program.network.logits if kind == "bandit" else program.network.log_prob

    def counted(parameters, rolled, rows):
        found = outputs(parameters, rolled, rows)
        given.append((rows, found.shape[1]))
        return found

    def counted_forward(parameters, inputs, *answers):
        rows = inputs.shape[1] if not answers else answers[0].shape[1] * answers[0].shape[2]
        through.append(rows)
        return forward(parameters, inputs, *answers)

    monkeypatch.setattr(program, "outputs", counted)
    method = "logits" if kind == "bandit" else "log_prob"
    monkeypatch.setattr(program.network, method, counted_forward)
    for _ in range(STEPS):
        through = []
        toys.roll(population)
        through.clear()
        if group.varies:
            population._busiest.copy_(group.decisions[0].kept.max())
            population.end_step()
        else:
            population.learn()
        assert group.varies is (name != "top")
        kept = torch.cat([decision.kept for decision in group.decisions])
        rows, trained_rows = given.pop()
        assert not given
        size = group.num_rows(int(kept.max()), program.num_rows)
        assert rows.shape[1] == trained_rows == size
        assert through == [size]
        assert size >= kept.max()
        if name == "top":
            assert size == round(0.3 * program.num_rows)
        for number in range(2):
            keep = toys.decision_of(population, number).weight.squeeze(1)
            assert set(keep.nonzero().squeeze(1).tolist()) <= set(rows[number].tolist())


@programs
def test_a_step_of_known_sizes_reads_nothing_back(kind):
    """Learning included: on a GPU all of it is one program."""
    members = [member for member in members_of(kind) if member.arm.fixed_rows(12) is not None]
    assert {member.arm.kind for member in members} == {"dense", "soft", "top"}
    population = toys.population(PROGRAMS[kind](), members)
    population.step()  # Adam makes its state at its first step
    before = {name: value.clone() for name, value in population.parameters.items()}
    with toys.HostIsBlind():
        population.step()
    assert not any(group._programs for group in population.groups)
    for name, value in population.parameters.items():
        assert (value != before[name]).flatten(1).any(dim=1).all(), name


@programs
def test_training_on_a_number_of_rows_reads_nothing_back(kind):
    population, _ = trained(kind, members_of(kind), steps=2)
    with toys.HostIsBlind():
        population.begin_step()
        for group in population.groups:
            group.train(population, group.size)


def test_rows_are_padded_to_powers_of_two_and_never_beyond_the_batch():
    population = toys.population(
        toys.bandit_program(batch=12), [toys.member(Arm(gate=kondo.Gate(price=0.0)))]
    )
    (group,) = population.groups
    assert [group.num_rows(kept, 12) for kept in (0, 1, 2, 3, 5, 8, 9, 12)] == [
        *(1, 1, 2, 4, 8, 8, 12, 12)
    ]


def test_a_gate_of_rate_one_trains_beside_dense_members():
    members = [
        toys.member(Arm()),
        toys.member(Arm(gate=QuantileGate(rate=1.0))),
        toys.member(Arm(gate=kondo.Gate(rate=1.0))),
        toys.member(Arm(unit="token", gate=Everything(eta=1.0))),
    ]
    population, _ = trained("bandit", members)
    dense, *gated = (toys.place(population, member) for member in members[:3])
    for value in population.parameters.values():
        for number in gated:  # nothing has zero delight here, so all three are PG
            assert_close(value[number], value[dense])


def test_adam_moves_on_where_nothing_is_kept():
    arm = Arm(gate=toys.MovingPrice())
    population = toys.population(toys.bandit_program(), [toys.member(arm)])
    population.step()
    population.groups[0].rules[0].gate.price.fill_(1e6)
    before = population.parameters["2.weight"].clone()
    population.step()
    assert population.groups[0].decisions[0].kept.tolist() == [0]
    assert not torch.equal(population.parameters["2.weight"], before)


def test_adam_is_torchs_own_with_each_members_rate():
    rates = [0.01, 0.003, 0.01]
    members = [toys.member(Arm(), seed=s, learning_rate=r) for s, r in enumerate(rates)]
    population = toys.population(toys.bandit_program(), members)
    clones = {n: v.clone() for n, v in population.parameters.items()}
    singles = []
    for number, member in enumerate(population.members):
        own = [value[number].clone().requires_grad_() for value in clones.values()]
        singles.append((own, torch.optim.Adam(own, lr=member.learning_rate)))
    (group,) = population.groups
    for _ in range(5):
        toys.roll(population)
        gradients = group.gradients(population, population.program.num_rows)
        for number, (own, adam) in enumerate(singles):
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient[number].clone()
            adam.step()
        population.learn()
    for number, (own, _) in enumerate(singles):
        for value, expected in zip(population.parameters.values(), own, strict=True):
            assert_close(value[number], expected)


@programs
def test_a_restored_population_goes_on_bit_by_bit(kind, tmp_path):
    members = members_of(kind)
    population, _ = trained(kind, members, steps=6)
    population.read()
    population.step()
    save_state(tmp_path / "state", population.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    restored = toys.population(PROGRAMS[kind](), members)
    restored.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for _ in range(6):
        population.step()
        restored.step()
    for name, value in population.parameters.items():
        assert torch.equal(restored.parameters[name], value), name
    assert restored.num_steps == population.num_steps == 13
    assert restored.read() == population.read()
    assert restored.read_backward() == population.read_backward()


def test_loading_a_state_rewinds_a_population_that_has_gone_on(device):
    members = [toys.member(toys.ARMS[name]) for name in ("PG", "top", "price 0", "rolling")]
    population = toys.population(toys.bandit_program(device), members, device=device)
    for _ in range(6):
        population.step()
    state = copy.deepcopy(population.state_dict())
    ends = []
    for _ in range(2):
        for _ in range(6):
            population.step()
        ends.append({name: value.clone() for name, value in population.parameters.items()})
        population.load_state_dict(copy.deepcopy(state))
    for name, value in ends[0].items():
        assert_close(ends[1][name], value, dtype=torch.float32)
        assert torch.equal(ends[1][name], value) or device.type == "cuda"


@pytest.mark.parametrize("names", [("PG", "top"), ("PG", "top", "price 0", "draw")])
def test_looking_aside_leaves_the_step_as_it_was(names):
    members = [toys.member(toys.ARMS[name]) for name in names]
    plain, looked = (toys.population(toys.bandit_program(), members) for _ in range(2))
    for _ in range(4):
        plain.step()
        looked.begin_step()
        rolled = looked.rolled
        with looked.aside(torch.tensor(-1)):
            assert not torch.equal(looked.rolled["inputs"], rolled["inputs"])
        assert looked.rolled is rolled
        looked.end_step()
    for name, value in plain.parameters.items():
        assert torch.equal(looked.parameters[name], value)
    assert plain.read() == looked.read()
    assert plain.read_backward() == looked.read_backward()
    rolling = toys.population(toys.bandit_program(), [toys.member(toys.ARMS["rolling"])])
    aside = rolling.aside(torch.tensor(-1))
    with pytest.raises(ValueError, match="rolling gate cannot look aside"), aside:
        pass


def test_a_population_is_not_empty():
    with pytest.raises(ValueError, match="members must not be empty"):
        toys.population(toys.bandit_program(), [])


def test_sequences_refuse_noise_on_logits_they_do_not_keep():
    arm = Arm(gate=kondo.Gate(rate=0.5), logit_noise=0.1)
    population = toys.population(toys.sequence_program(), [toys.member(arm)])
    with pytest.raises(ValueError, match="logit_noise must be 0 for sequences"):
        population.step()
