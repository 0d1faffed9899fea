"""Train with every screen at every rate."""

from collections.abc import Iterable
from functools import partial

from kondo.lab.population import run
from kondo.lab.population.programs import BanditProgram
from kondo.lab.population.train import Population
from kondo.lab.studies.speculative import agreement, drafts
from kondo.lab.studies.speculative.settings import Settings
from kondo.lab.studies.study import Context, Part, Record
from kondo.lab.tasks.bandits import ImageBandit


def parts(settings: Settings) -> list[Part]:
    """Return the one part: all members share their shapes."""
    return [Part(name=settings.images, run=partial(_train, settings))]


def logged(settings: Settings) -> list[int]:
    """Return the logged steps: dense at first, then regular, so that what is last is a mean."""
    num_steps = settings.num_steps
    regular = max(1, num_steps // settings.linear_points)
    spaced = run.log_spaced(num_steps, settings.log_points)
    return sorted({*spaced, *range(regular, num_steps, regular), num_steps})


def _train(settings: Settings, context: Context) -> Iterable[Record]:
    bandit = ImageBandit.mnist if settings.images == "mnist" else ImageBandit.digits
    task = bandit(device=context.device)
    program = BanditProgram(task, width=settings.width, batch=settings.batch)
    # One population per number of rows trained on: on a GPU they overlap.
    populations: list[Population] = [
        agreement.ComparedPopulation(program, drafts.gated(settings, rate), device=context.device)
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
        probe=agreement.probe,
    )
