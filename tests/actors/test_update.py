"""What an update does when a try fails: whose fault it is, and what is left behind."""

import dataclasses
import math

import pytest
import torch

import kondo
from actors.toys import ACTIONS, INPUTS, SAMPLES, Policy, Task, make_message, toy
from kondo.actors.learner import Learner, StepOrder
from kondo.actors.messages import Order
from kondo.actors.setup import Settings
from kondo.actors.update import FACTOR, PATIENCE, GradientScale, all_finite, gradient_norm
from kondo.core import losses
from kondo.lm.budget import BudgetGate


def settings(**options):
    return Settings(**{"gate": "delight:0.25", "checkpoint_every": 1000, **options})


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
        make_message(made, Task(seed), order, spoil="absurd_input" if seed in spoil else None)
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


def test_a_gate_that_cannot_choose_here_ends_the_run_at_its_start(tmp_path):
    with pytest.raises(ValueError, match="needs the prefix costs of its rows"):
        Learner(toy(), settings(gate=BudgetGate(budget=0.1)), tmp_path)


def test_an_error_of_the_gate_is_no_fault_of_a_rollout(tmp_path):
    calls = []

    def choose(values, mask, generator):
        calls.append(len(values))
        if len(calls) > 1:
            raise OSError("the table of the gate is gone")
        return kondo.Choice.of(mask, mask)

    made = Learner(toy(), settings(gate=choose), tmp_path)
    with pytest.raises(OSError, match="the table of the gate is gone"):
        step_of(made, 1, [3, 4])
    assert not made.ledger.quarantined


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
        made = Learner(setup, settings(gate="price:0.05"), tmp_path)
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
        message = make_message(made, Same(rollout), order)
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


WEIGHTS = [torch.zeros(3)]


def parameters(*gradients):
    made = [torch.zeros(len(each)) for each in gradients]
    for weight, gradient in zip(made, gradients, strict=True):
        weight.grad = torch.tensor(gradient)
    return made


def test_the_norm_is_that_of_all_gradients_together():
    assert gradient_norm([*parameters([3.0, 0.0], [4.0]), torch.zeros(2)]) == 5.0
    assert gradient_norm(WEIGHTS) == 0.0


def test_the_norm_does_not_overflow_and_hides_no_nan():
    assert gradient_norm(parameters([3e38, 3e38])) == pytest.approx(3e38 * 2**0.5)
    assert not math.isfinite(gradient_norm(parameters([1.0], [math.inf])))
    assert math.isnan(gradient_norm(parameters([1.0], [math.nan])))


def test_without_a_scale_squares_alone_are_bounded():
    """Adam keeps squares in the dtype of the weights."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        bound = GradientScale(0.0, [torch.zeros(2, dtype=dtype)]).bound
        assert bool(torch.tensor(bound * 0.99, dtype=dtype).square().isfinite())
        assert not bool(torch.tensor(bound * 1.02, dtype=dtype).square().isfinite())
    for floor in (math.nan, math.inf):
        assert GradientScale(floor, WEIGHTS).bound == GradientScale(0.0, WEIGHTS).bound


def test_the_bound_follows_what_is_accepted_and_never_falls_below_the_floor():
    scale = GradientScale(1.0, WEIGHTS)
    scale.accept(1e-9)
    assert scale.bound == FACTOR
    for _ in range(1000):
        scale.accept(50.0)
    assert scale.bound == pytest.approx(50 * FACTOR, rel=1e-3)
    for _ in range(5000):
        scale.accept(0.0)
    assert scale.bound == FACTOR


def test_a_scale_that_has_really_grown_is_not_locked_out_for_good():
    scale, norm, refused = GradientScale(1.0, WEIGHTS), 1e9, 0
    while norm > scale.bound:
        scale.refuse()
        refused += 1
    assert refused == PATIENCE * round(math.log10(norm / FACTOR))
    scale.accept(norm)
    assert scale.bound >= norm
    scale.accept(1.0)


def test_refusals_between_sound_steps_do_not_widen_the_bound():
    scale = GradientScale(1.0, WEIGHTS)
    for _ in range(10 * PATIENCE):
        scale.refuse()
        scale.accept(1.0)
    assert scale.bound == FACTOR


def test_no_number_of_refusals_lets_squares_overflow():
    scale = GradientScale(1.0, WEIGHTS)
    for _ in range(10_000):
        scale.refuse()
    assert scale.bound == GradientScale(0.0, WEIGHTS).bound


def test_its_state_comes_back():
    scale, again = GradientScale(1.0, WEIGHTS), GradientScale(7.0, WEIGHTS)
    scale.accept(30.0)
    scale.refuse()
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict() == {"floor": 1.0, "mean": 30.0, "refusals": 1}


@pytest.mark.parametrize(
    "change", [{"floor": math.nan}, {"mean": -1.0}, {"mean": math.inf}, {"refusals": -1}]
)
def test_a_state_without_sense_is_refused(change):
    scale = GradientScale(1.0, WEIGHTS)
    with pytest.raises(ValueError, match="gradient_scale must have"):
        scale.load_state_dict(scale.state_dict() | change)
    assert scale.state_dict() == {"floor": 1.0, "mean": 0.0, "refusals": 0}


def test_finite_means_every_number():
    assert all_finite([torch.zeros(0), torch.ones(2), torch.tensor([2**40])])
    for value in (math.nan, math.inf, -math.inf):
        assert not all_finite([torch.ones(2), torch.tensor([1.0, value])])
