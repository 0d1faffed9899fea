"""Random steps against the dense loss: all rows forward, all backward, masked. Plain torch.

The oracle knows nothing of screens, compaction, micro-batches or chunks. What was kept is read from
the gate, and held to the oracle of its kind.
"""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import kondo
from attack import random_gates
from attack.random_batches import contents, draw_batch, numbers
from tolerances import assert_close

# Log-probs, values and gradients in float64: no unit changes sides by rounding.
DTYPE = torch.float64
ACTIONS = 5
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Problem:
    """A policy, a batch, and everything that the step and the oracle are given."""

    def __init__(self, draw):
        self.draw = draw
        self.seed = torch.Generator().manual_seed(draw.randrange(2**31))
        self.device = torch.device(draw.choice(DEVICES))
        self.size = draw.choice([1, 2, 3, 5, 9, 24, 50])
        self.length = draw.choice([None, None, 1, 2, 6])
        self.unit = "sample" if self.length is None else draw.choice(["token", "sequence"])
        self.shape = (self.size,) if self.length is None else (self.size, self.length)
        self._make_policy()
        self.advantages = self._advantages()
        self.mask = self._mask()
        self.counts = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        if self.mask is not None:
            mask = self.mask
            if mask.ndim < len(self.shape):
                mask = mask[:, None]
            self.counts = mask.expand(self.shape)

    def random(self, *shape):
        return torch.randn(shape, generator=self.seed, dtype=DTYPE).to(self.device)

    def chance(self, share, *shape):
        return (torch.rand(shape, generator=self.seed) < share).to(self.device)

    def _make_policy(self):
        torch.manual_seed(self.draw.randrange(2**31))
        width = self.draw.choice([1, 4])
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, ACTIONS)).to(
            self.device, DTYPE
        )
        if self.draw.random() < 0.2:
            self.net[0].weight.requires_grad_(False)
        actions = torch.randint(ACTIONS, self.shape, generator=self.seed).to(self.device)
        tensors = {"states": self.random(*self.shape, 3), "actions": actions}
        self.batch, self.read = draw_batch(self.draw, tensors, self.size)
        self.fields = copy.deepcopy(self.read(self.batch))

    def log_prob(self, rows):
        return self._log_probs(self.read(rows))

    def _log_probs(self, fields):
        """Every entry of every list has a say in all actions of its row."""
        states, taken = fields["states"], fields["actions"]
        beside = numbers(fields).to(self.device).view(-1, *[1] * (states.ndim - 1))
        logits = self.net(states + beside)
        return logits.log_softmax(-1).gather(-1, taken[..., None]).squeeze(-1)

    def _advantages(self):
        wide = self.length is not None and self.draw.random() < 0.4
        shape = self.shape if wide else (self.size,)
        made = self.random(*shape)
        kind = self.draw.choice(["normal"] * 6 + ["sparse", "negative", "group"] * 2 + ["zero"])
        if kind == "sparse":
            made = torch.where(self.chance(0.7, *shape), 0.0, made)
        elif kind == "negative":
            made = -made.abs()
        elif kind == "zero":
            made = torch.zeros_like(made)
        elif kind == "group":
            made = made.sign()
        return made

    def _mask(self):
        kind = self.draw.choice(["none"] * 5 + ["random", "rows", "column"] * 2 + ["nothing"])
        if kind == "none":
            return None
        if kind == "nothing":
            return self.chance(0.0, *self.shape)
        shape = {
            "random": self.shape,
            "rows": (self.size,),
            "column": (self.size, 1) if self.length is not None else (self.size,),
        }[kind]
        return self.chance(0.7, *shape)

    @property
    def spread(self):
        """Advantages of every element."""
        given = self.advantages
        return (given[:, None] if given.ndim < len(self.shape) else given).expand(self.shape)

    def dense(self):
        """Log-probs of all rows, from what the fields were before any step."""
        return self._log_probs(self.fields)


# Losses: how the step is told, and what they are. The formula of each is written once more here.


def loss_of(draw, problem):
    old = problem.dense().detach() + 0.3 * problem.random(*problem.shape)
    clip, beta, eta = draw.uniform(0.05, 0.4), draw.choice([0.0, 0.1]), draw.choice([0.3, 1.0, 5.0])
    top = draw.choice([1.0, 2.0])

    def ppo(log_probs, advantages):
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        return -torch.minimum(ratio * advantages, clipped * advantages) + beta * (old - log_probs)

    def dg(log_probs, advantages):
        weight = torch.sigmoid(advantages * -log_probs.detach() / eta)
        return -weight * advantages * log_probs

    def is_pg(log_probs, advantages):
        return -(log_probs.detach() - old).exp().clamp(max=top) * advantages * log_probs

    def awr(log_probs, advantages):
        return -(advantages / eta).exp().clamp(max=20.0) * log_probs

    def own(log_probs, advantages, **_):
        return (log_probs * advantages).square() + log_probs.exp()

    losses = kondo.losses
    return draw.choice(
        [
            ({"loss": losses.pg}, lambda log_probs, advantages: -advantages * log_probs),
            ({"loss": functools.partial(losses.dg, eta=eta)}, dg),
            (
                {
                    "loss": functools.partial(losses.ppo, clip=clip, beta=beta),
                    "loss_inputs": {"old_log_probs": old},
                },
                ppo,
            ),
            (
                {
                    "loss": functools.partial(losses.is_pg, max_weight=top),
                    "loss_inputs": {"behaviour_log_probs": old},
                },
                is_pg,
            ),
            ({"loss": functools.partial(losses.awr, beta=eta)}, awr),
            ({"loss": own}, own),
        ]
    )


def screen_of(draw, problem, log_probs):
    """A screen, and the log-probs that the gate is shown."""
    kind = draw.choice(["exact", "exact", "known", "draft", "stale"])
    if kind == "exact":
        return None, log_probs
    if kind == "known":
        return log_probs.clone(), log_probs
    if kind == "draft":
        return (lambda rows: 1.5 * problem.log_prob(rows)), 1.5 * log_probs
    stale = log_probs - problem.random(*problem.shape).abs()
    return stale, stale


def case(draw, counts):
    problem = Problem(draw)
    told, formula = loss_of(draw, problem)
    exact = problem.dense().detach()
    spec, seen = gate_of(draw, problem), []
    screen, shown = screen_of(draw, problem, exact) if spec is not None else (None, exact)
    denominator = draw.choice(["full", "full", "kept", 7.5])
    options = kondo.Options(
        denominator=denominator,
        generator=torch.Generator().manual_seed(draw.randrange(2**31)),
        screen_chunk=draw.choice([None, 1, 3]),
        screen_rows=draw.choice([None, "all", "promising"]),
    )
    before = [draw.choice([None, torch.full_like(p, 2.0)]) for p in problem.net.parameters()]
    for parameter, gradient in zip(problem.net.parameters(), before, strict=True):
        if parameter.requires_grad:
            parameter.grad = None if gradient is None else gradient.clone()
    held = contents(problem.batch)
    report = kondo.backward(
        problem.log_prob,
        problem.batch,
        problem.advantages,
        gate=None if spec is None else random_gates.make(spec, seen),
        mask=problem.mask,
        unit=problem.unit,
        screen=screen,
        micro_batch=draw.choice([None, 1, 2, 100]),
        options=options,
        **told,
    )
    assert contents(problem.batch) == held, "the batch was written to"
    counts["steps"] += 1
    counts["empty"] += report.empty
    keep, weight = kept(problem, spec, seen, shown)
    check_report(problem, keep, report, dense=spec is None)
    check_gradient(problem, keep, weight, formula, denominator, before, report)


def gate_of(draw, problem):
    """Return the spec of a gate that these advantages allow; None for a dense step."""
    spec = random_gates.draw_gate(draw)
    by_row = spec["signal"] == "advantage" and problem.unit == "sequence"
    if draw.random() < 0.1 or (by_row and problem.advantages.ndim == 2):
        return None
    return spec


def kept(problem, spec, seen, shown):
    """Return which elements were kept, and their weights; hold the choice to its oracle."""
    if spec is None:
        return problem.counts, problem.counts.to(DTYPE)
    ((values, counted, choice),) = seen
    worth, counts = random_gates.unit_values(
        spec["signal"], shown, problem.advantages, problem.counts, problem.unit
    )
    assert counted.flatten().tolist() == counts
    for ours, theirs in zip(values.flatten().tolist(), worth, strict=True):
        # A row that was not screened is shown as 0, where it could not be kept.
        unseen = ours == 0 and theirs <= 0
        assert unseen or math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12), (ours, theirs)
    keep, weight = choice.keep.to(problem.device), choice.weight.to(problem.device, DTYPE)
    flat = keep.flatten().tolist(), weight.flatten().tolist()
    random_gates.judge(spec, worth, counts, *flat, float(choice.price))
    if problem.unit == "sequence":
        return keep[:, None] & problem.counts, weight[:, None].expand(problem.shape)
    # A function is shown units in one dimension.
    return keep.view(problem.counts.shape), weight.view(problem.counts.shape)


def check_report(problem, keep, report, *, dense):
    """The report counts what was kept."""
    by_row = problem.unit == "sequence" and not dense
    units, counted = (part.any(1) if by_row else part for part in (keep, problem.counts))
    assert (report.seen, report.kept) == (int(counted.sum()), int(units.sum()))
    rows = keep if keep.ndim == 1 else keep.any(1)
    assert report.rows_trained == int(rows.sum())
    assert report.empty == (not bool(keep.any()))


def check_gradient(problem, keep, weight, formula, denominator, before, report):
    """`.grad` has grown by the gradient of the dense loss, masked and weighted."""
    size = {"full": problem.counts.sum(), "kept": keep.sum()}.get(denominator, denominator)
    log_probs = problem.dense()
    losses = formula(log_probs, problem.spread)
    loss = torch.where(keep, losses * weight, 0.0).sum() / max(1.0, float(size))
    assert_close(report.loss, float(loss.detach()), DTYPE)
    trained = [p for p in problem.net.parameters() if p.requires_grad]
    grown = torch.autograd.grad(loss, trained, allow_unused=True)
    old = [b for b, p in zip(before, problem.net.parameters(), strict=True) if p.requires_grad]
    for parameter, added, start in zip(trained, grown, old, strict=True):
        if report.empty:
            assert (parameter.grad is None) == (start is None)
            assert start is None or torch.equal(parameter.grad, start)
            continue
        assert_close(parameter.grad, added if start is None else start + added, DTYPE)


def test_engine(campaign):
    campaign.run(case)


# Faults: what is wrong must be refused by name, and change nothing.


def bad_case(draw, problem):
    """One wrong argument: what to call the step with, and what the message must name."""
    size, shape = problem.size, problem.shape
    broken = draw.choice([math.nan, math.inf, -math.inf])
    place = tuple(draw.randrange(n) for n in shape)

    def with_value(tensor, value, where=place):
        found = tensor.clone()
        found[where] = value
        return found

    def beside(wrong):
        return draw.choice([(problem.batch, wrong), {"rows": problem.batch, "wrong": wrong}])

    old = problem.dense().detach()
    inputs = {"loss": kondo.losses.ppo}
    return draw.choice(
        [
            ({"advantages": with_value(problem.spread, math.nan)}, "advantages|delight|NaN"),
            ({"advantages": problem.advantages[:-1]}, "advantages"),
            ({"advantages": torch.ones(size, dtype=torch.int64)}, "advantages"),
            ({"mask": torch.ones(size + 1, dtype=torch.bool)}, "mask"),
            ({"mask": torch.ones(shape)}, "mask"),
            ({"micro_batch": draw.choice([0, -1, 2.5, True, "all"])}, "micro_batch"),
            (
                {
                    "options": kondo.Options(
                        denominator=draw.choice([0, -1, None, "half", math.nan])
                    )
                },
                "denominator",
            ),
            ({"options": kondo.Options(screen_chunk=0)}, "screen_chunk"),
            ({"screen": old[:-1]}, "screen"),
            ({"screen": with_value(old, math.nan)}, "screen|log_prob|NaN"),
            ({"screen": "exact"}, "screen"),
            ({"unit": "batch"}, "unit"),
            ({"gate": "delight"}, "gate"),
            (
                {"loss_inputs": {"old_log_probs": with_value(old, broken)}, **inputs},
                "old_log_probs",
            ),
            ({"loss_inputs": {"old_log_probs": old.tolist()}, **inputs}, "loss_inputs"),
            ({"loss_inputs": {"old_log_probs": old[:-1]}, **inputs}, "old_log_probs"),
            ({"policy": lambda rows: problem.log_prob(rows).detach()}, "differentiable"),
            (
                {"policy": lambda rows: problem.net(problem.random(size + 1, 3))},
                "log.prob",
            ),
            ({"policy": None}, "policy"),
            ({"batch": beside(["a"] * draw.choice([size - 1, size + 1]))}, "one entry per row"),
            ({"batch": beside((None,) * (size + 1))}, "one entry per row"),
            ({"batch": beside(np.zeros(size))}, "must be a tensor"),
            ({"batch": beside([np.zeros(size)])}, "must be a tensor"),
            ({"batch": beside(torch.ones(size + 1))}, "one leading dimension"),
            ({"batch": beside(torch.ones(()))}, "leading row dimension"),
        ]
    )


def fault_case(draw, counts):
    problem = Problem(draw)
    problem.advantages, problem.mask = problem.random(problem.size), None
    wrong, name = bad_case(draw, problem)
    for parameter in problem.net.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    good = {
        "policy": problem.log_prob,
        "batch": problem.batch,
        "advantages": problem.advantages,
        "gate": kondo.Gate(rate=1.0),
        "unit": problem.unit,
    }
    held = contents(problem.batch)
    with pytest.raises(ValueError, match=name):
        kondo.backward(**good | wrong)
    assert all(bool((p.grad == 3.0).all()) for p in problem.net.parameters())
    assert all(part.training for part in problem.net.modules())
    assert contents(problem.batch) == held
    counts["faults"] += 1


def test_engine_faults(campaign):
    campaign.run(fault_case)
