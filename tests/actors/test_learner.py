import copy
import dataclasses
import json
import os
from functools import partial

import numpy as np
import pytest
import torch

import kondo
from actors.toys import (
    FINITE_POISONS,
    POISONS,
    REASON,
    SAMPLES,
    Policy,
    Task,
    feed,
    make_message,
    toy,
)
from kondo.actors import checkpoint, log
from kondo.actors.learner import MAX_KEPT, QUARANTINE, Learner, StepOrder, Undelivered
from kondo.actors.messages import Order, pack
from kondo.actors.setup import Settings, process_seed
from kondo.actors.source_price import Price
from kondo.run_files import DamagedFileError, WriteError
from oracles.sequences import sequence_loss
from tolerances import TOLERANCES, assert_close

UNITS = ["sample", "token", "sequence"]


def settings(**options):
    return Settings(**{"gate": "delight:0.25", "checkpoint_every": 1000, **options})


def learner(folder, *, unit="sample", dtype=torch.float32, resume=False, **options):
    made = settings(**options)
    return Learner(toy(unit=unit, dtype=dtype), made, folder, resume=resume)


def weights(of):
    return of.policy.weight.detach().clone()


@pytest.mark.parametrize("unit", UNITS)
def test_the_gradient_is_that_of_the_whole_rollouts_masked_by_the_price(tmp_path, unit):
    """Two rollouts in a step, sent at the source, against plain torch on everything."""
    trained = learner(tmp_path, unit=unit, dtype=torch.float64)
    seen, orders, messages = [], [], []
    price = Price(0.2, 0.0)
    for number in range(2):
        orders.append(Order(number, 0, 1, 0, price))
        task = Task(number, unit=unit, dtype=torch.float64)
        messages.append(make_message(trained, task, orders[-1]))
        seen.append(Task(number, unit=unit, dtype=torch.float64).rollout(trained.policy))
    gradients = []
    trained.policy.weight.register_hook(lambda grad: gradients.append(grad.clone()))
    trained.step(StepOrder(1, tuple(orders), (), 2, 1), messages)

    policy = Policy(0, dtype=torch.float64)
    policy.load_state_dict(learner(tmp_path, unit=unit, dtype=torch.float64).policy.state_dict())
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for rollout in seen:
        advantages = rollout.advantages.reshape(-1, *[1] * (rollout.log_probs.ndim - 1))
        delight = -(rollout.log_probs * advantages)
        if unit == "sequence":
            delight = delight.sum(dim=1, keepdim=True)
        keep = delight > 0.2
        assert 0 < int(keep.sum()) < keep.numel()
        total = total - (policy.log_prob(rollout.rows) * advantages * keep).sum()
        count += rollout.log_probs.numel()
    (total / count).backward()
    assert_close(sum(gradients), policy.weight.grad)


def gradients_and_chances(policy, rollout, unit, price):
    """Of each unit alone: its gradient with the full denominator, and min(1, size / price)."""
    log_probs = policy.log_prob(rollout.rows)
    advantages = rollout.advantages.reshape(-1, *[1] * (log_probs.ndim - 1))
    losses, sizes = -log_probs * advantages, advantages.abs() * (1 - log_probs.detach().exp())
    if unit == "sequence":
        losses, sizes = losses.sum(1), sizes.square().sum(1).sqrt()
    each = (torch.autograd.grad(x, policy.weight, retain_graph=True)[0] for x in losses.flatten())
    return torch.stack(list(each)) / log_probs.numel(), (sizes.flatten() / price).clamp(max=1)


@pytest.mark.parametrize("unit", UNITS)
def test_the_mean_gradient_of_unbiased_draws_is_the_dense_one(tmp_path, unit):
    """The same rollout under 400 numbers, sent at the source, against plain torch."""
    options = {"gate": "unbiased:0.25", "learning_rate": 1e-30}  # the weights stay where they are
    made = learner(tmp_path, unit=unit, dtype=torch.float64, **options)
    rollout = Task(1, unit=unit, dtype=torch.float64).rollout(made.policy)
    price = 2.0 if unit == "sequence" else 1.0
    each, chance = gradients_and_chances(made.policy, rollout, unit, price)
    assert 0.05 < float(chance.mean()) < 0.7
    found = []
    made.policy.weight.register_hook(lambda grad: found.append(grad.clone()))
    for number in range(400):
        order = Order(number, 0, 1, number, Price(price, 1.0))
        message = pack(rollout, order, made.gate, unit)
        before = len(found)
        report = made.step(StepOrder(number + 1, (order,), (), number + 1, 1), [message])
        assert not report.quarantined
        assert (len(found) > before) == (len(message["index"]) > 0)
        if unit != "token" and len(found) > before:
            drawn = torch.from_numpy(message["index"]).long()
            expected = (each[drawn] / chance[drawn].view(-1, 1, 1)).sum(0)
            assert_close(found[-1], expected, torch.float32)
    shape = (-1, *[1] * (each.ndim - 1))
    noise = (each.square() * ((1 - chance) / chance).nan_to_num(posinf=0).view(shape)).sum(0)
    error = (noise / 400).sqrt()
    dense = each.sum(0)
    assert float(error.norm()) < 0.3 * float(dense.norm())
    rounding = TOLERANCES[torch.float32]["atol"]
    assert bool((sum(found) / 400 - dense).abs().le(4.5 * error + rounding).all())


@pytest.mark.parametrize(
    ("loss", "name"), [("is_pg", "behaviour_log_probs"), ("ppo", "old_log_probs")]
)
def test_a_loss_may_ask_for_the_log_probs_that_the_actor_sampled_with(tmp_path, loss, name):
    """Two steps on rollouts of the first weights, against plain torch."""
    own = {"gate": "price:-inf", "at_source": False, "learning_rate": 0.1}
    chosen = {**own, "loss": getattr(kondo.losses, loss), "behaviour_input": name}
    made = learner(tmp_path, dtype=torch.float64, **chosen)
    policy = Policy(0, dtype=torch.float64)
    policy.load_state_dict(made.policy.state_dict())
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.1)
    actor = Policy(0, dtype=torch.float64)
    actor.load_state_dict(made.policy.state_dict())
    for number in (1, 2):
        order = Order(number - 1, 0, 1, 0, made.price)
        rollout = Task(number, dtype=torch.float64).rollout(actor)
        message = pack(rollout, order, made.gate, "sample")
        made.step(StepOrder(number, (order,), (), number, 1), [message])
        log_probs = policy.log_prob(rollout.rows)
        ratio = (log_probs - rollout.log_probs).exp()
        if loss == "is_pg":
            losses = -ratio.detach() * rollout.advantages * log_probs
        else:
            clipped = ratio.clamp(0.8, 1.2) * rollout.advantages
            losses = -torch.minimum(ratio * rollout.advantages, clipped)
        optimiser.zero_grad()
        losses.mean().backward()
        optimiser.step()
    assert_close(made.policy.weight, policy.weight)


def test_a_loss_may_weigh_whole_sequences_of_stale_actors(tmp_path):
    """Two steps on rollouts of the first weights; the second has ratios other than 1."""
    own = {"gate": "price:-inf", "at_source": False, "learning_rate": 0.1}
    chosen = {"loss": kondo.losses.sequence_is_pg, "behaviour_input": "behaviour_log_probs"}
    made = learner(tmp_path, unit="sequence", dtype=torch.float64, **own, **chosen)
    policy, actor = (copy.deepcopy(made.policy) for _ in range(2))
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.1)
    for number in (1, 2):
        order = Order(number - 1, 0, 1, 0, made.price)
        rollout = Task(number, unit="sequence", dtype=torch.float64).rollout(actor)
        message = pack(rollout, order, made.gate, "sequence")
        made.step(StepOrder(number, (order,), (), number, 1), [message])
        log_probs = policy.log_prob(rollout.rows)
        everything = torch.ones_like(log_probs, dtype=torch.bool)
        stale = (rollout.advantages, rollout.log_probs, everything, 2.0, everything)
        optimiser.zero_grad()
        sequence_loss(log_probs, *stale, log_probs.numel()).backward()
        optimiser.step()
    assert_close(made.policy.weight, policy.weight)


PRICED = {"gate": "price:0.05"}
# A sketch of few values holds them all: both runs have the same prices.
DRAWN = {"gate": "unbiased:0.25", "sketch_size": 64}


@pytest.mark.parametrize("gate", [PRICED, DRAWN], ids=["delight", "unbiased"])
@pytest.mark.parametrize("unit", UNITS)
def test_sending_at_the_source_trains_bit_for_bit_like_sending_everything(tmp_path, unit, gate):
    ends = []
    for at_source in (True, False):
        folder = tmp_path / str(at_source)
        folder.mkdir()
        made = learner(folder, unit=unit, at_source=at_source, **gate)
        task = Task(1, unit=unit)
        reports = [feed(made, task, n) for n in range(1, 6)]
        ends.append((weights(made), [r.trained for r in reports], made.ledger.counts()))
        sent = sum(report.wire_bytes for report in reports)
        assert (sent < made.full_bytes) == at_source
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


class Remembering(kondo.BaseGate):
    """Draw half of the units above the mean of the means of all calls; of signal |U|."""

    signal = staticmethod(kondo.signals.abs_advantage)

    def __init__(self):
        self.sum, self.calls = torch.zeros((), dtype=torch.float64), 0

    def choose(self, values, mask, generator=None):
        self.sum += values.double().mean()
        self.calls += 1
        drawn = torch.rand(values.shape, generator=generator) < 0.5
        return kondo.Choice.of(mask & drawn & (values >= self.sum / self.calls), mask)

    def state_dict(self):
        return {"sum": self.sum, "calls": self.calls}

    def load_state_dict(self, state):
        self.sum, self.calls = state["sum"], state["calls"]


def highest(values, mask, generator):
    """Keep the highest fifth of all units."""
    keep = torch.zeros_like(mask)
    return kondo.Choice.of(keep.scatter(-1, values.topk(len(values) // 5).indices, True), mask)


AT_THE_LEARNER = pytest.mark.parametrize(
    "gate", ["variance:0.25", "dense", "unbiased:0.2,window=2", Remembering(), highest]
)


@AT_THE_LEARNER
@pytest.mark.parametrize("unit", UNITS)
def test_a_gate_that_needs_all_units_of_a_step_chooses_at_the_learner(tmp_path, unit, gate):
    """Against the gate asked once for both whole rollouts, and plain torch for the gradient."""
    made = learner(tmp_path, unit=unit, dtype=torch.float64, gate=gate)
    tasks, orders = [Task(n, unit=unit, dtype=torch.float64) for n in range(2)], []
    for number in range(2):
        orders.append(Order(number, 0, 1, 0, made.price))
    messages = [make_message(made, *pair) for pair in zip(tasks, orders, strict=True)]
    assert [message["index"].tolist() for message in messages] == [list(range(SAMPLES))] * 2
    gradients, policy = [], copy.deepcopy(made.policy)
    made.policy.weight.register_hook(lambda grad: gradients.append(grad.clone()))
    random = torch.get_rng_state()
    report = made.step(StepOrder(1, tuple(orders), (), 2, 1), messages)
    assert not report.quarantined

    tasks = [Task(n, unit=unit, dtype=torch.float64) for n in range(2)]
    rollouts = [task.rollout(policy) for task in tasks]
    log_probs = torch.cat([policy.log_prob(rollout.rows) for rollout in rollouts])
    advantages = torch.cat([rollout.advantages for rollout in rollouts])
    torch.set_rng_state(random)
    asked = copy.deepcopy(settings(gate=gate).gate)
    chosen = kondo.select(log_probs.detach(), advantages, gate=asked, unit=unit)
    shape = (-1, *[1] * (log_probs.ndim - 1))
    weight = chosen.weight.reshape(shape) if unit != "token" else chosen.weight
    losses = -log_probs * advantages.reshape(shape) * weight
    losses.sum().div(log_probs.numel()).backward()
    assert_close(sum(gradients), policy.weight.grad)
    rows = chosen.keep if unit != "token" else chosen.keep.any(1)
    assert report.trained == int(rows.sum())
    assert (gate == "dense") == (report.trained == 2 * SAMPLES)


@AT_THE_LEARNER
def test_a_gate_at_the_learner_is_part_of_its_checkpoints_and_of_its_tries(tmp_path, gate):
    """What it remembers is as if a refused rollout had never come, also after a restart."""
    ends = []
    for alone in (False, True):
        folder = tmp_path / str(alone)
        folder.mkdir()
        torch.manual_seed(3)
        made = learner(folder, gate=gate, checkpoint_every=1)
        tasks = [Task(seed) for seed in range(2)]
        for step in range(1, 6):
            orders = [Order(2 * step - 2 + n, n, 1, step - 1, made.price) for n in range(2)]
            spoil = "overflowing_input" if step == 3 else None
            messages = [
                make_message(made, tasks[0], orders[0], spoil=spoil),
                make_message(made, tasks[1], orders[1]),
            ]
            taken = slice(1 if alone and spoil else 0, None)
            lost = ((orders[0].number, "left out"),) if alone and spoil else ()
            asked = StepOrder(step, tuple(orders[taken]), lost, 2 * step, 2)
            report = made.step(asked, messages[taken])
            assert len(report.quarantined) == (1 if spoil and not alone else 0)
            if not alone:
                made = learner(folder, gate=gate, checkpoint_every=1, resume=True)
        ends.append(made)
    assert torch.equal(weights(ends[0]), weights(ends[1]))
    states = [str(each.gate.state_dict()) for each in ends]
    assert states[0] == states[1]
    assert ends[0].ledger.trained == ends[1].ledger.trained > 0


@pytest.mark.parametrize("gate", ["delight:0.25", "unbiased:0.25"])
def test_the_price_follows_all_values_and_holds_the_rate(tmp_path, gate):
    made, task = learner(tmp_path, gate=gate), Task(2)
    kept = [feed(made, task, n).trained for n in range(1, 61)]
    assert np.mean(kept[5:]) / SAMPLES == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize("gate", ["delight:0.25", "unbiased:0.25"])
def test_the_learner_learns(tmp_path, gate):
    made, task = learner(tmp_path, learning_rate=0.05, gate=gate), Task(3)
    rollout = Task(9).rollout(made.policy)
    right = rollout.rewards == 1

    def chance_of_right():
        return float(made.policy.log_prob(rollout.rows).detach().exp()[right].mean())

    before = chance_of_right()
    for number in range(1, 61):
        feed(made, task, number)
    assert before < 0.5 < 0.65 < chance_of_right()


@pytest.mark.parametrize("kind", POISONS)
def test_poison_changes_nothing_but_the_accounts(tmp_path, kind):
    made, task = learner(tmp_path, at_source=False), Task(4)
    feed(made, task, 1)
    before, price = weights(made), made.price
    report = feed(made, task, 2, spoil=kind)
    assert torch.equal(weights(made), before)
    assert made.price == price
    assert made.ledger.quarantined == {REASON[kind]: SAMPLES}
    assert made.ledger.quarantined_by_actor == {0: SAMPLES}
    assert report.quarantined[0][:2] == (0, REASON[kind])
    assert made.ledger.balanced
    assert report.step == 2
    feed(made, task, 3)
    assert not torch.equal(weights(made), before)


def moments(of):
    return [
        value
        for state in of._updater.optimiser.state_dict()["state"].values()
        for value in state.values()
    ]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["nan_log_prob", *FINITE_POISONS])
def test_a_poisoned_rollout_does_not_spoil_the_others_of_its_step(tmp_path, kind, place):
    """Bit for bit what the other two do alone, in the next steps too."""
    ends = []
    for alone in (False, True):
        folder = tmp_path / str(alone)
        folder.mkdir()
        # Losses with chance in them: a try that failed must not have drawn anything.
        made = learner(folder, gate="price:0.05", loss=drawing_loss)
        torch.manual_seed(3)
        tasks = [Task(seed) for seed in range(3)]
        for step in range(1, 4):
            orders, messages = [], []
            for index, task in enumerate(tasks):
                order = Order(3 * (step - 1) + index, index, 1 + index, step - 1, made.price)
                spoil = kind if (step, index) == (2, place) else None
                message = make_message(made, task, order, spoil=spoil)
                if not (alone and spoil):
                    orders.append(order)
                    messages.append(message)
            lost = ((3 + place, "left out"),) if alone and step == 2 else ()
            report = made.step(StepOrder(step, tuple(orders), lost, 3 * step, 3), messages)
            expected = [(place, REASON[kind])] if (step, alone) == (2, False) else []
            assert [found[:2] for found in report.quarantined] == expected
        assert made.ledger.balanced
        assert report.counts["trained"] > 0
        ends.append(made)
    assert torch.equal(weights(ends[0]), weights(ends[1]))
    assert ends[0].price == ends[1].price
    assert ends[0].ledger.trained == ends[1].ledger.trained
    for one, other in zip(moments(ends[0]), moments(ends[1]), strict=True):
        assert torch.equal(one, other)
    assert (tmp_path / "False" / QUARANTINE / f"{3 + place}.pt").exists()


def test_the_first_refused_messages_are_kept_for_inspection(tmp_path):
    made, task = learner(tmp_path, at_source=False), Task(4)
    for number in range(1, MAX_KEPT + 4):
        feed(made, task, number, spoil="absurd_reward")
    kept = sorted((tmp_path / QUARANTINE).iterdir())
    assert len(kept) == MAX_KEPT
    first = torch.load(kept[0], weights_only=True)
    assert (first["reason"], first["actor"]) == ("reward", 0)
    assert "expected rewards in [0.0, 1.0]" in first["detail"]
    assert first["arrays"]["rewards"].max() > 1e8


def test_a_full_disk_names_the_copy_that_could_not_be_written(tmp_path):
    made, task = learner(tmp_path, at_source=False), Task(4)
    folder = tmp_path / QUARANTINE
    folder.mkdir()
    (folder / ".0.pt.partial").symlink_to("/dev/full")
    told = rf"cannot write {folder}/0\.pt: No space left on device\. Make room"
    with pytest.raises(WriteError, match=told):
        feed(made, task, 1, spoil="absurd_reward")
    assert list(folder.iterdir()) == []


def test_a_file_in_place_of_the_folder_of_copies_is_named(tmp_path):
    made, task = learner(tmp_path, at_source=False), Task(4)
    (tmp_path / QUARANTINE).write_text("mine")
    with pytest.raises(WriteError, match=rf"cannot write {tmp_path}/{QUARANTINE}: File exists\."):
        feed(made, task, 1, spoil="absurd_reward")


class Named(Task):
    """Its rows have fields of further names, whose values are those of the inputs."""

    def __init__(self, seed, names):
        super().__init__(seed)
        self.names = names

    def rollout(self, policy):
        made = super().rollout(policy)
        return made._replace(rows=made.rows | dict.fromkeys(self.names, made.rows["inputs"]))


ANY_NAMES = [
    ("file", "allow_pickle", "reason", "a/b", "self"),
    ("detail", "actor", "kind", "", ".", "../up", "/top", "n" * 300, "ä ö"),
    ("reason", "field reason", "field field reason"),
    ("nul\0", "nul\0a", "nul\0b", "\0"),
    ("n" * 70_000, "\ud800"),
]


@pytest.mark.parametrize("names", ANY_NAMES, ids=lambda names: repr(names[-1])[:20])
def test_a_learner_takes_fields_of_any_name(tmp_path, names):
    setup = dataclasses.replace(toy(), make_task=partial(Named, names=names))
    options, task = settings(at_source=False), Named(4, names=names)
    made = Learner(setup, options, tmp_path)
    feed(made, task, 1, spoil="absurd_reward")
    kept = torch.load(tmp_path / QUARANTINE / "0.pt", weights_only=True)["arrays"]
    for name in names:
        assert torch.equal(kept[name], kept["inputs"])
    assert feed(made, task, 2).trained > 0


@pytest.mark.parametrize(
    "array", [np.zeros(3, "S3"), np.zeros(3, ">f4"), np.zeros(3, "M8[s]"), np.zeros(3, object)]
)
def test_a_copy_leaves_out_what_a_tensor_cannot_hold(tmp_path, array):
    made, task = learner(tmp_path), Task(4)
    order = Order(0, 0, 1, 0, made.price)
    message = make_message(made, task, order)
    message["arrays"]["rewards"] = array
    report = made.step(StepOrder(1, (order,), (), 1, 1), [message])
    assert report.quarantined[0][1] == "dtype"
    kept = torch.load(tmp_path / QUARANTINE / "0.pt", weights_only=True)["arrays"]
    assert set(kept) == {"inputs", "actions", "log_probs", "advantages"}


def test_a_name_of_a_field_that_is_no_string_is_refused_at_the_start(tmp_path):
    setup = dataclasses.replace(toy(), make_task=partial(Named, names=(7,)))
    with pytest.raises(ValueError, match=r"rows must have strings as names of fields, got \[7\]"):
        Learner(setup, settings(), tmp_path)


def test_a_gradient_that_is_not_finite_is_not_stepped_on(tmp_path):
    def overflow(log_probs, advantages):
        return -log_probs * advantages * 1e39

    made = Learner(toy(), settings(loss=overflow), tmp_path)
    before = weights(made)
    report = feed(made, Task(1), 1)
    assert torch.equal(weights(made), before)
    assert made.ledger.quarantined == {"gradient": SAMPLES}
    assert report.quarantined[0][1] == "gradient"
    assert made.ledger.balanced


def test_one_rollout_of_absurd_numbers_does_not_stop_learning(tmp_path):
    """Its gradient is finite; in Adam's second moments its square would stay for good."""
    ends = []
    for spoil in (None, "absurd_input"):
        folder = tmp_path / str(spoil)
        folder.mkdir()
        made, task = learner(folder, learning_rate=0.05), Task(3)
        for number in range(1, 61):
            feed(made, task, number, spoil=spoil if number == 3 else None)
        made.save()
        state = checkpoint.load(folder)["optimiser"]["state"][0]
        assert bool(state["exp_avg_sq"].isfinite().all())
        rollout = Task(9).rollout(made.policy)
        right = rollout.rewards == 1
        ends.append(float(made.policy.log_prob(rollout.rows).detach().exp()[right].mean()))
    assert made.ledger.quarantined == {"gradient": SAMPLES}
    assert min(ends) > 0.65


def test_rollouts_are_refused_alike_by_a_learner_that_was_restored(tmp_path):
    """The scale of gradients is in the checkpoint; without it the second rollout would pass."""
    made, task = learner(tmp_path, checkpoint_every=4, learning_rate=1e-30), Task(3)
    calls = []
    for number in range(1, 7):
        order = Order(number - 1, 0, 1, number - 1, made.price)
        message = make_message(made, task, order)
        message["arrays"]["inputs"] *= {5: 1e12, 6: 1e3}.get(number, 30.0)
        calls.append((StepOrder(number, (order,), (), number, 1), [message]))
        last = made.step(*calls[-1])
    assert made.ledger.quarantined == {"gradient": SAMPLES}
    again = learner(tmp_path, checkpoint_every=4, learning_rate=1e-30, resume=True)
    reports = [again.step(*call) for call in calls[4:]]
    assert reports[-1] == last
    assert again.ledger.state_dict() == made.ledger.state_dict()
    scales = [each._updater.scale.state_dict() for each in (made, again)]
    assert scales[0] == scales[1]
    assert scales[0]["mean"] > 10 * scales[0]["floor"]


def test_a_ruined_checkpoint_is_not_resumed(tmp_path):
    made = learner(tmp_path)
    feed(made, Task(1), 1)
    made.save()
    state = checkpoint.load(tmp_path)
    state["optimiser"]["state"][0]["exp_avg_sq"][0, 0] = torch.inf
    checkpoint.save(tmp_path, state)
    with pytest.raises(ValueError, match="infinity in the optimiser's state; resume from an ol"):
        learner(tmp_path, resume=True)


def test_an_order_is_trained_on_once(tmp_path):
    made = learner(tmp_path)
    order = Order(0, 0, 1, 0, made.price)
    message = make_message(made, Task(1), order)
    made.step(StepOrder(1, (order,), (), 1, 1), [message])
    after = weights(made)
    report = made.step(StepOrder(2, (order,), (), 1, 1), [message])
    assert torch.equal(weights(made), after)
    assert report.quarantined[0][1] == "duplicate"
    assert made.ledger.duplicates == 1
    assert made.ledger.counts()["produced"] == SAMPLES
    assert made.ledger.balanced


def test_an_order_that_comes_twice_in_one_step_is_trained_on_once(tmp_path):
    made = learner(tmp_path)
    order = Order(0, 0, 1, 0, made.price)
    message = make_message(made, Task(1), order)
    report = made.step(StepOrder(1, (order, order), (), 1, 1), [message, message])
    assert [found[1] for found in report.quarantined] == ["duplicate"]
    assert made.ledger.duplicates == 1
    assert made.ledger.balanced


def test_what_is_lost_is_counted_as_lost(tmp_path):
    made = learner(tmp_path)
    orders = tuple(Order(number, 0, 1, 0, made.price) for number in range(3))
    lost = ((1, "actor died"),)
    made.step(StepOrder(1, (orders[0],), lost, 4, 1), [Undelivered("the node is gone")])
    assert made.ledger.lost == {"actor died": SAMPLES, "undelivered": SAMPLES}
    assert made.ledger.counts()["in_flight"] == 2 * SAMPLES
    assert made.ledger.balanced


def test_staleness_is_counted_per_sample(tmp_path):
    made, task = learner(tmp_path), Task(1)
    for number in range(1, 4):
        feed(made, task, number)
    order = Order(3, 0, 1, 1, made.price)
    message = make_message(made, task, order)
    report = made.step(StepOrder(4, (order,), (), 4, 1), [message])
    assert report.staleness == 2.0
    assert made.staleness == {0: 3 * SAMPLES, 2: SAMPLES}


def drawing_loss(log_probs, advantages):
    """A learner that draws from torch's generator, as one with dropout does."""
    return -log_probs * advantages * (0.5 + torch.rand(()))


@pytest.mark.parametrize("gate", ["delight:0.25", "unbiased:0.25"])
def test_a_checkpoint_and_a_replay_lead_to_the_same_bits(tmp_path, gate):
    options = {"checkpoint_every": 3, "loss": drawing_loss, "gate": gate}
    first = learner(tmp_path, **options)
    task, calls = Task(5), []
    for number in range(1, 6):
        order = Order(number - 1, 0, 1, first.step_number, first.price)
        message = make_message(first, task, order)
        calls.append((StepOrder(number, (order,), (), number, 1), [message]))
        first.step(*calls[-1])
    torch.rand(7)  # the new process has drawn other numbers than the old one
    again = learner(tmp_path, **options, resume=True)
    assert again.step_number == 3
    assert again.price == calls[3][0].orders[0].price  # the one that step 4 acted with
    assert again.ledger.issued == 3
    reports = [again.step(*call) for call in calls[3:]]
    assert torch.equal(weights(again), weights(first))
    assert again.price == first.price
    assert again.ledger.state_dict() == first.ledger.state_dict()
    assert again.staleness == first.staleness
    assert again.wire_bytes == first.wire_bytes
    assert all(torch.equal(*pair) for pair in zip(moments(first), moments(again), strict=True))
    assert reports[-1].step == 5


def test_a_step_whose_report_was_lost_with_its_learner_is_reported_again(tmp_path):
    first = learner(tmp_path, checkpoint_every=1)
    order = Order(0, 0, 1, 0, first.price)
    poisoned = Order(1, 0, 1, 0, first.price)
    message = make_message(first, Task(0), order)
    asked = StepOrder(1, (order, poisoned), (), 2, 1), [message, {"arrays": 3}]
    said = first.step(*asked)
    assert said.durable == 1
    assert said.quarantined
    back = learner(tmp_path, checkpoint_every=1, resume=True)
    before = weights(back)
    assert back.step(*asked) == said
    assert torch.equal(weights(back), before)
    assert (back.step_number, back.ledger.duplicates) == (1, 0)
    assert feed(back, Task(1), 2).step == 2
    with pytest.raises(ValueError, match="number must be 3, got 1"):
        back.step(*asked)


def test_a_resumed_learner_refuses_what_it_was_trained_on(tmp_path):
    first = learner(tmp_path, checkpoint_every=1)
    order = Order(0, 0, 1, 0, first.price)
    message = make_message(first, Task(5), order)
    first.step(StepOrder(1, (order,), (), 1, 1), [message])
    again = learner(tmp_path, resume=True)
    before = weights(again)
    again.step(StepOrder(2, (order,), (), 1, 1), [message])
    assert torch.equal(weights(again), before)
    assert again.ledger.duplicates == 1


def test_steps_come_in_order(tmp_path):
    with pytest.raises(ValueError, match="number must be 1"):
        learner(tmp_path).step(StepOrder(2, (), (), 0, 0), [])


def test_a_checkpoint_is_of_plain_values_and_replaced_as_a_whole(tmp_path, monkeypatch):
    made = learner(tmp_path)
    feed(made, Task(1), 1)
    made.save()
    assert torch.load(tmp_path / checkpoint.FILE, weights_only=True)["step"] == 1
    feed(made, Task(1), 2)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        made.save()
    assert checkpoint.load(tmp_path)["step"] == 1


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_foreign_checkpoint_runs_no_code(tmp_path):
    ran = tmp_path / "ran"
    torch.save({"format": checkpoint.FORMAT, "step": Hostile(str(ran))}, tmp_path / checkpoint.FILE)
    with pytest.raises(DamagedFileError, match="holds more than plain tensors"):
        checkpoint.load(tmp_path)
    assert not ran.exists()


def test_a_checkpoint_of_another_setup_or_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint\.pt"):
        checkpoint.load(tmp_path)
    made = learner(tmp_path)
    state = checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, {**state, "setup": "other"})
    with pytest.raises(ValueError, match="setup must be 'other'"):
        learner(tmp_path, resume=True)
    checkpoint.save(tmp_path, state)
    with pytest.raises(ValueError, match="gate must be 'Gate' as in the checkpoint"):
        learner(tmp_path, gate="unbiased:0.25", resume=True)
    torch.save({"format": 99}, tmp_path / checkpoint.FILE)
    with pytest.raises(ValueError, match=f"format {checkpoint.FORMAT}, got 99"):
        checkpoint.load(tmp_path)
    assert made.step_number == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gate": "delight:1.5"}, "rate must lie"),
        ({"gate": "variance"}, "gate spec must name a known rule, got 'variance'"),
        ({"gate": "noise:0.5"}, "noise must be finite and at least 1"),
        ({"gate": 0.1}, "gate must be"),
        ({"actors": 0}, "actors must be >= 1"),
        ({"queue": 1, "actors": 1, "rollouts_per_step": 2}, "rollouts_per_step must be at most"),
        ({"sketch_size": 5}, "sketch_size"),
        ({"sketch_size": 4.0}, "sketch_size must be a whole number"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"step_timeout": "60"}, "step_timeout must be a number"),
        ({"at_source": "no"}, "at_source must be True or False"),
        ({"rollout_timeout": 0.0}, "rollout_timeout"),
        ({"seed": 2**31}, "seed must be at most 2147483647, got 2147483648"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite"),
    ],
)
def test_settings_without_sense_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Settings(**options)


def test_every_seed_that_is_taken_seeds_every_process():
    highest = Settings(seed=2**31 - 1).seed
    for incarnation in (0, 2**32 - 1):
        torch.Generator().manual_seed(process_seed(highest, incarnation))


def test_the_log_is_json_and_survives_a_killed_writer(tmp_path):
    with log.opened(tmp_path) as write:
        write({"step": 1, "issued": 7, "incarnations": 2, "error": float("nan")})
        write({"event": "actor died"})
    with (tmp_path / log.FILE).open("a") as file:
        file.write('{"step": 2, "iss')
    assert [json.dumps(line) for line in log.lines(tmp_path)][1] == '{"event": "actor died"}'
    assert log.lines(tmp_path)[0]["error"] is None
    assert log.last_issued(tmp_path) == (7, 2)
