import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kondo_lab.tasks.draws import Draws
from tolerances import assert_close

# Seeds are fixed, so each of these either always passes or never. Bounds are five standard errors.
COUNT = 100_000


def chi_square(counts):
    """How far counts stand from equal ones, in standard deviations of the statistic."""
    expected = counts.sum().double() / len(counts)
    statistic = float(((counts - expected).square() / expected).sum())
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def correlation(x, y):
    """Of two samples, in standard errors."""
    return float(torch.corrcoef(torch.stack([x, y]).double())[0, 1]) * math.sqrt(len(x))


@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("bins", [10, 256])
def test_uniforms_fill_every_bin_alike(seed, bins):
    numbers = Draws([seed]).uniform("x", 3, COUNT)[0]
    counts = (numbers * bins).long().bincount(minlength=bins)
    assert len(counts) == bins
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("high", [2, 3, 10, 60000])
def test_integers_take_every_value_alike(high):
    numbers = Draws([5]).integers("x", 3, high, COUNT)[0]
    assert numbers.min() >= 0
    assert numbers.max() < high
    assert abs(chi_square(numbers.bincount(minlength=high))) < 5


def test_first_numbers_are_uniform_over_seeds_and_over_steps():
    # A study uses a few numbers of many seeds and steps, not many numbers of one.
    over_seeds = Draws(range(20_000)).uniform("x", 0, 1).flatten()
    draws = Draws([0])
    over_steps = torch.cat([draws.uniform("x", step, 1).flatten() for step in range(5_000)])
    for numbers in (over_seeds, over_steps):
        assert abs(chi_square((numbers * 50).long().bincount(minlength=50))) < 5


def test_normals_have_the_moments_of_a_normal():
    numbers = Draws([5]).normal("x", 3, COUNT)[0].double()
    # Standard errors of the first four moments: sqrt((E x^2k - (E x^k)^2) / n).
    for power, (moment, error) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs(float((numbers**power).mean()) - moment) < 5 * math.sqrt(error / COUNT)
    cdf = 0.5 * (1 + torch.erf(numbers / math.sqrt(2)))
    assert abs(chi_square((cdf * 100).long().bincount(minlength=100))) < 5


def test_streams_steps_seeds_and_places_are_uncorrelated():
    near = {
        "seeds": list(Draws([0, 1, 2]).uniform("x", 0, COUNT)),
        "steps": [Draws([0]).uniform("x", step, COUNT)[0] for step in (1, 2, 3)],
        "streams": [Draws([0]).uniform(name, 0, COUNT)[0] for name in ("y", "z", "x/radius")],
        "seed and step": [Draws([seed]).uniform("x", 7 - seed, COUNT)[0] for seed in (3, 4)],
    }
    for name, numbers in near.items():
        for x, y in itertools.combinations(numbers, 2):
            assert abs(correlation(x, y)) < 5, name
            for lag in (1, 2):
                assert abs(correlation(x[lag:], y[:-lag])) < 5, name
    places = near["seeds"][0]
    for lag in (1, 2, 100):
        assert abs(correlation(places[lag:], places[:-lag])) < 5


def test_no_number_is_drawn_by_two_seeds_steps_streams_or_places():
    # 63-bit integers: among 10^5 an equal pair by chance has probability 5e-10.
    numbers = [
        Draws(range(10)).integers(stream, step, 2**63 - 1, 100).flatten()
        for stream in ("x", "y")
        for step in range(50)
    ]
    assert len(torch.cat(numbers).unique()) == 100_000


def test_neither_end_is_ever_drawn(monkeypatch):
    # The extreme hashes, which chance would hardly ever show.
    extremes = torch.tensor([[-1, 0, 2**63 - 1, -(2**63), -(2**40)]])
    monkeypatch.setattr(Draws, "_bits", lambda *args: extremes)
    numbers = Draws([0]).uniform("x", 0, 5)
    assert numbers.min() == 2**-24
    assert numbers.max() == 1 - 2**-24
    assert Draws([0]).normal("x", 0, 5).isfinite().all()
    assert (Draws([0]).integers("x", 0, 7, 5) < 7).all()


@given(
    seeds=st.lists(st.integers(0, 2**62), min_size=1, max_size=5, unique=True),
    step=st.integers(0, 2**40),
    data=st.data(),
)
def test_a_member_depends_on_its_own_seed_alone(seeds, step, data):
    member = data.draw(st.integers(0, len(seeds) - 1))
    among, alone = Draws(seeds), Draws([seeds[member]])
    for drawn in ("uniform", "normal"):
        together = getattr(among, drawn)("x", step, 2, 3)
        assert together.shape == (len(seeds), 2, 3)
        assert together.dtype == torch.float32
        assert torch.equal(together[member], getattr(alone, drawn)("x", step, 2, 3)[0])
    together = among.integers("x", torch.tensor(step), 9, 4)
    assert torch.equal(together[member], alone.integers("x", step, 9, 4)[0])


def test_a_part_draws_what_its_members_draw():
    whole = Draws([3, 4, 5, 6])
    part = whole.part(slice(1, 3))
    assert torch.equal(part.uniform("x", 7, 5), whole.uniform("x", 7, 5)[1:3])


def test_shapes():
    draws = Draws([1, 2])
    assert draws.uniform("x", 0).shape == (2,)
    assert draws.integers("x", 0, 3, 0).shape == (2, 0)
    assert draws.normal("x", 0, 2, 1, 3).shape == (2, 2, 1, 3)
    # More numbers of a step begin with the fewer.
    assert torch.equal(draws.uniform("x", 0, 9)[:, :4], draws.uniform("x", 0, 4))


def splitmix(number):
    """The finaliser of splitmix64 on Python's integers."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def number_of(seed, stream, step, place):
    name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "big")
    state = splitmix((splitmix((splitmix(seed) + name - 2**63) % 2**64) + step) % 2**64)
    return splitmix((state + (place + 1) * 0x9E3779B97F4A7C15) % 2**64)


def test_the_reference_is_splitmix64():
    # Published first outputs of splitmix64 with seed 1234567.
    outputs = [splitmix((1234567 + i * 0x9E3779B97F4A7C15) % 2**64) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 2**62), st.text(), st.integers(0, 2**40))
def test_every_number_is_the_hash_of_its_name(seed, stream, step):
    draws = Draws([seed])
    bits = [number_of(seed, stream, step, place) for place in range(3)]
    integers = draws.integers(stream, step, 1000, 3)[0].tolist()
    assert integers == [number % 2**63 % 1000 for number in bits]
    uniforms = draws.uniform(stream, step, 3)[0].tolist()
    assert uniforms == [((number >> 41) + 0.5) / 2**23 for number in bits]


def test_the_numbers_stay_what_they_are():
    # Results in files were made with these.
    assert Draws([0, 7]).integers("x", 3, 1000, 4).tolist() == [
        [432, 749, 67, 525],
        [227, 150, 533, 456],
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_draws_what_a_cpu_draws():
    here, there = Draws([3, 2**40]), Draws([3, 2**40], "cuda")
    step = torch.tensor(7, device="cuda")
    assert torch.equal(here.uniform("x", 7, 5000), there.uniform("x", step, 5000).cpu())
    assert torch.equal(here.integers("x", 7, 9, 5000), there.integers("x", step, 9, 5000).cpu())
    assert_close(there.normal("x", step, 5000), here.normal("x", 7, 5000))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"seeds must be >= 0, got \[1, -2\]"):
        Draws([1, -2])
    with pytest.raises(ValueError, match="high must be >= 1, got 0"):
        Draws([1]).integers("x", 0, 0, 3)
