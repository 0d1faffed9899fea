import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kondo
from kondo.engine import planner
from kondo.engine.select import choose, units_of


class Net(nn.Sequential):
    """Its log-probs are a method, so that its modules are known."""

    def log_prob(self, rows):
        return -self(rows).squeeze(1).square()


def policy():
    net = Net(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    return net, net.log_prob


def test_a_given_module_is_in_evaluation_mode_in_a_forward_without_a_graph():
    modes = set()

    class Seen(Net):
        def log_prob(self, rows):
            modes.add((torch.is_grad_enabled(), self.training, self[0].training))
            return super().log_prob(rows)

    net, batch = Seen(nn.Dropout(0.1), nn.Linear(4, 1)), torch.randn(10, 4)
    kondo.plan(net.log_prob, batch, rates=(0.5,), repeats=1)
    assert modes == {(False, False, False), (True, True, True)}
    modes.clear()
    kondo.plan(lambda rows: net.log_prob(rows), batch, rates=(0.5,), repeats=1)
    assert modes == {(False, True, True), (True, True, True)}  # a plain function runs as it is


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("graph", [True, False])
def test_a_forward_that_fails_leaves_no_trace(graph, error):
    class Fails(Net):
        def log_prob(self, rows):
            found = super().log_prob(rows)
            if torch.is_grad_enabled() is graph:
                raise error
            return found

    net = Fails(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    net[2].eval()
    before, flags = {k: v.clone() for k, v in net.state_dict().items()}, modes_of(net)
    batch, random_numbers = torch.randn(40, 4), torch.get_rng_state()
    with pytest.raises(error):
        kondo.plan(net.log_prob, batch, rates=(0.5,), repeats=1)
    assert modes_of(net) == flags
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert torch.is_grad_enabled()


def modes_of(net):
    return [part.training for part in net.modules()]


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


class Normaliser(nn.Module):
    """Moves its statistics in every forward, also in evaluation mode."""

    def __init__(self, *, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, rows):
        moved = 0.9 * self.mean + 0.1 * rows.mean(0)
        if self.in_place:
            self.mean.copy_(moved)
        else:
            self.mean = moved
        return rows - self.mean


@pytest.mark.parametrize("advantages", [None, torch.ones(40)])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_normaliser_that_updates_in_every_forward_is_put_back(in_place, advantages):
    normaliser = Normaliser(in_place=in_place)
    net, mean = Net(normaliser, nn.Linear(4, 1)), normaliser.mean
    kondo.plan(
        net.log_prob,
        torch.randn(40, 4),
        advantages=advantages,
        rates=(0.5,),
        repeats=1,
    )
    assert normaliser.mean is mean
    assert torch.equal(mean, torch.zeros(4))


def test_cost_model(monkeypatch):
    """With F = 1 s, F + B = 3 s and 0.5 s for the kept rows, by hand."""
    monkeypatch.setattr(planner, "_in_turns", lambda *_: [1.0, 3.0, 0.5])
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
    seconds = [1.0, 3.0, 2.4]  # 80% of the rows: 1 + 2.4 > 3
    monkeypatch.setattr(planner, "_in_turns", lambda *_: seconds)
    _, log_prob = policy()
    assert "exact screen loses" in str(kondo.plan(log_prob, torch.randn(40, 4), rates=(0.8,)))


def test_every_round_times_everything_once():
    """A busy second then meets dense and kept rows alike."""
    calls, busy = [], iter([9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 50.0, 60.0, 70.0, 1.5, 2.5, 3.5])

    def timed(name):
        calls.append(name)
        return next(busy)

    jobs = [partial(timed, name) for name in ("forward", "dense", "kept")]
    assert planner._in_turns(jobs, 3) == [1.5, 2.5, 3.5]  # the first round is a warm-up
    assert calls == ["forward", "dense", "kept"] * 4


def planned_rows(monkeypatch, seconds, rates):
    monkeypatch.setattr(planner, "_in_turns", lambda *_: seconds)
    return kondo.plan(lambda rows: -torch.ones(len(rows)), torch.zeros(40, 4), rates=rates)


@pytest.mark.parametrize(
    ("kept", "reliable"),
    [
        ([0.5, 3.0], [True, True]),
        ([0.29, 2.9], [True, True]),  # within a tenth of its limit: rounding of clocks
        ([0.5, 1.55], [True, False]),  # all rows 1.94 times sooner than all rows
        ([0.2, 3.1], [False, True]),  # a tenth of the rows costs at least a tenth
    ],
)
def test_a_row_that_beats_its_limit_is_said_to_be_unreliable(monkeypatch, kept, reliable):
    plan = planned_rows(monkeypatch, [1.0, 3.0, *kept], (0.1, 1.0))
    assert [row.reliable for row in plan.rates] == reliable
    lines = str(plan).splitlines()
    assert ["timing unreliable" not in line for line in lines[2:4]] == reliable
    assert plan.reliable == all(reliable)
    assert ("measure again on an idle machine" in str(plan)) == (not all(reliable))


def test_a_backward_that_costs_nothing_is_unreliable(monkeypatch):
    plan = planned_rows(monkeypatch, [3.1, 3.0, 3.0], (1.0,))
    assert not plan.reliable
    assert "measure again on an idle machine" in str(plan)


def test_micro_batches_cover_every_row():
    sizes = []
    net = nn.Linear(4, 1)

    def log_prob(rows):
        sizes.append((torch.is_grad_enabled(), rows.shape[0]))
        return -net(rows).squeeze(1).square()

    kondo.plan(log_prob, torch.randn(10, 4), rates=(0.3,), micro_batch=4, repeats=1)
    twice = 2  # warm-up and one repeat
    checked, sizes = sizes[:3], sizes[3:]
    assert checked == [(False, 4), (False, 4), (False, 2)]
    assert sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :]  # in turns
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
        kondo.plan(lambda rows: -rows[:, 0].abs(), torch.randn(4, 4), rates=(1.0,))


@pytest.mark.parametrize("advantages", [None, torch.randn(8)])
def test_logits_are_refused_as_by_a_step(advantages):
    net = nn.Linear(4, 3)

    def logits(rows):
        return 5 + net(rows[0]).gather(1, rows[1][:, None]).squeeze(1)

    batch = torch.randn(8, 4), torch.randint(3, (8,))
    with pytest.raises(ValueError, match="log_probs must not exceed 0") as of_a_step:
        kondo.backward(logits, batch, torch.ones(8), gate=kondo.UnbiasedGate(rate=0.5))
    with pytest.raises(ValueError, match="log_probs must not exceed 0") as of_a_plan:
        kondo.plan(logits, batch, advantages=advantages, rates=(1.0,), repeats=1)
    assert str(of_a_plan.value) == str(of_a_step.value)


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (torch.tensor([1.0, math.nan]), "advantages must not hold NaN or infinity in .* unit 1"),
        (torch.ones(3), "advantages"),
        ([1.0, -1.0], "advantages"),
    ],
)
def test_advantages_are_refused_as_by_a_step(advantages, message):
    net = nn.Linear(4, 1)
    with pytest.raises(ValueError, match=message):
        kondo.plan(lambda r: -net(r).squeeze(1).square(), torch.randn(2, 4), advantages=advantages)


# A gate for a batch.


def planned(monkeypatch, seconds, advantages, **options):
    """Plan with measured seconds that are given: forward, dense, and those of each rate."""
    monkeypatch.setattr(planner, "_in_turns", lambda *_: seconds)
    batch = torch.zeros(len(advantages), 4)
    return kondo.plan(
        lambda rows: -torch.ones(len(rows)),
        batch,
        advantages=advantages,
        rates=(0.1, 1.0),
        **options,
    )


def few_advantages():
    """Eight of forty rows have one."""
    advantages = torch.zeros(40)
    advantages[::5] = 1.0
    return advantages


def test_recommends_a_noise_budget(monkeypatch):
    plan = planned(monkeypatch, [1.0, 3.0, 0.5, 3.0, 0.6], few_advantages())
    assert repr(plan.gate) == "UnbiasedGate(noise=1.5)"
    # Of eight rows alike 8 / 1.5 are enough: 6 of 40. Four of them are twice as noisy as all.
    assert "recommended: gate=kondo.UnbiasedGate(noise=1.5): it keeps 15% of" in str(plan)
    assert [row.noise for row in plan.rates] == [pytest.approx(2.0), pytest.approx(1.0)]


class Third(kondo.BaseGate):
    """Keeps every third unit, and remembers how often it chose."""

    calls = 0

    def choose(self, values, mask, generator=None):
        self.calls += 1
        return kondo.Choice.of(mask & (torch.arange(len(values)) % 3 == 0), mask)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_plans_for_the_gate_that_is_given(monkeypatch):
    gate, advantages = kondo.Gate(rate=0.05), torch.ones(40)
    plan = planned(monkeypatch, [1.0, 3.0, 0.5, 3.0, 0.25], advantages, gate=gate)
    assert plan.gate is gate
    assert "recommended: gate=Gate(rate=0.05): it keeps 5% of this batch. Learner" in plan.advice
    # The rows that it keeps were measured: 3 / (1 + 0.25) and 3 / 0.25.
    assert "2.4x with an exact screen, 12.0x with a free one" in plan.advice
    slower = planned(monkeypatch, [1.0, 3.0, 0.5, 3.0, 3.5], advantages, gate=gate)
    assert slower.gate is None
    assert "Gate(rate=0.05) would be slower" in slower.advice


def test_plans_for_a_gate_of_ones_own_and_puts_it_back(monkeypatch):
    gate = Third()
    plan = planned(monkeypatch, [1.0, 3.0, 0.5, 3.0, 1.0], torch.ones(40), gate=gate)
    assert plan.gate is gate
    assert "it keeps 35% of this batch" in plan.advice  # 14 of 40
    assert gate.calls == 0


def test_a_gate_without_advantages_is_refused():
    _, log_prob = policy()
    with pytest.raises(ValueError, match="advantages must be given with a gate"):
        kondo.plan(log_prob, torch.randn(4, 4), gate=kondo.Gate(rate=0.1))


@pytest.mark.parametrize("gate", [None, kondo.Gate(rate=0.2)])
def test_the_rows_that_a_gate_keeps_are_measured(gate):
    seen = set()
    net = Net(nn.Linear(4, 1))

    def log_prob(rows):
        if torch.is_grad_enabled():
            seen.add(tuple(rows[:, 0].tolist()))
        return net.log_prob(rows)

    batch = torch.arange(40.0).unsqueeze(1).repeat(1, 4)
    advantages = torch.zeros(40)
    advantages[:8] = 1.0
    kondo.plan(log_prob, batch, advantages=advantages, gate=gate, rates=(1.0,), repeats=1)
    of_all, of_gate = sorted(seen, key=len, reverse=True)
    assert of_all == tuple(range(40))
    assert set(of_gate) <= set(range(8))  # which have an advantage
    assert len(of_gate) == 8 or gate is None


def test_recommends_dense_where_skipping_loses(monkeypatch):
    plan = planned(monkeypatch, [1.0, 3.0, 0.5, 3.0, 3.5], few_advantages())
    assert plan.gate is None
    assert "recommended: dense" in plan.advice
    assert "would be slower" in plan.advice


def test_an_exact_screen_that_loses_is_said(monkeypatch):
    plan = planned(monkeypatch, [1.0, 3.0, 0.5, 3.0, 2.5], few_advantages())
    assert "an exact screen would be slower than dense" in plan.advice


def test_a_batch_without_advantages_has_no_gate(monkeypatch):
    plan = planned(monkeypatch, [1.0, 3.0, 0.5, 3.0], torch.zeros(40))
    assert plan.gate is None
    assert "No row of this batch has an advantage" in plan.advice


def test_without_advantages_nothing_is_recommended():
    _, log_prob = policy()
    plan = kondo.plan(log_prob, torch.randn(10, 4), rates=(0.5,), repeats=1)
    assert (plan.gate, plan.advice, plan.rates[0].noise) == (None, "", None)


def test_what_a_gpu_does_not_read_at_once_is_refused(monkeypatch):
    def unread(log_probs, advantages, *, gate, unit, mask, generator, density):
        units = units_of(gate, log_probs, advantages, unit, mask, density=density)
        return choose(units, gate, generator, reads=False)

    monkeypatch.setattr(planner, "select", unread)
    net, batch = nn.Linear(4, 1), torch.randn(10, 4)
    advantages = torch.ones(10).index_fill(0, torch.tensor([3]), math.nan)
    with pytest.raises(ValueError, match="advantages must not hold NaN"):
        kondo.plan(lambda rows: -net(rows).square().squeeze(1), batch, advantages=advantages)
