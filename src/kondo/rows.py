"""A batch is a nest of fields with one entry per row; rows are its slices.

nest      dict-like, dataclass, class of attrs, named tuple, or a list or tuple that holds a tensor
          somewhere
field     a tensor, a TensorDict, or a list or tuple that holds no tensor: N entries
constant  whatever else stands in a nest, such as a string or a number: passed on as it is
"""

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from kondo.arguments import check_dense

_TEXT = (str, bytes, bytearray, memoryview)
_NO_NEST = {str, bytes, int, float, bool, complex, type(None)}


def num_rows(batch: Any, name: str = "batch", *, may_be_empty: bool = False) -> int:
    """Return the number of rows, which every field of `batch` shares.

    Args:
        batch: a nest.
        name: of the argument, for messages.
        may_be_empty: whether 0 rows are fine.
    """
    found = dict(_fields(batch, name, None))
    sizes = {path: _leading(path, leaf) for path, leaf in found.items() if not is_sequence(leaf)}
    if not sizes:
        raise ValueError(
            f"{name} must hold at least one tensor, got {type(batch).__name__} without any; rows "
            f"are slices of tensors along their first dimension, in dicts, dataclasses, classes of "
            f"attrs, named tuples, lists and tuples."
        )
    (first, size), *others = sizes.items()
    for path, other in others:
        if other != size:
            raise ValueError(
                f"{name} must share one leading dimension, got {size} rows in {first} and {other} "
                f"in {path}; expand or drop the odd one, or pass it as a non-tensor."
            )
    for path, leaf in found.items():
        if is_sequence(leaf) and len(leaf) != size:
            raise ValueError(
                f"{path} must have one entry per row, {size} as {first} has, got a "
                f"{type(leaf).__name__} of {len(leaf)}: the entries of a list or tuple without "
                f"tensors are selected with the rows. A constant belongs in the policy: in its "
                f"closure, or in a module."
            )
    if size == 0 and not may_be_empty:
        raise ValueError(f"{name} must not be empty, got 0 rows in {first}; skip the step instead.")
    return size


def take(batch: Any, index: Tensor | slice) -> Any:
    """Return the rows of `batch` that `index` names, in the same nest; nothing is written to it.

    Slices of tensors are views. A sequence other than a list or a tuple becomes a list, a mapping
    that cannot be made again a dict.
    """
    return map_fields(batch, lambda leaf: _take_leaf(leaf, index))


def devices(batch: Any) -> set[torch.device]:
    """Return the devices that hold the batch's tensors."""
    return {tensor.device for tensor in leaves(batch)}


def _take_leaf(leaf: Any, index: Tensor | slice) -> Any:
    if is_sequence(leaf):
        places = range(len(leaf))[index] if isinstance(index, slice) else index.tolist()
        return sequence_like(leaf, [leaf[place] for place in places])
    if isinstance(index, slice):
        return leaf[index]
    if isinstance(leaf, Tensor):
        return leaf.index_select(0, index.to(leaf.device))
    return leaf[index if leaf.device is None else index.to(leaf.device)]


def _leading(path: str, leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        check_dense(path, leaf, coo=True)
    else:
        for key, inner in leaf.items(True, True):
            if isinstance(inner, Tensor):
                check_dense(f"{path}[{key!r}]", inner)
    if len(leaf.shape) == 0:
        raise ValueError(
            f"{path} must have a leading row dimension, got a 0-d tensor; "
            f"pass a Python number, which goes through untouched, or expand it to the rows."
        )
    return int(leaf.shape[0])


def map_fields(node: Any, leaf_fn: Callable[[Any], Any]) -> Any:
    """Rebuild a nest with `leaf_fn` applied to each field; no `__init__` of its classes is run."""
    return _map(node, leaf_fn, _size(node))


def _map(node: Any, leaf_fn: Callable[[Any], Any], size: int | None) -> Any:
    if _is_field(node):
        return leaf_fn(node)
    parts = _parts(node)
    if parts is None:
        return node
    changed = {name: leaf_fn(value) for name, value in _row_attributes(node, size).items()}
    held = [_map(value, leaf_fn, size) for _, value in parts]
    if isinstance(node, Mapping):
        return _mapping_like(node, dict(zip(node, held, strict=True)), changed)
    if not _is_record(node):
        return sequence_like(node, held)
    # A copy with other attributes: `dataclasses.replace` would compute from kept rows.
    made = object.__new__(type(node))
    changed |= dict(zip(_declared(node), held, strict=True))
    for name, value in (_attributes(node) | changed).items():
        object.__setattr__(made, name, value)
    return made


def fields(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every field of a nest with its path: tensors, TensorDicts and sequences.

    What an object was given later, beside its fields or items, is one if it has N rows.
    """
    return _fields(node, path, _size(node))


def _size(node: Any) -> int | None:
    """Return the rows of the first tensor."""
    found = (leaf for _, leaf in _fields(node, "", None) if not is_sequence(leaf))
    return next((int(leaf.shape[0]) for leaf in found if len(leaf.shape)), None)


def _fields(node: Any, path: str, size: int | None) -> Iterator[tuple[str, Any]]:
    if _is_field(node):
        yield path, node
        return
    parts = _parts(node)
    if parts is None and _is_array(node):
        raise ValueError(
            f"{path} must be a tensor, got {type(node).__name__}, whose rows would not be "
            f"selected; convert it with torch.as_tensor(...)."
        )
    for name, value in _row_attributes(node, size).items():
        yield f"{path}.{name}", value
    for where, value in parts or ():
        yield from _fields(value, path + where, size)


def tensors(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every tensor (or TensorDict) of a nest with its path."""
    return ((where, leaf) for where, leaf in fields(node, path) if not is_sequence(leaf))


def _parts(node: Any) -> list[tuple[str, Any]] | None:
    """Return what a nest holds, each with the end of its path; None for what is no nest."""
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if _is_record(node):
        return [(f".{name}", value) for name, value in _declared(node).items()]
    if is_sequence(node):
        return [(f"[{place}]", value) for place, value in enumerate(node)]
    return None


def leaves(node: Any) -> list[Tensor]:
    """Return every tensor of a nest, those inside TensorDicts included."""
    found: list[Tensor] = []
    for _, leaf in tensors(node, "batch"):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        else:
            leaf.apply(found.append)
    return found


def passed_whole(batch: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is not gathered although something in it has N rows, with its path."""
    size = num_rows(batch, may_be_empty=True)
    if size > 1:
        yield from _holding(take(batch, slice(0, 1)), name, size)


def _holding(node: Any, path: str, size: int) -> Iterator[tuple[str, Any]]:
    """Yield what holds `size` rows in a nest of which one was taken."""
    if _is_field(node):
        return
    parts = _parts(node)
    if parts is None:
        if _has_rows(node, size):
            yield path, node
        return
    for where, value in parts:
        yield from _holding(value, path + where, size)
    seen = {id(value) for _, value in parts}
    for name, value in _attributes(node).items():
        # What is private is a store or a cache of the class, which knows whose rows it holds.
        if id(value) not in seen and not name.startswith("_") and _has_rows(value, size):
            yield f"{path}.{name}", value


def _has_rows(node: Any, size: int, depth: int = 3) -> bool:
    """Return whether this, or what it holds, has `size` entries in an order."""
    if not depth or isinstance(node, type | torch.nn.Module | str | bytes):
        return False
    if _is_leaf(node):
        return _length(node) == size
    if hasattr(node, "__len__") and hasattr(node, "__getitem__") and not isinstance(node, Mapping):
        shape = getattr(node, "shape", None)
        if (next(iter(shape), -1) if isinstance(shape, tuple) else len(node)) == size:
            return True
    inside = node.values() if isinstance(node, Mapping) else _attributes(node).values()
    return any(_has_rows(value, size, depth - 1) for value in inside)


def is_sequence(node: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether this has entries: a list or a tuple, not a string."""
    return isinstance(node, Sequence) and not isinstance(node, _TEXT)


def _is_field(node: Any) -> bool:
    """Return whether this has one entry per row; a named tuple is a record, as a dataclass is."""
    if _is_leaf(node) or not is_sequence(node):
        return _is_leaf(node)
    record = hasattr(node, "_fields") or _is_record(node)
    return not record and not _holds_tensors(node)


def _holds_tensors(node: Any) -> bool:
    """Return whether a tensor is anywhere in a nest; an array counts, and is refused there."""
    if _is_leaf(node) or _is_array(node):
        return True
    if isinstance(node, Mapping):
        return any(map(_holds_tensors, node.values()))
    if _is_record(node):
        return any(map(_holds_tensors, _declared(node).values()))
    # Long lists of strings and numbers are settled by their types, without a look at each.
    if not is_sequence(node) or set(map(type, node)) <= _NO_NEST:
        return False
    return any(map(_holds_tensors, node))


def sequence_like(node: Sequence[Any], entries: list[Any]) -> Any:
    """Return entries in the type of a sequence, where that can be made of them."""
    if isinstance(node, tuple) and hasattr(node, "_make"):
        return node._make(entries)
    return type(node)(entries) if isinstance(node, list | tuple) else entries


def _mapping_like(
    node: Mapping[Any, Any], items: dict[Any, Any], changed: dict[str, Any]
) -> Mapping[Any, Any]:
    """Return items in the type of a mapping: Hugging Face batches have methods of their own.

    A copy may share with the mapping what holds its items, so nothing is assigned by its keys. What
    holds them is replaced; where that is not found, the items are returned as they are.
    """
    try:
        made = copy.copy(node)
    except TypeError:  # it is none that can be copied
        return items
    if made is node or type(node) is dict:
        return items
    if isinstance(made, dict):
        for key, value in items.items():
            dict.__setitem__(made, key, value)
    instead = {id(value): items[key] for key, value in node.items()}
    for name, held in _attributes(made).items():
        if isinstance(held, Mapping) and _same_items(held, node):
            object.__setattr__(made, name, _mapping_like(held, items, {}))
        elif id(held) in instead:  # an item that is an attribute too
            object.__setattr__(made, name, instead[id(held)])
        elif name in changed:
            object.__setattr__(made, name, changed[name])
    return made if _same_items(made, items) else items


def _same_items(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in other)


def _attributes(node: Any) -> dict[str, Any]:
    """Return what an object holds by name, in slots too."""
    state: Any = object.__getstate__(node)
    own, slots = state if isinstance(state, tuple) else (state, None)
    return {**(own or {}), **(slots or {})}


def _is_leaf(node: Any) -> bool:
    """Return whether this is a tensor, a TensorDict or a tensorclass; imports no tensordict."""
    if isinstance(node, Tensor):
        return True
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and bool(tensordict.is_tensor_collection(node))


def _is_array(node: Any) -> bool:
    return hasattr(node, "__array_interface__") and getattr(node, "ndim", 0) > 0


def _is_record(node: Any) -> bool:
    """Return whether this is of a dataclass, or of a class of attrs, which is not imported."""
    made = dataclasses.is_dataclass(node) or hasattr(type(node), "__attrs_attrs__")
    return made and not isinstance(node, type)


def _declared(node: Any) -> dict[str, Any]:
    """Return the fields that a record holds, by name."""
    held = _attributes(node)
    plain = dataclasses.is_dataclass(node)
    declared = dataclasses.fields(node) if plain else type(node).__attrs_attrs__
    return {field.name: held[field.name] for field in declared if field.name in held}


def _row_attributes(node: Any, size: int | None) -> dict[str, Any]:
    """Return what a record or mapping holds beside its fields and items, if it has N rows."""
    if size is None or not (_is_record(node) or isinstance(node, Mapping)) or _is_leaf(node):
        return {}
    seen = {id(value) for _, value in _parts(node) or ()}
    return {
        name: value
        for name, value in _attributes(node).items()
        if id(value) not in seen and _is_field(value) and _length(value) == size
    }


def _length(field: Any) -> int:
    """Return the entries of a field."""
    return len(field) if is_sequence(field) else next(iter(field.shape), -1)
