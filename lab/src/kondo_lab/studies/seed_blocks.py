"""Parts that run a block of seeds each, so that a run can be stopped early and add seeds later.

curves-seeds-0-2, curves-seeds-3-5, ...      parts, as they are run and saved
curves                                       what the analysis calls all of them
"""

from collections.abc import Sequence

import pandas as pd

SIZES = (3, 3)
"""Of the first blocks; the last has all other seeds."""


def blocks(num_seeds: int, sizes: Sequence[int] = SIZES) -> list[range]:
    """Return the seeds 0 .. num_seeds - 1 in blocks.

    Example:
        >>> from kondo_lab.studies.seed_blocks import blocks
        >>> blocks(10)
        [range(0, 3), range(3, 6), range(6, 10)]
        >>> blocks(2)
        [range(0, 2)]
    """
    found, start = [], 0
    for size in (*sizes, num_seeds):
        stop = min(start + size, num_seeds)
        if stop > start:
            found.append(range(start, stop))
        start = stop
    return found


def name(part: str, seeds: range) -> str:
    """Return the name of the part that runs these seeds.

    Example:
        >>> from kondo_lab.studies.seed_blocks import name
        >>> name("curves", range(3, 6))
        'curves-seeds-3-5'
    """
    return f"{part}-seeds-{seeds.start}-{seeds.stop - 1}"


def joined(records: pd.DataFrame) -> pd.DataFrame:
    """Return records with the blocks of a part under one name, whichever of them are there."""
    return records.assign(part=records["part"].str.replace(r"-seeds-\d+-\d+$", "", regex=True))
