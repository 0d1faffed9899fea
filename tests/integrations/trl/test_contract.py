"""What we rely on in TRL, and what we refuse."""

import dataclasses
import inspect

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import MixtralConfig, MixtralForCausalLM, Trainer
from trl import GRPOConfig, GRPOTrainer, TrlParser

import kondo
from integrations.trl.tiny import OPTIONS, policy, prompts, reward, tokenizer, trainer
from kondo.integrations.trl import KondoGRPOConfig, KondoGRPOTrainer
from kondo.integrations.trl._version import SEAMS, check_seams, check_version


@pytest.mark.parametrize("version", ["1.16.0", "1.16.3.dev0", "1.17rc1", "1.30.1"])
def test_supported_versions_are_accepted(version):
    check_version(version)


@pytest.mark.parametrize("version", ["1.15.9", "0.29.0", "2.0.0", None])
def test_other_versions_are_refused_with_the_range(version):
    with pytest.raises(ImportError, match=r"supports trl>=1.16,<2: pip install"):
        check_version(version)


def test_the_installed_trainer_has_the_methods_we_override():
    check_seams(GRPOTrainer)


@pytest.mark.parametrize("name", SEAMS)
def test_a_changed_method_is_refused_by_name(name):
    changed = type("Changed", (GRPOTrainer,), {name: lambda self, something_else: None})
    with pytest.raises(ImportError, match=rf"GRPOTrainer.{name}\("):
        check_seams(changed)


def test_the_loss_computes_log_probs_once_and_through_the_method_we_replace():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert source.count("self._get_per_token_logps_and_entropies(") == 1
    assert "model(" not in source.replace("_compute_loss(self, model", "")
    assert 'inputs["advantages"]' in source
    assert "if advantages.dim() == 1" in source  # so [b, T] advantages pass


def test_the_batch_is_buffered_where_we_look_for_it():
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in source


def test_a_skipped_optimizer_step_leaves_the_schedule_alone():
    source = inspect.getsource(Trainer._run_epoch)
    assert "if not self.accelerator.optimizer_step_was_skipped:" in source
    assert "_is_overflow" in inspect.getsource(AcceleratedOptimizer.step_was_skipped.fget)


def test_the_config_adds_to_trl_s():
    own = {field.name for field in dataclasses.fields(KondoGRPOConfig)}
    base = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert all(name.startswith("kondo_") or name == "delight_eta" for name in own - base)
    assert base < own
    for field in dataclasses.fields(KondoGRPOConfig):
        if field.name not in base:
            assert field.metadata["help"]


def test_the_command_line_knows_the_options(tmp_path):
    line = f"--output_dir {tmp_path} --use_cpu --bf16=False --kondo_unit token "
    unbiased = "--kondo_noise 2 --kondo_signal delight"
    delight = "--kondo_rate 0.1 --kondo_by delight --delight_eta 2"
    parser = TrlParser((KondoGRPOConfig,))
    (args,) = parser.parse_args_and_config((line + delight).split())
    assert (args.kondo_rate, args.kondo_unit, args.delight_eta) == (0.1, "token", 2.0)
    (args,) = parser.parse_args_and_config((line + unbiased).split())
    assert repr(args.make_gate()) == "UnbiasedGate(noise=2.0, signal=abs_delight)"


DELIGHT = {"kondo_by": "delight"}
ADVANTAGE = {"kondo_rate": 0.1, "kondo_signal": "advantage"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of kondo_rate, kondo_noise and kondo_price"),
        ({"kondo_rate": 0.1, "kondo_noise": 2.0}, "exactly one of kondo_rate, kondo_noise and"),
        (DELIGHT | {"kondo_rate": 0.1, "kondo_price": 0.0}, "exactly one of kondo_rate, kondo_no"),
        ({"kondo_noise": 0.5}, "noise must be finite and at least 1"),
        ({"kondo_rate": 0.0}, r"kondo_rate must lie in \(0, 1\], got 0.0"),
        ({"kondo_rate": 1.5}, "kondo_rate must lie in"),
        ({"kondo_rate": 0.1, "kondo_unit": "row"}, "kondo_unit must be one of"),
        ({"kondo_rate": 0.1, "kondo_screen": "draft"}, "kondo_screen must be one of"),
        ({"kondo_rate": 0.1, "kondo_signal": "reward"}, "kondo_signal must be one of"),
        (DELIGHT | {"kondo_rate": 0.1, "delight_eta": 0.0}, "delight_eta must be finite and > 0"),
        (DELIGHT | {"kondo_price": 0.1, "kondo_window": 4}, "window turns past values into"),
        (DELIGHT | {"kondo_price": 0.1, "kondo_reserve": 0.4}, "reserve and negative_quota divide"),
        ({"kondo_rate": 0.1, "kondo_by": "reward"}, "kondo_by must be one of"),
        (ADVANTAGE | {"beta": 0.1}, r"beta must be 0.0 with kondo_signal='advantage', got 0.1"),
        (ADVANTAGE | {"kondo_screen": "exact"}, "kondo_screen must be 'auto' with kondo_signal='a"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        KondoGRPOConfig(str(tmp_path), **OPTIONS, **options)


# Option, and the values of kondo_by that take it.
BELONGS = [
    ({"kondo_price": 0.5, "kondo_rate": None}, ["delight"]),
    ({"kondo_noise": 1.5, "kondo_rate": None}, ["unbiased"]),
    ({"kondo_signal": "delight"}, ["unbiased"]),
    ({"kondo_unit": "token"}, ["unbiased", "delight"]),
    ({"kondo_screen": "exact"}, ["unbiased", "delight"]),
    ({"kondo_screen": "rollout"}, ["unbiased", "delight"]),
    ({"kondo_temperature": 0.1}, ["delight"]),
    ({"kondo_reserve": 0.1}, ["delight"]),
    ({"kondo_negative_quota": 0.1}, ["delight"]),
    ({"kondo_window": 4}, ["delight"]),
    ({"delight_eta": 1.0}, ["delight"]),
    ({"delight_eta": 1.0, "kondo_rate": 1.0}, ["delight"]),
]


@pytest.mark.parametrize("by", ["unbiased", "variance", "delight"])
@pytest.mark.parametrize(("option", "takers"), BELONGS, ids=str)
def test_an_option_is_refused_by_what_does_not_take_it(tmp_path, option, takers, by):
    options = OPTIONS | {"kondo_rate": 0.3, "kondo_by": by} | option
    if by in takers:
        assert KondoGRPOConfig(str(tmp_path), **options).kondo_by == by
        return
    name = next(iter(option))
    with pytest.raises(ValueError, match=rf"{name} must be .* with kondo_by='{by}', got ") as error:
        KondoGRPOConfig(str(tmp_path), **options)
    assert str(error.value).endswith(f"set {' or '.join(f'kondo_by={by!r}' for by in takers)}.")


@pytest.mark.parametrize(
    ("by", "gate"),
    [
        ({}, "UnbiasedGate(rate=0.3)"),
        ({"kondo_signal": "advantage"}, "UnbiasedGate(rate=0.3, signal=unit_advantage)"),
        ({"kondo_by": "variance"}, "VarianceGate(rate=0.3)"),
        ({"kondo_by": "delight"}, "Gate(rate=0.3)"),
    ],
    ids=str,
)
def test_the_options_make_a_gate(tmp_path, by, gate):
    args = KondoGRPOConfig(str(tmp_path), **OPTIONS, kondo_rate=0.3, **by)
    assert repr(args.make_gate()) == gate


TOKEN = {"kondo_unit": "token"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_generation": 3}, "must divide the other"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile must be 1.0"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy must be False"),
        ({"entropy_coef": 0.1}, "entropy_coef must be 0.0 with kondo_by='unbiased'"),
        ({"kondo_screen": "rollout"}, "needs a sampler that returns log-probs"),
        (TOKEN | {"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        (TOKEN | {"loss_type": "vespo"}, "loss_type='vespo'"),
        (TOKEN | {"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
    ],
    ids=str,
)
def test_options_that_cannot_be_right_are_refused_with_the_reason(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, kondo_rate=0.3, **options)
    if "kondo_screen" not in options:
        trainer(tmp_path, kondo_rate=1.0, **options)  # at rate 1, TRL's own business


def test_a_loss_scaler_is_refused(tmp_path):
    gated = trainer(tmp_path, kondo_rate=0.3)
    gated.args.fp16 = True
    from kondo.integrations.trl.checks import check_trainer

    with pytest.raises(ValueError, match="fp16 must be False"):
        check_trainer(gated)
    gated.args.fp16, gated.is_deepspeed_enabled = False, True
    with pytest.raises(ValueError, match="DeepSpeed"):
        check_trainer(gated)
    gated.is_deepspeed_enabled, gated._is_vlm = False, True
    with pytest.raises(ValueError, match="vision-language"):
        check_trainer(gated)


def test_a_router_s_auxiliary_loss_is_refused(tmp_path):
    config = MixtralConfig(
        vocab_size=22,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="router_aux_loss_coef must be"):
        trainer(tmp_path, model=MixtralForCausalLM(config), kondo_rate=0.3)
    options = {"router_aux_loss_coef": 0.0, "max_steps": 1}
    trainer(tmp_path, model=MixtralForCausalLM(config), kondo_rate=0.3, **options).train()


def test_a_config_of_trl_is_refused(tmp_path):
    with pytest.raises(ValueError, match="args must be a KondoGRPOConfig, got GRPOConfig"):
        KondoGRPOTrainer(
            policy(),
            reward_funcs=reward,
            args=GRPOConfig(str(tmp_path), **OPTIONS),
            train_dataset=prompts(),
            processing_class=tokenizer(),
        )


def test_evaluation_is_trl_s(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    settings = {"trainer_options": {"eval_dataset": prompts()}, "max_steps": 1} | options
    gated = trainer(tmp_path, kondo_rate=0.3, **settings)
    gated.train()
    logs = next(log for log in gated.state.log_history if "eval_loss" in log)
    assert not [name for name in logs if name.startswith("eval_kondo")]


def test_a_gate_that_is_put_in_later_must_fit_too(tmp_path):
    gated = trainer(tmp_path, kondo_rate=0.3, kondo_by="delight", entropy_coef=0.1, max_steps=1)
    gated.gate = kondo.UnbiasedGate(rate=0.3)
    with pytest.raises(ValueError, match=r"entropy_coef must be 0.0 .*UnbiasedGate\(rate=0.3\)"):
        gated.train()
