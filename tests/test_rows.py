import collections
import dataclasses
import pathlib
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import BatchEncoding

from kondo import rows

INDEX = torch.tensor([0, 2])


class Pair(NamedTuple):
    first: torch.Tensor
    second: str


@dataclasses.dataclass
class ModelOutput(transformers.utils.ModelOutput):
    logits: torch.Tensor = None
    loss: torch.Tensor = None


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    note: str = "kept"
    derived: int = dataclasses.field(init=False, default=7)


class Odd(collections.UserDict):
    pass


class Shared(collections.abc.MutableMapping):
    """A mapping whose shallow copy shares the dict that holds its items."""

    def __init__(self, held, label="own"):
        self._held = dict(held)
        self.label = label

    def __getitem__(self, key):
        return self._held[key]

    def __setitem__(self, key, value):
        self._held[key] = value

    def __delitem__(self, key):
        del self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)

    def double(self):
        return 2 * self["a"]


class InSlots(Shared):
    __slots__ = ("__inner",)

    def __init__(self, held):
        super().__init__({})
        self.__inner = Shared(held)
        self._held = self.__inner


class Deep(Shared):
    """The items lie deeper than in an attribute."""

    def __init__(self, held):
        super().__init__({})
        self._held = [dict(held)]

    def __getitem__(self, key):
        return self._held[0][key]

    def __setitem__(self, key, value):
        self._held[0][key] = value

    def __iter__(self):
        return iter(self._held[0])

    def __len__(self):
        return len(self._held[0])


class Itself(dict):
    def __copy__(self):
        return self


X = torch.arange(12).reshape(4, 3)


@pytest.mark.parametrize(
    ("batch", "picked"),
    [
        (X, lambda b: b),
        ({"a": X, "n": 3}, lambda b: b["a"]),
        ([X, "text"], lambda b: b[0]),
        ((X, None), lambda b: b[0]),
        (Pair(X, "s"), lambda b: b.first),
        (Record(X), lambda b: b.x),
        (Odd({"a": X}), lambda b: b["a"]),
        (BatchEncoding({"input_ids": X}), lambda b: b["input_ids"]),
        (TensorDict({"a": X}, batch_size=[4]), lambda b: b["a"]),
        (TensorDict({"a": X}, batch_size=[4], device="cpu"), lambda b: b["a"]),
        (TensorDict({"a": X, "in": {"b": X}, "note": "n"}, batch_size=[4]), lambda b: b["in", "b"]),
        (collections.defaultdict(list, {"a": X}), lambda b: b["a"]),
        ({"a": X, "number": np.float32(3.0)}, lambda b: b["a"]),
        ({"deep": [{"x": (X,)}]}, lambda b: b["deep"][0]["x"][0]),
    ],
)
def test_takes_rows_of_every_nest(batch, picked):
    assert rows.num_rows(batch) == 4
    for index, expected in ((INDEX, X[[0, 2]]), (slice(1, 3), X[1:3])):
        taken = rows.take(batch, index)
        assert type(taken) is type(batch)
        assert torch.equal(picked(taken), expected)
    assert rows.devices(batch) == {torch.device("cpu")}


@pytest.mark.parametrize(
    ("make", "kept_type"),
    [
        (Shared, True),
        (InSlots, True),
        (Deep, False),
        (Itself, False),
        (types.MappingProxyType, False),
        (Odd, True),
        (BatchEncoding, True),
        (collections.OrderedDict, True),
        (collections.ChainMap, False),
        (lambda held: TensorDict(held, batch_size=[4]), True),
    ],
)
def test_a_mapping_is_never_written_to(make, kept_type):
    batch = make({"a": X, "b": X + 100})
    before = dict(batch.items())
    for index in (INDEX, slice(1, 3)):
        taken = rows.take({"inner": batch}, index)["inner"]
        assert isinstance(taken, type(batch) if kept_type else dict)
        assert torch.equal(taken["a"], X[index])
        assert torch.equal(taken["b"], X[index] + 100)
        assert list(taken.keys()) == ["a", "b"]
        if make is Shared:
            assert torch.equal(taken.double(), 2 * X[index])
            assert taken.label == "own"
    assert list(batch.keys()) == ["a", "b"]
    assert all(torch.equal(value, before[key]) for key, value in batch.items())
    if not isinstance(batch, TensorDict):
        assert all(value is before[key] for key, value in batch.items())


@dataclasses.dataclass
class Computes:
    """Centred over all rows when it is made; must not be made again of some."""

    x: torch.Tensor
    shift: dataclasses.InitVar[float]
    centred: torch.Tensor = dataclasses.field(init=False)
    names: list = dataclasses.field(init=False)
    rate: float = dataclasses.field(init=False, default=0.5)

    def __post_init__(self, shift):
        self.x = self.x.double()
        self.centred = self.x - self.x.mean(0) + shift
        self.names = [f"row {number}" for number in range(len(self.x))]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    norms: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "norms", self.x.double().norm(dim=1) / self.x.double().norm())


@dataclasses.dataclass(frozen=True)
class ByHand:
    __slots__ = ("x",)
    x: torch.Tensor

    def __copy__(self):
        return self


def test_a_dataclass_is_not_made_again():
    batch = Computes(X, 1.0)
    assert rows.num_rows(batch) == 4
    for index in (INDEX, slice(1, 3)):
        taken = rows.take(batch, index)
        assert type(taken) is Computes
        assert torch.equal(taken.x, X.double()[index])
        assert torch.equal(taken.centred, (X - X.double().mean(0) + 1)[index])
        assert taken.names == [batch.names[place] for place in torch.arange(4)[index]]
        assert taken.rate == 0.5
    frozen = rows.take(Frozen(X), INDEX)
    assert torch.equal(frozen.norms, (X.double().norm(dim=1) / X.double().norm())[INDEX])
    batch = ByHand(X)
    assert torch.equal(rows.take(batch, INDEX).x, X[INDEX])
    assert batch.x is X


def test_what_a_dataclass_was_given_later_is_taken_where_it_has_rows():
    batch = Record(X)
    later = {
        "noise": X + 100,
        "prompts": ["a", "b", "c", "d"],
        "total": X.sum(),
        "table": X[:3],
        "source": "file",
        "fraction": 0.1,
        "size": (2, 3),
    }
    vars(batch).update(later)
    taken = rows.take(batch, INDEX)
    assert torch.equal(taken.noise, X[INDEX] + 100)
    assert taken.prompts == ["a", "c"]
    for name in ("total", "table", "source", "fraction", "size"):
        assert getattr(taken, name) is later[name]
    assert batch.noise is later["noise"]


def test_encodings_of_a_tokeniser_are_taken_with_their_rows():
    texts = [f"row {number}" for number in range(4)]
    batch = BatchEncoding({"input_ids": X}, encoding=texts, n_sequences=1)
    taken = rows.take(batch, INDEX)
    assert taken.encodings == ["row 0", "row 2"]
    assert batch.encodings == ["row 0", "row 1", "row 2", "row 3"]


def test_fields_of_a_dataclass_that_are_computed_must_have_rows_too():
    batch = Computes(X, 1.0)
    batch.names = ["a"]
    with pytest.raises(ValueError, match=r"batch\.names must have one entry per row, 4"):
        rows.num_rows(batch)
    batch.names, batch.centred = None, X[:3]
    with pytest.raises(ValueError, match=r"4 rows in batch\.x and 3 in batch\.centred"):
        rows.num_rows(batch)


def test_an_item_that_is_an_attribute_too_is_taken_once():
    batch = ModelOutput(logits=X, loss=None)
    taken = rows.take(batch, INDEX)
    assert type(taken) is ModelOutput
    assert torch.equal(taken["logits"], X[INDEX])
    assert taken.logits is taken["logits"]
    assert batch.logits is batch["logits"] is X


def test_constants_pass_through():
    taken = rows.take({"x": X, "names": "abcd", "k": 3, "none": None, "raw": b"abcd"}, INDEX)
    assert (taken["names"], taken["k"], taken["none"], taken["raw"]) == ("abcd", 3, None, b"abcd")
    assert rows.take(Record(X, note="n"), INDEX).note == "n"


class Names(list):
    pass


@pytest.mark.parametrize(
    ("field", "some", "few"),
    [
        (["a", "b", "c", "d"], ["a", "c"], ["b", "c"]),
        ((1, 2.5, None, True), (1, None), (2.5, None)),
        (Names("abcd"), Names("ac"), Names("bc")),
        (collections.deque([b"a", b"b", b"c", b"d"]), [b"a", b"c"], [b"b", b"c"]),
        (range(4), [0, 2], [1, 2]),
        (
            [[{"role": "user"}], [], [{"role": "tool"}], ["d"]],
            [[{"role": "user"}], [{"role": "tool"}]],
            [[], [{"role": "tool"}]],
        ),
        (
            [pathlib.Path("a"), pathlib.Path("b"), {"k": 1}, object],
            [pathlib.Path("a"), {"k": 1}],
            [pathlib.Path("b"), {"k": 1}],
        ),
        ([Pair(None, "a")] * 4, [Pair(None, "a")] * 2, [Pair(None, "a")] * 2),
    ],
)
@pytest.mark.parametrize(
    ("wrap", "picked"),
    [
        (lambda field: {"x": X, "field": field}, lambda batch: batch["field"]),
        (lambda field: ((X, field), {"more": X}), lambda batch: batch[0][1]),
        (lambda field: Record(X, note=field), lambda batch: batch.note),
        (lambda field: Pair(X, field), lambda batch: batch.second),
    ],
)
def test_entries_of_sequences_are_taken_with_the_rows(wrap, picked, field, some, few):
    batch = wrap(field)
    assert rows.num_rows(batch) == 4
    assert picked(rows.take(batch, INDEX)) == some
    assert type(picked(rows.take(batch, INDEX))) is type(some)
    assert picked(rows.take(batch, slice(1, 3))) == few
    assert picked(batch) is field


@pytest.mark.parametrize("field", [["a", "b"], ("a",) * 5, [], X.shape, [[1, 2, 3]], [None] * 3])
def test_sequences_of_another_length_are_refused(field):
    message = rf"batch\['more'\]\[0\] must have one entry per row, 4.*of {len(field)}.*closure"
    with pytest.raises(ValueError, match=message):
        rows.num_rows({"x": X, "more": (field, X)})


def test_two_rows_of_two_tensors_are_a_nest_and_two_strings_a_field():
    states, actions = torch.arange(6).reshape(2, 3), torch.tensor([3, 4])
    for nest in ([states, actions], (states, actions)):
        taken = rows.take([nest, ["a", "b"]], torch.tensor([1]))
        assert torch.equal(taken[0][0], states[1:])
        assert torch.equal(taken[0][1], actions[1:])
        assert type(taken[0]) is type(nest)
        assert taken[1] == ["b"]


def test_slices_are_views():
    assert rows.take(X, slice(0, 2)).data_ptr() == X.data_ptr()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_take_agrees_with_indexing(index):
    picked = rows.take({"x": X}, torch.tensor(index))["x"]
    assert picked.tolist() == [X.tolist()[i] for i in index]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"a": X, "b": X[:3]},
            r"batch must share one leading dimension.*4 rows in batch\['a'\].*3",
        ),
        ({"a": torch.tensor(1.0)}, r"batch\['a'\] must have a leading row dimension.*0-d"),
        ({"a": 3}, "batch must hold at least one tensor"),
        (X[:0], "batch must not be empty"),
        ({"a": X, "b": np.zeros(4)}, r"batch\['b'\] must be a tensor, got ndarray"),
        ([Record(X), Record(X[:2])], r"batch\[0\]\.x.*batch\[1\]\.x"),
    ],
)
def test_bad_batches_are_named(batch, message):
    with pytest.raises(ValueError, match=message):
        rows.num_rows(batch)
