"""Ctrl-C in the middle of a step: what a `finally` puts back is back, and the next step is right.

The interrupt comes inside one of torch's operations, drawn at random: in the screen, the gate, the
forward, the loss or the backward. A step that was interrupted may have added to `.grad`; with a
group the `.grad` of plain modules is as before it. Modes of modules that were given, the grad mode
and DDP's `no_sync` are as they were.
"""

import datetime
import functools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import kondo
from lm import tiny
from tolerances import assert_close

ROWS = 24
STEPS = 6
"""That are interrupted, of each policy."""


class Interrupt(TorchDispatchMode):
    """Raises KeyboardInterrupt in the n-th operation; counts them."""

    def __init__(self, number=0):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


class Net(nn.Sequential):
    def log_prob(self, rows):
        return self(rows[0]).log_softmax(-1).gather(1, rows[1][:, None]).squeeze(1)


def network():
    made = Net(
        nn.Linear(6, 16), nn.BatchNorm1d(16).eval(), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4)
    )
    made[2].p = 0.0  # a step must be repeatable
    return made, (torch.randn(ROWS, 6), torch.randint(4, (ROWS,)))


def method(draw):
    net, batch = network()
    screen = draw.choice([None, net.log_prob, net.log_prob(batch).detach()])
    return net, net.log_prob, batch, {"screen": screen}, {}


def function(draw):
    net, batch = network()
    return net, lambda rows: net.log_prob(rows), batch, {}, {"module": net}


def language_model(draw):
    lm = tiny.policy()
    rows = tiny.token_rows(torch.Generator().manual_seed(0), ROWS)
    return lm.module, lm, rows, {"unit": draw.choice(["token", "sequence"])}, {}


def summed(draw):
    """A plain module with a group: what the step adds to `.grad` is summed."""
    net, batch = network()
    return net, net.log_prob, batch, {"group": "world"}, {"all_reduce": draw.random() < 0.5}


def averaged(draw):
    """A module in DDP."""
    net, batch = network()
    wrapped = DistributedDataParallel(net)

    def log_prob(rows):
        return wrapped(rows[0]).log_softmax(-1).gather(1, rows[1][:, None]).squeeze(1)

    return wrapped, log_prob, batch, {"group": "world"}, {"module": wrapped}


KINDS = {
    "method": method,
    "function": function,
    "language model": language_model,
    "summed": summed,
    "averaged": averaged,
}


def built(seed, kind):
    """A module, and a step of a policy on it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net, policy, batch, given, options = KINDS[kind](draw)
    gate = draw.choice(
        [
            kondo.Gate(rate=0.3),
            kondo.Gate(price=0.0),
            kondo.VarianceGate(rate=0.3),
            kondo.UnbiasedGate(rate=0.4),
            None,
        ]
    )
    if gate is None:
        given.pop("screen", None)
    advantages = torch.randn(ROWS)
    micro_batch = draw.choice([None, 5])

    def step():
        chance = torch.Generator().manual_seed(3)
        kondo.backward(
            policy,
            batch,
            advantages,
            gate=gate,
            micro_batch=micro_batch,
            options=kondo.Options(generator=chance, **options),
            **given,
        )

    return net, step


@functools.cache
def known(seed, kind):
    """The same, what the step adds to `.grad`, and how many operations it takes."""
    net, step = built(seed, kind)
    step()
    net.zero_grad()
    with Interrupt() as counter:
        step()
    gradient = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    return net, step, gradient, counter.count


def state(net):
    """All that a step may not change."""
    return (
        [part.training for part in net.modules()],
        getattr(net, "require_backward_grad_sync", None),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        len(nn.modules.module._global_forward_pre_hooks),
        [bytes(value.numpy().tobytes()) for value in net.state_dict().values()],
        [len(p._backward_hooks or ()) for p in net.parameters()],
    )


def grads(net):
    return [None if p.grad is None else p.grad.tolist() for p in net.parameters()]


def interrupted(step, number):
    """Run a step, interrupt its n-th operation, and say whether it was."""
    with Interrupt(number):
        try:
            step()
        except KeyboardInterrupt:
            return True
    return False


def case(draw, counts):
    for kind in KINDS:
        attack(draw, counts, kind)


def attack(draw, counts, kind):
    """Interrupt a few steps of one policy, and then make a whole one."""
    seed = draw.randrange(12)
    net, step, gradient, operations = known(seed, kind)
    for _ in range(STEPS):
        if kind == "averaged":  # an interrupted backward leaves DDP in the middle of its work
            net, step = built(seed, kind)
        for part in net.modules():
            part.training = draw.random() < 0.8 and not isinstance(part, nn.BatchNorm1d)
        if kind == "summed":
            for parameter in net.parameters():
                parameter.grad = draw.choice([None, torch.ones_like(parameter)])
        before, held = state(net), grads(net)
        stopped = interrupted(step, draw.randint(1, operations))
        counts["interrupts"] += stopped
        assert state(net) == before
        if kind == "summed" and stopped:
            assert grads(net) == held
    if kind == "averaged":
        net, step = built(seed, kind)
    net.zero_grad()
    step()
    counts["steps"] += STEPS + 1
    for parameter, expected in zip(net.parameters(), gradient, strict=True):
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            assert_close(parameter.grad, expected)
    net.zero_grad()


@pytest.fixture
def group():
    """A group of one in this process."""
    patience = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_interrupts(campaign):
    known.cache_clear()
    campaign.run(case)
    assert campaign.counts["interrupts"], "no step was interrupted"
