"""kondo_lab.models.drafts: drafts of a tiny model, and how far they choose as it does."""

import copy
import math

import pytest
import torch
from torch import nn

import kondo
from kondo.engine.screen import screen_log_probs
from kondo.lm import BudgetGate, CausalLM, head
from kondo_lab.models import drafts
from kondo_lab.models.drafts import QuantisedLinear, quantise_rows
from lm.tiny import policy, token_rows
from steps import run_step
from tolerances import assert_close

pytest.importorskip("transformers")

NUMBERS = ["int8", "fp8"]

# Half a step of 1/127 of the largest, and half of the last of three bits.
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 2.0**-4}


@pytest.fixture
def rows(generator):
    return token_rows(generator)


def exact(lm, rows):
    return screen_log_probs(lm.log_prob, rows, modules=lm.modules())


def nudge(lm, size=0.3):
    with torch.no_grad():
        for parameter in lm.module.parameters():
            parameter.add_(size * torch.ones_like(parameter).cumsum(0).sin())


class Backbone(torch.nn.Module):
    """A policy whose head stands beside it."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(37, 16)
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return self.inner(self.embed(input_ids)).tanh().cumsum(1)


@pytest.mark.parametrize("number", NUMBERS)
def test_rows_are_scaled_by_their_own_largest_number(number, generator):
    x = torch.randn(9, 32, generator=generator) * torch.logspace(-6, 6, 9).unsqueeze(1)
    x[4] = 0
    small, scale = quantise_rows(x, number)
    restored = small.float() * scale
    assert bool(restored.isfinite().all())
    bound = x.abs() if number == "fp8" else x.abs().amax(1, keepdim=True)
    # float8 below its smallest normal number has fixed steps, 2^-10 of a scale that makes 448
    assert bool(((restored - x).abs() <= LARGEST_ERROR[number] * bound + scale * 2.0**-9).all())


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (40, 32), (2, 3, 32)])
def test_a_quantised_layer_is_close_to_its_own(number, bias, shape, generator):
    layer = nn.Linear(32, 48, bias=bias)
    if bias:
        nn.init.normal_(layer.bias, std=3.0)
    x = torch.randn(shape, generator=generator)
    found, true = QuantisedLinear(layer, number)(x), layer(x).detach()
    assert found.shape == true.shape
    assert found.dtype == x.dtype
    assert not found.requires_grad
    assert 0 < float((found - true).norm() / true.norm()) < {"int8": 0.03, "fp8": 0.08}[number]


def test_the_product_of_integers_is_exact():
    layer = nn.Linear(16, 8, bias=False)
    weight = torch.arange(128.0).view(8, 16) - 64
    weight[:, 0] = 127  # so that every scale is 1
    x = torch.arange(48.0).view(3, 16) - 20
    x[:, 1] = -127
    with torch.no_grad():
        layer.weight.copy_(weight)
    assert torch.equal(QuantisedLinear(layer, "int8")(x), x @ weight.T)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "plain"])
def test_a_cached_copy_stays_as_it_was(kind, rows):
    lm = CausalLM(Backbone(), head=nn.Linear(16, 37)) if kind == "plain" else policy(kind)
    draft, before = drafts.cached(lm), exact(lm, rows)
    nudge(lm)
    assert not torch.allclose(exact(lm, rows), before)
    assert torch.equal(draft.log_prob(rows), before)
    assert not draft.log_prob(rows).requires_grad


def test_a_quantised_copy_is_close_and_leaves_the_policy_and_its_own_head_as_they_are(rows):
    lm = policy()
    before, names = exact(lm, rows), [type(m) for m in lm.module.modules()]
    draft = drafts.quantised(lm, "int8")
    error = float((draft.log_prob(rows) - before).abs().mean() / before.abs().mean())
    assert 0 < error < 0.05
    assert torch.equal(exact(lm, rows), before)
    assert [type(m) for m in lm.module.modules()] == names
    assert torch.equal(draft.head.weight, lm.head.weight)
    assert draft.module.model.layers[0].mlp.up_proj.weight.dtype == torch.int8


def test_layers_that_do_not_fit_are_left(rows):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False
    )
    draft = drafts.quantised(CausalLM(peft.get_peft_model(policy().module, config)), "int8")
    kinds = [type(module) for module in draft.module.modules()]
    assert kinds.count(QuantisedLinear) == 3 * 7
    assert kinds.count(nn.Linear) == 3 * 2 + 1  # and the head


def test_layers_that_are_compiled_are_compiled_in_the_copy():
    lm = policy()
    for layer in lm.module.model.layers[:2]:
        layer.compile(backend="eager")
    for draft in (drafts.cached(lm), drafts.quantised(lm, "int8")):
        layers = draft.module.model.layers
        assert [each._compiled_call_impl is not None for each in layers] == [True, True, False]


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match="multiples of 8, got none in GPT2LMHeadModel"):
        drafts.quantised(policy("gpt2"), "int8")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r'"fp8" needs a CUDA device .* got cpu; use "int8"'):
            drafts.quantised(policy(), "fp8")


def test_a_compiled_layer_quantises_inside_itself(generator, monkeypatch):
    """One graph, without a compiled function inside it, as on a GPU it would otherwise have."""
    monkeypatch.setattr(head, "_compiled", lambda _: pytest.fail("compiled within"))
    monkeypatch.setattr(head, "can_fuse", lambda _: True)
    layer = QuantisedLinear(nn.Linear(32, 16), "int8")
    x = torch.randn(20, 32, generator=generator)
    with monkeypatch.context() as eager:
        eager.setattr(head, "can_fuse", lambda _: False)
        expected = layer(x)
    torch.compiler.reset()
    layer.compile(backend="eager", fullgraph=True)
    assert torch.equal(layer(x), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert head.fused(quantise_rows, torch.device("cuda")) is quantise_rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("num_rows", [1, 17, 333])
def test_a_quantised_layer_is_close_to_its_own_on_a_gpu(number, num_rows):
    layer = nn.Linear(128, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, 128, device="cuda", dtype=torch.bfloat16)
    found, true = QuantisedLinear(layer, number)(x).float(), layer(x).detach().float()
    assert float((found - true).norm() / true.norm()) < 0.08


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_truncated_pass_runs_the_first_layers_and_then_norm_and_head(kind, rows):
    lm = policy(kind).module
    shallow = copy.deepcopy(lm)
    body = shallow.transformer if kind == "gpt2" else shallow.model
    name = "h" if kind == "gpt2" else "layers"
    setattr(body, name, getattr(body, name)[:2])
    screen = drafts.truncated(CausalLM(lm), 2)
    found = screen_log_probs(screen, rows)
    assert_close(found, exact(CausalLM(shallow), rows))
    assert not torch.allclose(found, exact(CausalLM(lm), rows))


def test_a_truncated_pass_leaves_the_policy_whole_and_follows_it(rows):
    lm = policy()
    before = exact(lm, rows)
    screen = drafts.truncated(lm, 1)
    first = screen(rows)
    assert torch.equal(exact(lm, rows), before)
    nudge(lm)
    assert not torch.allclose(screen(rows), first)
    with pytest.raises(ValueError, match="rows must be"):
        screen(rows.input_ids)
    assert len(lm.module.model.layers) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_truncated_pass_is_in_evaluation_mode_and_ends_whole(rows, error):
    lm, modes = policy("gpt2"), []
    lm.module.train()

    def see(module, *_):
        modes.append(module.training)
        if len(modes) > 1:
            raise error("the forward ends")

    lm.module.transformer.h[0].register_forward_hook(see)
    screen = drafts.truncated(lm, 1)
    screen(rows)
    with pytest.raises(error, match="forward ends"):
        screen(rows)
    assert modes == [False, False]
    assert all(part.training for part in lm.module.modules())
    assert len(lm.module.transformer.h) == 3


def test_all_layers_are_the_exact_screen(rows):
    lm = policy()
    assert torch.equal(drafts.truncated(lm, 3)(rows), exact(lm, rows))


def test_drafts_are_screens_of_a_step(rows, generator):
    lm = policy()
    advantages = torch.randn(12, generator=generator)
    for draft in (drafts.cached(lm).log_prob, drafts.quantised(lm, "int8").log_prob):
        report = run_step(
            lm, rows, advantages, gate=kondo.Gate(rate=0.25), unit="sequence", screen=draft
        )
        assert report.rows_trained == 3


def test_agreement_counts_by_hand():
    # Delight 4, 3, 2, 1 and, by the screen, 4, 1, 3, 2: the top two are {0, 1} and {0, 2}.
    true = -torch.tensor([4.0, 3.0, 2.0, 1.0])
    seen = -torch.tensor([4.0, 1.0, 3.0, 2.0])
    gate = kondo.Gate(rate=0.5)
    found = drafts.agreement(seen, true, torch.ones(4), gate=gate, unit="sample")
    assert found == drafts.Agreement(overlap=1 / 3, recall=1 / 2, delight_share=6 / 7)
    same = drafts.agreement(true, true, torch.ones(4), gate=gate, unit="sample")
    assert same.overlap == same.recall == same.delight_share == 1.0


def test_recall_and_overlap_differ_where_a_price_keeps_more():
    true, seen = -torch.tensor([4.0, 1.0, 1.0]), -torch.tensor([4.0, 3.0, 1.0])
    gate = kondo.Gate(price=2.0)
    found = drafts.agreement(seen, true, torch.ones(3), gate=gate, unit="sample")
    assert (found.overlap, found.recall) == (0.5, 1.0)
    assert found.delight_share == 5 / 4


def test_agreement_of_sequences_sums_their_tokens():
    true = -torch.tensor([[1.0, 1.0], [3.0, 9.0]])
    seen = -torch.tensor([[2.0, 2.0], [3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    gate = kondo.Gate(rate=0.5)
    found = drafts.agreement(seen, true, torch.ones(2), gate=gate, mask=mask)
    assert found.overlap == found.recall == 0.0
    assert found.delight_share == 2 / 3
    tokens = drafts.agreement(seen, true, torch.ones(2), gate=gate, mask=mask, unit="token")
    assert tokens.recall == 1 / 2


def test_two_empty_sets_agree_and_have_no_delight():
    zeros = torch.zeros(3)
    found = drafts.agreement(zeros, zeros, zeros, gate=kondo.Gate(rate=0.5), unit="sample")
    assert found.overlap == found.recall == 1.0
    assert math.isnan(found.delight_share)


@pytest.mark.filterwarnings("ignore:advantages are not centred")
@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_gradient_cosine_is_that_of_the_two_gated_gradients(unit, rows, generator):
    lm = policy()
    advantages = 1 + torch.rand(12, generator=generator)
    free = torch.where(rows.completion_mask, exact(lm, rows).flip(0) - 0.1, 0.0)
    gate = kondo.Gate(rate=0.3)
    marker = torch.ones_like(lm.head.weight)
    lm.head.weight.grad = marker
    options = {"gate": gate, "unit": unit}
    found = drafts.gradient_cosine(lm, rows, advantages, screen=free, **options)
    assert lm.head.weight.grad is marker
    assert all(p.grad is None for p in lm.module.model.parameters())
    flat = []
    for screen in (free, None):
        lm.module.zero_grad(set_to_none=True)
        run_step(lm, rows, advantages, screen=screen, **options)
        flat.append(torch.cat([p.grad.flatten() for p in lm.module.parameters()]))
    assert_close(found, torch.nn.functional.cosine_similarity(*flat, dim=0), torch.float32)
    assert -1 < found < 0.999
    same = drafts.gradient_cosine(lm, rows, advantages, screen=exact(lm, rows), **options)
    assert_close(same, 1.0, torch.float32)


def test_the_cosine_with_nothing_is_nan(rows):
    lm = policy()
    gate = kondo.Gate(price=1e9)
    found = drafts.gradient_cosine(lm, rows, torch.ones(12), screen=exact(lm, rows), gate=gate)
    assert math.isnan(found)
    assert drafts.cosine([torch.tensor([3.0]), None], [torch.tensor([4.0]), torch.ones(1)]) == (
        12 / (3 * math.sqrt(17))
    )


def test_agreement_takes_a_budget_gate(rows, generator):
    lm = policy()
    advantages = torch.randn(12, generator=generator)
    gate = BudgetGate(budget=0.3).for_rows(rows)
    log_probs = exact(lm, rows)
    found = drafts.agreement(
        drafts.truncated(lm, 2)(rows).detach(),
        log_probs,
        advantages,
        gate=gate,
        mask=rows.completion_mask,
        unit="token",
    )
    assert 0 < found.recall <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("number", ["int8", "fp8"])
def test_a_low_precision_copy_is_close_on_a_gpu(number, generator):
    lm = policy(width=64)
    lm.module.to("cuda", torch.bfloat16)
    rows = token_rows(generator, 64, device="cuda")
    found = screen_log_probs(drafts.quantised(lm, number).log_prob, rows)
    true = exact(lm, rows)
    assert float((found - true).abs().mean() / true.abs().mean()) < 0.1
