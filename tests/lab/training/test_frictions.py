"""Actors that are stale, buggy or lucky: who acts, what is reported, and what the learner sees."""

import copy
import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo.run_files import save_state
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import run
from kondo_lab.training.arms import Arm
from kondo_lab.training.frictions import KINDS, Snapshots
from kondo_lab.training.gates import Everything
from kondo_lab.training.losses import ImportanceWeighted
from kondo_lab.training.member import Frictions
from kondo_lab.training.part import Context, Stopped
from lab.training import toys
from tolerances import assert_close

PROGRAMS = {"bandit": toys.bandit_program, "sequences": toys.sequence_program}
programs = pytest.mark.parametrize("kind", PROGRAMS)

ALL = Frictions(delay=3, bug=0.2, random=0.1, discovery=0.1, corruption=0.3)
FRICTIONS = {
    "none": Frictions(),
    "stale": Frictions(delay=2),
    "uniformly stale": Frictions(delay=4, uniform_delay=True),
    "bugs": Frictions(bug=0.3),
    "corruption": Frictions(corruption=0.3),
    "all": ALL,
    "all, own probability": dataclasses.replace(ALL, replaced=None),
    "refreshed and rounded": Frictions(refresh=3, bits=3),
    "misjudged": Frictions(flipped=0.2, biased=0.2),
    "noisy": Frictions(reported="noisy", noise=0.5),
    "one": Frictions(reported="one", delay=1),
    "missing": Frictions(reported="missing", refresh=2, bug=0.2),
}
RULES = ("PG", "IS", "IS capped", "PPO", "PMPO", "DG", "quantile")


def members_of(*names, rules=RULES, seeds=(0, 1)):
    return [
        toys.member(toys.ARMS[rule], seed=seed, series=rule, frictions=FRICTIONS[name])
        for name in names or FRICTIONS
        for rule in rules
        for seed in seeds
    ]


def population_of(kind, members, **options):
    return toys.population(PROGRAMS[kind](**options), members)


def frozen(population):
    return {name: value.clone() for name, value in population.parameters.items()}


def log_probs_of(population, parameters, number):
    """Of what a member's actor did, under a single policy."""
    rolled, program = population.rolled, population.program
    twin = toys.single(program, parameters, number)
    with torch.no_grad():
        if "actions" in rolled:
            outputs = twin(rolled["inputs"][number].double()).log_softmax(dim=-1)
            return outputs.gather(1, rolled["actions"][number])
        asked = rolled["prompts"][number].repeat_interleave(program.num_answers, dim=0)
        rows = {"prompts": asked, "answers": rolled["answers"][number].flatten(0, 1)}
        return twin.log_prob(rows)


@programs
def test_a_stale_actor_acts_with_the_parameters_of_its_delay_and_the_learner_judges(kind):
    members = [
        toys.member(
            Arm(unit="token", gate=Everything(eta=1.0)),
            seed=delay,
            frictions=Frictions(delay=delay),
        )
        for delay in (0, 1, 3)
    ]
    population = population_of(kind, members)
    past = []
    for step in range(7):
        past.append(frozen(population))
        population.step()
        for number, member in enumerate(population.members):
            acted = past[max(0, step - member.frictions.delay)]
            reported = population.rolled["behaviour"][number]
            assert_close(reported, log_probs_of(population, acted, number))
            judged = log_probs_of(population, past[step], number)
            assert_close(population.rolled["log_probs"][number], judged)
            assert torch.allclose(judged, reported) == (step == 0 or member.frictions.delay == 0)


def test_the_actions_are_drawn_by_the_old_policy_and_paid_for_as_they_are():
    """The same draws as an actor that holds the old parameters itself."""
    delay = 2
    stale = toys.member(Arm(), frictions=Frictions(delay=delay))
    population, fresh = (population_of("bandit", [m]) for m in (stale, toys.member(Arm())))
    past = []
    for step in range(1, 6):
        past.append(frozen(population))
        population.begin_step()
        acted = fresh.program.act(past[max(0, step - 1 - delay)], fresh.draws, torch.tensor(step))
        assert torch.equal(population.rolled["actions"], acted["actions"])
        right = (acted["actions"] == acted["labels"]).float()
        assert torch.equal(population.rolled["rewards"], right)
        population.end_step()


def test_a_uniform_age_is_anything_up_to_the_delay_as_often():
    delay, steps = 3, 200
    friction = Frictions(delay=delay, uniform_delay=True)
    members = [toys.member(Arm(), seed=seed, frictions=friction) for seed in range(10)]
    population = population_of("bandit", members)
    ages, same, pairs = Counter(), 0, 0
    rings = population.actors.past
    for step in range(1, steps + 1):
        # Mark each snapshot with the number of the step that it was made before.
        marked = {"mark": torch.full((len(members), 1), float(step))}
        rings.rings = {"mark": rings.rings.get("mark", torch.zeros(len(members) * (delay + 1), 1))}
        read = rings(marked, population.draws, torch.tensor(step))["mark"]
        if step > delay:
            drawn = (step - read[:, 0]).long().tolist()
            ages.update(drawn)
            same += sum(a == b for a, b in itertools.pairwise(drawn))
            pairs += len(drawn) - 1
    total = sum(ages.values())
    assert set(ages) == set(range(delay + 1))
    share = 1 / (delay + 1)
    error = math.sqrt(share * (1 - share) / total)
    assert all(abs(count / total - share) < 5 * error for count in ages.values())
    assert abs(same / pairs - share) < 5 * math.sqrt(share * (1 - share) / pairs)


def test_an_actor_that_is_refreshed_has_the_weights_of_its_last_refresh():
    friction = Frictions(refresh=3)
    population = population_of("bandit", [toys.member(Arm(), frictions=friction)])
    past = []
    for step in range(8):
        past.append(frozen(population))
        population.step()
        acted = past[step - step % 3]
        assert_close(population.rolled["behaviour"][0], log_probs_of(population, acted, 0))


def test_an_actor_of_few_bits_has_rounded_weights_and_plain_embeddings():
    friction = Frictions(bits=3)
    population = population_of("sequences", [toys.member(Arm(), frictions=friction)])
    for _ in range(3):
        now = frozen(population)
        population.step()
        # By hand: 3 steps on either side of 0, those of the largest weight of each output.
        acted = {}
        for name, value in now.items():
            if name in ("tokens", "positions", "head"):
                acted[name] = value
                continue
            step = value.abs().amax(dim=-2, keepdim=True) / 3
            step = step.where(step > 0, 1.0)
            acted[name] = (value / step).round() * step
        told = population.rolled["behaviour"][0]
        assert_close(told, log_probs_of(population, acted, 0))
        assert not torch.allclose(told, log_probs_of(population, now, 0))


def honest_and_misled(kind, reported, delay):
    """Two populations of equal weights and experience; the second is told wrong log-probs."""
    noise = 0.5 if reported == "noisy" else 0.0
    frictions = [Frictions(delay=delay), Frictions(delay=delay, reported=reported, noise=noise)]
    both = [
        population_of(
            kind,
            [toys.member(toys.ARMS[r], frictions=f, series=r) for r in ("PG", "IS", "PPO", "top")],
        )
        for f in frictions
    ]
    for population in both:
        for _ in range(3):
            population.step()
    honest, misled = both
    for name, value in misled.parameters.items():
        value.copy_(honest.parameters[name])
        if delay:
            misled.actors.past.rings[name].copy_(honest.actors.past.rings[name])
    for population in both:
        toys.roll(population)
    return both


wrong_reports = pytest.mark.parametrize("reported", ["noisy", "one", "missing"])
delays = pytest.mark.parametrize("delay", [0, 2])


@programs
@delays
@wrong_reports
def test_what_is_reported_wrongly_reaches_no_gate(kind, reported, delay):
    honest, misled = honest_and_misled(kind, reported, delay)
    # The learner is not fooled.
    assert_close(misled.rolled["log_probs"], honest.rolled["log_probs"])
    told = misled.rolled["behaviour"]
    truth = honest.rolled.get("behaviour", honest.rolled["log_probs"])
    if reported == "noisy":
        noise = told - truth
        assert abs(float(noise[0].std()) - 0.5) < 5 * 0.5 / math.sqrt(2 * noise[0].numel())
        assert_close(noise, noise[:1].expand_as(noise))  # of equal seeds
    elif reported == "one":
        assert (told == 0).all()
    else:
        assert misled.missing.all()
    for number in range(len(honest.members)):
        expected = toys.decision_of(honest, number)
        for found, own in zip(toys.decision_of(misled, number), expected, strict=True):
            assert found is own is None or torch.equal(found, own)


def gradients_by_series(population):
    found = {}
    for group in population.groups:
        members = population.members[group.members]
        of_group = group.gradients(population, group.size)
        for place, member in enumerate(members):
            found[member.series] = [gradient[place] for gradient in of_group]
    return found


@programs
@delays
@wrong_reports
def test_what_is_reported_wrongly_reaches_the_losses_that_correct_by_it(kind, reported, delay):
    expected, found = map(gradients_by_series, honest_and_misled(kind, reported, delay))
    # Without a report all ratios are 1, as they are on the policy's own samples.
    corrected = reported != "missing" or delay > 0
    for rule, own in expected.items():
        same = all(map(torch.allclose, found[rule], own))
        assert same is (rule in ("PG", "top") or not corrected), rule


def test_before_its_delay_has_passed_an_actor_has_what_it_began_with():
    population = population_of("bandit", [toys.member(Arm(), frictions=Frictions(delay=50))])
    start = frozen(population)
    for _ in range(5):
        population.step()
        assert_close(population.rolled["behaviour"][0], log_probs_of(population, start, 0))


@given(
    delays=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    uniform=st.booleans(),
    steps=st.integers(1, 14),
)
def test_whatever_the_delays_each_member_reads_its_own_past(delays, uniform, steps):
    frictions = [Frictions(delay=delay, uniform_delay=uniform) for delay in delays]
    owners = torch.arange(len(delays)).double()
    past = Snapshots({"mark": torch.stack([owners, torch.zeros_like(owners)], dim=1)}, frictions)
    for step in range(1, steps + 1):
        made = torch.full_like(owners, step - 1)  # updates made before this step
        now = {"mark": torch.stack([owners, made], dim=1)}
        read = past(now, Draws(range(len(delays))), torch.tensor(step))["mark"]
        assert torch.equal(read[:, 0], owners)
        oldest = (made - torch.tensor(delays)).clamp_min(0)
        if uniform:
            assert ((oldest <= read[:, 1]) & (read[:, 1] <= made)).all()
        else:
            assert torch.equal(read[:, 1], oldest)


def test_a_member_takes_one_slot_more_than_its_delay():
    members = [toys.member(Arm(), seed=d, frictions=Frictions(delay=d)) for d in (0, 7, 2)]
    population = population_of("bandit", members)
    for name, ring in population.actors.past.rings.items():
        assert ring.shape == (1 + 8 + 3, *population.parameters[name].shape[1:])


@programs
def test_members_with_frictions_do_not_depend_on_the_others(kind):
    members = members_of()
    together = population_of(kind, members)
    for _ in range(6):
        together.step()
    for member in members[1::4]:
        alone = population_of(kind, [member])
        for _ in range(6):
            alone.step()
        number = toys.place(together, member)
        for name, value in alone.parameters.items():
            assert_close(together.parameters[name][number], value[0])
        assert torch.equal(together.rolled["rewards"][number], alone.rolled["rewards"][0])


@programs
def test_members_without_frictions_stay_as_they_were(kind):
    plain = members_of("none")
    among, without = population_of(kind, members_of()), population_of(kind, plain)
    assert without.actors is None
    assert "behaviour" not in without.rolled
    for _ in range(6):
        among.step()
        without.step()
    for member in plain:
        here, there = toys.place(among, member), toys.place(without, member)
        for name, value in without.parameters.items():
            assert_close(among.parameters[name][here], value[there])


@programs
def test_without_frictions_importance_weights_change_nothing(kind):
    members = [toys.member(toys.ARMS[rule]) for rule in ("PG", "IS", "IS capped")]
    population = population_of(kind, members)
    for _ in range(6):
        population.step()
    for value in population.parameters.values():
        assert_close(value[1], value[0])
        assert_close(value[2], value[0])


@programs
def test_losses_take_what_the_actor_reported_and_gates_what_the_learner_thinks(kind):
    stale = Frictions(delay=4)
    members = [toys.member(toys.ARMS[r], frictions=stale) for r in ("IS", "PPO", "DG")]
    population = population_of(kind, members)
    for _ in range(8):
        population.step()
    toys.roll(population)
    (group,) = population.groups
    found = dict(zip(group.leaves, group.gradients(population, group.size), strict=True))
    for number, member in enumerate(population.members):
        rolled = {name: value[number] for name, value in population.rolled.items()}
        twin = toys.single(population.program, population.parameters, number)
        if kind == "bandit":
            outputs = twin(rolled["inputs"].double()).log_softmax(dim=-1)
            log_probs = outputs.gather(1, rolled["actions"])
            confidence = outputs.detach().exp().square().sum(dim=1, keepdim=True)
            advantages = rolled["rewards"] - confidence  # the learner's, not the actor's
        else:
            asked = rolled["prompts"].repeat_interleave(4, dim=0)
            log_probs = twin.log_prob(
                {"prompts": asked, "answers": rolled["answers"].flatten(0, 1)}
            )
            centred = rolled["rewards"] - rolled["rewards"].mean(dim=1, keepdim=True)
            advantages = centred.flatten().unsqueeze(1).expand_as(log_probs)
        old = rolled["behaviour"]
        ratio = (log_probs - old).exp()
        arm = member.arm
        if arm.loss is toys.PPO:
            clip, beta = (toys.PPO.keywords[name] for name in ("clip", "beta"))
            clipped = ratio.clamp(1 - clip, 1 + clip)
            terms = -torch.minimum(ratio * advantages, clipped * advantages)
            terms = terms - beta * log_probs
        elif arm.loss == ImportanceWeighted():
            weight = ratio.detach()
            weight = weight.prod(dim=1, keepdim=True) if kind == "sequences" else weight
            terms = -weight * advantages * log_probs
        else:
            weight = torch.sigmoid(-advantages * log_probs.detach())
            terms = -weight * advantages * log_probs
        terms.mean().backward()
        for name, expected in toys.gradients(twin).items():
            actual = found[name][number].view(expected.shape)
            assert_close(actual, expected, dtype=torch.float32)  # rewards are float32


@programs
def test_rows_are_replaced_in_the_order_of_their_kinds(kind):
    """Each probability is 0 or 1, so that the first kind of the list must win."""
    for kinds in ((k for k, on in zip(KINDS, bits, strict=True) if on) for bits in _bits(3)):
        chosen = list(kinds)
        friction = Frictions(**dict.fromkeys(chosen, 1.0), replaced=0.5)
        population = population_of(kind, [toys.member(Arm(), frictions=friction)])
        toys.roll(population)
        rolled = population.rolled
        actions, right = (population.program.actions(rolled), population.program.right(rolled))
        reported = torch.full_like(rolled["log_probs"], math.log(0.5))
        if not chosen:
            assert "behaviour" not in rolled
            continue
        assert_close(rolled["behaviour"], reported, dtype=torch.float32)
        assert_close(
            rolled["log_probs"][0], log_probs_of(population, population.parameters, 0)
        )  # the learner is not fooled
        if chosen[0] == "discovery":
            assert torch.equal(actions, right)
            assert (rolled["rewards"] == 1).all()
        elif chosen[0] == "random":
            assert len(actions.unique()) == population.program.num_choices
            assert not torch.equal(actions, right)
        else:
            assert (actions == 0).all()


@programs
def test_a_replaced_row_reports_what_it_is_told_to_or_what_its_actor_would_have_said(kind):
    """Three members whose actors are two steps old, beside the log-probs of a single policy."""
    delay = 2
    frictions = [
        Frictions(delay=delay, bug=0.4, discovery=0.2, replaced=replaced)
        for replaced in (1.0, 0.25, None)
    ]
    members = [toys.member(Arm(), seed=n, frictions=f) for n, f in enumerate(frictions)]
    population = population_of(kind, members)
    past = []
    for step in range(5):
        past.append(frozen(population))
        population.begin_step()
        rolled = population.rolled
        for number, member in enumerate(population.members):
            own = log_probs_of(population, past[max(0, step - delay)], number)
            told = rolled["behaviour"][number]
            if member.frictions.replaced is None:
                assert_close(told, own)
            else:
                log_reported = math.log(member.frictions.replaced)
                replaced = (told - log_reported).abs().amax(dim=1) < 1e-6
                assert replaced[rolled["bug"][number]].all()
                assert_close(told[~replaced], own[~replaced])
            zeros = population.program.actions(rolled)[number] == 0
            assert zeros[rolled["bug"][number]].all()
        population.end_step()


def test_rows_of_bugs_are_those_that_nothing_before_it_in_the_order_replaced():
    friction = Frictions(bug=1.0, discovery=0.3)
    population = population_of(
        "sequences", [toys.member(Arm(), frictions=friction)], num_prompts=50
    )
    population.begin_step()
    rolled, program = population.rolled, population.program
    actions, right = program.actions(rolled)[0], program.right(rolled)[0]
    bug = rolled["bug"][0]
    assert (actions[bug] == 0).all()
    assert torch.equal(actions[~bug], right[~bug])
    assert 0.5 < float(bug.double().mean()) < 0.9


def _bits(count):
    return [tuple(number >> place & 1 for place in range(count)) for number in range(2**count)]


@programs
def test_kinds_come_as_often_as_they_should_and_the_others_are_as_they_were(kind):
    size = {"batch": 3000} if kind == "bandit" else {"num_prompts": 300, "num_answers": 10}
    friction = Frictions(discovery=0.2, random=0.25, bug=0.3)
    clean, rough = (
        population_of(kind, [toys.member(Arm(), frictions=f)], **size)
        for f in (Frictions(), friction)
    )
    for population in (clean, rough):
        population.begin_step()
    replaced = (rough.rolled["behaviour"][0] == 0).all(dim=1)
    share = 1 - 0.8 * 0.75 * 0.7
    error = math.sqrt(share * (1 - share) / 3000)
    assert abs(float(replaced.double().mean()) - share) < 5 * error
    before, after = (p.program.actions(p.rolled)[0] for p in (clean, rough))
    assert torch.equal(before[~replaced], after[~replaced])
    assert_close(clean.rolled["log_probs"][0][~replaced], rough.rolled["behaviour"][0][~replaced])
    zeros = (after == 0).all(dim=1) & replaced
    assert float(zeros.double().mean()) > 0.8 * 0.75 * 0.3 - 5 * error
    right = (after == rough.program.right(rough.rolled)[0]).all(dim=1) & replaced
    assert float(right.double().mean()) > 0.2 - 5 * error


@programs
def test_a_corrupt_reward_is_a_fair_coin_and_the_others_are_as_they_were(kind):
    size = {"batch": 3000} if kind == "bandit" else {"num_prompts": 300, "num_answers": 10}
    clean, always, some = (
        population_of(kind, [toys.member(Arm(), frictions=Frictions(corruption=p))], **size)
        for p in (0.0, 1.0, 0.3)
    )
    for population in (clean, always, some):
        population.begin_step()
    own, coins, mixed = (p.rolled["rewards"].flatten() for p in (clean, always, some))
    assert set(coins.tolist()) == {0.0, 1.0}
    assert abs(float(coins.mean()) - 0.5) < 5 * 0.5 / math.sqrt(3000)
    assert (torch.corrcoef(torch.stack([coins, own]))[0, 1]).abs() < 5 / math.sqrt(3000)
    wrong = mixed != own
    assert torch.equal(mixed[wrong], coins[wrong])
    # A coin shows by chance what was right: in half of the cases where that was 0 or 1.
    shown = (coins != own).double().mean() * 0.3
    assert abs(float(wrong.double().mean() - shown)) < 5 * math.sqrt(0.3 * 0.7 / 3000)
    assert "behaviour" not in some.rolled  # its rows are the learner's own
    assert torch.equal(some.rolled["log_probs"], clean.rolled["log_probs"])


@programs
@pytest.mark.parametrize("kind_of_judge", ["flipped", "biased"])
def test_a_wrong_judge_flips_rewards_or_pays_for_anything(kind, kind_of_judge):
    size = {"batch": 3000} if kind == "bandit" else {"num_prompts": 300, "num_answers": 10}
    clean, always, some = (
        population_of(
            kind, [toys.member(Arm(), frictions=Frictions(**{kind_of_judge: share}))], **size
        )
        for share in (0.0, 1.0, 0.3)
    )
    for population in (clean, always, some):
        population.begin_step()
    own, wrong, mixed = (p.rolled["rewards"].flatten() for p in (clean, always, some))
    assert torch.equal(wrong, 1 - own if kind_of_judge == "flipped" else torch.ones_like(own))
    hit = mixed != own
    assert torch.equal(mixed[hit], wrong[hit])
    shown = float((wrong != own).double().mean()) * 0.3
    assert abs(float(hit.double().mean()) - shown) < 5 * math.sqrt(0.3 * 0.7 / 3000)


@programs
def test_a_run_with_frictions_goes_on_from_its_file_bit_by_bit(kind, tmp_path):
    members = members_of()
    population = population_of(kind, members)
    for _ in range(6):
        population.step()
    save_state(tmp_path / "state", population.state_dict())
    restored = population_of(kind, members)
    restored.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for _ in range(5):
        population.step()
        restored.step()
    for name, value in population.parameters.items():
        assert torch.equal(restored.parameters[name], value), name
    assert restored.read() == population.read()


@programs
def test_a_run_that_is_stopped_with_stale_actors_goes_on_as_if_it_had_not(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "LOOK_EVERY", 1)
    shares = []

    def trained(stop_at):
        context = Context(
            device=toys.CPU,
            progress=lambda share, note: shares.append(share),
            stopped=lambda: shares[-1] >= stop_at,
            checkpoint=tmp_path / f"{kind}.pt",
        )
        population = population_of(kind, members_of("stale", "uniformly stale", "all"))
        return run.train(population, context, part="p", num_steps=9, log_steps=[3, 6])

    expected = trained(stop_at=2.0)
    with pytest.raises(Stopped):
        trained(stop_at=5 / 9)
    shares.clear()
    assert trained(stop_at=2.0) == expected
    assert shares[0] > 5 / 9


def test_loading_a_state_rewinds_stale_actors_too(device):
    members = [m for m in members_of("stale", "all") if m.arm.kind != "quantile"]
    population = toys.population(toys.bandit_program(device), members, device=device)
    for _ in range(6):
        population.step()
    state = copy.deepcopy(population.state_dict())
    ends = []
    for _ in range(2):
        for _ in range(6):
            population.step()
        ends.append(frozen(population))
        population.load_state_dict(copy.deepcopy(state))
    for name, value in ends[0].items():
        assert_close(ends[1][name], value, dtype=torch.float32)
        assert torch.equal(ends[1][name], value) or device.type == "cuda"


@programs
def test_frictions_on_a_device_are_those_on_the_cpu(kind, device):
    rules = ("PG", "IS", "PPO", "DG")
    members = members_of("stale", "uniformly stale", "all", rules=rules, seeds=(0,))
    here = toys.population(PROGRAMS[kind](), members)
    there = toys.population(PROGRAMS[kind](device), members, device=device)
    for pairs in (here.parameters, here.actors.past.rings):
        own = there.parameters if pairs is here.parameters else there.actors.past.rings
        for name, value in own.items():
            value.copy_(pairs[name])
    for _ in range(10):  # past the steps before a recording, and round the longest ring
        here.step()
        there.step()
    for name, value in there.parameters.items():
        assert_close(value, here.parameters[name], dtype=torch.float32)


@programs
def test_acting_with_frictions_reads_nothing_back(kind):
    population = population_of(kind, members_of())
    population.step()
    with toys.HostIsBlind():
        population.begin_step()


def test_stale_actors_remember_and_cannot_look_aside():
    population = population_of("bandit", members_of("stale", rules=("PG",)))
    population.step()
    aside = population.aside(torch.tensor(100))
    with pytest.raises(ValueError, match="stale actors cannot look aside"), aside:
        pass


def test_equal_frictions_do_not_split_a_rule():
    """What differs between members are numbers; the kernels are shared."""
    frictions = [dataclasses.replace(ALL, delay=delay) for delay in (1, 2, 3)]
    members = [toys.member(Arm(), frictions=friction) for friction in frictions]
    (group,) = population_of("bandit", members).groups
    assert len(group.rules) == 1
