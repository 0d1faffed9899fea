"""Three parts: learning curves and lengths, in blocks of seeds, and vocabularies.

Each length and each vocabulary is a population of its own shape; those of a part run side by side.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from kondo_lab.evidence import seed_blocks
from kondo_lab.studies import reversals
from kondo_lab.studies.reversal_kondo.settings import Settings
from kondo_lab.training import arms
from kondo_lab.training.arms import Arm
from kondo_lab.training.member import Member, each_seed
from kondo_lab.training.part import Context, Part
from kondo_lab.training.population import Population
from kondo_lab.training.record import Run
from kondo_lab.training.run import log_spaced

EXACT_COUNT = "exact count"
"""Marks the gate of `kondo.Gate(rate=...)`: never more than the rate, ties broken at random."""
EXACT_TIES = "PMPO"
"""With advantages of exactly 0 where rewards are equal: shown, and not judged."""


def baselines() -> dict[str, Arm]:
    """Return the rules that gate nothing and are compared with the paper's."""
    return {
        "PG": arms.PG,
        "PPO": arms.PPO,
        reversals.FLOAT32: arms.PMPO_FLOAT32,
    }


def delightful(settings: Settings) -> dict[str, Arm]:
    """Return DG and the two gates of the paper."""
    return {
        "DG": arms.DG,
        arms.dg_k(settings.rate): arms.kondo(settings.rate),
        "DG-K price 0": arms.PRICE_0,
    }


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts: what the first seeds tell, before more of them."""
    first, *others = seed_blocks.blocks(settings.num_seeds)
    vocabularies = Part(name="vocabularies", run=partial(_vocabularies, settings), work=45)
    later = [part for seeds in others for part in _of_seeds(settings, seeds)]
    return [*_of_seeds(settings, first), vocabularies, *later]


def _of_seeds(settings: Settings, seeds: range) -> list[Part]:
    curves, lengths = (seed_blocks.name(part, seeds) for part in ("curves", "lengths"))
    run_curves, run_lengths = (
        partial(run, settings, part, seeds)
        for run, part in ((_curves, curves), (_lengths, lengths))
    )
    return [
        Part(name=curves, run=run_curves, work=9 * len(seeds)),
        Part(name=lengths, run=run_lengths, work=70 * len(seeds)),
    ]


def _curves(settings: Settings, part: str, seeds: Sequence[int], context: Context) -> Iterable[Run]:
    """Figure 8: all methods at H = 10, M = 2."""
    compared = baselines() | {EXACT_TIES: arms.PMPO} | delightful(settings)
    exact = arms.kondo_count(settings.rate)
    compared[f"{arms.dg_k(settings.rate)}, {EXACT_COUNT}"] = exact
    # One population per method: their programs differ in size, and overlap on a GPU.
    populations = []
    for name, update in compared.items():
        members = each_seed({name: update}, seeds, learning_rate=settings.learning_rate)
        populations.append(_population(settings, context, members, settings.length))
    return reversals.train(
        populations,
        context,
        part=part,
        num_steps=settings.num_steps,
        precision=settings.precision,
        log_steps=_fine(settings.num_steps),
    )


def _lengths(
    settings: Settings, part: str, seeds: Sequence[int], context: Context
) -> Iterable[Run]:
    """Figure 10: every method at the lengths around those it can solve. Setting: H.

    PPO is not run: it is PG.
    """
    populations = []
    for length in sorted({*settings.baseline_lengths, *settings.delight_lengths}, reverse=True):
        compared: dict[str, Arm] = {}
        if length in settings.baseline_lengths:
            compared |= baselines() | {EXACT_TIES: arms.PMPO}
            del compared["PPO"]
        if length in settings.delight_lengths:
            compared |= delightful(settings)
        rate = settings.learning_rate
        members = each_seed(compared, seeds, learning_rate=rate, setting=length)
        populations.append(_population(settings, context, members, length))
    steps, precision = settings.num_steps, settings.precision
    return reversals.train(populations, context, part=part, num_steps=steps, precision=precision)


def _vocabularies(settings: Settings, context: Context) -> Iterable[Run]:
    """How the gates do as the vocabulary grows. Setting: M."""
    compared = {"PG": arms.PG} | delightful(settings)
    populations = []
    for size in settings.vocabularies:
        seeds, rate = settings.vocabulary_seeds, settings.learning_rate
        members = each_seed(compared, seeds, learning_rate=rate, setting=size)
        populations.append(_population(settings, context, members, settings.length, size))
    return reversals.train(
        populations,
        context,
        part="vocabularies",
        num_steps=settings.vocabulary_steps,
        precision=settings.precision,
    )


def _population(
    settings: Settings,
    context: Context,
    members: Sequence[Member],
    length: int,
    num_tokens: int = 2,
) -> Population:
    return reversals.population(
        context,
        members,
        length=length,
        num_tokens=num_tokens,
        feed_forward=settings.feed_forward,
    )


def _fine(num_steps: int) -> list[int]:
    """Return every 20th step of the first fifth, where errors fall, and then fewer and fewer."""
    early = max(1, num_steps // 500)
    return [*range(early, num_steps // 5, early), *log_spaced(num_steps, 80)]
