"""Gradients over ranks: what is refused, and how they are put into buckets."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kondo.ranks import gradients
from kondo.ranks.communicator import Ranks
from kondo.ranks.gradients import Gradients
from kondo.ranks.rank_report import RankClock
from ranks.problems import Policy


@pytest.fixture
def alone():
    """A group of one in this process."""
    patience = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    yield Ranks()
    dist.destroy_process_group()


def test_modules_are_found_behind_a_function(alone):
    policy = DistributedDataParallel(Policy("sample"))
    found = Gradients(lambda rows: policy(rows), alone, module=None, all_reduce=None, when="last")
    assert found._averaged == [policy]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": "sometimes"}, 'sync must be "last", "each" or "never"'),
        ({"when": "each"}, "sync must be left at 'last' for plain modules"),
    ],
)
def test_options_without_sense_are_refused(alone, options, message):
    options = {"module": None, "all_reduce": True, "when": "last"} | options
    with pytest.raises(ValueError, match=message):
        Gradients(Policy("sample"), alone, **options)


def test_a_sum_needs_a_module(alone):
    with pytest.raises(ValueError, match="found none in log_prob"):
        Gradients(len, alone, module=None, all_reduce=True, when="last")


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
    clock = RankClock(torch.device("cpu"))
    with clock.stage("select"):
        now[0] += 1.0
        with clock.stage("wait"):
            now[0] += 4.0
        now[0] += 2.0
    with clock.stage("wait"):
        now[0] += 8.0
    spent = {name: seconds for name, seconds in clock.seconds().items() if seconds}
    assert spent == {"select": 3.0, "wait": 12.0}
