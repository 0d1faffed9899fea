"""Learning curves; lengths H and vocabularies M, in blocks of seeds; variants of the task."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from kondo_lab.evidence import seed_blocks
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_dg.settings import Settings
from kondo_lab.tasks.base import Credit
from kondo_lab.training import arms
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Member, each_seed
from kondo_lab.training.part import Context, Part
from kondo_lab.training.record import Run

EXACT_TIES = "PMPO"
"""With advantages of exactly 0 where rewards are equal: shown, and not judged."""
COMPARED = {
    "PG": arms.PG,
    "PPO": arms.PPO,
    reversals.FLOAT32: arms.PMPO_FLOAT32,
    EXACT_TIES: arms.PMPO,
    "DG": arms.DG,
}
SWEPT = {name: update for name, update in COMPARED.items() if name != "PPO"}
"""Run in Figure 9: PPO is PG."""
VARIED = {name: COMPARED[name] for name in ("PG", reversals.FLOAT32, "DG")}
"""Run on the variants."""


class Variant(NamedTuple):
    """A task like reversal."""

    name: str
    reverse: bool
    increment: bool
    reward: Credit


_TARGETS = (
    ("reversal", True, False),
    ("copy", False, False),
    ("reversal of flipped tokens", True, True),
    ("copy of flipped tokens", False, True),
)
_CREDITS: tuple[tuple[str, Credit], ...] = (
    ("token", "bag_of_tokens"),
    ("correct prefix", "to_first_error"),
)
VARIANTS = [
    Variant(f"{target}, paid by the {paid}", reverse, increment, reward)
    for paid, reward in _CREDITS
    for target, reverse, increment in _TARGETS
]
"""All of the appendix: four targets by two rewards."""


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts: what the first seeds tell, before more of them."""
    first, *others = seed_blocks.blocks(settings.sweep_seeds)
    return [
        Part(name="curves", run=partial(_curves, settings), work=20),
        *_of_seeds(settings, first),
        Part(name="variants", run=partial(_variants, settings), work=30),
        *(part for seeds in others for part in _of_seeds(settings, seeds)),
    ]


def _of_seeds(settings: Settings, seeds: range) -> list[Part]:
    found = []
    for sweep, work in (("vocabularies", 20), ("lengths", 45)):
        name = seed_blocks.name(sweep, seeds)
        run = partial(_sweep, settings, sweep, name, seeds)
        found.append(Part(name=name, run=run, work=work * len(seeds)))
    return found


def _curves(settings: Settings, context: Context) -> Iterable[Run]:
    """Figure 8: H = 10, M = 2."""
    step = max(1, settings.curve_steps // 50)
    members = _members(settings, COMPARED, settings.num_seeds)
    population = reversals.population(
        context,
        members,
        length=settings.length,
        reward="bag_of_tokens",
        feed_forward=settings.feed_forward,
    )
    return reversals.train(
        [population],
        context,
        part="curves",
        num_steps=settings.curve_steps,
        precision=settings.precision,
        log_steps=range(step, settings.curve_steps + 1, step),
    )


def _sweep(
    settings: Settings, sweep: str, part: str, seeds: Sequence[int], context: Context
) -> Iterable[Run]:
    """Figure 9: (a, c) by H with M = 2, (b, d) by M with H = 10. Setting: H or M."""
    if sweep == "lengths":
        shapes = [(length, length, 2) for length in settings.lengths]
    else:
        shapes = [(size, settings.length, size) for size in settings.vocabularies]
    populations = [
        reversals.population(
            context,
            _members(settings, SWEPT, seeds, setting),
            length=length,
            num_tokens=num_tokens,
            reward="bag_of_tokens",
            feed_forward=settings.feed_forward,
        )
        for setting, length, num_tokens in sorted(shapes, reverse=True)
    ]
    steps, precision = settings.num_steps, settings.precision
    return reversals.train(populations, context, part=part, num_steps=steps, precision=precision)


def _variants(settings: Settings, context: Context) -> Iterable[Run]:
    """Appendix D: H = 10, M = 2. Setting: the place in VARIANTS."""
    populations = [
        reversals.population(
            context,
            _members(settings, VARIED, settings.variant_seeds, place),
            length=settings.length,
            reward=variant.reward,
            feed_forward=settings.feed_forward,
            reverse=variant.reverse,
            increment=variant.increment,
        )
        for place, variant in enumerate(VARIANTS)
    ]
    steps, precision = settings.variant_steps, settings.precision
    return reversals.train(
        populations, context, part="variants", num_steps=steps, precision=precision
    )


def _members(
    settings: Settings,
    compared: dict[str, Arm],
    seeds: int | Sequence[int],
    setting: float = float("nan"),
) -> list[Member]:
    return each_seed(compared, seeds, learning_rate=settings.learning_rate, setting=setting)
