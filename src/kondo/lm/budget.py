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
"""

import copy
import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kondo.core._checks import at_least_float32, check_float, check_mask, first_unit
from kondo.core.gates import GateOutput
from kondo.core.pricing import lottery

# The search for mu ends by itself after about a dozen rounds; rounding must not keep it going.
_MOST_ROUNDS = 64

# Each round of filling in buys something or is the last; at scale there is little left to buy.
_MOST_FILLS = 16

# Relative distance at which two sums of float64 are the same number.
_SAME = 1e-12
_TINY = 1e-300

# A budget of 0.29 of 100 tokens is 29 tokens, not the 28.999999999999996 of float64.
_ROUNDING = 1e-9


class Purchase(NamedTuple):
    """What a budget bought. Tensors are 0-d float64 but for `cut`."""

    cut: Tensor
    """[N] int64: tokens 0 .. cut-1 of the row are trained; 0 skips the row."""
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

    cost: Tensor
    """[N, S + 1] float64, 0 in column 0, not falling along a row."""
    value: Tensor
    """[N, S + 1] float64, 0 in column 0, -inf where the cost exceeds the budget."""


class _Choice(NamedTuple):
    """One cut per row, and what it comes to."""

    cut: Tensor
    """[N] int64, a column of the curves."""
    cost: float
    value: float


class BudgetGate:
    """Keep the tokens, or the sequences, that buy the most delight for a budget of prefix tokens.

    Bind it to the rows, whose prefixes are the costs, and use it as `gate=`:

        kondo.lm.backward(lm, rows, advantages, gate=gate.for_rows(rows), unit="token")

    For unit "token" a row is cut at its best place and the tokens inside the cut whose delight
    exceeds `price` are kept. For unit "sequence" a row is bought whole or not at all, and costs its
    tokens up to the last of the completion. `GateOutput.price` is mu, delight per token of prefix.
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
        self._cost: Tensor | None = None
        self._row_end: Tensor | None = None
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
            rows: `kondo.lm.TokenRows`, or an attention mask [N, S], bool.
            weight: [N, S] float > 0, cost of each real token; 1 by default. The budget is then a
                share of the total weight. Attention makes late tokens dearer: for width D,
                `1 + place / (6 * D)` counts a transformer layer's floating-point operations.
        """
        attention = getattr(rows, "attention_mask", rows)
        real = _check_attention(attention)
        per_token = real.double()
        if weight is not None:
            per_token = torch.where(real, _check_weight(weight, real).double(), 0.0)
        bound = copy.copy(self)
        bound._weighted = weight is not None
        bound._cost = per_token.cumsum(dim=1)
        ends = check_mask(getattr(rows, "completion_mask", None), real.shape)
        # Whatever follows the last completion token is cut from a whole row too.
        last = bound._cost if ends is None else torch.where(ends, bound._cost, 0.0)
        bound._row_end = last.amax(dim=1)
        return bound

    def take(self, rows: Tensor) -> "BudgetGate":
        """Return this bound gate for some of its rows, int64 [R], with their costs and weights."""
        if self._cost is None or self._row_end is None:
            raise ValueError("take needs a gate that is bound to rows; use for_rows(rows).")
        chosen = copy.copy(self)
        index = rows.to(self._cost.device)
        chosen._cost, chosen._row_end = self._cost[index], self._row_end[index]
        return chosen

    @torch.no_grad()
    def __call__(
        self,
        delight: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> GateOutput:
        """Gate one batch: delight [N, S] for unit "token", [N] for unit "sequence".

        Args:
            delight: [N, S] or [N] float.
            mask: like delight, bool, True means "counts".
            generator: not used; nothing is drawn.

        Raises:
            ValueError: the gate is not bound, or to rows of another shape; NaN, or infinite
                delight, in a unit that counts; a unit that counts and lies in the padding.
        """
        chi = at_least_float32(check_float("delight", delight).detach())
        valid = check_mask(mask, delight.shape)
        if valid is None:
            valid = torch.ones_like(chi, dtype=torch.bool)
        _check_values(chi, valid)
        cost, total = self._costs(chi)
        chi = torch.where(valid, chi, 0.0)
        _check_inside((chi != 0) & (cost.view(chi.shape) == 0))
        worth = chi if self.whole else torch.where(chi > self.price, chi, 0.0)
        by_token = chi if chi.ndim == 2 else chi.unsqueeze(1)
        worth = worth.view(by_token.shape)
        purchase = buy(worth, cost, self._in_cost(total))
        self._latest[:] = [purchase]

        place = torch.arange(by_token.shape[1], device=chi.device)
        inside = place < purchase.cut.unsqueeze(1)
        keep = (inside & (worth != 0)).view(chi.shape)
        weight = keep.to(chi.dtype)
        rate = keep.sum().double() / valid.sum().clamp_min(1)
        return GateOutput(
            keep=keep, weight=weight, price=purchase.price, rate=rate, probability=weight
        )

    def _costs(self, delight: Tensor) -> tuple[Tensor, float]:
        """Return c for every cut, [N, S] or [N, 1], and the cost of all real tokens."""
        if self._cost is None or self._row_end is None:
            raise ValueError(
                "a BudgetGate needs the prefix costs of its rows, got none; give "
                "gate=gate.for_rows(rows)."
            )
        whole_rows = delight.ndim == 1
        if whole_rows and self.whole:
            raise ValueError(
                'whole is about tokens inside a cut; for unit "sequence", whose delight is [N], '
                "rows are bought whole anyway: drop it."
            )
        allowed = self._row_end.shape if whole_rows else self._cost.shape
        if delight.shape != allowed:
            raise ValueError(
                f"delight must have the shape of the rows this gate is bound to, "
                f"{list(self._cost.shape)} or [{self._cost.shape[0]}], got {list(delight.shape)}; "
                f"bind it to this batch with for_rows(rows)."
            )
        cost = self._row_end.unsqueeze(1) if whole_rows else self._cost
        return cost.to(delight.device), float(self._cost[:, -1].sum())

    def _in_cost(self, total: float) -> float:
        """Return the budget in units of cost; a part of a token buys nothing."""
        budget = self.budget * total * (1 + _ROUNDING)
        return budget if self._weighted else math.floor(budget)

    def __repr__(self) -> str:
        options = {"budget": self.budget, "price": self.price, "whole": self.whole}
        inside = ", ".join(f"{k}={v!r}" for k, v in options.items() if v or k == "budget")
        return f"BudgetGate({inside})"


def buy(worth: Tensor, cost: Tensor, budget: float) -> Purchase:
    """Choose one cut per row: maximise the worth inside the cuts, sum of their costs <= budget.

    Three starts are filled in greedily, and the best is taken: the cuts at the price mu; those of
    the plain top tokens, as many as the budget holds, so that the result is never worse; and the
    one row that is worth most, which together with the first guarantees half the optimum.

    Args:
        worth: [N, S] float, finite or -inf: what token t adds to V(n, t).
        cost: [N, S] float, c(n, t): not falling along a row, > 0 where worth is not 0.
        budget: >= 0, in the units of cost.

    Returns:
        The `Purchase`; its cut is on the device of worth.
    """
    # A cut that the whole budget cannot pay for is no choice: it would only raise the price.
    worth = torch.where(cost <= budget, worth, 0.0)
    # Rows with nothing to gain, half of a batch with centred advantages, need no thought.
    index = (worth > 0).any(dim=1).nonzero().squeeze(1)
    cut = torch.zeros(worth.shape[0], dtype=torch.int64, device=worth.device)
    worth, cost = worth[index], cost[index].double()
    curves = _Curves(
        cost=torch.nn.functional.pad(cost, (1, 0)),
        value=torch.nn.functional.pad(
            torch.where(cost <= budget, worth.double().cumsum(dim=1), -torch.inf), (1, 0)
        ),
    )
    best, mu, bound = _lagrangian(curves, budget)
    if best.value < bound * (1 - _SAME):
        others = (_top_cuts(worth, curves, index, budget), _single_row(curves))
        filled = [_fill_in(curves, choice, budget) for choice in (best, *others)]
        best = max(filled, key=lambda choice: choice.value)

    assert best.value <= bound * (1 + _ROUNDING)
    number = partial(torch.tensor, dtype=torch.float64)
    return Purchase(
        cut=cut.index_copy_(0, index, best.cut),
        delight=number(best.value),
        bound=number(max(bound, best.value)),
        cost=number(best.cost),
        budget=number(budget),
        price=number(mu),
    )


def _choice(curves: _Curves, cut: Tensor) -> _Choice:
    column = cut.unsqueeze(1)
    sums = torch.stack([curve.gather(1, column).sum() for curve in curves])
    cost, value = sums.tolist()  # one device sync
    return _Choice(cut, cost, value)


def _at_price(curves: _Curves, mu: float) -> tuple[_Choice, float]:
    """Return each row's best cut at mu per unit of cost, and sum of V - mu c there."""
    choice = _choice(curves, (curves.value - mu * curves.cost).argmax(dim=1))
    return choice, choice.value - mu * choice.cost


def _lagrangian(curves: _Curves, budget: float) -> tuple[_Choice, float, float]:
    """Return the best affordable cuts some price mu gives, mu, and D(mu), which bounds all cuts.

    D is convex and piecewise linear, with slope budget - cost of the cuts at mu. Where the lines of
    a cheap and of a dear choice cross lies either the minimum, or a point whose choice replaces one
    of the two.
    """
    dear, bound = _at_price(curves, 0.0)
    if dear.cost <= budget:
        return dear, 0.0, bound
    cheap = _choice(curves, torch.zeros_like(dear.cut))
    best_mu = 0.0
    low, high = 0.0, float((curves.value / curves.cost.clamp_min(_TINY)).amax())
    for turn in range(_MOST_ROUNDS):
        crossing = (dear.value - cheap.value) / (dear.cost - cheap.cost)
        # The crossing alone may creep along one side; every third turn halves the bracket.
        mu = (low + high) / 2 if turn % 3 == 2 else crossing
        mu = min(max(mu, low), high)
        found, surplus = _at_price(curves, mu)
        if (at_mu := surplus + mu * budget) < bound:
            best_mu, bound = mu, at_mu
        line = cheap.value + mu * (budget - cheap.cost)
        is_minimum = mu == crossing and at_mu <= line * (1 + _SAME)
        if found.cost <= budget:
            cheap, high = found, mu
        else:
            dear, low = found, mu
        if is_minimum:
            break
    return cheap, best_mu, bound


def _fill_in(curves: _Curves, choice: _Choice, budget: float) -> _Choice:
    """Spend what is left: each row's best affordable step up, the most delight per cost first."""
    for _ in range(_MOST_FILLS):
        column = choice.cut.unsqueeze(1)
        extra = curves.cost - curves.cost.gather(1, column)
        gain = curves.value - curves.value.gather(1, column)
        left = budget - choice.cost
        usable = (gain > 0) & (extra <= left)
        per_cost = torch.where(usable, gain / extra.clamp_min(_TINY), 0.0)
        best, cut = per_cost.max(dim=1)
        order = best.argsort(descending=True)
        spent = extra.gather(1, cut.unsqueeze(1)).squeeze(1).clamp_min(0)[order]
        fits = (best[order] > 0) & (spent.cumsum(dim=0) <= left)
        rows = order[fits]
        if rows.numel() == 0:
            break
        choice = _choice(curves, choice.cut.index_copy(0, rows, cut[rows]))
    return choice


def _top_cuts(worth: Tensor, curves: _Curves, rows: Tensor, budget: float) -> _Choice:
    """Return the cuts of the top tokens, in `kondo.Gate`'s order, as many as the budget holds."""
    rank = _ranks(worth, rows)
    fits, too_many = 0, int((worth > 0).sum()) + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        spent = float(torch.where(rank < count, curves.cost[:, 1:], 0.0).amax(dim=1).sum())
        fits, too_many = (count, too_many) if spent <= budget else (fits, count)
    place = torch.arange(1, worth.shape[1] + 1, device=worth.device)
    return _choice(curves, torch.where(rank < fits, place, 0).amax(dim=1))


def _ranks(worth: Tensor, rows: Tensor) -> Tensor:
    """Return each token's place in descending worth, [R, S]; ties as `pricing.top` breaks them.

    `rows` are the rows of the batch that worth holds, since ties depend on a token's position in
    the batch. Tokens that are worth nothing come last, in no order.
    """
    row, column = (worth > 0).nonzero(as_tuple=True)
    values = worth[row, column]
    lots = lottery(rows[row] * worth.shape[1] + column, salt=values).argsort()
    order = lots[values[lots].argsort(descending=True, stable=True)]
    rank = torch.full_like(worth, values.numel(), dtype=torch.int64)
    place = torch.arange(values.numel(), device=worth.device)
    return rank.index_put_((row[order], column[order]), place)


def _single_row(curves: _Curves) -> _Choice:
    """Return the one cut of the one row that is worth most, every other row skipped."""
    values, cuts = curves.value.max(dim=1)
    row = values.argmax()
    alone = torch.arange(cuts.numel(), device=cuts.device) == row
    return _choice(curves, torch.where(alone, cuts, 0))


def _check_attention(attention: Any) -> Tensor:
    if not isinstance(attention, Tensor) or attention.ndim != 2:
        got = list(attention.shape) if isinstance(attention, Tensor) else type(attention).__name__
        raise ValueError(
            f"rows must be TokenRows or an attention mask of shape [N, S], got {got}; costs are "
            f"counted in real tokens."
        )
    mask = check_mask(attention, attention.shape)
    assert mask is not None
    return mask


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


def _check_inside(outside: Tensor) -> None:
    if bool(outside.any()):
        raise ValueError(
            f"mask must lie inside the rows' real tokens, got {first_unit(outside)}, which has no "
            f"real token up to it; give mask=rows.completion_mask, and the rows of this batch."
        )


def _check_values(chi: Tensor, valid: Tensor) -> None:
    nan, infinite = chi.isnan() & valid, (chi == torch.inf) & valid
    found = torch.stack([nan.any(), infinite.any()]).tolist()  # one device sync
    for broken, bad, what in zip((nan, infinite), found, ("NaN", "infinite"), strict=True):
        if bad:
            raise ValueError(
                f"delight must not be {what} where the mask is True, got {first_unit(broken)} "
                f"({int(broken.sum())} in all); find its log-prob and advantage, or mask the unit."
            )
