"""Two parts: actors that always use the oldest parameters, and actors that use any of them.

Every member has its own delay; all of a part share one program, and one ring of snapshots.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from kondo_lab.part import Context, Part, Record
from kondo_lab.population.member import Frictions, Member, Update
from kondo_lab.population.run import train
from kondo_lab.studies import image_bandits, learner_error, updates
from kondo_lab.studies.mnist_stale.settings import Settings

REINFORCE = "REINFORCE"
OLDEST, UNIFORM = "oldest", "uniform"


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts."""
    return [
        Part(name=OLDEST, run=partial(_oldest, settings), work=45),
        Part(name=UNIFORM, run=partial(_uniform, settings), work=25),
    ]


def methods(settings: Settings) -> dict[str, Update]:
    """Return the compared rules by name."""
    return {
        REINFORCE: updates.PG,
        learner_error.capped(float("inf")): learner_error.importance_weighted(),
        learner_error.capped(settings.cap): learner_error.importance_weighted(settings.cap),
        "PPO": updates.PPO,
        "DG": updates.DG,
        updates.percent(settings.rate): updates.kondo_count(settings.rate),
    }


def _oldest(settings: Settings, context: Context) -> Iterable[Record]:
    """Parameters of exactly `delay` steps ago. Setting: delay."""
    return _train(settings, context, OLDEST, settings.delays, settings.num_seeds)


def _uniform(settings: Settings, context: Context) -> Iterable[Record]:
    """Parameters of 0 to `delay` steps ago, drawn at every step. Setting: delay."""
    return _train(settings, context, UNIFORM, settings.uniform_delays, settings.uniform_seeds)


def _train(
    settings: Settings, context: Context, part: str, delays: Sequence[int], num_seeds: int
) -> list[Record]:
    members = [
        Member(
            series=name,
            seed=seed,
            learning_rate=settings.learning_rate,
            setting=delay,
            update=update,
            frictions=Frictions(delay=delay, uniform_delay=part == UNIFORM),
        )
        for name, update in methods(settings).items()
        for delay in delays
        for seed in range(num_seeds)
    ]
    populations = image_bandits.populations(
        context, members, data=settings.data, width=settings.width, batch=settings.batch
    )
    twentieth = settings.num_steps // 20
    every = range(twentieth, settings.num_steps + 1, twentieth)
    return train(
        populations,
        context,
        part=part,
        num_steps=settings.num_steps,
        log_steps=every,
        evaluate_steps=every,
        probe=partial(learner_error.image_error, num_images=settings.train_images),
    )
