"""`kondo.check` runs once on the first batch, finds what is wrong, and leaves nothing behind."""

import random

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch.nn import functional
from trl import GRPOConfig

import kondo
from integrations.trl.recording import record
from integrations.trl.tiny import absolute_policy, policy, trainer


def changed(change):
    """The tiny policy, whose last hidden states [n, S, D] go through a function."""
    model = policy()
    model.model.norm.register_forward_hook(lambda module, args, output: change(output))
    return model


def with_dropout():
    """The tiny policy with dropout modules, which training mode switches on."""
    model = policy()
    dropout = torch.nn.Dropout(0.2)
    model.model.add_module("dropout", dropout)
    model.model.norm.register_forward_hook(lambda module, args, output: dropout(output))
    return model


def in_words(options):
    """Name options without addresses: pytest-xdist wants the same names in every process."""
    return " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items())


def run_of(folder, **options):
    """What a run of a few steps leaves: parameters, gradients, random states and the gate's."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    trained = trainer(folder, **({"kondo_gate": "unbiased:0.3"} | options))
    steps = record(trained)
    seconds = [log.get("kondo/seconds_check") for log in trained.state.log_history if "loss" in log]
    gate = trained.gate.state_dict() if hasattr(trained.gate, "state_dict") else {}
    tensors = {
        **{
            f"{number} {name}": value
            for number, step in enumerate(steps)
            for name, value in step["grads"].items()
        },
        **trained.model.state_dict(),
        "torch": torch.get_rng_state(),
        "draws": trained._draws.get_state(),
        "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64)),
    }
    others = random.getstate(), trained.model.training, trained.empty_steps, repr(gate)
    return tensors, others, seconds


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": with_dropout},
        {"model": absolute_policy},
        {"bf16": True},
        {"model": lambda: policy(torch.bfloat16)},
        {"gradient_checkpointing": True},
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
        {"lora": True},
        {"lora": True, "bf16": True, "gradient_checkpointing": True},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"max_completion_length": 1},
        {"mask_truncated_completions": True},
        {"kondo_unit": "token", "kondo_gate": "unbiased:0.1"},
        {"kondo_gate": "dense", "delight_eta": 1.0},
        {"kondo_gate": "delight:0.3,window=2"},
        {"num_iterations": 2, "max_steps": 4, "kondo_correction": "sequence"},
        {"temperature": 0.7, "kondo_gate": "variance:0.3"},
    ],
    ids=in_words,
)
def test_it_leaves_nothing_behind(tmp_path, options):
    options = dict(options)
    make = options.pop("model", policy)
    if options.pop("lora", False):
        peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        options["trainer_options"] = {"peft_config": peft}
    found, others, seconds = run_of(tmp_path / "on", model=make(), **options)
    expected, expected_others, none = run_of(
        tmp_path / "off", model=make(), kondo_check=False, **options
    )
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert others == expected_others
    assert seconds[0] > 0
    assert set(seconds[1:]) == {None}  # once
    assert set(none) == {None}


FAULTS = {
    "Log-probs of a row depend on the other rows": lambda x: x + x.mean(0, keepdim=True),
    "Log-probs of a token depend on later tokens": lambda x: x + x.mean(1, keepdim=True),
    "The policy draws random numbers in evaluation mode": lambda x: functional.dropout(x, 0.3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_run_before_the_first_step(tmp_path, fault):
    model = changed(FAULTS[fault])
    trained = trainer(tmp_path, model=model, kondo_gate="unbiased:0.3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kondo.CheckError, match=fault) as caught:
        trained.train()
    assert "kondo_check=False" in caught.value.__notes__[0]
    assert trained.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("options", [{"kondo_check": False}, {"kondo_gate": "dense"}], ids=str)
def test_it_is_left_out_where_it_is_off_or_nothing_is_gated(tmp_path, options):
    model = changed(FAULTS["Log-probs of a row depend on the other rows"])
    trained = trainer(tmp_path, model=model, **({"kondo_gate": "unbiased:0.3"} | options))
    trained.train()
    assert trained.state.global_step == 3


def test_every_run_is_checked(tmp_path):
    trained = trainer(tmp_path, kondo_gate="unbiased:0.3")
    trained.train()
    norm = trained.model.model.norm
    norm.register_forward_hook(lambda module, args, output: output + output.mean(0, keepdim=True))
    with pytest.raises(kondo.CheckError, match="depend on the other rows"):
        trained.train()


def test_a_config_of_trl_s_own_takes_the_option_from_the_class(tmp_path):
    from integrations.trl.tiny import OPTIONS, prompts, reward, tokenizer
    from kondo.integrations.trl import KondoGRPOTrainer

    for check, steps in ((False, 3), (True, 0)):
        trained = KondoGRPOTrainer.with_gate("unbiased:0.3", kondo_check=check)(
            changed(FAULTS["Log-probs of a row depend on the other rows"]),
            reward_funcs=reward,
            args=GRPOConfig(str(tmp_path), **OPTIONS),
            train_dataset=prompts(),
            processing_class=tokenizer(),
        )
        if check:
            with pytest.raises(kondo.CheckError):
                trained.train()
        else:
            trained.train()
        assert trained.state.global_step == steps
