"""One number names a run; every random source of the run gets a generator of its own."""

import hashlib

import torch


def generator(seed: int, stream: str) -> torch.Generator:
    """Return a fresh generator for one named random source of the run `seed`.

    Streams do not share numbers, so drawing more from one does not move another: two methods with
    the same seed see the same initial weights and the same images or prompts.

    Args:
        seed: >= 0.
        stream: what is drawn, e.g. "prompts".

    Example:
        >>> import torch
        >>> from kondo_lab.tasks.seeds import generator
        >>> a, b = (torch.rand(3, generator=generator(7, "prompts")) for _ in range(2))
        >>> torch.equal(a, b)
        True
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}.")
    # torch's CPU generator reads the low 32 bits of its seed alone, so both names must be in them.
    digest = hashlib.blake2b(f"{stream}/{seed}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
