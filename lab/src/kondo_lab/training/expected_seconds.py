"""Expected seconds of parts on an H200, from counted operations: for the time left, no result.

A training pass takes 6 operations per weight and token, sampling 2 but at a third of the pace; a
step also takes the launching of its kernels, which no population or batch makes fewer.
"""

from collections.abc import Sequence

from kondo_lab.models.architecture import SIZES
from kondo_lab.training.arms import Arm
from kondo_lab.training.fields import Field, FieldSettings
from kondo_lab.training.member import Member
from kondo_lab.training.starts import task_of

PACE_PER_WIDTH = 6e11
"""Operations per second and unit of the model's width: narrow products wait for memory."""
LAUNCH = 2.5e-6
"""Seconds between two small kernels of a CUDA graph."""
KERNELS = 130
"""Of a layer's forward, backward and Adam."""
TOKEN_KERNELS = 15
"""Of a layer for one sampled token."""
EAGER = 4.0
"""Launching from Python, in launches of a graph."""
OPENING = 3.0
"""Seconds to build a model, record its graphs and evaluate it, of any part."""


def warm(settings: FieldSettings, field: Field) -> float:
    """Return the seconds of a supervised start; a few hundred steps are enough, as far as known."""
    steps = min(field.warm_steps, 300)
    members = field.num_seeds + field.tune_seeds
    tokens = members * field.warm_batch * _length(field)
    look = _sampling(field, members * settings.num_held_out)
    looks = steps / (field.warm_every or settings.warm_every) * look
    return OPENING + steps * (_training(field, tokens) + _launches(field)) + looks


def population(field: Field, members: Sequence[Member], num_steps: int) -> float:
    """Return the seconds of a population's training."""
    rows = sum(_rows(field, member.arm) for member in members)
    crews = len({member.arm for member in members})
    step = (
        _training(field, rows * _length(field))
        + _sampling(field, len(members) * field.num_rows)
        + crews * _launches(field)
    )
    return OPENING + num_steps * step


def loops(field: Field, arms: Sequence[Arm], num_steps: int) -> float:
    """Return the seconds of `num_steps` steps of every arm through the product."""
    steps = sum(
        _training(field, _rows(field, each) * _length(field))
        + _sampling(field, field.num_rows)
        + EAGER * _launches(field)
        for each in arms
    )
    return OPENING + num_steps * steps


def _rows(field: Field, arm: Arm) -> int:
    return arm.fixed_rows(field.num_rows, field.repeats) or field.num_rows


def _length(field: Field) -> int:
    task = task_of(field)
    return task.prompt_length + task.answer_length


def _training(field: Field, tokens: int) -> float:
    return 6 * SIZES[field.size].num_weights * tokens / (PACE_PER_WIDTH * SIZES[field.size].width)


def _sampling(field: Field, rows: int) -> float:
    computing = _training(field, rows * _length(field))  # a third of the work, of the pace too
    kernels = task_of(field).answer_length * SIZES[field.size].num_layers * TOKEN_KERNELS
    return max(computing, kernels * LAUNCH)


def _launches(field: Field) -> float:
    return SIZES[field.size].num_layers * KERNELS * LAUNCH
