"""What holds for every gate: one suite, which a gate joins by a line in `core.entries.GATES`."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given

import kondo
import zoo
from core.entries import GATES, REMEMBERS, make_gate
from core.strategies import masked
from core.test_gates_state import batches, through_disk
from kondo.core.fingerprint import fingerprint
from kondo.lm import BudgetGate
from no_reads import NoReads
from steps import run_step
from tolerances import assert_close

NAN = math.nan
P, M = 5, 24

every_gate = pytest.mark.parametrize("name", GATES)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def calls(count):
    """Return values with ties and zeros, masks that leave one member nothing, and draws."""
    generator, found = seeded(), []
    for _ in range(count):
        values = torch.randint(-4, 5, (P, M), generator=generator) / 2
        mask = torch.rand(P, M, generator=generator) < 0.8
        mask[1] = False
        values[2] = 0.0
        found.append((values, mask, torch.rand(P, M, generator=generator, dtype=torch.float64)))
    return found


def assert_same(ours, theirs, *, exact=True):
    for name, one, other in zip(ours._fields, ours, theirs, strict=True):
        assert torch.equal(one, other) or not exact, name
        assert_close(one, other)


def test_a_gate_is_a_signal_a_choice_and_its_state():
    public = {name for name in vars(kondo.BaseGate) if not name.startswith("_")}
    assert public == {"signal", "choose", "state_dict", "load_state_dict"}


# What is chosen.


@every_gate
@given(units=masked())
def test_a_choice_agrees_with_itself(name, units):
    values, mask, _ = units
    gate, generator = make_gate(name, mask.shape), seeded()
    for _ in range(2):
        out = gate(values, mask, generator)
        assert torch.equal(out.keep, out.weight > 0)
        assert ((out.probability >= 0) & (out.probability <= 1)).all()
        assert (out.probability[out.keep] > 0).all()
        assert out.keep[out.probability == 1].all()
        worthless = ~mask | (values == 0)
        assert not out.keep[worthless].any()
        assert not out.probability[worthless].any()
        number = int(mask.sum())
        assert_close(out.rate, out.keep.sum().item() / number if number else 0.0)
        weight, chance = out.weight[out.keep], out.probability[out.keep]
        assert (weight == 1).all() or torch.equal(weight, 1 / chance)
        assert not out.price.isnan()
        if not kondo.adapters.adapter_of(gate).draws:
            assert torch.equal(out.probability, out.keep.to(out.probability.dtype))


@every_gate
@given(units=masked())
def test_what_does_not_count_does_not_matter(name, units):
    values, mask, dirty = units
    clean, other = (make_gate(name, mask.shape) for _ in range(2))
    generators = seeded(), seeded()
    for _ in range(2):
        ours = clean(values, mask, generators[0])
        assert_same(ours, other(dirty, mask, generators[1]))


@every_gate
@pytest.mark.parametrize("nothing", ["empty", "masked", "zero"])
def test_where_nothing_is_worth_anything_nothing_is_kept(name, nothing):
    values = {"empty": torch.ones(0), "masked": torch.full((12,), NAN)}.get(
        nothing, torch.zeros(12)
    )
    gate = make_gate(name, values.shape)
    for _ in range(3):
        out = gate(values, torch.full(values.shape, nothing != "masked"), seeded())
        for part in (out.keep, out.weight, out.probability):
            assert part.shape == values.shape
            assert not part.any()
        assert out.rate.item() == 0.0
        assert not out.price.isnan()


@every_gate
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types_and_shapes(name, dtype):
    values = torch.randn(12, generator=seeded()).to(dtype).requires_grad_()
    out = make_gate(name, (12,))(values, generator=seeded())
    assert out.keep.dtype == torch.bool
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.weight.dtype == out.probability.dtype == wide
    assert out.price.dtype == out.rate.dtype == torch.float64
    assert out.price.shape == out.rate.shape == ()
    assert out.keep.shape == out.weight.shape == out.probability.shape == (12,)
    assert not any(part.requires_grad for part in out)


@every_gate
def test_values_in_any_shape_are_one_choice_and_stay_as_they_are(name):
    values = torch.randn(3, 4, generator=seeded())
    before, mask = values.clone(), torch.tensor([True, False, True])
    if name == "budget":
        pytest.skip("it is bound to rows: [3, 4] are their tokens")
    shaped = make_gate(name)(values, mask, seeded(1))
    flat = make_gate(name)(values.flatten(), mask.repeat_interleave(4), seeded(1))
    assert_same(flat.reshape(values.shape), shaped)
    assert torch.equal(values, before)


@every_gate
def test_nan_in_a_unit_that_counts_is_named_and_leaves_no_trace(name):
    gate = make_gate(name, (6,))
    gate(torch.arange(1.0, 7.0), generator=seeded())
    before = str(gate.state_dict())
    values = torch.tensor([1.0, NAN, 0.0, 2.0, NAN, NAN])
    mask = torch.tensor([True, False, True, True, True, True])
    with pytest.raises(ValueError, match=r"values must not be NaN.*NaN in unit 4 \(2 in all\)"):
        gate(values, mask)
    assert str(gate.state_dict()) == before


# Many choices at once, on any device, asking it for nothing.


@every_gate
def test_many_members_choose_as_each_would_alone(name):
    if name == "budget":
        pytest.skip("ties fall otherwise where it may read: see tests/lm/test_budget.py")
    together, alone = make_gate(name, (P, M)), [make_gate(name, (M,)) for _ in range(P)]
    for values, mask, draws in calls(7):
        out = together.choose(values, mask, draws)
        parts = [
            single.choose(values[member], mask[member], draws[member])
            for member, single in enumerate(alone)
        ]
        assert out.price.shape == out.rate.shape == (P,)
        for field, found, *expected in zip(out._fields, out, *parts, strict=True):
            stacked = torch.stack(expected)
            if found.dtype == torch.bool:
                assert torch.equal(found, stacked), field
            else:
                assert_close(found, stacked)


@every_gate
def test_no_choice_reads_from_the_device(name):
    gate = make_gate(name, (P, M))
    for values, mask, _ in calls(3):
        with NoReads():
            gate.choose(values, mask)
            gate.choose(values, mask, seeded())


def test_the_check_would_find_a_read():
    with NoReads(), pytest.raises(AssertionError, match="reads from the device"):
        float(torch.ones(3).sum())
    with NoReads(), pytest.raises(AssertionError, match="reads from the device"):
        _ = torch.ones(3)[torch.ones(3, dtype=torch.bool)]


@every_gate
@pytest.mark.parametrize("size", [300, 70_001])  # small batches may be chosen on the CPU
def test_every_device_decides_alike(name, size, device):
    values = torch.randint(-4, 5, (2, size), generator=seeded()) / 2
    here, there = (make_gate(name, (size,)) for _ in range(2))
    for row in values:
        expected, out = here(row, generator=seeded(1)), there(row.to(device), generator=seeded(1))
        assert out.keep.device.type == out.weight.device.type == device.type
        assert_close(out.probability, expected.probability)
        assert_close(out.price, expected.price, torch.float32)
        if not kondo.adapters.adapter_of(here).draws:  # a last digit may turn a draw
            assert torch.equal(out.keep.cpu(), expected.keep)


@every_gate
def test_it_runs_where_only_deterministic_kernels_may(name, device):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert make_gate(name, (50,))(torch.linspace(-1.0, 1.0, 50, device=device)).keep.any()
    finally:
        torch.use_deterministic_algorithms(before)


# Draws.


@every_gate
def test_a_generator_decides_all_that_is_drawn(name):
    values, default = torch.randn(200, generator=seeded()), torch.get_rng_state()
    generators = [seeded(seed) for seed in (5, 5, 6)]
    states = [generator.get_state() for generator in generators]
    first, second, other = (
        make_gate(name, (200,))(values, None, generator) for generator in generators
    )
    assert_same(first, second)
    assert torch.equal(torch.get_rng_state(), default)
    drawn = bool(((first.probability > 0) & (first.probability < 1)).any())
    assert torch.equal(first.keep, other.keep) != drawn
    if not kondo.adapters.adapter_of(make_gate(name, (200,))).draws:
        assert not drawn
        for generator, state in zip(generators, states, strict=True):
            assert torch.equal(generator.get_state(), state)


# Memory and words.


@every_gate
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_resumed_gate_decides_as_if_never_stopped(name, stop):
    gate, generator = make_gate(name, (17,)), seeded(1)
    for values in batches(15)[:stop]:
        gate(values, generator=generator)
    resumed, resumed_generator = make_gate(name, (17,)), torch.Generator()
    saved = through_disk({"gate": gate.state_dict(), "generator": generator.get_state()})
    resumed.load_state_dict(saved["gate"])
    resumed_generator.set_state(saved["generator"])
    for values in batches(15)[stop:]:
        assert_same(gate(values, generator=generator), resumed(values, generator=resumed_generator))


@every_gate
def test_only_what_remembers_has_a_state_and_it_matters(name):
    gate, fresh = (make_gate(name, (17,)) for _ in range(2))
    assert kondo.adapters.adapter_of(gate).remembers == (name in REMEMBERS)
    before = fingerprint(gate)
    for values in batches(9):
        gate(values, generator=seeded(1))
    last = 5 * torch.arange(-8.0, 9.0)
    out, other = (each(last, generator=seeded(1)) for each in (gate, fresh))
    if name in REMEMBERS:
        assert not (out.price.equal(other.price) and out.probability.equal(other.probability))
        assert fingerprint(gate) != before  # ranks must agree on the past, too
    else:
        assert gate.state_dict() == {}
        assert_same(out, other)
        assert fingerprint(gate) == before


@every_gate
def test_a_state_of_something_else_is_refused(name):
    with pytest.raises(ValueError, match="state must"):
        make_gate(name, (6,)).load_state_dict({"another": 1})


@every_gate
def test_gates_built_alike_have_the_same_words_and_can_be_copied(name):
    gate, other = (make_gate(name, (6,)) for _ in range(2))
    words = fingerprint(gate)
    assert words == fingerprint(other) == fingerprint(copy.deepcopy(gate))
    assert " at 0x" not in words
    entry = GATES[name]
    if isinstance(entry, str):
        known = vars(kondo) | {"__builtins__": {}}
        assert fingerprint(eval(repr(gate), known)) == words  # the repr is the call that makes it
        assert fingerprint(kondo.parse_gate(gate)) == words
        assert fingerprint(pickle.loads(pickle.dumps(gate))) == words


# In a step.


@every_gate
@pytest.mark.parametrize("policy", ["mlp", "lstm"])
def test_micro_batches_change_nothing(name, policy):
    gradients = []
    for micro_batch in (None, 1, 3):
        module, log_prob, batch = zoo.build(policy)
        advantages = torch.linspace(-1.0, 1.2, zoo.N, dtype=torch.float64)
        gate = BudgetGate(budget=0.5) if name == "budget" else make_gate(name)
        if name == "budget":
            gate = gate.for_rows(torch.ones(zoo.shape(policy)[0], 1, dtype=torch.bool))
        report = run_step(
            log_prob,
            batch,
            advantages,
            gate=gate,
            unit="sequence" if policy == "lstm" else "sample",
            generator=seeded(3),
            micro_batch=micro_batch,
        )
        assert 0 < report.kept < zoo.N
        assert report.rows_trained == report.kept
        assert report.calls == -(-report.kept // (micro_batch or zoo.N))
        gradients.append([parameter.grad for parameter in module.parameters()])
    for other in gradients[1:]:
        for ours, theirs in zip(gradients[0], other, strict=True):
            assert_close(theirs, ours)
