"""The drop-in's functions and gate against the installed original, bit for bit on the CPU."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import kondo_gate as original
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo.integrations import kondo_gate as ours
from tolerances import assert_close

NAMES = [
    "KondoGate",
    "KondoGateConfig",
    "KondoGateOutput",
    "KondoTrainer",
    "dg_loss",
    "expected_confidence_baseline",
    "pg_loss",
]

seeds = st.integers(0, 2**31)
configs = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-3, 0.1, 1.0, 50.0]),
        "hard": st.booleans(),
        "deterministic": st.booleans(),
    }
).flatmap(
    lambda options: st.one_of(
        st.sampled_from([1e-3, 0.03, 0.3, 0.5, 0.7, 1.0]).map(
            lambda rate: {"gate_rate": rate, **options}
        ),
        st.sampled_from([-1.0, 0.0, 0.5, 1e6]).map(
            lambda price: {"gate_rate": None, "price": price, **options}
        ),
    )
)


def values(kind, shape, dtype=torch.float32):
    """Normal draws, draws with many ties and zeros, or zeros."""
    if kind == "zero":
        return torch.zeros(shape, dtype=dtype)
    if kind == "ties":
        return torch.randint(-1, 2, shape).to(dtype)
    return torch.randn(shape).to(dtype)


kinds = st.sampled_from(["normal", "normal", "ties", "zero"])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def batches(draw):
    """logits, actions, advantages and a mask of every kind the original takes."""
    torch.manual_seed(draw(seeds))
    rows, tokens, actions = (
        draw(st.integers(1, 7)),
        draw(st.integers(0, 5)),
        draw(st.integers(1, 6)),
    )
    shape = (rows, tokens) if tokens else (rows,)
    logits = values(draw(kinds), (*shape, actions), draw(dtypes))
    advantages = values(draw(kinds), shape, draw(dtypes))
    if tokens and draw(st.booleans()):
        advantages = advantages[:, :1]  # broadcast over the tokens of a row
    mask = None
    how = draw(st.sampled_from(["none", "full", "some", "empty", "rows", "weights"]))
    if how != "none":
        mask = torch.rand(rows, tokens or 3)
        mask = {
            "full": torch.ones_like(mask),
            "some": (mask < 0.6).float(),
            "empty": torch.zeros_like(mask),
            "rows": (mask[:, :1] < 0.5).float().expand_as(mask),
            "weights": mask,
        }[how]
        if how != "weights":
            mask = mask.to(draw(st.sampled_from([torch.float32, torch.int64, torch.bool])))
    return logits, torch.randint(actions, shape), advantages, mask


def assert_same(got, expected):
    """Fail unless two tensors agree in every bit, the dtype and whether they are differentiated."""
    if expected is None:
        assert got is None
        return
    assert got.dtype == expected.dtype
    assert got.requires_grad == expected.requires_grad
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_outputs(got, expected):
    for field in dataclasses.fields(original.KondoGateOutput):
        assert_same(getattr(got, field.name), getattr(expected, field.name))


def run_with_seed(call, seed):
    """Return what the call returned and the random state it left behind."""
    torch.manual_seed(seed)
    return call(), torch.get_rng_state()


@given(batches(), configs, seeds)
def test_forward_is_the_original(batch, config, seed):
    logits, actions, advantages, mask = batch
    outputs, states, gradients = [], [], []
    for module in (ours, original):
        leaf = logits.clone().requires_grad_()
        gate = module.KondoGate(module.KondoGateConfig(**config))
        output, state = run_with_seed(lambda g=gate, x=leaf: g(x, actions, advantages, mask), seed)
        output.gated_policy_loss.backward()
        outputs.append(output)
        states.append(state)
        gradients.append(leaf.grad)
    assert_same_outputs(*outputs)
    assert_same(*gradients)
    assert torch.equal(*states)


@given(kinds, kinds, st.sampled_from([(1,), (9,), (64,), (4, 5)]), configs, seeds, st.booleans())
def test_compute_gate_is_the_original(log_kind, kind, shape, config, seed, explicit):
    torch.manual_seed(seed)
    log_probs, advantages = values(log_kind, shape), values(kind, shape)
    delight = values(kind, shape).requires_grad_() if explicit else None
    outputs = []
    for module in (ours, original):
        gate = module.KondoGate(module.KondoGateConfig(**config))
        outputs.append(
            run_with_seed(lambda g=gate: g.compute_gate(log_probs, advantages, delight), seed)
        )
    assert_same_outputs(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


@given(seeds, kinds, dtypes)
def test_compute_delight_is_the_original(seed, kind, dtype):
    torch.manual_seed(seed)
    log_probs = values("normal", (6,), dtype).requires_grad_()  # some exceed 0: nothing is clamped
    advantages = values(kind, (6,)).requires_grad_()
    assert_same(
        ours.KondoGate().compute_delight(log_probs, advantages),
        original.KondoGate().compute_delight(log_probs, advantages),
    )


@given(batches(), st.sampled_from([0.1, 1.0, 7.0]))
def test_losses_are_the_originals(batch, eta):
    logits, actions, advantages, _ = batch
    advantages = advantages.clone().requires_grad_()
    results = []
    for module in (ours, original):
        leaf = logits.clone().requires_grad_()
        pg = module.pg_loss(leaf, actions, advantages)
        dg, gate = module.dg_loss(leaf, actions, advantages, eta)
        (pg + dg).backward()
        results.append((pg, dg, gate.detach(), leaf.grad))
    for got, expected in zip(*results, strict=True):
        assert_same(got, expected)
    assert advantages.grad is None


@given(st.integers(1, 5), st.integers(1, 5), seeds, dtypes)
def test_baseline_is_the_original(rows, actions, seed, dtype):
    torch.manual_seed(seed)
    probs = torch.randn(rows, actions).softmax(-1).to(dtype).requires_grad_()
    assert_same(
        ours.expected_confidence_baseline(probs), original.expected_confidence_baseline(probs)
    )


def test_dg_loss_refuses_a_temperature_that_cannot_be_right():
    with pytest.raises(ValueError, match="eta must be > 0"):
        ours.dg_loss(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), torch.ones(1), eta=0.0)


@pytest.mark.parametrize(
    "config",
    [
        {"gate_rate": 0.5, "price": 1.0},
        {"gate_rate": 0.0},
        {"gate_rate": -0.1},
        {"gate_rate": 1.5},
        {"temperature": 0.0},
        {"temperature": -1.0},
    ],
)
def test_bad_options_raise_where_and_as_the_original_does(config):
    with pytest.raises(ValueError) as expected:
        original.KondoGate(original.KondoGateConfig(**config))
    phrase = {"Specify": "either gate_rate or price"}.get(
        str(expected.value).split()[0], str(expected.value).split(".")[0]
    )
    with pytest.raises(ValueError) as got:
        ours.KondoGate(ours.KondoGateConfig(**config))
    assert phrase in str(got.value)


def test_neither_rate_nor_price_raises_at_once():
    # The original fails only when the gate is used, with torch's "Could not infer dtype".
    with pytest.raises(ValueError, match="either gate_rate or price"):
        ours.KondoGate(ours.KondoGateConfig(gate_rate=None))


def test_options_may_change_between_calls():
    """A schedule writes to the config, as with the original."""
    gate = ours.KondoGate()
    log_probs, advantages = torch.linspace(-3, 0, 11), torch.ones(11)
    gate.config.gate_rate = 0.5
    assert int(gate.compute_gate(log_probs, advantages).gate_weights.sum()) == 6


def test_logits_of_other_dimensions_raise():
    with pytest.raises(ValueError, match="Expected logits of dim 2 or 3"):
        ours.KondoGate()(torch.randn(10), torch.tensor(0), torch.randn(1))


def test_nan_in_padding_does_not_leak():
    torch.manual_seed(0)
    logits, advantages = torch.randn(4, 3, 5), torch.randn(4, 3)
    actions, mask = torch.randint(5, (4, 3)), torch.ones(4, 3)
    mask[:, -1] = 0
    expected = original.KondoGate()(logits, actions, advantages, mask)
    logits[:, -1], advantages[:, -1] = torch.nan, torch.nan
    logits.requires_grad_()
    got = ours.KondoGate()(logits, actions, advantages, mask)
    assert_same(got.gated_policy_loss.detach(), expected.gated_policy_loss)
    got.gated_policy_loss.backward()
    assert bool(logits.grad[:, :-1].isfinite().all())


# The (1 - rate)-quantile for batches torch.quantile refuses.


@given(st.integers(1, 300), st.floats(0, 1), seeds, kinds)
def test_sorted_quantile_follows_torch_quantile(size, q, seed, kind):
    torch.manual_seed(seed)
    sample = values(kind, (size,), torch.float64)
    assert_close(ours._sorted_quantile(sample, q), torch.quantile(sample, q))


def test_sorted_quantile_of_nan_is_nan():
    sample = torch.tensor([1.0, torch.nan, 0.0])
    assert bool(ours._sorted_quantile(sample, 0.5).isnan())
    assert bool(torch.quantile(sample, 0.5).isnan())


def test_gate_takes_more_values_than_torch_quantile_does():
    log_probs = -torch.arange(1000.0).repeat(16_778)  # 1000 values, each held by as many units
    with pytest.raises(RuntimeError, match="too large"):
        original.KondoGate().compute_gate(log_probs, log_probs.new_ones(1))
    out = ours.KondoGate(ours.KondoGateConfig(gate_rate=0.25)).compute_gate(
        log_probs, log_probs.new_ones(1)
    )
    # Rank 0.75 * (16778000 - 1) = 12583499.25: a quarter of the way from the last 749 to a 750.
    assert float(out.price) == 749.25
    assert int(out.gate_weights.sum(dtype=torch.float64)) == log_probs.numel() // 4


def test_gate_beyond_the_limit_equals_the_gate_below_it(monkeypatch):
    torch.manual_seed(0)
    log_probs, advantages = torch.randn(102), torch.randn(102)
    gate = ours.KondoGate(ours.KondoGateConfig(gate_rate=0.25))  # rank 75.75: between two values
    below = gate.compute_gate(log_probs, advantages)
    monkeypatch.setattr(ours, "_QUANTILE_LIMIT", 101)
    beyond = gate.compute_gate(log_probs, advantages)
    assert_close(beyond.price, below.price)
    assert torch.equal(beyond.gate_weights, below.gate_weights)


# The public surface.


def _parameters(callable_):
    return [(p.name, p.kind, p.default) for p in inspect.signature(callable_).parameters.values()]


def test_all_names_are_there():
    assert sorted(ours.__all__) == NAMES
    assert all(hasattr(original, name) for name in NAMES)


@pytest.mark.parametrize(
    "path",
    [
        *NAMES,
        "KondoGate.compute_delight",
        "KondoGate.compute_gate",
        "KondoGate.forward",
        "KondoTrainer.step",
    ],
)
def test_signatures_are_the_originals(path):
    found = []
    for module in (ours, original):
        value = module
        for name in path.split("."):
            value = getattr(value, name)
        found.append(_parameters(value))
    assert found[0] == found[1]


def test_public_methods_are_the_originals():
    for name in ("KondoGate", "KondoTrainer"):
        expected = {m for m in vars(getattr(original, name)) if not m.startswith("_")}
        assert {m for m in vars(getattr(ours, name)) if not m.startswith("_")} == expected


def test_gate_is_a_module_without_state():
    gate = ours.KondoGate()
    assert isinstance(gate, torch.nn.Module)
    assert gate.state_dict() == original.KondoGate().state_dict() == {}


def test_imports_with_torch_alone():
    """Neither the original nor any framework is needed."""
    absent = ["kondo_gate", "transformers", "trl", "tensordict", "matplotlib", "sklearn", "rich"]
    code = (
        f"import sys; sys.path.insert(0, {str(Path(kondo.__file__).parents[1])!r})\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        f"import torch; from kondo.integrations import kondo_gate as k\n"
        f"print(k.KondoGate().compute_gate(torch.tensor([-1.0]), torch.ones(1)).gate_weights)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "tensor([1.])"
