"""Hostile messages among sound ones, into a real learner.

Whatever comes, the learner does not raise, its accounts balance, weights and moments are finite,
and no sound rollout is refused. The oracle is a second learner that is given only what the first
one trained on: both end in the same bits.
"""

import copy
import math
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import kondo
from actors.toys import SAMPLES, Policy, Task, toy
from kondo.actors.learner import Learner, StepOrder, Undelivered
from kondo.actors.messages import Order, pack
from kondo.actors.setup import Settings

SPECIALS = (
    *(math.nan, math.inf, -math.inf, 3e38, -3e38, 1e38, 1e25, -1e25, 1e19, -2e19, 1e10, 1e4),
    *(0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-10, 1.0, -1.0, 1e-3, 2e-3),
)
WHOLE = (-(2**63), -1, 3, 2**31, 2**62, 2**63 - 1)
DTYPES = (
    "f2",
    "f4",
    "f8",
    ">f4",
    "i1",
    "i4",
    "i8",
    "u8",
    "c8",
    "S3",
    "U2",
    "O",
    "?",
    "M8[s]",
    "V8",
)


class Subclass(np.ndarray):
    """Compares and counts as it likes."""

    def __len__(self):
        raise ZeroDivisionError

    def __eq__(self, other):
        return True

    __hash__ = None


class Mapping(dict):
    """Is not what it says."""

    def get(self, *_):
        raise ZeroDivisionError

    def keys(self):
        raise ZeroDivisionError


class Key:
    """Cannot be shown."""

    def __str__(self):
        raise ZeroDivisionError

    def __hash__(self):
        return 7


def junk(draw: random.Random):
    """Return something that no message has at its place, or nearly."""
    return draw.choice(
        [
            *(None, True, "x", b"x", 3, -1, 10**30, 10**5000, 0.5, math.nan, [], {}, (), object()),
            *(Mapping(number=1), Mapping(), {Key(): 1}, {"arrays": {}}, np.float32(1), np.int64(3)),
            *(torch.ones(3), np.zeros(0), np.zeros(()), np.zeros((2, 3), np.float32)),
            *(np.zeros(3).view(Subclass), np.ma.masked_array(np.zeros(3)), np.zeros(2, "f4,i4")),
            np.array([None, object()], dtype=object),
            np.zeros(draw.randrange(60), draw.choice(DTYPES)),
            np.full(draw.randrange(60), draw.choice(SPECIALS), np.float32),
            np.broadcast_to(np.float32(1), (SAMPLES,)),
        ]
    )


def array_of(draw: random.Random, message: dict) -> tuple[dict, str] | None:
    """Choose an array of the message: where it is and its name."""
    places = [(message, name) for name in ("index", "sketch_values", "sketch_levels")]
    if type(message.get("arrays")) is dict:
        places += [(message["arrays"], name) for name in message["arrays"]] * 2
    where, name = draw.choice(places)
    return (where, name) if type(where.get(name)) is np.ndarray else None


def put_values(draw: random.Random, array: np.ndarray) -> np.ndarray:
    """Overwrite some numbers, one in all, or scale them."""
    array = array.copy()
    if not array.size or array.dtype.kind not in "fiu":
        return array
    whole = array.dtype.kind in "iu"
    value = draw.choice(WHOLE if whole else SPECIALS)
    with np.errstate(all="ignore"):
        number = np.array(value).astype(array.dtype)
        how = draw.randrange(3)
        if how == 0:
            array[...] = number
        elif how == 1:
            array *= number
        else:
            for _ in range(draw.randint(1, 3)):
                array.reshape(-1)[draw.randrange(array.size)] = number
    return array


def put_form(draw: random.Random, array: np.ndarray) -> np.ndarray:
    """Change dtype, shape or length; ill-typed unless by luck it is the same again."""
    if array.dtype.hasobject or array.dtype.kind not in "fiu":
        return array
    flat, size = array.reshape(-1), max(1, len(array) if array.ndim else 1)
    kind = draw.choice(("f2", "f8", ">f4", ">i8", "i1", "i4", "u1", "c8", "S3", "O"))
    changed = [
        lambda: array.astype(kind),
        lambda: array[:-1],
        lambda: array[:0],
        lambda: np.concatenate([array, array[:1]]),
        lambda: array[None],
        lambda: flat,
        lambda: array.T,
        lambda: array[::-1],
        lambda: np.asfortranarray(array),
        lambda: array[..., None],
        lambda: np.broadcast_to(array[:1], (size, *array.shape[1:])) if len(array) else array,
        lambda: array.view(Subclass),
    ]
    with np.errstate(all="ignore"):
        return draw.choice(changed)() if array.ndim else array


def put_names(draw: random.Random, arrays: dict) -> None:
    """Lose an array, replace it, add one, or give two of them each other's name."""
    one, other = (draw.choice(list(arrays)) for _ in range(2))
    how = draw.randrange(4)
    if how == 0:
        del arrays[one]
    elif how == 1:
        arrays[one] = junk(draw)
    elif how == 2:
        arrays["more"] = arrays[one]
    else:
        arrays[one], arrays[other] = arrays[other], arrays[one]


def spoil(draw: random.Random, sound: dict):
    """Return a hostile copy of a sound message, with one to three faults."""
    message = copy.deepcopy(sound)
    if draw.random() < 0.05:
        return junk(draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        how = draw.random()
        place = array_of(draw, message)
        if how < 0.45 and place:
            where, name = place
            where[name] = put_values(draw, where[name])
        elif how < 0.6 and place:
            where, name = place
            where[name] = put_form(draw, where[name])
        elif how < 0.7:
            message[draw.choice(list(sound))] = junk(draw)
        elif how < 0.75:
            message.pop(draw.choice(list(sound)), None)
        elif how < 0.78:
            message[draw.choice(["more", Key(), 3])] = junk(draw)
        elif how < 0.86 and type(message.get("arrays")) is dict and message["arrays"]:
            put_names(draw, message["arrays"])
        else:
            name = draw.choice(("number", "incarnation"))
            lie = draw.choice((-1, 0, 1, 2, 10**30, 10**5000, -(10**5000), 2**62 - 1))
            message[name] = lie
            message["mean_reward"] = draw.choice((message.get("mean_reward"), *SPECIALS))
    return message


def scaled(draw: random.Random, sound: dict):
    """Return well-typed numbers within all limits that are absurd all the same."""
    message = copy.deepcopy(sound)
    inputs = message["arrays"]["inputs"]
    with np.errstate(all="ignore"):
        inputs *= inputs.dtype.type(draw.choice((1e4, 1e8, 1e15, 1e25, 1e30, 1e36, 1e38)))
    np.nan_to_num(inputs, copy=False, posinf=3e38, neginf=-3e38)
    return message


def drawing_loss(log_probs, advantages):
    """Draw from torch's generator, as a policy with dropout does."""
    return -log_probs * advantages * (0.5 + torch.rand(()))


def options(draw: random.Random) -> dict:
    """Return settings of a learner."""
    gate = draw.choice(
        [
            f"delight:{draw.choice((0.1, 0.5, 1.0))}",
            f"price:{draw.choice((-math.inf, 0.0, 0.1))}",
            f"unbiased:{draw.choice((0.1, 0.6))}",
            f"noise:{draw.choice((1.0, 1.5))}",
            # At the learner, which sees all units of a step.
            "variance:0.3",
            "dense",
            "delight:0.2,reserve=0.2",
            "unbiased:0.2,window=3",
        ]
    )
    loss = draw.choice(
        [
            {},
            {"loss": drawing_loss},
            {"loss": kondo.losses.is_pg, "behaviour_input": "behaviour_log_probs"},
            {"loss": kondo.losses.ppo, "behaviour_input": "old_log_probs"},
        ]
    )
    return {
        "gate": gate,
        **loss,
        "at_source": draw.random() < 0.6,
        "micro_batch": draw.choice((None, None, 3, 50)),
        "window": draw.randint(1, 5),
        "learning_rate": draw.choice((1e-3, 0.05, 0.5)),
        "sketch_size": 64,  # holds every value: a sketch of fewer draws its own random bits
        "checkpoint_every": draw.choice((7, 1000)),
        "seed": draw.randrange(2**31),
    }


class Player:
    """A learner with a random state of its own."""

    def __init__(self, made_of, settings, folder: Path, seed: int):
        folder.mkdir()
        self._how = made_of, settings, folder
        torch.manual_seed(seed)
        self.learner = Learner(*self._how)
        self._rng = torch.get_rng_state()

    def step(self, number, orders, lost, issued, messages):
        torch.set_rng_state(self._rng)
        asked = StepOrder(number, tuple(orders), tuple(lost), issued, 1)
        report = self.learner.step(asked, messages)
        self._rng = torch.get_rng_state()
        return report

    def restart(self):
        """End the process after a checkpoint, and begin another one."""
        torch.set_rng_state(self._rng)
        self.learner.save()
        torch.rand(3)
        self.learner = Learner(*self._how, resume=True)
        assert torch.equal(torch.get_rng_state(), self._rng)

    def state(self) -> list[torch.Tensor]:
        """Return all that training has left behind."""
        learner = self.learner
        moments = learner._updater.optimiser.state_dict()["state"].values()
        scale = learner._updater.scale.state_dict()
        numbers = [*learner.price, scale["floor"], scale["mean"]]
        return [
            *learner.policy.state_dict().values(),
            *(value for moment in moments for value in moment.values()),
            torch.tensor([float(number) for number in numbers], dtype=torch.float64),
            torch.tensor([learner.ledger.trained, learner.ledger.skipped]),
            self._rng,
        ]


def same(one: Player, other: Player) -> bool:
    pairs = zip(one.state(), other.state(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


class Accounts:
    """Where every sample of the run went, counted by hand."""

    def __init__(self):
        self.issued, self.trained, self.refused, self.lost = 0, set(), set(), set()

    def check(self, learner: Learner) -> None:
        counts = learner.ledger.counts()
        open_orders = self.issued - len(self.trained) - len(self.refused) - len(self.lost)
        assert learner.ledger.balanced, counts
        assert counts["produced"] == self.issued * SAMPLES
        assert counts["trained"] + counts["skipped"] == len(self.trained) * SAMPLES
        assert counts["quarantined"] == len(self.refused) * SAMPLES
        assert counts["lost"] == len(self.lost) * SAMPLES
        assert counts["in_flight"] == open_orders * SAMPLES


def case(draw: random.Random, counts: Counter) -> None:
    settings = Settings(**options(draw))
    unit = draw.choice(("sample", "token", "sequence"))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    made_of, seed = toy(unit=unit, dtype=dtype), draw.randrange(2**31)
    with tempfile.TemporaryDirectory() as folder:
        mixed, alone = (Player(made_of, settings, Path(folder) / n, seed) for n in ("a", "b"))
        actor = Policy(0, dtype=dtype)
        tasks = [Task(draw.randrange(2**31), unit=unit, dtype=dtype) for _ in range(3)]
        accounts, settled = Accounts(), []
        for number in range(1, draw.randint(3, 30)):
            if draw.random() < 0.7:  # else it acts with old weights
                actor.load_state_dict(mixed.learner.policy.state_dict())
            one_step(draw, counts, number, (mixed, alone), (actor, tasks), accounts, settled)
            if draw.random() < 0.05:
                mixed.restart()
                counts["restarts"] += 1
            assert same(mixed, alone)


def one_step(draw, counts, number, players, actors, accounts: Accounts, settled: list) -> None:
    mixed, alone = players
    actor, tasks = actors
    learner, sent = mixed.learner, []
    for _ in range(draw.randint(0, 4)):
        task = draw.randrange(len(tasks))
        version = draw.randint(max(0, number - 3), number - 1)
        # Reports name actors: one for each order tells which was refused.
        order = Order(accounts.issued, accounts.issued, 1 + task, version, learner.price)
        accounts.issued += 1
        sound = pack(tasks[task].rollout(actor), order, learner.gate, tasks[task].unit)
        fate = draw.random()
        if fate < 0.5:
            sent.append((order, sound, "sound"))
        elif fate < 0.75:
            sent.append((order, spoil(draw, sound), "hostile"))
        elif fate < 0.9:
            sent.append((order, scaled(draw, sound), "hostile"))
        elif fate < 0.95:
            sent.append((order, Undelivered("gone"), "undelivered"))
            accounts.lost.add(order.number)
    if draw.random() < 0.2 and (settled or sent):  # again what was sent before
        order, message, _ = draw.choice([*settled, *sent])
        sent.append((order, message, "again"))
    orders, messages = ([part[place] for part in sent] for place in (0, 1))
    report = mixed.step(number, orders, (), accounts.issued, messages)
    refused = check_refusals(counts, mixed.learner, report, sent, accounts)
    settled += [part for part in sent if part[2] != "again"]
    # The same step, of what was trained on.
    kept = [
        part for part in sent if part[2] in ("sound", "hostile") and part[0].number not in refused
    ]
    accounts.trained |= {order.number for order, _, _ in kept}
    accounts.check(mixed.learner)
    orders, messages = ([part[place] for part in kept] for place in (0, 1))
    assert not alone.step(number, orders, (), accounts.issued, messages).quarantined
    counts["steps"] += 1
    counts["faults"] += len(refused)
    counts["sound"] += sum(part[2] == "sound" for part in sent)


def check_refusals(counts, learner, report, sent, accounts: Accounts) -> set[int]:
    """Return the orders that were refused in this step, after checking that they had to be."""
    for value in learner.policy.state_dict().values():
        assert bool(value.isfinite().all())
    for moment in learner._updater.optimiser.state_dict()["state"].values():
        assert all(bool(value.isfinite().all()) for value in moment.values())
    reasons = [reason for _, reason, _ in report.quarantined]
    assert reasons.count("duplicate") == sum(part[2] == "again" for part in sent)
    refused = {who for who, reason, _ in report.quarantined if reason != "duplicate"}
    hostile = {order.number: message for order, message, kind in sent if kind == "hostile"}
    assert refused <= hostile.keys(), f"a sound rollout was refused: {report.quarantined}"
    for number in hostile.keys() - refused:
        assert not is_broken(hostile[number], learner.schema), f"order {number} was trained on"
    accounts.refused |= refused
    for reason in reasons:
        counts[f"for {reason}"] += 1
    return refused


def is_broken(message, schema) -> bool:
    """Return whether the message by itself shows what no step may use."""
    if type(message) is not dict or type(message.get("arrays")) is not dict:
        return True
    arrays = message["arrays"]
    if set(arrays) != set(schema.fields):
        return True
    return any(
        type(array) is not np.ndarray
        or array.dtype != schema.fields[name].dtype
        or array.shape != (len(message["index"]), *schema.fields[name].shape)
        or not np.isfinite(array).all()
        for name, array in arrays.items()
    )


def test_messages(campaign):
    campaign.run(case)
