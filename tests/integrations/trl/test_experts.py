"""Mixtures of experts: the router's auxiliary loss, which a gate cannot serve."""

import dataclasses
import logging

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig

from integrations.trl.test_gradients import compare
from integrations.trl.tiny import trainer
from tolerances import assert_close

FIELDS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


def experts():
    """A small mixture whose own config asks for an auxiliary loss, as released ones do."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=22,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return Qwen3MoeForCausalLM(config)


def test_the_model_s_default_is_switched_off_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        gated = trainer(tmp_path, model=experts(), kondo_gate="unbiased:0.3")
    assert not gated.aux_loss_enabled
    (warning,) = [r.getMessage() for r in caplog.records if "auxiliary loss" in r.getMessage()]
    coefficient = FIELDS["router_aux_loss_coef"] or 0.5
    assert f"(router_aux_loss_coef {coefficient}) is switched off" in warning


def test_0_needs_no_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        options = {"kondo_gate": "unbiased:0.3", "router_aux_loss_coef": 0.0}
        trainer(tmp_path, model=experts(), **options)
    assert "auxiliary loss" not in caplog.text


def test_one_that_was_asked_for_is_refused(tmp_path):
    options = {"kondo_gate": "unbiased:0.3", "router_aux_loss_coef": 0.01}
    with pytest.raises(ValueError, match="router_aux_loss_coef must be"):
        trainer(tmp_path, model=experts(), **options)


def test_dense_leaves_it_to_trl(tmp_path):
    assert trainer(tmp_path, model=experts(), kondo_gate="dense").aux_loss_enabled


def test_gradients_are_those_of_the_loss_without_it(tmp_path, monkeypatch):
    compare(tmp_path, monkeypatch, model=experts(), kondo_gate="unbiased:0.4")


def test_keeping_all_trains_as_trl_does_with_a_coefficient_of_0(tmp_path):
    found = []
    for options in (
        {"kondo_gate": "price:-1e9", "kondo_screen": "exact"},
        {"base": True, "router_aux_loss_coef": 0.0},
    ):
        # One plain step shows a gradient as it is.
        settings = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1, "learning_rate": 1.0}
        trained = trainer(tmp_path, model=experts(), **settings, **options)
        trained.train()
        found.append(trained.model.state_dict())
    start, (ours, theirs) = experts().state_dict(), found
    for name in theirs:
        assert_close(ours[name], theirs[name])
    moved = [name for name in theirs if not torch.equal(theirs[name], start[name])]
    assert any("gate" in name for name in moved)
