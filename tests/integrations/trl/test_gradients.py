"""The gradient of a gated step is that of TRL's loss with the skipped left out of numerators."""

import contextlib

import pytest
import torch
from peft import LoraConfig

from integrations.trl.recording import centred, number_rows, raw_micro, record
from integrations.trl.test_selection import sampled
from integrations.trl.tiny import absolute_policy, policy, reward, trainer
from integrations.trl.versions import LUSPO_MASKS, ONE_ENTROPY, share_of
from oracles.grpo import counted, gated_loss, log_probs_and_entropy
from tolerances import assert_close

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"]
LOSSES += ["luspo"] if LUSPO_MASKS else []  # refused otherwise: test_contract.py


def compare(
    tmp_path,
    monkeypatch,
    *,
    loss_type="dapo",
    change=None,
    model=None,
    prepare=None,
    trainer_options=None,
    **options,
):
    """Train a little; hold every step's gradient against the oracle. Return what was trained."""
    settings = {
        "kondo_gate": "unbiased:0.3",
        "max_grad_norm": 0.0,
        "epsilon_high": 0.2,
        "max_steps": 2,
    }
    # Ratios that move, but are not all clipped to a gradient of zero.
    settings["learning_rate"] = 3e-4 if options.get("num_iterations", 1) > 1 else 1e-2
    outputs = number_rows(monkeypatch, change)
    gated = trainer(
        tmp_path,
        model=model,
        trainer_options=trainer_options,
        loss_type=loss_type,
        **(settings | options),
    )
    if prepare is not None:
        prepare(gated)
    steps = record(gated)
    args, found, largest = gated.args, [], []
    share = share_of(args)
    logged = [log["loss"] for log in gated.state.log_history if "loss" in log]
    for step, value in zip(steps, logged, strict=True):
        micros = [raw_micro(part, outputs[part["generation"]], share) for part in step["slices"]]
        if args.delight_eta is not None:
            weigh(gated, step, micros, outputs[step["slices"][0]["generation"]])
        found.append(sum(int(micro["keep"].any(1).sum()) for micro in micros))
        if found[-1]:
            largest.append(check_step(gated, step, micros, loss_type, value))
        else:
            assert step["grads"] == {}
            assert value == 0
    assert max(largest) > 0.01
    return gated, found


def weigh(gated, step, micros, raw):
    """Give the oracle's micro-batches DG's weights, sigmoid(delight / eta), per row or token."""
    advantages = centred(raw, reward, gated.num_generations)
    with torch.no_grad(), parameters(gated, step["before"]) as model:
        for micro, part in zip(micros, step["slices"], strict=True):
            log_probs, _ = log_probs_and_entropy(model, micro, gated.args.temperature)
            delight = advantages[part["row_id"]].unsqueeze(1) * -log_probs * counted(micro)
            if gated.args.kondo_unit == "sequence":
                delight = delight.sum(1, keepdim=True).expand_as(log_probs)
            micro["weight"] = torch.sigmoid(delight / gated.args.delight_eta)


@contextlib.contextmanager
def parameters(gated, values):
    """The trainer's model, with other parameters for a while."""
    model = gated.accelerator.unwrap_model(gated.model)
    now = {k: v.detach().clone() for k, v in model.named_parameters()}
    model.load_state_dict(values, strict=False)
    yield model
    model.load_state_dict(now, strict=False)


def check_step(gated, step, micros, loss_type, value):
    """Hold gradient and logged loss against the oracle; return the largest gradient."""
    args = gated.args
    options = {
        "max_length": args.max_completion_length,
        "temperature": args.temperature,
        "entropy_coef": args.entropy_coef,
        "one_entropy": ONE_ENTROPY,
        "level": args.importance_sampling_level,
        "epsilon": args.epsilon,
        "beta": args.beta,
        "cap": None if args.kondo_correction == "none" else args.kondo_correction_cap,
    }
    # What multiplies gradients alone is not in the logged loss.
    factors = ("gate_weight", "micro_tokens")
    plain = [{k: v for k, v in micro.items() if k not in factors} for micro in micros]
    with parameters(gated, step["before"]) as model:
        loss = gated_loss(loss_type, model, micros, **options)
        with torch.no_grad():
            logged = gated_loss(loss_type, model, plain, **options)
        trained = {k: v for k, v in model.named_parameters() if v.requires_grad}
        expected = torch.autograd.grad(loss, list(trained.values()))
    assert_close(value, logged, torch.float32)
    assert set(step["grads"]) == set(trained)
    for name, gradient in zip(trained, expected, strict=True):
        assert_close(step["grads"][name], gradient)
    return max(float(gradient.abs().max()) for gradient in expected)


@pytest.mark.parametrize("by", ["unbiased", "variance", "delight"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_sequences_skipped_leave_the_full_denominator(tmp_path, monkeypatch, loss_type, by):
    _, kept = compare(tmp_path, monkeypatch, loss_type=loss_type, kondo_gate=f"{by}:0.3")
    assert kept == [2, 2]  # of 8 rows at a rate of 0.3


@pytest.mark.parametrize("by", ["unbiased", "delight"])
@pytest.mark.parametrize("loss_type", [kind for kind in LOSSES if kind != "vespo"])
def test_tokens_skipped_leave_the_full_denominator(tmp_path, monkeypatch, loss_type, by):
    options = {"kondo_unit": "token", "kondo_gate": f"{by}:0.1"}
    compare(tmp_path, monkeypatch, loss_type=loss_type, **options)


RATES = {"sequence": 0.3, "token": 0.1}
UNITS = [{"kondo_unit": unit, "kondo_gate": f"unbiased:{rate}"} for unit, rate in RATES.items()]


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 4},
        {"mask_truncated_completions": True},
        {"scale_rewards": "none", "loss_type": "grpo"},
    ],
    ids=str,
)
def test_options_of_trl_keep_their_meaning_by_variance(tmp_path, monkeypatch, options):
    compare(tmp_path, monkeypatch, kondo_gate="variance:0.3", **options)


@pytest.mark.parametrize("unit", UNITS, ids=["sequence", "token"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 4},
        {"steps_per_generation": 1, "num_generations": 2},
        {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4},
        {"gradient_checkpointing": True},
        {"temperature": 0.7},
        {"entropy_coef": 0.05, "kondo_gate": "delight:{rate}"},
        {"entropy_coef": 0.05, "kondo_gate": "delight:{rate}", "loss_type": "bnpo"},
        {"mask_truncated_completions": True},
        {"kondo_gate": "price:2"},
        {"kondo_gate": "noise:2"},
        {"kondo_gate": "unbiased:{rate},signal=abs_delight"},
        {"kondo_gate": "unbiased:{rate},signal=advantage"},
        {"scale_rewards": "none", "loss_type": "grpo"},
        {"pad_to_multiple_of": 8},
    ],
    ids=str,
)
def test_options_of_trl_keep_their_meaning(tmp_path, monkeypatch, options, unit):
    options = unit | options
    options["kondo_gate"] = options["kondo_gate"].format(rate=RATES[unit["kondo_unit"]])
    compare(tmp_path, monkeypatch, **options)


@pytest.mark.parametrize("by", ["unbiased", "delight"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
@pytest.mark.parametrize("unit", UNITS, ids=["sequence", "token"])
def test_kl_is_paid_where_the_gate_keeps(tmp_path, monkeypatch, loss_type, unit, by):
    policy().save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")  # TRL loads the reference from where the policy came from
    rate = RATES[unit["kondo_unit"]]
    options = unit | {"beta": 0.3, "loss_type": loss_type, "kondo_gate": f"{by}:{rate}"}
    compare(tmp_path / "out", monkeypatch, model=path, num_iterations=2, max_steps=4, **options)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo"])
def test_sequence_ratios_are_those_of_whole_rows(tmp_path, monkeypatch, loss_type):
    options = {"importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 4}
    compare(tmp_path, monkeypatch, loss_type=loss_type, **options)


def test_sequence_weights_of_vespo_are_those_of_whole_rows(tmp_path, monkeypatch):
    compare(tmp_path, monkeypatch, loss_type="vespo", num_iterations=2, max_steps=4)


@pytest.mark.parametrize("unit", UNITS, ids=["sequence", "token"])
def test_absolute_positions_and_tied_heads(tmp_path, monkeypatch, unit):
    options = {"num_iterations": 2, "max_steps": 4}
    compare(tmp_path, monkeypatch, model=absolute_policy(), **options, **unit)


@pytest.mark.parametrize("unit", UNITS, ids=["sequence", "token"])
def test_adapters_are_trained_alone(tmp_path, monkeypatch, unit):
    peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    gated, _ = compare(tmp_path, monkeypatch, trainer_options={"peft_config": peft}, **unit)
    names = [k for k, v in gated.model.named_parameters() if v.requires_grad]
    assert names
    assert all("lora" in name for name in names)


@pytest.mark.parametrize("unit", UNITS, ids=["sequence", "token"])
def test_tool_outputs_are_never_kept(tmp_path, monkeypatch, unit):
    def with_tools(output):
        mask = output["completion_mask"]
        output["tool_mask"] = mask.clone()
        output["tool_mask"][:, 1::3] = 0
        output["num_items_in_batch"] = (mask * output["tool_mask"]).sum()
        return output

    compare(tmp_path, monkeypatch, change=with_tools, loss_type="grpo", **unit)


@pytest.mark.parametrize("gate", ["delight:0.3", "dense"])
@pytest.mark.parametrize(("unit", "eta"), [("sequence", 20.0), ("token", 4.0)])
def test_delight_weights_what_is_trained(tmp_path, monkeypatch, gate, unit, eta):
    options = {"delight_eta": eta, "kondo_gate": gate, "kondo_unit": unit}
    compare(tmp_path, monkeypatch, loss_type="grpo", **options)


class NoServer:
    """Stands in for vLLM, whose weights need no synchronising where rollouts are made up."""

    def sync_weights(self):
        pass


def as_if_with_vllm(gated):
    gated.use_vllm, gated.vllm_generation, gated._last_loaded_step = True, NoServer(), -1


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
@pytest.mark.parametrize("unit", UNITS, ids=["sequence", "token"])
def test_the_sampler_s_mismatch_is_corrected_as_in_trl(
    tmp_path, monkeypatch, loss_type, mode, unit
):
    gated, _ = compare(
        tmp_path,
        monkeypatch,
        loss_type=loss_type,
        prepare=as_if_with_vllm,
        trainer_options={"rollout_func": sampled},
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=0.5,
        **unit,
    )
    assert "sampling/importance_sampling_ratio/mean" in gated.state.log_history[0]
