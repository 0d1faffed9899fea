"""What a run is, as its folder's manifest.json says: asked for, found there, and compared.

A run resumes, or is analysed again, only where its manifest and the order agree.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kondo_lab.evidence.result_folder import MANIFEST, check_manifest, read_json
from kondo_lab.evidence.result_folder import FolderError as FolderError
from kondo_lab.evidence.study import Size, Study
from kondo_lab.training import provenance

# What must be the same for a run to be resumed.
_IDENTITY = ("study", "version", "size", "settings", "device")
# What is read of a manifest that was found.
_READ = (
    *(*_IDENTITY, "title", "paper", "claim", "command", "num_seeds", "seeds", "finished"),
    *("commits", "figures", "resumed", "seconds", "seconds_by_part", "findings"),
)

Manifest = dict[str, Any]


class FinishedError(FolderError):
    """The folder holds this very run, and it is finished: there is nothing left to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """One run of a study, as it was asked for."""

    study: Study
    size: Size
    num_seeds: int | None
    """None for the study's own choice."""
    out: Path
    device: torch.device
    command: str
    first_seed: int = 0
    """Anything but 0 needs a study whose settings have a field `first_seed`."""
    minutes: float | None = None
    """No part is started later; those that are left wait for the next run. None has no limit."""

    def settings(self) -> Any:
        """Return the study's settings for this size and these seeds."""
        return settings_of(self.study, self.size, self.num_seeds, self.first_seed)


def settings_of(study: Study, size: Size, num_seeds: int | None, first_seed: int) -> Any:
    """Return a study's settings for a size, a number of seeds and a first seed.

    Raises:
        ValueError: the study has none for them.
    """
    settings = study.settings(size, num_seeds)
    if first_seed and not hasattr(settings, "first_seed"):
        raise ValueError(f"first_seed must be 0 for {study.name}, got {first_seed}.")
    return dataclasses.replace(settings, first_seed=first_seed) if first_seed else settings


def read_manifest(folder: Path) -> Manifest:
    """Return what a folder's run was.

    Raises:
        DamagedFileError: the manifest is damaged.
    """
    content = read_json(folder / MANIFEST)
    if "study" in content:  # older demos wrote manifests without it
        check_manifest(folder / MANIFEST, content, _READ)
    return content


def found(order: Order, fresh: Manifest) -> Manifest:
    """Return the manifest to go on with: of the unfinished run in the folder, or `fresh`.

    Raises:
        FinishedError: the folder holds this run, finished.
        FolderError: the folder holds another run.
        DamagedFileError: its manifest is damaged.
    """
    if not os.path.lexists(order.out / MANIFEST):
        return fresh
    old = read_manifest(order.out)
    finished = old.get("finished", True)
    changed = differences(old, fresh, _IDENTITY) if "study" in old else ["study"]
    if finished:
        other = f" of other settings ({', '.join(changed)})" if changed else ""
        raise (FolderError if changed else FinishedError)(
            f"{order.out} already holds results{other}, which are never overwritten. "
            "Give another folder with --out, or move this one away."
        )
    if changed:
        raise FolderError(
            f"{order.out} holds an unfinished run with other settings: {', '.join(changed)}. "
            "Resume it with the command in its manifest.json, or give another folder with --out."
        )
    return fresh | {
        "commits": list(dict.fromkeys([*old["commits"], *fresh["commits"]])),
        "resumed": old["resumed"] + 1,
        "seconds": old["seconds"],
        "seconds_by_part": old["seconds_by_part"],
        "finished_parts": old.get("finished_parts", []),
        "figures": old["figures"],
    }


def new_manifest(order: Order, settings: Any) -> Manifest:
    """Return the manifest of a run that has not begun."""
    study = order.study
    environment = provenance.environment(order.device) | {"pandas": pd.__version__}
    return {
        "study": study.name,
        "version": study.version,
        "title": study.title,
        "paper": study.paper,
        "claim": study.claim,
        "differences": list(study.differences),
        "size": order.size,
        "device": order.device.type,
        "num_seeds": order.num_seeds,
        "first_seed": order.first_seed,
        "settings": plain(settings),
        "seeds": [],
        "command": order.command,
        "environment": environment,
        "commits": [environment["commit"]],
        "finished": False,
        "interrupted": False,
        "resumed": 0,
        "seconds": 0.0,
        "seconds_by_part": {},
        "finished_parts": [],
        "findings": [],
        "figures": [],
        "captions": {},
        "analysis_commit": None,
    }


def plain(value: Any) -> Any:
    """Return settings as JSON has them, so that those of a file compare equal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


def differences(old: Manifest, new: Manifest, keys: Sequence[str]) -> list[str]:
    """Return the names, with dots, of what an old run had and a new one has not.

    A setting that came later is no difference: the old run was made as if it had its default.
    """
    before, now = ({name: each[name] for name in keys} for each in (old, new))
    flat_now = _flat(now)
    return [name for name, value in _flat(before).items() if flat_now.get(name, _Gone) != value]


class _Gone:
    """What a setting is that a study no longer has."""


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Return name, with dots -> value; of a list of groups each has its place in the name."""
    if isinstance(content, list) and content and all(isinstance(own, dict) for own in content):
        # How many there are is a value: a group more is another run, a field more need not be.
        content = {str(place): own for place, own in enumerate(content)} | {"number": len(content)}
    if not isinstance(content, dict):
        return {prefix: content}
    flat: dict[str, Any] = {}
    for key, inner in content.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat
