"""Parts, the most valuable first: starts, learning rates, then sweeps in the order of the settings.

warm      see `field_parts`
tune      learning rates of all arms, without friction and with all of them
further   learning rates beyond the edge of those tried, for arms that are best there, and
          rates that fall to 0, for those whom the claims are about
others    one seed of a sweep: arms with frictions
"""

from kondo_lab.studies.lm_frictions import assignments
from kondo_lab.studies.lm_frictions.settings import Settings, Sweep
from kondo_lab.training import expected_seconds
from kondo_lab.training.field_parts import (
    Place,
    lean,
    make_part,
    train_population,
    trials,
    try_rates,
    warm_part,
)
from kondo_lab.training.fields import Field, evenly
from kondo_lab.training.part import Part
from kondo_lab.training.record import Run


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, the most valuable first."""
    main = settings.main
    members = assignments.tune_members(settings)
    found = [warm_part(settings, main), *trials("tune", settings, main, members, main.tune_steps)]
    found.append(_further_part(settings))
    started: set[Field] = {main}
    for sweep in settings.sweeps:
        if sweep.field not in started:
            started.add(sweep.field)
            found.append(warm_part(settings, sweep.field))
        for seed in sweep.seeds:
            found += _sweep(settings, sweep, seed)
    return found


def _further_part(settings: Settings) -> Part:
    main, name = settings.main, assignments.further_name(settings)
    members = assignments.decay_members(settings, lambda _: 0.0)
    work = expected_seconds.population(main, members, main.tune_steps)
    return make_part(name, settings, main, work, _further, settings)


def _further(place: Place, settings: Settings) -> list[Run]:
    means = assignments.tuned_means(settings, place.context)
    members = assignments.beyond_members(settings, means)
    members += assignments.decay_members(settings, assignments.rates_in(settings, place.context))
    return try_rates(place, members, settings.main.tune_steps)


def _sweep(settings: Settings, sweep: Sweep, seed: int) -> list[Part]:
    field, found = sweep.field, []
    for name, piece, members in assignments.pieces(settings, sweep, seed):
        work = expected_seconds.population(field, members, field.num_steps)
        found.append(make_part(name, settings, field, work, _train, settings, sweep, seed, piece))
    return found


def _train(place: Place, settings: Settings, sweep: Sweep, seed: int, piece: slice) -> list[Run]:
    rates = assignments.rates_in(settings, place.context)
    members = assignments.members(settings, sweep, seed, rates)[piece]
    steps = evenly(sweep.field.num_steps, settings.evaluations)
    return lean(train_population(place, members, steps))
