"""Parts: starts, learning rates where none are known, then runs by the clock, seed after seed.

A run that is cut short has all arms of its first seeds.
"""

from kondo_lab.studies.lm_gates.settings import Settings
from kondo_lab.studies.lm_rl.training import tuned_parts, wall_parts
from kondo_lab.training.part import Part


def parts(settings: Settings) -> list[Part]:
    """Return the study's parts, the most valuable first."""
    found = [part for field in settings.walls for part in tuned_parts(settings, field)]
    most = max(max(field.num_seeds, field.other_seeds) for field in settings.walls)
    for seed in range(most):
        for field in settings.walls:
            found += wall_parts(settings, field, [seed])
    return found
