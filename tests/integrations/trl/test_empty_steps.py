"""A step that keeps nothing moves neither the weights nor the learning rate, and is counted."""

import torch
from transformers import TrainerCallback

from integrations.trl.tiny import policy, reward, trainer


class Watch(TrainerCallback):
    """Parameters and learning rate after each step."""

    def __init__(self):
        self.parameters, self.rates = [], []

    def on_step_end(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.parameters.append(flat.clone())
        self.rates.append(lr_scheduler.get_last_lr()[0])


def sometimes(empty):
    """Rewards that differ, but in the generation batches whose number is in `empty`."""
    calls = iter(range(100))

    def func(completion_ids, **kwargs):
        if next(calls) in empty:
            return [0.1] * len(completion_ids)
        return reward(completion_ids)

    return func


def run(tmp_path, empty, **options):
    watch, model = Watch(), policy()
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    settings = {"max_steps": 4, "weight_decay": 0.5, "kondo_gate": "unbiased:0.3"} | options
    gated = trainer(tmp_path, model=model, reward_funcs=sometimes(empty), **settings)
    gated.add_callback(watch)
    gated.train()
    moved = [
        not torch.equal(old, new)
        for old, new in zip([start, *watch.parameters], watch.parameters, strict=False)
    ]
    return gated, moved, watch.rates


def test_an_empty_step_moves_nothing(tmp_path):
    gated, moved, rates = run(tmp_path, empty={1, 2})
    assert moved == [True, False, False, True]  # Adam's momentum and decay would have moved it
    assert rates[0] == rates[1] == rates[2] > rates[3]
    assert gated.empty_steps == 2
    logged = [log["kondo/empty_steps"] for log in gated.state.log_history if "loss" in log]
    assert logged == [0, 1, 2, 2]
    assert [log["loss"] for log in gated.state.log_history if "loss" in log][1:3] == [0, 0]


def test_rare_logs_show_the_total_so_far(tmp_path):
    gated, *_ = run(tmp_path, empty={0, 1, 2}, logging_steps=2)
    logged = [log["kondo/empty_steps"] for log in gated.state.log_history if "loss" in log]
    assert logged == [2, 3]


def test_an_empty_first_step_moves_nothing(tmp_path):
    _, moved, rates = run(tmp_path, empty={0})
    assert moved == [False, True, True, True]
    assert rates[0] > rates[1] > rates[2] > rates[3]


def test_the_schedule_is_wrapped_as_before(tmp_path, recwarn):
    run(tmp_path, empty={0, 1})
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_nothing_is_ever_worth_an_infinite_price(tmp_path):
    gated, moved, _ = run(tmp_path, empty=set(), kondo_gate="price:1e9")
    assert moved == [False] * 4
    assert gated.empty_steps == 4


def test_half_an_optimizer_step_may_be_empty(tmp_path):
    """Two generation batches in one optimizer step: the second keeps nothing, the first does."""
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 2}
    gated, moved, _ = run(tmp_path, empty={1, 2, 3}, **options)
    assert moved == [True, False]
    assert gated.empty_steps == 1


def test_an_empty_generation_batch_leaves_the_other_half_s_gradient_alone(tmp_path):
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 1}
    norms = []
    for number, base_options in enumerate(({}, {"max_grad_norm": 0.0})):
        gated, *_ = run(tmp_path / str(number), empty={1}, **(options | base_options))
        norms.append(gated.state.log_history[0]["grad_norm"])
    assert norms[0] == norms[1] > 0


def test_a_metric_without_a_number_is_left_out_of_the_log(tmp_path):
    """TRL would write None, which TensorBoard and MLflow warn about at every log."""
    gated, *_ = run(tmp_path, empty={1, 2}, kondo_gate="variance:0.3", beta=0.0)
    logs = [log for log in gated.state.log_history if "loss" in log]
    assert all(None not in log.values() for log in logs)
    assert [("entropy" in log, "kondo/rate" in log) for log in logs] == [
        *((True, True), (False, True), (False, True), (True, True))
    ]
