"""Given modules are in evaluation mode during a screen, and as they were afterwards."""

import functools

import pytest
import torch
from torch import nn

import kondo
from kondo.engine.policy import (
    devices_of,
    evaluation,
    given_modules,
    modules_of,
    parts_of,
    policy_of,
)
from tolerances import assert_close

STATES = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
ADVANTAGES = torch.randn(10, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Leaves every trace that a training forward can leave: dropout, batch norm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.net[1].eval()  # a flag that differs from its parent's
        self.seen = []
        """Of every forward: whether it has a graph, and the flags of all parts."""

    def forward(self, states):
        self.seen.append((torch.is_grad_enabled(), flags(self)))
        return -self.net(states).squeeze(1).square()


def flags(module):
    return [part.training for part in module.modules()]


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def unchanged(module, before):
    return all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("wrap", [lambda net: net, torch.jit.script, torch.compile])
def test_flags_of_every_kind_of_module(wrap):
    net = Net().net
    made, before = wrap(net), flags(net)
    kept = flags(made)
    with evaluation([made]):
        assert flags(made)
        assert not any(flags(made))
    assert flags(made) == kept
    assert flags(net) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_flags_are_restored_after_an_error(error):
    net, other = Net(), Net()
    before = flags(net)
    seen = []

    def broken():
        with evaluation([net, net.net[2]]):
            seen.extend([flags(net), flags(other)])
            raise error

    with pytest.raises(error):
        broken()
    assert seen == [[False] * len(before), before]
    assert flags(net) == before


def test_a_part_of_several_modules_is_there_once():
    trunk = nn.Linear(2, 2)
    both = [nn.Sequential(trunk), nn.Sequential(trunk, nn.Tanh())]
    assert parts_of(both) == [both[0], trunk, both[1], both[1][1]]


def test_work_is_where_rows_and_parameters_are():
    meta, cpu = torch.device("meta"), torch.device("cpu")
    assert devices_of([nn.Linear(1, 1, device=meta), nn.Tanh()], [torch.zeros(2)]) == {meta, cpu}
    assert devices_of([], {"names": ["a", "b"]}) == set()


class Own(kondo.Policy):
    def __init__(self, net):
        self.net = net

    def modules(self):
        return [self.net]

    def log_prob(self, rows):
        return self.net(rows)


class Callable:
    """An object that holds a module, and is none."""

    def __init__(self, net):
        self.net = net

    def __call__(self, rows):
        return self.net(rows)


NET = Net()
GIVEN = {
    "module": NET,
    "method": NET.forward,
    "partial of a module": functools.partial(NET),
    "partial of a partial": functools.partial(functools.partial(NET.forward)),
    "policy": Own(NET),
    "method of a policy": Own(NET).log_prob,
    "distribution policy": kondo.DistributionPolicy(NET),
}
PLAIN = {
    "function": lambda rows: NET(rows),
    "partial that binds a module": functools.partial(lambda net, rows: net(rows), NET),
    "object": Callable(NET),
    "its method": Callable(NET).__call__,
    "compiled function": torch.compile(lambda rows: NET(rows)),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_these_modules_are_given(kind):
    assert modules_of(*policy_of(GIVEN[kind])) == [NET]


@pytest.mark.parametrize("kind", PLAIN)
def test_nobody_looks_for_modules_inside_a_function(kind):
    assert given_modules(PLAIN[kind]) == []
    assert modules_of(*policy_of(PLAIN[kind])) == []


def step(policy, **options):
    return kondo.backward(
        policy,
        STATES,
        ADVANTAGES,
        gate=kondo.Gate(rate=0.5),
        options=kondo.Options(**options),
    )


SCREENED = {
    "module": lambda net: (net, None),
    "method": lambda net: (net.forward, None),
    "policy": lambda net: (Own(net), None),
    "named": lambda net: ((lambda rows: net(rows)), net),
    "named in a list": lambda net: ((lambda rows: net(rows)), [net]),
}


@pytest.mark.parametrize("kind", SCREENED)
def test_a_given_module_is_in_evaluation_mode_in_the_screen_of_a_step(kind):
    net = Net()
    before, flagged = state(net), flags(net)
    policy, module = SCREENED[kind](net)
    step(policy, module=module)
    assert net.seen == [(False, [False] * len(flagged)), (True, flagged)]
    assert flags(net) == flagged
    assert unchanged(net, before)


def test_a_plain_function_runs_as_it_is():
    net = Net()
    step(lambda rows: net(rows))
    assert net.seen == [(False, flags(net)), (True, flags(net))]


def test_several_named_modules_are_in_evaluation_mode_and_the_policy_s_own_beside_them():
    torso, head, other = Net(), Net(), Net()

    class Sum(nn.Module):
        def forward(self, rows):
            return torso(rows) + head(rows) + other(rows)

    policy = Sum()
    step(policy, module=[torso, head])
    for net in (torso, head):
        assert net.seen[0] == (False, [False] * len(flags(net)))
        assert net.seen[1] == (True, flags(net))
    assert other.seen[0] == (False, flags(other))
    assert policy.training


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("in_screen", [True, False])
@pytest.mark.parametrize("kind", SCREENED)
def test_a_step_that_fails_restores_modes_and_the_grad_mode(kind, in_screen, error):
    class Fails(Net):
        def forward(self, states):
            found = super().forward(states)
            if torch.is_grad_enabled() is not in_screen:
                raise error("boom")
            return found

    net = Fails()
    before = flags(net)
    policy, module = SCREENED[kind](net)
    with pytest.raises(error, match="boom"):
        step(policy, module=module)
    assert flags(net) == before
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in net.parameters())


def test_no_hook_is_registered_and_no_random_number_is_drawn_in_the_screen():
    hooks, numbers = [], []

    class Seen(Net):
        def forward(self, states):
            hooks.append(len(nn.modules.module._global_forward_pre_hooks))
            numbers.append(torch.get_rng_state())
            return super().forward(states)

    step(Seen())
    assert hooks == [0, 0]
    assert torch.equal(*numbers)


def test_the_draft_of_a_screen_is_in_evaluation_mode_and_the_policy_as_it_was():
    net, draft = Net(), Net()
    kondo.backward(net, STATES, ADVANTAGES, gate=kondo.Gate(rate=0.5), screen=draft)
    assert draft.seen == [(False, [False] * len(flags(draft)))]
    assert net.seen == [(True, flags(net))]


def test_a_named_module_changes_no_gradient():
    nets = [Net().double().eval() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, module in zip(nets, (None, nets[1]), strict=True):
        kondo.backward(
            lambda rows, net=net: net(rows),
            STATES.double(),
            ADVANTAGES,
            gate=kondo.Gate(rate=0.5),
            options=kondo.Options(module=module),
        )
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert_close(one.grad, other.grad)
