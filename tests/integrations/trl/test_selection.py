"""What is kept is what delight says, and nothing else enters the training forward."""

import pytest
import torch

import kondo
from integrations.trl.recording import centred, number_rows, record
from integrations.trl.tiny import policy, reward, trainer
from integrations.trl.versions import TAKES_UNSCORED
from kondo.lm import BudgetGate, TokenRows
from oracles.engine import element_keep
from oracles.grpo import counted, log_probs_and_entropy
from oracles.variance import best_sets
from tolerances import assert_close


class Forwards:
    """Shapes that enter the model, with and without a graph."""

    def __init__(self, model):
        self.shapes = {True: [], False: []}
        self.tokens = {True: 0, False: 0}
        model.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs):
        if kwargs.get("use_cache"):
            return  # generation
        graph = torch.is_grad_enabled()
        self.shapes[graph].append(tuple(kwargs["input_ids"].shape))
        self.tokens[graph] += int(kwargs["attention_mask"].sum())


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize(("unit", "rate"), [("sequence", 0.3), ("token", 0.1)])
def test_the_most_delightful_are_kept(tmp_path, monkeypatch, unit, rate, scale):
    outputs = number_rows(monkeypatch)
    model = policy()
    gated = trainer(
        tmp_path,
        model=model,
        kondo_gate=f"delight:{rate}",
        kondo_unit=unit,
        max_steps=1,
        scale_rewards=scale,
    )
    start = {name: value.clone() for name, value in model.state_dict().items()}
    (step,) = record(gated)
    model.load_state_dict(start)
    raw = outputs[0] | {"keep": None}
    with torch.no_grad():
        log_probs, _ = log_probs_and_entropy(model, raw, 1.0)
    # The gate looks at the centred advantage, whatever the loss divides it by.
    advantages = centred(raw, reward, 4)
    expected = element_keep(log_probs, advantages, counted(raw).bool(), unit, rate)
    rows = torch.cat([part["row_id"] for part in step["slices"]])
    found = torch.cat([part["kondo_keep"] for part in step["slices"]])
    assert torch.equal(found, expected[rows])
    assert sorted(rows.tolist()) == list(range(8))
    first = gated.state.log_history[0]
    seen = 8 if unit == "sequence" else int(counted(raw).sum())
    kept = int(expected.any(1).sum()) if unit == "sequence" else int(expected.sum())
    assert_close(first["kondo/rate"], kept / seen)


def coin(completion_ids, **kwargs):
    """Right or wrong: nearly all rows tie, and some groups agree."""
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


@pytest.mark.parametrize("rewards", [reward, coin])
@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_the_rows_whose_rewards_vary_most_are_kept(tmp_path, monkeypatch, rate, scale, rewards):
    outputs = number_rows(monkeypatch)
    gated = trainer(
        tmp_path,
        kondo_gate=f"variance:{rate}",
        per_device_train_batch_size=8,
        max_completion_length=20,  # rows of many lengths
        reward_funcs=rewards,
        scale_rewards=scale,
    )
    steps = record(gated)
    for raw, step in zip(outputs, steps, strict=True):
        # The gate looks at the centred advantage, whatever the loss divides it by.
        values = centred(raw, rewards, 4).tolist()
        best = best_sets(values, [True] * 16, rate)
        rows = torch.cat([part["row_id"] for part in step["slices"]])
        found = torch.cat([part["kondo_keep"] for part in step["slices"]])
        assert torch.equal(found, found.any(1, keepdim=True) & counted(raw).bool()[rows])
        assert set(rows[found.any(1)].tolist()) in best
    logs = [log["kondo/rate"] for log in gated.state.log_history if "kondo/rate" in log]
    assert logs == [round(rate * 16) / 16] * 3
    assert "kondo/price" not in gated.state.log_history[0]  # there is none


def test_variance_needs_no_screen(tmp_path):
    model = policy()
    seen = Forwards(model)
    gated = trainer(tmp_path, model=model, kondo_check=False, kondo_gate="variance:0.25")
    gated.train()
    assert seen.shapes[False] == []
    assert [rows for rows, _ in seen.shapes[True]] == [2, 2, 2]
    assert gated.state.log_history[0]["kondo/seconds_screen"] == 0


def test_only_kept_rows_enter_the_training_forward(tmp_path):
    model = policy()
    seen = Forwards(model)
    gated = trainer(
        tmp_path,
        model=model,
        kondo_check=False,
        kondo_gate="unbiased:0.25",
        gradient_accumulation_steps=4,
    )
    gated.train()
    # 16 rows a step, of which 4 are kept: one micro-step of 4 rows, three idle ones.
    assert [rows for rows, _ in seen.shapes[True]] == [4, 4, 4]
    trained = sum(log.get("kondo/tokens_trained", 0) for log in gated.state.log_history)
    assert trained == seen.tokens[True]
    logs = [log for log in gated.state.log_history if "kondo/rows_trained" in log]
    assert [log["kondo/rows_trained"] for log in logs] == [4, 4, 4]
    assert [log["kondo/rows_seen"] for log in logs] == [16, 16, 16]


def test_rows_are_cut_after_their_last_kept_token(tmp_path, monkeypatch):
    outputs = number_rows(monkeypatch)
    model = policy()
    seen = Forwards(model)
    gated = trainer(
        tmp_path,
        model=model,
        kondo_check=False,
        kondo_gate="unbiased:0.5",
        kondo_unit="token",
        max_steps=1,
    )
    gated.gate = first_two_tokens
    (step,) = record(gated)
    num_prompt = outputs[0]["prompt_ids"].shape[1]
    assert [width for _, width in seen.shapes[True]] == [num_prompt + 2] * 2
    assert all(part["completion_ids"].shape[1] > 2 for part in step["slices"])


def first_two_tokens(values, mask, generator=None):
    width = len(mask) // 8  # tokens of 8 rows, one after another
    keep = mask & (torch.arange(len(mask)) % width < 2)
    one = torch.tensor(1.0, dtype=torch.float64)
    return kondo.Choice(keep, keep.float(), one, one, keep.float())


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_a_gate_of_rows_is_bound_to_prompts_and_completions(tmp_path, monkeypatch, unit):
    outputs = number_rows(monkeypatch)
    model = policy()
    gated = trainer(tmp_path, model=model, kondo_gate="unbiased:0.5", kondo_unit=unit, max_steps=1)
    gated.gate = BudgetGate(budget=0.3)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    (step,) = record(gated)
    model.load_state_dict(start)
    raw = outputs[0]
    with torch.no_grad():
        log_probs, _ = log_probs_and_entropy(model, raw, 1.0)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    rows = TokenRows.join(*(raw[name] for name in names))
    log_probs = torch.nn.functional.pad(log_probs, (raw["prompt_ids"].shape[1], 0))
    gate, mask = BudgetGate(budget=0.3).for_rows(rows), rows.completion_mask
    chosen = kondo.select(log_probs, centred(raw, reward, 4), gate=gate, unit=unit, mask=mask)
    expected = chosen.elements.keep
    order = torch.cat([part["row_id"] for part in step["slices"]])
    found = torch.cat([part["kondo_keep"] for part in step["slices"]])
    assert 0 < int(found.sum()) < int(counted(raw).sum())
    assert torch.equal(found, expected[order][:, -found.shape[1] :])


def test_a_gate_brings_its_own_signal(tmp_path):
    model = policy()
    seen = Forwards(model)
    gated = trainer(tmp_path, model=model, kondo_check=False, kondo_gate="unbiased:0.25")
    gated.gate = kondo.Gate(rate=0.25, signal=kondo.signals.abs_advantage)
    gated.train()
    assert seen.shapes[False] == []  # no log-probs, no screen
    assert [rows for rows, _ in seen.shapes[True]] == [2, 2, 2]


def test_weights_by_delight_need_a_gate_by_delight(tmp_path):
    gated = trainer(tmp_path, kondo_gate="delight:0.25", delight_eta=1.0)
    with pytest.raises(ValueError, match="delight_eta must be None with the gate VarianceGate"):
        gated.gate = kondo.VarianceGate(rate=0.25)


def test_log_probs_the_trainer_already_has_are_not_computed_again(tmp_path):
    model = policy()
    seen = Forwards(model)
    trainer(
        tmp_path,
        model=model,
        kondo_check=False,
        kondo_gate="unbiased:0.25",
        num_iterations=2,
        max_steps=2,
    ).train()
    assert len(seen.shapes[False]) == 2  # TRL's own old log-probs, in chunks of 4 of 8 rows


def sampled(prompts, trainer):
    """A rollout that returns its log-probs: the first tokens of each prompt, then the row."""
    tokens = [[2 + (3 * i + j) % 20 for j in range(5)] for i in range(len(prompts))]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": tokens,
        "logprobs": [[-0.1 * (i + 1)] * 5 for i in range(len(prompts))],
    }


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("screen", ["auto", "rollout"])
def test_the_sampler_s_log_probs_screen_for_nothing(tmp_path, monkeypatch, screen):
    outputs = number_rows(monkeypatch)
    model = policy()
    seen = Forwards(model)
    gated = trainer(
        tmp_path,
        model=model,
        kondo_check=False,
        kondo_gate="delight:0.25",
        kondo_screen=screen,
        max_steps=1,
        trainer_options={"rollout_func": sampled},
    )
    (step,) = record(gated)
    assert seen.shapes[False] == []
    raw = outputs[0]
    log_probs = raw["sampling_per_token_logps"]
    expected = element_keep(
        log_probs, centred(raw, reward, 4), counted(raw).bool(), "sequence", 0.25
    )
    rows = torch.cat([part["row_id"] for part in step["slices"]])
    assert torch.equal(torch.cat([p["kondo_keep"] for p in step["slices"]]), expected[rows])


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_an_exact_screen_does_not_trust_the_sampler(tmp_path):
    model = policy()
    seen = Forwards(model)
    options = {
        "kondo_gate": "unbiased:0.25",
        "kondo_screen": "exact",
        "max_steps": 1,
        "kondo_check": False,
    }
    trainer(tmp_path, model=model, trainer_options={"rollout_func": sampled}, **options).train()
    assert len(seen.shapes[False]) == 2


@pytest.mark.skipif(not TAKES_UNSCORED, reason="this TRL takes no log-prob of None; 1.11 does")
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_tokens_the_sampler_could_not_score_are_counted(tmp_path):
    def partly(prompts, trainer):
        output = sampled(prompts, trainer)
        output["logprobs"][3][2] = None
        return output

    options = {
        "kondo_gate": "unbiased:0.25",
        "max_steps": 1,
        "trainer_options": {"rollout_func": partly},
    }
    gated = trainer(tmp_path, **options)
    gated.train()
    assert gated.state.log_history[0]["kondo/unscored_tokens"] == 1


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_a_rollout_without_log_probs_is_refused(tmp_path):
    def silent(prompts, trainer):
        return sampled(prompts, trainer) | {"logprobs": None}

    options = {"kondo_gate": "unbiased:0.25", "trainer_options": {"rollout_func": silent}}
    gated = trainer(tmp_path, kondo_screen="rollout", **options)
    with pytest.raises(ValueError, match="this rollout returned none"):
        gated.train()


def test_a_reward_that_is_infinite_is_refused_by_name(tmp_path):
    def broken(completion_ids, **kwargs):
        return [float("inf"), *[0.0] * (len(completion_ids) - 1)]

    gated = trainer(tmp_path, kondo_gate="unbiased:0.25", reward_funcs=broken)
    with pytest.raises(ValueError, match=r"rewards must be finite .* in unit 0"):
        gated.train()


def test_rows_without_a_reward_are_never_kept(tmp_path, monkeypatch):
    number_rows(monkeypatch)

    def partly(completion_ids, **kwargs):
        return [None, *reward(completion_ids[1:])]

    steps = record(trainer(tmp_path, kondo_gate="unbiased:0.8", reward_funcs=partly))
    for step in steps:
        for part in step["slices"]:
            assert not part["kondo_keep"][part["row_id"] == 0].any()


def test_negative_rows_have_their_quota(tmp_path):
    gated = trainer(tmp_path, kondo_gate="delight:0.5,negative_quota=0.5")
    gated.train()
    shares = [log.get("kondo/kept_positive_share") for log in gated.state.log_history[:3]]
    assert all(share <= 0.5 for share in shares)


def test_entropy_and_kl_are_means_over_trained_tokens(tmp_path, monkeypatch):
    outputs = number_rows(monkeypatch)
    model = policy()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    gated = trainer(tmp_path, model=model, kondo_gate="unbiased:0.3", max_steps=1)
    (step,) = record(gated)
    model.load_state_dict(start)
    with torch.no_grad():
        _, entropy = log_probs_and_entropy(model, outputs[0], 1.0)
    rows = torch.cat([part["row_id"] for part in step["slices"]])
    keep = torch.cat([part["kondo_keep"] for part in step["slices"]])
    assert_close(gated.state.log_history[0]["entropy"], entropy[rows][keep].mean(), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(("unit", "rate"), [("sequence", 0.25), ("token", 0.1)])
def test_a_gpu_trains_in_half_precision(tmp_path, unit, rate):
    options = {"use_cpu": False, "bf16": True, "gradient_checkpointing": True}
    gated = trainer(
        tmp_path, kondo_gate=f"unbiased:{rate}", kondo_unit=unit, num_iterations=2, **options
    )
    start = [parameter.detach().clone() for parameter in gated.model.parameters()]
    gated.train()
    assert gated.model.device.type == "cuda"
    assert any(
        not torch.equal(old, new) for old, new in zip(start, gated.model.parameters(), strict=True)
    )
    assert gated.state.log_history[0]["kondo/tokens_trained"] > 0
