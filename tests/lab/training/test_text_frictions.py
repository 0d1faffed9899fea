import dataclasses

import pytest
import torch

from kondo_lab.models.sampler import Sampled, completion_mask, sample
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import decisions
from kondo_lab.training import language_frictions as frictions
from kondo_lab.training.alone import Learner
from kondo_lab.training.corrections import corrections
from kondo_lab.training.member import NONE, Frictions, Frictions
from kondo_lab.training.member import Member, Population, Shape, effective_share
from kondo_lab.training.supervised import warm_start
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
    coin=0.3,
    flipped=0.2,
    biased=0.2,
    reported="noisy",
    noise=0.5,
)
SINGLE = [
    Frictions(refresh=3),
    Frictions(lag=2),
    Frictions(lag=3, uniform=True),
    Frictions(temperature=1.5),
    Frictions(bits=3),
    Frictions(broken=0.5),
    Frictions(discovered=0.5),
    Frictions(coin=0.5),
    Frictions(flipped=0.5),
    Frictions(biased=0.5),
    Frictions(reported="noisy", noise=0.5),
    Frictions(reported="one"),
    Frictions(reported="missing"),
]
STEP = torch.tensor(1)


def never(prompts):
    raise AssertionError("nothing is discovered")


@pytest.fixture(scope="module")
def start():
    found, _ = warm_start(
        toys.model(),
        toys.Echo(),
        [0, 1],
        num_steps=8,
        batch=16,
        learning_rate=1e-2,
        device=toys.CPU,
    )
    return found


def member(contender=PPO, friction=NONE, *, seed=0):
    return Member(
        series=f"{contender.name} {friction}",
        seed=seed,
        learning_rate=3e-3,
        contender=contender,
        friction=friction,
    )


def trained(start, members, num_steps=4, num_prompts=6):
    population = Population(
        toys.model(),
        toys.Echo(),
        members,
        start,
        device=toys.CPU,
        shape=Shape(num_prompts=num_prompts, repeats=4, num_held_out=60),
    )
    for _ in range(num_steps):
        population.step()
    return population


def weights(population, series):
    place = [each.series for each in population.members].index(series)
    return torch.cat([value[place].flatten() for value in population.parameters.values()])


def drawn(rows=8, seeds=(0, 1)):
    model = toys.model()
    draws = Draws(list(seeds))
    prompts = draws.integers("prompts", 0, toys.NUM_TOKENS - 2, rows // 2, 2) + 2
    return sample(model, toys.parameters(model, seeds), prompts, repeats=2, draws=draws), draws


@pytest.mark.parametrize("friction", [*SINGLE, ALL], ids=str)
def test_a_member_without_friction_keeps_every_bit_beside_others(start, friction):
    alone, beside = member(), member(friction=friction)
    wanted = weights(trained(start, [alone]), alone.series)
    both = trained(start, [alone, beside])
    assert torch.equal(weights(both, alone.series), wanted)
    assert not torch.equal(weights(both, beside.series), wanted)


@pytest.mark.parametrize("friction", [*SINGLE, ALL], ids=str)
def test_a_member_with_friction_does_not_depend_on_the_others(start, friction):
    own = member(friction=friction)
    others = [member(friction=each, seed=1) for each in SINGLE]
    wanted = weights(trained(start, [own]), own.series)
    assert_close(weights(trained(start, [own, *others]), own.series), wanted)


def test_the_host_is_not_asked_by_a_step(start):
    population = trained(
        start, [member(each, friction) for each in EVERY.values() for friction in (NONE, ALL)], 0
    )
    with HostIsBlind():
        population.step()


@pytest.mark.parametrize("contender", EVERY.values(), ids=lambda each: each.name)
def test_a_rule_without_the_actors_log_probs_does_not_look_at_them(start, contender):
    reports = (
        Frictions(refresh=2),
        Frictions(refresh=2, reported="one"),
        Frictions(refresh=2, reported="noisy", noise=1.0),
    )
    several = [member(contender, friction) for friction in reports]
    population = trained(start, several)
    true, *wrong = (weights(population, each.series) for each in several)
    # Not bit for bit: where a member stands in a batch decides how its sigmoid is rounded.
    near = [bool((own - true).abs().max() < 1e-4) for own in wrong]
    assert near == [contender.name not in NEEDING] * 2


NEEDING = {
    "PPO clip 0.2",
    "token ratios, cap 2",
    "sequence ratios, cap 2",
    "CISPO",
    "GSPO",
    "DG x PPO clip",
}


def test_everyone_learns_without_friction_and_with_a_little_of_all(start):
    little = Frictions(
        name="little", refresh=2, temperature=1.1, bits=8, broken=0.05, coin=0.05, biased=0.05
    )
    several = [member(each, cell) for each in EVERY.values() for cell in (NONE, little)]
    before = trained(start, several, 0).evaluate()["held-out sampled reward"]
    population = trained(start, several, 60, num_prompts=12)
    gained = population.evaluate()["held-out sampled reward"] - before
    told = {each.series: float(own) for each, own in zip(population.members, gained, strict=True)}
    assert min(told.values()) > 0.15, told


def test_actors_get_fresh_weights_every_so_many_steps():
    parameters = {"head": torch.zeros(2, 1, 1)}
    own = Frictions([NONE, Frictions(refresh=3)], parameters, Draws([0, 1]))
    seen = []
    for step in range(1, 8):
        seen.append(own.actors(parameters, torch.tensor(step))["head"].flatten().tolist())
        parameters["head"].add_(1)  # the learner moves
    assert seen == [[0, 0], [1, 0], [2, 0], [3, 3], [4, 3], [5, 3], [6, 6]]


def test_actors_lag_by_as_many_steps_as_they_are_told():
    parameters = {"head": torch.zeros(4, 1, 1)}
    kinds = [Frictions(lag=3), NONE, Frictions(lag=1), Frictions(lag=3, uniform=True)]
    own = Frictions(kinds, parameters, Draws([0, 1, 2, 3]))
    seen = []
    for step in range(1, 200):
        seen.append(own.actors(parameters, torch.tensor(step))["head"].flatten().tolist())
        parameters["head"].add_(1)  # the learner moves: the weights of step t are t - 1
    three, none, one, drawn = zip(*seen, strict=True)
    assert list(none) == list(range(199))
    assert list(three) == [max(0, step - 3) for step in none]
    assert list(one) == [max(0, step - 1) for step in none]
    lags = [step - version for step, version in zip(none, drawn, strict=True)][3:]
    assert {lag: lags.count(lag) > 30 for lag in lags} == dict.fromkeys(range(4), True)


def test_a_lag_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(frictions, "RING_BYTES", 4 * 10 * 3)
    weights = {"head": torch.zeros(2, 5, 2)}
    Frictions([NONE, Frictions(lag=2)], weights, Draws([0, 1]))
    with pytest.raises(ValueError, match="lag must be so short that 4 versions"):
        Frictions([NONE, Frictions(lag=3)], weights, Draws([0, 1]))


def test_a_resumed_population_has_the_actors_it_had(start):
    members = [member(friction=each) for each in SINGLE[:3]] + [member(PLAIN, ALL)]
    wanted = trained(start, members, 6)
    first = trained(start, members, 4)  # the actors have the weights of step 3, not the start's
    again = trained(start, members, 0)
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
    completions = torch.tensor([[[3, 4, 5, 1], tokens]])
    mask = torch.arange(4) < torch.tensor([[[4], [length]]])
    values = torch.where(mask, -1.0, 0.0)
    return Sampled(torch.cat([torch.full((1, 2, 1), 2), completions], 2), values, values, mask)


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
    tokens, mask = frictions.break_answers(
        own, torch.full((1, 2), kind), torch.full((1, 2), where), repeats=1
    )
    assert tokens[0, 1].tolist() == wanted
    assert mask[0, 1].tolist() == [place < length for place in range(4)]


@pytest.mark.parametrize("kind", range(3))
def test_an_empty_answer_breaks_into_itself(kind):
    own = one_answer([1, 0, 0, 0], 1)
    tokens, mask = frictions.break_answers(
        own, torch.full((1, 2), kind), torch.full((1, 2), 0.5), repeats=1
    )
    assert tokens[0, 1].tolist() == [1, 0, 0, 0]
    assert mask[0, 1].sum() == 1


def test_a_share_of_the_answers_is_broken_and_keeps_the_log_probs_of_what_was_drawn():
    sampled, draws = drawn(rows=400)
    own = Frictions([Frictions(broken=0.25), NONE], toys.parameters(toys.model()), draws)
    found = own.hand_over(sampled, STEP, 2, never)
    changed = (found.tokens != sampled.tokens).any(2) | (found.mask != sampled.mask).any(2)
    assert 0.1 < changed[0].float().mean() <= 0.35
    assert not changed[1].any()
    assert torch.equal(found.log_probs[0], torch.where(found.mask, sampled.log_probs, 0.0)[0])
    assert torch.equal(found.prompts, sampled.prompts)
    ended = (found.completions == 1).any(2)
    assert torch.equal(found.mask[ended], completion_mask(found.completions)[ended])


@pytest.mark.parametrize(
    ("friction", "of_zero", "of_one"),
    [
        (Frictions(coin=0.4), 0.2, 0.8),
        (Frictions(flipped=0.3), 0.3, 0.7),
        (Frictions(biased=0.2), 0.2, 1.0),
        (Frictions(coin=1.0), 0.5, 0.5),
    ],
    ids=str,
)
def test_a_share_of_the_rewards_is_corrupt(friction, of_zero, of_one):
    own = Frictions([friction, NONE], toys.parameters(toys.model()), Draws([0, 1]))
    paid = torch.tensor([0.0, 1.0]).repeat(2000).expand(2, -1)
    found = own.corrupt(paid, STEP)
    assert torch.equal(found[1], paid[1])
    assert set(found[0].tolist()) <= {0.0, 1.0}
    for value, wanted in ((0, of_zero), (1, of_one)):
        assert float(found[0][paid[0] == value].mean()) == pytest.approx(wanted, abs=0.04)


def test_discoveries_are_right_and_certain():
    task = toys.Echo()
    sampled, draws = drawn(rows=400)
    own = Frictions([Frictions(discovered=0.25), NONE], toys.parameters(toys.model()), draws)
    found = own.hand_over(sampled, STEP, 2, task.demonstrations)
    assert torch.equal(found.tokens[1], sampled.tokens[1])
    assert torch.equal(found.prompts, sampled.prompts)
    shown = task.demonstrations(sampled.prompts)[0]
    same = (found.completions[0] == shown).all(1)
    certain = (found.log_probs[0] == 0).all(1)
    assert 0.15 < certain.float().mean() < 0.35
    assert same[certain].all()
    assert torch.equal(found.mask[0][certain], completion_mask(shown)[certain])
    assert torch.equal(found.log_probs[0][~certain], sampled.log_probs[0][~certain])
    assert (task.reward(found.prompts, found.completions)[0][certain] == 1).all()


def test_reports_are_noisy_or_one_on_what_counts_alone():
    sampled, draws = drawn(rows=200, seeds=(0, 1, 2))
    kinds = [NONE, Frictions(reported="noisy", noise=0.5), Frictions(reported="one")]
    own = Frictions(kinds, toys.parameters(toys.model(), (0, 1, 2)), draws)
    found = own.hand_over(sampled, STEP, 2, never)
    assert torch.equal(found.log_probs[0], sampled.log_probs[0])
    noise = (found.log_probs - sampled.log_probs)[1]
    assert (noise[~sampled.mask[1]] == 0).all()
    assert float(noise[sampled.mask[1]].std()) == pytest.approx(0.5, rel=0.1)
    assert (found.log_probs[2] == 0).all()
    assert own.missing is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"refresh": 0}, "refresh"),
        ({"lag": -1}, "lag"),
        ({"uniform": True}, "lag"),
        ({"lag": 2, "refresh": 2}, "actors"),
        ({"queue": 2, "refresh": 2}, "actors"),
        ({"queue": -1}, "queue"),
        ({"discovered": 2.0}, "discovered"),
        ({"temperature": 0.0}, "temperature"),
        ({"bits": 1}, "bits"),
        ({"broken": 1.5}, "broken"),
        ({"coin": -0.1}, "coin"),
        ({"reported": "noisy"}, "noise"),
        ({"noise": 0.1}, "noise"),
    ],
)
def test_strengths_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ValueError, match=f"{named} must"):
        Frictions(**options)


def test_the_timed_learner_knows_no_frictions(start):
    own = member(friction=ALL)
    with pytest.raises(ValueError, match="must have no friction"):
        Learner(toys.Echo(), toys.model(), start.of([0]), own, shape=Shape())


def test_none_is_none_whatever_its_name():
    assert dataclasses.replace(NONE, name="x").is_none
    assert not any(each.is_none for each in [*SINGLE, ALL])


def test_the_effective_share_counts_equal_weights_as_one():
    mask = torch.tensor([[[True, True], [True, False], [True, True]]])
    zeros = torch.zeros(1, 3, 2)
    sampled = Sampled(zeros, zeros, zeros, mask)
    advantages = torch.tensor([[2.0, -1.0, 0.0]])
    none = torch.zeros(1, dtype=torch.int64)
    chosen = decisions.Chosen(advantages, zeros, None, none, none, none)
    equal = torch.tensor([[[-2.0, 2.0], [1.0, 0.0], [0.0, 0.0]]])
    assert_close(effective_share(equal, sampled, chosen), torch.tensor([1.0]).double())
    single = torch.tensor([[[-2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    assert_close(effective_share(single, sampled, chosen), torch.tensor([1.0]).double() / 3)
    kept = chosen._replace(rows=torch.tensor([[1]]))
    assert_close(effective_share(equal[:, 1:2], sampled, kept), torch.tensor([1.0]).double() / 3)
    assert effective_share(zeros, sampled, chosen).item() == 0
