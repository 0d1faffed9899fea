"""Nothing is left behind by a run without trace: flags, buffers, grad mode, hooks."""

import threading

import pytest
import torch
from torch import nn

import kondo
from kondo.engine.untraced import with_grad_mode_kept, without_trace
from tolerances import assert_close


class Net(nn.Module):
    """Leaves every trace that a training forward can leave: dropout, batch norm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.net[1].eval()  # a flag that differs from its parent's

    def forward(self, states):
        return -self.net(states).squeeze(1).square()


def flags(module):
    return [part.training for part in module.modules()]


STATES = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("wrap", [lambda net: net, torch.jit.script, torch.compile])
def test_flags_of_every_kind_of_module(wrap):
    net = Net().net
    made, before, seen = wrap(net), flags(net), []
    kept = flags(made)
    without_trace(lambda: seen.extend(flags(made)), made)
    assert seen
    assert not any(seen)
    assert flags(made) == kept
    assert flags(net) == before


def test_a_graph_and_training_mode_leave_buffers_as_they_were():
    net = Net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    seen = without_trace(lambda: (net(STATES).requires_grad, *flags(net)), net, evaluate=False)
    assert all(seen)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_an_error_restores_everything(evaluate, outside):
    net = Net()
    before = flags(net)

    def broken():
        assert torch.is_grad_enabled() is not evaluate
        raise KeyboardInterrupt

    with torch.set_grad_enabled(outside):
        with pytest.raises(KeyboardInterrupt):
            without_trace(broken, net, evaluate=evaluate)
        assert torch.is_grad_enabled() is outside
    assert flags(net) == before


class Stubborn(nn.Module):
    """Keeps its flag in Python code, where an interrupt can come."""

    @property
    def training(self):
        return True

    @training.setter
    def training(self, value):
        if value and hasattr(self, "ready"):
            raise KeyboardInterrupt


def test_an_interrupt_in_the_flag_of_one_module_spares_the_others():
    odd, net = Stubborn(), Net()
    odd.ready = True
    both, before = nn.ModuleList([odd, net]), flags(net)
    with torch.enable_grad(), pytest.raises(KeyboardInterrupt):
        without_trace(lambda: None, both)
    assert flags(net) == before
    assert torch.is_grad_enabled()


def test_no_hook_is_registered():
    net, seen = Net(), []

    def log_prob(rows):
        seen.append(len(nn.modules.module._global_forward_pre_hooks))
        return net(rows)

    kondo.backward(log_prob, STATES, torch.randn(10), gate=kondo.Gate(rate=0.5))
    assert seen == [0, 0]


def test_unrelated_modules_are_left_alone():
    net, other = Net(), Net()
    before = flags(other)
    assert without_trace(lambda: flags(other), net) == before


def test_the_grad_mode_survives_an_interrupted_no_grad():
    def interrupted():
        torch.no_grad().__enter__()  # and nobody leaves it
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_grad_mode_kept(interrupted)
    assert torch.is_grad_enabled()


def test_random_numbers_of_other_threads_are_not_rewound():
    """What another thread draws during a screen is not drawn again after it."""
    net, drawn = Net(), []

    def log_prob(rows):
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(1).item()))
        thread.start()
        thread.join()
        return net(rows)

    kondo.backward(log_prob, STATES, torch.randn(10), gate=kondo.Gate(rate=0.5))
    drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == len(drawn) == 3


def test_three_threads_on_one_model():
    """Flags, gradients: as if the steps had come one after another."""
    torch.manual_seed(0)
    net = Net().double()
    net.net[2].p = 0.0  # so that order does not matter
    states, advantages = STATES.double(), torch.randn(10, dtype=torch.float64)
    before, steps, errors = flags(net), 40, []

    def step():
        kondo.backward(net, states, advantages, gate=kondo.Gate(rate=0.5), micro_batch=2)

    step()
    once = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()

    def work():
        try:
            for _ in range(steps):
                step()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert flags(net) == before
    for parameter, expected in zip(net.parameters(), once, strict=True):
        assert_close(parameter.grad, 3 * steps * expected, torch.float32)
