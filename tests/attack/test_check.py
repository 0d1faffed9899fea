"""Attack `kondo.check`: sound policies pass and are trained right, planted faults are named.

Either way everything is as it was afterwards: random numbers, `.grad`, buffers, modes, flags, the
gate, the batch.
"""

import random
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import kondo
from attack import random_gates
from attack.gradients import LIMIT, assert_gradients
from attack.random_batches import contents, draw_batch, numbers
from attack.random_policies import ACROSS, BENT, IN_ROWS, OF_SEQUENCES, PARTS, WIDTH, untouched

ACTIONS = 3
# Rounding of bfloat16 is as large as a small leak: faults are planted in wider dtypes.
DTYPES = (torch.float32, torch.float64, torch.float32, torch.bfloat16)


class Remembers(kondo.Gate):
    """A gate that counts its calls."""

    calls = 0

    def choose(self, values, mask, generator=None):
        self.calls += 1
        return super().choose(values, mask, generator)

    def state_dict(self):
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Owner(nn.Module):
    """Has a problem's network, and its log-probs as a method."""

    def __init__(self, problem):
        super().__init__()
        self.net, self.function = problem.net, problem.log_prob

    def log_prob(self, rows):
        return self.function(rows)


class Problem:
    """A random policy, sound or with one fault, and what it is checked with."""

    def __init__(self, draw, fault=None):
        self.draw, self.fault = draw, fault
        torch.manual_seed(draw.randrange(2**31))
        self.size, self.length = draw.randint(8, 30), draw.choice([None, None, 2, 4])
        self.dtype = draw.choice(DTYPES if fault is None else DTYPES[:2])
        self.shape = (self.size,) if self.length is None else (self.size, self.length)
        self.net = self._net()
        self.bend = BENT[fault][0] if fault in BENT else lambda found: found
        self._make_batch()
        self.advantages = torch.randn(self.size)
        self.unit = draw.choice(["token", "sequence"]) if self.length else "sample"
        mask = torch.rand(self.shape) < 0.8
        self.mask = mask if fault is None and draw.random() < 0.3 else None
        self.generator = torch.Generator().manual_seed(3)
        self.gate = draw.choice([None, Remembers(rate=0.5), kondo.UnbiasedGate(rate=0.5)])
        self.method = Owner(self).log_prob

    def _net(self):
        names = {**PARTS, **(OF_SEQUENCES if self.length else {})}
        if self.dtype == torch.bfloat16:  # rounding sends a row to another expert
            del names["experts"]
        parts = [names[self.draw.choice(tuple(names))](self.draw) for _ in range(2)]
        if self.fault in ACROSS:
            parts.insert(self.draw.randrange(3), ACROSS[self.fault][0](self.draw))
        # What comes after a first layer has a gradient, and a last one has room for all actions.
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), *parts, nn.Tanh(), nn.Linear(WIDTH, ACTIONS)
        ).to(self.dtype)

    def _make_batch(self):
        actions = torch.randint(ACTIONS, self.shape)
        fields = {"states": torch.randn(*self.shape, WIDTH), "actions": actions}
        self.touch = untouched
        if self.fault in IN_ROWS:
            self.batch, self.touch = IN_ROWS[self.fault][0](fields)
            self.read = lambda rows: {name: rows[name] for name in ("states", "actions")}
        else:
            self.batch, self.read = draw_batch(self.draw, fields, self.size)

    def log_prob(self, rows):
        fields = self.read(rows)
        self.touch(rows, fields)
        states = fields["states"] + numbers(fields).view(-1, *[1] * len(self.shape))
        chances = self.net(states.to(self.dtype))
        wide = chances.float() if self.dtype == torch.bfloat16 else chances
        return self.bend(wide.log_softmax(-1).gather(-1, fields["actions"][..., None]).squeeze(-1))

    def check(self):
        """Check the function, which names its module, or a method of a module."""
        named = self.draw.random() < 0.5
        kondo.check(
            self.log_prob if named else self.method,
            self.batch,
            self.advantages,
            gate=self.gate,
            unit=self.unit,
            mask=self.mask,
            options=kondo.Options(generator=self.generator, module=self.net if named else None),
        )

    def world(self):
        """Return, by name, all that must be as it was after a check."""
        parts, parameters = list(self.net.modules()), list(self.net.parameters())
        found = {
            "torch": torch.get_rng_state().tolist(),
            "python": random.getstate(),
            "numpy": str(np.random.get_state()),
            "generator": self.generator.get_state().tolist(),
            "modes": [part.training for part in parts],
            "flags": [each.requires_grad for each in parameters],
            "buffers": [(id(each), each.tolist()) for each in self.net.buffers()],
            "gradients": [(id(p.grad), p.grad is None or p.grad.tolist()) for p in parameters],
            "gate": None if self.gate is None else repr(self.gate.state_dict()),
        }
        if self.fault != "drifts":
            found["parameters"] = [each.tolist() for each in parameters]
        if self.fault not in ("rewritten", "edited lists"):  # what the policy writes to itself
            found["batch"] = contents(self.batch)
        return found


def tried(draw, fault=None):
    """Return a problem and what its check says, None if it passes; all else must be as it was."""
    problem = Problem(draw, fault)
    for parameter in problem.net.parameters():
        parameter.grad = draw.choice([None, torch.ones_like(parameter)])
    before, said = problem.world(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if fault else "error", kondo.CheckWarning)
        try:
            problem.check()
        except kondo.CheckError as error:
            said = "\n".join(error.findings)
    unchanged(problem, before)
    return problem, said


def unchanged(problem, before):
    after = problem.world()
    moved = [name for name in before if before[name] != after[name]]
    assert not moved, f"{problem.fault or 'a sound policy'}: {moved} are not as they were"


def train(problem):
    """Compare a gated step with the dense masked loss, without dropout."""
    problem.net.eval()
    problem.net.zero_grad()
    counts = torch.ones(problem.shape, dtype=bool) if problem.mask is None else problem.mask
    seen = []
    spec = {"seed": problem.draw.randrange(1000), "share": 0.5}
    gate = random_gates.make({"kind": "function", "options": spec, "signal": "delight"}, seen)
    given = {"gate": gate, "mask": problem.mask, "unit": problem.unit}
    kondo.backward(problem.log_prob, problem.batch, problem.advantages, **given)
    ((_, _, choice),) = seen
    keep, weight = choice.keep, choice.weight.to(problem.dtype)
    if problem.unit == "sequence":
        keep, weight = keep[:, None] & counts, weight[:, None]
    elif problem.unit == "token":  # the gate saw them in one row
        keep, weight = keep.view(counts.shape), weight.view(counts.shape)
    log_probs = problem.log_prob(problem.batch)
    spread = problem.advantages if problem.length is None else problem.advantages[:, None]
    loss = torch.where(keep, -spread * weight * log_probs, 0.0).sum() / counts.sum()
    assert_gradients(problem.net, loss, 0.3 if problem.dtype == torch.bfloat16 else LIMIT)


def plan(problem):
    """Measure the policy, which must leave as little behind."""
    before = problem.world()
    kondo.plan(problem.method, problem.batch, rates=(0.5,), repeats=1)
    unchanged(problem, before)


def case(draw, counts):
    problem, said = tried(draw)
    assert said is None, said
    counts["sound"] += 1
    if draw.random() < 0.3:
        plan(problem)
    train(problem)


def test_check(campaign):
    campaign.run(case)


FAULTS = ACROSS | BENT | IN_ROWS


def fault_case(draw, counts):
    """Plant every fault once."""
    for fault, (_, pattern) in FAULTS.items():
        problem, said = tried(draw, fault)
        assert said, f"{fault} passed"
        assert re.search(pattern, said), f"{fault}: {said}"
        counts["faults"] += 1
        if fault == "running":
            plan(problem)
        if fault == "logits":
            with pytest.raises(ValueError, match="log_prob"):
                plan(problem)


def test_check_faults(campaign):
    campaign.run(fault_case)
