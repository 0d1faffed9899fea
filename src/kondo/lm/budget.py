"""Cost-aware selection: buy the most delight for a budget of tokens that enter the backward.

A kept token of a causal model drags its prefix into the backward, so tokens are not priced one by
one. A row n is cut after one of its tokens, t, or skipped, and then costs and is worth

    c(n, t) = real tokens of row n up to and including t
    V(n, t) = sum of the positive delight among them

The gate chooses one cut per row to maximise sum V subject to sum c <= budget: the multiple-choice
knapsack. With a price mu per token of prefix it falls apart into rows, each solved exactly,

    D(mu) = mu * budget + sum over n of max over t of (V(n, t) - mu * c(n, t))  >=  the optimum,

and the mu that minimises D leaves at most the row at the margin undecided, where no two cuts tie.
What is left of the budget is filled in greedily. D - sum V bounds what was missed.

    delight, mask, rows -> curves c and V -> price mu -> fill in -> cuts -> keep

The search works on tensors over leading dimensions. For one batch it stops as soon as nothing
changes, which it reads from the device once a round; for many members at once, as in a CUDA graph,
it makes every round and reads nothing.
"""

import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kondo.arguments import check_mask, check_number, first_unit
from kondo.core.adapters import DrawsNothing, register
from kondo.core.base_gate import BaseGate, Choice, Randomness
from kondo.core.sampling import lottery

# The search for mu ends by itself after about a dozen rounds; rounding must not keep it going.
_MOST_ROUNDS = 64

# Each round of filling in buys something or is the last; at scale there is little left to buy.
_MOST_FILLS = 16

# Where every round is made whether it is needed or not.
_PATIENT_ROUNDS, _PATIENT_FILLS = 32, 8

# Relative distance at which two sums of float64 are the same number.
_SAME = 1e-12
_TINY = 1e-300

# A budget of 0.29 of 100 tokens is 29 tokens, not the 28.999999999999996 of float64.
_ROUNDING = 1e-9


class Purchase(NamedTuple):
    """What a budget bought. Tensors are [...] float64, 0-d for one batch, but for `cut`."""

    cut: Tensor
    """[..., N] int64: tokens 0 .. cut-1 of the row are trained; 0 skips the row."""
    delight: Tensor
    """Sum of V: the delight bought."""
    bound: Tensor
    """No choice within the budget buys more than this."""
    cost: Tensor
    """Sum of c: what the cuts cost; at most the budget."""
    budget: Tensor
    """What could be spent, in the units of cost."""
    price: Tensor
    """mu: delight that one more unit of cost has to bring."""

    @property
    def gap(self) -> float:
        """Share of the bound that may have been missed; 0 is optimal."""
        bound = float(self.bound)
        return 1.0 - float(self.delight) / bound if bound > 0 else 0.0


class BudgetGate(BaseGate):
    """Keep the tokens, or the sequences, that buy the most delight for a budget of prefix tokens.

    The step binds it to the rows, whose prefixes are the costs:

        kondo.backward(lm, rows, advantages, gate=BudgetGate(budget=0.03), unit="token")

    Bind it with `for_rows` to call it alone.

    For unit "token" a row is cut at its best place and the tokens of positive delight inside the
    cut are kept. For unit "sequence" a row is bought whole or not at all, and costs its tokens up
    to the last of the completion. `Choice.price` is mu, delight per token of prefix. Where no cut
    fits the budget nothing is kept: the budget is never exceeded.

    Args:
        budget: tokens trained / tokens seen, in (0, 1]. Both count prompts: every real token.

    Example:
        >>> import torch
        >>> from kondo.lm.budget import BudgetGate
        >>> rows = torch.ones(2, 4, dtype=torch.bool)  # an attention mask will do
        >>> delight = torch.tensor([[0.0, 3.0, 0.0, 4.0], [0.0, 0.0, 0.0, 5.0]])
        >>> gate = BudgetGate(budget=0.5).for_rows(rows)  # 4 of 8 tokens
        >>> gate(delight).keep  # 7 for 4 tokens; the best token alone would be 5 for 4
        tensor([[False,  True, False,  True],
                [False, False, False, False]])
        >>> gate.purchase.gap
        0.0
    """

    def __init__(self, *, budget: float):
        self.budget = check_number("budget", budget)
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must lie in (0, 1], got {budget}; 0.03 trains 3% of tokens.")
        self._cost: Tensor | None = None  # c(n, t), [..., N, S] float64
        self._row_end: Tensor | None = None  # of whole rows, [..., N] float64
        # Shared with the gates bound from this one, so that each shows the latest purchase.
        self._latest: list[Purchase] = []

    @property
    def purchase(self) -> Purchase:
        """What the latest call bought, of this gate or of one bound from it."""
        if not self._latest:
            raise ValueError("purchase is there after a call; this gate has not been called yet.")
        return self._latest[0]

    def for_rows(self, rows: Any) -> "BudgetGate":
        """Return this gate bound to the costs of `rows`; the gate itself is left as it is.

        Args:
            rows: `kondo.lm.TokenRows`, or an attention mask [N, S], bool; [..., N, S] for many
                members at once.
        """
        real = getattr(rows, "attention_mask", rows)
        if not isinstance(real, Tensor) or real.ndim < 2:
            got = list(real.shape) if isinstance(real, Tensor) else type(real).__name__
            raise ValueError(
                f"rows must be TokenRows or an attention mask of shape [N, S], got {got}; costs "
                f"are counted in real tokens."
            )
        check_mask(real, real.shape)
        ends = check_mask(getattr(rows, "completion_mask", None), real.shape)
        bound = copy.copy(self)
        bound._cost = real.double().cumsum(dim=-1)
        # Whatever follows the last completion token is cut from a whole row too.
        last = bound._cost if ends is None else torch.where(ends, bound._cost, 0.0)
        bound._row_end = last.amax(dim=-1)
        return bound

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among the units of the rows that this gate is bound to. Nothing is drawn.

        Args:
            values: delight, [..., N, S] or [..., N * S] of tokens, [..., N] of sequences.
            mask: like values.
            generator: not used.

        Raises:
            ValueError: the gate is not bound, or to rows of another shape; for one batch also
                infinite delight in a unit that counts, or one that lies in the padding.
        """
        if self._cost is None or self._row_end is None:
            raise ValueError(
                "a BudgetGate needs the prefix costs of its rows, got none; give "
                "gate=gate.for_rows(rows)."
            )
        lead = self._cost.ndim - 2  # how many dimensions stand before the rows: 0 for one batch
        shapes = (self._cost.shape, self._cost.flatten(lead).shape, self._row_end.shape)
        if values.shape not in shapes:
            raise ValueError(
                f"values must have the shape of the rows this gate is bound to, "
                f"{list(self._cost.shape)} or {list(self._row_end.shape)}, got "
                f"{list(values.shape)}; leave for_rows(...) out, and kondo.backward binds it."
            )
        by_token = values.shape != self._row_end.shape
        cost = (self._cost if by_token else self._row_end.unsqueeze(-1)).to(values.device)
        chi = torch.where(mask, values, 0.0).view(cost.shape)
        if lead == 0:
            # One device sync.
            infinite = (chi == torch.inf).squeeze(-1)
            outside = ((chi != 0) & (cost == 0)).squeeze(-1)
            if bool((infinite | outside).any()):
                raise ValueError(
                    f"values must be below inf where the mask is True, and 0 before the first real "
                    f"token of a row, got {first_unit(infinite | outside)} "
                    f"({int(infinite.sum())} infinite, {int(outside.sum())} outside); mask the "
                    f"unit, e.g. by mask=rows.completion_mask, with the rows of this batch."
                )
        worth = torch.where(chi > 0, chi, 0.0)
        # A part of a token buys nothing.
        budget = (self.budget * self._cost[..., -1].sum(-1) * (1 + _ROUNDING)).floor()
        purchase = buy(worth, cost, budget, patient=lead > 0)
        self._latest[:] = [purchase]
        place = torch.arange(worth.shape[-1], device=chi.device)
        keep = (place < purchase.cut.unsqueeze(-1)) & (worth != 0)
        choice = Choice.of(keep.flatten(lead), mask.flatten(lead), purchase.price, chi.dtype)
        return choice.reshape(values.shape)

    def __repr__(self) -> str:
        return f"BudgetGate(budget={self.budget!r})"


@register(BudgetGate)
class _BudgetAdapter(DrawsNothing):
    """The budget gate: it must know the prefixes of the rows."""

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        choice: Choice = self.gate.choose(values, mask)  # in their shape, which it compares
        return choice

    def row_facts(self, batch: Any) -> Tensor | None:
        """Return the masks of `TokenRows`, [N, S] uint8: 1 for real, 2 for completion tokens.

        None where the gate is bound already, or where the batch is not one of tokens.
        """
        attention = getattr(batch, "attention_mask", None)
        completion = getattr(batch, "completion_mask", None)
        bound = self.gate._cost is not None
        if bound or not (isinstance(attention, Tensor) and isinstance(completion, Tensor)):
            return None
        return attention.byte() + 2 * completion.byte()

    def bind(self, facts: Tensor) -> BaseGate:
        masks = SimpleNamespace(attention_mask=facts % 2 == 1, completion_mask=facts >= 2)
        bound: BudgetGate = self.gate.for_rows(masks)
        return bound

    def take(self, rows: Tensor) -> BaseGate:
        chosen: BudgetGate = copy.copy(self.gate)
        if chosen._cost is not None and chosen._row_end is not None:
            index = rows.to(chosen._cost.device)
            chosen._cost, chosen._row_end = chosen._cost[index], chosen._row_end[index]
        return chosen


def buy(worth: Tensor, cost: Tensor, budget: Tensor | float, *, patient: bool = False) -> Purchase:
    """Choose one cut per row: maximise the worth inside the cuts, sum of their costs <= budget.

    Three starts are filled in greedily, and the best is taken: the cuts at the price mu; those of
    the plain top tokens, as many as the budget holds, so that the result is never worse; and the
    one row that is worth most, which together with the first guarantees half the optimum.

    Args:
        worth: [..., N, S] float, finite, >= 0: what token t adds to V(n, t).
        cost: [..., N, S] float, c(n, t): not falling along a row, > 0 where worth is not 0.
        budget: >= 0, in the units of cost; one number, or [...].
        patient: make every round and read nothing from the device. Otherwise stop as soon as
            nothing changes; for one batch, [N, S].
    """
    num_rows, width = worth.shape[-2:]
    budget = torch.as_tensor(budget, dtype=torch.float64, device=worth.device)
    budget = budget.expand(worth.shape[:-2])
    affordable = cost <= budget[..., None, None]
    # A cut that the whole budget cannot pay for is no choice: it would only raise the price.
    worth = torch.where(affordable, worth, 0.0)
    position = torch.arange(num_rows * width, device=worth.device).view(num_rows, width)
    index = None
    if not patient:
        # Rows with nothing to gain, half of a batch with centred advantages, need no thought.
        index = (worth > 0).any(dim=1).nonzero().squeeze(1)
        parts = (worth, cost, affordable, position)
        worth, cost, affordable, position = (part[index] for part in parts)
    value = torch.where(affordable, worth.double().cumsum(dim=-1), -torch.inf)
    curves = _Curves(F.pad(cost.double(), (1, 0)), F.pad(value, (1, 0)))
    best, mu, bound = _lagrangian(curves, budget, patient)
    if patient or bool((best.value < bound * (1 - _SAME)).any()):
        best = _fill_in(curves, best, budget, patient)
        most, single = curves.value.max(dim=-1)
        row = most.argmax(dim=-1, keepdim=True)
        single = torch.zeros_like(single).scatter(-1, row, single.gather(-1, row))
        for start in (_top_cuts(worth, curves, position, budget, patient), single):
            other = _fill_in(curves, curves.at(start), budget, patient)
            best = other.where(other.value > best.value, best)
    cut = best.cut
    if index is not None:
        cut = torch.zeros(num_rows, dtype=torch.int64, device=cut.device).index_copy_(0, index, cut)
    return Purchase(cut, best.value, torch.maximum(bound, best.value), best.cost, budget, mu)


class _Cuts(NamedTuple):
    """One cut per row, and what it comes to."""

    cut: Tensor  # [..., N] int64, a column of the curves
    cost: Tensor  # [...] float64
    value: Tensor  # [...] float64

    def where(self, condition: Tensor, other: "_Cuts") -> "_Cuts":
        """Return these cuts where the condition, [...] bool, holds, the other ones elsewhere."""
        cut = torch.where(condition.unsqueeze(-1), self.cut, other.cut)
        sums = zip(self[1:], other[1:], strict=True)
        return _Cuts(cut, *(torch.where(condition, mine, theirs) for mine, theirs in sums))


class _Curves(NamedTuple):
    """Every choice of every row: column 0 skips it, column t + 1 cuts after token t."""

    cost: Tensor  # [..., N, S + 1] float64, 0 in column 0, not falling along a row
    value: Tensor  # [..., N, S + 1] float64, 0 in column 0, -inf where the cost exceeds the budget

    def at(self, cut: Tensor) -> _Cuts:
        """Return these cuts, [..., N] int64, with the sums of their costs and values."""
        return _Cuts(cut, *(_column(curve, cut).sum(-1) for curve in self))


def _column(curve: Tensor, cut: Tensor) -> Tensor:
    """Return [..., N]: the curve [..., N, cuts] of every row at its cut."""
    return curve.gather(-1, cut.unsqueeze(-1)).squeeze(-1)


def _lagrangian(curves: _Curves, budget: Tensor, patient: bool) -> tuple[_Cuts, Tensor, Tensor]:
    """Return the best affordable cuts some price mu gives, mu, and D(mu), which bounds all cuts.

    D is convex and piecewise linear, with slope budget - cost of the cuts at mu. Where the lines of
    a cheap and of a dear choice cross lies either the minimum, or a point whose choice replaces one
    of the two.
    """

    def at_price(mu: Tensor) -> tuple[_Cuts, Tensor]:
        """Return each row's best cut at mu per unit of cost, and sum of V - mu c there."""
        gain = curves.value - mu[..., None, None] * curves.cost
        choice = curves.at(gain.argmax(dim=-1))
        return choice, choice.value - mu * choice.cost

    low = torch.zeros_like(budget)
    dear, bound = at_price(low)
    done = all_fits = dear.cost <= budget
    best_mu, nothing = low, curves.at(torch.zeros_like(dear.cut))
    cheap = dear.where(all_fits, nothing)
    density = curves.value / curves.cost.clamp_min(_TINY)
    high = density.flatten(-2).amax(-1) if density.shape[-2] else low
    for turn in range(_PATIENT_ROUNDS if patient else _MOST_ROUNDS):
        if not patient and bool(done.all()):
            break
        crossing = (dear.value - cheap.value) / (dear.cost - cheap.cost)
        # The crossing alone may creep along one side; every third turn halves the bracket.
        mu = (low + high) / 2 if turn % 3 == 2 else crossing
        mu = torch.minimum(torch.maximum(mu, low), high)
        found, surplus = at_price(mu)
        at_mu = surplus + mu * budget
        better = ~done & (at_mu < bound)
        best_mu, bound = torch.where(better, mu, best_mu), torch.where(better, at_mu, bound)
        line = cheap.value + mu * (budget - cheap.cost)
        is_minimum = (mu == crossing) & (at_mu <= line * (1 + _SAME))
        fits = ~done & (found.cost <= budget)
        exceeds = ~done & (found.cost > budget)
        cheap, high = found.where(fits, cheap), torch.where(fits, mu, high)
        dear, low = found.where(exceeds, dear), torch.where(exceeds, mu, low)
        done = done | is_minimum
    return cheap, best_mu, bound


def _fill_in(curves: _Curves, choice: _Cuts, budget: Tensor, patient: bool) -> _Cuts:
    """Spend what is left: each row's best affordable step up, the most delight per cost first."""
    for _ in range(_PATIENT_FILLS if patient else _MOST_FILLS):
        left = (budget - choice.cost).unsqueeze(-1)
        extra = curves.cost - _column(curves.cost, choice.cut).unsqueeze(-1)
        gain = curves.value - _column(curves.value, choice.cut).unsqueeze(-1)
        usable = (gain > 0) & (extra <= left.unsqueeze(-1))
        per_cost = torch.where(usable, gain / extra.clamp_min(_TINY), 0.0)
        best, cut = per_cost.max(dim=-1)
        best, order = best.sort(dim=-1, descending=True)
        spent = _column(extra, cut).clamp_min(0).gather(-1, order).cumsum(dim=-1)
        fits = torch.zeros_like(best, dtype=torch.bool)
        fits = fits.scatter(-1, order, (best > 0) & (spent <= left))
        if not patient and not bool(fits.any()):
            break
        choice = curves.at(torch.where(fits, cut, choice.cut))
    return choice


def _top_cuts(
    worth: Tensor, curves: _Curves, position: Tensor, budget: Tensor, patient: bool
) -> Tensor:
    """Return the cuts of the top tokens, in `kondo.Gate`'s order, as many as the budget holds."""
    rank = _ranks(worth, position, patient)
    fits = torch.zeros_like(budget, dtype=torch.int64)
    too_many = (worth > 0).sum((-2, -1)) + 1
    for _ in range(worth.shape[-2:].numel().bit_length()):
        count = (fits + too_many) // 2
        taken = torch.where(rank < count[..., None, None], curves.cost[..., 1:], 0.0)
        enough = taken.amax(dim=-1).sum(-1) <= budget
        fits, too_many = torch.where(enough, count, fits), torch.where(enough, too_many, count)
    place = torch.arange(1, worth.shape[-1] + 1, device=worth.device)
    return torch.where(rank < fits[..., None, None], place, 0).amax(dim=-1)


def _ranks(worth: Tensor, position: Tensor, patient: bool = False) -> Tensor:
    """Return each token's place in descending worth, [..., N, S]; ties as `quantiles.highest` does.

    `position`, [N, S] int64, holds places in the batch, on which ties depend. Tokens that are worth
    nothing come last, in no order; a patient search ranks them too, and reads no number of them.
    """
    values, places = worth.flatten(-2), position.flatten()
    index = None if patient else values.nonzero().squeeze(1)
    if index is not None:
        values, places = values[index], places[index]
    lots = lottery(places, salt=values).argsort(-1)
    order = lots.gather(-1, values.gather(-1, lots).argsort(dim=-1, descending=True, stable=True))
    place = torch.arange(values.shape[-1], device=worth.device).expand_as(order)
    rank = torch.zeros_like(order).scatter(-1, order, place)
    if index is not None:
        last = torch.full((worth.numel(),), len(index), device=worth.device)
        rank = last.index_copy(0, index, rank)
    return rank.view(worth.shape)
