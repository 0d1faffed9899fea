"""What processes compare of functions and options: names that say all, and no addresses."""

import functools

import pytest
import torch

import kondo
from kondo.core.fingerprint import in_words, name_of


def scaled(factor, log_probs, advantages, *, mask=None):
    return factor * log_probs


class Plain:
    """Without a repr of its own."""


def test_a_partial_is_named_with_what_it_binds():
    inner = functools.partial(scaled, 2.0)
    inner.needs_log_probs = True  # an attribute keeps Python from flattening what binds it again
    outer = functools.partial(inner, mask=None)
    assert name_of(outer) == "partial(partial(scaled, 2.0), mask=None)"
    assert name_of(functools.partial(scaled, [1, {"a": scaled}], Plain())) == (
        "partial(scaled, list(1, {'a': scaled}), Plain)"
    )
    assert "rate=0.25" in name_of(functools.partial(scaled, kondo.Gate(rate=0.25)))


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[2.0, 1.0, 0.0]]),
        torch.tensor([[1.0, 2.0, 1e-30]]),
        torch.tensor([1.0, 2.0, 0.0]),
        torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64),
    ],
)
def test_tensors_that_differ_have_other_words(other):
    one = torch.tensor([[1.0, 2.0, 0.0]])
    assert in_words(one) == in_words(one.clone().requires_grad_())
    assert in_words(one) != in_words(other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64])
def test_words_of_every_dtype_and_layout(dtype):
    some = torch.tensor([1, 0, 0, 1, 1, 0]).to(dtype)
    assert in_words(some[::2]) == in_words(some[::2].clone())
    assert in_words(some[::2]) != in_words(some[1::2])
    assert in_words(some[0]) != in_words(some[1])
    assert in_words(some[:0]) == in_words(some[3:3])


def test_a_large_tensor_is_summed_in_parts():
    large = torch.zeros(2**19 + 3)  # 4 bytes each: three parts
    other = large.clone()
    other[-1] = 1.0
    moved = large.clone()
    moved[-2] = 1.0
    assert len({in_words(part) for part in (large, other, moved)}) == 3


def test_sets_have_one_order():
    assert in_words({"b", "a"}) == in_words({"a", "b"}) == "set('a', 'b')"


def test_an_object_with_a_fingerprint_that_is_no_method_is_named():
    class Data:
        fingerprint = "3fa"

    assert in_words(Data()).endswith("Data")
