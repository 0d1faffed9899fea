"""Train every gate on both tasks."""

from collections.abc import Iterable
from functools import partial

from kondo_lab.models.architecture import Architecture
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.studies.frontier import compared_gates
from kondo_lab.studies.frontier.settings import Settings
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.training import image_bandits, run
from kondo_lab.training.part import Context, Part
from kondo_lab.training.programs import SequenceProgram
from kondo_lab.training.record import Run

REVERSAL = "reversal"


def parts(settings: Settings) -> list[Part]:
    """Return one part per task."""
    return [
        Part(name=settings.images, run=partial(_images, settings), work=settings.image_steps),
        # A step of a transformer takes several of an MLP's.
        Part(name=REVERSAL, run=partial(_reversal, settings), work=4.0 * settings.reversal_steps),
    ]


def logged(num_steps: int, settings: Settings) -> list[int]:
    """Return the logged steps of a task."""
    return run.log_and_regular(
        num_steps, log_points=settings.log_points, regular_points=settings.linear_points
    )


def _images(settings: Settings, context: Context) -> Iterable[Run]:
    members = compared_gates.members(settings, learning_rate=settings.image_learning_rate)
    return run.train(
        image_bandits.populations(
            context,
            members,
            data=settings.images,
            width=settings.image_width,
            batch=settings.image_batch,
        ),
        context,
        part=settings.images,
        num_steps=settings.image_steps,
        log_steps=(),
        evaluate_steps=logged(settings.image_steps, settings),
    )


def _reversal(settings: Settings, context: Context) -> Iterable[Run]:
    network = StackedDecoder(
        Architecture(
            width=settings.width,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            ff_width=settings.ff_width,
        ),
        prompt_length=settings.length,
        answer_length=settings.length,
        num_tokens=settings.num_tokens,
    )
    program = SequenceProgram(
        ReversalTask(length=settings.length, num_tokens=settings.num_tokens),
        network,
        num_prompts=settings.num_prompts,
        num_answers=settings.num_answers,
    )
    members = compared_gates.members(settings, learning_rate=settings.reversal_learning_rate)
    with run.matmul_precision(settings.reversal_precision):
        return run.train(
            run.side_by_side(program, members, context.device),
            context,
            part=REVERSAL,
            num_steps=settings.reversal_steps,
            log_steps=logged(settings.reversal_steps, settings),
        )
