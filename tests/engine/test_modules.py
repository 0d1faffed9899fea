"""The search for the modules behind a callable, and the lock that keeps threads apart."""

import collections
import functools
import gc
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from kondo.engine import modules
from kondo.engine.modules import exclusively, modules_in

GLOBAL_NET = nn.Linear(3, 1)
PLACE = types.ModuleType("place")
PLACE.net = GLOBAL_NET


class Slots:
    __slots__ = ("make",)

    def __init__(self, net):
        self.make = iter([net] * 9).__next__

    def __call__(self, rows):
        return self.make()(rows)


class SlotsBeside(Slots):
    """Has slots, and a dictionary too."""


@functools.lru_cache
def cached():
    return GLOBAL_NET


cached()


PLACES = {
    "itself": GLOBAL_NET,
    "slots": Slots(GLOBAL_NET),
    "slots beside a dictionary": SlotsBeside(GLOBAL_NET),
    "attribute of a Python module": lambda rows: PLACE.net(rows),
    "deque": collections.deque([GLOBAL_NET]).popleft,
    "cached function": functools.lru_cache(lambda rows: GLOBAL_NET(rows)),
    "cache": lambda rows: cached()(rows),
    "inner function": lambda rows: [GLOBAL_NET(row) for row in rows],
    "compiled function": torch.compile(lambda rows: GLOBAL_NET(rows)),
    "partial": functools.partial(lambda net, rows: net(rows), GLOBAL_NET),
    "partial by name": functools.partial(lambda net, rows: net(rows), net=GLOBAL_NET),
}


@pytest.mark.parametrize("place", PLACES)
def test_modules_are_found_where_people_put_them(place):
    assert list(modules_in(PLACES[place])) == [GLOBAL_NET]


def test_what_holds_no_module_has_none():
    assert list(modules_in(len)) == []
    assert list(modules_in(torch.zeros(3))) == []
    assert list(modules_in("net")) == []


def test_the_search_does_not_walk_a_replay_buffer():
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


def waits_for(first, second):
    """Whether a call on `second` waits while another thread is in a call on `first`."""
    inside, done, over = threading.Event(), threading.Event(), threading.Event()

    def hold():
        inside.set()
        done.wait(10)

    holder = threading.Thread(target=lambda: exclusively(hold, first))
    waiter = threading.Thread(target=lambda: exclusively(over.set, second))
    holder.start()
    assert inside.wait(10)
    waiter.start()
    waited = not over.wait(0.2)
    done.set()
    holder.join(10)
    waiter.join(10)
    assert over.is_set()
    return waited


def test_threads_wait_for_each_other_on_one_model():
    net = nn.Linear(2, 2)
    assert waits_for(net, lambda rows: net(rows))
    assert not waits_for(net, nn.Linear(2, 2))


@pytest.mark.parametrize("first", ["part", "whole"])
def test_policies_that_share_a_part_share_a_lock(first):
    trunk = nn.Sequential(nn.Linear(2, 2))
    whole = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(2, 2)})
    other = nn.Linear(2, 2)
    pair = (lambda rows: other(trunk(rows)), whole)
    pair = pair if first == "part" else pair[::-1]
    assert waits_for(*pair)
    assert waits_for(*pair[::-1])


def test_a_thread_does_not_wait_for_itself():
    net = nn.Linear(2, 2)
    assert exclusively(lambda: exclusively(lambda: 3, net), net) == 3


def test_an_error_releases_the_lock():
    net = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError):
        exclusively(lambda: 1 / 0, net)
    assert not waits_for(nn.Linear(1, 1), net)


def test_locks_go_with_their_modules():
    net = nn.Linear(2, 2)
    exclusively(lambda: None, net)
    gone = weakref.ref(net)
    assert net in modules._LOCKS
    del net
    gc.collect()
    assert gone() is None
