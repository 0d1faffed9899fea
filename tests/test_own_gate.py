"""The gate of CONTRIBUTING.md, "Add a gate", runs everywhere, and nothing else knows of it."""

import math

import pytest
import torch

import kondo
from core.entries import page_gate
from integrations.verl.test_options import config
from kondo.integrations.verl.options import read_options
from ranks import cases
from ranks.problems import Policy, gradients, problem
from tolerances import assert_close

SPEC = "core.entries:page_gate"


def test_it_keeps_half_of_what_is_there_and_nothing_is_known_of_it():
    values = torch.tensor([3.0, 1.0, -2.0, 4.0, 0.0, math.inf])
    mask = torch.tensor([True, True, True, True, True, False])
    assert page_gate()(values, mask).keep.tolist() == [False] * 3 + [True] + [False] * 2
    assert type(kondo.adapters.adapter_of(page_gate())) is kondo.adapters.Adapter


def kept_of(advantages, mask):
    """The largest until half of the sum is reached, by a loop."""
    worth = {row: abs(float(advantages[row])) for row in range(len(mask)) if mask[row]}
    total, kept = 0.0, set()
    for row in sorted(worth, key=worth.get, reverse=True):
        if total < sum(worth.values()) / 2:
            kept.add(row)
        total += worth[row]
    return kept


def masked_gradients(every, keep):
    model = Policy("sample")
    terms = torch.where(keep, model(every.batch) * every.advantages, 0.0)
    (-terms.sum() / every.mask.sum()).backward()
    return gradients(model)


def test_it_gates_one_process_and_two_ranks_alike(crew):
    every = problem("sample", (9, 6))
    wanted = kept_of(every.advantages, every.mask)
    keep = torch.tensor([row in wanted for row in range(15)])
    expected, model = masked_gradients(every, keep), Policy("sample")
    report = kondo.backward(model, every.batch, every.advantages, gate=page_gate(), mask=every.mask)
    assert (report.kept, report.rows_screened) == (len(wanted), 0)
    spec = {"unit": "sample", "splits": (9, 6), "wrap": "plain"}
    on_ranks = crew.run(cases.page_gate_step, 2, spec)
    for found in on_ranks:
        assert found["report"]["kept"] == len(wanted)
    for grads in (gradients(model), *(found["grads"] for found in on_ranks)):
        for name, gradient in expected.items():
            assert_close(grads[name], gradient)


@pytest.mark.parametrize("given", [SPEC, page_gate()], ids=["text", "object"])
def test_trls_trainer_takes_it(given, tmp_path):
    pytest.importorskip("trl")
    from integrations.trl.tiny import trainer

    gated = trainer(tmp_path, kondo_gate=given, max_steps=2)
    before = {name: weight.clone() for name, weight in gated.model.named_parameters()}
    gated.train()
    assert type(gated.gate).__name__ == "HalfGate"
    assert any(not weight.equal(before[name]) for name, weight in gated.model.named_parameters())
    logs = [log for log in gated.state.log_history if "kondo/rate" in log]
    assert len(logs) == 2
    for log in logs:
        assert 0 < log["kondo/rate"] <= 0.5
        assert log["kondo/rows_trained"] == log["kondo/rate"] * log["kondo/rows_seen"]


@pytest.mark.parametrize("given", [SPEC, page_gate()], ids=["text", "object"])
def test_torchrls_selector_takes_it(given):
    pytest.importorskip("torchrl")
    from integrations.torchrl.test_candidates import (
        gated_advantage,
        gradient,
        kept_of,
        stored,
        torchrls,
        weighted,
    )

    mine = stored(gated_advantage(given, candidates=8, kept=3))
    # Returns less their mean, 1.75: 1.25 -0.75 -1.75 0.25 0.75 -1.25 -0.75 2.25; half is 4.5.
    numbers = {number for _, number in kept_of(mine)}
    assert len(numbers) == 3
    assert {2, 7} < numbers <= {0, 2, 5, 7}
    assert_close(gradient(mine), gradient(weighted(torchrls(), mine, [1.0] * 8)))


def test_verls_options_take_it():
    terms = {"actor_rollout_ref__actor__use_kl_loss": True}
    assert repr(read_options(config(SPEC, **terms)).gate).startswith("<page.HalfGate")
