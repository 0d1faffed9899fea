"""A bandit of four inputs and three actions, whose processes misbehave on demand."""

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kondo.actors.learner import StepOrder
from kondo.actors.messages import Order, pack
from kondo.actors.setup import Setup

SAMPLES = 40
INPUTS, ACTIONS, TOKENS = 4, 3, 5
POISONS = (
    "nan_log_prob",
    "nan_input",
    "nan_reward",
    "inf_reward",
    "absurd_reward",
    "absurd_advantage",
    "id_out_of_range",
    "negative_id",
    "wrong_shape",
    "wrong_dtype",
    "missing_rows",
    "too_many_advantages",
    "missing_field",
    "absurd_input",
    "overflowing_input",
)
REASON = {
    "nan_log_prob": "nan",
    "nan_input": "nan",
    "nan_reward": "nan",
    "inf_reward": "reward",
    "absurd_reward": "reward",
    "absurd_advantage": "reward",
    "id_out_of_range": "range",
    "negative_id": "range",
    "wrong_shape": "shape",
    "wrong_dtype": "dtype",
    "missing_rows": "rows",
    "too_many_advantages": "rows",
    "missing_field": "structure",
    "absurd_input": "gradient",
    "overflowing_input": "error",
}
# No check of the message alone shows what these do: only a step does.
FINITE_POISONS = ("absurd_input", "overflowing_input")


class Rollout(NamedTuple):
    rows: dict[str, Tensor]
    log_probs: Tensor
    rewards: Tensor
    advantages: Tensor


class Policy(nn.Module):
    """Linear logits; with `tokens`, the same input answers several times."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed % 2**31)
        weight = torch.randn(ACTIONS, INPUTS, generator=generator, dtype=dtype)
        self.weight = nn.Parameter(weight)

    def log_prob(self, rows: dict[str, Tensor]) -> Tensor:
        log_probs = (rows["inputs"] @ self.weight.T).log_softmax(-1)
        actions = rows["actions"]
        if actions.ndim == 1:
            return log_probs.gather(1, actions[:, None]).squeeze(1)
        return log_probs.gather(1, actions)


class Task:
    """The right action is the place of the largest of the first three inputs."""

    def __init__(self, seed, *, behaviour="", unit="sample", dtype=torch.float32, seconds=0.0):
        self.unit, self._behaviour, self._dtype, self._seconds = unit, behaviour, dtype, seconds
        self._generator = torch.Generator().manual_seed(seed % 2**31)
        self._count = 0

    def rollout(self, policy):
        self._count += 1
        self._misbehave()
        inputs = torch.randn(SAMPLES, INPUTS, generator=self._generator, dtype=self._dtype)
        shape = (SAMPLES,) if self.unit == "sample" else (SAMPLES, TOKENS)
        actions = torch.randint(ACTIONS, shape, generator=self._generator)
        rows = {"inputs": inputs, "actions": actions}
        with torch.no_grad():
            log_probs = policy.log_prob(rows)
        right = inputs[:, :ACTIONS].argmax(dim=1)
        correct = actions == (right if actions.ndim == 1 else right[:, None])
        rewards = correct.to(self._dtype).reshape(SAMPLES, -1).mean(dim=1)
        rollout = Rollout(rows, log_probs, rewards, rewards - rewards.mean())
        if self._behaviour == "lie" and self._count % 4 == 0:
            return poisoned(rollout, POISONS[self._count // 4 % len(POISONS)])
        if self._behaviour.startswith("poison"):
            return poisoned(rollout, POISONS[self._count % len(POISONS)])
        return rollout

    def _misbehave(self):
        time.sleep(self._seconds)
        if self._behaviour == "slow":
            time.sleep(0.3)
        if self._behaviour == "kill -9" and self._count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._behaviour == "hang" and self._count == 3:
            time.sleep(3600)
        if self._behaviour == "poison, then raise" and self._count > len(POISONS):
            raise OSError("the simulator is gone")
        if self._behaviour == "die at once":
            os._exit(1)


def poisoned(rollout: Rollout, kind: str) -> Rollout:
    """Spoil one value, or one array, of a rollout."""
    rows, log_probs, rewards, advantages = (
        {k: v.clone() for k, v in rollout.rows.items()},
        *(value.clone() for value in rollout[1:]),
    )
    spoil = {
        "nan_log_prob": lambda: log_probs[3:4].fill_(torch.nan),
        "nan_input": lambda: rows["inputs"].fill_(torch.nan),
        "nan_reward": lambda: rewards[0:1].fill_(torch.nan),
        "inf_reward": lambda: rewards[0:1].fill_(torch.inf),
        "absurd_reward": lambda: rewards[0:1].fill_(1e9),
        "absurd_advantage": lambda: advantages.fill_(1e9),
        "id_out_of_range": lambda: rows["actions"].fill_(ACTIONS),
        "negative_id": lambda: rows["actions"].fill_(-1),
        "wrong_shape": lambda: rows.update(inputs=rows["inputs"][:, :2]),
        "wrong_dtype": lambda: rows.update(actions=rows["actions"].int()),
        "missing_rows": lambda: rows.update(inputs=rows["inputs"][:-1]),
        "too_many_advantages": lambda: None,
        "missing_field": lambda: rows.pop("actions"),
        # Gradients are finite, and their squares are not.
        "absurd_input": lambda: rows["inputs"].mul_(1e25),
        # Logits are not finite.
        "overflowing_input": lambda: rows["inputs"].fill_(3e38),
    }
    spoil[kind]()
    if kind == "too_many_advantages":
        advantages = torch.cat([advantages, advantages[:1]])
    return Rollout(rows, log_probs, rewards, advantages)


def _task(behaviours: Mapping[int, str], options, seed: int) -> Task:
    # The learner's own task is number 0; rollout processes count from 1.
    return Task(seed, behaviour=behaviours.get(seed % 2**32, ""), **options)


def toy(behaviours: Mapping[int, str] | None = None, dtype=torch.float32, **options) -> Setup:
    """Return a setup; `behaviours` tells how the n-th process misbehaves."""
    return Setup(
        name="toy",
        make_task=partial(_task, behaviours or {}, {"dtype": dtype, **options}),
        make_policy=partial(Policy, dtype=dtype),
        samples=SAMPLES,
        limits={"actions": (0, ACTIONS - 1)},
    )


def liars() -> Setup:
    """Return a setup of which every third process sends a poisoned rollout now and then."""
    return toy(dict.fromkeys(range(2, 3000, 3), "lie"), seconds=0.01)


def slow_pg(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """A learner that takes its time."""
    time.sleep(0.2)
    return -log_probs * advantages


def feed(learner, task, number: int, *, spoil=None):
    """Make one rollout with the learner's weights and give it to the learner; return its report."""
    issued = learner.ledger.issued
    order = Order(issued, 0, 1, learner.step_number, learner.price)
    message = make_message(learner, task, order, spoil=spoil)
    return learner.step(StepOrder(number, (order,), (), issued + 1, 1), [message])


def make_message(learner, task, order, *, spoil=None):
    rollout = task.rollout(learner.policy)
    return pack(poisoned(rollout, spoil) if spoil else rollout, order, learner.gate, task.unit)
