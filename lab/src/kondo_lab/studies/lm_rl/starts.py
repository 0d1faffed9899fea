"""Supervised starts: of a field's seeds, made once and handed from part to part.

A start follows from the settings and the device, on a GPU up to rounding. The file beside the
parts' checkpoints saves the making; a part that does not find it makes it again. It goes with the
parts' folder.
"""

from pathlib import Path

import torch

from kondo.run_files import DamagedFileError
from kondo_lab.models.architecture import compute_dtype
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.studies.lm_rl.settings import Field, Training
from kondo_lab.tasks.text import NUM_TOKENS, TextTask, make
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


def seeds_of(settings: Training, field: Field) -> list[int]:
    """Return all seeds of a field, reported ones first."""
    return [*range(max(field.num_seeds, field.other_seeds)), *settings.tune_seeds(field)]


def train(settings: Training, field: Field, context: Context) -> list[WarmPoint]:
    """Make the starts of a field's seeds, leave them for the parts to come, say how it went."""
    every = field.warm_every or settings.warm_every
    start, points = warm_start(
        model_of(field, context.device),
        task_of(field),
        seeds_of(settings, field),
        num_steps=field.warm_steps,
        batch=field.warm_batch,
        learning_rate=field.warm_rate,
        device=context.device,
        measure_steps=range(every, field.warm_steps, every),
        num_prompts=settings.num_held_out,
        until=settings.start_reward(field),
        progress=context.progress,
    )
    path = context.checkpoint.with_name(_file(field))
    start.save(path)
    _remember(path, start)
    return points


def load(settings: Training, field: Field, context: Context) -> Start:
    """Return the starts of a field's seeds, made now if no part has left them."""
    path = context.checkpoint.with_name(_file(field))
    if not path.exists():
        train(settings, field, context)
    try:
        return _read(path, context.device)
    except DamagedFileError as error:
        raise DamagedFileError(
            f"{error} Delete it; the same command then makes it again."
        ) from error


_latest: dict[Path, tuple[int, Start]] = {}
"""The last file that was written or read -> when it was changed, and its starts: those of large
models take seconds to read."""


def _remember(path: Path, start: Start) -> Start:
    _latest.clear()
    _latest[path] = (path.stat().st_mtime_ns, start)
    return start


def _read(path: Path, device: torch.device) -> Start:
    """Return a file's starts, from memory where they are the latest."""
    changed_at, start = _latest.get(path, (None, None))
    if start is not None and changed_at == path.stat().st_mtime_ns:
        return start
    return _remember(path, Start.load(path, device))


def _file(field: Field) -> str:
    return f"start-{field.name}.pt"
