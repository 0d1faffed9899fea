import pytest
from hypothesis import given
from hypothesis import strategies as st

from kondo.actors.ledger import Ledger

FATES = st.lists(st.sampled_from(["train", "quarantine", "lose", "leave"]), max_size=40)


def settled(fates, order):
    ledger = Ledger(10)
    ledger.issue(len(fates))
    for number in order:
        match fates[number]:
            case "train":
                ledger.train(number, 3)
            case "quarantine":
                ledger.quarantine(number, "nan", actor=1)
            case "lose":
                ledger.lose(number, "died")
    return ledger


@given(FATES, st.randoms())
def test_every_sample_is_in_one_place(fates, random):
    order = list(range(len(fates)))
    random.shuffle(order)
    ledger = settled(fates, order)
    assert ledger.balanced
    assert ledger.counts() == {
        "produced": 10 * len(fates),
        "trained": 3 * fates.count("train"),
        "skipped": 7 * fates.count("train"),
        "quarantined": 10 * fates.count("quarantine"),
        "lost": 10 * fates.count("lose"),
        "in_flight": 10 * fates.count("leave"),
    }
    assert ledger.unsettled() == [n for n, fate in enumerate(fates) if fate == "leave"]
    again = Ledger(10)
    again.load_state_dict(ledger.state_dict())
    assert again.state_dict() == ledger.state_dict()


@pytest.mark.parametrize("again", ["train", "quarantine", "lose"])
def test_an_order_is_settled_once(again):
    ledger = settled(["train", "lose", "leave"], range(3))
    for number in (0, 1):
        with pytest.raises(ValueError, match="twice"):
            {
                "train": lambda n: ledger.train(n, 1),
                "quarantine": lambda n: ledger.quarantine(n, "nan", 0),
                "lose": lambda n: ledger.lose(n, "died"),
            }[again](number)


def test_an_order_that_was_never_given_cannot_be_settled():
    with pytest.raises(ValueError, match="in flight"):
        settled(["leave"], []).train(1, 1)


def test_memory_does_not_grow_with_what_is_settled():
    ledger = Ledger(10)
    for number in range(5000):
        ledger.issue(number + 1)
        ledger.train(number, 1)
    assert ledger.state_dict()["settled"] == []


def test_accounts_of_rollouts_of_another_size_are_refused():
    with pytest.raises(ValueError, match="samples must be 10"):
        Ledger(11).load_state_dict(Ledger(10).state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"trained": -1},
        {"skipped": float("nan")},
        {"issued": 2.0},
        {"below": True},
        {"lost": {"died": -10}},
        {"quarantined_by_actor": {1: None}},
        {"lost": [1]},
        {"lost": None},
        {"settled": 3},
        {"settled": [9]},
        {"settled": [0]},
        {"settled": [2, 2]},
        {"below": 5, "settled": []},
        {"trained": 4},
        {"settled": []},
    ],
)
def test_accounts_that_no_ledger_can_have_are_refused(change):
    state = settled(["train", "leave", "quarantine", "leave"], range(4)).state_dict()
    ledger = settled(["lose"], [0])
    before = ledger.state_dict()
    with pytest.raises(ValueError, match="ledger must have counts >= 0 that add up"):
        ledger.load_state_dict(state | change)
    assert ledger.state_dict() == before
    ledger.load_state_dict(state)
    assert ledger.balanced


def test_a_part_of_the_accounts_is_refused():
    state = Ledger(10).state_dict()
    del state["lost"]
    with pytest.raises(ValueError, match="ledger must have"):
        Ledger(10).load_state_dict(state)
