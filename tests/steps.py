"""`kondo.backward` as tests call it: options by name, sorted into `kondo.Options`."""

import dataclasses
from typing import Any

import kondo

_OPTIONS = {field.name for field in dataclasses.fields(kondo.Options)}


def run_step(policy: Any, batch: Any, advantages: Any, **given: Any) -> kondo.Report:
    """Run one step; what `kondo.Options` knows goes there."""
    options = {name: given.pop(name) for name in list(given) if name in _OPTIONS}
    return kondo.backward(policy, batch, advantages, options=kondo.Options(**options), **given)


def run_rank_step(policy: Any, batch: Any, advantages: Any, **given: Any) -> Any:
    """Run one step of many ranks; all processes unless a group is given."""
    given["group"] = given.get("group") or "world"
    return run_step(policy, batch, advantages, **given)
