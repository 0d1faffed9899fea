import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo.core.contract import as_gate
from kondo.engine.select import select

NAN, INF = math.nan, math.inf


def choose(log_probs, advantages, rate=0.5, **options):
    options = {"unit": "sample"} | options
    signal = options.pop("signal", kondo.delight)
    options["gate"] = as_gate(options.get("gate") or kondo.Gate(rate=rate, signal=signal))
    return select(torch.tensor(log_probs), torch.tensor(advantages), **options)


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
    assert out.keep.tolist() == [[True] * 3, [False] * 3, [False] * 3]


def test_a_row_without_valid_tokens_is_not_a_unit():
    mask = torch.tensor([[True, True], [False, False]])
    out = choose([[-1.0, -1.0], [-1.0, -1.0]], [1.0, 1.0], rate=1.0, unit="sequence", mask=mask)
    assert out.unit_mask.tolist() == [True, False]
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
    assert select(log_probs, advantages, **options).rows.tolist() == [2]
    both = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64)
    out = select(both, torch.tensor([huge, huge / 2, 0.0], dtype=torch.float64), **options)
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


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 99))
def test_selection_is_consistent(num_rows, length, rate, seed):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(num_rows, length, generator=generator) - 0.01
    advantages = torch.randn(num_rows, generator=generator)
    mask = torch.rand(num_rows, length, generator=generator) > 0.3
    for unit in ("token", "sequence"):
        gate = kondo.Gate(rate=rate)
        out = select(log_probs, advantages, gate=gate, unit=unit, mask=mask)
        assert not bool((out.keep & ~mask).any())
        assert out.rows.tolist() == [i for i, row in enumerate(out.keep.tolist()) if any(row)]
        assert torch.equal(out.weight != 0, out.keep)
        parts = (out.unit_mask, out.choice.keep, out.mask, out.keep)
        assert out.counts[:4] == tuple(int(part.sum()) for part in parts)
        if unit == "sequence":
            assert all(torch.equal(out.keep[i], mask[i]) for i in out.rows.tolist())


@pytest.mark.parametrize(
    ("log_probs", "advantages", "options", "message"),
    [
        ([[-1.0]], [1.0], {}, r'unit "sample" needs log-probs of shape \[N\], got \[1, 1\]'),
        ([-1.0], [1.0], {"unit": "token"}, r'unit "token" needs log-probs of shape \[N, T\]'),
        ([-1.0], [1.0], {"unit": "word"}, 'unit must be "sample", "token" or "sequence"'),
        ([-1.0, -1.0], [1.0], {}, r"advantages must have shape \[2\].*got \[1\]"),
        ([-1.0, -1.0], [1, 2], {}, "advantages must be floating point, got torch.int64"),
        ([-1.0, NAN], [1.0, 1.0], {}, "log_prob must not hold NaN.*unit 1"),
        ([[-1.0, NAN]], [1.0], {"unit": "token"}, r"log_prob must not hold NaN.*unit \(0, 1\)"),
        ([-1.0, -1.0], [1.0, NAN], {}, "advantages must not hold NaN or infinity.*unit 1"),
        ([-1.0, -1.0], [INF, 1.0], {}, "advantages must not hold NaN or infinity.*unit 0"),
        ([-INF, -1.0], [1.0, 1.0], {}, "signal must be finite in kept units, got unit 0"),
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
        select(
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
