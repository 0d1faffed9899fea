"""Whole runs of `python -m verl.trainer.main_ppo` with `trainer_mode=kondo`, on a CPU.

Ray, the transfer queue, the agent loop, the reward loop, two actor workers with FSDP2 and weight
updates to the rollout are verl's. Replaced is what needs an accelerator: see `on_cpu` (platform,
registration of the engine, gloo) and `cpu_rollout` (transformers instead of vLLM).
"""

import json
import subprocess
import sys

import pytest
import torch

from integrations.verl.fit_inputs import overrides, write_prompts
from integrations.verl.worker_runs import environment

pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(1200)]

ROWS = 16  # 4 prompts with 4 responses each
ACTOR = "actor_rollout_ref.actor"


def fit(folder, *options):
    """Run verl; return the metrics of its steps, and what it printed."""
    from integrations.verl.tiny import save_model

    folder.mkdir(exist_ok=True)
    model = save_model(folder / "model")
    prompts = write_prompts(folder / "prompts.parquet")
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "verl.trainer.main_ppo"),
                *overrides(model, prompts, folder),
                "trainer.v1.trainer_mode=kondo",
                *options,
            ],
            env=environment() | {"VERL_FILE_LOGGER_PATH": str(metrics)},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(500)
        finally:
            process.kill()
    printed = (folder / "log.txt").read_text()
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return code, [json.loads(line)["data"] for line in lines], printed


def test_fit_trains_on_kept_rows_saves_and_resumes(tmp_path):
    options = ("+trainer.v1.kondo.gate=unbiased:0.3", "trainer.save_freq=2")
    code, steps, printed = fit(tmp_path, *options)
    assert code == 0, printed[-3000:]
    assert len(steps) == 2
    assert steps[0]["kondo/seconds_check"] > 0
    assert "kondo/seconds_check" not in steps[1]
    for step in steps:
        assert step["kondo/rows_seen"] == ROWS
        assert 0 < step["kondo/rows_kept"] < ROWS
        assert step["kondo/rows_trained"] == step["kondo/rows_kept"] + step["kondo/fillers"]
        assert step["kondo/tokens_trained"] < step["kondo/tokens_seen"]
        assert step["kondo/steps"] + step["kondo/empty_steps"] == 2
        assert step["actor/grad_norm"] > 0
        # verl's own metrics are of the whole batch.
        assert step["response_length/mean"] > 0
        assert step["perf/total_num_tokens"] == step["kondo/tokens_seen"]
    path = tmp_path / "checkpoints" / "global_step_2" / "kondo_state.pt"
    saved = torch.load(path, weights_only=True)
    assert set(saved) == {"draws", "empty_updates", "gate", "gate_kind"}

    code, steps, printed = fit(
        tmp_path, *options, "trainer.resume_mode=auto", "trainer.total_training_steps=3"
    )
    assert code == 0, printed[-3000:]
    assert [step["training/global_step"] for step in steps] == [3]
    assert "the gate starts anew" not in printed


def test_fit_with_a_free_screen_a_kl_epochs_and_dynamic_batches(tmp_path):
    tokens, log_prob = 64, "log_prob_max_token_len_per_gpu"
    code, steps, printed = fit(
        tmp_path,
        "+trainer.v1.kondo.gate=delight:0.25",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        f"actor_rollout_ref.rollout.{log_prob}={tokens}",
        f"actor_rollout_ref.ref.{log_prob}={tokens}",
        "actor_rollout_ref.ref.strategy=fsdp2",
    )
    assert code == 0, printed[-3000:]
    assert len(steps) == 2
    for step in steps:
        assert step["kondo/rows_kept"] == 4
        assert step["kondo/rows_seen"] == 2 * ROWS
        assert step["kondo/steps"] + step["kondo/empty_steps"] == 4
        assert "actor/kl_loss" in step
        assert "timing_s/ref" in step


def test_a_model_whose_rows_depend_on_each_other_is_refused_unless_the_check_is_off(tmp_path):
    options = (
        "+trainer.v1.kondo.gate=unbiased:0.3",
        "actor_rollout_ref.model.external_lib=integrations.verl.placed_rows",
    )
    code, steps, printed = fit(tmp_path, *options)
    assert code != 0
    assert steps == []
    assert "CheckError: kondo.check found" in printed
    assert "Log-probs of a row depend on the other rows" in printed
    assert "+trainer.v1.kondo.check=False trains without this check" in printed
    code, steps, printed = fit(tmp_path, *options, "+trainer.v1.kondo.check=False")
    assert code == 0, printed[-3000:]
    assert len(steps) == 2
    assert "kondo/seconds_check" not in steps[0]


def test_a_refused_option_ends_the_run_at_its_start(tmp_path):
    code, steps, printed = fit(
        tmp_path, "+trainer.v1.kondo.gate=unbiased:0.3", f"{ACTOR}.entropy_coeff=0.01"
    )
    assert code != 0
    assert steps == []
    assert "actor_rollout_ref.actor.entropy_coeff must be 0 with trainer.v1.kondo.gate" in printed
