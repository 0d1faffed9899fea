import logging
import math

import pytest
import torch

import kondo
import kondo.lm
from kondo.engine.screen import screen_log_probs
from kondo.lm import checked_screen as module
from kondo.lm.budget import BudgetGate
from kondo.lm.checked_screen import CheckedScreen
from lm.tiny import policy, token_rows
from steps import run_step


class Exact:
    """Rows are their own log-probs; counts the rows it is asked for."""

    def __init__(self):
        self.rows = []

    def __call__(self, rows):
        self.rows.append(rows.shape[0])
        return rows


@pytest.fixture
def batch(generator):
    true = -torch.rand(40, 3, generator=generator)
    return true, torch.ones(40), true.flip(0).contiguous()  # advantages; a screen that is wrong


def test_an_agreeing_screen_is_used_and_checked_now_and_then(batch):
    true, advantages, _ = batch
    exact = Exact()
    guard = CheckedScreen(exact, gate=kondo.Gate(rate=0.2), every=3)
    nearly = true * 1.001
    for _ in range(7):
        assert torch.equal(guard(true, advantages, nearly), nearly)
    assert (guard.steps, guard.checks, guard.failures, guard.exact_steps) == (7, 3, 0, 0)
    assert exact.rows == [40] * 3
    assert guard.trusted
    assert guard.latest.overlap == 1.0


def test_a_disagreeing_screen_is_replaced_with_a_warning_until_it_agrees_again(batch, caplog):
    true, advantages, wrong = batch
    exact = Exact()
    guard = CheckedScreen(exact, gate=kondo.Gate(rate=0.2), every=2)
    with caplog.at_level(logging.WARNING, logger="kondo.lm.checked_screen"):
        assert torch.equal(guard(true, advantages, wrong), true)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "disagrees with the exact one" in caplog.text
        assert not guard.trusted
        # Between checks the verdict stands, whatever comes.
        assert torch.equal(guard(true, advantages, true * 1.001), true)
        assert torch.equal(guard(true, advantages, true * 1.001), true * 1.001)
    assert "agrees again" in caplog.text
    assert guard.trusted
    assert (guard.steps, guard.checks, guard.failures, guard.exact_steps) == (3, 2, 1, 2)
    assert exact.rows == [40] * 3  # a check of all rows is not computed twice


def test_a_screen_that_goes_wrong_between_checks_is_caught_at_the_next(batch):
    true, advantages, wrong = batch
    guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.2), every=4)
    used = [torch.equal(guard(true, advantages, free), true) for free in [true * 1.1] + [wrong] * 4]
    assert used == [False, False, False, False, True]


def test_a_sample_checks_that_many_rows_and_then_screens_all(batch):
    true, advantages, wrong = batch
    exact = Exact()
    guard = CheckedScreen(exact, gate=kondo.Gate(rate=0.2), every=1, sample=25)
    assert torch.equal(guard(true, advantages, wrong), true)
    assert exact.rows == [25, 40]
    small = CheckedScreen(exact, gate=kondo.Gate(rate=0.2), sample=100)
    small(true, advantages, wrong)
    assert exact.rows == [25, 40, 40]


def test_samples_differ_and_come_from_the_seed(batch):
    true, advantages, _ = batch
    seen = []

    def exact(rows):
        seen.append(rows[:, 0].tolist())
        return rows

    for _ in range(2):
        guard = CheckedScreen(exact, gate=kondo.Gate(rate=0.2), every=1, sample=10, seed=5)
        guard(true, advantages, true)
        guard(true, advantages, true)
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_the_limit_decides(batch):
    true, advantages, _ = batch
    free = true.clone()
    order = true.sum(1).argsort()
    free[order[9]], free[order[10]] = true[order[10]], true[order[9]]  # 9 of 10 agree: overlap 9/11
    for limit, trusted in ((9 / 11, True), (0.82, False)):
        guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.25), least_overlap=limit)
        guard(true, advantages, free)
        assert guard.latest.overlap == 9 / 11
        assert guard.trusted is trusted


def test_few_kept_units_are_judged_by_the_delight_they_buy(batch):
    true, advantages, _ = batch
    order = true.sum(1).argsort()
    for others, trusted in (((4, 5), True), ((38, 39), False)):
        free = true.clone()
        for ours, other in zip((2, 3), others, strict=True):
            free[order[ours]], free[order[other]] = true[order[other]], true[order[ours]]
        guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.1), least_overlap=0.8)
        guard(true, advantages, free)
        assert guard.latest.overlap == 2 / 6
        assert guard.trusted is (guard.latest.delight_share >= 0.8) is trusted


def test_few_units_without_delight_are_judged_by_their_overlap(batch):
    true, advantages, wrong = batch
    for free, trusted in ((true, True), (wrong, False)):
        guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.1))
        guard(true, -advantages, free)
        assert math.isnan(guard.latest.delight_share)
        assert guard.trusted is trusted


def test_a_draft_that_is_not_trusted_runs_for_checks_alone(batch):
    true, advantages, wrong = batch
    calls = []

    def draft(rows):
        calls.append(1)
        return wrong

    guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.2), every=3)
    for _ in range(5):
        assert torch.equal(guard(true, advantages, draft), true)
    assert len(calls) == guard.checks == 2


@pytest.mark.parametrize("sample", [None, 25])
@pytest.mark.parametrize("given_late", [False, True])
def test_a_bound_budget_keeps_its_weights(sample, given_late, batch, monkeypatch):
    true, advantages, _ = batch
    seen = []
    inner = module.agreement

    def spy(*args, gate, **options):
        seen.append(gate)
        return inner(*args, gate=gate, **options)

    monkeypatch.setattr(module, "agreement", spy)
    weight = torch.rand(40, 3) + 0.5
    bound = BudgetGate(budget=0.5).for_rows(torch.ones(40, 3, dtype=torch.bool), weight=weight)
    guard = CheckedScreen(
        Exact(), gate=BudgetGate(budget=0.1) if given_late else bound, unit="token", sample=sample
    )
    guard(true, advantages, true, gate=bound if given_late else None)
    (used,) = seen
    costs = {tuple(row) for row in bound._cost.tolist()}
    assert len(used._cost) == (sample or 40)
    assert all(tuple(row) in costs for row in used._cost.tolist())
    assert used._weighted


def test_the_signal_decides_what_is_compared(batch):
    true, advantages, wrong = batch

    def by_advantage(log_probs, advantages, mask=None):
        return advantages.unsqueeze(1).expand_as(log_probs)

    chosen = torch.arange(40.0)
    guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.25, signal=by_advantage))
    guard(true, chosen, wrong)
    assert guard.latest.overlap == 1.0
    guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.25))
    guard(true, advantages, wrong)
    assert guard.latest.overlap < 1.0


def test_the_mask_counts(batch):
    true, advantages, _ = batch
    free = true.clone()
    free[:, 2] = true[:, 2].flip(0)
    mask = torch.tensor([True, True, False]).expand(40, 3)
    guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.2), every=1)
    guard(true, advantages, free, mask=mask)
    assert guard.latest.overlap == 1.0
    guard(true, advantages, free)
    assert guard.latest.overlap < 1.0


def test_a_draft_can_be_the_free_screen(batch):
    true, advantages, _ = batch
    guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.2))
    assert torch.equal(guard(true, advantages, lambda rows: rows * 2), true * 2)


def test_its_state_can_be_saved_and_loaded(batch, tmp_path):
    true, advantages, wrong = batch

    def new():
        return CheckedScreen(Exact(), gate=kondo.Gate(rate=0.2), every=2, sample=25)

    first, second = new(), new()
    first(true, advantages, wrong)
    torch.save(first.state_dict(), tmp_path / "guard.pt")
    second.load_state_dict(torch.load(tmp_path / "guard.pt", weights_only=True))
    for guard in (first, second):
        guard(true, advantages, wrong)
        guard(true, advantages, true)
    assert torch.equal(first.state_dict().pop("draws"), second.state_dict().pop("draws"))
    assert (second.steps, second.checks, second.failures, second.exact_steps) == (3, 2, 1, 2)
    assert second.latest == first.latest
    with pytest.raises(ValueError, match="state must have the keys"):
        second.load_state_dict({"steps": 1})


@pytest.mark.parametrize("gate", [kondo.Gate(rate=0.25), BudgetGate(budget=0.25)])
@pytest.mark.parametrize("sample", [None, 30])
def test_it_guards_the_step_of_a_language_model(gate, sample, generator):
    pytest.importorskip("transformers")
    lm, rows = policy(), token_rows(generator, 40)
    advantages = torch.randn(40, generator=generator)
    rollout = screen_log_probs(lm.log_prob, rows)
    wrong = torch.where(rows.completion_mask, rollout.flip(0) - 1, 0.0)
    guard = CheckedScreen(lm.log_prob, gate=gate, unit="token", every=1, sample=sample)
    bound = gate.for_rows(rows) if isinstance(gate, BudgetGate) else gate
    for free, trusted in ((rollout, True), (wrong, False)):
        screen = guard(rows, advantages, free)
        report = run_step(lm, rows, advantages, gate=bound, unit="token", screen=screen)
        assert report.kept > 0
        assert guard.trusted is trusted


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": 0}, "every must be at least 1 step, got 0"),
        ({"least_overlap": 1.1}, r"least_overlap must lie in \[0, 1\], got 1.1"),
        ({"sample": 0}, "sample must be at least 1 row, got 0"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        CheckedScreen(Exact(), gate=kondo.Gate(rate=0.2), **options)


def test_a_broken_free_screen_is_an_error_and_not_a_fallback(batch):
    true, advantages, _ = batch
    guard = CheckedScreen(Exact(), gate=kondo.Gate(rate=0.2))
    with pytest.raises(ValueError, match="NaN"):
        guard(true, advantages, true * float("nan"))


@pytest.mark.parametrize("trusted", [True, False])
def test_both_screens_of_a_guard_are_in_evaluation_mode(generator, trusted):
    lm, rows, modes = policy("gpt2"), token_rows(generator), []
    lm.module.train()
    lm.module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    lm.backbone.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    guard = CheckedScreen(lm.log_prob, gate=kondo.Gate(rate=0.5))
    guard.trusted = trusted
    for _ in range(2):
        guard(rows, torch.ones(12), lm.log_prob)
    assert len(modes) == 3
    assert not any(modes)
    assert lm.module.training
