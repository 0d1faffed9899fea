"""Parts, the most valuable first: starts, learning rates, then populations seed after seed.

warm     see `lm_rl.training`
tune     learning rates of all contenders, without friction and with all of them
first    contenders without friction, with all of them, and with the strongest of each kind
later    the weaker frictions
lags     actors that lag behind

A run that is cut short has all first frictions of its first seeds.
"""

from collections.abc import Iterable

from kondo_lab.part import Part, Record
from kondo_lab.studies.lm_frictions import assignments
from kondo_lab.studies.lm_frictions.assignments import Batch, Kind
from kondo_lab.studies.lm_frictions.settings import FrictionField, Settings
from kondo_lab.studies.lm_rl import expected_seconds, training
from kondo_lab.studies.lm_rl.assignments import evenly
from kondo_lab.studies.lm_rl.training import Place, make_part, trials, warm_part


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, the most valuable first.

    All seeds of the main field's first frictions, then one seed of everything, then the others.
    """
    main, *others = settings.grids
    members = assignments.tune_members(settings)
    found = [warm_part(settings, main), *trials("tune", settings, main, members, main.tune_steps)]
    found += _grids(settings, main, "first", range(main.num_seeds))
    for seed in range(max(field.num_seeds for field in settings.grids)):
        for number, field in enumerate(others):
            if seed == 0:
                found.append(warm_part(settings, field))
            found += _grids(settings, field, "first", [seed])
            if number == 0:
                found += _grids(settings, main, "later", [seed])
    found += _grids(settings, main, "lags", range(main.num_seeds))
    for field in others:
        found += _grids(settings, field, "later", range(field.num_seeds))
    return found


def _grids(
    settings: Settings, field: FrictionField, kind: Kind, seeds: Iterable[int]
) -> list[Part]:
    found = []
    for batch in assignments.batches(field, kind, seeds):
        for name, piece, members in assignments.pieces(settings, field, batch):
            work = expected_seconds.population(field, members, field.num_steps)
            found.append(make_part(name, settings, field, work, _grid, settings, batch, piece))
    return found


def _grid(place: Place, settings: Settings, batch: Batch, piece: slice) -> list[Record]:
    field = place.field
    assert isinstance(field, FrictionField)
    rates = assignments.rates_in(settings, place.context)
    members = assignments.members(settings, field, batch, rates)[piece]
    steps = evenly(field.num_steps, settings.evaluations)
    return training.lean(training.train_population(place, members, steps))
