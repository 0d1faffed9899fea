"""kondo.lm.head: log-probs, gradients and entropy equal those of all logits at once, in pieces."""

import csv
import dataclasses
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kondo.lm import head as head_module
from kondo.lm import head_kernels as kernels
from kondo.lm.head import (
    Head,
    block_width,
    default_chunk,
    prepare,
    token_entropy,
    token_log_probs,
)
from oracles import head as oracle
from tolerances import assert_close

# Odd ones on purpose: nothing divides anything.
TOKENS, WIDTH, VOCABULARY, CHUNK = 13, 7, 29, 5

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "cap": {"soft_cap": 2.0},
    "everything": {"bias": True, "soft_cap": 1.5, "scale": 1.7},
}
TEMPERATURES = {"one": 1.0, "number": 0.6}


class Case:
    """Random inputs, on one device in one dtype, for the head and for its oracle."""

    def __init__(
        self,
        *,
        bias=False,
        soft_cap=None,
        scale=1.0,
        temperature=1.0,
        tokens=TOKENS,
        width=WIDTH,
        vocabulary=VOCABULARY,
        dtype=torch.float64,
        device="cpu",
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(device, dtype)

        self.hidden = normal(tokens, width).requires_grad_()
        self.weight = normal(vocabulary, width).requires_grad_()
        self.bias = normal(vocabulary).requires_grad_() if bias else None
        self.targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
        self.temperature = temperature
        self.upstream = normal(tokens).double()
        self.head = Head(self.weight, self.bias, soft_cap, scale)
        self.options = {
            "bias": self.bias,
            "soft_cap": soft_cap,
            "scale": scale,
            "temperature": temperature,
        }

    @property
    def leaves(self):
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def log_probs(self, **options):
        options = {"temperature": self.temperature, "chunk": CHUNK} | options
        return token_log_probs(self.hidden, self.head, self.targets, **options)

    def gradients(self, **options):
        """Return the gradients of the leaves that require grad."""
        found = self.log_probs(**options)
        loss = (self.upstream * found).sum()
        return torch.autograd.grad(loss, [x for x in self.leaves if x.requires_grad])

    def expected_log_probs(self):
        return oracle.token_log_probs(self.hidden, self.weight, self.targets, **self.options)

    def expected_gradients(self):
        inputs = (self.hidden, self.weight, self.targets, self.upstream)
        return oracle.gradients(*inputs, **self.options)

    def freeze(self, *names):
        for name in names:
            getattr(self, name).requires_grad_(False)
        return self


def assert_equals_oracle(case, dtype=None, **options):
    assert_close(case.log_probs(**options), case.expected_log_probs(), dtype)
    found, expected = case.gradients(**options), case.expected_gradients()
    assert len(found) == len(expected)
    for gradient, wanted in zip(found, expected, strict=True):
        assert_close(gradient, wanted, dtype)


def assert_close_sums(actual, expected, dtype):
    """Compare sums of rounded terms: an entry near zero is as wrong as the largest may be."""
    unit = expected.abs().max()
    assert_close(actual / unit, expected / unit, dtype)


class Watch(TorchDispatchMode):
    """Counts [., .] @ [., .] products with the vocabulary in them, and finds the largest tensor."""

    PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")

    def __init__(self):
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.products += function._schema.name in self.PRODUCTS
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


# Values and gradients.


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_log_probs_and_gradients_equal_those_of_all_logits_at_once(options, temperature, device):
    assert_equals_oracle(Case(**options, temperature=temperature, device=device))


@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 6),
    vocabulary=st.integers(1, 9),
    chunk=st.integers(1, 12),
    bias=st.booleans(),
    soft_cap=st.none() | st.floats(0.3, 50.0),
    scale=st.floats(-2.0, 2.0),
    temperature=st.floats(0.2, 5.0),
    seed=st.integers(0, 99),
)
def test_any_shape_and_any_chunk_gives_the_same(chunk, **options):
    assert_equals_oracle(Case(**options), chunk=chunk)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_gradients_agree_with_finite_differences(options):
    case = Case(**options, temperature=0.6)

    def function(hidden, weight, *bias):
        head = case.head._replace(weight=weight, bias=bias[0] if bias else None)
        return token_log_probs(
            hidden, head, case.targets, temperature=case.temperature, chunk=CHUNK
        )

    assert torch.autograd.gradcheck(function, case.leaves)


@pytest.mark.parametrize(
    "frozen", [("weight", "bias"), ("hidden",), ("hidden", "weight"), ("bias",)]
)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_only_what_requires_grad_gets_a_gradient_and_it_is_the_same(frozen, soft_cap, device):
    case = Case(bias=True, soft_cap=soft_cap, temperature=0.6, device=device)
    expected = dict(zip(("hidden", "weight", "bias"), case.expected_gradients(), strict=True))
    case.freeze(*frozen)
    found = case.gradients()
    learning = [name for name in expected if name not in frozen]
    assert len(found) == len(learning)
    for name, gradient in zip(learning, found, strict=True):
        assert_close(gradient, expected[name])


def test_a_second_backward_through_a_kept_graph_gives_the_same():
    for case in (Case(), Case().freeze("weight")):
        log_probs = case.log_probs()
        first, second = (
            torch.autograd.grad(log_probs.sum(), case.hidden, retain_graph=True)[0]
            for _ in range(2)
        )
        assert torch.equal(first, second)


def test_inputs_are_left_as_they_were():
    case = Case(bias=True, soft_cap=2.0)
    before = [x.detach().clone() for x in case.leaves]
    case.gradients()
    assert all(torch.equal(x, y) for x, y in zip(case.leaves, before, strict=True))


def test_no_token_gives_no_log_prob_and_a_zero_gradient(device):
    case = Case(tokens=0, bias=True, device=device)
    assert case.log_probs().shape == (0,)
    assert token_entropy(case.hidden, case.head).shape == (0,)
    for gradient, leaf in zip(case.gradients(), case.leaves, strict=True):
        assert_close(gradient, torch.zeros_like(leaf))
    (of_hidden,) = Case(tokens=0).freeze("weight").gradients()
    assert of_hidden.shape == (0, WIDTH)


def test_a_bias_of_minus_infinity_takes_tokens_out_of_the_vocabulary():
    case = Case(bias=True)
    inside, outside = slice(1, 20), [0, *range(20, VOCABULARY)]
    with torch.no_grad():
        case.bias[outside] = -torch.inf
    case.targets %= 19
    rest = {"weight": case.weight[inside], "bias": case.bias[inside]}
    expected = oracle.token_log_probs(case.hidden, targets=case.targets, **rest)
    case.targets += 1
    assert_close(case.log_probs(), expected)
    of_hidden, of_weight, of_bias = case.gradients()
    assert bool(of_hidden.isfinite().all())
    assert bool(of_weight[inside].isfinite().all())
    assert not of_weight[outside].any()
    assert not of_bias[outside].any()
    assert_close(token_entropy(case.hidden, case.head), oracle.token_entropy(case.hidden, **rest))


def test_a_target_of_probability_zero_is_minus_infinity_not_nan():
    weight = torch.tensor([[0.0], [2e38], [3e38]])
    found = token_log_probs(torch.ones(1, 1), Head(weight), torch.tensor([0]))
    assert found.item() < -1e38


def test_a_target_outside_the_vocabulary_harms_nobody_whose_gradient_is_not_wanted():
    case = Case(bias=True)
    with torch.no_grad():
        case.bias[case.targets[0]] = -torch.inf
    case.targets[1:] = (case.targets[0] + 1) % VOCABULARY
    log_probs = case.log_probs()
    assert log_probs[0] == -torch.inf
    for gradient in torch.autograd.grad(log_probs[1:].sum(), case.leaves):
        assert bool(gradient.isfinite().all())


# A vocabulary of several blocks.

BLOCKS = 3 * 8192


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "scale": 1.7}, {"bias": True}], ids=str)
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["learning", "frozen"])
def test_blocks_of_the_vocabulary_give_what_the_whole_gives(options, frozen, device):
    case = Case(**options, tokens=6, width=2, vocabulary=BLOCKS, device=device)
    case.targets[:5] = torch.tensor([0, 8191, 8192, 16_383, BLOCKS - 1])
    expected = case.expected_gradients()
    assert_close(case.log_probs(), case.expected_log_probs())
    case.freeze(*frozen)
    if frozen and case.bias is not None:
        case.freeze("bias")
    for gradient, wanted in zip(case.gradients(), expected, strict=bool(not frozen)):
        assert_close(gradient, wanted)


@pytest.mark.parametrize("target", [5, 8192, BLOCKS - 1])
def test_an_offset_of_all_logits_costs_a_confident_token_no_digits(target, device):
    # logit - log-sum-exp would be 1015 - 1015.013, which float32 knows to 6e-5.
    weight = torch.full((BLOCKS, 1), 900.0, device=device)
    weight[target], weight[[100, 10_000]] = 1015.0, 1010.0  # rivals in two blocks
    hidden, targets = torch.ones(1, 1, device=device), torch.tensor([target], device=device)
    found = token_log_probs(hidden, Head(weight), targets)
    assert_close(found, oracle.token_log_probs(hidden, weight, targets))


@pytest.mark.parametrize(
    ("vocabulary", "width"),
    [(29, 29), (8192, 8192), (32_000, 8000), (128_256, 8016), (151_936, 4748), (50_257, 50_257)],
)
def test_blocks_divide_the_vocabulary_or_are_all_of_it(vocabulary, width):
    assert block_width(vocabulary) == width


# Entropy.


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_entropy_equals_that_of_all_logits_at_once(options, temperature, device):
    case = Case(**options, temperature=temperature, device=device)
    found = token_entropy(case.hidden, case.head, temperature=case.temperature, chunk=CHUNK)
    assert_close(found, oracle.token_entropy(case.hidden, case.weight, **case.options))
    assert not found.requires_grad


# What is computed and held.


def test_neither_pass_holds_more_logits_than_one_chunk():
    case = Case(tokens=200, vocabulary=50, width=3)
    for names in ((), ("weight",)):
        case.freeze(*names)
        with Watch() as watch:
            case.gradients(chunk=7)
        assert watch.largest == max(7 * 50, 200 * 3)
    with Watch() as watch:
        token_entropy(case.hidden, case.head, chunk=7)
    assert watch.largest == 7 * 50


def test_one_chunk_is_gone_before_the_next_one_comes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from harness import peak_bytes_cpu

    case = Case(tokens=256, vocabulary=4000, width=2)
    chunk_bytes = 64 * 4000 * 8

    def chunks_at_peak(call):
        return peak_bytes_cpu(call, [])[0] / chunk_bytes

    with torch.no_grad():
        assert 1.9 < chunks_at_peak(lambda: case.log_probs(chunk=64)) < 2.2
        entropy = partial(token_entropy, case.hidden, case.head, chunk=64)
        assert 1.9 < chunks_at_peak(entropy) < 2.2
    loss = case.log_probs(chunk=64).sum()
    assert 0.9 < chunks_at_peak(loss.backward) < 1.2
    case.freeze("weight")
    assert 1.9 < chunks_at_peak(lambda: case.log_probs(chunk=64)) < 2.2


@pytest.mark.parametrize(
    ("frozen", "forward", "backward"),
    [((), 1, 3), (("weight",), 2, 0), (("hidden",), 1, 2)],
    ids=["learning head", "frozen head", "frozen body"],
)
def test_logits_are_recomputed_once_and_not_at_all_for_a_frozen_head(frozen, forward, backward):
    case = Case(tokens=20).freeze(*frozen)
    with Watch() as watch:
        log_probs = case.log_probs(chunk=5)
    assert watch.products == 4 * forward
    with Watch() as watch:
        log_probs.sum().backward()
    assert watch.products == 4 * backward


@pytest.mark.parametrize(("frozen", "backward"), [((), 2), (("weight",), 0), (("hidden",), 1)])
def test_a_single_chunk_is_not_recomputed(frozen, backward):
    case = Case(tokens=20).freeze(*frozen)
    log_probs = case.log_probs(chunk=20)
    with Watch() as watch:
        log_probs.sum().backward()
    assert watch.products == backward


@pytest.mark.parametrize("chunk", [TOKENS - 1, TOKENS])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_passes_that_can_be_fused_compute_what_the_others_do(options, chunk, monkeypatch):
    """Here without a compiler: the formulas, also where a bias shuts tokens out."""
    case = Case(**options)
    if case.bias is not None:
        with torch.no_grad():
            case.bias[3:9] = -torch.inf
        case.targets %= 3
    monkeypatch.setattr(head_module, "can_fuse", lambda _: True)
    found = [case.log_probs(chunk=chunk), *case.gradients(chunk=chunk)]
    monkeypatch.setattr(head_module, "can_fuse", lambda _: False)
    expected = [case.log_probs(chunk=chunk), *case.gradients(chunk=chunk)]
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs)


def saved_by(call):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = call()
    return result, saved


def test_nothing_is_saved_or_prepared_without_a_graph():
    for case, grad_mode in (
        (Case(tokens=20), torch.no_grad()),
        (Case(tokens=20).freeze("weight"), torch.no_grad()),
        (Case(tokens=20).freeze("hidden", "weight"), torch.enable_grad()),
    ):
        with grad_mode, Watch() as watch:
            result, saved = saved_by(case.log_probs)
        assert (result.requires_grad, saved) == (False, [])
        assert watch.products == 4


def test_a_graph_saves_two_numbers_a_token_or_one_row_a_token_or_a_single_chunk():
    case = Case(bias=True)
    own = {x.data_ptr() for x in (*case.leaves, case.targets)}

    def foreign(chunk):
        _, saved = saved_by(partial(case.log_probs, chunk=chunk))
        return [tuple(x.shape) for x in saved if x.data_ptr() not in own]

    assert foreign(TOKENS - 1) == [(TOKENS,)] * 2
    assert foreign(TOKENS) == [(TOKENS, VOCABULARY)]
    _, saved = saved_by(case.freeze("weight", "bias").log_probs)
    assert [tuple(x.shape) for x in saved] == [(TOKENS, WIDTH)]


@given(tokens=st.integers(0, 300), chunk=st.integers(1, 60))
def test_chunks_cover_all_tokens_once_and_are_few_and_even(tokens, chunk):
    how = prepare(torch.zeros(1, 1), Head(torch.zeros(1, 1)), 1.0, chunk)
    parts = [range(tokens)[part] for part in how.chunks(tokens)]
    assert [place for part in parts for place in part] == list(range(tokens))
    sizes = [len(part) for part in parts]
    assert len(sizes) == -(-tokens // chunk)
    assert all(1 <= size <= chunk for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_the_default_chunk_fits_its_bytes_unless_a_gpu_wants_more():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_chunk(32_768, cpu) == default_chunk(32_768, cuda) == 4096
    assert default_chunk(151_936, cpu) == 883
    assert default_chunk(151_936, cuda) == 2048
    assert default_chunk(10**12, cpu) == 1


def test_on_a_gpu_few_tokens_are_one_chunk():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_chunk(151_936, cuda, 4000) == 4000  # 2.43 GB of logits
    assert default_chunk(151_936, cuda, 4200) == 2048  # 2.55 GB
    assert default_chunk(32_768, cuda, 7) == 4096
    assert default_chunk(151_936, cpu, 4000) == 883


# Half precision and autocast.

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["learning", "frozen"])
def test_lower_precision_stays_within_its_tolerance(frozen, options, dtype, device):
    case = Case(**options, temperature=0.8, dtype=dtype, device=device)
    with torch.no_grad():
        case.weight *= 0.25  # logits of about 1, whose rounding the table allows
    expected = case.expected_gradients()
    case.freeze(*frozen)
    if frozen and case.bias is not None:
        case.freeze("bias")
    log_probs, gradients = case.log_probs(), case.gradients()
    assert log_probs.dtype == torch.float32
    assert_close(log_probs, case.expected_log_probs(), dtype)
    for gradient, wanted in zip(gradients, expected[: len(gradients)], strict=True):
        assert gradient.dtype == dtype
        assert_close_sums(gradient, wanted, dtype)
    entropy = token_entropy(case.hidden, case.head, temperature=case.temperature)
    assert entropy.dtype == torch.float32
    assert_close(entropy, oracle.token_entropy(case.hidden, case.weight, **case.options), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_weight_gradients_are_summed_over_chunks_in_float32(dtype, device):
    # Every chunk adds about 1 to the target's row. A bfloat16 sum of ones ends at 256.
    tokens, vocabulary = 700, 64
    weight = torch.zeros(vocabulary, 1, dtype=dtype, device=device, requires_grad=True)
    bias = torch.zeros(vocabulary, dtype=dtype, device=device, requires_grad=True)
    hidden = torch.ones(tokens, 1, dtype=dtype, device=device)
    targets = torch.zeros(tokens, dtype=torch.int64, device=device)
    token_log_probs(hidden, Head(weight, bias), targets, chunk=1).sum().backward()
    for gradient in (weight.grad[0, 0], bias.grad[0]):
        assert_close(gradient, tokens * (1 - 1 / vocabulary), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_confident_token_still_has_a_gradient_in_half_precision(frozen, dtype, device):
    # p is about 1 - 2e-4, which rounds to 1; times 5000 the gradient is about 1.
    hidden = torch.ones(1, 1, dtype=dtype, device=device, requires_grad=True)
    weight = torch.tensor([[8.5], [0.0]], dtype=dtype, device=device, requires_grad=not frozen)
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    upstream = torch.tensor([5000.0], device=device)
    expected = oracle.gradients(hidden, weight, targets, upstream)
    leaves = [hidden] if frozen else [hidden, weight]
    found = torch.autograd.grad(
        token_log_probs(hidden, Head(weight), targets), leaves, grad_outputs=upstream
    )
    for gradient, wanted in zip(found, expected[: len(found)], strict=True):
        assert wanted.abs().max() > 0.9
        assert_close(gradient, wanted, dtype)


def test_autocast_computes_in_its_dtype_and_gives_float32_gradients_to_float32_weights(device):
    case = Case(bias=True, dtype=torch.float32, device=device)
    low = Case(bias=True, dtype=torch.bfloat16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        log_probs, gradients = case.log_probs(), case.gradients()
        entropy = token_entropy(case.hidden, case.head)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert torch.equal(log_probs, low.log_probs())
    assert torch.equal(entropy, token_entropy(low.hidden, low.head))
    for gradient, leaf, wanted in zip(
        gradients, case.leaves, case.expected_gradients(), strict=True
    ):
        assert gradient.dtype == leaf.dtype == torch.float32
        assert_close(gradient, wanted, torch.bfloat16)


@pytest.mark.parametrize("forward", [True, False])
def test_a_backward_computes_as_its_forward_did_inside_autocast_or_outside(forward, device):
    case = Case(dtype=torch.float32, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=forward):
        expected = case.gradients()
        loss = (case.upstream * case.log_probs()).sum()
    with torch.autocast(device.type, torch.bfloat16, enabled=not forward):
        found = torch.autograd.grad(loss, case.leaves)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_autocast_leaves_float64_alone(device):
    with torch.autocast(device.type, torch.bfloat16):
        assert_equals_oracle(Case(bias=True, device=device))


def test_autocast_lets_hidden_and_head_differ_in_dtype():
    case = Case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low = case.hidden.bfloat16()
        found = token_log_probs(low, case.head, case.targets)
    assert_close(found, case.expected_log_probs(), torch.bfloat16)


# Kernels of other packages.


def fake_cce(hidden, weight, targets, *, softcap, reduction, filter_eps, impl):
    assert (reduction, filter_eps, impl) == ("none", None, "cce")
    return -oracle.token_log_probs(hidden, weight, targets, soft_cap=softcap)


class FakeLiger:
    """Takes what liger's function takes, in its order, and computes it the obvious way."""

    chunks = ()

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_mem_const=1):
        raise AssertionError("only its signature is looked at")

    @classmethod
    def apply(cls, hidden, weight, targets, bias, class_weight, ignored, *others):
        assert (class_weight, ignored) == (None, -100)
        z_loss, smoothing, reduction, softcap, _, sums, *flags, chunk_mem_const = others
        assert (z_loss, smoothing, reduction, sums) == (0.0, 0.0, "none", torch.float32)
        assert flags == [False, False, False, None, None]
        # Its own words for how many tokens it takes at a time.
        pieces = -(-weight.shape[0] // (chunk_mem_const * weight.shape[1]))
        wanted = -(-hidden.shape[0] // pieces)
        cls.chunks = (*cls.chunks, min(1 << (wanted - 1).bit_length(), hidden.shape[0]))
        options = {"bias": bias, "soft_cap": softcap}
        return -oracle.token_log_probs(hidden, weight, targets, **options), None, None, None


@pytest.fixture
def fake_kernels(monkeypatch):
    """Stand in for the packages, on the CPU: what is tested is what we hand to them."""
    fakes = {
        "cce": types.SimpleNamespace(linear_cross_entropy=fake_cce),
        "liger": types.SimpleNamespace(LigerFusedLinearCrossEntropyFunction=FakeLiger),
    }
    monkeypatch.setattr(kernels, "_import", fakes.__getitem__)
    monkeypatch.setattr(kernels, "_obstacle", lambda *_: None)
    monkeypatch.setattr(FakeLiger, "chunks", ())


KERNELS = {
    "cce": [{}, {"scale": 0.3}, {"soft_cap": 2.0, "scale": 1.7}],
    "liger": [{}, {"scale": 0.3}, {"bias": True}, {"bias": True, "soft_cap": 1.5, "scale": 1.7}],
}
KERNEL_CASES = [(name, options) for name, cases in KERNELS.items() for options in cases]


@pytest.mark.parametrize(("backend", "options"), KERNEL_CASES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kernels_are_given_the_scaled_capped_tempered_problem(
    fake_kernels, backend, options, temperature
):
    assert_equals_oracle(Case(**options, temperature=temperature), backend=backend)


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_leave_hidden_states_alone_where_there_is_nothing_to_divide_by(
    fake_kernels, monkeypatch, backend
):
    case, seen = Case(dtype=torch.bfloat16), []
    plain = oracle.token_log_probs

    def spy(hidden, *args, **kwargs):
        seen.append(hidden)
        return plain(hidden, *args, **kwargs)

    monkeypatch.setattr(oracle, "token_log_probs", spy)
    case.log_probs(backend=backend)
    assert seen[0] is case.hidden


def test_liger_takes_about_the_chunk_that_is_asked_for(fake_kernels):
    case = Case(tokens=4096, width=8, vocabulary=2000)
    for chunk in (64, 256, 1000, 4096, 9999):
        case.log_probs(backend="liger", chunk=chunk)
    assert [
        chunk / 2 <= got <= 2 * chunk
        for chunk, got in zip((64, 256, 1000, 4096, 4096), FakeLiger.chunks, strict=True)
    ] == [True] * 5


@pytest.fixture
def installed(monkeypatch):
    """Pretend that both packages are installed."""
    fakes = {"liger": types.SimpleNamespace(LigerFusedLinearCrossEntropyFunction=FakeLiger)}
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(kernels, "_import", fakes.__getitem__)


def choose(backend, case, *, device="cuda", dtype=torch.bfloat16):
    """Ask for a kernel for such a case on such a device."""
    how = prepare(case.hidden, case.head, case.temperature, None)
    how = how._replace(device=torch.device(device), dtype=dtype)
    return kernels.kernel_of(backend, case.head, how)


OBSTACLES = [
    ("cce", {}, {"device": "cpu"}, "needs CUDA tensors, got cpu"),
    ("liger", {}, {"device": "cpu"}, "needs CUDA tensors, got cpu"),
    ("cce", {}, {"dtype": torch.float32}, "needs half precision, got torch.float32"),
    ("liger", {}, {"dtype": torch.float64}, "needs half precision, got torch.float64"),
    ("cce", {"bias": True}, {}, "has no head.bias"),
    ("cce", {"soft_cap": 2.0}, {}, "a multiple of 256 with head.soft_cap, got 29"),
]


@pytest.mark.parametrize(("backend", "options", "where", "message"), OBSTACLES)
def test_kernels_refuse_what_they_cannot_compute(installed, backend, options, where, message):
    with pytest.raises(ValueError, match=f'backend "{backend}".*{message}.*use "torch"'):
        choose(backend, Case(**options), **where)
    assert choose(backend, Case()) is getattr(kernels, f"_{backend}_log_probs")


def test_cce_takes_a_soft_cap_where_its_blocks_end_with_the_vocabulary(installed):
    assert choose("cce", Case(soft_cap=2.0, vocabulary=512)) is kernels._cce_log_probs


def test_an_old_liger_is_refused(installed, monkeypatch):
    monkeypatch.setattr(FakeLiger, "forward", staticmethod(lambda ctx, hidden: None))
    with pytest.raises(ValueError, match=r'backend "liger".*liger-kernel>=0\.8\.3'):
        choose("liger", Case())


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    for backend, package in (("cce", "cut-cross-entropy"), ("liger", "liger-kernel")):
        with pytest.raises(ValueError, match=f'backend "{backend}".*pip install "{package}'):
            choose(backend, Case())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(("backend", "options"), KERNEL_CASES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("frozen", [False, True])
def test_kernels_on_a_gpu_equal_the_oracle(backend, options, temperature, frozen):
    pytest.importorskip({"cce": "cut_cross_entropy", "liger": "liger_kernel"}[backend])
    case = Case(
        **options,
        temperature=temperature,
        tokens=300,
        width=128,
        vocabulary=1024,
        dtype=torch.bfloat16,
        device="cuda",
    )
    with torch.no_grad():
        case.weight *= 0.1
    expected = case.expected_gradients()
    if frozen:
        case.freeze("weight", *(["bias"] if case.bias is not None else []))
    assert_close(case.log_probs(backend=backend), case.expected_log_probs(), torch.bfloat16)
    found = case.gradients(backend=backend, chunk=128)
    for gradient, wanted in zip(found, expected[: len(found)], strict=True):
        assert_close_sums(gradient, wanted, torch.bfloat16)


# What cannot be right.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": [[1.0]]}, "hidden must be a floating-point tensor, got list"),
        ({"hidden": torch.zeros(2, 3, dtype=torch.int64)}, "hidden must be floating point"),
        ({"hidden": torch.zeros(1, 2, 3)}, r"hidden must have shape \[K, D\].*\[1, 2, 3\]"),
        ({"head": Head(torch.zeros(5, 4))}, r"head.weight must have shape \[V, 3\].*\[5, 4\]"),
        ({"head": Head(torch.zeros(5))}, r"head.weight must have shape \[V, 3\].*\[5\]"),
        (
            {"head": Head(torch.zeros(5, 3), torch.zeros(4))},
            r"head.bias .*\[5, 3\] and \[4\]",
        ),
        ({"head": Head(torch.zeros(5, 3), soft_cap=0.0)}, "head.soft_cap must be positive"),
        ({"head": Head(torch.zeros(5, 3), scale=float("nan"))}, "head.scale must be finite"),
        ({"head": Head(torch.zeros(5, 3).bfloat16())}, "hidden must have the head's dtype"),
        (
            {"head": Head(torch.zeros(5, 3, device="meta"))},
            "head.weight must be a tensor with data",
        ),
        ({"targets": torch.tensor([0, 5])}, r"targets must lie in \[0, 5\).*got 5"),
        ({"targets": torch.tensor([-100, 3])}, r"targets must lie in \[0, 5\).*got -100"),
        (
            {"targets": torch.tensor([0, 1, 2])},
            r"targets must be .*got torch.int64 \[3\]",
        ),
        ({"targets": torch.tensor([[0], [1]])}, r"targets must be .*got torch.int64 \[2, 1\]"),
        ({"targets": torch.tensor([0.0, 1.0])}, "targets must be .* int64.*float32"),
        ({"targets": torch.tensor([0, 1], device="meta")}, "targets must be .* on cpu, .* on meta"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": -1}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"temperature": float("inf")}, "temperature must be positive"),
        ({"temperature": torch.ones(2)}, "temperature must be a number, got tensor"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"backend": "triton"}, 'backend must be "torch", "liger" or "cce".*triton'),
        ({"backend": "cce"}, 'backend "cce" needs CUDA'),
        ({"backend": "liger"}, 'backend "liger" needs CUDA'),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {
        "hidden": torch.zeros(2, 3),
        "head": Head(torch.zeros(5, 3)),
        "targets": torch.tensor([0, 4]),
    }
    assert token_log_probs(**arguments).shape == (2,)
    with pytest.raises(ValueError, match=message):
        token_log_probs(**(arguments | changes))


def test_check_false_does_not_look_at_values():
    hidden, head = torch.zeros(2, 3), Head(torch.zeros(5, 3))
    targets = torch.tensor([0, 5])
    with pytest.raises(RuntimeError, match="out of bounds"):  # torch's own words, from gather
        token_log_probs(hidden, head, targets, check=False)


# The benchmark.


def test_the_benchmark_runs_and_says_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_lm_head

    out = tmp_path / "head.csv"
    passes = ("forward", "train", "frozen")
    bench_lm_head.main(["--quick", "--out", str(out), "--passes", *passes])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    seen = {(row["config"].split(";")[0], row["tokens"], row["contender"]) for row in rows}
    names = ("plain", "torch-32", "torch-64")
    assert seen == {(kind, k, name) for kind in passes for k in ("64", "256") for name in names}
    assert {row["rows_differentiated"] for row in rows if "forward" in row["config"]} == {"0"}
    assert all(float(row["step_ms_p50"]) > 0 for row in rows)
    said = capsys.readouterr().out
    assert "liger-64 is left out: ValueError" in said
    assert "cce is left out: ValueError" in said


def test_the_benchmark_leaves_out_a_contender_that_is_wrong(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_lm_head

    problem = bench_lm_head.build(8, 50, 6, torch.device("cpu"))
    expected = bench_lm_head.reference(problem)
    right = bench_lm_head.Contender(name="mine", log_probs=bench_lm_head.plain_log_probs)
    assert bench_lm_head.works(right, problem, expected)
    wrong = dataclasses.replace(
        right, log_probs=lambda *inputs: 1.1 * bench_lm_head.plain_log_probs(*inputs)
    )
    assert not bench_lm_head.works(wrong, problem, expected)
    assert "mine is left out: that is more" in capsys.readouterr().out
