"""The asynchronous trainer: samples that are skipped never leave the queue's end."""

import math

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TreeRow

import kondo
from integrations.trl.async_tiny import OPTIONS, samples, trainer, use_cpu
from integrations.trl.recording import AsyncRecorder
from integrations.trl.test_experts import experts
from integrations.trl.test_options import EveryThird, PutIn, every_third
from integrations.trl.test_page import explained
from kondo.integrations.trl.async_grpo import KondoAsyncGRPOConfig, KondoAsyncGRPOTrainer
from kondo.integrations.trl.sample_stream import GatedPlanner, sample_advantages
from oracles.async_grpo import loss
from tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    use_cpu(monkeypatch)


def gated(tmp_path, given, **options):
    return trainer(tmp_path, KondoAsyncGRPOTrainer, KondoAsyncGRPOConfig, given, **options)


def test_every_logged_key_is_explained(tmp_path):
    trained = gated(tmp_path, samples(96), kondo_gate="unbiased:0.3")
    trained.train()
    logged = {key for log in trained.state.log_history for key in log if key.startswith("kondo/")}
    assert "kondo/samples_trained_total" in logged
    assert logged <= explained() | explained("Asynchronous GRPO")


@pytest.mark.parametrize("budget", [0, 60], ids=["fixed count", "token budget"])
@pytest.mark.parametrize("gate", ["unbiased:0.3", "noise:1.5", "delight:0.3", "variance:0.4"])
def test_gradients_are_trl_s_with_the_skipped_left_out(tmp_path, gate, budget):
    trained = gated(tmp_path, samples(96), kondo_gate=gate, token_budget=budget)
    recorder = AsyncRecorder(trained)
    trained.train()
    model = trained.accelerator.unwrap_model(trained.model)
    model.config._attn_implementation = "eager"
    assert len(recorder.steps) == 2
    for number, (before, grads) in enumerate(recorder.steps):
        model.load_state_dict(before, strict=False)
        micros = recorder.micros[2 * number : 2 * number + 2]
        kept = [weight for micro in micros for _, weight in micro if weight]
        assert 0 < len(kept) < sum(map(len, micros))
        names, values = zip(*model.named_parameters(), strict=True)
        expected = torch.autograd.grad(loss(model, micros), values)
        for name, gradient in zip(names, expected, strict=True):
            assert_close(grads[name], gradient)
        assert max(float(gradient.abs().max()) for gradient in expected) > 0.01


def test_dense_is_trl_s_trainer_bit_for_bit(tmp_path):
    theirs = trainer(tmp_path, AsyncGRPOTrainer, AsyncGRPOConfig, samples(48))
    ours = gated(tmp_path, samples(48), kondo_gate="dense")
    for each in (theirs, ours):
        each.train()
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("budget", [0, 60], ids=["fixed count", "token budget"])
def test_as_many_samples_are_taken_and_fewer_tokens_run(tmp_path, budget):
    options = {"token_budget": budget}
    theirs = trainer(tmp_path, AsyncGRPOTrainer, AsyncGRPOConfig, samples(96), **options)
    ours = gated(tmp_path, samples(96), kondo_gate="unbiased:0.1", kondo_check=False, **options)
    recorder = AsyncRecorder(ours)
    for each in (theirs, ours):
        each.train()
    assert ours.rollout_queue.qsize() == theirs.rollout_queue.qsize()
    assert ours._trained_groups == theirs._trained_groups  # which end an epoch
    seen = sum(len(s["input_ids"]) for micro in recorder.micros[:4] for s, _ in micro)
    assert recorder.forwarded < 0.4 * seen  # prompts and fillers included
    logs = [log for log in ours.state.log_history if "kondo/samples_seen_total" in log]
    for name in ("reward", "reward_std"):  # of all samples, not of the kept ones
        expected = [log[name] for log in theirs.state.log_history if name in log]
        assert [log[name] for log in logs] == expected
    trained = sum(log["batch/trained_tokens_per_step"] for log in logs)
    kept = sum(s["completion_mask"].sum() for micro in recorder.micros[:4] for s, w in micro if w)
    assert trained == kept


def test_a_step_that_keeps_nothing_leaves_the_weights_alone(tmp_path):
    given = samples(12) + samples(36, equal=True)
    options = {"weight_decay": 0.1, "max_steps": 3, "kondo_gate": "unbiased:0.9"}
    trained = gated(tmp_path, given, **options)
    recorder = AsyncRecorder(trained)
    trained.train()
    assert trained.empty_steps == 2
    after_first, after_second = (before for before, _ in recorder.steps[1:])
    for name, value in trained.model.named_parameters():
        assert torch.equal(after_first[name], after_second[name])
        assert torch.equal(value, after_second[name])
    moved = [not torch.equal(recorder.steps[0][0][name], after_first[name]) for name in after_first]
    assert any(moved)
    assert trained.lr_scheduler.last_epoch == 1  # nor does the learning rate move


@pytest.mark.parametrize(("every", "versions"), [(1, [1, 2, 2, 2]), (2, [1, 1, 2, 2])])
def test_samples_do_not_age_in_steps_that_keep_nothing(tmp_path, every, versions):
    """Of four steps the second and third keep nothing; weights may be sent every `every` steps."""
    given = samples(12) + samples(24, equal=True) + samples(24, seed=1)
    options = {"max_steps": 4, "kondo_gate": "unbiased:0.9", "weight_sync_steps": every}
    trained = gated(tmp_path, given, **options)
    found, sent = [], []

    class Look(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            found.append(trained.model_version)

    trained.add_callback(Look())
    trained.weight_transfer.send_weights = lambda weights: sent.append(len(list(weights)))
    trained.train()
    assert trained.empty_steps == 2
    assert found == versions
    assert len(sent) == trained.model_version == 3


def test_nothing_is_logged_of_fillers_where_nothing_is_trained(tmp_path):
    given = samples(12) + samples(24, equal=True)
    trained = gated(tmp_path, given, max_steps=2, kondo_gate="unbiased:0.9")
    trained.train()
    first, second = (log for log in trained.state.log_history if "kondo/empty_steps" in log)
    assert [log["kondo/empty_steps"] for log in (first, second)] == [0, 1]
    for name in ("ratio", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_max"):
        assert math.isfinite(first[name])
        assert name not in second
    assert all(None not in log.values() for log in trained.state.log_history)


# The check of the first batch


def checked_run(folder, **options):
    torch.manual_seed(7)
    trained = gated(folder, samples(96), **({"kondo_gate": "unbiased:0.3"} | options))
    recorder = AsyncRecorder(trained)
    trained.train()
    seconds = [log.get("kondo/seconds_check") for log in trained.state.log_history if "loss" in log]
    tensors = [*trained.model.parameters(), torch.get_rng_state(), trained._draws.get_state()]
    tensors += [value for _, grads in recorder.steps for value in grads.values()]
    return tensors, seconds, repr(trained.gate.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"token_budget": 60},
        {"kondo_gate": "delight:0.1,window=2"},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    ],
    ids=str,
)
def test_the_check_leaves_nothing_behind(tmp_path, options):
    found, seconds, state = checked_run(tmp_path, **options)
    expected, none, expected_state = checked_run(tmp_path, kondo_check=False, **options)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert state == expected_state
    assert seconds[0] > 0
    assert set(seconds[1:]) == set(none) == {None}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        # Rows lie end to end.
        (lambda x: x + x.cumsum(1), "Log-probs of a row depend on the other rows"),
        (lambda x: x + x.roll(-2, 1), "Log-probs of a token depend on later tokens"),
        (lambda x: torch.nn.functional.dropout(x, 0.3), "draws random numbers in evaluation mode"),
    ],
    ids=["rows", "later tokens", "dropout"],
)
def test_a_fault_ends_the_run_before_the_first_step(tmp_path, change, fault):
    trained = gated(tmp_path, samples(48), kondo_gate="unbiased:0.3")
    trained.model.model.norm.register_forward_hook(lambda module, args, output: change(output))
    before = [parameter.detach().clone() for parameter in trained.model.parameters()]
    with pytest.raises(kondo.CheckError, match=fault):
        trained.train()
    assert trained.state.global_step == 0
    assert all(map(torch.equal, before, trained.model.parameters()))
    assert all(parameter.grad is None for parameter in trained.model.parameters())


# Gates that take the place of the config's


class OwnDraw(kondo.UnbiasedGate):
    """Keeps what it keeps in its own way."""

    def __init__(self):
        super().__init__(rate=0.5)


def test_a_subclass_of_the_unbiased_gate_stays_what_it_is(tmp_path):
    made = gated(tmp_path, samples(4), kondo_gate=f"{__name__}:OwnDraw")
    assert type(made.gate) is OwnDraw
    assert gated(tmp_path, samples(4)).gate.window == 32  # of the config


@pytest.mark.parametrize("gate", [EveryThird(), every_third], ids=["object", "function"])
def test_a_gate_of_one_s_own_needs_no_line_elsewhere(tmp_path, gate):
    trained = gated(tmp_path, samples(48), kondo_gate=gate)
    trained.train()
    logs = [log for log in trained.state.log_history if "kondo/samples_seen_total" in log]
    assert len(logs) == 2
    for log in logs:
        assert 3 * log["kondo/samples_trained_total"] == log["kondo/samples_seen_total"] > 0


def test_a_gate_in_a_config_is_shown_as_its_repr(tmp_path):
    made = gated(tmp_path, samples(4), kondo_gate=kondo.UnbiasedGate(rate=0.3, window=3))
    assert (
        repr(made.gate) == made.args.to_dict()["kondo_gate"] == "UnbiasedGate(rate=0.3, window=3)"
    )


def test_a_window_of_the_gates_own_is_kept(tmp_path):
    made = gated(tmp_path, samples(4), kondo_gate="unbiased:0.3,window=3,max_weight=9")
    assert repr(made.gate) == "UnbiasedGate(rate=0.3, max_weight=9, window=3)"


def test_a_gate_in_the_place_of_dense_is_used(tmp_path):
    trained = gated(tmp_path, samples(48), kondo_gate="dense")
    trained.gate = kondo.Gate(rate=0.3)
    trained.train()
    logs = [log for log in trained.state.log_history if "kondo/samples_seen_total" in log]
    assert len(logs) == 2
    assert all(log["kondo/samples_trained_total"] < 12 for log in logs)


def test_a_gate_in_the_place_of_dense_is_checked(tmp_path):
    experts().save_pretrained(tmp_path / "model")
    made = gated(tmp_path, samples(4), router_aux_loss_coef=0.1, kondo_gate="dense")
    with pytest.raises(ValueError, match="router_aux_loss_coef must be"):
        made.gate = kondo.Gate(rate=0.3)
    assert made.gate is None


def test_a_run_that_began_without_a_gate_goes_on_without(tmp_path):
    trained = gated(tmp_path, samples(48), kondo_gate="dense")
    trained.add_callback(PutIn(trained, kondo.Gate(rate=0.3)))
    with pytest.raises(ValueError, match=r"gate must be None in a run of train\(\)"):
        trained.train()


def test_none_in_the_place_of_a_gate_keeps_everything(tmp_path):
    trained = gated(tmp_path, samples(48), kondo_gate="delight:0.3")
    trained.add_callback(PutIn(trained, None))
    trained.train()
    logs = [log for log in trained.state.log_history if "kondo/samples_seen_total" in log]
    kept = [log["kondo/samples_trained_total"] for log in logs]
    assert kept[0] < 12
    assert kept[1] == 12


def test_a_checkpoint_holds_the_window_and_the_draws(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "kondo_gate": "unbiased:0.3"}
    first = gated(tmp_path, samples(48), **options)
    first.train()
    again = gated(tmp_path, samples(96), max_steps=3, **(options | {"save_strategy": "no"}))
    restored = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            restored.update(again.gate.state_dict()["drawn_past"], draws=again._draws.get_state())

    again.add_callback(Look())
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    expected = first.gate.state_dict()["drawn_past"] | {"draws": first._draws.get_state()}
    assert set(expected) == set(restored)
    for name, value in expected.items():
        assert torch.equal(value.nan_to_num(), restored[name].nan_to_num())


# Rows of several processes


def as_dicts(given):
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
    return [{name: getattr(sample, name) for name in names} for sample in given]


class Planned:
    """A planner of TRL with one micro-batch of three rows."""

    def __init__(self, given, token_budget=None):
        self.rows = [TreeRow() for _ in range(3)]
        for number, sample in enumerate(given):
            self.rows[number % 3].add(sample)
        if token_budget is not None:
            self.token_budget = token_budget

    def __iter__(self):
        yield self.rows


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 9])
def test_every_process_has_a_row_whatever_is_kept(kept):
    given = as_dicts(samples(12))
    weights = [2.0] * kept + [0.0] * (12 - kept)
    (micro,) = GatedPlanner(Planned(given), lambda seen: weights)
    assert len(micro.seen) == 12
    assert len(micro.kept) == kept
    placed = [sample for row in micro.rows for sample in row.samples]
    assert all(row.samples for row in micro.rows)
    real = [sample for sample in placed if sample["advantage"] != 0]
    # Three groups of four by turns: row 0 holds samples 0, 3, 6, ...
    order = [given[i] for start in range(3) for i in range(start, 12, 3)]
    wanted = sorted(2.0 * sample["advantage"] for sample in order[:kept] if sample["advantage"])
    assert sorted(sample["advantage"] for sample in real) == wanted
    assert len(placed) == max(kept, 3)
    if kept == 0:  # fillers
        assert all(int(sample["completion_mask"].sum()) == 1 for sample in placed)


def test_rows_stay_as_they_were_where_balance_would_break_the_budget():
    given = as_dicts(samples(12))
    planner = Planned(given, token_budget=0)  # nothing fits
    (micro,) = GatedPlanner(planner, lambda seen: [1.0] * 4 + [0.0] * 8)
    assert [len(row.samples) for row in micro.rows] == [4, 1, 1]  # one filler each
    assert micro.rows[0].samples[1]["group_id"] == planner.rows[0].samples[1]["group_id"]


# Options


@pytest.mark.parametrize("gate", [kondo.Gate(rate=0.1), kondo.UnbiasedGate(rate=0.1)])
@pytest.mark.parametrize("reward", [0.0, 0.7, -0.1, 1e6 / 3])
def test_equal_rewards_are_an_advantage_of_exactly_zero(gate, reward):
    rewards = np.array([reward] * 6)
    spread = float(rewards.std())
    given = as_dicts(samples(8))
    for sample, advantage in zip(given, (rewards - rewards.mean()) / (spread + 1e-8), strict=False):
        sample |= {"advantage": advantage, "metrics": {"reward": reward, "reward_std": spread}}
    if reward == 0.7:
        assert given[0]["advantage"] != 0  # rounding
    found = sample_advantages(given, gate)
    assert (found[:6] == 0).all()
    assert (found[6:] != 0).any()


def test_centred_rewards_are_those_of_the_worker():
    given = as_dicts(samples(12))
    rewards = torch.tensor([sample["metrics"]["reward"] for sample in given]).view(-1, 4)
    centred = (rewards - rewards.mean(1, keepdim=True)).flatten()
    assert_close(sample_advantages(given, kondo.Gate(rate=0.1)), centred)
    own = torch.tensor([sample["advantage"] for sample in given])
    assert_close(sample_advantages(given, kondo.UnbiasedGate(rate=0.1)), own)
    del given[3]["metrics"]["reward_std"]
    with pytest.raises(ValueError, match=r"must have 'reward_std'.* for Gate\(rate=0.1\)"):
        sample_advantages(given, kondo.Gate(rate=0.1))


def test_options_are_checked(tmp_path):
    options = {k: v for k, v in OPTIONS.items() if k != "dtype"}
    with pytest.raises(ValueError, match="gate spec must name a known rule"):
        KondoAsyncGRPOConfig(str(tmp_path), kondo_gate="tenth", **options)
    for spec in (None, 0.1):  # None would be dense without a word
        with pytest.raises(ValueError, match="kondo_gate must be text for"):
            KondoAsyncGRPOConfig(str(tmp_path), kondo_gate=spec, **options)
    with pytest.raises(ValueError, match="args must be a KondoAsyncGRPOConfig, got AsyncGRPOConfi"):
        KondoAsyncGRPOTrainer(str(tmp_path), args=AsyncGRPOConfig(str(tmp_path), **options))


def test_an_auxiliary_loss_that_was_asked_for_is_refused(tmp_path):
    experts().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="router_aux_loss_coef must be"):
        gated(tmp_path, samples(4), router_aux_loss_coef=0.1)
    assert not gated(tmp_path, samples(4)).aux_loss_enabled
