"""What we rely on in TRL, and what we refuse."""

import inspect

import pytest
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer
from trl import GRPOTrainer

from integrations.trl.tiny import policy, prompts, trainer
from integrations.trl.versions import LUSPO_MASKS
from kondo.integrations.trl._version import SEAMS, TRL, check_seams
from kondo.integrations.trl.config import check_trainer


@pytest.mark.parametrize("version", ["1.9.0", "1.12.1", "1.16.0", "1.16.3.dev0", "1.30rc1"])
def test_supported_versions_are_accepted(version):
    TRL.check(version)


@pytest.mark.parametrize("version", ["1.8.9", "0.29.0", "2.0.0", None])
def test_other_versions_are_refused_with_the_range(version):
    with pytest.raises(ImportError, match=r"supports trl>=1.9,<2: pip install"):
        TRL.check(version)


def test_the_installed_trainer_has_the_methods_we_override():
    check_seams(GRPOTrainer)


@pytest.mark.parametrize("name", SEAMS)
def test_a_changed_method_is_refused_by_name(name):
    changed = type("Changed", (GRPOTrainer,), {name: lambda self, something_else: None})
    with pytest.raises(ImportError, match=rf"Changed.{name}\("):
        check_seams(changed)


def test_the_method_of_trl_1_14_which_passes_on_what_it_is_given_is_known():
    def forward(self, model, *args, batch_size=None, compute_aux_loss=False, **kwargs):
        raise NotImplementedError

    name = "_get_per_token_logps_and_entropies"
    check_seams(type("Known", (GRPOTrainer,), {name: forward}))


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


TOKEN = {"kondo_unit": "token"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_generation": 3}, "must divide the other"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile must be 1.0"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy must be False"),
        ({"entropy_coef": 0.1}, "entropy_coef must be 0.0 with the gate UnbiasedGate"),
        ({"kondo_screen": "rollout"}, "needs a sampler that returns log-probs"),
        (TOKEN | {"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        (TOKEN | {"loss_type": "vespo"}, "loss_type='vespo'"),
        (TOKEN | {"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
    ],
    ids=str,
)
def test_options_that_cannot_be_right_are_refused_with_the_reason(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, kondo_gate="unbiased:0.3", **options)
    if "kondo_screen" not in options:
        trainer(tmp_path, kondo_gate="dense", **options)  # at rate 1, TRL's own business


def test_a_loss_scaler_is_refused(tmp_path):
    gated = trainer(tmp_path, kondo_gate="unbiased:0.3")
    gated.args.fp16 = True
    with pytest.raises(ValueError, match="fp16 must be False"):
        check_trainer(gated)
    gated.args.fp16, gated.is_deepspeed_enabled = False, True
    with pytest.raises(ValueError, match="DeepSpeed"):
        check_trainer(gated)
    gated.is_deepspeed_enabled, gated._is_vlm = False, True
    with pytest.raises(ValueError, match="vision-language"):
        check_trainer(gated)


@pytest.mark.skipif(LUSPO_MASKS, reason="this TRL's luspo leaves padding out")
@pytest.mark.parametrize("options", [{}, {"importance_sampling_level": "sequence", "beta": 0.1}])
def test_a_loss_that_counts_padding_is_refused(tmp_path, options):
    policy().save_pretrained(tmp_path / "model")
    options = {"loss_type": "luspo", "model": str(tmp_path / "model"), **options}
    with pytest.raises(ValueError, match="its loss counts padding"):
        trainer(tmp_path, kondo_gate="delight:0.3", **options)


def test_a_loss_that_replaces_trl_s_is_refused(tmp_path, monkeypatch):
    gated = trainer(tmp_path, kondo_gate="unbiased:0.3")
    gated.args.use_liger_kernel = True
    if not hasattr(GRPOTrainer, "compute_liger_loss"):
        check_trainer(gated)
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)
    with pytest.raises(ValueError, match="use_liger_kernel must be False"):
        check_trainer(gated)


def test_evaluation_is_trl_s(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    settings = {"trainer_options": {"eval_dataset": prompts()}, "max_steps": 1} | options
    gated = trainer(tmp_path, kondo_gate="unbiased:0.3", **settings)
    gated.train()
    logs = next(log for log in gated.state.log_history if "eval_loss" in log)
    assert not [name for name in logs if name.startswith("eval_kondo")]
