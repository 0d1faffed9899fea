"""Sequence ratios in TRL's loss: stale and mismatched completions, gated and dense."""

import math

import pytest
import torch

from integrations.trl.test_gradients import as_if_with_vllm, compare
from integrations.trl.test_selection import sampled
from integrations.trl.tiny import policy, trainer
from kondo.integrations.trl.correction import at_ratio_one, weighted_advantages
from tolerances import assert_close

CORRECTED = {"kondo_correction": "sequence", "epsilon_high": None}
STALE = [
    {"num_iterations": 2, "max_steps": 4},
    {"steps_per_generation": 4, "max_steps": 4},
    {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4},
]


def ratios(monkeypatch):
    """Return the list that takes the ratio of every advantage that was weighed."""
    seen = []

    def watched(log_probs, behaviour, inputs, cap):
        found = weighted_advantages(log_probs, behaviour, inputs, cap)
        before = inputs["advantages"].unsqueeze(1)
        seen.append(((found / before).amax(1))[before[:, 0] != 0])
        return found

    monkeypatch.setattr("kondo.integrations.trl.trainer.weighted_advantages", watched)
    return seen


@pytest.mark.parametrize("gate", ["unbiased:0.5", "dense"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("stale", STALE, ids=str)
def test_stale_completions_have_the_gradient_of_the_oracle(
    tmp_path, monkeypatch, stale, loss_type, gate
):
    seen = ratios(monkeypatch)
    options = stale | CORRECTED | {"kondo_gate": gate, "learning_rate": 1e-2}
    compare(tmp_path, monkeypatch, loss_type=loss_type, kondo_correction_cap=1.01, **options)
    found = torch.cat(seen)
    # Some completions are at the cap, some below 1: clipping would have stopped them.
    assert bool(found.isclose(torch.tensor(1.01)).any())
    assert bool((found < 0.8).any())


@pytest.mark.parametrize("gate", ["variance:0.5", "delight:0.5"])
def test_other_gates_keep_whole_completions_too(tmp_path, monkeypatch, gate):
    compare(tmp_path, monkeypatch, kondo_gate=gate, **STALE[0], **CORRECTED)


def mismatched(prompts, trainer):
    """A sampler whose log-probs are near the policy's, whose mean is -2.6."""
    found = sampled(prompts, trainer)
    logprobs = [[-2.5 - 0.2 * ((i + j) % 4) for j in range(5)] for i in range(len(prompts))]
    return found | {"logprobs": logprobs}


def unscored(output):
    """As vLLM: no log-prob for some tokens."""
    output["sampling_per_token_logps"][::2, 1] = math.nan
    return output


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("prepare", [None, as_if_with_vllm], ids=["rollout_func", "vllm"])
@pytest.mark.parametrize("gate", ["unbiased:0.5", "dense"])
@pytest.mark.parametrize("stale", [{}, STALE[0]], ids=str)
def test_a_mismatched_sampler_is_corrected_stale_or_not(
    tmp_path, monkeypatch, stale, gate, prepare
):
    seen = ratios(monkeypatch)
    gated, _ = compare(
        tmp_path,
        monkeypatch,
        change=unscored,
        prepare=prepare,
        trainer_options={"rollout_func": mismatched},
        kondo_gate=gate,
        learning_rate=1e-2,
        **stale,
        **CORRECTED,
    )
    assert bool((torch.cat(seen) < 0.5).any())
    # The ratio is to the sampler: TRL's own correction would count it twice.
    assert "sampling/importance_sampling_ratio/mean" not in gated.state.log_history[0]


@pytest.mark.parametrize("gate", ["unbiased:0.5", "dense"])
def test_tool_outputs_are_not_in_the_ratio(tmp_path, monkeypatch, gate):
    def with_tools(output):
        mask = output["completion_mask"]
        output["tool_mask"] = mask.clone()
        output["tool_mask"][:, 1::3] = 0
        output["num_items_in_batch"] = (mask * output["tool_mask"]).sum()
        return output

    options = STALE[0] | CORRECTED | {"learning_rate": 1e-2, "kondo_gate": gate}
    compare(tmp_path, monkeypatch, change=with_tools, loss_type="grpo", **options)


def test_a_kl_without_a_ratio_stays_as_it_is(tmp_path, monkeypatch):
    policy().save_pretrained(tmp_path / "model")
    options = {"beta": 0.3, "use_bias_correction_kl": False, "kondo_gate": "unbiased:0.5"}
    model = str(tmp_path / "model")
    options |= STALE[0] | CORRECTED
    compare(tmp_path / "out", monkeypatch, model=model, loss_type="grpo", **options)


def test_the_first_step_on_fresh_completions_is_trl_s(tmp_path):
    """All ratios are 1 there, so that TRL's clipped loss has the same gradient."""
    norms = []
    for options in ({"base": True}, {"kondo_gate": "dense", **CORRECTED}):
        trained = trainer(tmp_path, num_iterations=2, max_steps=2, **options)
        trained.train()
        norms.append([log["grad_norm"] for log in trained.state.log_history if "loss" in log])
    assert_close(norms[0][0], norms[1][0], torch.float32)
    assert abs(norms[0][1] - norms[1][1]) > 1e-3


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_without_staleness_trl_s_truncated_ratios_of_vllm_are_the_same(tmp_path):
    """A low cap, which some completions reach. The page of TRL says so."""
    ours = {"kondo_gate": "dense", "kondo_correction_cap": 0.5, **CORRECTED}
    theirs = {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 0.5,
    }
    norms = []
    for options in ({"base": True, **theirs}, ours):
        trained = trainer(tmp_path, trainer_options={"rollout_func": mismatched}, **options)
        as_if_with_vllm(trained)
        trained.train()
        norms.append([log["grad_norm"] for log in trained.state.log_history if "loss" in log])
    assert len(norms[0]) == 3
    assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]))


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("prepare", [lambda _: None, as_if_with_vllm], ids=["rollout_func", "vllm"])
def test_evaluation_is_trl_s(tmp_path, prepare):
    sampler = {"trainer_options": {"rollout_func": mismatched}}
    found = trainer(tmp_path, kondo_gate="unbiased:0.5", **CORRECTED, **sampler)
    plain = trainer(tmp_path, base=True, **sampler)
    for each in (found, plain):
        prepare(each)
        each.eval_dataset = each.train_dataset
        torch.manual_seed(0)
        each.metrics = each.evaluate()
    assert found.metrics["eval_loss"] == plain.metrics["eval_loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kondo_correction": "tokens"}, r"kondo_correction must be one of \('none', 'sequence'\)"),
        ({"kondo_correction": "none", "kondo_correction_cap": 3.0}, "cap must be 2.0 .* got 3.0"),
        ({"kondo_correction_cap": 0.0}, "kondo_correction_cap must be > 0, got 0.0"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "loss_type must be 'dapo' or .*got 'cispo'"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "geometric mean"),
        ({"kondo_unit": "token"}, "kondo_unit must be 'sequence' .* needs its every token"),
        ({"epsilon": 0.1}, "epsilon must be 0.2 .* capped, not clipped"),
        ({"epsilon_high": 0.3}, "epsilon_high must be None"),
        ({"delta": 4.0}, "delta must be None"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold must be None"),
        ({"vllm_importance_sampling_mode": "sequence_truncate"}, "replaces vLLM's correction"),
        ({"vllm_importance_sampling_clip_max": 2.0}, "clip_max must be 3.0"),
        ({"beta": 0.1}, "use_bias_correction_kl must be False .* beta = 0.1"),
        ({"num_iterations": 1}, "has no effect here: .* every ratio is 1. Leave it out"),
    ],
)
def test_what_contradicts_a_correction_or_has_no_effect_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(
            tmp_path, **{"kondo_gate": "unbiased:0.5", "num_iterations": 2, **CORRECTED, **options}
        )


def test_a_rollout_without_log_probs_is_refused():
    with pytest.raises(ValueError, match=r"needs the log-probs .* return them as 'logprobs'"):
        at_ratio_one({"advantages": torch.ones(2)})
