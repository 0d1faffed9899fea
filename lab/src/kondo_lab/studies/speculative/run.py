"""Train with every screen at every rate."""

from collections.abc import Iterable
from functools import partial

from kondo_lab.studies.speculative import draft_agreement, drafts
from kondo_lab.studies.speculative.settings import Settings
from kondo_lab.training import image_bandits, run
from kondo_lab.training.part import Context, Part
from kondo_lab.training.population import Population
from kondo_lab.training.programs import BanditProgram
from kondo_lab.training.record import Run


def parts(settings: Settings) -> list[Part]:
    """Return the one part: all members share their shapes."""
    return [Part(name=settings.images, run=partial(_train, settings))]


def logged(settings: Settings) -> list[int]:
    """Return the logged steps."""
    return run.log_and_regular(
        settings.num_steps, log_points=settings.log_points, regular_points=settings.linear_points
    )


def _train(settings: Settings, context: Context) -> Iterable[Run]:
    task = image_bandits.task(settings.images, context.device)
    program = BanditProgram(
        task,
        width=settings.width,
        batch=settings.batch,
        initialisation=settings.initialisation,
    )
    # One population per number of rows trained on: on a GPU they overlap.
    populations: list[Population] = [
        draft_agreement.ComparedPopulation(
            program, drafts.gated(settings, rate), device=context.device
        )
        for rate in settings.rates
    ]
    populations.append(Population(program, drafts.dense(settings), device=context.device))
    return run.train(
        populations,
        context,
        part=settings.images,
        num_steps=settings.num_steps,
        log_steps=(),
        evaluate_steps=logged(settings),
        probe=draft_agreement.probe,
    )
