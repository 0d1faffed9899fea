"""A batch is any nest of tensors that share their leading dimension; rows are its slices.

Nests are dict-like, list, tuple, named tuple, dataclass or TensorDict. Leaves that are not tensors
pass through untouched.
"""

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def num_rows(batch: Any, name: str = "batch") -> int:
    """Return the leading size that every tensor of `batch` shares."""
    sizes = {path: _leading(path, leaf) for path, leaf in tensors(batch, name)}
    if not sizes:
        raise ValueError(
            f"{name} must hold at least one tensor, got {type(batch).__name__} without any; "
            f"rows are slices of tensors along their first dimension."
        )
    (first, size), *others = sizes.items()
    for path, other in others:
        if other != size:
            raise ValueError(
                f"{name} must share one leading dimension, got {size} rows in {first} and {other} "
                f"in {path}; expand or drop the odd one, or pass it as a non-tensor."
            )
    if size == 0:
        raise ValueError(f"{name} must not be empty, got 0 rows in {first}; skip the step instead.")
    return size


def take(batch: Any, index: Tensor | slice) -> Any:
    """Return the rows of `batch` that `index` names, in the same nest. Slices are views."""
    return map_tensors(batch, lambda leaf: _take_leaf(leaf, index))


def devices(batch: Any) -> set[torch.device]:
    """Return the devices that hold the batch's tensors."""
    found: set[torch.device] = set()
    for _, leaf in tensors(batch, "batch"):
        inner = [leaf] if isinstance(leaf, Tensor) else leaf.values(True, True)
        found |= {tensor.device for tensor in inner if isinstance(tensor, Tensor)}
    return found


def _take_leaf(leaf: Any, index: Tensor | slice) -> Any:
    if isinstance(index, slice):
        return leaf[index]
    if isinstance(leaf, Tensor):
        return leaf.index_select(0, index.to(leaf.device))
    return leaf[index if leaf.device is None else index.to(leaf.device)]


def _leading(path: str, leaf: Any) -> int:
    if len(leaf.shape) == 0:
        raise ValueError(
            f"{path} must have a leading row dimension, got a 0-d tensor; "
            f"pass a Python number, which goes through untouched, or expand it to the rows."
        )
    return int(leaf.shape[0])


def map_tensors(node: Any, leaf_fn: Any) -> Any:
    """Rebuild a nest with `leaf_fn` applied to each tensor."""
    if _is_leaf(node):
        return leaf_fn(node)
    if _is_dataclass(node):
        changed = {f.name: map_tensors(getattr(node, f.name), leaf_fn) for f in _init_fields(node)}
        return dataclasses.replace(node, **changed)
    if isinstance(node, Mapping):
        # A copy keeps the type: Hugging Face batches are UserDicts with methods of their own.
        rebuilt: Any = copy.copy(node)
        for key, value in node.items():
            rebuilt[key] = map_tensors(value, leaf_fn)
        return rebuilt
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(map_tensors(v, leaf_fn) for v in node))
    if isinstance(node, list | tuple):
        return type(node)(map_tensors(v, leaf_fn) for v in node)
    return node


def tensors(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every tensor (or TensorDict) of a nest with its path."""
    if _is_leaf(node):
        yield path, node
    elif _is_dataclass(node):
        for field in _init_fields(node):
            yield from tensors(getattr(node, field.name), f"{path}.{field.name}")
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from tensors(value, f"{path}[{key!r}]")
    elif isinstance(node, list | tuple):
        for key, value in enumerate(node):
            yield from tensors(value, f"{path}[{key}]")
    elif hasattr(node, "__array_interface__") and getattr(node, "ndim", 0) > 0:
        raise ValueError(
            f"{path} must be a tensor, got {type(node).__name__}, whose rows would not be "
            f"selected; convert it with torch.as_tensor(...)."
        )


def leaves(node: Any) -> list[Tensor]:
    """Return every tensor of a nest, those inside TensorDicts included."""
    found: list[Tensor] = []
    for _, leaf in tensors(node, "batch"):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        else:
            leaf.apply(found.append)
    return found


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Tensor) or _is_tensordict(node)


def _is_tensordict(node: Any) -> bool:
    """Recognise a TensorDict or tensorclass without importing tensordict."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and tensordict.is_tensor_collection(node)


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _init_fields(node: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(node) if field.init]
