"""Random batches: nests of tensors, and of lists of other things, in classes of every kind.

draw_batch(draw, tensors, size) -> (batch, read)
read(rows)                      -> fields by name, of the batch or of rows that were taken
numbers(fields)                 -> float64 [n], what a policy makes of what is no tensor
contents(batch)                 -> all that it holds, to see whether it was written to
"""

import collections
import dataclasses
import math
import types
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Talk = collections.namedtuple("Talk", ["role", "turns"])

BESIDE = {
    "words": lambda draw, size: [draw.choice(["a", "bcd", "ef"]) for _ in range(size)],
    "bytes": lambda draw, size: [draw.choice([b"", b"xyz"]) for _ in range(size)],
    "scales": lambda draw, size: tuple(draw.uniform(-1, 1) for _ in range(size)),
    "gaps": lambda draw, size: [draw.choice([None, None, 0.5, 1]) for _ in range(size)],
    "scalars": lambda draw, size: [np.float64(draw.random()) for _ in range(size)],
    "talks": lambda draw, size: [
        {"turns": [draw.random()], "role": "u" * draw.randrange(4)} for _ in range(size)
    ],
    "records": lambda draw, size: [Talk("user", draw.choice([0, 1, 2])) for _ in range(size)],
    "pairs": lambda draw, size: tuple((draw.random(), draw.choice("ab")) for _ in range(size)),
    "queue": lambda draw, size: collections.deque(draw.random() for _ in range(size)),
    "places": lambda draw, size: range(draw.randrange(3), size + 3)[:size],
}
"""What may stand beside the tensors: one entry per row."""


class Shared(collections.UserDict):
    """A copy of it holds the very same items."""

    def __copy__(self):
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made


class Columns(Mapping):
    """Keeps names in one list, and values in another."""

    def __init__(self, items):
        self.names, self.held = list(items), list(items.values())

    def __getitem__(self, name):
        return self.held[self.names.index(name)]

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


class Named(dict):
    """A dict that may have attributes."""


def _computes(self):
    """Centre tensors over the rows, and number the rows: wrong if it were done for kept ones."""
    for name, value in list(vars(self).items()):
        if isinstance(value, Tensor) and value.is_floating_point():
            setattr(self, name, value - value.mean(0))
        if name in BESIDE or isinstance(value, Tensor):
            self.order = [0.1 * place for place in range(len(value))]


def _dataclass(**options):
    def make(items):
        return dataclasses.make_dataclass("Rows", list(items), **options)(*items.values())

    return make


_by_key = lambda node, name, place: node[name]  # noqa: E731
_by_place = lambda node, name, place: node[place]  # noqa: E731
_by_name = lambda node, name, place: getattr(node, name)  # noqa: E731
NESTS = {
    "tuple": (lambda items: tuple(items.values()), _by_place),
    "list": (lambda items: list(items.values()), _by_place),
    "named tuple": (
        lambda items: collections.namedtuple("Record", list(items))(*items.values()),
        _by_name,
    ),
    "dict": (dict, _by_key),
    "ordered": (collections.OrderedDict, _by_key),
    "named": (Named, _by_key),
    "user dict": (collections.UserDict, _by_key),
    "shared": (Shared, _by_key),
    "columns": (Columns, _by_key),
    "chain": (lambda items: collections.ChainMap({}, items), _by_key),
    "proxy": (lambda items: types.MappingProxyType(items), _by_key),
    "dataclass": (_dataclass(), _by_name),
    "slots": (_dataclass(slots=True, frozen=True), _by_name),
    "computes": (_dataclass(namespace={"__post_init__": _computes}), _by_name),
}
# Without a tensor somewhere in it, a list is no nest but a field.
_MAY_LACK_TENSORS = tuple(kind for kind in NESTS if kind not in ("tuple", "list"))
_TAKE_ATTRIBUTES = ("named", "user dict", "shared", "dataclass", "computes")


def draw_batch(draw, tensors, size):
    """Return a nest of these tensors and of up to three things beside them, and its reader."""
    beside = draw.sample(list(BESIDE), draw.randrange(4))
    return _nest(draw, tensors | {name: BESIDE[name](draw, size) for name in beside}, 0)


def _nest(draw, fields, depth):
    names = list(fields)
    draw.shuffle(names)
    items, read_inner = {name: fields[name] for name in names}, None
    if depth < 2 and len(names) > 2 and draw.random() < 0.5:
        inner = {name: items.pop(name) for name in names[: draw.randint(1, len(names) - 1)]}
        items["inner"], read_inner = _nest(draw, inner, depth + 1)
    tensors = [name for name, value in items.items() if isinstance(value, Tensor)]
    kind = draw.choice(tuple(NESTS) if tensors else _MAY_LACK_TENSORS)
    make, get = NESTS[kind]
    lists = [name for name in items if name in BESIDE]
    late = lists[:1] if kind in _TAKE_ATTRIBUTES and draw.random() < 0.5 else []
    later = {name: items.pop(name) for name in late}
    constant = draw.choice(["text", 3, None])
    if draw.random() < 0.3 or not items:
        items["constant"] = constant
    node, places = make(items), list(enumerate(items))
    for name, value in later.items():
        setattr(node, name, value)
    if hasattr(node, "order"):
        late = [*late, "order"]

    def read(node):
        found = {name: get(node, name, place) for place, name in places}
        assert found.pop("constant", constant) == constant
        if read_inner is not None:
            found |= read_inner(found.pop("inner"))
        return found | {name: getattr(node, name) for name in late}

    return node, read


def numbers(fields):
    """Return the sum of what is no tensor, a number per row: float64 [n]."""
    size = len(fields["actions"])
    total = torch.zeros(size, dtype=torch.float64)
    for name, entries in fields.items():
        if not isinstance(entries, Tensor):
            assert len(entries) == size, f"{len(entries)} {name} for {size} rows"
            total += torch.tensor([_number(entry) for entry in entries], dtype=torch.float64)
    return total


def _number(entry):
    if entry is None:
        return 0.25
    if isinstance(entry, str | bytes):
        return 0.3 * len(entry)
    if isinstance(entry, dict):
        return _number(tuple(entry.values()))
    # Small, so that no policy is saturated by what stands beside its states.
    return sum(map(_number, entry)) if isinstance(entry, tuple | list) else math.sin(entry)


def contents(node):
    """Return types, identities and values of all that a batch holds."""
    if isinstance(node, Tensor):
        return id(node), node._version, node.tolist()
    inside = {}
    if isinstance(node, Mapping):
        inside = dict(node)
    elif isinstance(node, tuple | list):
        inside = dict(enumerate(node))
    elif dataclasses.is_dataclass(node):
        inside = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    inside |= {f".{name}": value for name, value in getattr(node, "__dict__", {}).items()}
    if not inside:
        return repr(node)
    return type(node), id(node), {name: contents(value) for name, value in inside.items()}
