"""Parts that run half of the seeds each: a run can be stopped early, and few members would leave
most of a GPU idle.

curves-seeds-0-4, curves-seeds-5-9      parts, as they are run and saved
curves                                  what the analysis calls both
"""

import pandas as pd


def blocks(num_seeds: int) -> list[range]:
    """Return the seeds 0 .. num_seeds - 1 in two blocks, the first no smaller than the other.

    Example:
        >>> from kondo_lab.evidence.seed_blocks import blocks
        >>> blocks(10), blocks(1)
        ([range(0, 5), range(5, 10)], [range(0, 1)])
    """
    half = (num_seeds + 1) // 2
    return [block for block in (range(half), range(half, num_seeds)) if block]


def name(part: str, seeds: range) -> str:
    """Return the name of the part that runs these seeds.

    Example:
        >>> from kondo_lab.evidence.seed_blocks import name
        >>> name("curves", range(5, 10))
        'curves-seeds-5-9'
    """
    return f"{part}-seeds-{seeds.start}-{seeds.stop - 1}"


def joined(records: pd.DataFrame) -> pd.DataFrame:
    """Return records with the blocks of a part under one name, whichever of them are there."""
    return records.assign(part=records["part"].str.replace(r"-seeds-\d+-\d+$", "", regex=True))
