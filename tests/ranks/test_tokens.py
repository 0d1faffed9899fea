"""Language models over ranks: cut, packed, moved, and the gradient of one process."""

import pytest
import torch

import kondo.lm
from kondo.lm import CausalLM, Head, TokenLogProb
from kondo.lm.budget import BudgetGate
from ranks import cases
from ranks.problems import gradients
from steps import run_step
from tolerances import assert_close

SPLITS, WIDTHS = (2, 0, 20, 1), (6, 5, 8, 10)


@pytest.mark.parametrize(
    ("wrapping", "unit", "splits", "widths", "max_tokens", "screen", "rate"),
    [
        ("plain", "sequence", (9, 4), (7, 9), 16_384, None, 0.3),
        ("ddp", "sequence", (9, 4), (7, 9), 20, None, 0.3),
        ("ddp", "token", (5, 0, 12, 3), (6, 5, 8, 10), 16, None, 0.3),
        ("fsdp", "token", (9, 4), (7, 9), 16, None, 0.3),
        ("fsdp", "sequence", SPLITS, WIDTHS, 16, "free", 0.3),
        ("fsdp", "sequence", SPLITS, WIDTHS, 16, None, 0.1),  # two rows for four ranks
        ("ddp", "token", SPLITS, WIDTHS, 16, None, 0.01),
    ],
)
def test_the_gradient_is_that_of_all_rows(
    crew, wrapping, unit, splits, widths, max_tokens, screen, rate
):
    lm = cases.causal_policy(max_tokens)
    rows, advantages = cases.token_rows(splits, widths)
    model = TokenLogProb(lm)
    report = run_step(lm, rows, advantages, gate=kondo.Gate(rate=rate), unit=unit)
    expected = gradients(model)
    results = crew.run(
        cases.language_step, len(splits), wrapping, unit, splits, widths, max_tokens, screen, rate
    )
    for found in results:
        for counted in ("kept", "price", "seen", "rows_trained", "tokens_seen"):
            assert_close(found["report"][counted], getattr(report, counted))
        for name, grad in expected.items():
            assert_close(found["grads"][name], grad)
    # Every rank makes the same forwards; what they trained is what entered the backbone.
    assert len({found["seen"]["calls"] for found in results}) == 1
    if screen == "free":
        assert all(found["seen"]["screen"] == 0 for found in results)
    for found in results:
        told, seen = found["report"], found["seen"]
        assert told["rank_tokens_trained"] <= seen["graph"]
        if told["rank_fillers"] == 0:
            assert told["rank_tokens_trained"] == seen["graph"]
    fillers = [found["report"]["rank_fillers"] for found in results]
    assert any(fillers) == (report.rows_trained < len(splits))


@pytest.mark.parametrize(
    ("wrapping", "splits", "widths", "rate"),
    [("ddp", (12, 1), (7, 9), 0.3), ("ddp", SPLITS, WIDTHS, None), ("fsdp", SPLITS, WIDTHS, 0.1)],
)
def test_answers_that_move_keep_their_ratio(crew, wrapping, splits, widths, rate):
    """Ratios of whole answers are those of one process, which tests/lm holds to an oracle."""
    lm = cases.causal_policy(20)
    rows, advantages = cases.token_rows(splits, widths)
    model, stale = TokenLogProb(lm), cases.stale_log_probs(rows)
    gate = None if rate is None else kondo.Gate(rate=rate)
    loss = kondo.losses.sequence_is_pg
    report = run_step(lm, rows, advantages, gate=gate, loss=loss, loss_inputs=stale)
    expected = gradients(model)
    results = crew.run(cases.corrected_step, len(splits), wrapping, splits, widths, 20, rate)
    for found in results:
        assert_close(found["report"]["loss"], report.loss)
        for name, grad in expected.items():
            assert_close(found["grads"][name], grad)
    assert results[0]["report"]["rows_moved"] > 0
    if rate == 0.1:
        assert any(found["report"]["rank_fillers"] for found in results)


def test_ranks_train_about_the_same_number_of_tokens(crew):
    splits, widths = (8, 8), (24, 5)
    # One row to a pack: no padding.
    arguments = ("plain", "sequence", splits, widths, 1, None, 1.0)
    reports = [found["report"] for found in crew.run(cases.language_step, 2, *arguments)]
    trained = [report["rank_tokens_trained"] for report in reports]
    assert max(trained) <= sum(trained) / 2 + max(widths)
    assert reports[0]["rows_moved"] > 0


def test_a_head_of_bare_tensors_is_refused():
    weight = torch.nn.Parameter(torch.zeros(11, 6))
    with pytest.raises(ValueError, match="head as a layer"):
        TokenLogProb(CausalLM(cases.Causal(), head=Head(weight)))


def test_a_head_that_is_sharded_alone_is_refused(crew):
    for found in crew.run(cases.sharded_head, 2):
        assert found["type"] == "ValueError"
        assert "fully_shard on the layers of the backbone" in found["message"]


@pytest.mark.parametrize("free", [False, True])
def test_ids_outside_the_vocabulary_fail_all_ranks(crew, free):
    results = crew.run(cases.bad_token_rows, 2, free)
    assert [found["type"] for found in results] == ["ValueError", "RankError"]
    assert all("input_ids must lie in [0, 11)" in found["message"] for found in results)


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_a_budget_is_that_of_all_rows(crew, unit):
    splits, widths = (5, 0, 12, 3), (6, 5, 8, 10)
    rows, advantages = cases.token_rows(splits, widths)
    lm = cases.causal_policy(64)
    gate = BudgetGate(budget=0.3).for_rows(rows)
    report = run_step(lm, rows, advantages, gate=gate, unit=unit)
    assert 0 < report.kept < report.seen
    for found in crew.run(cases.budgeted_step, 4, unit, splits, widths):
        assert found["report"]["kept"] == report.kept
        assert_close(found["report"]["price"], report.price)
        for name, grad in gradients(TokenLogProb(lm)).items():
            assert_close(found["grads"][name], grad)
        assert "leave for_rows(...) out" in found["bound"]
