"""What all ranks must give alike, compared before anything is done with it."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kondo.core.fingerprint import in_words
from kondo.ranks.communicator import Ranks


def agree(
    ranks: Ranks, options: dict[str, str], *words: int, among: Sequence[int] | None = None
) -> list[list[int]]:
    """Say `words` to all ranks, and raise on all of them if any two differ in an option.

    Args:
        ranks: the group.
        options: name -> value, in words.
        words: further integers of this rank.
        among: the ranks whose options are compared, the same on all; by default all of them.

    Returns:
        The words of every rank.
    """
    text = json.dumps(options)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    told = ranks.say(digest, *words)
    compared = range(ranks.size) if among is None else among
    if len({told[rank][0] for rank in compared}) > 1:
        everyone = [json.loads(other) for other in ranks.gather_text(text)]
        raise ValueError(_difference({rank: everyone[rank] for rank in compared}))
    return [rest for _, *rest in told]


def _difference(everyone: dict[int, dict[str, str]]) -> str:
    """Name the first option that is not the same everywhere; what each rank said, by rank."""
    one, first = next(iter(everyone.items()))
    for rank, other in everyone.items():
        for name in [*first, *(extra for extra in other if extra not in first)]:
            ours, theirs = first.get(name, "nothing"), other.get(name, "nothing")
            if ours != theirs:
                return (
                    f"{name} must be the same on all ranks, got {ours} on rank {one} and {theirs} "
                    f"on rank {rank}; give every rank the same, and batches of one structure."
                )
    raise AssertionError("digests differ, options do not")


def describe(value: Any) -> str:
    """Say what a callable or option is, in words that do not depend on the process.

    Of rows a tensor's kind alone: ranks have rows of their own. What a `functools.partial` binds is
    an option, and compared whole.
    """
    if isinstance(value, Tensor):
        return f"a {value.ndim}-d tensor of {value.dtype}"
    return in_words(value)
