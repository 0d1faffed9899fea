"""Two parts: actors that always use the oldest parameters, and actors that use any of them.

Every member has its own delay; all of a part share one program, and one ring of snapshots.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from kondo_lab.studies.mnist_stale.settings import Settings
from kondo_lab.training import arms, image_bandits, learner_error
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Frictions, each_seed
from kondo_lab.training.part import Context, Part
from kondo_lab.training.record import Run

REINFORCE = "REINFORCE"
OLDEST, UNIFORM = "oldest", "uniform"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    delays, seeds = settings.delays, settings.num_seeds
    oldest = partial(_train, settings, OLDEST, delays, seeds)
    some, few = settings.uniform_delays, settings.uniform_seeds
    uniform = partial(_train, settings, UNIFORM, some, few)
    return [Part(name=OLDEST, run=oldest, work=42), Part(name=UNIFORM, run=uniform, work=21)]


def methods(settings: Settings) -> dict[str, Arm]:
    """Return the compared rules by name."""
    return {
        REINFORCE: arms.PG,
        learner_error.capped(float("inf")): learner_error.importance_weighted(),
        learner_error.capped(settings.cap): learner_error.importance_weighted(settings.cap),
        "PPO": arms.PPO,
        "DG": arms.DG,
        arms.dg_k(settings.rate): arms.kondo_count(settings.rate),
    }


def _train(
    settings: Settings, part: str, delays: Sequence[int], num_seeds: int, context: Context
) -> Iterable[Run]:
    """Parameters of `delay` steps ago, or of 0 to `delay`, drawn at every step. Setting: delay."""
    members = [
        member
        for name, update in methods(settings).items()
        for delay in delays
        for member in each_seed(
            {name: update},
            num_seeds,
            learning_rate=settings.learning_rate,
            setting=delay,
            frictions=Frictions(delay=delay, uniform_delay=part == UNIFORM),
        )
    ]
    twentieth = settings.num_steps // 20
    every = range(twentieth, settings.num_steps + 1, twentieth)
    return image_bandits.train(
        settings,
        context,
        members,
        part=part,
        num_steps=settings.num_steps,
        log_steps=every,
        evaluate_steps=every,
        probe=partial(learner_error.image_error, num_images=settings.train_images),
    )
