"""A checkpoint holds what the gate remembers and what was counted."""

import logging
import pathlib

import pytest
import torch

import kondo
from integrations.trl.test_empty_steps import sometimes
from integrations.trl.tiny import trainer
from kondo.integrations import gate_state

OPTIONS = {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 4,
    "kondo_gate": "delight:0.3,window=8",
}


def calls(gate):
    """How many calls the window of a gate remembers."""
    return len(gate.state_dict()["past"]["values"])


def test_a_resumed_run_knows_its_window_and_its_counters(tmp_path):
    first = trainer(tmp_path, reward_funcs=sometimes({0}), **(OPTIONS | {"max_steps": 2}))
    first.train()
    second = trainer(tmp_path, reward_funcs=sometimes(set()), **OPTIONS)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert first.empty_steps == second.empty_steps == 1
    assert calls(first.gate) == 2
    assert calls(second.gate) == 4


@pytest.mark.parametrize("gate", ["unbiased:0.5", "delight:0.5,reserve=0.5"])
def test_a_resumed_run_draws_what_the_first_would_have_drawn(tmp_path, gate):
    options = OPTIONS | {"kondo_gate": gate, "lr_scheduler_type": "constant"}
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
    assert calls(gated.gate) == 2
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
    gates = ["delight:0.3,window=8", "variance:0.3"]
    before, after = gates if first == "delight" else gates[::-1]
    trainer(tmp_path, **(OPTIONS | {"kondo_gate": before, "max_steps": 2})).train()
    resumed = trainer(tmp_path, **(OPTIONS | {"kondo_gate": after}))
    caplog.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert "was written by another kind of gate" in caplog.text


# The state of a gate, by itself


def used(gate):
    gate(torch.tensor([0.5, -1.0, 2.0, 0.25]), generator=torch.Generator().manual_seed(0))
    return gate


def by_delight(signal=kondo.delight):
    return kondo.Gate(rate=0.5, window=4, signal=signal)


def saved_and_loaded(folder, first, second, *, without_kind=False):
    """Save one gate's state, as an older version would have if asked; load it into another."""
    draws = torch.Generator().manual_seed(0)
    gate_state.save(str(folder), first, draws, empty_steps=3)
    path = pathlib.Path(folder) / gate_state.STATE_FILE
    if without_kind:
        state = torch.load(path, weights_only=True)
        del state["gate_kind"]
        torch.save(state, path)
    assert gate_state.load(str(folder), second, torch.Generator()) == {"empty_steps": 3}


def test_the_window_of_another_signal_is_left_behind(tmp_path, caplog):
    second = by_delight(kondo.signals.abs_advantage)
    saved_and_loaded(tmp_path, used(by_delight()), second)
    assert "was written by another kind of gate" in caplog.text
    assert second.state_dict()["past"] == {}


def test_the_window_of_the_same_kind_is_kept_where_the_rate_is_another(tmp_path, caplog):
    second = kondo.Gate(rate=0.1, window=4)
    saved_and_loaded(tmp_path, used(by_delight()), second)
    assert not caplog.text
    assert calls(second) == 1


class Counting(kondo.VarianceGate):
    """Remembers something else."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_state_without_a_kind_that_does_not_fit_is_left_behind(tmp_path, caplog, swapped):
    gates = used(by_delight()), Counting(rate=0.5)
    saved_and_loaded(tmp_path, *(gates[::-1] if swapped else gates), without_kind=True)
    assert "was written by another kind of gate" in caplog.text


def test_gates_that_remember_nothing_are_exchanged_without_a_word(tmp_path, caplog):
    saved_and_loaded(tmp_path, kondo.UnbiasedGate(rate=0.1), kondo.VarianceGate(rate=0.1))
    saved_and_loaded(tmp_path, None, kondo.parse_gate(lambda values, mask, generator: None))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_damaged_state_of_the_same_kind_is_no_other_gate_s(tmp_path):
    gate_state.save(str(tmp_path), used(by_delight()), torch.Generator())
    path = tmp_path / gate_state.STATE_FILE
    state = torch.load(path, weights_only=True)
    state["gate"]["past"]["valid"] -= 9
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"state\['past'\]\['valid'\] must be finite and at least"):
        gate_state.load(str(tmp_path), by_delight(), torch.Generator())
