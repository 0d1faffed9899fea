import dataclasses

import pytest
import torch

import kondo
from kondo_lab.models.sampler import completion_mask, sample
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import frictions
from kondo_lab.training.alone import Learner
from kondo_lab.training.broken_answers import break_answers
from kondo_lab.training.corrections import corrections
from kondo_lab.training.language_arms import text_arm
from kondo_lab.training.member import NONE, Frictions
from lab.training import language_toys as toys
from lab.training.toys import HostIsBlind
from tolerances import assert_close

EVERY = {each.name: each for each in corrections()}
PPO, PLAIN = EVERY["PPO clip 0.2"], EVERY["GRPO uncorrected"]
ALL = Frictions(
    name="all",
    refresh=3,
    temperature=1.3,
    bits=4,
    broken=0.3,
    corruption=0.3,
    flipped=0.2,
    biased=0.2,
    reported="noisy",
    noise=0.5,
)
SINGLE = [
    Frictions(refresh=3),
    Frictions(delay=2),
    Frictions(delay=3, uniform_delay=True),
    Frictions(temperature=1.5),
    Frictions(bits=3),
    Frictions(broken=0.5),
    Frictions(discovery=0.5),
    Frictions(random=0.5),
    Frictions(bug=0.5),
    Frictions(corruption=0.5),
    Frictions(flipped=0.5),
    Frictions(biased=0.5),
    Frictions(reported="noisy", noise=0.5),
    Frictions(reported="one"),
    Frictions(reported="missing"),
]
STEP = torch.tensor(1)


def member(arm=PPO, own=NONE, *, seed=0):
    return toys.member(arm, own, seed=seed, learning_rate=3e-3, series=f"{arm.name} {own}")


def trained(members, num_steps=4, num_prompts=6):
    population = toys.population(members, num_prompts=num_prompts, num_held_out=60)
    for _ in range(num_steps):
        population.step()
    return population


def weights(population, series):
    place = [each.series for each in population.members].index(series)
    return torch.cat([value[place].flatten() for value in population.parameters.values()])


def acted(kinds, rows=8, step=STEP):
    """Return what members' own policies draw, and what actors with these frictions hand over."""
    program = toys.program(num_prompts=rows // 2, repeats=2)
    seeds = range(len(kinds))
    parameters, draws = toys.parameters(program.network, seeds), Draws(seeds)
    found = frictions.Actors(program, kinds, parameters)(parameters, draws, step)
    return program, program.act(parameters, draws, step), found


@pytest.mark.parametrize("friction", [*SINGLE, ALL], ids=str)
def test_a_member_without_friction_keeps_every_bit_beside_others(friction):
    alone, beside = member(), member(own=friction)
    wanted = weights(trained([alone]), alone.series)
    both = trained([alone, beside])
    assert torch.equal(weights(both, alone.series), wanted)
    assert not torch.equal(weights(both, beside.series), wanted)


@pytest.mark.parametrize("friction", [*SINGLE, ALL], ids=str)
def test_a_member_with_friction_does_not_depend_on_the_others(friction):
    own = member(own=friction)
    others = [member(own=each, seed=1) for each in SINGLE]
    wanted = weights(trained([own]), own.series)
    assert_close(weights(trained([own, *others]), own.series), wanted)


def test_the_host_is_not_asked_by_a_step(monkeypatch):
    monkeypatch.setattr(kondo, "select", toys.select_as_on_a_gpu)
    population = trained(
        [member(each, friction) for each in EVERY.values() for friction in (NONE, ALL)], 0
    )
    with HostIsBlind():
        population.step()


@pytest.mark.parametrize("arm", EVERY.values(), ids=lambda each: each.name)
def test_a_rule_without_the_actors_log_probs_does_not_look_at_them(arm):
    reports = (
        Frictions(refresh=2),
        Frictions(refresh=2, reported="one"),
        Frictions(refresh=2, reported="noisy", noise=1.0),
    )
    several = [member(arm, friction) for friction in reports]
    population = trained(several)
    true, *wrong = (weights(population, each.series) for each in several)
    # Not bit for bit: where a member stands in a batch decides how its sigmoid is rounded.
    near = [bool((own - true).abs().max() < 1e-4) for own in wrong]
    assert near == [arm.name not in NEEDING] * 2


NEEDING = {
    "PPO clip 0.2",
    "token ratios, cap 2",
    "sequence ratios, cap 2",
    "CISPO",
    "GSPO",
    "DG x PPO clip",
}


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_a_gate_takes_reports_of_more_than_certainty_for_certain(unit, monkeypatch):
    arm = text_arm(name="DG-K", gate=kondo.Gate(rate=0.25), unit=unit)
    noisy = Frictions(reported="noisy", noise=2.0)
    population = trained([member(arm, noisy)], 1)
    rolled, (group,) = population.rolled, population.groups
    assert (rolled["log_probs"] > 0).any()
    (decision,), (rule,) = group.decisions, group.rules
    for log_probs in (rolled["log_probs"], rolled["log_probs"].clamp(max=0)):
        told = rolled | {"log_probs": log_probs}
        found = rule.decide(population.program, told, torch.tensor(1))
        assert torch.equal(found.keep, decision.keep)
        assert decision.keep.any()
    monkeypatch.setattr(kondo, "select", toys.select_as_on_a_gpu)
    on_a_gpu = rule.decide(population.program, rolled, torch.tensor(1))
    assert torch.equal(on_a_gpu.keep, decision.keep)


def test_everyone_learns_without_friction_and_with_a_little_of_all():
    little = Frictions(
        name="little", refresh=2, temperature=1.1, bits=8, broken=0.05, corruption=0.05, biased=0.05
    )
    several = [member(each, cell) for each in EVERY.values() for cell in (NONE, little)]
    before = trained(several, 0).evaluate()["held-out sampled reward"]
    population = trained(several, 60, num_prompts=12)
    gained = population.evaluate()["held-out sampled reward"] - before
    told = {each.series: float(own) for each, own in zip(population.members, gained, strict=True)}
    assert min(told.values()) > 0.15, told


def test_actors_get_fresh_weights_every_so_many_steps():
    parameters = {"head": torch.zeros(2, 1, 1)}
    draws = Draws([0, 1])
    own = frictions.Actors(toys.program(), [NONE, Frictions(refresh=3)], parameters)
    seen = []
    for step in range(1, 8):
        seen.append(own.acting(parameters, draws, torch.tensor(step))["head"].flatten().tolist())
        parameters["head"].add_(1)  # the learner moves
    assert seen == [[0, 0], [1, 0], [2, 0], [3, 3], [4, 3], [5, 3], [6, 6]]


def test_actors_are_late_by_as_many_steps_as_they_are_told():
    parameters = {"head": torch.zeros(4, 1, 1)}
    kinds = [Frictions(delay=3), NONE, Frictions(delay=1), Frictions(delay=3, uniform_delay=True)]
    draws = Draws([0, 1, 2, 3])
    own = frictions.Actors(toys.program(), kinds, parameters)
    seen = []
    for step in range(1, 200):
        seen.append(own.acting(parameters, draws, torch.tensor(step))["head"].flatten().tolist())
        parameters["head"].add_(1)  # the learner moves: the weights of step t are t - 1
    three, none, one, drawn = zip(*seen, strict=True)
    assert list(none) == list(range(199))
    assert list(three) == [max(0, step - 3) for step in none]
    assert list(one) == [max(0, step - 1) for step in none]
    lags = [step - version for step, version in zip(none, drawn, strict=True)][3:]
    assert {lag: lags.count(lag) > 30 for lag in lags} == dict.fromkeys(range(4), True)


def test_a_delay_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(frictions, "RING_BYTES", 4 * 10 * (1 + 3))  # one that is never late
    weights, program = {"head": torch.zeros(2, 5, 2)}, toys.program()
    frictions.Actors(program, [NONE, Frictions(delay=2)], weights)
    with pytest.raises(ValueError, match="delay must be so short that 5 versions"):
        frictions.Actors(program, [NONE, Frictions(delay=3)], weights)


def test_a_resumed_population_has_the_actors_it_had():
    members = [member(own=each) for each in SINGLE[:3]] + [member(PLAIN, ALL)]
    wanted = trained(members, 6)
    first = trained(members, 4)  # the actors have the weights of step 3, not the start's
    again = trained(members, 0)
    again.load_state_dict(first.state_dict())
    for _ in range(2):
        again.step()
    for name, value in again.parameters.items():
        assert torch.equal(value, wanted.parameters[name])


def test_rounded_weights_have_few_values_and_the_largest_is_kept():
    weights = Draws([0, 1]).normal("w", 0, 50, 4)
    found = frictions.rounded(weights, torch.tensor([0.0, 3.0]))
    assert torch.equal(found[0], weights[0])
    for column in range(4):
        own, largest = found[1, :, column], weights[1, :, column].abs().amax()
        assert len(own.unique()) <= 7
        assert_close(own.abs().amax(), largest)
        assert (own - weights[1, :, column]).abs().amax() <= largest / 3 / 2 + 1e-6


def test_log_probs_are_those_of_the_tempered_distribution():
    model = toys.model()
    parameters = toys.parameters(model)
    prompts = Draws([0, 1]).integers("p", 0, 4, 30, 2) + 2
    own = sample(
        model,
        parameters,
        prompts,
        draws=Draws([0, 1]),
        temperature=torch.tensor([1.0, 2.0], dtype=torch.float64),
    )
    plain = model.log_softmax(parameters, own.tokens)
    picked = own.completions.unsqueeze(-1)
    for place, temperature in enumerate((1.0, 2.0)):
        wanted = (plain[place] / temperature).log_softmax(-1).gather(-1, picked[place]).squeeze(-1)
        mask = own.mask[place]
        assert_close(own.log_probs[place][mask], wanted[mask])


def one_answer(tokens, length):
    """Two groups of one answer: "345." in the first, what is given in the second."""
    return torch.tensor([[[3, 4, 5, 1], tokens]]), torch.arange(4) < torch.tensor([[[4], [length]]])


@pytest.mark.parametrize(
    ("kind", "where", "wanted", "length"),
    [
        (0, 0.1, [5, 0, 0, 0], 1),
        (0, 0.9, [5, 4, 0, 0], 2),
        (1, 0.5, [1, 0, 0, 0], 1),
        (2, 0.1, [5, 5, 5, 5], 4),
        (2, 0.9, [5, 4, 4, 4], 4),
        (3, 0.5, [3, 4, 5, 1], 4),
    ],
)
def test_every_kind_of_broken_answer(kind, where, wanted, length):
    own = one_answer([5, 4, 1, 0], 3)
    tokens, mask = break_answers(
        *own, torch.full((1, 2), kind), torch.full((1, 2), where), repeats=1
    )
    assert tokens[0, 1].tolist() == wanted
    assert mask[0, 1].tolist() == [place < length for place in range(4)]


@pytest.mark.parametrize("kind", range(3))
def test_an_empty_answer_breaks_into_itself(kind):
    own = one_answer([1, 0, 0, 0], 1)
    tokens, mask = break_answers(*own, torch.full((1, 2), kind), torch.full((1, 2), 0.5), repeats=1)
    assert tokens[0, 1].tolist() == [1, 0, 0, 0]
    assert mask[0, 1].sum() == 1


def test_a_share_of_the_answers_is_broken_and_keeps_the_log_probs_of_what_was_drawn():
    program, drawn, found = acted([Frictions(broken=0.25), NONE], rows=400)
    mask = found["mask"]
    changed = (found["tokens"] != drawn["tokens"]).any(2) | (mask != drawn["mask"]).any(2)
    assert 0.1 < changed[0].float().mean() <= 0.35
    assert not changed[1].any()
    own = torch.where(mask, drawn["log_probs"], 0.0)
    assert torch.equal(found["log_probs"][0], own[0])
    assert torch.equal(program.prompts(found), program.prompts(drawn))
    completions = program.actions(found)
    ended = (completions == 1).any(2)
    assert torch.equal(mask[ended], completion_mask(completions)[ended])
    paid = program.task.reward(program.prompts(found), completions)
    assert torch.equal(found["rewards"], paid)
    assert torch.equal(found["entropy"], drawn["entropy"])  # whatever became of the answers


@pytest.mark.parametrize(
    ("friction", "of_zero", "of_one"),
    [
        (Frictions(corruption=0.4), 0.2, 0.8),
        (Frictions(flipped=0.3), 0.3, 0.7),
        (Frictions(biased=0.2), 0.2, 1.0),
        (Frictions(corruption=1.0), 0.5, 0.5),
    ],
    ids=str,
)
def test_a_share_of_the_rewards_is_corrupt(friction, of_zero, of_one, monkeypatch):
    monkeypatch.setattr(toys.Echo, "reward", lambda self, prompts, answers: paid)
    paid = torch.tensor([0.0, 1.0]).repeat(2000).expand(2, -1)
    _, _, experience = acted([friction, NONE], rows=4000)
    found = experience["rewards"]
    assert torch.equal(found[1], paid[1])
    assert set(found[0].tolist()) <= {0.0, 1.0}
    for value, wanted in ((0, of_zero), (1, of_one)):
        assert float(found[0][paid[0] == value].mean()) == pytest.approx(wanted, abs=0.04)


def test_discoveries_are_right_and_certain():
    program, drawn, found = acted([Frictions(discovery=0.25), NONE], rows=400)
    prompts, completions = program.prompts(found), program.actions(found)
    assert torch.equal(found["tokens"][1], drawn["tokens"][1])
    assert torch.equal(found["log_probs"][1], drawn["log_probs"][1])
    assert torch.equal(prompts, program.prompts(drawn))
    shown = program.task.demonstrations(prompts)[0]
    same = (completions[0] == shown).all(1)
    certain = (found["log_probs"][0] == 0).all(1)
    assert 0.15 < certain.float().mean() < 0.35
    assert same[certain].all()
    assert torch.equal(found["mask"][0][certain], completion_mask(shown)[certain])
    assert torch.equal(found["mask"][0][~certain], drawn["mask"][0][~certain])
    assert torch.equal(found["tokens"][0][~certain], drawn["tokens"][0][~certain])
    assert torch.equal(found["log_probs"][0][~certain], drawn["log_probs"][0][~certain])
    assert (found["rewards"][0][certain] == 1).all()


def test_reports_are_noisy_or_one_on_what_counts_alone():
    kinds = [NONE, Frictions(reported="noisy", noise=0.5), Frictions(reported="one")]
    _, drawn, found = acted(kinds, rows=200)
    mask = drawn["mask"]
    assert torch.equal(found["tokens"], drawn["tokens"])
    assert torch.equal(found["log_probs"][0], drawn["log_probs"][0])
    noise = (found["log_probs"] - drawn["log_probs"])[1]
    assert (noise[~mask[1]] == 0).all()
    assert float(noise[mask[1]].std()) == pytest.approx(0.5, rel=0.1)
    assert (found["log_probs"][2] == 0).all()
    own_program = toys.program()
    parameters = toys.parameters(own_program.network, range(3))
    assert frictions.Actors(own_program, kinds, parameters).missing is None
    kinds[1] = Frictions(reported="missing")
    missing = frictions.Actors(own_program, kinds, parameters).missing
    assert missing.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"refresh": 0}, "refresh"),
        ({"delay": -1}, "delay"),
        ({"delay": 2, "refresh": 2}, "actors"),
        ({"queue": 2, "refresh": 2}, "actors"),
        ({"queue": -1}, "queue"),
        ({"discovery": 2.0}, "discovery"),
        ({"temperature": 0.0}, "temperature"),
        ({"bits": 1}, "bits"),
        ({"broken": 1.5}, "broken"),
        ({"corruption": -0.1}, "corruption"),
        ({"reported": "noisy"}, "noise"),
        ({"noise": 0.1}, "noise"),
    ],
)
def test_strengths_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ValueError, match=f"{named} must"):
        Frictions(**options)


def test_the_timed_learner_knows_no_frictions():
    own = member(own=ALL)
    with pytest.raises(ValueError, match="must have no friction"):
        Learner(toys.program(), toys.warmed().of([0]), own)


def test_none_is_none_whatever_its_name():
    assert dataclasses.replace(NONE, name="x").is_none
    assert not any(each.is_none for each in [*SINGLE, ALL])
