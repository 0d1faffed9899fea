import pytest
import torch

import kondo
from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.studies.demo.training import (
    StepRecord,
    TrainingRun,
    interleave,
    mean_error,
    warm_up,
    window,
)
from kondo_lab.tasks import seeds
from kondo_lab.tasks.digits import DigitsBandit
from kondo_lab.tasks.reversal import Reversal
from kondo_lab.training.arms import Arm

PG = Arm(name="PG")
DG = Arm(name="DG", loss=kondo.losses.dg)
DG_K = Arm(name="DG-K (3%)", gate=kondo.Gate(rate=0.03))


def never():
    return False


def digits_run(arm, *, num_steps=10, batch=200, width=128, learning_rate=3e-3, seed=0):
    policy = MLP(64, 10, width=width, generator=seeds.generator(seed, "weights"))
    return TrainingRun(
        DigitsBandit(batch=batch, seed=seed),
        policy,
        arm=arm,
        seed=seed,
        num_steps=num_steps,
        learning_rate=learning_rate,
    )


def reversal_run(arm, *, num_steps=10):
    policy = Decoder.fresh(prompt_length=3, num_tokens=2, generator=seeds.generator(0, "weights"))
    return TrainingRun(
        Reversal(length=3, num_tokens=2, num_prompts=10, num_answers=10, seed=0),
        policy,
        arm=arm,
        seed=0,
        num_steps=num_steps,
        learning_rate=2e-4,
    )


@pytest.mark.parametrize("arm", [PG, DG, DG_K], ids=lambda arm: arm.name)
def test_digits_are_learned(arm):
    run = digits_run(arm, num_steps=150)
    assert run.held_out_error() > 0.8
    for _ in range(run.num_steps):
        run.step()
    assert run.records[0].error > 0.8
    assert sum(record.error for record in run.records[-10:]) / 10 < 0.5
    assert run.held_out_error() < 0.3


@pytest.mark.parametrize("arm", [PG, DG, DG_K], ids=lambda arm: arm.name)
def test_reversal_is_learned(arm):
    run = reversal_run(arm, num_steps=120)
    for _ in range(run.num_steps):
        run.step()
    start, end = (
        sum(record.error for record in part) / 10 for part in (run.records[:10], run.records[-10:])
    )
    assert start > 0.6  # 1 - (1/2 + 1/4 + 1/8) / 3 = 0.708 before training
    assert end < 0.3


@pytest.mark.parametrize(
    ("make", "arm", "samples", "paid"),
    [
        (digits_run, PG, 200, 200),
        (digits_run, DG, 200, 200),
        (digits_run, DG_K, 200, 6),
        (reversal_run, PG, 100, 100),
        (reversal_run, DG_K, 100, 3),
    ],
)
def test_records_count_what_was_sampled_and_what_was_paid(make, arm, samples, paid):
    run = make(arm)
    run.step()
    assert (run.records[0].samples, run.records[0].backward_passes) == (samples, paid)


def test_dense_arms_are_not_charged_for_choosing_and_gated_ones_are():
    dense, gated = digits_run(DG), digits_run(DG_K)
    dense.step()
    gated.step()
    assert dense.records[0].gate == 0.0
    assert gated.records[0].gate > 0.0
    assert all(value > 0 for value in gated.records[0][3:])


def test_runs_repeat_exactly():
    errors = []
    for _ in range(2):
        run = digits_run(DG_K)
        for _ in range(5):
            run.step()
        errors.append([record.error for record in run.records])
    assert errors[0] == errors[1]


def test_arms_of_one_seed_start_alike():
    # The first batch is drawn before any update: same weights, same images, same actions.
    first = []
    for arm in (PG, DG, DG_K):
        run = digits_run(arm)
        run.step()
        first.append(run.records[0].error)
    assert len(set(first)) == 1


class Steps:
    """Stands for a training run and writes down when it was stepped."""

    def __init__(self, name, num_steps, log):
        self.name, self.num_steps, self.log, self.records = name, num_steps, log, []

    def step(self):
        self.records.append(self.name)
        self.log.append(self.name)


def test_runs_take_turns_in_rotating_order():
    log = []
    runs = [Steps("a", 4, log), Steps("b", 4, log), Steps("c", 8, log)]
    assert list(interleave(runs, rounds=2, stopped=never)) == [1, 2]
    assert "".join(log) == "bbccccaa" + "ccccaabb"


def test_no_step_is_lost_to_uneven_rounds():
    log = []
    runs = [Steps("a", 7, log), Steps("b", 5, log)]
    list(interleave(runs, rounds=3, stopped=never))
    assert [len(run.records) for run in runs] == [7, 5]


def test_stopping_ends_between_two_steps():
    log = []
    runs = [Steps("a", 10, log), Steps("b", 10, log)]
    assert list(interleave(runs, rounds=5, stopped=lambda: len(log) == 5)) == [1]
    assert "".join(log) == "bbaaa"


def test_warm_up_leaves_the_measured_runs_fresh():
    made = []

    def make():
        made.append(digits_run(DG_K))
        return made[-1]

    warm_up([make], num_steps=2)
    assert [len(run.records) for run in made] == [2]
    assert made[0] is not make()


def test_an_empty_step_does_not_move_the_weights():
    # From the second step on all advantages are zero: nothing is kept. Momentum must not move on.
    class SoonSolved(Reversal):
        solved = False

        def rollout(self, policy):
            rollout = super().rollout(policy)
            advantages = rollout.advantages * (0.0 if self.solved else 1.0)
            self.solved = True
            return rollout._replace(advantages=advantages)

    policy = Decoder.fresh(prompt_length=3, num_tokens=2, generator=seeds.generator(0, "weights"))
    task = SoonSolved(length=3, num_tokens=2, num_prompts=4, num_answers=5, seed=0)
    run = TrainingRun(task, policy, arm=DG_K, seed=0, num_steps=2, learning_rate=0.1)
    weights = []
    for _ in range(2):
        weights.append(policy.head.weight.clone())
        run.step()
    weights.append(policy.head.weight.clone())
    assert [record.backward_passes for record in run.records] == [1, 0]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (19, 1), (40, 2), (600, 30)])
def test_window_is_a_twentieth_of_the_steps(steps, width):
    assert window(steps) == width


def test_mean_error_is_that_of_the_last_steps():
    records = [StepRecord(error, 1, 1, 0, 0, 0, 0, 0) for error in (1.0, 0.2, 0.4)]
    assert mean_error(records, 2) == pytest.approx(0.3)
    assert mean_error(records[:1], 2) == 1.0
