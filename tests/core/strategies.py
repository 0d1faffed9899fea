"""Hypothesis strategies for units: log-probs, advantages, delight and masks, odd sizes included."""

import math

import torch
from hypothesis import strategies as st

# Bounded away from the subnormals, whose products are zero: a zero means "worth nothing" here.
_magnitude = st.floats(1e-6, 1e3, allow_nan=False)
signed = st.one_of(st.just(0.0), _magnitude, _magnitude.map(lambda x: -x))
nonzero = st.one_of(_magnitude, _magnitude.map(lambda x: -x))
junk = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -7.0])


def tensors(element: st.SearchStrategy, *, min_size: int = 1, max_size: int = 23, **kwargs):
    """Return a strategy of [N] float64 tensors."""
    return st.lists(element, min_size=min_size, max_size=max_size, **kwargs).map(
        lambda values: torch.tensor(values, dtype=torch.float64)
    )


delights = tensors(signed)
distinct_delights = tensors(nonzero, unique=True)
rates = st.floats(0.01, 1.0)


@st.composite
def units(draw, max_size: int = 13):
    """Return log_probs, advantages and mask, each [N]; every value finite."""
    size = draw(st.integers(1, max_size))
    log_probs = [-x for x in draw(st.lists(st.floats(0, 30), min_size=size, max_size=size))]
    advantages = draw(st.lists(signed, min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return (
        torch.tensor(log_probs, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask),
    )


@st.composite
def masked(draw, element=signed):
    """Return delight [N], a mask, and the same delight with junk wherever the mask is False."""
    values = draw(tensors(element))
    size = values.numel()
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    rubbish = torch.tensor(draw(st.lists(junk, min_size=size, max_size=size)), dtype=torch.float64)
    return values, mask, torch.where(mask, values, rubbish)


def permutations(size: int) -> st.SearchStrategy:
    return st.permutations(range(size)).map(torch.tensor)


def loss_batch(dtype=torch.float64, shape=(7, 5)):
    """Return log_probs, advantages and old log_probs: both signs, ratios on both sides of 1."""
    generator = torch.Generator().manual_seed(1)
    log_probs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.01
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    shift = 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    old = (log_probs + shift).clamp_max(0)
    return log_probs.to(dtype), advantages.to(dtype), old.to(dtype)
