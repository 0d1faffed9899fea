import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.toys import (
    ACTIONS,
    FINITE_POISONS,
    POISONS,
    REASON,
    SAMPLES,
    Policy,
    Task,
    poisoned,
    toy,
)
from kondo.actors.messages import (
    REASONS,
    Batch,
    Order,
    Quarantine,
    pack,
    schema_of,
    validate,
    wire_bytes,
)
from kondo.actors.setup import Settings, Setup
from kondo.actors.source_price import EVERYTHING, Price, SourceGate

DELIGHT, UNBIASED = "delight:0.03", "unbiased:0.03"
GATES = pytest.mark.parametrize("gate", [DELIGHT, UNBIASED])
ORDER = Order(number=3, actor=1, incarnation=5, version=2, price=Price(0.1, 0.5))


def rollout(unit="sample"):
    return Task(0, unit=unit).rollout(Policy(0))


def schema(unit="sample"):
    return schema_of(toy(unit=unit), unit, rollout(unit))


def source(gate, at_source):
    return SourceGate(Settings(gate=gate, at_source=at_source, seed=3))


def packed(made=None, *, order=ORDER, at_source=True, unit="sample", gate=DELIGHT):
    made = rollout(unit) if made is None else made
    return pack(made, order, source(gate, at_source), unit)


def check(message, order=ORDER, made=None, *, at_source=True, gate=DELIGHT):
    return validate(message, order, made or schema(), source(gate, at_source))


UNITS = ["sample", "token", "sequence"]


@GATES
@pytest.mark.parametrize("unit", UNITS)
def test_what_is_sent_at_the_source_is_what_the_learner_would_keep(unit, gate):
    order = ORDER if gate is DELIGHT else ORDER._replace(price=Price(2.0, 1.0))
    sent, whole = (
        check(
            packed(order=order, unit=unit, at_source=at_source, gate=gate),
            order,
            schema(unit),
            at_source=at_source,
            gate=gate,
        )
        for at_source in (True, False)
    )
    assert isinstance(sent, Batch)
    assert isinstance(whole, Batch)
    rows = whole.keep if unit != "token" else whole.keep.any(dim=1)
    assert 0 < int(rows.sum()) < SAMPLES
    assert torch.equal(sent.rows["inputs"], whole.rows["inputs"][rows])
    assert torch.equal(sent.keep, whole.keep[rows])
    assert torch.equal(sent.weight, whole.weight[rows])
    assert sent.trained == whole.trained == int(rows.sum())
    assert sent.wire_bytes < whole.wire_bytes
    assert sent.full_bytes == whole.full_bytes == whole.wire_bytes


def test_bytes_are_those_of_the_message():
    message = packed()
    assert check(message).wire_bytes == wire_bytes(message)
    assert wire_bytes({"a": np.zeros(1000)}) > 8000


@GATES
@pytest.mark.parametrize("at_source", [True, False], ids=["at source", "send all"])
@pytest.mark.parametrize("kind", sorted(set(POISONS) - set(FINITE_POISONS)))
def test_every_poison_is_quarantined_with_its_reason(kind, at_source, gate):
    order = ORDER._replace(price=EVERYTHING)
    message = packed(poisoned(rollout(), kind), order=order, at_source=at_source, gate=gate)
    found = check(message, order, at_source=at_source, gate=gate)
    assert isinstance(found, Quarantine)
    assert found.reason == REASON[kind]
    assert "expected" in found.detail


@GATES
@pytest.mark.parametrize(("value", "reason"), [(torch.nan, "nan"), (-torch.inf, "range")])
def test_what_is_broken_is_sent_even_where_the_price_keeps_nothing(value, reason, gate):
    order = ORDER._replace(price=Price(1e9, 0.0))
    made = rollout()
    made.log_probs[3] = value
    message = packed(made, order=order, gate=gate)
    assert message["index"].tolist() == [3]
    found = check(message, order, gate=gate)
    assert isinstance(found, Quarantine)
    assert found.reason == reason


@GATES
@pytest.mark.parametrize("unit", UNITS)
def test_an_actor_that_sends_a_row_which_the_price_does_not_buy_is_caught(unit, gate):
    order = ORDER._replace(price=Price(0.4, 0.5))
    honest = packed(order=order, unit=unit, gate=gate)
    assert isinstance(check(honest, order, schema(unit), gate=gate), Batch)
    everything = packed(order=order, unit=unit, at_source=False, gate=gate)
    extra = min(set(range(SAMPLES)) - set(honest["index"].tolist()))
    sent = sorted([*honest["index"].tolist(), extra])
    arrays = {name: array[sent] for name, array in everything["arrays"].items()}
    found = check(
        honest | {"index": np.array(sent, np.int32), "arrays": arrays},
        order,
        schema(unit),
        gate=gate,
    )
    assert found == ("rows", "expected rows that the price buys, got 1 others")
    # A whole rollout hides nothing.
    whole = check(everything, order, schema(unit), gate=gate)
    assert isinstance(whole, Batch)
    assert whole.trained == len(honest["index"])


def test_a_rollout_that_is_worth_nothing_is_a_sound_message_without_rows():
    order = ORDER._replace(price=Price(1e9, 0.0))
    found = check(packed(order=order), order)
    assert isinstance(found, Batch)
    assert (found.trained, len(found.log_probs)) == (0, 0)


@pytest.mark.parametrize("claim", [{"number": 4}, {"incarnation": 6}])
def test_a_message_for_another_order_is_refused(claim):
    found = check({**packed(), **claim})
    assert isinstance(found, Quarantine)
    assert found.reason == "identity"


def one_value(value, level):
    return {
        "sketch_values": np.array([value], np.float32),
        "sketch_levels": np.array([level], np.uint8),
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"index": np.array([0, 0], np.int32)}, "rows"),
        ({"index": np.array([SAMPLES], np.int32)}, "rows"),
        ({"index": np.array([-1], np.int32)}, "rows"),
        ({"index": np.arange(SAMPLES + 1, dtype=np.int32)}, "rows"),
        ({"index": np.zeros((1, 1), np.int32)}, "shape"),
        ({"index": np.zeros(1)}, "dtype"),
        ({"mean_reward": float("nan")}, "reward"),
        ({"mean_reward": 2.0}, "reward"),
        ({"more": -5}, "structure"),
        ({"sketch_values": np.array([np.nan], np.float32)}, "sketch"),
        (one_value(0.0, level=0), "sketch"),
        (one_value(1.0, level=40), "sketch"),
        (one_value(1.0, level=70), "sketch"),
        ({"sketch_levels": np.zeros(1000, np.uint8)}, "sketch"),
        ({"arrays": None}, "structure"),
        ({"arrays": {}}, "structure"),
        ({"number": "3"}, "structure"),
    ],
)
def test_every_part_of_a_message_is_checked(change, reason):
    found = check({**packed(), **change})
    assert isinstance(found, Quarantine)
    assert found.reason == reason


@GATES
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("value", [-3e38, -1e20])
def test_log_probs_that_no_arithmetic_holds_are_refused(unit, gate, value):
    """Sums over tokens, and products with advantages, would be infinite in float32."""
    made = rollout(unit)
    made.log_probs[2:4] = value
    order = ORDER._replace(price=EVERYTHING)
    found = check(packed(made, order=order, unit=unit, gate=gate), order, schema(unit), gate=gate)
    assert isinstance(found, Quarantine)
    assert found.reason == "range"


def test_values_that_are_not_finite_are_refused():
    """Each number is within its limits, their product is not."""
    wide = setup(max_advantage=1e30)
    made = rollout()
    made.log_probs[3], made.advantages[3] = -1e15, 9e29
    message, form = packed(made, at_source=False), schema_of(wide, "sample", rollout())
    found = check(message, made=form, at_source=False)
    assert found == ("range", "expected finite values of all units, got others")


@GATES
@pytest.mark.parametrize("at_source", [True, False], ids=["at source", "send all"])
def test_a_sketch_cannot_claim_what_was_not_sent(gate, at_source):
    """What is above the price is sent: a higher value in the sketch is a lie about all units."""
    honest = packed(at_source=at_source, gate=gate)
    assert isinstance(check(honest, gate=gate, at_source=at_source), Batch)
    sent = check(honest, gate=gate, at_source=at_source)
    top = max(ORDER.price.price, float(honest["sketch_values"].max()))
    assert isinstance(sent, Batch)
    for value in (3e38, 1.001 * top):
        lie = honest | {"sketch_values": honest["sketch_values"].copy()}
        lie["sketch_values"][0] = value
        found = check(lie, gate=gate, at_source=at_source)
        assert isinstance(found, Quarantine)
        assert found.reason == "sketch"


def test_what_a_draw_is_by_is_not_negative():
    message = packed(gate=UNBIASED)
    message["sketch_values"] = -message["sketch_values"]
    found = check(message, gate=UNBIASED)
    assert isinstance(found, Quarantine)
    assert found.reason == "sketch"
    assert isinstance(check(packed(gate=DELIGHT)), Batch)


class Unshowable:
    """Cannot be written down."""

    def __str__(self):
        raise ZeroDivisionError

    def __hash__(self):
        return 1


@pytest.mark.parametrize("change", [{"number": 10**5000}, {Unshowable(): 1}])
def test_what_cannot_even_be_shown_is_refused(change):
    found = check({**packed(), **change})
    assert isinstance(found, Quarantine)
    assert found.reason == "structure"
    assert "expected a message that can be checked" in found.detail


def test_half_a_rollout_is_refused_where_all_of_it_was_to_be_sent():
    found = check(packed(at_source=True), at_source=False)
    assert isinstance(found, Quarantine)
    assert found.reason == "rows"


@given(
    st.sampled_from(["number", "arrays", "index", "mean_reward", "sketch_values", "sketch_levels"]),
    st.one_of(
        st.none(),
        st.text(max_size=3),
        st.floats(),
        st.integers(),
        st.lists(st.integers(), max_size=3),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.none(), max_size=3),
        st.sampled_from([np.float32, np.float64, np.int32, np.uint8, np.object_, np.complex64]).map(
            lambda dtype: np.ones((2, 3), dtype)
        ),
    ),
)
def test_no_message_makes_the_check_raise(key, junk):
    sound = packed()
    for message in (junk, {**sound, key: junk}, {key: junk}):
        found = check(message)
        assert isinstance(found, Batch | Quarantine)
        assert isinstance(found, Batch) or found.reason in REASONS


@given(st.sampled_from(["inputs", "actions", "log_probs", "advantages", "rewards"]), st.data())
def test_no_array_makes_the_check_raise(name, data):
    message = copy.deepcopy(packed())
    array = message["arrays"][name]
    junk = data.draw(
        st.sampled_from(
            [
                None,
                [1, 2],
                array.astype(np.object_),
                array.astype(np.complex64),
                array.astype("S3"),
                array[:0],
                array.reshape(1, *array.shape),
                np.ma.masked_array(array),
                np.asfortranarray(array[::-1]),
            ]
        )
    )
    message["arrays"][name] = junk
    assert isinstance(check(message), Batch | Quarantine)


def test_what_is_accepted_may_be_written_to():
    """Ray's arrays are read-only and shared."""
    message = packed()
    for array in message["arrays"].values():
        array.setflags(write=False)
    found = check(message)
    assert isinstance(found, Batch)
    found.rows["inputs"].zero_()
    assert message["arrays"]["inputs"].any()


def setup(**changes):
    options = {"samples": SAMPLES, "limits": {"actions": (0, ACTIONS - 1)}, **changes}
    return Setup(name="x", make_task=Task, make_policy=Policy, **options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"samples": 41}, "41 rows"),
        ({"limits": {}}, "limits must hold lowest and highest value of the whole numbers in acti"),
        ({"limits": {"actions": (0, 2), "other": (0, 1)}}, "other"),
    ],
)
def test_a_setup_that_contradicts_its_task_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        schema_of(setup(**changes), "sample", rollout())


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 0},
        {"limits": {"actions": (1, 0)}},
        {"limits": {"actions": (0, float("inf"))}},
        {"reward_limits": (1.0, 0.0)},
        {"max_advantage": 0.0},
    ],
)
def test_a_setup_without_sense_is_refused(changes):
    with pytest.raises(ValueError, match=r"limits|samples|max_advantage"):
        setup(**changes)
