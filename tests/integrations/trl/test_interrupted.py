"""A run that ends in an error, or by Ctrl-C, leaves a trainer whose next run is an ordinary one."""

import itertools

import pytest
import torch
from transformers import TrainerCallback

from integrations.trl.test_empty_steps import Watch, sometimes
from integrations.trl.tiny import policy, trainer

ERRORS = [ZeroDivisionError, KeyboardInterrupt]
EVENTS = ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]


class Raise(TrainerCallback):
    """Raise once, at the first such event of an optimizer step."""

    def __init__(self, event, error, step):
        def once(args, state, control, **kwargs):
            if state.global_step == step and not self.raised:
                self.raised = True
                raise error

        self.raised = False
        setattr(self, event, once)


def train_again(gated, model):
    """Run once more; say which steps moved the weights, and the learning rates."""
    watch = Watch()
    gated.add_callback(watch)
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    gated.train()
    states = [start, *watch.parameters]
    moved = [not torch.equal(old, new) for old, new in itertools.pairwise(states)]
    return moved, watch.rates


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("empty", [True, False])
def test_the_next_run_takes_ordinary_steps(tmp_path, event, error, empty):
    model = policy()
    batches = {1} if empty else set()  # of the first run; the second one starts at batch 2
    options = {"max_steps": 4, "weight_decay": 0.5, "kondo_gate": "unbiased:0.3"}
    gated = trainer(tmp_path, model=model, reward_funcs=sometimes(batches), **options)
    gated.add_callback(Raise(event, error, step=2 if event == "on_step_end" else 1))
    with pytest.raises(error):
        gated.train()
    assert not gated.optimizer.step_was_skipped
    skipped = gated.empty_steps
    moved, rates = train_again(gated, model)
    assert moved == [True] * 4
    assert rates[0] > rates[1] > rates[2] > rates[3]
    assert gated.empty_steps == skipped
    assert gated.state.global_step == 4


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_inside_a_trained_step_is_not_remembered(tmp_path, error):
    """The next run's first step is empty, and is left out although the one before had trained."""
    model = policy()
    options = {"max_steps": 2, "weight_decay": 0.5, "kondo_gate": f"unbiased:{1 / 3}"}
    gated = trainer(tmp_path, model=model, reward_funcs=sometimes({1, 2}), **options)
    inner = gated.accelerator.backward

    def failing(*args, **kwargs):
        if gated._window.trained:
            gated.accelerator.backward = inner
            raise error
        return inner(*args, **kwargs)

    gated.accelerator.backward = failing
    with pytest.raises(error):
        gated.train()
    moved, rates = train_again(gated, model)
    assert moved == [False, False]
    assert rates[0] == rates[1]
    assert gated.empty_steps == 2


def test_the_next_run_generates_anew(tmp_path):
    """Half an optimizer step of the run before is left over: it belongs to no step of this run."""
    model, seen = policy(), []
    options = {"max_steps": 2, "kondo_gate": "unbiased:0.3", "gradient_accumulation_steps": 2}
    gated = trainer(tmp_path, model=model, reward_funcs=sometimes(set()), **options)
    gated.add_callback(Raise("on_substep_end", ZeroDivisionError, step=1))
    with pytest.raises(ZeroDivisionError):
        gated.train()
    inner = gated._generate_and_score_completions

    def counted(inputs):
        seen.append(gated._step)
        return inner(inputs)

    gated._generate_and_score_completions = counted
    gated.train()
    assert seen == [0, 2]
