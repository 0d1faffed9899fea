"""Gates on batches that torch.quantile refuses: more than 2^24 units."""

import pytest
import torch

from kondo import Gate, UnbiasedGate
from tolerances import assert_close

pytestmark = pytest.mark.slow  # many million units: seconds each

LIMIT = 2**24  # of torch.quantile
SIZE = 17_000_000


def uniform(size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(0)) - 0.9


@pytest.mark.parametrize("size", [SIZE, 30_000_000])
def test_a_hard_rate_is_exact_beyond_the_limit(size):
    # float32 has at most 2^24 values here: there are ties, and some at the price.
    assert size > LIMIT
    delight = uniform(size)
    out = Gate(rate=0.03)(delight)
    assert out.keep.sum() == round(0.03 * size)
    assert delight[out.keep].min() == out.price
    assert delight[~out.keep].max() <= out.price


def test_ties_beyond_the_limit_are_exact_and_even():
    delight = torch.full((SIZE,), 0.25)
    keep = Gate(rate=0.03)(delight).keep
    assert keep.sum() == 510_000
    # Each tenth of the batch holds a tenth of the kept, to within counting noise (225 = 1 sigma).
    tenths = keep.view(10, -1).sum(1)
    assert ((tenths - 51_000).abs() < 5 * 225).all()


@pytest.mark.slow
def test_a_drawn_rate_beyond_the_limit_is_the_one_asked_for():
    # Half of the units are worth nothing. float32 sums are not good enough for 17 million.
    delight = torch.linspace(-1, 1, SIZE)
    delight[::2] = 0
    out = Gate(rate=0.03, temperature=0.1)(delight, generator=torch.Generator().manual_seed(0))
    assert_close(out.probability.double().sum(), 510_000.0, torch.float32)
    assert abs(out.keep.sum().item() - 510_000) < 5 * 510_000**0.5


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (SIZE, {"rate": 0.03}),
        pytest.param(30_000_000, {"rate": 0.03}, marks=pytest.mark.slow),
        pytest.param(30_000_000, {"noise": 20.0}, marks=pytest.mark.slow),
    ],
)
def test_an_unbiased_draw_of_many_million_units(size, options):
    values = uniform(size).clamp(min=0.0)
    out = UnbiasedGate(**options)(values, generator=torch.Generator().manual_seed(0))
    number = int(out.keep.sum())
    assert_close(out.probability.double().sum(), float(number), torch.float32)
    if "rate" in options:
        assert number == round(0.03 * size)
    # Kish: without saturation the second moment is sum(s)^2 / (K sum(s^2)).
    worth = values.double()
    moment = (worth.square() / out.probability.clamp(min=1e-30)).sum() / worth.square().sum()
    assert_close(moment, worth.sum() ** 2 / (number * worth.square().sum()), torch.float32)
    # The weighted sum of the values of a draw of fixed size is their sum.
    total = (out.weight.double() * worth).sum()
    assert_close(total, worth.sum(), torch.float32)
