"""What an update does when a try fails: whose fault it is, and what is left behind."""

import dataclasses

import pytest
import torch

from actors.toys import ACTIONS, INPUTS, SAMPLES, Policy, Task, make_message, toy
from kondo.actors.learner import Learner, StepOrder
from kondo.actors.messages import Order
from kondo.actors.setup import Settings
from kondo.core import losses


def settings(**options):
    return Settings(**{"rate": 0.25, "checkpoint_every": 1000, **options})


class Loss:
    """A loss that can be broken."""

    def __init__(self):
        self.fails = lambda log_probs: None

    def __call__(self, log_probs, advantages):
        if (error := self.fails(log_probs)) is not None:
            raise error
        return losses.pg(log_probs, advantages)


def step_of(made, number, seeds, spoil=(), without=()):
    """Give the learner a rollout of each task, but of those without; return its report."""
    first = made.ledger.issued
    orders = tuple(
        Order(first + index, index, 1, made.step_number, made.price) for index in range(len(seeds))
    )
    messages = [
        make_message(
            made, Task(seed), settings(), order, spoil="absurd_input" if seed in spoil else None
        )
        for seed, order in zip(seeds, orders, strict=True)
    ]
    sent = [
        (order, message)
        for seed, order, message in zip(seeds, orders, messages, strict=True)
        if seed not in without
    ]
    given = tuple(order for order, _ in sent)
    issued = first + len(seeds)
    return made.step(StepOrder(number, given, (), issued, 1), [message for _, message in sent])


def broken_learner(tmp_path):
    loss = Loss()
    made = Learner(toy(), settings(loss=loss), tmp_path)
    step_of(made, 1, [1, 2])
    return made, loss


@pytest.mark.parametrize(
    "error", [ValueError("ours"), MemoryError(), torch.OutOfMemoryError(), KeyboardInterrupt()]
)
@pytest.mark.parametrize("seeds", [[3], [3, 4]], ids=["one rollout", "two rollouts"])
def test_an_error_of_the_learner_itself_is_raised(tmp_path, error, seeds):
    made, loss = broken_learner(tmp_path)
    before, state = made.policy.weight.detach().clone(), torch.get_rng_state()
    loss.fails = lambda _: error
    with pytest.raises(type(error)):
        step_of(made, 2, seeds)
    assert torch.equal(made.policy.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not made.ledger.quarantined
    loss.fails = lambda _: None
    assert made.step_number == 1


def test_an_error_that_no_rollout_alone_reproduces_is_raised(tmp_path):
    made, loss = broken_learner(tmp_path)
    rows = []
    loss.fails = lambda log_probs: (
        rows.append(len(log_probs))
        or (ValueError("too many rows") if len(log_probs) > 20 else None)
    )
    with pytest.raises(ValueError, match="too many rows"):
        step_of(made, 2, [3, 4, 5])
    assert len(rows) == 4, "together, then each alone"
    assert not made.ledger.quarantined


def fails_on(made, seed, error):
    """Raise for the rows of one task's rollout alone."""
    wanted = {round(float(each), 6) for each in Task(seed).rollout(made.policy).log_probs}

    def fails(log_probs):
        found = any(round(float(each), 6) in wanted for each in log_probs.detach())
        return error() if found else None

    return fails


@pytest.mark.parametrize(
    "error", [MemoryError, torch.OutOfMemoryError, lambda: torch.empty(10**15), KeyboardInterrupt]
)
def test_short_memory_and_interrupts_are_no_fault_of_a_rollout(tmp_path, error):
    """For memory of the CPU torch raises a plain RuntimeError."""
    made, loss = broken_learner(tmp_path)
    loss.fails = fails_on(made, 4, error)
    with pytest.raises(BaseException, match=r"can't allocate memory|^$"):
        step_of(made, 2, [3, 4, 5])
    assert not made.ledger.quarantined


def test_only_the_rollout_that_makes_the_step_raise_is_refused(tmp_path):
    made, loss = broken_learner(tmp_path)
    loss.fails = fails_on(made, 4, lambda: IndexError("two\nlines"))
    before = made.policy.weight.detach().clone()
    report = step_of(made, 2, [3, 4, 5])
    detail = "expected a step without errors, got IndexError: two"
    assert report.quarantined == ((1, "error", detail),)
    assert made.ledger.quarantined == {"error": SAMPLES}
    assert made.ledger.quarantined_by_actor == {1: SAMPLES}
    assert report.trained > 0
    assert not torch.equal(made.policy.weight, before)


class Counting(Policy):
    """Counts the rows it has seen, as a running mean of inputs would."""

    def __init__(self, seed):
        super().__init__(seed)
        self.register_buffer("seen", torch.zeros(()))

    def log_prob(self, rows):
        self.seen += rows["inputs"].abs().sum()
        return super().log_prob(rows)


def test_a_refused_rollout_leaves_no_trace_in_the_policys_buffers(tmp_path):
    ends = []
    setup = dataclasses.replace(toy(), make_policy=Counting)
    for without in ((4,), ()):
        made = Learner(setup, settings(rate=None, price=0.05), tmp_path)
        step_of(made, 1, [3, 4], spoil=(4,), without=without)
        assert made.ledger.quarantined.total() == (0 if without else SAMPLES)
        ends.append(made.policy.state_dict())
    assert float(ends[0]["seen"]) > 0
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_weights_that_a_step_makes_infinite_end_the_run(tmp_path, monkeypatch):
    """The gradient was within its bound: it is no rollout's fault."""
    made, _ = broken_learner(tmp_path)

    def ruin():
        with torch.no_grad():
            made.policy.weight[0] = torch.inf

    monkeypatch.setattr(made._updater.optimiser, "step", ruin)
    with pytest.raises(RuntimeError, match=r"weights must be finite .* a smaller learning_rate"):
        step_of(made, 2, [3])
    assert made.ledger.counts()["in_flight"] == SAMPLES


def test_nothing_honest_is_refused_when_a_first_success_comes_late(tmp_path):
    """Advantages of rounding size for long, then real ones: their gradients are 1e7 as large."""
    made, task = Learner(toy(), settings(at_source=False), tmp_path), Task(3)
    for number in range(1, 80):
        order = Order(number - 1, 0, 1, number - 1, made.price)
        rollout = task.rollout(made.policy)
        if number < 70:
            rollout = rollout._replace(advantages=rollout.advantages * 1e-7)
        message = make_message(made, Same(rollout), settings(at_source=False), order)
        report = made.step(StepOrder(number, (order,), (), number, 1), [message])
        assert not report.quarantined
        assert number < 10 or report.trained > 0


class Same:
    """Makes the same rollout again and again."""

    unit = "sample"

    def __init__(self, rollout):
        self._rollout = rollout

    def rollout(self, policy):
        return self._rollout


def test_the_own_rows_do_not_change_what_is_drawn(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made = Learner(toy(), settings(), tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert made.policy.weight.shape == (ACTIONS, INPUTS)
    assert made.policy.weight.grad is None
