"""`kondo.check` of the forward of verl's engine: which rows it gets, what it finds, and that it
leaves nothing behind. With the real engine (FSDP2 and FSDP1, gloo, CPU) where verl is installed."""

import pytest
import torch

import kondo
from integrations.verl.worker_runs import run_all
from kondo.integrations.verl.first_batch import (
    check_engine,
    engine_forward,
    rows_to_try,
    token_rows,
)
from kondo.lm.trained_forward import Forward, TrainedForward, check_forwards
from tolerances import assert_close

KEEP = [1, 2, 6]
WORDS = 16
UPDATES = {"keep": KEEP, "updates": 2, "optimizer": "AdamW"}
SOUND = {
    "plain": {},
    "packed": {"packed": True},
    "one row a micro-batch": {"micro": 1},
    "dynamic": {"max_tokens": 24},
    "lora": {"lora": 4},
    "bf16": {"dtype": "bf16"},
    "checkpointing": {"checkpointing": True},
}
FAULTS = {
    "rows": "Log-probs of a row depend on the other rows",
    "ahead": "Log-probs of a token depend on later tokens",
    "random": "draws random numbers in evaluation mode",
    "raises": "FloatingPointError: this rank fails",
}


# Forwards of a rank: ten answers, three for tokens that look ahead, two gradients.
CALLS = {"fsdp2": 15, "fsdp": 13}


@pytest.fixture(scope="module", params=[(s, p) for s in CALLS for p in (1, 2)], ids=str)
def results(request, tmp_path_factory):
    strategy, processes = request.param
    runs = {}
    for name, options in SOUND.items():
        runs[name] = UPDATES | options | {"check": True}
        runs[f"{name}, off"] = UPDATES | options
    for fault in FAULTS:
        runs[f"fault {fault}"] = {"updates": 0, "check": True, "fault": fault}
    runs["fault, off"] = UPDATES | {"fault": "rows"}
    runs = {name: options | {"strategy": strategy} for name, options in runs.items()}
    folder = tmp_path_factory.mktemp("checked")
    return run_all(runs, folder, processes=processes, timeout=280) | {"calls": CALLS[strategy]}


@pytest.mark.verl
def test_sound_models_pass_and_train_bit_for_bit_as_without_it(results):
    for name in SOUND:
        on, off = results[name], results[f"{name}, off"]
        assert on["checked"]["findings"] == [], name
        assert on["checked"]["seconds"] > 0
        assert off["checked"] is None
        calls = [number for number, _, _ in on["checked"]["ranks"]]
        assert set(calls) == {results["calls"]}, name  # the same on all ranks
        assert all(same for _, same, _ in on["checked"]["ranks"]), name
        assert len(on["gradients"]) == len(off["gradients"]) == 2
        for mine, theirs in zip(on["gradients"], off["gradients"], strict=True):
            assert all(mine[key].equal(theirs[key]) for key in theirs), name
        for key, weight in off["weights"].items():
            assert on["weights"][key].equal(weight), (name, key)
        assert on["metrics"][0].keys() == off["metrics"][0].keys()


@pytest.mark.verl
def test_a_fault_of_one_rank_is_named_by_all_of_them(results):
    for fault, text in FAULTS.items():
        checked = results[f"fault {fault}"]["checked"]
        assert any(text in each for each in checked["findings"]), (fault, checked["findings"])
        for calls, same, findings in checked["ranks"]:
            assert findings == checked["findings"]
            assert calls == checked["ranks"][0][0]
            # FSDP1 does not take its parameters apart again where a forward ends in an error.
            assert same or (fault == "raises" and results["calls"] == CALLS["fsdp"]), fault


@pytest.mark.verl
def test_a_fault_trains_without_the_check(results):
    assert len(results["fault, off"]["gradients"]) == 2


class Module(torch.nn.Module):
    """Logits [n, S, WORDS] of the next token that depend on the one before; then a change."""

    def __init__(self, change=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.change = torch.nn.Embedding(WORDS, WORDS), change

    def forward(self, ids):
        return self.change(self.words(ids) * 0.5)


class Engine:
    """verl's engine, without verl: rows side by side, log-probs of the next token, jagged."""

    def __init__(self, module):
        self.module, self.settings = module, []

    def forward_step(self, data, loss_function, forward_only):
        assert not forward_only
        self.settings.append(data["temperature"])
        ids = data["input_ids"]
        assert [p.tolist() for p in data["position_ids"].unbind()] == [
            list(range(len(row))) for row in ids.unbind()
        ]
        padded, lengths = ids.to_padded_tensor(0), ids.offsets().diff()
        logits = self.module(padded).log_softmax(-1)
        values = torch.cat([row[:n] for row, n in zip(logits, lengths, strict=True)])
        following = torch.roll(ids.values(), -1)  # of a last token, another row's first one
        values = values.gather(1, following.unsqueeze(1)).squeeze(1)
        found = torch.nested.nested_tensor_from_jagged(values, offsets=ids.offsets())
        loss, metrics = loss_function(model_output={"log_probs": found}, data=data)
        assert loss.item() == 0
        assert metrics == {}


def some_rows(lengths=((3, 4), (2, 6), (1, 3), (4, 2), (2, 2))):
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(WORDS, (p + r,), generator=draw) for p, r in lengths]
    masks = [torch.ones(r, dtype=torch.int64) for _, r in lengths]
    masks[0][1] = 0
    return ids, masks


def test_rows_that_count_are_dealt_short_and_long_to_every_rank():
    mask = torch.ones(20, 3, dtype=torch.bool)
    mask[3] = False
    sizes = [50 - row for row in range(20)]
    for ranks in (1, 2, 3):
        rows = rows_to_try(mask, sizes, ranks)
        assert len(rows) == len(set(rows)) == {1: 8, 2: 16, 3: 18}[ranks]
        assert 3 not in rows
        assert {0, 19} <= set(rows)  # the longest and the shortest
        part = len(rows) // ranks
        for rank in range(ranks):
            own = rows[rank * part : (rank + 1) * part]
            assert own == sorted(own, reverse=True)
            assert own[0] > 15
            assert own[-1] < 5


def test_rows_that_do_not_count_fill_up_where_there_are_too_few():
    mask = torch.zeros(6, 2, dtype=torch.bool)
    assert rows_to_try(mask, [1] * 6, 2) == []
    mask[4, 1] = True
    assert rows_to_try(mask, [5, 4, 3, 2, 9, 1], 2) == [4, 5]


def test_long_rows_are_cut_around_the_first_token_that_counts():
    ids, masks = some_rows(((3, 4), (2, 6), (1, 3), (9, 6), (9, 1)))
    rows = token_rows(ids, masks, 5)
    assert rows.input_ids.shape == (5, 5)
    assert rows.input_ids[3].tolist() == ids[3][7:12].tolist()
    assert rows.input_ids[4].tolist() == ids[4][5:].tolist()
    assert (rows.completion_mask & rows.attention_mask).any(1).all()
    assert not rows.completion_mask[:, 0].any()
    assert rows.input_ids[1].tolist() == ids[1][:5].tolist()
    rows.check(WORDS)
    whole = token_rows(ids, masks, 99)
    assert [
        row[real].tolist() for row, real in zip(whole.input_ids, whole.attention_mask, strict=True)
    ] == [row.tolist() for row in ids]
    assert whole.completion_mask[0].nonzero().flatten().tolist() == [3, 5, 6]


def test_log_probs_are_those_of_the_tokens_themselves():
    rows, module = token_rows(*some_rows(), 99), Module()
    engine = Engine(module)
    found = engine_forward(engine, {"temperature": 0.7})(module, rows)
    logits = module(rows.input_ids).log_softmax(-1)
    wanted = logits[:, :-1].gather(2, rows.input_ids[:, 1:, None]).squeeze(2)
    assert found.shape == rows.input_ids.shape
    counted = rows.completion_mask[:, 1:]
    assert_close(found[:, 1:][counted], wanted[counted])
    assert found.requires_grad
    assert engine.settings == [0.7]


def tried(change=lambda x: x, *, most=4):
    module = Module(change)
    forward = Forward(module, engine_forward(Engine(module), {"temperature": 1.0}))
    check_forwards(TrainedForward(forward, most), token_rows(*some_rows(), 99))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x + x.mean(0, keepdim=True), "depend on the other rows"),
        (lambda x: x + x.flip(1).cumsum(1).flip(1), "depend on later tokens"),
        (lambda x: torch.nn.functional.dropout(x, 0.3), "draws random numbers in evaluation mode"),
        (lambda x: x.to(torch.float3), "AttributeError"),
    ],
)
def test_forwards_alone_find_faults(change, text):
    tried()
    draws = torch.get_rng_state()
    with pytest.raises(kondo.CheckError, match=text):
        tried(change)
    assert torch.get_rng_state().equal(draws)


def test_two_rows_are_enough_to_see_whether_they_depend_on_each_other():
    with pytest.raises(kondo.CheckError, match="depend on the other rows"):
        tried(lambda x: x + x.mean(0, keepdim=True), most=2)


def test_what_the_engine_computes_in_says_what_is_rounding():
    engine = Engine(Module(lambda x: x * (1 + 0.001 * len(x))))
    rows = token_rows(*some_rows(), 99)

    def tried_in(dtype):
        check_engine(engine, rows, {"temperature": 1.0}, most=4, dtype=dtype, gradients=False)

    tried_in(torch.bfloat16)
    with pytest.raises(kondo.CheckError, match="depend on the other rows"):
        tried_in(torch.float32)
