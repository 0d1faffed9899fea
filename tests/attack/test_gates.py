"""Random values into random gates, against the oracles: one unit at a time, in Python floats."""

import math

import pytest
import torch

import kondo
from kondo.core.sampling import with_free_reads
from oracles import core, sampling, variance
from tolerances import TOLERANCES, assert_close

LIMITS = TOLERANCES[torch.float32]


def values_of(draw, size):
    """Values with zeros, ties, both signs and many scales; exact in float32."""
    kind = draw.choice(["normal", "ties", "sparse", "equal", "wide", "positive"])
    scale = draw.choice([1e-6, 1.0, 1.0, 1.0, 1e6])
    made = {
        "normal": lambda: draw.gauss(0, 1),
        "ties": lambda: float(draw.randint(-3, 3)),
        "sparse": lambda: draw.choice([0.0, 0.0, 0.0, draw.gauss(0, 1)]),
        "equal": lambda: 0.5,
        "wide": lambda: draw.choice([-1, 1]) * 10 ** draw.uniform(-9, 6),
        "positive": lambda: abs(draw.gauss(0, 1)),
    }[kind]
    return torch.tensor([scale * made() for _ in range(size)], dtype=torch.float32)


def mask_of(draw, size):
    share = draw.choice([0.0, 0.3, 0.9, 1.0, 1.0])
    return torch.tensor([draw.random() < share for _ in range(size)], dtype=torch.bool)


def draws_of(draw, size):
    return torch.tensor([draw.random() for _ in range(size)])


def members(draw):
    """Values, mask and draws of one to three members that choose at once, [G, M]."""
    size, many = draw.choice([1, 2, 3, 7, 20, 60]), draw.choice([1, 1, 3])
    return [
        torch.stack([make(draw, size) for _ in range(many)])
        for make in (values_of, mask_of, draws_of)
    ]


def check_common(out, values, mask, counts):
    """What holds for every gate: nothing of value 0, nothing masked; rate and weights agree."""
    assert not bool((out.keep & ~(mask & (values != 0))).any())
    assert bool((out.weight[~out.keep] == 0).all())
    assert bool((out.weight[out.keep] > 0).all())
    assert bool(out.weight.isfinite().all())
    expected = out.keep.sum(-1) / mask.sum(-1).clamp(min=1)
    assert_close(out.rate, expected, torch.float32)
    counts["choices"] += values.shape[0]


def hard_rate(draw, values, mask, draws):
    rate = draw.choice([0.01, 0.1, 0.5, 0.9, 1.0, draw.uniform(0.001, 1)])
    out = kondo.Gate(rate=rate).choose(values, mask)
    for line, counted, keep in zip(values.tolist(), mask.tolist(), out.keep, strict=True):
        count, must, may = core.rate_choice(line, rate, counted)
        kept = set(keep.nonzero().flatten().tolist())
        assert len(kept) == count
        assert must <= kept <= may
    return out


def hard_price(draw, values, mask, draws):
    price = draw.choice([0.0, -1.0, draw.gauss(0, 1), float(values[0, 0]), math.inf, -math.inf])
    out = kondo.Gate(price=price).choose(values, mask)
    expected = [
        [counted and value != 0 and value > torch.tensor(price).item() for value, counted in pairs]
        for pairs in (
            zip(*both, strict=True) for both in zip(values.tolist(), mask.tolist(), strict=True)
        )
    ]
    assert out.keep.tolist() == expected
    return out


def drawn(draw, values, mask, draws):
    eta = draw.choice([0.03, 0.3, 1.0, 10.0])
    inverse = draw.random() < 0.5
    known = (
        {"price": draw.gauss(0, 1)} if draw.random() < 0.5 else {"rate": draw.uniform(0.05, 0.95)}
    )
    gate = kondo.Gate(temperature=eta, inverse_propensity=inverse, **known)
    out = gate.choose(values, mask, draws)
    for index, (line, counted) in enumerate(zip(values.tolist(), mask.tolist(), strict=True)):
        worth = [v for v, c in zip(line, counted, strict=True) if c and v != 0]
        if not worth:
            assert not bool(out.keep[index].any())
            continue
        price = float(out.price[index])
        if "rate" in known and math.isfinite(price):
            wanted = known["rate"] * sum(counted)
            found = core.expected_count(worth, price, eta)
            assert abs(found - min(wanted, len(worth))) <= 1e-3 * max(1.0, wanted), (found, wanted)
        for place, (value, counts_here) in enumerate(zip(line, counted, strict=True)):
            chance = core.sigmoid((value - price) / eta) if counts_here and value != 0 else 0.0
            # A price of float64 is rounded to the values' float32 before it is compared.
            rounding = torch.finfo(torch.float32).eps * max(abs(value), abs(price)) / eta
            near = LIMITS["atol"] + 1e-4 * chance + rounding
            assert abs(float(out.probability[index, place]) - chance) <= near
            if abs(float(draws[index, place]) - chance) > near:
                assert bool(out.keep[index, place]) == (float(draws[index, place]) < chance)
    if inverse:
        assert_close(out.weight[out.keep], 1 / out.probability[out.keep])
    return out


def split_count(draw, values, mask, draws):
    rate, reserve = draw.choice([0.1, 0.3, 0.7]), draw.choice([0.0, 0.2, 1.0])
    quota = draw.choice([0.2, 0.5]) if reserve == 0 else draw.choice([0.0, 0.3])
    inverse = reserve > 0 and draw.random() < 0.5
    gate = kondo.Gate(rate=rate, reserve=reserve, negative_quota=quota, inverse_propensity=inverse)
    out = gate.choose(values, mask, draws)
    for line, counted, keep in zip(values.tolist(), mask.tolist(), out.keep, strict=True):
        count, _, _ = core.rate_choice(line, rate, counted)
        kept = keep.nonzero().flatten().tolist()
        assert len(kept) == count
        negative = sum(c and v < 0 for v, c in zip(line, counted, strict=True))
        if reserve == 0:
            wanted = min(round(quota * count), negative)
            assert sum(line[place] < 0 for place in kept) >= wanted
    if inverse:
        # The expected number of units, by their probabilities, is the count.
        assert_close(out.probability.sum(-1), out.keep.sum(-1).float())
    return out


def largest_variance(draw, values, mask, draws):
    values, mask = values[:, :8], mask[:, :8]
    rate = draw.uniform(0.01, 1.0)
    out = kondo.VarianceGate(rate=rate).choose(values, mask)
    for line, counted, keep in zip(values.tolist(), mask.tolist(), out.keep, strict=True):
        kept = set(keep.nonzero().flatten().tolist())
        best = variance.best_sets(line, counted, rate)
        if kept not in best:  # rounding: as good as the best
            spread = [variance.variance([line[i] for i in each]) for each in (kept, best[0])]
            assert spread[0] >= spread[1] * (1 - 1e-5)
            assert len(kept) == len(best[0])
    check_common(out, values, mask, {"choices": 0})
    return None


def unbiased(draw, values, mask, draws):
    floor = draw.choice([0.0, 0.0, 1 / 8])
    known = (
        {"noise": draw.uniform(1, 4)} if draw.random() < 0.5 else {"rate": draw.uniform(1 / 8, 1)}
    )
    gate = kondo.UnbiasedGate(**known, max_weight=1 / floor if floor else None)
    out = gate.choose(values, mask, torch.Generator().manual_seed(draw.randrange(2**31)))
    for index, (line, counted) in enumerate(zip(values.tolist(), mask.tolist(), strict=True)):
        worth = [abs(v) if c else 0.0 for v, c in zip(line, counted, strict=True)]
        able, kept = sum(each > 0 for each in worth), int(out.keep[index].sum())
        if "rate" in known:
            wanted = max(1, round(known["rate"] * sum(counted)))
            wanted = min(max(wanted, math.ceil(floor * able - 1e-6)), able)
        else:
            # Two counts where rounding alone decides whether the lower one is enough.
            bounds = (known["noise"] * (1 + side * 1e-6) for side in (1, -1))
            low, high = (
                sampling.smallest_count(worth, each, floor) if able else 0 for each in bounds
            )
            wanted = min(max(kept, low), high)
        assert kept == wanted, (kept, wanted)
        if able:
            expected = sampling.probabilities(worth, kept, floor)
            assert_close(out.probability[index], torch.tensor(expected), torch.float32)
            chosen = out.keep[index]
            assert_close(out.weight[index][chosen], 1 / out.probability[index][chosen])
    return out


def with_memory(draw, values, mask, draws):
    """A gate that remembers: a copy by its state goes on alike; a refused call changes nothing."""
    make = draw.choice(
        [
            lambda: kondo.Gate(rate=0.3, window=4),
            lambda: kondo.Gate(rate=0.3, temperature=0.5, window=3),
            lambda: kondo.UnbiasedGate(rate=0.4, window=3),
        ]
    )
    gate, copy = make(), make()
    for _ in range(draw.randint(1, 8)):
        gate.choose(values * draw.uniform(0.5, 2), mask, draws)
    copy.load_state_dict(gate.state_dict())
    broken = values.clone()
    broken[0, 0] = math.nan
    counted = mask.clone()
    counted[0, 0] = True
    with pytest.raises(ValueError, match="NaN"):
        gate(broken, counted, draws)
    ours, theirs = (each.choose(values, mask, draws) for each in (gate, copy))
    assert torch.equal(ours.keep, theirs.keep)
    assert torch.equal(ours.price, theirs.price)
    return ours


KINDS = {
    "rates": hard_rate,
    "prices": hard_price,
    "temperatures": drawn,
    "reserves and quotas": split_count,
    "variances": largest_variance,
    "draws": unbiased,
    "memories": with_memory,
}


def case(draw, counts):
    kind = draw.choice(list(KINDS))
    values, mask, draws = members(draw)
    free = draw.random() < 0.5  # rules take shorter ways there
    out = with_free_reads(free, KINDS[kind], draw, values, mask, draws)
    if out is not None:
        check_common(out, values, mask, counts)
    counts[kind] += 1


def test_gates(campaign):
    campaign.run(case)
