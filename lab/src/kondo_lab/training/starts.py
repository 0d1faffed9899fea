"""Supervised starts: of a field's seeds, made once and handed from part to part.

A start follows from the settings and the device, on a GPU up to rounding. The file beside the
parts' checkpoints saves the making; a part that does not find it makes it again. It goes with the
parts' folder.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kondo.run_files import DamagedFileError
from kondo_lab.models.architecture import compute_dtype
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.tasks.text import NUM_TOKENS, TextTask, make
from kondo_lab.training.fields import Field, FieldSettings
from kondo_lab.training.part import Context
from kondo_lab.training.supervised import Start, WarmPoint, warm_start


def task_of(field: Field) -> TextTask:
    """Return what is paid for in a field."""
    return make(field.task, field.level)


def model_of(field: Field, device: torch.device) -> StackedDecoder:
    """Return the model that is trained in a field."""
    task = task_of(field)
    return StackedDecoder(
        field.size,
        prompt_length=task.prompt_length,
        answer_length=task.answer_length,
        num_tokens=NUM_TOKENS,
        dtype=compute_dtype(device),
    )


def seeds_of(settings: FieldSettings, field: Field) -> list[int]:
    """Return all seeds of a field, reported ones first."""
    return [*range(max(field.num_seeds, field.other_seeds)), *settings.tune_seeds(field)]


def make_start(
    field: Field, seeds: Sequence[int], device: torch.device, *, every: int, **options: Any
) -> tuple[Start, list[WarmPoint]]:
    """Return `warm_start` of a field's model and task, measured every so many steps."""
    return warm_start(
        model_of(field, device),
        task_of(field),
        seeds,
        num_steps=field.warm_steps,
        batch=field.warm_batch,
        learning_rate=field.warm_rate,
        device=device,
        measure_steps=range(every, field.warm_steps, every),
        **options,
    )


def train(settings: FieldSettings, field: Field, context: Context) -> list[WarmPoint]:
    """Make the starts of a field's seeds, leave them for the parts to come, say how it went."""
    start, points = make_start(
        field,
        seeds_of(settings, field),
        context.device,
        every=field.warm_every or settings.warm_every,
        num_prompts=settings.num_held_out,
        until=settings.start_reward(field),
        progress=context.progress,
    )
    start.save(_file(field, context))
    return points


def load(settings: FieldSettings, field: Field, context: Context) -> Start:
    """Return the starts of a field's seeds, made now if no part has left them."""
    path = _file(field, context)
    if not path.exists():
        train(settings, field, context)
    try:
        return _read(path, path.stat().st_mtime_ns, context.device)
    except DamagedFileError as error:
        raise DamagedFileError(
            f"{error} Delete it; the same command then makes it again."
        ) from error


@lru_cache(maxsize=1)
def _read(path: Path, changed_at: int, device: torch.device) -> Start:
    """Return a file's starts; the latest are remembered, of large models they take seconds."""
    return Start.load(path, device)


def _file(field: Field, context: Context) -> Path:
    return context.checkpoint.with_name(f"start-{field.name}.pt")
