"""At a rate of 1 the trainer is TRL's, bit for bit."""

import pytest
import torch

from integrations.trl.tiny import trainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def trajectory(tmp_path, **options):
    """Loss and gradient norm of each step, and the parameters at the end."""
    trained = trainer(tmp_path, weight_decay=0.1, **options)
    trained.train()
    logs = [(log["loss"], log["grad_norm"]) for log in trained.state.log_history if "loss" in log]
    assert len(logs) == trained.args.max_steps
    return logs, trained.model.state_dict(), trained.state.log_history[0].keys()


def assert_same_trajectory(tmp_path, **options):
    expected, parameters, keys = trajectory(tmp_path, base=True, **options)
    found, own, own_keys = trajectory(tmp_path, kondo_rate=1.0, **options)
    assert found == expected
    assert all(torch.equal(own[name], parameters[name]) for name in parameters)
    assert own_keys == keys


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_follows_trl_step_by_step(tmp_path, loss_type):
    assert_same_trajectory(tmp_path, loss_type=loss_type)


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 4},
        {"steps_per_generation": 3},  # divides nothing: a gate would refuse it
        {"gradient_checkpointing": True},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.1, "use_adaptive_entropy": True},
        {"kondo_unit": "token", "importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_options_follow_trl_step_by_step(tmp_path, options):
    kondo = {name: value for name, value in options.items() if name.startswith("kondo")}
    plain = {name: value for name, value in options.items() if name not in kondo}
    expected, parameters, _ = trajectory(tmp_path, base=True, **plain)
    found, own, _ = trajectory(tmp_path, kondo_rate=1.0, **options)
    assert found == expected
    assert all(torch.equal(own[name], parameters[name]) for name in parameters)
