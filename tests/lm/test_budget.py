import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
import kondo.lm
from kondo.core.adapters import adapter_of
from kondo.lm.budget import BudgetGate, _ranks, buy
from kondo.lm.rows import TokenRows
from lm.tiny import policy, token_rows
from no_reads import NoReads
from oracles import budget as oracle
from tolerances import TOLERANCES, assert_close

SLACK = TOLERANCES[torch.float64]["rtol"]


@st.composite
def batches(draw, most_rows=5, most_tokens=7):
    """Delight on a coarse grid, so that ties are common, and rows padded on either side."""
    num_rows = draw(st.integers(1, most_rows))
    width = draw(st.integers(1, most_tokens))
    grid = st.integers(-6, 12).map(lambda k: k / 4)
    delight = torch.tensor(
        draw(st.lists(grid, min_size=num_rows * width, max_size=num_rows * width)),
        dtype=torch.float64,
    ).view(num_rows, width)
    spans = [sorted((draw(st.integers(0, width)), draw(st.integers(0, width)))) for _ in delight]
    place = torch.arange(width)
    attention = torch.stack([(place >= first) & (place <= last) for first, last in spans])
    prompt = torch.tensor([first + draw(st.integers(0, 2)) for first, _ in spans])
    return delight, attention & (place >= prompt.unsqueeze(1)), attention


def tokens_of(share, attention):
    """A share of the real tokens, rounded as a reader would."""
    return int(share * int(attention.sum()) + 1e-9)


@given(batches(most_rows=4, most_tokens=5), st.integers(0, 20))
def test_the_oracles_agree(batch, capacity):
    choices = oracle.curves(*batch)
    assert_close(
        oracle.best_value(choices, capacity), oracle.best_value_by_trying(choices, capacity)
    )


@given(batches(), st.integers(1, 100))
def test_it_stays_within_the_budget_and_its_bound_holds(batch, percent):
    delight, mask, attention = batch
    gate = BudgetGate(budget=percent / 100).for_rows(attention)
    out = gate(delight, mask)
    capacity = tokens_of(percent / 100, attention)
    best = oracle.best_value(oracle.curves(delight, mask, attention), capacity)
    value, tokens = oracle.bought(delight, out.keep, attention)
    purchase = gate.purchase
    assert tokens <= capacity
    assert tokens <= float(purchase.cost) <= capacity == float(purchase.budget)
    assert_close(purchase.delight, value)
    assert value <= best * (1 + SLACK)
    assert best <= float(purchase.bound) * (1 + SLACK)
    assert value >= best / 2  # the guarantee; what it really reaches is tested below
    assert 0.0 <= purchase.gap <= 1.0


def test_it_is_optimal_or_nearly_so_on_small_batches(generator):
    shares = []
    for _ in range(200):
        size = torch.randint(2, 9, (2,), generator=generator).tolist()
        delight = torch.randn(size, generator=generator, dtype=torch.float64) ** 3
        everything = torch.ones(size, dtype=torch.bool)
        share = float(torch.rand((), generator=generator)) * 0.9 + 0.05
        keep = BudgetGate(budget=share).for_rows(everything)(delight).keep
        choices = oracle.curves(delight, everything, everything)
        best = oracle.best_value(choices, tokens_of(share, everything))
        value, _ = oracle.bought(delight, keep, everything)
        shares.append(value / best if best else 1.0)
    assert sum(share > 1 - SLACK for share in shares) >= 0.95 * len(shares)
    assert min(shares) > 0.9


@pytest.mark.parametrize("share", [0.03, 0.2])
def test_the_gap_is_one_row_at_most_on_larger_batches(share, generator, device):
    delight = (torch.randn(128, 64, generator=generator) ** 5).to(device)
    attention = (torch.arange(64) < torch.randint(8, 65, (128, 1), generator=generator)).to(device)
    gate = BudgetGate(budget=share).for_rows(attention)
    out = gate(delight, attention)
    assert out.keep.device.type == device.type
    assert 0 <= gate.purchase.gap < 0.02
    value, tokens = oracle.bought(delight, out.keep, attention)
    assert tokens == float(gate.purchase.cost)
    assert_close(value, float(gate.purchase.delight), torch.float32)


@given(batches(most_rows=6, most_tokens=8), st.integers(1, 100))
def test_it_is_never_worse_than_plain_top_rate_at_the_same_tokens(batch, percent):
    delight, mask, attention = batch
    top = kondo.Gate(rate=percent / 100)(delight, mask).keep
    value, tokens = oracle.bought(delight, top, attention)
    if tokens == 0:
        return
    gate = BudgetGate(budget=tokens / int(attention.sum())).for_rows(attention)
    ours, spent = oracle.bought(delight, gate(delight, mask).keep, attention)
    assert spent <= tokens
    assert ours >= value - SLACK


def test_a_few_good_tokens_behind_a_short_prefix_beat_the_best_token():
    # 5 for 4 tokens of prefix, or 3 + 4 for the same 4: the envelope must look past single tokens.
    delight = torch.tensor([[0.0, 0.0, 0.0, 5.0], [0.0, 3.0, 0.0, 4.0]])
    out = BudgetGate(budget=0.5).for_rows(torch.ones(2, 4, dtype=torch.bool))(delight)
    assert out.keep.tolist() == [[False] * 4, [False, True, False, True]]
    assert float(out.rate) == 2 / 8


def test_the_price_per_token_is_the_slope_at_the_margin():
    # Slopes: 6 for 2 tokens, 2 for 2 tokens, 1 for 2 tokens. Half of 6 tokens: the second is at
    # the margin, and half of it does not fit.
    delight = torch.tensor([[0.0, 6.0], [0.0, 2.0], [0.0, 1.0]])
    gate = BudgetGate(budget=0.5).for_rows(torch.ones(3, 2, dtype=torch.bool))
    out = gate(delight)
    assert out.keep.any(1).tolist() == [True, False, False]
    assert_close(out.price, 1.0)
    assert_close(gate.purchase.bound, 7.0)
    assert_close(gate.purchase.gap, 1 / 7)


def test_prompts_cost_and_padding_does_not():
    rows = TokenRows(
        input_ids=torch.ones(2, 5, dtype=torch.long),
        attention_mask=torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 0]]),
        completion_mask=torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]]),
    )
    delight = torch.tensor([[0.0, 0, 0, 0, 1.0], [0, 0, 0, 1.5, 0]])
    # 6 real tokens in all; row 0 costs 2 and row 1 costs 4.
    for unit_delight in (delight, delight.sum(1)):
        mask = rows.completion_mask if unit_delight.ndim == 2 else None
        for share, rows_kept in (
            (0.3, [False, False]),
            (0.34, [True, False]),
            (0.7, [False, True]),
        ):
            gate = BudgetGate(budget=share).for_rows(rows)
            keep = gate(unit_delight, mask).keep
            assert keep.view(2, -1).any(1).tolist() == rows_kept


def test_a_sequence_does_not_pay_for_what_follows_its_completion():
    rows = TokenRows(
        input_ids=torch.ones(2, 6, dtype=torch.long),
        attention_mask=torch.ones(2, 6, dtype=torch.long),
        completion_mask=torch.tensor([[0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]]),
    )
    gate = BudgetGate(budget=7 / 12).for_rows(rows)
    assert gate(torch.tensor([1.0, 1.0])).keep.all()
    assert float(gate.purchase.cost) == 2 + 5


def test_sequences_are_bought_by_delight_per_token():
    attention = torch.arange(8) < torch.tensor([[8], [2], [2], [4]])
    gate = BudgetGate(budget=0.5).for_rows(attention)  # 8 of 16 tokens
    out = gate(torch.tensor([5.0, 2.0, 2.5, 4.0]))
    assert out.keep.tolist() == [False, True, True, True]
    assert out.weight.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert float(out.rate) == 0.75


@given(batches(most_tokens=1, most_rows=8), st.integers(1, 100))
def test_sequences_are_the_plain_knapsack(batch, percent):
    delight, mask, attention = batch
    attention = attention.new_ones(delight.shape[0], 5).logical_and(
        torch.arange(5) <= torch.arange(delight.shape[0]).unsqueeze(1) % 5
    )
    gate = BudgetGate(budget=percent / 100).for_rows(attention)
    keep = gate(delight[:, 0], mask[:, 0]).keep
    lengths = attention.sum(1).tolist()
    choices = [
        [(0, 0.0), (length, max(value, 0.0) if counts else 0.0)]
        for length, value, counts in zip(
            lengths, delight[:, 0].tolist(), mask[:, 0].tolist(), strict=True
        )
    ]
    best = oracle.best_value(choices, tokens_of(percent / 100, attention))
    assert float(delight[:, 0][keep].sum()) <= best + SLACK
    assert best <= float(gate.purchase.bound) * (1 + SLACK)
    assert not (keep & ~mask[:, 0]).any()


def test_a_token_of_minus_infinity_is_skipped():
    delight = torch.tensor([[1.0, -torch.inf, 5.0]])
    everything = torch.ones(1, 3, dtype=torch.bool)
    assert BudgetGate(budget=1.0).for_rows(everything)(delight).keep.tolist() == [
        [True, False, True]
    ]


def test_order_of_the_rows_does_not_matter(generator):
    delight = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    attention = torch.arange(12) < torch.randint(1, 13, (20, 1), generator=generator)
    shuffle = torch.randperm(20, generator=generator)
    keep = BudgetGate(budget=0.2).for_rows(attention)(delight, attention).keep
    shuffled = BudgetGate(budget=0.2).for_rows(attention[shuffle])
    assert torch.equal(shuffled(delight[shuffle], attention[shuffle]).keep, keep[shuffle])


def test_what_the_mask_hides_does_not_matter():
    delight = torch.tensor([[float("nan"), 1.0, float("inf")]])
    mask = torch.tensor([[False, True, False]])
    out = BudgetGate(budget=1.0).for_rows(torch.ones(1, 3, dtype=torch.bool))(delight, mask)
    assert out.keep.tolist() == [[False, True, False]]
    assert float(out.rate) == 1.0


@pytest.mark.parametrize("delight", [torch.zeros(2, 3), -torch.ones(2, 3)])
def test_nothing_is_bought_where_nothing_is_worth_it(delight):
    gate = BudgetGate(budget=0.9).for_rows(torch.ones(2, 3, dtype=torch.bool))
    out = gate(delight)
    assert not out.keep.any()
    assert float(out.rate) == gate.purchase.gap == float(gate.purchase.cost) == 0.0


def test_binding_leaves_the_gate_as_it_was_and_shares_the_purchase():
    gate = BudgetGate(budget=0.5)
    everything = torch.ones(1, 2, dtype=torch.bool)
    bound = gate.for_rows(everything)
    with pytest.raises(ValueError, match="for_rows"):
        gate(torch.ones(1, 2))
    with pytest.raises(ValueError, match="not been called"):
        _ = gate.purchase
    bound(torch.ones(1, 2))
    assert float(gate.purchase.cost) == float(bound.purchase.cost) == 1.0
    assert copy.deepcopy(bound)(torch.ones(1, 2)).keep.tolist() == [[True, False]]


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_it_gates_kondo_backward(unit, generator):
    weight = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    states = torch.randn(10, 4, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(10, generator=generator, dtype=torch.float64)
    attention = torch.ones(10, 4, dtype=torch.bool)

    def log_prob(rows):
        return -(rows @ weight).square()

    gate = BudgetGate(budget=0.25).for_rows(attention)
    report = kondo.backward(log_prob, states, advantages, gate=gate, unit=unit)
    assert 0 < report.kept < report.seen
    assert float(gate.purchase.cost) <= 10
    chi = (advantages.unsqueeze(1) * -log_prob(states)).detach()
    keep = gate(chi if unit == "token" else chi.sum(1)).keep
    keep = keep if unit == "token" else keep.unsqueeze(1)
    dense = -(log_prob(states) * advantages.unsqueeze(1) * keep).sum() / 40
    assert_close(weight.grad, torch.autograd.grad(dense, weight)[0])


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_what_it_reckons_is_what_a_language_model_trains(unit, generator):
    pytest.importorskip("transformers")
    lm = kondo.lm.CausalLM(policy().module, max_tokens=1)  # every row alone: no padding to count
    rows = token_rows(generator, 40)
    gate = kondo.lm.BudgetGate(budget=0.2)
    report = kondo.backward(
        lm, rows, torch.randn(40, generator=generator), gate=gate.for_rows(rows), unit=unit
    )
    assert report.tokens_trained == float(gate.purchase.cost)
    assert 0 < report.tokens_trained <= 0.2 * int(rows.attention_mask.sum())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"budget": 0.0}, "budget must lie in"),
        ({"budget": 1.5}, "budget must lie in"),
        ({"budget": float("nan")}, "budget must lie in"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        BudgetGate(**options)


EVERYTHING = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (torch.ones(2, 3), "bool"),
        (torch.ones(3, dtype=torch.bool), r"\[N, S\], got \[3\]"),
        ([[True]], "got list"),
    ],
)
def test_bad_rows_are_refused(rows, match):
    with pytest.raises(ValueError, match=match):
        BudgetGate(budget=0.1).for_rows(rows)


@pytest.mark.parametrize(
    ("delight", "match"),
    [
        (torch.ones(3, 3), "shape of the rows this gate is bound to"),
        (torch.ones(3), "shape of the rows this gate is bound to"),
        (torch.ones(2, 3, dtype=torch.long), "values must be floating point"),
        (torch.tensor([[1.0, 1, 1], [1, float("nan"), 1]]), r"NaN .* unit \(1, 1\)"),
        (
            torch.tensor([[1.0, 1, 1], [1, 1, float("inf")]]),
            r"below inf .* unit \(1, 2\)",
        ),
    ],
)
def test_bad_delight_is_refused(delight, match):
    with pytest.raises(ValueError, match=match):
        BudgetGate(budget=0.1).for_rows(EVERYTHING)(delight)


@pytest.mark.parametrize("delight", [torch.ones(2, 2), torch.ones(2)])
def test_units_in_the_padding_are_refused(delight):
    gate = BudgetGate(budget=0.5).for_rows(torch.tensor([[True, True], [False, False]]))
    with pytest.raises(ValueError, match="first real token of a row, got unit"):
        gate(delight)
    assert gate(torch.tensor([[1.0, 0.0], [0.0, 0.0]])).keep.any()


def test_buy_takes_a_dear_row_that_the_price_leaves_out():
    # By delight per token the first row goes first, and then the second does not fit any more.
    worth, cost = torch.tensor([[2.0], [10.0]]), torch.tensor([[1.0], [10.0]])
    assert buy(worth, cost, 10.0).cut.tolist() == [0, 1]


def test_cuts_beyond_the_whole_budget_set_no_price():
    """A row that no budget can reach must not change what is bought of the others."""
    cost = torch.arange(1, 1001.0).double().expand(11, 1000)
    worth = torch.zeros(11, 1000)
    worth[0, 899] = 1e6
    worth[1:, :100] = torch.linspace(1, 0.01, 100)
    found, without = buy(worth, cost, 899), buy(worth[1:], cost[1:], 899)
    assert float(found.delight) == float(without.delight)
    assert float(found.price) == float(without.price)
    assert found.gap < 1e-6
    assert int(found.cut[0]) == 0


def test_the_gap_of_a_small_batch_counts_only_what_could_be_bought(generator):
    rows, tokens = 16, 256
    cost = torch.arange(1, tokens + 1.0).double().expand(rows, tokens)
    advantages = torch.randn(rows, 1, generator=generator)
    worth = (advantages * torch.randn(rows, tokens, generator=generator).exp()).clamp_min(0)
    worth[:, :32] = 0
    budget = int(0.03 * rows * tokens)
    found = buy(worth, cost, budget)
    reachable = buy(torch.where(cost <= budget, worth, 0.0)[:, :budget], cost[:, :budget], budget)
    assert abs(found.gap - reachable.gap) < 1e-9
    assert found.gap < 0.2


def test_some_rows_of_a_bound_gate_keep_their_costs():
    mask = torch.arange(3) < torch.tensor([[1], [2], [3], [1]])
    index = torch.tensor([2, 1])
    delight = torch.where(mask[index], torch.rand(2, 3), 0.0)
    few = adapter_of(BudgetGate(budget=0.5).for_rows(mask)).take(index)
    again = BudgetGate(budget=0.5).for_rows(mask[index])
    assert torch.equal(few(delight).keep, again(delight).keep)
    assert torch.equal(few(delight[:, 0]).keep, again(delight[:, 0]).keep)
    assert few.purchase.budget == again.purchase.budget == 2
    unbound = adapter_of(BudgetGate(budget=0.5)).take(index)
    with pytest.raises(ValueError, match="for_rows"):
        unbound(delight)


def test_rounding_does_not_take_a_token_off_the_budget():
    assert 0.29 * 100 < 29
    gate = BudgetGate(budget=0.29).for_rows(torch.ones(4, 25, dtype=torch.bool))
    assert int(gate(torch.ones(4, 25)).keep.sum()) == 29


def test_buy_takes_one_dear_row_that_neither_the_price_nor_the_top_token_leads_to():
    # 3 for 2 tokens comes first both ways, and then 4 for 10 does not fit any more.
    worth = torch.zeros(2, 10)
    worth[0, 1], worth[1, 8:] = 3.0, 2.0
    cost = torch.arange(1.0, 11).expand(2, 10)
    assert buy(worth, cost, 10.0).cut.tolist() == [0, 10]


def test_tokens_are_ranked_as_the_plain_gate_ranks_them(generator):
    worth = torch.randint(0, 3, (6, 5), generator=generator).float()  # ties everywhere
    worth[2] = 0
    rank = _ranks(worth, torch.arange(30).view(6, 5))
    num_worth = int((worth > 0).sum())
    for count in range(1, num_worth + 1):
        assert torch.equal(rank < count, kondo.Gate(rate=count / 30)(worth).keep)


def test_its_repr_can_be_typed():
    assert repr(BudgetGate(budget=0.03)) == "BudgetGate(budget=0.03)"


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_many_members_buy_as_each_would_alone(unit, generator):
    delight = torch.randn(6, 10, 8, generator=generator, dtype=torch.float64)
    delight[3] = -1.0
    attention = torch.arange(8) < torch.randint(2, 9, (6, 10, 1), generator=generator)
    mask = attention if unit == "token" else attention.any(2)
    values = delight if unit == "token" else delight.sum(2)
    gate = BudgetGate(budget=0.25)
    together = gate.for_rows(attention)
    out, bought = together.choose(values, mask), together.purchase
    for member in range(6):
        alone = gate.for_rows(attention[member])
        assert torch.equal(alone(values[member], mask[member]).keep, out.keep[member])
        for ours, theirs in zip(alone.purchase, bought, strict=True):
            assert_close(ours.double(), theirs[member].double())


def test_many_members_buy_without_reading_from_the_device(generator):
    attention = torch.ones(3, 4, 5, dtype=torch.bool)
    gate = BudgetGate(budget=0.3).for_rows(attention)
    with NoReads():
        out = gate.choose(torch.randn(3, 4, 5, generator=generator), attention)
    assert out.keep.any()


def test_the_masks_of_rows_are_all_it_is_bound_to(generator):
    rows = token_rows(generator, 12)
    gate = BudgetGate(budget=0.3)
    known = adapter_of(gate)
    facts = known.row_facts(rows)
    assert facts.shape == rows.attention_mask.shape
    assert not facts.is_floating_point()
    delight = torch.randn(facts.shape, generator=generator)
    by_facts, by_rows = known.bind(facts), gate.for_rows(rows)
    for values, mask in ((delight, rows.completion_mask), (delight.sum(1), None)):
        assert torch.equal(by_facts(values, mask).keep, by_rows(values, mask).keep)
    padded = known.bind(torch.nn.functional.pad(facts, (0, 3)))
    assert torch.equal(padded(delight.sum(1)).keep, by_rows(delight.sum(1)).keep)
    assert known.row_facts(torch.ones(3, 4)) is None
    assert adapter_of(by_rows).row_facts(rows) is None
