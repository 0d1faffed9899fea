"""`kondo.select`: units, leading dimensions, what is refused, and that nothing is read."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from core import entries
from kondo.core.given_gates import as_gate
from kondo.engine.select import choose as choose_units
from kondo.engine.select import units_of
from no_reads import NoReads
from oracles import selection as oracle
from tolerances import assert_close

NAN, INF = math.nan, math.inf


def choose(log_probs, advantages, rate=0.5, **options):
    options = {"unit": "sample"} | options
    signal = options.pop("signal", kondo.delight)
    options.setdefault("gate", kondo.Gate(rate=rate, signal=signal))
    return kondo.select(torch.tensor(log_probs), torch.tensor(advantages), **options)


def test_samples():
    # delight: 1*1, 2*0.5, -1*2, 3*1 = 1, 1, -2, 3; half of four is two: 3, then one of the tie
    out = choose([-1.0, -2.0, -2.0, -1.0], [1.0, 0.25, -1.0, 3.0])
    # delight is 1, 0.5, -2, 3
    assert out.values.tolist() == [1.0, 0.5, -2.0, 3.0]
    assert out.keep.tolist() == [True, False, False, True]
    assert out.rows.tolist() == [0, 3]
    assert out.weight.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_tokens_drop_rows_without_a_kept_token():
    log_probs = [[-1.0, -3.0], [-0.1, -0.2], [-2.0, -0.5]]
    out = choose(log_probs, [1.0, 1.0, 1.0], rate=1 / 3, unit="token")
    assert out.keep.tolist() == [[False, True], [False, False], [True, False]]
    assert out.rows.tolist() == [0, 2]


def test_sequences_rank_by_the_sum_over_valid_tokens():
    # sums of valid surprisal: 3, 2.5 (the 9 is masked), 2.9; means would be 1, 2.5, 2.9
    log_probs = [[-1.0, -1.0, -1.0], [-2.5, -9.0, -9.0], [-2.9, -9.0, -9.0]]
    mask = torch.tensor([[True] * 3, [True, False, False], [True, False, False]])
    out = choose(log_probs, [1.0, 1.0, 1.0], rate=1 / 3, unit="sequence", mask=mask)
    assert out.values.tolist() == pytest.approx([3.0, 2.5, 2.9])
    assert out.rows.tolist() == [0]
    assert out.keep.tolist() == [True, False, False]
    assert out.elements.keep.tolist() == [[True] * 3, [False] * 3, [False] * 3]
    assert out.elements.mask.tolist() == mask.tolist()


def test_the_tokens_of_a_sequence_that_do_not_count_are_not_kept_with_it():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    out = choose([[-1.0] * 3] * 2, [2.0, 1.0], rate=0.5, unit="sequence", mask=mask)
    assert out.keep.tolist() == [True, False]
    assert out.elements.keep.tolist() == [[True, False, True], [False] * 3]
    assert out.elements.weight.tolist() == [[1.0, 0.0, 1.0], [0.0] * 3]


def test_a_row_without_valid_tokens_is_not_a_unit():
    mask = torch.tensor([[True, True], [False, False]])
    out = choose([[-1.0, -1.0], [-1.0, -1.0]], [1.0, 1.0], rate=1.0, unit="sequence", mask=mask)
    assert out.mask.tolist() == [True, False]
    assert out.rows.tolist() == [0]


def test_row_masks_cover_all_tokens_of_the_row():
    mask = torch.tensor([True, False])
    out = choose([[-1.0, -1.0], [-1.0, -1.0]], [1.0, 1.0], rate=1.0, unit="token", mask=mask)
    assert out.keep.tolist() == [[True, True], [False, False]]


def test_a_custom_gate_cannot_keep_what_is_masked():
    def everything(delight, mask, generator):
        keep = torch.ones_like(mask)
        return kondo.Choice(keep, keep.float(), torch.tensor(0.0), torch.tensor(1.0), keep)

    mask = torch.tensor([True, False])
    with pytest.raises(ValueError, match="gate must not keep units that the mask leaves out"):
        choose([-1.0, -1.0], [1.0, 100.0], gate=everything, mask=mask)

    def misshapen(delight, mask, generator):
        return everything(delight, mask[:1], generator)

    with pytest.raises(ValueError, match=r"gate must return keep with one value per unit, \[2\]"):
        choose([-1.0, -1.0], [1.0, 1.0], gate=misshapen)

    def undecided(delight, mask, generator):
        return everything(delight, mask, generator)._replace(keep=delight)

    with pytest.raises(ValueError, match=r"keep of dtype torch\.bool, got torch\.float32"):
        choose([-1.0, -1.0], [1.0, 1.0], gate=undecided)


def test_hidden_nan_is_counted():
    mask = torch.tensor([True, False, True, False])
    out = choose([-1.0, NAN, -2.0, -1.0], [1.0, 1.0, 1.0, NAN], mask=mask)
    assert out.counts.hidden_nan == 2


def test_sums_that_overflow_are_no_fault():
    huge = 1.5e308
    log_probs = torch.tensor([-huge, -huge, -1.0], dtype=torch.float64)
    advantages = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    options = {"gate": kondo.Gate(rate=1.0)}
    assert kondo.select(log_probs, advantages, **options).rows.tolist() == [2]
    both = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64)
    out = kondo.select(both, torch.tensor([huge, huge / 2, 0.0], dtype=torch.float64), **options)
    assert out.rows.tolist() == [0, 1]
    assert out.counts.hidden_nan == 0


def test_infinities_of_both_signs_do_not_hide_a_nan():
    with pytest.raises(ValueError, match=r"log_prob must not hold NaN.*unit 2 \(1 in all"):
        choose([-INF, -1.0, NAN], [0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"advantages must not hold NaN or infinity.*unit 0"):
        choose([-1.0, -1.0, -1.0], [INF, -INF, 1.0])


def test_what_is_masked_may_hold_anything():
    mask = torch.tensor([True, False, True, False])
    out = choose([-1.0, NAN, -2.0, INF], [1.0, 1.0, 1.0, NAN], mask=mask)
    assert out.rows.tolist() == [2]
    assert out.values.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_infinite_surprisal_of_a_skipped_or_neutral_unit_is_fine():
    # a certain failure (-inf delight) is skipped; a zero advantage makes infinity zero
    out = choose([-INF, -INF, -1.0, -1.0], [-1.0, 0.0, 1.0, 0.5])
    assert out.rows.tolist() == [2, 3]


def test_other_signals_select_other_units():
    log_probs, advantages = [-3.0, -0.5], [0.1, 1.0]
    by = {
        name: choose(log_probs, advantages, signal=getattr(kondo.signals, name)).rows.tolist()
        for name in ("advantage", "surprisal")
    }
    assert by == {"advantage": [1], "surprisal": [0]}


def test_a_signal_may_rank_rows_by_a_rule_of_its_own():
    def mean(log_probs, advantages, *, mask):
        return kondo.delight(log_probs, advantages, mask=mask).mean(dim=1)

    log_probs, mask = [[-1.0, -1.0], [-1.5, 0.0]], torch.tensor([[True, True], [True, False]])
    options = {"unit": "sequence", "mask": mask}
    assert choose(log_probs, [1.0, 1.0], signal=mean, **options).values.tolist() == [1.0, 0.75]
    with pytest.raises(ValueError, match=r"signal must return one value per unit, \[2\]"):
        choose(log_probs, [1.0, 1.0], signal=lambda *_, mask: torch.zeros(3), **options)


# Against an oracle, for every unit and over leading dimensions.

UNITS = ("sample", "token", "sequence")
LEADS = [(), (1,), (3,), (2, 2)]


def problem(unit, lead=(), seed=0, rows=5, length=4):
    """Return log-probs, advantages and a mask, all of one shape for samples, without ties."""
    draw = torch.Generator().manual_seed(seed)
    shape = (*lead, rows) if unit == "sample" else (*lead, rows, length)
    log_probs = -torch.rand(shape, generator=draw, dtype=torch.float64) - 0.01
    advantages = torch.randn((*lead, rows), generator=draw, dtype=torch.float64)
    advantages[..., 0] *= torch.rand(lead, generator=draw).round().double()  # some are 0
    return log_probs, advantages, torch.rand(shape, generator=draw) > 0.3


def members(lead, *tensors):
    """Yield the parts of tensors that belong to one choice after another."""
    flat = [part.reshape(-1, *part.shape[len(lead) :]) for part in tensors]
    yield from zip(*flat, strict=True)


@given(
    st.sampled_from(UNITS),
    st.sampled_from(LEADS),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0.1, 0.4, 1.0]),
    st.integers(0, 99),
)
def test_every_choice_is_that_of_the_oracle(unit, lead, rows, length, rate, seed):
    log_probs, advantages, mask = problem(unit, lead, seed, rows, length)
    out = kondo.select(log_probs, advantages, gate=kondo.Gate(rate=rate), unit=unit, mask=mask)
    elements, totals = out.elements, [0] * 6
    parts = (log_probs, advantages, mask, out.values, out.mask, out.keep, out.weight)
    more = (elements.keep, elements.weight, out.kept_rows, out.price, out.rate, out.probability)
    for one in members(lead, *parts, *more):
        values, counts = oracle.unit_values(*one[:3], unit)
        keep, price = oracle.highest(values, counts, rate)
        assert_close(one[3].flatten(), torch.tensor(values))
        assert one[4].flatten().tolist() == counts
        assert one[5].flatten().tolist() == keep
        assert one[6].flatten().tolist() == one[12].flatten().tolist() == [float(k) for k in keep]
        inside = oracle.by_element([float(k) for k in keep], one[2], unit)
        assert one[7].flatten().tolist() == [bool(k) for k in inside]
        assert one[8].flatten().tolist() == inside
        kept_rows = oracle.rows_of(inside, rows)
        assert one[9].nonzero().flatten().tolist() == kept_rows
        assert_close(one[10], price)
        assert_close(one[11], sum(keep) / max(1, sum(counts)))
        found = (sum(counts), sum(keep), int(one[2].sum()), sum(map(bool, inside)))
        numbers = (*found, rows, len(kept_rows))
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        if not lead:
            assert out.rows.tolist() == kept_rows
    assert out.counts[:6] == tuple(totals)
    assert out.price.dtype == out.rate.dtype == torch.float64
    assert out.price.shape == out.rate.shape == lead


GATES = [*(name for name in entries.GATES if name != "budget"), "dense"]


def new_gate(name):
    return None if name == "dense" else entries.make_gate(name)


NAMED = [(name, unit) for name in GATES for unit in UNITS]


@pytest.mark.parametrize("lead", LEADS[1:], ids=str)
@pytest.mark.parametrize(("name", "unit"), NAMED)
def test_leading_dimensions_are_separate_choices(name, unit, lead):
    together = new_gate(name)
    alone = [new_gate(name) for _ in range(math.prod(lead))]
    for seed in range(3):  # gates that remember have a past of each member
        log_probs, advantages, mask = problem(unit, lead, seed)
        draws = torch.rand(
            problem(unit, lead)[1].shape if unit == "sequence" else log_probs.shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        out = kondo.select(
            log_probs, advantages, gate=together, unit=unit, mask=mask, generator=draws
        )
        parts = (out.keep, out.values, out.weight, out.price, out.rate, out.probability)
        given = members(lead, log_probs, advantages, mask, draws, *parts)
        for gate, (*own, draw, keep, values, weight, price, rate, probability) in zip(
            alone, given, strict=True
        ):
            one = kondo.select(
                own[0], own[1], gate=gate, unit=unit, mask=own[2], generator=draw, capacity=None
            )
            assert torch.equal(keep, one.keep)
            for ours, theirs in (
                (values, one.values),
                (weight, one.weight),
                (price, one.price),
                (rate, one.rate),
                (probability, one.probability),
            ):
                assert_close(ours, theirs)


def test_a_function_sees_the_tokens_of_a_choice_in_the_last_dimension():
    shapes = []

    def seen(values, mask, generator):
        shapes.append(list(values.shape))
        return kondo.Choice.of(mask)

    for lead in ((), (3,)):
        log_probs, advantages, mask = problem("token", lead)
        out = kondo.select(log_probs, advantages, gate=seen, unit="token", mask=mask)
        assert torch.equal(out.keep, mask)
    assert shapes == [[20], [3, 20]]


@pytest.mark.parametrize("unit", UNITS)
def test_a_choice_made_elsewhere_is_kept_where_it_counts(unit):
    log_probs, advantages, mask = problem(unit, (3,))
    shape = log_probs.shape[:2] if unit == "sequence" else log_probs.shape
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(9)) > 0.5
    choice = kondo.Choice.of(keep, dtype=torch.float64)._replace(weight=2.0 * keep)
    choice = choice._replace(price=torch.tensor([1.0, 2.0, 3.0]))
    out = kondo.select(log_probs, advantages, gate=choice, unit=unit, mask=mask)
    counts = mask.any(-1) if unit == "sequence" else mask
    assert torch.equal(out.keep, keep & counts)
    assert torch.equal(out.weight, 2.0 * (keep & counts))
    assert out.price.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("unit", UNITS)
def test_no_gate_keeps_all_that_counts(unit):
    log_probs, advantages, mask = problem(unit, (3,))
    out = kondo.select(log_probs, advantages, gate=None, unit=unit, mask=mask)
    counts = mask.any(-1) if unit == "sequence" else mask
    assert torch.equal(out.keep, counts)
    assert torch.equal(out.weight, counts.double())
    assert torch.equal(out.elements.keep, mask)
    assert out.price.tolist() == [-INF] * 3
    assert out.rate.tolist() == [1.0] * 3
    assert_close(out.values, kondo.select(log_probs, advantages, gate=kondo.Gate(rate=1.0),
                                          unit=unit, mask=mask).values)  # fmt: skip


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_one_value_per_row_stands_for_its_tokens(unit, lead):
    log_probs, advantages, mask = problem(unit, lead)
    rows = mask.any(-1)
    options = {"gate": kondo.Gate(rate=0.5), "unit": unit}
    short = kondo.select(log_probs, advantages, mask=rows, **options)
    spread = advantages.unsqueeze(-1).expand(log_probs.shape)
    full = kondo.select(
        log_probs, spread, mask=rows.unsqueeze(-1).expand(log_probs.shape), **options
    )
    thin = kondo.select(log_probs, advantages[..., None], mask=rows[..., None], **options)
    for other in (full, thin):
        assert torch.equal(short.keep, other.keep)
        assert torch.equal(short.values, other.values)


def test_densities_are_ranked_by_their_own_rule():
    log_probs, advantages = torch.tensor([-0.5, -2.0]), torch.tensor([1.0, 1.0])
    gate = kondo.UnbiasedGate(rate=1.0)
    values = kondo.select(log_probs, advantages, gate=gate, density=True).values
    assert_close(values, torch.tensor([2.0, 5.0]).sqrt())
    discrete = kondo.select(log_probs, advantages, gate=gate).values
    assert_close(discrete, 1 - log_probs.exp())


def test_draws_come_from_the_generator():
    log_probs, advantages, _ = problem("sample", rows=40)
    gate = kondo.UnbiasedGate(rate=0.3)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return kondo.select(log_probs, advantages, gate=gate, generator=generator).keep

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    draws = torch.rand(40, generator=torch.Generator().manual_seed(3))
    twice = [kondo.select(log_probs, advantages, gate=gate, generator=draws) for _ in range(2)]
    assert torch.equal(twice[0].keep, twice[1].keep)


def test_nothing_is_differentiated_and_nothing_is_written():
    log_probs, advantages, mask = problem("token")
    log_probs.requires_grad_()
    before = [part.clone() for part in (log_probs, advantages, mask)]
    out = kondo.select(log_probs, advantages, gate=kondo.Gate(rate=0.5), unit="token", mask=mask)
    assert not any(part.requires_grad for part in (out.values, out.weight, out.price))
    after = (log_probs, advantages, mask)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_are_at_least_float32(dtype):
    log_probs, advantages, _ = problem("sample")
    out = kondo.select(log_probs.to(dtype), advantages.to(dtype), gate=kondo.Gate(rate=0.5))
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    assert out.values.dtype == out.weight.dtype == wide


@given(st.sampled_from(UNITS), st.integers(0, 99), st.data())
def test_permuting_rows_permutes_the_selection(unit, seed, data):
    log_probs, advantages, mask = problem(unit, (2,), seed)
    order = torch.tensor(data.draw(st.permutations(range(5))))
    options = {"gate": kondo.Gate(rate=0.4), "unit": unit}
    one = kondo.select(log_probs, advantages, mask=mask, **options)
    other = kondo.select(log_probs[:, order], advantages[:, order], mask=mask[:, order], **options)
    assert torch.equal(one.keep[:, order], other.keep)
    assert_close(one.price, other.price)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("gate", [kondo.Gate(rate=0.4), kondo.UnbiasedGate(rate=0.5)])
def test_a_loss_by_its_rows_and_weights_has_the_gradient_of_the_step(unit, gate):
    """What an integration does with a selection is what `kondo.backward` does."""
    known, advantages, mask = problem(unit)
    draws = torch.Generator()
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = kondo.select(
        known, advantages, gate=gate, unit=unit, mask=mask, generator=draws.manual_seed(4)
    )
    weight = out.elements.weight[out.rows]
    loss = oracle.gated_loss(factor * known[out.rows], advantages[out.rows], weight)
    (loss / mask.sum()).backward()
    expected, factor.grad = factor.grad, None
    kondo.backward(
        lambda rows: factor * rows,
        known,
        advantages,
        gate=gate,
        unit=unit,
        mask=mask,
        screen=known,
        options=kondo.Options(generator=draws.manual_seed(4)),
    )
    assert_close(factor.grad, expected)


# Nothing is read: what happens on a GPU, on CPU tensors that nobody may look at.


def unread(log_probs, advantages, gate, *, unit, mask=None, draws=None, capacity=None):
    """Select as on a GPU; fail where the host would wait for a value."""
    chooser = None if gate is None else as_gate(gate)
    with NoReads():
        units = units_of(chooser, log_probs, advantages, unit, mask)
        return choose_units(units, chooser, draws, capacity=capacity, reads=False)


def draws_like(unit, log_probs, seed=0):
    shape = log_probs.shape[:-1] if unit == "sequence" else log_probs.shape
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize(("name", "unit"), NAMED)
def test_a_selection_reads_nothing_before_it_is_asked_and_is_the_same(name, unit, lead):
    gates = [new_gate(name) for _ in range(2)]
    for seed in range(2):
        log_probs, advantages, mask = problem(unit, lead, seed)
        draws = draws_like(unit, log_probs, seed)
        out = unread(log_probs, advantages, gates[0], unit=unit, mask=mask, draws=draws)
        with NoReads():
            assert out.elements.weight.shape == log_probs.shape
            assert out.kept_rows.shape == advantages.shape
        other = kondo.select(
            log_probs, advantages, gate=gates[1], unit=unit, mask=mask, generator=draws
        )
        assert torch.equal(out.keep, other.keep)
        assert out.counts == pytest.approx(other.counts, nan_ok=True)
        if not lead:
            assert torch.equal(out.rows, other.rows)


def broken(unit, lead, kind, place):
    """Return a batch with one fault in the unit at `place`, which counts."""
    log_probs, advantages, mask = problem(unit, lead)
    where = place if unit == "sample" else (*place, 1)
    mask[where] = True
    if kind == "log-prob":
        log_probs[where] = NAN
    elif kind == "infinite advantage":
        advantages[place] = INF
    else:
        advantages[place] = NAN
    return log_probs, advantages, mask


@pytest.mark.parametrize("kind", ["log-prob", "advantage", "infinite advantage"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", GATES)
def test_a_nan_that_nobody_reads_is_the_weight_of_its_unit_and_all_that_is_kept(name, unit, kind):
    log_probs, advantages, mask = broken(unit, (2,), kind, (1, 2))
    out = unread(
        log_probs,
        advantages,
        new_gate(name),
        unit=unit,
        mask=mask,
        draws=draws_like(unit, log_probs),
    )
    of_row = out.weight[1, 2].isnan()
    assert bool(of_row.any())
    hit = torch.zeros_like(out.keep)
    hit[1, 2] = of_row
    if unit == "token":  # an advantage is that of all tokens of its row
        expected = torch.arange(4) == 1 if kind == "log-prob" else mask[1, 2]
        assert torch.equal(of_row, expected)
    assert torch.equal(out.weight[1].isnan(), hit[1])
    assert torch.equal(out.keep[1], hit[1])
    assert torch.equal(out.weight[1] != 0, hit[1])  # NaN is not 0
    # The other choice is that of a batch without a fault.
    fine = problem(unit, (2,))
    other = unread(
        *fine[:2],
        new_gate(name),
        unit=unit,
        mask=fine[2],
        draws=draws_like(unit, log_probs),
    )
    assert torch.equal(out.keep[0], other.keep[0])
    assert_close(out.weight[0], other.weight[0])
    with pytest.raises(ValueError, match="must not hold NaN"):
        out.counts  # noqa: B018
    with pytest.raises(ValueError, match="must not hold NaN"):
        out.rows  # noqa: B018


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("name", entries.REMEMBERS)
def test_a_nan_that_nobody_reads_leaves_a_gate_as_it_was(name, lead, unit):
    gate, untouched = (new_gate(name) for _ in range(2))

    def select(own, seed, fault=False):
        given = problem(unit, lead, seed)
        if fault:
            given = broken(unit, lead, "log-prob", (*[0] * len(lead), 2))
            for member in range(1, math.prod(lead)):
                given[0][member, 0] = NAN  # in every choice
                given[2][member, 0] = True
        draws = draws_like(unit, given[0], seed)
        return unread(*given[:2], own, unit=unit, mask=given[2], draws=draws)

    select(gate, 0, fault=True)  # also before anything else
    for seed in range(4):
        before = str(gate.state_dict() | {"calls": 0})
        assert bool(select(gate, 9, fault=True).weight.isnan().any())
        if seed:
            assert str(gate.state_dict() | {"calls": 0}) == before
        ours, theirs = select(gate, seed), select(untouched, seed)
        assert torch.equal(ours.keep, theirs.keep)
        assert torch.equal(ours.price, theirs.price)
    if gate.window:
        assert str(gate.state_dict()) == str(untouched.state_dict())


def test_a_nan_of_a_signal_is_the_weight_of_its_unit():
    def odd(log_probs, advantages, *, mask=None):
        return torch.where(log_probs < -1.5, NAN, advantages)

    log_probs, advantages = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, 1.0, 2.0])
    out = unread(log_probs, advantages, kondo.Gate(rate=1.0, signal=odd), unit="sample")
    assert out.keep.tolist() == [False, True, False]
    assert out.weight.isnan().tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"signal must not return NaN for a unit that counts.*1"):
        out.rows  # noqa: B018


def test_a_nan_that_does_not_count_is_no_fault_where_nobody_reads():
    mask = torch.tensor([True, False, True])
    log_probs, advantages = torch.tensor([-1.0, NAN, -2.0]), torch.tensor([1.0, NAN, 0.1])
    out = unread(log_probs, advantages, kondo.Gate(rate=0.5), unit="sample", mask=mask)
    assert out.rows.tolist() == [0]
    assert out.counts.hidden_nan == 1


@pytest.mark.parametrize("name", GATES)
def test_a_nan_on_the_cpu_is_refused_at_the_call_and_the_gate_stays(name):
    gate = new_gate(name)
    before = str(gate.state_dict()) if isinstance(gate, kondo.BaseGate) else None
    log_probs, advantages, mask = broken("token", (2,), "log-prob", (1, 2))
    with pytest.raises(ValueError, match=r"log_prob must not hold NaN.*unit \(1, 2, 1\)"):
        kondo.select(log_probs, advantages, gate=gate, unit="token", mask=mask)
    assert before is None or str(gate.state_dict()) == before


@pytest.mark.parametrize(
    ("log_probs", "advantages", "options", "message"),
    [
        ([[-1.0]], [[1.0]], {"unit": None}, r"unit must be given for log-probs of shape \[1, 1\]"),
        ([[-1.0]], [1.0], {}, r'advantages must have shape \[1, 1\] for unit "sample", got \[1\]'),
        (-1.0, [1.0], {}, r'unit "sample" needs log-probs of shape \[N\], got \[\]'),
        ([1, 2], [1.0, 1.0], {}, "log_probs must be floating point, got torch.int64"),
        ([0.5, -1.0], [1.0, 1.0], {}, "log_probs must not exceed 0, got an excess of 0.5"),
        ([-1.0], [1.0], {"gate": 0.1}, r"gate must be a kondo.BaseGate.*UnbiasedGate\(rate=0.1\)"),
        ([-1.0], [1.0], {"capacity": 0}, "capacity must lie between 1 and the 1 rows.* got 0"),
        ([-1.0], [1.0], {"capacity": 2}, "capacity must lie between 1 and the 1 rows.* got 2"),
        ([-1.0], [1.0], {"capacity": 1.0}, "capacity must be a whole number, got 1.0"),
        ([-1.0], [1.0], {"density": 1}, "density must be True or False, got 1"),
        ([-1.0], [1.0], {"generator": 3}, "generator must be a torch.Generator.*got int"),
        (
            [-1.0, -1.0],
            [1.0, 1.0],
            {"generator": torch.rand(3)},
            r"generator must hold one draw per unit, \[2\], got \[3\]",
        ),
        (
            [[-1.0, -1.0]],
            [[1.0, 1.0]],
            {"mask": torch.ones(1, dtype=torch.bool)},
            r'mask must have shape \[1, 2\] for unit "sample", got \[1\]',
        ),
        ([-1.0], [1.0], {"unit": "token"}, r'unit "token" needs log-probs of shape \[N, T\]'),
        ([-1.0], [1.0], {"unit": "word"}, 'unit must be "sample", "token" or "sequence"'),
        ([-1.0, -1.0], [1.0], {}, r"advantages must have shape \[2\].*got \[1\]"),
        ([-1.0, -1.0], [1, 2], {}, "advantages must be floating point, got torch.int64"),
        ([-1.0, NAN], [1.0, 1.0], {}, "log_prob must not hold NaN.*unit 1"),
        ([[-1.0, NAN]], [1.0], {"unit": "token"}, r"log_prob must not hold NaN.*unit \(0, 1\)"),
        ([-1.0, -1.0], [1.0, NAN], {}, "advantages must not hold NaN or infinity.*unit 1"),
        ([-1.0, -1.0], [INF, 1.0], {}, "advantages must not hold NaN or infinity.*unit 0"),
        ([-INF, -1.0], [1.0, 1.0], {}, "signal must be finite in kept units, got inf in unit 0 "),
        ([-1.0], [1.0], {"mask": torch.ones(1)}, "mask must be a bool tensor.*torch.float32"),
        ([-1.0], [1.0], {"mask": torch.ones(2).bool()}, r"mask must have shape \[1\].*got \[2\]"),
    ],
)
def test_bad_input_is_named(log_probs, advantages, options, message):
    with pytest.raises(ValueError, match=message):
        choose(log_probs, advantages, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("unit", ["sample", "token", "sequence"])
@pytest.mark.parametrize("price", [0.5, 1e9])
def test_a_selection_on_cuda_is_that_on_the_cpu(unit, price):
    generator = torch.Generator().manual_seed(0)
    shape = (50,) if unit == "sample" else (50, 7)
    log_probs = -torch.rand(shape, generator=generator) - 0.01
    advantages = torch.randn(50, generator=generator)
    mask = torch.rand(shape, generator=generator) > 0.3
    outs = [
        kondo.select(
            *(part.to(device) for part in (log_probs, advantages)),
            gate=kondo.Gate(price=price),
            unit=unit,
            mask=mask.to(device),
        )
        for device in ("cpu", "cuda")
    ]
    for name in ("keep", "weight", "rows"):
        here, there = (getattr(out, name) for out in outs)
        assert there.is_cuda
        assert torch.equal(here, there.cpu())
    assert outs[0].counts == outs[1].counts


def test_nothing_is_differentiated():
    def product(log_probs, advantages, *, mask=None):  # as somebody writes it who forgets to detach
        return -log_probs * advantages

    given = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, 2.0], requires_grad=True)
    out = kondo.select(given, advantages, gate=kondo.Gate(rate=0.5, signal=product))
    assert not out.values.requires_grad
    assert not out.weight.requires_grad
