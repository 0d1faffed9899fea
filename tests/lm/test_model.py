"""`CausalLM`: log-probs equal the model's own logits, and nothing else is computed or changed."""

import copy
import dataclasses
import itertools
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kondo
from kondo.lm import CausalLM, Head, Pack, TokenRows, packed_attention
from kondo.lm import attention as attention_module
from kondo.lm import model as lm_model
from kondo.lm import pack as packing
from lm import models
from oracles import causal
from oracles import engine as oracle
from steps import run_step
from tolerances import TOLERANCES, assert_close

LAYOUTS = ["varlen", "padded"]
PADDINGS = ["left", "right", "both", "none"]


def pack_of(rows, layout, **options):
    (pack,) = packing.packs(rows, rows.completion_mask, layout=layout, max_tokens=999, **options)
    return pack


def to_device(rows, device):
    fields = ("input_ids", "attention_mask", "completion_mask")
    return TokenRows(**{name: getattr(rows, name).to(device) for name in fields})


@pytest.mark.parametrize("max_tokens", [16_384, 13])
@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("make", [models.llama, models.gpt2])
def test_log_probs_equal_those_of_all_logits(make, padding, attention, max_tokens):
    model, rows = models.build(make), models.rows(padding)
    lm = CausalLM(model, attention=attention, max_tokens=max_tokens, temperature=0.7)
    expected = causal.one_by_one(model, *models.inside(rows), temperature=0.7)
    found = lm.log_prob(rows)
    assert_close(found, expected)
    assert_close(causal.padded(model, *models.inside(rows), temperature=0.7), expected)
    assert bool((found[~rows.completion_mask] == 0).all())


@pytest.mark.parametrize("attention", LAYOUTS)
def test_given_positions_are_used(attention):
    model, rows = models.build(models.gpt2), models.rows("left")
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(64, rows.input_ids.shape, generator=generator)
    rows = dataclasses.replace(rows, position_ids=positions)
    found = CausalLM(model, attention=attention).log_prob(rows)
    assert_close(found, causal.padded(model, *models.inside(rows), position_ids=positions))


def test_a_plain_backbone_and_head():
    backbone, head, rows = (
        models.Recurrent().double(),
        nn.Linear(12, models.VOCAB).double(),
        models.rows(),
    )
    ids, real, sampled = models.inside(rows)
    hidden = backbone(ids, attention_mask=real, position_ids=ids)
    expected = causal.token_log_probs(head(hidden), ids, sampled)
    assert_close(CausalLM(backbone, head=head, max_tokens=20).log_prob(rows), expected)
    given = Head(head.weight, head.bias)
    assert_close(CausalLM(backbone, head=given).log_prob(rows), expected)


@pytest.mark.parametrize("max_tokens", [20, 1000])
def test_a_backbone_of_ones_own_may_take_packs(max_tokens):
    backbone, head = models.Attending().double(), nn.Linear(12, models.VOCAB).double()
    rows = models.rows("both")
    weights = [*backbone.parameters(), *head.parameters()]
    found = {}
    for attention in ("padded", "varlen"):
        lm = CausalLM(backbone, head=head, attention=attention, max_tokens=max_tokens)
        log_probs = lm.log_prob(rows)
        pull = torch.linspace(0, 1, log_probs.numel(), dtype=torch.float64).view_as(log_probs)
        gradients = torch.autograd.grad((pull * log_probs).sum(), weights)
        found[attention] = [log_probs, *gradients]
    for mine, theirs in zip(found["varlen"], found["padded"], strict=True):
        assert_close(mine, theirs)


def test_a_backbone_that_takes_packs_wrongly_is_found_out():
    class Leaking(models.Attending):
        def forward(self, input_ids, cu_seqlens=None, **options):
            if cu_seqlens is not None:
                cu_seqlens = cu_seqlens[[0, -1]]  # all rows as one
            return super().forward(input_ids, cu_seqlens=cu_seqlens, **options)

    with pytest.raises(ValueError, match="results differ by"):
        CausalLM(Leaking(), head=nn.Linear(12, models.VOCAB), attention="varlen")


@pytest.mark.parametrize("window", [None, 2])
def test_packed_attention_is_that_of_each_row_alone(window):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(9, heads, 5, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    )
    starts = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    found = packed_attention(query, key, value, starts, 6, scale=0.3, window=window)
    sizes = (-1 if window is None else window - 1, 0)
    assert_close(
        found,
        causal.attention_by_rows(query, key, value, starts, scale=0.3, window_size=sizes),
    )


def test_a_backbone_of_transformers_with_a_head_of_ones_own():
    model, rows = models.build(models.qwen2), models.rows("left")
    lm = CausalLM(model.model, head=Head(model.lm_head.weight), attention="varlen")
    assert_close(lm.log_prob(rows), causal.one_by_one(model, *models.inside(rows)))


class Counted:
    """Counts the tokens that enter the backbone and the hidden states that enter the head."""

    def __init__(self, lm, monkeypatch):
        self.tokens = {True: 0, False: 0}
        self.head_rows = {True: 0, False: 0}
        lm.backbone.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        inner = lm_model.token_log_probs

        def counting(hidden, *args, **options):
            self.head_rows[torch.is_grad_enabled()] += hidden.shape[0]
            return inner(hidden, *args, **options)

        monkeypatch.setattr(lm_model, "token_log_probs", counting)

    def _on_forward(self, _, args, options):
        ids = args[0] if args else options["input_ids"]
        self.tokens[torch.is_grad_enabled()] += ids.numel()


@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize("screened", [False, True])
def test_what_is_cut_is_not_computed(unit, screened, monkeypatch):
    model, rows = models.build(models.llama), models.rows("both", num_rows=8)
    lm = CausalLM(model, attention="varlen", max_tokens=16)
    advantages = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    known = lm.log_prob(rows).detach()
    keep = oracle.element_keep(known, advantages, rows.completion_mask, unit, 0.25)
    needed = causal.kept_prefixes(rows.attention_mask, keep)
    seen = causal.kept_prefixes(rows.attention_mask, rows.completion_mask)
    count = Counted(lm, monkeypatch)
    report = run_step(
        lm,
        rows,
        advantages,
        gate=kondo.Gate(rate=0.25),
        unit=unit,
        screen=known if screened else None,
        screen_rows="all",
    )
    assert count.tokens == {True: sum(needed), False: 0 if screened else sum(seen)}
    assert count.head_rows[True] == int(keep.sum()) < int(rows.completion_mask.sum())
    assert count.head_rows[False] == (0 if screened else int(rows.completion_mask.sum()))
    assert report.tokens_trained == sum(needed) < rows.attention_mask.sum()
    assert report.rows_trained == sum(length > 0 for length in needed)


def test_padding_counts_as_trained_and_rows_of_like_length_share_it(monkeypatch):
    rows = models.rows("right", num_rows=8)
    lm = CausalLM(models.build(models.llama), attention="padded", max_tokens=24)
    count = Counted(lm, monkeypatch)
    report = run_step(lm, rows, torch.ones(8), gate=kondo.Gate(rate=1.0), screen=-torch.ones(8, 12))
    lengths = sorted(causal.kept_prefixes(rows.attention_mask, rows.completion_mask))
    assert report.tokens_trained == count.tokens[True]
    assert sum(lengths) <= count.tokens[True] < 8 * max(lengths)


@pytest.fixture
def recording(monkeypatch):
    """An attention of the model's own, by a name of its own, that notes each call."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    calls = []

    def attend(*args, **options):
        calls.append(1)
        return sdpa_attention_forward(*args, **options)

    for interface, function in ((AttentionInterface, attend), (AttentionMaskInterface, sdpa_mask)):
        monkeypatch.setitem(interface._global_mapping, "recording", function)
    return calls


def test_packs_go_around_the_models_own_attention_and_nothing_else_does(recording):
    model, rows = models.build(models.llama, attn_implementation="recording"), models.rows("left")
    expected = causal.one_by_one(model, *models.inside(rows))
    lm = CausalLM(model, attention="varlen")
    recording.clear()
    assert_close(lm.log_prob(rows), expected)
    assert not recording
    assert_close(causal.padded(model, *models.inside(rows)), expected)
    assert len(recording) == 2  # layers
    assert model.config._attn_implementation == "recording"


def test_another_attention_may_be_set_after_the_adapter_was_made(recording):
    model, rows = models.build(models.llama), models.rows("left")
    lm = CausalLM(model, attention="varlen")
    expected = lm.log_prob(rows)
    model.set_attn_implementation("recording")
    assert_close(lm.log_prob(rows), expected)
    assert not recording


def test_a_backward_that_failed_leaves_the_model_as_it_was():
    """Also while the error is still at hand, as it is in a debugger or a loop that tries again."""
    model, rows = models.build(models.llama), models.rows("left")
    expected = causal.padded(model, *models.inside(rows)).detach()
    lm = CausalLM(model, attention="varlen")

    def fail(*_):
        raise RuntimeError("out of memory")

    model.gradient_checkpointing_enable()
    hook = model.model.embed_tokens.weight.register_hook(fail)
    for run in (
        lambda: run_step(lm, rows, torch.ones(6), gate=kondo.Gate(rate=1.0)),
        lambda: lm.log_prob(rows).sum().backward(),
    ):
        try:
            run()
        except RuntimeError as error:
            assert str(error) == "out of memory"  # noqa: PT017
            assert model.config._attn_implementation == "sdpa"
            assert_close(causal.padded(model, *models.inside(rows)).detach(), expected)
            model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2)
        else:
            pytest.fail("the hook did not run")
    hook.remove()


def test_another_thread_may_run_the_model_meanwhile():
    model, rows = models.build(models.llama), models.rows("left")
    ids, real, _ = models.inside(rows)
    lm = CausalLM(model, attention="varlen")
    with torch.no_grad():
        expected = model(ids, attention_mask=real).logits
    inside, wrong = threading.Event(), []

    def elsewhere():
        inside.wait(60)
        try:
            with torch.no_grad():
                assert_close(model(ids, attention_mask=real).logits[real], expected[real])
            model.generate(ids[:1, -1:], max_new_tokens=2)
        except Exception as error:
            wrong.append(error)

    def pause(*_):
        if threading.current_thread() is threading.main_thread() and not inside.is_set():
            inside.set()
            thread.join(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    model.model.layers[1].register_forward_pre_hook(pause)
    lm.log_prob(rows)
    assert inside.is_set()
    assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attention", LAYOUTS)
def test_gradient_checkpointing(attention, reentrant):
    """A checkpointed layer runs again in the backward, and must attend as it did before."""
    rows, weights = models.rows("left"), torch.randn(6, 12, dtype=torch.float64)
    model = models.build(models.llama)
    expected = oracle.gradients(
        model, (weights * causal.one_by_one(model, *models.inside(rows))).sum()
    )
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    lm = CausalLM(model, attention=attention)
    own = model.config._attn_implementation
    calls = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    (weights * lm.log_prob(rows)).sum().backward()
    assert len(calls) == 2
    assert model.config._attn_implementation == own
    for name, grad in models.grads(model).items():
        assert_close(grad, expected[name])


def test_checkpoints_of_ones_own():
    model, rows = models.build(models.llama), models.rows("left")
    expected = oracle.gradients(model, causal.one_by_one(model, *models.inside(rows)).sum())
    lm = CausalLM(model, attention="varlen")
    layer = model.model.layers[0]
    inner = layer.forward
    layer.forward = lambda *args, **options: checkpoint(
        inner, *args, use_reentrant=False, **options
    )
    lm.log_prob(rows).sum().backward()
    for name, grad in models.grads(model).items():
        assert_close(grad, expected[name])


@pytest.mark.parametrize("attention", LAYOUTS)
def test_a_tied_head_gets_both_parts_of_its_gradient(attention):
    model, rows = models.build(models.llama, tie_word_embeddings=True), models.rows()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = oracle.gradients(model, causal.one_by_one(model, *models.inside(rows)).sum())
    CausalLM(model, attention=attention).log_prob(rows).sum().backward()
    for name, grad in models.grads(model).items():
        assert_close(grad, expected[name])


def test_the_head_is_read_when_it_is_used():
    """Weights that were put in place of the old ones are those that count."""
    model, rows = models.build(models.llama), models.rows()
    lm = CausalLM(model)
    model.lm_head.weight = nn.Parameter(0.3 * model.lm_head.weight.detach())
    assert_close(lm.log_prob(rows), causal.one_by_one(model, *models.inside(rows)))


def test_a_copy_has_weights_of_its_own():
    model, rows = models.build(models.llama), models.rows()
    lm = CausalLM(model, attention="varlen")
    other = copy.deepcopy(lm)
    before = other.log_prob(rows)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert torch.equal(other.log_prob(rows), before)
    assert not torch.equal(lm.log_prob(rows), before)


def test_the_head_of_a_resized_model_is_its_new_one():
    model, rows = models.build(models.llama), models.rows("left")
    lm = CausalLM(model)
    model.resize_token_embeddings(models.VOCAB + 9, mean_resizing=False)
    assert lm.vocab_size == models.VOCAB + 9
    assert_close(lm.log_prob(rows), causal.one_by_one(model, *models.inside(rows)))


def test_adapters_bring_their_own_head_and_take_it_away():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
    )
    model, rows = peft.get_peft_model(models.build(models.llama), config), models.rows("left")
    model.add_adapter("other", config)
    model.double()
    lm, seen = CausalLM(model), []
    with torch.no_grad():
        for name, layer in model.base_model.model.lm_head.modules_to_save.items():
            layer.weight.mul_({"default": 2.0, "other": 0.5}[name])

        def compare():
            seen.append(lm.log_prob(rows))
            assert_close(seen[-1], causal.one_by_one(model, *models.inside(rows)))

        compare()
        with model.disable_adapter():
            compare()
        model.set_adapter("other")
        compare()
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(seen, 2))


def test_two_heads_at_once_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    model = peft.get_peft_model(models.build(models.llama), config)
    model.add_adapter("other", config)
    lm = CausalLM(model)
    model.base_model.model.lm_head._active_adapter = ["default", "other"]
    with pytest.raises(
        ValueError, match=r"one active adapter.*\['default', 'other'\].*set_adapter"
    ):
        lm.log_prob(models.rows())


@pytest.mark.parametrize("given", [False, True])
def test_a_float32_head_on_a_bfloat16_backbone(given):
    model, rows = models.build(models.llama, dtype=torch.bfloat16), models.rows("left")
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    lm = CausalLM(model.model, head=model.lm_head) if given else CausalLM(model)
    found = lm.log_prob(rows)
    assert found.dtype == torch.float32
    expected = causal.padded(model, *models.inside(rows))
    assert_close(found, expected, dtype=torch.bfloat16)
    run_step(lm, rows, torch.ones(6), gate=kondo.Gate(rate=0.5))
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_a_bfloat16_head_on_float32_residuals():
    """Mamba casts them itself; a head that is given beside a backbone must fit it."""
    model, rows = models.build(models.mamba, dtype=torch.bfloat16), models.rows("left")
    exact = causal.one_by_one(copy.deepcopy(model).double(), *models.inside(rows))
    plain = causal.one_by_one(model, *models.inside(rows))
    found = CausalLM(model).log_prob(rows)
    spare = TOLERANCES[torch.bfloat16]["rtol"] * exact.norm()
    assert (found - exact).norm() <= (plain - exact).norm() + spare
    with pytest.raises(ValueError, match=r"the head's dtype, torch.bfloat16, got torch.float32"):
        CausalLM(model.backbone, head=model.lm_head).log_prob(rows)


@pytest.mark.parametrize("attention", LAYOUTS)
def test_a_bfloat16_model(attention):
    model, rows = (
        models.build(models.qwen2, dtype=torch.bfloat16, initializer_range=0.1),
        models.rows(),
    )
    exact = causal.one_by_one(copy.deepcopy(model).double(), *models.inside(rows))
    found = CausalLM(model, attention=attention).log_prob(rows)
    assert found.dtype == torch.float32
    assert_close(found, exact, dtype=torch.bfloat16)
    found.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


def lora(model, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).double()


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
@pytest.mark.parametrize("attention", LAYOUTS)
def test_lora(attention, saved):
    """Adapters inside the layers are trained, the frozen weights get no gradient."""
    rows = models.rows("left")
    model = lora(
        models.build(models.llama), target_modules=["q_proj", "v_proj"], modules_to_save=saved
    )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in trained)
    loss = causal.one_by_one(model, *models.inside(rows)).sum()
    loss.backward()
    expected = models.grads(model)
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable()
    lm = CausalLM(model, attention=attention)
    found = lm.log_prob(rows)
    assert_close(found.sum(), loss)
    found.sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (name in trained), name
        assert_close(models.grads(model)[name], expected[name])


def test_an_adapter_on_the_head_is_refused():
    model = lora(models.build(models.llama), target_modules=["lm_head"])
    with pytest.raises(ValueError, match=r"plain linear head.*target modules"):
        CausalLM(model)


def test_learned_prompts_are_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="must not learn prompts"):
        CausalLM(peft.get_peft_model(models.build(models.llama), config))


def test_rows_stay_where_they_are_and_packs_go_to_the_model(device):
    model, rows = models.build(models.llama, device=device), models.rows()
    found = CausalLM(model).log_prob(rows)
    assert found.device.type == device.type
    expected = causal.one_by_one(copy.deepcopy(model).cpu(), *models.inside(rows))
    # Rotary angles are float32 in any model, and their sines another device's.
    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_kernel_is_asked_for_what_the_mask_gives(window, monkeypatch):
    """Rows, shared keys, scale and window, in the terms of torch's flash attention."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(9, heads, 5, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    )
    starts = torch.tensor([0, 2, 3, 9], dtype=torch.int32)

    def kernel(
        query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal_, mask, *,
        scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert (cu_q is cu_k, max_q, max_k, dropout, mask) == (True, 6, 6, 0.0, False)
        assert causal_ == (window is None)
        sizes = (window_size_left, window_size_right)
        return (causal.attention_by_rows(query, key, value, cu_q, scale=scale, window_size=sizes),)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    inputs, options = (query, key, value, starts, 6), {"scale": 0.3, "window": window}
    expected = packed_attention(*inputs, **options)
    monkeypatch.setattr(attention_module, "_has_flash", lambda _: True)
    found = packed_attention(*inputs, **options)
    assert_close(found, expected)
    assert found.shape == (9, 4, 5)


@pytest.mark.parametrize("make", [models.llama, models.qwen2, models.qwen3, models.mistral])
def test_no_value_is_read_back_while_a_pack_is_run(make, monkeypatch):
    """On the meta device there are no values: whoever asks for one, a device sync, fails."""
    model, rows = models.build(make, dtype=torch.bfloat16), models.rows("left")
    lm = CausalLM(model, attention="varlen")
    pack = pack_of(rows, "varlen")
    tensors = {k: v.to("meta") for k, v in vars(pack).items() if isinstance(v, torch.Tensor)}
    pack = dataclasses.replace(pack, **tensors)
    model.to("meta")
    monkeypatch.setattr(attention_module, "_has_flash", lambda _: True)
    # The meta device has no autocast to ask about; the head's own tests look at the head.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(lm_model, "token_log_probs", lambda hidden, *_, **__: hidden.sum(-1))
    lm.log_prob(pack).sum().backward()
    assert all(p.grad.device.type == "meta" for p in model.model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(
    "make", [models.llama, models.qwen2, models.qwen3, models.mistral, models.qwen2_moe]
)
def test_the_kernel_attends_like_the_mask(make):
    """Flash attention on packs, forward and backward, against the model in float64."""
    options = {"hidden_size": 64, "head_dim": 16, "initializer_range": 0.15}
    model = models.build(make, dtype=torch.bfloat16, device="cuda", **options)
    rows = to_device(models.rows("both", num_rows=16, columns=40), "cuda")
    lm = CausalLM(model)
    assert lm.layout == "varlen"
    truth = copy.deepcopy(model).double()
    exact = causal.one_by_one(truth, *models.inside(rows))
    found = lm.log_prob(rows)
    assert float((found - exact).detach().abs().mean()) < 0.05
    exact.sum().backward()
    found.sum().backward()
    wanted, grads = models.grads(truth), models.grads(model)
    for name in wanted:
        if "q_proj" in name or "k_proj" in name or "v_proj" in name or "embed" in name:
            cosine = nn.functional.cosine_similarity(
                grads[name].double().flatten(), wanted[name].flatten(), dim=0
            )
            assert float(cosine) > 0.98, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_autocast_takes_the_kernel_too(monkeypatch):
    calls = []
    inner = attention_module._has_flash

    def noted(query):
        calls.append(inner(query))
        return calls[-1]

    monkeypatch.setattr(attention_module, "_has_flash", noted)
    lm = CausalLM(models.build(models.llama, dtype=torch.float32, device="cuda", head_dim=16))
    assert lm.layout == "padded"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert lm.layout == "varlen"
        calls.clear()
        lm.log_prob(to_device(models.rows(), "cuda")).sum().backward()
    assert calls == [True, True]  # layers


def test_autocast_on_the_cpu(monkeypatch):
    """Queries and keys that rotary embeddings leave in float32 meet values in bfloat16."""
    dtypes = set()

    def noted(*given, **options):
        dtypes.update(part.dtype for part in given[:3])
        return packed_attention(*given, **options)

    model, rows = models.build(models.llama, dtype=torch.float32), models.rows("left")
    lm = CausalLM(model, attention="varlen")
    monkeypatch.setattr(attention_module, "packed_attention", noted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = lm.log_prob(rows)
    assert dtypes == {torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = causal.one_by_one(model, *models.inside(rows))
    assert float((found - expected).detach().abs().mean()) < 0.1


def test_auto_is_padded_without_the_kernel():
    assert CausalLM(models.build(models.llama, dtype=torch.bfloat16)).layout == "padded"


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: models.build(models.gemma2), "soft-capped"),
        (lambda: models.build(models.mamba), "cannot be replaced|not attention"),
        (lambda: models.build(models.llama, attention_dropout=0.1), "dropout"),
    ],
)
def test_varlen_says_why_it_cannot(build, reason):
    with pytest.raises(ValueError, match=f'"varlen" must fit the model.*({reason})'):
        CausalLM(build(), attention="varlen")


def test_varlen_wants_a_model_whose_attention_can_be_replaced():
    with pytest.raises(ValueError, match="not a Hugging Face model"):
        CausalLM(models.Recurrent(), head=nn.Linear(12, models.VOCAB), attention="varlen")


def test_varlen_refuses_a_model_that_mixes_rows():
    """The check by trial: a layer that looks at its neighbours, of which no flag tells."""
    model = models.build(models.llama)
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.mean(1, True))
    with pytest.raises(ValueError, match="results differ"):
        CausalLM(model, attention="varlen")


def test_varlen_refuses_what_it_does_not_know():
    model = models.build(models.llama)
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, options: (args, options | {"s_aux": torch.zeros(4)}), with_kwargs=True
    )
    with pytest.raises(ValueError, match="plain causal attention, got s_aux from LlamaAttention"):
        CausalLM(model, attention="varlen")


class Headless(nn.Module):
    def forward(self, input_ids):
        return input_ids


def test_models_without_a_separable_head_are_refused():
    with pytest.raises(ValueError, match="separable head, got Headless"):
        CausalLM(Headless())
    with pytest.raises(ValueError, match="separable head, got LlamaModel"):
        CausalLM(models.build(models.llama).model)


def test_a_wrapper_whose_forward_would_not_run_is_refused():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*kondo.lm.TokenLogProb"):
        CausalLM(wrapped)


def test_positions_are_refused_where_the_model_takes_none():
    rows = models.rows()
    rows = dataclasses.replace(rows, position_ids=causal.positions(rows.attention_mask))
    with pytest.raises(ValueError, match="position_ids must be None for MambaModel"):
        CausalLM(models.build(models.mamba)).log_prob(rows)


class Stretched(models.Recurrent):
    """A plain backbone whose config has parameters for each kind of layer."""

    config = types.SimpleNamespace(
        rope_parameters={
            "sliding_attention": {"rope_type": "default"},
            "full_attention": {"rope_type": "dynamic", "factor": 2.0},
        }
    )


@pytest.mark.parametrize("attention", LAYOUTS)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_of_the_longest_row_are_refused(kind, attention):
    """A row's log-probs would change with what else is in its pack, and with where it is cut."""
    factors = {"long_factor": [4.0, 4.0], "short_factor": [1.0, 1.0]} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4} | factors
    model = models.build(
        models.llama,
        rope_parameters=rope | {"original_max_position_embeddings": 8},
        max_position_embeddings=8,
    )
    with pytest.raises(ValueError, match=rf"rope_type \['{kind}'\] in LlamaModel"):
        CausalLM(model, attention=attention)
    with pytest.raises(ValueError, match=r"rope_type \['dynamic'\] in Stretched"):
        CausalLM(Stretched(), head=nn.Linear(12, models.VOCAB))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_that_do_not_depend_on_the_row_are_welcome(kind):
    rope = {
        "rope_type": kind,
        "factor": 4.0,
        "rope_theta": 1e4,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    model, rows = models.build(models.llama, rope_parameters=rope), models.rows("left")
    assert_close(CausalLM(model).log_prob(rows), causal.one_by_one(model, *models.inside(rows)))


def test_eager_attention_is_padded():
    model = models.build(models.llama, attn_implementation="eager")
    with pytest.raises(ValueError, match=r'its attention is "eager".*attn_implementation="sdpa"'):
        CausalLM(model, attention="varlen")
    assert CausalLM(model).layout == "padded"


class FullyShardedDataParallel(nn.Module):
    """Known by its name."""


def test_wrappers_that_gather_weights_in_a_forward_of_their_own_are_refused():
    model = models.build(models.llama)
    model.model.layers[1].mlp = FullyShardedDataParallel()
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel.*fully_shard"):
        CausalLM(model)


def test_a_head_that_is_spread_over_ranks_is_refused(monkeypatch):
    class DTensor(nn.Parameter):
        pass

    fake = types.SimpleNamespace(DTensor=DTensor)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", fake)
    model, rows = models.build(models.llama), models.rows()
    lm = CausalLM(model)
    model.lm_head.weight = DTensor(model.lm_head.weight.detach())
    for call in (lambda: CausalLM(model), lambda: lm.log_prob(rows)):
        with pytest.raises(ValueError, match="whose weights are whole, got a DTensor"):
            call()


def test_a_model_that_is_compiled_as_a_whole_is_refused():
    model = torch.compile(models.build(models.llama), backend="eager")
    with pytest.raises(ValueError, match=r"torch.compile as a whole.*layer.compile\(\)"):
        CausalLM(model)


@pytest.mark.parametrize("attention", LAYOUTS)
def test_layers_are_not_compiled_for_the_constructors_trials(attention):
    model, rows, graphs = models.build(models.llama), models.rows("left"), []
    expected = causal.one_by_one(model, *models.inside(rows)).detach()

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, dynamic=True)
    lm = CausalLM(model, attention=attention)
    assert not graphs
    assert_close(lm.log_prob(rows).detach(), expected)
    assert graphs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"attention": "flash"}, "attention must be .* got 'flash'"),
    ],
)
def test_options_that_cannot_be_right(options, message):
    with pytest.raises(ValueError, match=message):
        CausalLM(models.Recurrent(), head=nn.Linear(12, 3), **options)


def test_rows_must_be_token_rows():
    lm = CausalLM(models.build(models.llama))
    with pytest.raises(ValueError, match=r"rows must be kondo.lm.TokenRows, got dict"):
        lm.log_prob({"input_ids": torch.zeros(1, 2)})


def test_a_backbone_must_return_hidden_states():
    backbone = models.Recurrent()
    backbone.forward = lambda *_, **__: {"hidden": 1}
    lm = CausalLM(backbone, head=nn.Linear(12, models.VOCAB))
    with pytest.raises(ValueError, match=r"hidden states \[B, T, D\].*got dict"):
        lm.log_prob(models.rows())


def test_ids_beyond_the_vocabulary_are_refused():
    lm = CausalLM(models.build(models.llama))
    rows = models.rows()
    ids = rows.input_ids.clone()
    ids[3, 0] = models.VOCAB
    with pytest.raises(ValueError, match=rf"\[0, {models.VOCAB}\).*tokeniser.*row 3"):
        lm.log_prob(dataclasses.replace(rows, input_ids=ids))


def test_a_pack_is_read_by_itself():
    model, rows = models.build(models.llama), models.rows()
    lm = CausalLM(model)
    pack = pack_of(rows, "padded")
    assert isinstance(pack, Pack)
    found = lm.log_prob(pack)
    assert torch.equal(found, lm.log_prob(rows)[pack.rows, pack.columns])
