"""Gradients over ranks: what is refused, and how they are put into buckets."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kondo
from kondo.ranks import gradients
from kondo.ranks.communicator import Ranks
from kondo.ranks.gradients import Gradients
from kondo.ranks.rank_group import RANK_STAGES
from kondo.stage_clock import StageClock
from ranks.problems import Policy


@pytest.fixture
def alone():
    """A group of one in this process."""
    patience = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    yield Ranks()
    dist.destroy_process_group()


def test_wrapped_modules_are_found_inside_those_that_are_given(alone):
    actor, critic = DistributedDataParallel(Policy("sample")), torch.nn.Linear(3, 1)
    both = torch.nn.ModuleList([actor, critic])
    for roots in ([both], [critic, actor]):
        found = Gradients(roots, alone, all_reduce=None, when="last")
        assert found._averaged == [actor]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": "sometimes"}, 'sync must be "last", "each" or "never"'),
        ({"when": "each"}, "sync must be left at 'last' for plain modules"),
    ],
)
def test_options_without_sense_are_refused(alone, options, message):
    options = {"all_reduce": True, "when": "last"} | options
    with pytest.raises(ValueError, match=message):
        Gradients([Policy("sample")], alone, **options)


@pytest.mark.parametrize("all_reduce", [None, True, False])
def test_a_group_needs_a_module(alone, all_reduce):
    with pytest.raises(ValueError, match="module must be given with a group where the policy is a"):
        Gradients([], alone, all_reduce=all_reduce, when="last")


def test_leaves_that_a_forward_made_are_not_outside(alone):
    """As PEFT's: inputs of layers that require grad, so that checkpoints have a graph."""
    net = torch.nn.Linear(3, 2, dtype=torch.float64)

    def log_prob(rows):
        rows = (2 * rows).requires_grad_()
        return net(rows).log_softmax(-1)[:, 0]

    options = kondo.Options(module=net, all_reduce=True)
    rows = torch.ones(4, 3, dtype=torch.float64)
    kondo.backward(log_prob, rows, torch.tensor([1.0, -1, 2, -2]), group="world", options=options)
    assert net.weight.grad is not None


def test_buckets_hold_one_dtype_each_and_are_not_too_large(monkeypatch):
    monkeypatch.setattr(gradients, "_BUCKET", 10)
    grads = [torch.zeros(n, dtype=d) for n in (4, 25, 3, 7) for d in (torch.float32, torch.float64)]
    buckets = list(gradients._buckets(grads))
    assert sorted(id(g) for bucket in buckets for g in bucket) == sorted(id(g) for g in grads)
    for bucket in buckets:
        assert len({g.dtype for g in bucket}) == 1
        assert len(bucket) == 1 or sum(g.numel() for g in bucket) <= 10
    assert len(buckets) < len(grads)


def test_a_stage_inside_another_is_counted_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StageClock(torch.device("cpu"), RANK_STAGES)
    with clock.stage("select"):
        now[0] += 1.0
        with clock.stage("wait"):
            now[0] += 4.0
        now[0] += 2.0
    with clock.stage("wait"):
        now[0] += 8.0
    spent = {name: seconds for name, seconds in clock.seconds().items() if seconds}
    assert spent == {"select": 3.0, "wait": 12.0}
