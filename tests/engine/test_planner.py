import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kondo
from kondo.engine import planner


def policy():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    return net, lambda rows: -net(rows).squeeze(1).square()


def test_leaves_no_trace():
    net, log_prob = policy()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    rng = torch.get_rng_state()
    kondo.plan(log_prob, torch.randn(40, 4), rates=(0.5, 1.0), repeats=1)
    assert all(p.grad is None for p in net.parameters())
    assert net.training
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    rng_after = torch.get_rng_state()
    torch.set_rng_state(rng)
    torch.randn(40, 4)  # the batch above
    assert torch.equal(torch.get_rng_state(), rng_after)


def test_cost_model(monkeypatch):
    """With F = 1 s, F + B = 3 s and 0.5 s for the kept rows, by hand."""
    seconds = iter([1.0, 3.0, 0.5])
    monkeypatch.setattr(planner, "_median_seconds", lambda *_: next(seconds))
    _, log_prob = policy()
    plan = kondo.plan(log_prob, torch.randn(40, 4), rates=(0.1,))
    assert (plan.forward_seconds, plan.backward_seconds, plan.ratio) == (1.0, 2.0, 2.0)
    assert plan.break_even_rate == pytest.approx(2 / 3)
    (row,) = plan.rates
    assert row.rows == 4
    assert row.exact == pytest.approx(3 / 1.5)
    assert row.free == pytest.approx(6.0)
    assert row.exact_limit == pytest.approx(3 / (1 + 0.1 * 3))
    assert row.free_limit == pytest.approx(10.0)
    assert "an exact screen pays below a rate of 67%" in str(plan)
    assert "exact screen loses" not in str(plan)


def test_says_when_it_does_not_pay(monkeypatch):
    seconds = iter([1.0, 3.0, 2.4])  # 80% of the rows: 1 + 2.4 > 3
    monkeypatch.setattr(planner, "_median_seconds", lambda *_: next(seconds))
    _, log_prob = policy()
    assert "exact screen loses" in str(kondo.plan(log_prob, torch.randn(40, 4), rates=(0.8,)))


def test_micro_batches_cover_every_row():
    sizes = []
    net = nn.Linear(4, 1)

    def log_prob(rows):
        sizes.append((torch.is_grad_enabled(), rows.shape[0]))
        return -net(rows).squeeze(1).square()

    kondo.plan(log_prob, torch.randn(10, 4), rates=(0.3,), micro_batch=4, repeats=1)
    twice = 2  # warm-up and one repeat
    assert sum(n for graph, n in sizes if not graph) == twice * 10
    assert sum(n for graph, n in sizes if graph) == twice * (10 + 3)


def test_works_with_gradient_checkpointing():
    net = nn.Linear(4, 1)

    def log_prob(rows):
        return -checkpoint(net, rows, use_reentrant=False).squeeze(1).square()

    plan = kondo.plan(log_prob, torch.randn(10, 4), rates=(1.0,), repeats=1)
    assert plan.forward_seconds > 0
    assert net.weight.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": (0.0,)}, r"rates must lie in \(0, 1\], got 0.0"),
        ({"micro_batch": -1}, "micro_batch must be at least 1 row, got -1"),
        ({"repeats": 0}, "repeats must be at least 1"),
    ],
)
def test_bad_input_is_named(options, message):
    _, log_prob = policy()
    with pytest.raises(ValueError, match=message):
        kondo.plan(log_prob, torch.randn(4, 4), **options)


def test_detached_log_probs_are_named():
    with pytest.raises(ValueError, match="must be differentiable"):
        kondo.plan(lambda rows: rows[:, 0], torch.randn(4, 4), rates=(1.0,))
