"""kondo.lm.graphs: padded packs compute what packs compute; replays give the same gradients."""

import copy
import dataclasses
import math
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kondo
from kondo.lm import CausalLM, graphs
from kondo.lm.graphs import Graphs, Inputs, fill, shape_of
from kondo.lm.pack import packs
from steps import run_step
from tolerances import assert_close

from . import models

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def pack_of(rows, device=None):
    (pack,) = packs(rows, rows.completion_mask, layout="varlen", max_tokens=10**6, device=device)
    return pack


def on_gpu(rows):
    moved = {k: v.cuda() for k, v in vars(rows).items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(rows, **moved)


def empty_inputs(shape):
    return Inputs(
        torch.full((1, shape.tokens), 7),
        torch.full((1, shape.tokens), 7),
        torch.full((shape.rows + 1,), 7, dtype=torch.int32),
    )


@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_a_shape_has_room_for_the_pack_and_its_padding(lengths):
    total, longest = sum(lengths), max(lengths)
    shape = shape_of(total, len(lengths), longest)
    padding = shape.tokens - total
    assert 0 <= padding < max(graphs.STEP, total / 8)
    assert shape.rows >= len(lengths) + math.ceil(padding / graphs.STEP)
    assert shape.longest >= max(longest, min(padding, graphs.STEP))
    # Few shapes: twice of what is needed at most.
    assert shape.rows <= 2 * (len(lengths) + max(1, total / 8 / graphs.STEP))
    assert shape.longest <= 2 * max(longest, graphs.STEP)


def test_long_packs_of_any_length_have_few_shapes():
    for longest in (10_000, 100_000, 1_000_000):
        lengths = range(longest // 2, longest, 97)
        assert len({shape_of(total, 1, 1).tokens for total in lengths}) <= 9


def test_how_much_is_padded_makes_no_other_shape():
    assert len({shape_of(total, 60, 32) for total in range(1025, 1537)}) == 1
    assert len({shape_of(total, 300, 32) for total in range(8193, 9217)}) == 1


@pytest.mark.parametrize("step", [1, 16, 64])
@pytest.mark.parametrize("copies", [1, 40])
def test_padding_is_in_rows_of_its_own_behind_the_others(step, copies, monkeypatch):
    monkeypatch.setattr(graphs, "STEP", step)
    rows = models.rows("left")
    pack = pack_of(
        dataclasses.replace(
            rows,
            **{
                name: value.repeat(copies, 1)
                for name, value in vars(rows).items()
                if isinstance(value, torch.Tensor)
            },
        )
    )
    shape = shape_of(pack.num_tokens, pack.num_rows, pack.max_length)
    inputs = empty_inputs(shape)
    fill(inputs, pack)
    total = pack.num_tokens
    assert torch.equal(inputs.input_ids[:, :total], pack.input_ids)
    assert torch.equal(inputs.position_ids[:, :total], pack.position_ids)
    assert not inputs.input_ids[:, total:].any()
    assert not inputs.position_ids[:, total:].any()
    assert inputs.starts[: pack.num_rows + 1].tolist() == pack.cu_seqlens.tolist()
    lengths = inputs.starts.diff()
    assert bool((lengths >= 0).all())
    assert int(lengths.sum()) == shape.tokens
    assert int(lengths.max()) <= shape.longest
    padding = lengths[pack.num_rows :].tolist()
    assert max(padding) <= step
    assert sum(padding) == shape.tokens - total


@pytest.mark.parametrize("make", [models.llama, models.qwen2])
def test_a_padded_pack_has_the_hidden_states_and_gradients_of_the_pack(make, monkeypatch):
    monkeypatch.setattr(graphs, "STEP", 64)
    model = models.build(make)
    lm = CausalLM(model, attention="varlen")
    pack = pack_of(models.rows("both"))
    shape = shape_of(pack.num_tokens, pack.num_rows, pack.max_length)
    assert shape.tokens > pack.num_tokens
    inputs = empty_inputs(shape)
    fill(inputs, pack)
    weights = list(lm.backbone.parameters())
    padded = lm._run_varlen(inputs, shape.longest)[:, : pack.num_tokens]
    own = lm._run_varlen(
        Inputs(pack.input_ids, pack.position_ids, pack.cu_seqlens), pack.max_length
    )
    assert_close(padded, own)
    pull = torch.randn_like(own)
    for found, expected in zip(
        torch.autograd.grad(padded, weights, pull),
        torch.autograd.grad(own, weights, pull),
        strict=True,
    ):
        assert_close(found, expected)


class Tape:
    """Stands for recorded graphs: replays by computing, so that order and accounts can be seen."""

    def __init__(self, monkeypatch):
        self.recorded, self.places = [], set()
        monkeypatch.setattr(graphs, "_record", self.record)
        monkeypatch.setattr(graphs.Graphs, "_check", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def record(self, run, shape, inputs, learning, pool, gradients):
        self.recorded.append(shape)
        hidden = run(inputs, shape.longest).detach()
        gradient = torch.zeros_like(hidden)
        gradients = gradients or tuple(torch.zeros_like(weight) for weight in learning)
        self.places.add(tuple(map(id, gradients)))

        def forward():
            with torch.enable_grad():
                self.live = run(inputs, shape.longest)
            hidden.copy_(self.live.detach())

        def backward():
            for place, found in zip(
                gradients, torch.autograd.grad(self.live, learning, gradient), strict=True
            ):
                place.copy_(found)

        return graphs._Recorded(
            inputs,
            types.SimpleNamespace(replay=forward),
            hidden,
            gradient,
            types.SimpleNamespace(replay=backward),
            gradients,
        )


def gradients_of(lm, rows, **options):
    lm.module.zero_grad(set_to_none=True)
    advantages = torch.linspace(-1, 1, len(rows.input_ids), device=rows.input_ids.device)
    report = run_step(lm, rows, advantages, gate=kondo.Gate(rate=0.7), **options)
    return report, [weight.grad for weight in lm.module.parameters()]


def test_replayed_packs_add_up_to_the_gradient_of_packs(monkeypatch):
    """Two packs and more in one step: what a replay returns must not be overwritten by the next."""
    tape, model = Tape(monkeypatch), models.build(models.llama)
    rows = models.rows("both")
    plain = CausalLM(model, attention="varlen", max_tokens=16)
    report, expected = gradients_of(plain, rows)
    assert report.calls > 2
    replayed = CausalLM(model, attention="varlen", max_tokens=16, graph_tokens=16)
    for _ in range(2):
        _, found = gradients_of(replayed, rows)
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs)
    assert 0 < len(tape.recorded) == len(set(tape.recorded))


def test_all_shapes_write_their_gradients_to_one_place(monkeypatch):
    """A copy for each would cost the memory of the model again and again."""
    monkeypatch.setattr(graphs, "STEP", 1)
    tape, model = Tape(monkeypatch), models.build(models.llama)
    lm = CausalLM(model, attention="varlen", graph_tokens=10**6)
    for columns in (7, 8, 9):
        gradients_of(lm, models.rows(columns=columns))
    assert (len(tape.recorded), len(tape.places)) == (3, 1)
    next(model.parameters()).requires_grad_(False)  # and nothing of the wrong number
    gradients_of(lm, models.rows(columns=7))
    assert (len(tape.recorded), len(tape.places)) == (4, 2)


def test_what_a_replay_gave_outlives_the_next_one(monkeypatch):
    """A long pack and a short one in one shape: nothing of the long one stays where it was."""
    tape, model = Tape(monkeypatch), models.build(models.llama)
    model.model.embed_tokens.weight.data[0] = 1.0  # or padding would be 0 in every layer
    lm = CausalLM(model, attention="varlen", graph_tokens=10**6)
    weights = list(lm.backbone.parameters())
    long, short = (pack_of(models.rows(columns=columns)) for columns in (9, 5))
    found, copies = [], []
    for pack in (long, short, long):
        hidden = lm._hidden(pack)
        found.append([hidden.detach(), *torch.autograd.grad(hidden.square().sum(), weights)])
        copies.append([tensor.clone() for tensor in found[-1]])
    assert len(tape.recorded) == 1
    for before, after in zip(copies, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    lm.graph_tokens = 0
    hidden = lm._hidden(short)
    expected = [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), weights)]
    for mine, theirs in zip(found[1], expected, strict=True):
        assert_close(mine, theirs)


def test_a_backbone_of_ones_own_is_replayed_too(monkeypatch):
    tape = Tape(monkeypatch)
    backbone, head = models.Attending().double(), torch.nn.Linear(12, models.VOCAB).double()
    rows = models.rows("both")
    found = []
    for graph_tokens in (0, 10**6):
        lm = CausalLM(backbone, head=head, attention="varlen", graph_tokens=graph_tokens)
        log_probs = lm.log_prob(rows)
        weights = [*backbone.parameters(), *head.parameters()]
        found.append([log_probs, *torch.autograd.grad(log_probs.sum(), weights)])
    assert len(tape.recorded) == 1
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs)


def test_only_small_packs_with_a_graph_are_replayed(monkeypatch):
    tape, model = Tape(monkeypatch), models.build(models.llama)
    rows = models.rows()
    tokens = pack_of(rows).num_tokens
    for limit in (0, tokens - 1):
        CausalLM(model, attention="varlen", graph_tokens=limit).log_prob(rows)
    with torch.no_grad():
        CausalLM(model, attention="varlen", graph_tokens=tokens).log_prob(rows)
    assert not tape.recorded
    CausalLM(model, attention="varlen", graph_tokens=tokens).log_prob(rows)
    assert len(tape.recorded) == 1


def test_a_new_graph_is_recorded_where_an_old_one_would_lie(monkeypatch):
    tape, model = Tape(monkeypatch), models.build(models.llama)
    lm = CausalLM(model, attention="varlen", graph_tokens=10**6)
    rows = models.rows()

    def records():
        before = len(tape.recorded)
        gradients_of(lm, rows)
        return len(tape.recorded) - before

    assert [records(), records()] == [1, 0]
    next(model.parameters()).requires_grad_(False)
    assert records() == 1
    lm.module.eval()
    assert records() == 1
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.clone()
    assert [records(), records()] == [1, 0]


def test_the_graph_unused_for_longest_makes_room(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(graphs, "STEP", 1)
    tape, model = Tape(monkeypatch), models.build(models.llama)
    lm = CausalLM(model, attention="varlen", graph_tokens=10**6)
    batches = [models.rows(columns=columns) for columns in (7, 8, 9)]
    for which, new in ((0, 1), (1, 1), (0, 0), (2, 1), (0, 0), (1, 1)):
        before = len(tape.recorded)
        lm.log_prob(batches[which])
        assert len(tape.recorded) - before == new


def test_packs_that_are_not_differentiated_in_turn_are_refused(monkeypatch):
    Tape(monkeypatch)
    lm = CausalLM(models.build(models.llama), attention="varlen", graph_tokens=10**6)
    rows = models.rows()
    first, second = lm.log_prob(rows).sum(), lm.log_prob(rows).sum()
    with pytest.raises(RuntimeError, match="differentiated once, before the next one is run"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="share their memory"):
        second.backward()


def test_a_copy_has_graphs_of_its_own(monkeypatch):
    tape, model = Tape(monkeypatch), models.build(models.llama)
    lm = CausalLM(model, attention="varlen", graph_tokens=10**6)
    rows = models.rows()
    gradients_of(lm, rows)
    twin = copy.deepcopy(lm)
    _, expected = gradients_of(lm, rows)
    lm.module.zero_grad(set_to_none=True)
    _, found = gradients_of(twin, rows)
    assert len(tape.recorded) == 2
    assert all(weight.grad is None for weight in lm.module.parameters())
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs)


def test_graphs_refuse_what_they_cannot_record():
    model = models.build(models.llama)
    with pytest.raises(ValueError, match="graph_tokens must be 0 for a model on cpu"):
        CausalLM(model, attention="varlen", graph_tokens=100).log_prob(models.rows())
    with pytest.raises(ValueError, match='and 0 with attention="padded"'):
        CausalLM(model, attention="padded", graph_tokens=100)
    with pytest.raises(ValueError, match="graph_tokens must be at least 0"):
        CausalLM(model, graph_tokens=-1)
    with pytest.raises(ValueError, match="graph_tokens must be 0 for packs side by side"):
        CausalLM(model, graph_tokens=100).log_prob(models.rows())
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="graph_tokens must be 0 with gradient checkpointing"):
        Graphs(model.model, lambda *_: None)._check(torch.device("cuda"))


@pytest.mark.parametrize(
    "add",
    [
        lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
        lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None),
        lambda model: model.model.norm.register_full_backward_hook(lambda *_: None),
        lambda model: model.model.norm.weight.register_hook(lambda gradient: gradient),
    ],
)
def test_hooks_that_a_replay_would_pass_by_are_refused(add, monkeypatch):
    Tape(monkeypatch)
    model, rows = models.build(models.llama), models.rows()
    lm = CausalLM(model, attention="varlen", graph_tokens=10**6)
    gradients_of(lm, rows)
    hook = add(model)
    with pytest.raises(ValueError, match="graph_tokens must be 0 for a model with hooks, got one"):
        gradients_of(lm, rows)
    hook.remove()
    gradients_of(lm, rows)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [models.llama, models.qwen2])
def test_replays_on_a_gpu_give_the_gradients_of_packs(make, compiled):
    options = {"hidden_size": 64, "head_dim": 16, "initializer_range": 0.15}
    model = models.build(make, dtype=torch.bfloat16, device="cuda", **options)
    if compiled:
        torch.compiler.reset()
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    batches = [
        on_gpu(models.rows("both", **size))
        for size in ({"num_rows": 16, "columns": 40}, {"num_rows": 40, "columns": 50})
    ]
    plain = CausalLM(model, max_tokens=700)
    replayed = CausalLM(model, max_tokens=700, graph_tokens=700)
    for _ in range(2):
        for rows in batches:
            _, expected = gradients_of(plain, rows)
            _, found = gradients_of(replayed, rows)
            for mine, theirs in zip(found, expected, strict=True):
                assert bool(mine.isfinite().all())
                error = (mine - theirs).float().norm() / theirs.float().norm().clamp_min(1e-12)
                assert float(error) < 0.02
        with torch.no_grad():  # a graph reads the weights as they are, not as they were
            for weight in model.parameters():
                weight.mul_(1.05)
