"""Random gates, and what each may choose: plain Python over lists, from the oracles alone.

draw_gate(draw, units) -> spec       a dict of plain values, which processes can be sent
make(spec, seen)       -> a gate     that adds what it was shown and what it chose to `seen`
judge(spec, values, counts, choice)  raises unless the choice is one that the oracles allow
"""

import math

import torch
from torch import Tensor

import kondo
from kondo.core.base_gate import BaseGate, Choice
from oracles import budget as knapsack
from oracles import causal, core, sampling, variance

# More units than this, and no oracle tries every set.
_FEW = 10

_RATES = (0.02, 0.1, 0.25, 1 / 3, 0.5, 0.75, 1.0)
_SIGNALS = ("delight", "abs_delight", "gradient_norm", "advantage")
KINDS = (
    "rate", "rate", "rate", "price", "reserve", "quota", "sigmoid", "unbiased", "noise",
    "variance", "window", "function",
)  # fmt: skip


def draw_gate(draw, kinds=KINDS):
    """Return the spec of a random gate: its kind, its options and its signal."""
    kind, signal = draw.choice(kinds), "delight"
    rate = draw.choice((*_RATES, draw.uniform(0.01, 1.0)))
    price = draw.choice((0.0, draw.gauss(0, 1), 1e9, -1e9))
    temperature = draw.choice((0.01, 0.3, 2.0))
    level = draw.choice(({"rate": rate}, {"price": draw.gauss(0, 1)}))
    options = {
        "rate": {"rate": rate},
        "price": {"price": price},
        "reserve": {"rate": rate, "reserve": draw.choice((0.1, 0.5, 1.0))},
        "quota": {"rate": rate, "negative_quota": draw.choice((0.2, 0.5, 1.0))},
        "sigmoid": {**level, "temperature": temperature},
        "unbiased": {"rate": rate},
        "noise": {"noise": draw.choice((1.0, 1.2, 1.5, 4.0))},
        "variance": {"rate": rate},
        "window": {"rate": rate, "window": 4},
        "budget": {"budget": draw.choice((0.05, 0.3, 0.7, 1.0))},
        "function": {"seed": draw.randrange(1000), "share": draw.choice((0.0, 0.3, 0.8))},
    }[kind]
    if kind in ("reserve", "sigmoid"):
        options["inverse_propensity"] = draw.random() < 0.5
    if kind in ("unbiased", "noise"):
        signal = draw.choice(_SIGNALS)
        if draw.random() < 0.3:
            options["max_weight"] = draw.choice((1.0, 3.0)) / options.get("rate", 1.0)
    elif kind == "variance":
        signal = "advantage"
    elif kind in ("rate", "price", "sigmoid"):
        signal = draw.choice(("delight", "delight", *_SIGNALS))
    return {"kind": kind, "options": options, "signal": signal}


def make(spec, seen):
    """Build the gate; `seen` gets (values, mask, choice) of every call."""
    kind, options = spec["kind"], spec["options"]
    if kind == "function":
        return _function(seen, **options)
    signal = {"delight": kondo.delight}.get(spec["signal"])
    signal = signal or getattr(kondo.signals, spec["signal"])
    if kind == "budget":
        from kondo.lm.budget import BudgetGate

        return _recording(BudgetGate(**options), seen)
    classes = {"unbiased": kondo.UnbiasedGate, "noise": kondo.UnbiasedGate}
    classes["variance"] = kondo.VarianceGate
    return _recording(classes.get(kind, kondo.Gate)(**options, signal=signal), seen)


def _recording(gate: BaseGate, seen):
    """Return the gate, of a class of its own that notes every choice; copies of it do so too."""
    own, known = type(gate), type(kondo.adapters.adapter_of(gate))

    class Noting(known):
        def choose(self, values, mask, generator=None):
            choice = super().choose(values, mask, generator)
            seen.append((values, mask, choice))
            return choice

    gate.__class__ = type(own.__name__, (own,), {})
    kondo.adapters.register(type(gate))(Noting)
    return gate


def _function(seen, seed, share):
    """Return a plain function that keeps units at random, with random weights."""

    def keep_some(values, mask, generator=None):
        draws = torch.Generator().manual_seed(seed)
        keep = (torch.rand(values.shape, generator=draws) < share) & mask
        weight = torch.rand(values.shape, generator=draws, dtype=values.dtype) + 0.5
        rate = keep.sum().double() / mask.sum().clamp(min=1)
        choice = Choice(keep, weight * keep, torch.tensor(-math.inf).double(), rate, weight)
        seen.append((values, mask, choice))
        return choice

    return keep_some


def unit_values(signal, log_probs: Tensor, advantages: Tensor, mask: Tensor, unit):
    """Return what each unit is worth, as lists of one float and one bool per unit.

    log_probs, mask: [N] or [N, T]; advantages [N] or like log_probs.
    """
    log_probs = torch.where(mask, log_probs.detach().double(), 0.0)
    row = advantages.double()
    spread = row[:, None].expand_as(log_probs) if row.ndim < log_probs.ndim else row
    each = {
        "delight": torch.where(spread == 0, 0.0, spread * -log_probs),
        "abs_delight": torch.where(spread == 0, 0.0, spread * -log_probs).abs(),
        "gradient_norm": spread.abs() * (1 - log_probs.exp()),
        "advantage": spread,
    }[signal]
    each = torch.where(mask, each, 0.0)
    counts = mask
    if unit == "sequence":
        counts = mask.any(1)
        if signal == "gradient_norm":
            each = each.square().sum(1).sqrt()
        elif signal == "advantage":
            each = torch.where(counts, spread.gather(1, mask.byte().argmax(1, True))[:, 0], 0.0)
        else:
            each = each.sum(1)
    return each.flatten().tolist(), counts.flatten().tolist()


class Judged:
    """A choice as lists, beside what the oracle knows of the same units."""

    def __init__(self, spec, values, counts, keep, weight, price, slack):
        self.options, self.slack = spec["options"], slack * max(1.0, *map(abs, values), 1.0)
        self.values, self.counts, self.price = values, counts, price
        self.kept = [i for i, kept in enumerate(keep) if kept]
        self.weight = weight
        self.valid = sum(counts)
        self.able = [i for i, v in enumerate(values) if counts[i] and abs(v) > self.slack]
        self.maybe = [i for i, v in enumerate(values) if counts[i] and v != 0]

    def number(self, rate):
        """How many a rate buys."""
        return max(1, round(rate * self.valid)) if self.valid else 0

    def counted(self, rate, at_least=0):
        """Assert that as many units were kept as a rate buys."""
        wanted = max(self.number(rate), at_least)
        low, high = min(wanted, len(self.able)), min(wanted, len(self.maybe))
        assert low <= len(self.kept) <= high, (len(self.kept), low, high)

    def highest(self):
        """Assert that no unit was skipped that is worth more than one that was kept."""
        if not self.kept:
            return
        least = min(self.values[i] for i in self.kept)
        skipped = [self.values[i] for i in self.able if i not in set(self.kept)]
        assert least >= max(skipped, default=-math.inf) - self.slack, (least, max(skipped))
        assert abs(self.price - least) <= self.slack, (self.price, least)

    def weighs(self, wanted, relative=1e-5):
        """Assert the weight of every kept unit."""
        for i in self.kept:
            ours, theirs = self.weight[i], wanted(i)
            assert math.isclose(ours, theirs, rel_tol=relative, abs_tol=1e-12), (ours, theirs)


def judge(spec, values, counts, keep, weight, price, slack=1e-9):
    """Raise unless these units may be kept, with these weights.

    Args:
        spec: of `draw_gate`.
        values, counts: one per unit, by the oracle.
        keep, weight: one per unit, by the gate.
        price: the gate's.
        slack: by how much two values may differ through rounding, as a share of the largest.
    """
    found = Judged(spec, values, counts, keep, weight, price, slack)
    if spec["kind"] != "function":
        assert set(found.kept) <= set(found.maybe), "a unit was kept that is worth nothing"
    _RULES[spec["kind"]](found)


def judge_budget(spec, worth, keep, mask, rows, slack):
    """Raise unless the cuts fit the budget, and buy at least half of the most that it can buy.

    Args:
        spec: of `draw_gate`.
        worth: one per unit, by the oracle.
        keep: bool [N, S] for tokens, [N] for sequences, by the gate.
        mask: bool [N, S], what counts.
        rows: bool [N, S] each: real tokens, and sampled ones.
        slack: by how much two values may differ through rounding, as a share of the largest.
    """
    (real, sampled), options = rows, spec["options"]
    if keep.ndim == 2:
        values = torch.tensor(worth).double().view(real.shape)
        choices = knapsack.curves(values, mask, real)
        cost, bought = sum(causal.kept_prefixes(real, keep)), float(values[keep].sum())
    else:
        ends = causal.kept_prefixes(real, sampled)
        sold = [max(v, 0.0) for v in worth]
        choices = [[(0, 0.0), (end, value)] for end, value in zip(ends, sold, strict=True)]
        kept = [i for i, kept in enumerate(keep.tolist()) if kept]
        cost, bought = sum(ends[i] for i in kept), sum(worth[i] for i in kept)
    most = math.floor(options["budget"] * int(real.sum()) * (1 + 1e-9))
    assert cost <= most, (cost, most)
    best = knapsack.best_value(choices, most)
    assert bought >= 0.5 * best - slack * max(1.0, best), (bought, best)


def _rate(found):
    found.counted(found.options["rate"])
    found.highest()
    found.weighs(lambda _: 1.0)


def _price(found):
    price = found.options["price"]
    kept = set(found.kept)
    for i in found.maybe:
        if abs(found.values[i] - price) > found.slack:
            assert (i in kept) == (found.values[i] > price), (found.values[i], price)
    found.weighs(lambda _: 1.0)


def _split(found):
    """A count that a reserve or a quota shares: the number is exact, and weights are at least 1."""
    found.counted(found.options["rate"])
    assert all(found.weight[i] >= 1 - 1e-6 for i in found.kept)
    if not found.options.get("inverse_propensity"):
        found.weighs(lambda _: 1.0)


def _quota(found):
    _split(found)
    number = len(found.kept)
    negative = [i for i in found.able if found.values[i] < 0]
    least = min(round(found.options["negative_quota"] * number - 0.5), len(negative))
    assert sum(found.values[i] < 0 for i in found.kept) >= least


def _sigmoid(found):
    eta, price = found.options["temperature"], found.price
    if not found.maybe:
        return

    def chance(i):
        return core.sigmoid((found.values[i] - price) / eta)

    if "price" in found.options:
        assert price == found.options["price"]
    elif found.options["rate"] * found.valid < 0.9 * len(found.able):
        worth = [found.values[i] for i in found.maybe]
        number = core.expected_count(worth, price, eta)
        wanted = found.options["rate"] * found.valid
        assert math.isclose(number, wanted, rel_tol=1e-3, abs_tol=1e-3), (number, wanted)
    relative = 1e-3 + 10 * found.slack / eta
    if found.options.get("inverse_propensity"):
        found.weighs(lambda i: 1 / chance(i), relative)
    else:
        found.weighs(lambda _: 1.0)


def _unbiased(found):
    worth = [
        abs(v) if counted else 0.0 for v, counted in zip(found.values, found.counts, strict=True)
    ]
    floor = 1 / found.options["max_weight"] if "max_weight" in found.options else 0.0
    least = math.ceil(floor * len(found.able) - 1e-6)
    if "rate" in found.options:
        found.counted(found.options["rate"], least)
    elif len(worth) <= _FEW and found.able == found.maybe and found.able:
        number = sampling.smallest_count(worth, found.options["noise"], floor)
        nearly = sampling.smallest_count(worth, found.options["noise"] * (1 + 1e-6), floor)
        assert nearly <= len(found.kept) <= max(number, least), (len(found.kept), number)
    if found.kept:
        chances = sampling.probabilities(worth, len(found.kept), floor)
        found.weighs(lambda i: 1 / chances[i], 1e-4)


def _variance(found):
    found.counted(found.options["rate"])
    if len(found.able) > _FEW or found.able != found.maybe or not found.kept:
        return
    best = variance.best_sets(found.values, found.counts, found.options["rate"])[0]
    ours, theirs = (variance.variance([found.values[i] for i in s]) for s in (found.kept, best))
    assert ours >= theirs - found.slack, (ours, theirs)


def _window(found):
    """The first call of a window: the price is this batch's own."""
    found.counted(found.options["rate"])
    found.highest()


def _budget(found):
    """What it costs depends on the rows: see `judge_budget`."""
    found.weighs(lambda _: 1.0)


_RULES = {
    "rate": _rate,
    "price": _price,
    "reserve": _split,
    "quota": _quota,
    "sigmoid": _sigmoid,
    "unbiased": _unbiased,
    "noise": _unbiased,
    "variance": _variance,
    "window": _window,
    "budget": _budget,
    "function": lambda found: None,
}
