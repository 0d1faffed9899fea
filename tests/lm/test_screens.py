import copy
import math

import pytest
import torch

import kondo
import kondo.lm
from kondo.engine.screen import screen_log_probs
from kondo.lm import CausalLM, screens
from kondo.lm.budget import BudgetGate
from lm.tiny import policy, token_rows
from steps import run_step
from tolerances import assert_close

pytest.importorskip("transformers")


@pytest.fixture
def rows(generator):
    return token_rows(generator)


def exact(lm, rows):
    return screen_log_probs(lm.log_prob, rows)


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


@pytest.mark.parametrize("kind", ["llama", "qwen2", "plain"])
def test_a_stale_copy_stays_until_it_is_refreshed(kind, rows):
    lm = CausalLM(Backbone(), head=torch.nn.Linear(16, 37)) if kind == "plain" else policy(kind)
    stale = screens.stale(lm)
    before = exact(lm, rows)
    nudge(lm)
    with torch.no_grad():
        lm.head.weight.add_(0.1)
    after = exact(lm, rows)
    assert not torch.allclose(before, after)
    assert torch.equal(stale(rows), before)
    stale.refresh()
    assert torch.equal(stale(rows), after)
    assert not stale(rows).requires_grad


def test_a_stale_copy_refreshes_buffers_and_counts_tied_weights_once():
    lm = policy("qwen2")
    lm.module.register_buffer("running", torch.zeros(2))
    stale = screens.stale(lm)
    lm.module.running.add_(3)
    stale.refresh()
    assert stale._frozen.module.running.tolist() == [3, 3]
    counted = sum(1 for p in screens.parameters_of(lm) if p is lm.head.weight)
    assert counted == 1


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_truncated_pass_runs_the_first_layers_and_then_norm_and_head(kind, rows):
    lm = policy(kind).module
    shallow = copy.deepcopy(lm)
    body = shallow.transformer if kind == "gpt2" else shallow.model
    name = "h" if kind == "gpt2" else "layers"
    setattr(body, name, getattr(body, name)[:2])
    screen = screens.truncated(CausalLM(lm), 2)
    found = screen_log_probs(screen, rows)
    assert_close(found, exact(CausalLM(shallow), rows))
    assert not torch.allclose(found, exact(CausalLM(lm), rows))


def test_a_truncated_pass_leaves_the_policy_whole_and_follows_it(rows):
    lm = policy()
    before = exact(lm, rows)
    screen = screens.truncated(lm, 1)
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
    screen = screens.truncated(lm, 1)
    screen(rows)
    with pytest.raises(error, match="forward ends"):
        screen(rows)
    assert modes == [False, False]
    assert all(part.training for part in lm.module.modules())
    assert len(lm.module.transformer.h) == 3


def test_all_layers_are_the_exact_screen(rows):
    lm = policy()
    assert torch.equal(screens.truncated(lm, 3)(rows), exact(lm, rows))


@pytest.mark.parametrize("num_layers", [0, 4])
def test_a_depth_the_model_does_not_have_is_refused(num_layers):
    with pytest.raises(ValueError, match=f"between 1 and the model's 3, got {num_layers}"):
        screens.truncated(policy(), num_layers)


def test_truncation_is_refused_where_the_layers_cannot_be_found():
    lm = CausalLM(Backbone(), head=torch.nn.Linear(16, 37))
    with pytest.raises(ValueError, match="got 0 in Backbone"):
        screens.truncated(lm, 1)


def test_a_draft_is_the_small_models_own_opinion(rows):
    lm, small = policy(), policy("gpt2", num_layers=1, width=16)
    assert torch.equal(screen_log_probs(screens.draft(small, lm), rows), exact(small, rows))


def test_a_draft_must_share_the_vocabulary():
    lm, small = policy(), policy(vocabulary=41)
    with pytest.raises(ValueError, match="vocabulary of lm, 37 tokens, got 41"):
        screens.draft(small, lm)
    assert screens.draft(small, lm, vocab_size=35) == small.log_prob
    with pytest.raises(ValueError, match="lm must have at least vocab_size=39 tokens, got 37"):
        screens.draft(small, lm, vocab_size=39)


@pytest.mark.parametrize("backend", ["torch", "torchao"])
def test_an_int8_copy_is_close_and_leaves_the_policy_alone(backend, rows):
    if backend == "torchao":
        pytest.importorskip("torchao")
    lm = policy()
    before, names = exact(lm, rows), [type(m) for m in lm.module.modules()]
    screen = screens.quantised(lm, "int8", backend=backend)
    assert screen.backend == backend
    found = screen(rows)
    error = float((found - before).abs().mean() / before.abs().mean())
    assert 0 < error < 0.05
    assert torch.equal(exact(lm, rows), before)
    assert [type(m) for m in lm.module.modules()] == names
    nudge(lm)
    assert torch.equal(screen(rows), found)
    screen.refresh()
    assert float((screen(rows) - exact(lm, rows)).abs().mean()) < 0.1 * float(
        (found - exact(lm, rows)).abs().mean()
    )


@pytest.mark.parametrize(
    "make", [screens.stale, lambda lm, **o: screens.quantised(lm, "int8", **o)]
)
def test_layers_that_are_compiled_are_compiled_in_the_copy(make, rows):
    lm, graphs = policy(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for layer in lm.module.model.layers[:2]:
        layer.compile(backend="eager")
    torch.compiler.reset()
    screen = make(lm, compile_options={"backend": backend})
    assert not graphs
    layers = screen._frozen.module.model.layers
    assert [layer._compiled_call_impl is not None for layer in layers] == [True, True, False]
    before = screen(rows)
    assert len(graphs) > 0
    compiled = len(graphs)
    nudge(lm)
    screen.refresh()
    assert not torch.equal(screen(rows), before)
    assert screen._frozen.module.model.layers[0]._compiled_call_impl is not None
    assert len(graphs) == compiled  # the refreshed copy is the same one


@pytest.mark.parametrize("backend", ["torch", "torchao"])
def test_a_refreshed_int8_copy_equals_a_new_one_and_stays_in_place(backend, rows):
    if backend == "torchao":
        pytest.importorskip("torchao")
    lm = policy("qwen2")  # biases, and a tied head
    screen = screens.quantised(lm, "int8", backend=backend)
    modules = list(screen._frozen.module.modules())
    nudge(lm)
    screen.refresh()
    assert torch.equal(screen(rows), screens.quantised(lm, "int8", backend=backend)(rows))
    assert all(a is b for a, b in zip(screen._frozen.module.modules(), modules, strict=True))


def test_a_refreshed_copy_takes_a_head_that_stands_beside(rows):
    lm = CausalLM(Backbone(), head=torch.nn.Linear(16, 37))
    screen = screens.quantised(lm, "int8")
    with torch.no_grad():
        lm.head.weight.add_(0.3)
        lm.head.bias.add_(torch.arange(37) / 10)
    screen.refresh()
    assert torch.equal(screen._frozen.head.weight, lm.head.weight)
    assert torch.equal(screen._frozen.head.bias, lm.head.bias)


def test_small_adapters_are_left_out_of_a_quantised_copy(rows):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False
    )
    lm = CausalLM(peft.get_peft_model(policy().module, config))
    screen = screens.quantised(lm, "int8")
    assert (screen.quantised, screen.skipped) == (3 * 7, 3 * 2)
    true = exact(lm, rows)
    assert 0 < float((screen(rows) - true).abs().mean()) < 0.1 * float(true.abs().mean())
    nudge(lm)
    screen.refresh()
    assert torch.equal(screen(rows), screens.quantised(lm, "int8")(rows))


def test_a_quantised_copy_keeps_its_head_exact():
    lm = policy()
    screen = screens.quantised(lm, "int8", backend="torch")
    assert torch.equal(screen._frozen.head.weight, lm.head.weight)
    assert screen._frozen.module.lm_head.weight.dtype == torch.float32
    assert screen._frozen.module.model.layers[0].mlp.up_proj.weight.dtype == torch.int8


def test_screens_are_screens_of_a_step(rows, generator):
    lm, small = policy(), policy(num_layers=1)
    advantages = torch.randn(12, generator=generator)
    for screen in (
        screens.stale(lm),
        screens.quantised(lm, "int8", backend="torch"),
        screens.truncated(lm, 2),
        screens.draft(small, lm),
    ):
        report = run_step(
            lm, rows, advantages, gate=kondo.Gate(rate=0.25), unit="sequence", screen=screen
        )
        assert report.rows_trained == 3
        assert lm.module.training


def test_agreement_counts_by_hand():
    # Delight 4, 3, 2, 1 and, by the screen, 4, 1, 3, 2: the top two are {0, 1} and {0, 2}.
    true = -torch.tensor([4.0, 3.0, 2.0, 1.0])
    seen = -torch.tensor([4.0, 1.0, 3.0, 2.0])
    gate = kondo.Gate(rate=0.5)
    found = screens.agreement(seen, true, torch.ones(4), gate=gate, unit="sample")
    assert found == screens.Agreement(
        overlap=1 / 3, recall=1 / 2, delight_share=6 / 7, kept=2, kept_exact=2
    )
    same = screens.agreement(true, true, torch.ones(4), gate=gate, unit="sample")
    assert same.overlap == same.recall == same.delight_share == 1.0


def test_recall_and_overlap_differ_where_a_price_keeps_more():
    true, seen = -torch.tensor([4.0, 1.0, 1.0]), -torch.tensor([4.0, 3.0, 1.0])
    gate = kondo.Gate(price=2.0)
    found = screens.agreement(seen, true, torch.ones(3), gate=gate, unit="sample")
    assert (found.overlap, found.recall, found.kept, found.kept_exact) == (0.5, 1.0, 2, 1)
    assert found.delight_share == 5 / 4


def test_agreement_of_sequences_sums_their_tokens():
    true = -torch.tensor([[1.0, 1.0], [3.0, 9.0]])
    seen = -torch.tensor([[2.0, 2.0], [3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    gate = kondo.Gate(rate=0.5)
    found = screens.agreement(seen, true, torch.ones(2), gate=gate, mask=mask)
    assert found.overlap == found.recall == 0.0
    assert found.delight_share == 2 / 3
    tokens = screens.agreement(seen, true, torch.ones(2), gate=gate, mask=mask, unit="token")
    assert tokens.kept == 2
    assert tokens.recall == 1 / 2


def test_two_empty_sets_agree_and_have_no_delight():
    zeros = torch.zeros(3)
    found = screens.agreement(zeros, zeros, zeros, gate=kondo.Gate(rate=0.5), unit="sample")
    assert found.overlap == found.recall == 1.0
    assert math.isnan(found.delight_share)


def test_agreement_leaves_the_gate_and_the_generator_as_they_were(generator):
    gate = kondo.Gate(rate=0.5, window=4, warmup=1)
    log_probs = -torch.rand(8, generator=generator)
    gate(log_probs.neg())
    before, draws = copy.deepcopy(gate.state_dict()), generator.get_state()
    options = {"unit": "sample", "generator": generator}
    screens.agreement(log_probs, log_probs, torch.ones(8), gate=gate, **options)
    assert gate.state_dict()["calls"] == before["calls"]
    assert len(gate.state_dict()["past"]["values"]) == 1
    assert torch.equal(generator.get_state(), draws)
    # A gate that draws makes the same draws for both sides.
    drawing = kondo.Gate(rate=0.5, temperature=1.0)
    same = screens.agreement(log_probs, log_probs, torch.ones(8), gate=drawing, **options)
    assert same.overlap == 1.0
    state = torch.get_rng_state()
    same = screens.agreement(log_probs, log_probs, torch.ones(8), gate=drawing, unit="sample")
    assert same.overlap == 1.0
    assert torch.equal(torch.get_rng_state(), state)


def test_screens_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"exact_log_probs, \[4\], got \[3\]"):
        screens.agreement(torch.zeros(3), torch.zeros(4), torch.ones(4), gate=kondo.Gate(rate=0.5))


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_gradient_cosine_is_that_of_the_two_gated_gradients(unit, rows, generator):
    lm = policy()
    advantages = 1 + torch.rand(12, generator=generator)
    free = torch.where(rows.completion_mask, exact(lm, rows).flip(0) - 0.1, 0.0)
    gate = kondo.Gate(rate=0.3)
    marker = torch.ones_like(lm.head.weight)
    lm.head.weight.grad = marker
    options = {"gate": gate, "unit": unit}
    found = screens.gradient_cosine(lm, rows, advantages, screen=free, **options)
    assert lm.head.weight.grad is marker
    assert all(p.grad is None for p in lm.module.model.parameters())
    flat = []
    for screen in (free, None):
        lm.module.zero_grad(set_to_none=True)
        run_step(lm, rows, advantages, screen=screen, **options)
        flat.append(torch.cat([p.grad.flatten() for p in lm.module.parameters()]))
    assert_close(found, torch.nn.functional.cosine_similarity(*flat, dim=0), torch.float32)
    assert -1 < found < 0.999
    same = screens.gradient_cosine(lm, rows, advantages, screen=exact(lm, rows), **options)
    assert_close(same, 1.0, torch.float32)


def test_the_cosine_with_nothing_is_nan(rows):
    lm = policy()
    gate = kondo.Gate(price=1e9)
    found = screens.gradient_cosine(lm, rows, torch.ones(12), screen=exact(lm, rows), gate=gate)
    assert math.isnan(found)
    assert screens.cosine([torch.tensor([3.0]), None], [torch.tensor([4.0]), torch.ones(1)]) == (
        12 / (3 * math.sqrt(17))
    )


def test_agreement_takes_a_budget_gate(rows, generator):
    lm = policy()
    advantages = torch.randn(12, generator=generator)
    gate = BudgetGate(budget=0.3).for_rows(rows)
    log_probs = exact(lm, rows)
    found = screens.agreement(
        screens.truncated(lm, 2)(rows).detach(),
        log_probs,
        advantages,
        gate=gate,
        mask=rows.completion_mask,
        unit="token",
    )
    assert 0 < found.recall <= 1
    assert found.kept > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("number", ["int8", "fp8"])
def test_a_low_precision_copy_is_close_on_a_gpu(number, generator):
    lm = policy(width=64)
    lm.module.to("cuda", torch.bfloat16)
    rows = token_rows(generator, 64, device="cuda")
    found = screen_log_probs(screens.quantised(lm, number, backend="torch"), rows)
    true = exact(lm, rows)
    assert float((found - true).abs().mean() / true.abs().mean()) < 0.1
