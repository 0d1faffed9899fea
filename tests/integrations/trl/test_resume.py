"""A checkpoint holds what the gate remembers and what was counted."""

import pytest
import torch

from integrations.trl.test_empty_steps import sometimes
from integrations.trl.tiny import trainer

OPTIONS = {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 4,
    "kondo_rate": 0.3,
    "kondo_window": 8,
    "kondo_by": "delight",
}


def test_a_resumed_run_knows_its_window_and_its_counters(tmp_path):
    first = trainer(tmp_path, reward_funcs=sometimes({0}), **(OPTIONS | {"max_steps": 2}))
    first.train()
    second = trainer(tmp_path, reward_funcs=sometimes(set()), **OPTIONS)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert first.empty_steps == second.empty_steps == 1
    assert first.gate.state_dict()["calls"] == 2
    assert second.gate.state_dict()["calls"] == 4
    assert len(second.gate.state_dict()["past"]["values"]) == 4


@pytest.mark.parametrize(
    "gate", [{"kondo_by": "unbiased"}, {"kondo_reserve": 0.5}], ids=["unbiased", "reserve"]
)
def test_a_resumed_run_draws_what_the_first_would_have_drawn(tmp_path, gate):
    options = OPTIONS | {"kondo_window": 0, "kondo_rate": 0.5, **gate}
    options |= {"lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    trainer(tmp_path / "part", **(options | {"max_steps": 2})).train()
    rest = trainer(tmp_path / "part", **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-2"))
    assert torch.equal(rest._draws.get_state(), whole._draws.get_state())
    found, expected = rest.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_of_trl_itself_can_be_resumed(tmp_path, caplog):
    plain = {name: value for name, value in OPTIONS.items() if not name.startswith("kondo")}
    trainer(tmp_path, base=True, **(plain | {"max_steps": 2})).train()
    gated = trainer(tmp_path, **OPTIONS)
    gated.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert gated.empty_steps == 0
    assert gated.gate.state_dict()["calls"] == 2
    assert "kondo_state.pt" in caplog.text


def test_a_replaced_gate_need_not_have_a_state(tmp_path):
    from integrations.trl.test_selection import first_two_tokens

    gated = trainer(tmp_path, **(OPTIONS | {"max_steps": 2, "kondo_unit": "token"}))
    gated.gate = first_two_tokens
    gated.train()
    state = torch.load(tmp_path / "checkpoint-2" / "kondo_state.pt", weights_only=True)
    assert state["gate"] == {}


@pytest.mark.parametrize("first", ["delight", "variance"])
def test_a_run_may_change_what_it_keeps_by_and_is_told_what_is_lost(tmp_path, first, caplog):
    options = {k: v for k, v in OPTIONS.items() if k not in ("kondo_window", "kondo_by")}
    second = {"delight": "variance", "variance": "delight"}[first]
    trainer(tmp_path, kondo_by=first, **(options | {"max_steps": 2})).train()
    resumed = trainer(tmp_path, kondo_by=second, **options)
    caplog.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert "was written by another kind of gate" in caplog.text
