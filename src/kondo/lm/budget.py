"""Cost-aware selection: buy the most delight for a budget of tokens that enter the backward.

A kept token of a causal model drags its prefix into the backward, so tokens are not priced one by
one. A row n is cut after one of its tokens, t, or skipped, and then costs and is worth

    c(n, t) = real tokens of row n up to and including t
    V(n, t) = sum of the delight worth keeping among them

The budget gate chooses one cut per row to maximise sum V subject to sum c <= budget: the multiple-
choice knapsack. With a price mu per token of prefix it falls apart into rows, each solved exactly,

    D(mu) = mu * budget + sum over n of max over t of (V(n, t) - mu * c(n, t))  >=  the optimum,

and the mu that minimises D leaves at most the row at the margin undecided, where no two cuts tie.
What is left of the budget is filled in greedily. D - sum V bounds what was missed.

    delight, mask, rows -> curves c and V -> price mu -> fill in -> cuts -> keep

The search works on tensors over leading dimensions. For one batch it stops as soon as nothing
changes, which it reads from the device once a round; for many members at once, as in a CUDA graph,
it makes every round and reads nothing.
"""

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kondo.arguments import check_flag, check_float, check_mask, check_number, first_unit
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


class _Curves(NamedTuple):
    """Every choice of every row: column 0 skips it, column t + 1 cuts after token t."""

    cost: Tensor  # [..., N, S + 1] float64, 0 in column 0, not falling along a row
    value: Tensor  # [..., N, S + 1] float64, 0 in column 0, -inf where the cost exceeds the budget


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


class BudgetGate(BaseGate):
    """Keep the tokens, or the sequences, that buy the most delight for a budget of prefix tokens.

    The step binds it to the rows, whose prefixes are the costs:

        kondo.backward(lm, rows, advantages, gate=BudgetGate(budget=0.03), unit="token")

    Bind it with `for_rows` to give tokens other costs, or to call it alone.

    For unit "token" a row is cut at its best place and the tokens inside the cut whose delight
    exceeds `price` are kept. For unit "sequence" a row is bought whole or not at all, and costs its
    tokens up to the last of the completion. `Choice.price` is mu, delight per token of prefix.
    Where no cut fits the budget nothing is kept: the budget is never exceeded.

    Args:
        budget: tokens trained / tokens seen, in (0, 1]. Both count prompts: every real token.
        price: delight a token or sequence must exceed to be worth anything, >= 0.
        whole: keep every token inside the cut with non-zero delight, and count negative delight
            against the cut: V is then the sum of all delight inside. For unit "token".

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

    def __init__(self, *, budget: float, price: float = 0.0, whole: bool = False):
        budget, price = check_number("budget", budget), check_number("price", price)
        whole = check_flag("whole", whole)
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"budget must lie in (0, 1], got {budget}; 0.03 trains 3% of tokens.")
        if not 0.0 <= price < float("inf"):
            raise ValueError(
                f"price must be finite and >= 0, got {price}; tokens of negative delight are worth "
                f"no prefix. whole=True trains those inside a cut."
            )
        if whole and price > 0:
            raise ValueError(f"whole keeps tokens whatever their delight; got price={price} too.")
        self.budget, self.price, self.whole = budget, price, whole
        self._cost: Tensor | None = None  # c(n, t), [..., N, S]
        self._row_end: Tensor | None = None  # of whole rows, [..., N]
        self._weighted = False
        # Shared with the gates bound from this one, so that each shows the latest purchase.
        self._latest: list[Purchase] = []

    @property
    def is_bound(self) -> bool:
        """Whether this gate knows the costs of its rows; see `for_rows`."""
        return self._cost is not None

    @property
    def purchase(self) -> Purchase:
        """What the latest call bought, of this gate or of one bound from it."""
        if not self._latest:
            raise ValueError("purchase is there after a call; this gate has not been called yet.")
        return self._latest[0]

    def for_rows(self, rows: Any, *, weight: Tensor | None = None) -> "BudgetGate":
        """Return this gate bound to the costs of `rows`; the gate itself is left as it is.

        Args:
            rows: `kondo.lm.TokenRows`, or an attention mask [N, S], bool; [..., N, S] for many
                members at once.
            weight: [N, S] float > 0, cost of each real token; 1 by default. The budget is then a
                share of the total weight. Attention makes late tokens dearer: for width D,
                `1 + place / (6 * D)` counts a transformer layer's floating-point operations.
        """
        attention = getattr(rows, "attention_mask", rows)
        return self._bound(attention, getattr(rows, "completion_mask", None), weight)

    def _bound(
        self, attention: Any, completion: Tensor | None, weight: Tensor | None = None
    ) -> "BudgetGate":
        real = _check_attention(attention)
        per_token = real.double()
        if weight is not None:
            per_token = torch.where(real, _check_weight(weight, real).double(), 0.0)
        bound = copy.copy(self)
        bound._weighted = weight is not None
        bound._cost = per_token.cumsum(dim=-1)
        ends = check_mask(completion, real.shape)
        # Whatever follows the last completion token is cut from a whole row too.
        last = bound._cost if ends is None else torch.where(ends, bound._cost, 0.0)
        bound._row_end = last.amax(dim=-1)
        return bound

    def take(self, rows: Tensor) -> "BudgetGate":
        """Return this bound gate for some of its rows, int64 [R], with their costs and weights."""
        if self._cost is None or self._row_end is None:
            raise ValueError("take needs a gate that is bound to rows; use for_rows(rows).")
        chosen = copy.copy(self)
        index = rows.to(self._cost.device)
        chosen._cost, chosen._row_end = self._cost[index], self._row_end[index]
        return chosen

    def row_facts(self, batch: Any) -> Tensor | None:
        """Return the masks of `TokenRows`, [N, S] uint8: 1 for real, 2 for completion tokens.

        None where the gate is bound already, or where the batch is not one of tokens.
        """
        attention = getattr(batch, "attention_mask", None)
        completion = getattr(batch, "completion_mask", None)
        if self.is_bound or not (isinstance(attention, Tensor) and isinstance(completion, Tensor)):
            return None
        return attention.byte() + 2 * completion.byte()

    def bind(self, facts: Tensor) -> "BudgetGate":
        """Return this gate bound to the rows that the masks of `row_facts` describe."""
        return self._bound(facts % 2 == 1, facts >= 2)

    def choose_all(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among all units: delight, [N, S] for unit "token" and [N] for unit "sequence".

        Raises:
            ValueError: the gate is not bound, or to rows of another shape; infinite delight in a
                unit that counts; a unit that counts and lies in the padding.
        """
        infinite = (values == torch.inf) & mask
        outside = mask & (values != 0) & (self._costs(values).view(values.shape) == 0)
        if bool((infinite | outside).any()):  # one device sync
            if bool(infinite.any()):
                raise ValueError(
                    f"values must not be infinite where the mask is True, got "
                    f"{first_unit(infinite)} ({int(infinite.sum())} in all); find its log-prob and "
                    f"advantage, or mask the unit."
                )
            raise ValueError(
                f"mask must lie inside the rows' real tokens, got {first_unit(outside)}, which has "
                f"no real token up to it; give mask=rows.completion_mask, and the rows of this "
                f"batch."
            )
        return self.choose(values, mask)

    def choose(self, values: Tensor, mask: Tensor, generator: Randomness = None) -> Choice:
        """Choose among the units, [..., N, S] or [..., N], of the rows this gate is bound to.

        Values are finite or minus infinity where the mask is True. Nothing is drawn.
        """
        cost = self._costs(values)
        lead = cost.ndim - 2  # how many dimensions stand before the rows: 0 for one batch
        chi = torch.where(mask, values, 0.0)
        worth = chi if self.whole else torch.where(chi > self.price, chi, 0.0)
        worth = worth.reshape(*worth.shape[:lead], *cost.shape[lead:])
        assert self._cost is not None  # `_costs` has looked
        budget = self.budget * self._cost[..., -1].sum(-1) * (1 + _ROUNDING)
        if not self._weighted:
            budget = budget.floor()  # a part of a token buys nothing
        purchase = buy(worth, cost, budget, patient=lead > 0)
        self._latest[:] = [purchase]
        place = torch.arange(worth.shape[-1], device=chi.device)
        inside = place < purchase.cut.unsqueeze(-1)
        keep = (inside & (worth != 0)).view(chi.shape)
        flat, counted = keep.flatten(lead), mask.flatten(lead)
        return Choice.of(flat, counted, purchase.price, chi.dtype).reshape(chi.shape)

    def _costs(self, values: Tensor) -> Tensor:
        """Return c for every cut, [..., N, S] or [..., N, 1]."""
        if self._cost is None or self._row_end is None:
            raise ValueError(
                "a BudgetGate needs the prefix costs of its rows, got none; give "
                "gate=gate.for_rows(rows)."
            )
        if values.shape == self._cost.shape:
            return self._cost.to(values.device)
        if values.shape != self._row_end.shape:
            raise ValueError(
                f"values must have the shape of the rows this gate is bound to, "
                f"{list(self._cost.shape)} or {list(self._row_end.shape)}, got "
                f"{list(values.shape)}; leave for_rows(...) out, and kondo.backward binds it."
            )
        if self.whole:
            raise ValueError(
                'whole is about tokens inside a cut; for unit "sequence", whose delight is [N], '
                "rows are bought whole anyway: drop it."
            )
        return self._row_end.unsqueeze(-1).to(values.device)

    def __repr__(self) -> str:
        options = {name: getattr(self, name) for name in ("budget", "price", "whole")}
        return f"BudgetGate({', '.join(f'{k}={v!r}' for k, v in options.items() if v)})"


def buy(worth: Tensor, cost: Tensor, budget: Tensor | float, *, patient: bool = False) -> Purchase:
    """Choose one cut per row: maximise the worth inside the cuts, sum of their costs <= budget.

    Three starts are filled in greedily, and the best is taken: the cuts at the price mu; those of
    the plain top tokens, as many as the budget holds, so that the result is never worse; and the
    one row that is worth most, which together with the first guarantees half the optimum.

    Args:
        worth: [..., N, S] float, finite or -inf: what token t adds to V(n, t).
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
    curves = _Curves(*(F.pad(curve, (1, 0)) for curve in (cost.double(), value)))
    best, mu, bound = _lagrangian(curves, budget, patient)
    if patient or bool((best.value < bound * (1 - _SAME)).any()):
        best = _fill_in(curves, best, budget, patient)
        for start in (_top_cuts(worth, curves, position, budget, patient), _single_row(curves)):
            other = _fill_in(curves, start, budget, patient)
            best = other.where(other.value > best.value, best)
    cut = best.cut
    if index is not None:
        cut = torch.zeros(num_rows, dtype=torch.int64, device=cut.device).index_copy_(0, index, cut)
    return Purchase(cut, best.value, torch.maximum(bound, best.value), best.cost, budget, mu)


def _at(curve: Tensor, cut: Tensor) -> Tensor:
    """Return [..., N]: the curve [..., N, cuts] of every row at its cut."""
    return curve.gather(-1, cut.unsqueeze(-1)).squeeze(-1)


def _cuts(curves: _Curves, cut: Tensor) -> _Cuts:
    return _Cuts(cut, *(_at(curve, cut).sum(-1) for curve in curves))


def _at_price(curves: _Curves, mu: Tensor) -> tuple[_Cuts, Tensor]:
    """Return each row's best cut at mu per unit of cost, and sum of V - mu c there."""
    if curves.cost.shape[-2] == 0:
        nothing = _cuts(curves, torch.zeros(curves.cost.shape[:-1], dtype=torch.int64))
        return nothing, nothing.value
    choice = _cuts(curves, (curves.value - mu[..., None, None] * curves.cost).argmax(dim=-1))
    return choice, choice.value - mu * choice.cost


def _lagrangian(curves: _Curves, budget: Tensor, patient: bool) -> tuple[_Cuts, Tensor, Tensor]:
    """Return the best affordable cuts some price mu gives, mu, and D(mu), which bounds all cuts.

    D is convex and piecewise linear, with slope budget - cost of the cuts at mu. Where the lines of
    a cheap and of a dear choice cross lies either the minimum, or a point whose choice replaces one
    of the two.
    """
    low = torch.zeros_like(budget)
    dear, bound = _at_price(curves, low)
    done = all_fits = dear.cost <= budget
    best_mu, nothing = low, _cuts(curves, torch.zeros_like(dear.cut))
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
        found, surplus = _at_price(curves, mu)
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
        extra = curves.cost - _at(curves.cost, choice.cut).unsqueeze(-1)
        gain = curves.value - _at(curves.value, choice.cut).unsqueeze(-1)
        usable = (gain > 0) & (extra <= left.unsqueeze(-1))
        per_cost = torch.where(usable, gain / extra.clamp_min(_TINY), 0.0)
        best, cut = per_cost.max(dim=-1)
        best, order = best.sort(dim=-1, descending=True)
        spent = _at(extra, cut).clamp_min(0).gather(-1, order).cumsum(dim=-1)
        fits = torch.zeros_like(best, dtype=torch.bool)
        fits = fits.scatter(-1, order, (best > 0) & (spent <= left))
        if not patient and not bool(fits.any()):
            break
        choice = _cuts(curves, torch.where(fits, cut, choice.cut))
    return choice


def _top_cuts(
    worth: Tensor, curves: _Curves, position: Tensor, budget: Tensor, patient: bool
) -> _Cuts:
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
    return _cuts(curves, torch.where(rank < fits[..., None, None], place, 0).amax(dim=-1))


def _ranks(worth: Tensor, position: Tensor, patient: bool = False) -> Tensor:
    """Return each token's place in descending worth, [..., N, S]; ties as `quantiles.highest` does.

    `position`, [N, S] int64, holds places in the batch, on which ties depend. Tokens that are worth
    nothing come last, in no order; a patient search ranks them too, and reads no number of them.
    """
    values, places = worth.clamp_min(0).flatten(-2), position.flatten()
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


def _single_row(curves: _Curves) -> _Cuts:
    """Return the one cut of the one row that is worth most, every other row skipped."""
    values, cuts = curves.value.max(dim=-1)
    row = values.argmax(dim=-1, keepdim=True)
    return _cuts(curves, torch.zeros_like(cuts).scatter(-1, row, cuts.gather(-1, row)))


def _check_attention(attention: Any) -> Tensor:
    if isinstance(attention, Tensor) and attention.ndim >= 2:
        check_mask(attention, attention.shape)
        return attention
    got = list(attention.shape) if isinstance(attention, Tensor) else type(attention).__name__
    raise ValueError(
        f"rows must be TokenRows or an attention mask of shape [N, S], got {got}; costs are "
        f"counted in real tokens."
    )


def _check_weight(weight: Tensor, real: Tensor) -> Tensor:
    if check_float("weight", weight).shape != real.shape:
        raise ValueError(
            f"weight must have the shape of the rows, {list(real.shape)}, got "
            f"{list(weight.shape)}; give the cost of every token."
        )
    broken = real & ~((weight > 0) & weight.isfinite())
    if bool(broken.any()):
        raise ValueError(
            f"weight must be finite and > 0 for every real token, got {first_unit(broken)}; a "
            f"token that costs nothing has no price."
        )
    return weight
