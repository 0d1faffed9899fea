"""Ctrl-C at a random moment of a step: the model is as it was, and the next step is right.

The signal comes from a timer, so that it arrives between any two instructions. A step that was
interrupted may have added to `.grad`; nothing else may have changed.
"""

import contextlib
import functools
import random
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

import kondo
from kondo.engine.modules import exclusively
from lm import tiny
from tolerances import assert_close

# pytest-timeout waits for the same signal, unless it uses a thread.
pytestmark = pytest.mark.timeout(method="thread")

ROWS = 24


def plain(draw):
    net = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16).eval(), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4)
    )
    batch = (torch.randn(ROWS, 6), torch.randint(4, (ROWS,)))

    def log_prob(rows):
        return net(rows[0]).log_softmax(-1).gather(1, rows[1][:, None]).squeeze(1)

    net[2].p = 0.0  # a step must be repeatable
    screen = draw.choice([None, log_prob, log_prob(batch).detach()])
    return net, log_prob, batch, {"screen": screen}


def language_model(draw):
    lm = tiny.policy()
    rows = tiny.token_rows(torch.Generator().manual_seed(0), ROWS)
    return lm.module, lm, rows, {"unit": draw.choice(["token", "sequence"])}


@functools.cache
def built(seed, kind):
    """A policy, a step on it, what the step adds to `.grad`, and how long it takes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net, policy, batch, options = {"plain": plain, "lm": language_model}[kind](draw)
    gate = draw.choice(
        [
            kondo.Gate(rate=0.3),
            kondo.Gate(price=0.0),
            kondo.VarianceGate(rate=0.3),
            kondo.UnbiasedGate(rate=0.4),
            None,
        ]
    )
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
            options=kondo.Options(generator=chance),
            **(options if gate is not None else {}),
        )

    step()
    net.zero_grad()
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    gradient = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    return net, step, gradient, seconds


def state(net):
    """All that a step may not change."""
    return (
        [part.training for part in net.modules()],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        len(nn.modules.module._global_forward_pre_hooks),
        [bytes(value.numpy().tobytes()) for value in net.state_dict().values()],
        [len(p._backward_hooks or ()) for p in net.parameters()],
    )


@contextlib.contextmanager
def alarms():
    """Have SIGALRM raise KeyboardInterrupt, as Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(step, delay):
    """Run a step, interrupt it after `delay` seconds, and say whether it was."""
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        step()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def others_can_step(net):
    """Whether another thread gets the lock of the model."""
    free = threading.Event()
    thread = threading.Thread(target=lambda: exclusively(free.set, net), daemon=True)
    thread.start()
    return free.wait(10)


def case(draw, counts):
    # Coverage's tracer takes a lock, which an interrupt would leave taken.
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        untraced_case(draw, counts)
    finally:
        sys.settrace(tracer)


def untraced_case(draw, counts):
    kind = draw.choice(["plain", "plain", "lm"])
    net, step, gradient, seconds = built(draw.randrange(12), kind)
    for part in net.modules():
        part.training = draw.random() < 0.8 and not isinstance(part, nn.BatchNorm1d)
    before = state(net)
    with alarms():
        for _ in range(20):
            stopped = interrupted(step, draw.uniform(1e-5, 1.2 * seconds))
            counts["interrupts"] += stopped
            assert state(net) == before
    assert others_can_step(net)
    net.zero_grad()
    step()
    counts["steps"] += 21
    for parameter, expected in zip(net.parameters(), gradient, strict=True):
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            assert_close(parameter.grad, expected)
    net.zero_grad()


def test_interrupts(campaign):
    campaign.run(case)
    assert campaign.counts["interrupts"], "no step was interrupted"
