import functools
import threading

import pytest
import torch
from torch import nn

from kondo.engine.screen import modules_in, no_trace, screen_log_probs
from tolerances import assert_close

GLOBAL_NET = nn.Linear(3, 1)


class Policy(nn.Module):
    """Leaves every trace a training forward can leave: dropout, batch norm, RNG, a counter."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.modes = []
        self.sizes = []

    def log_prob(self, rows):
        self.modes.append((self.training, self.net.training, torch.is_grad_enabled()))
        self.sizes.append(rows.shape[0])
        torch.rand(1)  # a policy that draws by itself
        return -self.net(rows).squeeze(1).square()


@pytest.fixture
def states():
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(0))


def snapshot(policy):
    return {key: value.clone() for key, value in policy.state_dict().items()}


def wrappings(policy):
    class Agent:
        def __init__(self):
            self.parts = {"actor": [policy]}

        def log_prob(self, rows):
            return self.parts["actor"][0].log_prob(rows)

    def inner(rows):
        return policy.log_prob(rows)

    return {
        "method": policy.log_prob,
        "closure": lambda rows: policy.log_prob(rows),
        "nested": lambda rows: inner(rows),
        "partial": functools.partial(lambda model, rows: model.log_prob(rows), policy),
        "agent": Agent().log_prob,
    }


@pytest.mark.parametrize("kind", ["method", "closure", "nested", "partial", "agent"])
def test_screen_leaves_no_trace(states, kind):
    policy = Policy().train()
    policy.net[2].eval()  # a flag that differs from its parent's
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, rng = snapshot(policy), torch.get_rng_state()
    result = screen_log_probs(wrappings(policy)[kind], states)
    assert policy.modes == [(False, False, False)]
    assert policy.training
    assert policy.net.training
    assert not policy.net[2].training
    assert not result.requires_grad
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in policy.parameters())


class Hidden:
    """Holds its module where no scan finds it."""

    __slots__ = ("make",)

    def __init__(self, net):
        self.make = iter([net] * 9).__next__

    def __call__(self, rows):
        return -self.make()(rows).squeeze(1).square()


def test_a_hidden_module_is_found_by_the_hook(states):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    hidden = Hidden(net)
    assert list(modules_in(hidden)) == []
    before = snapshot(net)
    screen_log_probs(hidden, states)
    assert net.training
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    net(states)  # the hook is gone: training statistics move again
    assert not torch.equal(net[1].running_mean, before["1.running_mean"])


def test_a_hidden_module_beside_a_visible_one_is_found_too(states):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    hidden, visible = Hidden(net), nn.Identity()
    before = snapshot(net)
    screen_log_probs(lambda rows: visible(hidden(rows)), states)
    assert net.training
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_the_hook_leaves_other_threads_alone(states):
    """A rollout in another thread must not find its own model in evaluation mode."""
    other, modes = nn.Linear(3, 1), []
    other.register_forward_hook(lambda module, *_: modes.append(module.training))
    rollout = Hidden(other)

    def log_prob(rows):
        thread = threading.Thread(target=rollout, args=(rows,))
        thread.start()
        thread.join()
        return -rows[:, 0].abs()

    screen_log_probs(log_prob, states)
    assert modes == [True]


def test_compiled_code_runs_without_a_global_hook(states):
    """Under a global hook torch.compile warns and compiles again in every step."""
    net = nn.Linear(3, 1)
    hooks = []

    def log_prob(rows):
        hooks.append(len(nn.modules.module._global_forward_pre_hooks))
        return -compiled(rows).squeeze(1).square()

    for compiled in (net, torch.compile(net)):  # noqa: B007
        screen_log_probs(log_prob, states)
    assert hooks == [1, 0]


def test_modules_are_found_inside_inner_functions():
    def uses_inside(rows):
        return [GLOBAL_NET(row) for row in rows]

    assert list(modules_in(uses_inside)) == [GLOBAL_NET]


def test_the_search_for_modules_does_not_walk_a_replay_buffer():
    class Agent:
        def __init__(self):
            self.replay = [object() for _ in range(100_000)]
            self.net = GLOBAL_NET
            self.me = self  # a cycle

        def log_prob(self, rows):
            return self.net(rows)

    looked_at = []

    class Counting(list):
        def __iter__(self):
            for item in list.__iter__(self):
                looked_at.append(item)
                yield item

    agent = Agent()
    agent.replay = Counting(agent.replay)
    assert list(modules_in(agent.log_prob)) == [GLOBAL_NET]
    assert len(looked_at) <= 64


def test_an_unassigned_name_in_a_closure_is_no_error():
    def outer():
        def inner(rows):
            return later(rows)

        found = list(modules_in(inner))
        later = GLOBAL_NET
        return found, list(modules_in(inner)), later

    assert outer()[:2] == ([], [GLOBAL_NET])


def test_modules_in_finds_globals_and_compiled_functions():
    def uses_global(rows):
        return GLOBAL_NET(rows).squeeze(1)

    assert list(modules_in(uses_global)) == [GLOBAL_NET]
    assert list(modules_in(torch.compile(uses_global))) == [GLOBAL_NET]
    assert list(modules_in(GLOBAL_NET)) == [GLOBAL_NET]
    assert list(modules_in(len)) == []


def test_flags_are_restored_after_an_error(states):
    policy = Policy().train()

    def broken(rows):
        policy.log_prob(rows)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        screen_log_probs(broken, states)
    assert policy.training
    assert policy.net[2].training
    assert torch.is_grad_enabled()


def test_chunks_give_the_same_log_probs(states):
    policy = Policy()
    whole = screen_log_probs(policy.log_prob, states)
    policy.sizes.clear()
    parts = screen_log_probs(policy.log_prob, states, chunk=4)
    assert policy.sizes == [4, 4, 2]
    assert_close(parts, whole)


def test_training_mode_keeps_the_graph_and_restores_buffers(states):
    policy = Policy().train()
    before, rng = snapshot(policy), torch.get_rng_state()
    with no_trace(policy.log_prob, states, evaluate=False):
        assert policy.log_prob(states).requires_grad
    assert policy.modes == [(True, True, True)]
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())


def test_known_log_probs_call_nothing(states):
    def never(rows):
        raise AssertionError("called")

    known = torch.zeros(10, requires_grad=True)
    result = screen_log_probs(never, states, screen=known)
    assert not result.requires_grad


def test_a_draft_is_called_instead(states):
    result = screen_log_probs(lambda rows: 1 / 0, states, screen=lambda rows: -rows[:, 0].abs())
    assert_close(result, -states[:, 0].abs())


@pytest.mark.parametrize(
    ("screen", "message"),
    [
        (torch.zeros(10, dtype=torch.int64), "screen must be floating point"),
        (torch.zeros(9), r"screen must have shape \[10\] or \[10, T\].*got \[9\]"),
        (torch.zeros(10, 2, 2), r"screen must have shape \[10\]"),
        ("draft", "screen must be callable on rows, a tensor or None, got str"),
        (lambda rows: None, r"screen\(rows\) must be a floating-point tensor, got NoneType"),
        (lambda rows: rows.sum(), r"screen\(rows\) must have shape \[10\]"),
    ],
)
def test_bad_screens_are_named(states, screen, message):
    with pytest.raises(ValueError, match=message):
        screen_log_probs(lambda rows: -rows[:, 0].abs(), states, screen=screen)


def test_log_prob_must_be_callable(states):
    with pytest.raises(ValueError, match="log_prob must be callable on rows, got Tensor"):
        screen_log_probs(states, states)
