"""What runs `kondo.check` on each rank: policies that are sound, or have one fault on one rank."""

import random
import warnings

import torch

import kondo
from kondo.lm import TokenLogProb
from ranks import cases
from ranks.problems import Policy, gradients, problem, wrap

# Calls of a plain policy as it is checked: eleven answers, a dense and a gated gradient.
FORWARDS = 13


class Planted(torch.nn.Module):
    """A policy with a fault outside of what is wrapped, so that collectives stay in step.

    Args:
        policy: sound, wrapped or not.
        kind: of the fault; None for none.
        number: of the call that fails.
    """

    def __init__(self, policy, kind=None, number=0):
        super().__init__()
        self.policy, self.kind, self.number = policy, kind, number
        self.calls = 0

    def forward(self, rows):
        self.calls += 1
        if self.kind == "writes":
            rows["x"].add_(0.1)
        found = self.policy(rows)
        if self.kind == "raises" and self.calls == self.number:
            raise FloatingPointError(f"call {self.number} of this policy fails")
        if self.kind == "mean":
            found = found - found.logsumexp(0)
        if self.kind == "counter":
            found = found - 0.1 * self.calls
        if self.kind == "above 0":
            found = -found
        return found.detach() if self.kind == "detached" else found


class Moving(Policy):
    """A policy with statistics that every forward in training mode moves, and that it reads."""

    def __init__(self):
        super().__init__("sample")
        self.register_buffer("moving", torch.zeros(3, dtype=torch.float64))

    def forward(self, rows):
        if self.training:
            self.moving.mul_(0.9).add_(0.1 * rows["x"].detach().mean(0))
        return super().forward(rows | {"x": rows["x"] - self.moving})


def said(call):
    """Return what a call raises, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cases.failure(call)
    return found | {"warnings": [str(w.message) for w in caught if "kondo" in str(w.message)]}


def counted(module):
    """Return a list whose only item counts the calls of a module."""
    count = [0]

    def hook(_, inputs):
        count[0] += 1

    module.register_forward_pre_hook(hook)
    return count


def here(values):
    """Return this rank's part of a tensor, copied."""
    local = values.to_local() if hasattr(values, "to_local") else values
    return local.detach().clone()


def state_of(module, gate, generator):
    """Return what a check puts back."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {name: here(value) for name, value in named.items()}
    grads = {n: here(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    draws = {
        "torch": torch.get_rng_state(),
        "generator": generator.get_state(),
        "python": torch.tensor(random.getstate()[1]),
    }
    modes = [part.training for part in module.modules()]
    return [values, grads, draws], [modes, str(gate.state_dict())]


def same(one, other):
    """Return whether two states are equal."""
    return one[1] == other[1] and all(
        before.keys() == after.keys()
        and all(torch.equal(value, after[name]) for name, value in before.items())
        for before, after in zip(one[0], other[0], strict=True)
    )


def checked(inner, model, policy, batch, advantages, **options):
    """Check a policy; say what was found, how often it ran, and whether all is as before.

    Args:
        inner: the module whose calls are counted.
        model: whose state is compared.
        policy: what is checked.
        batch: of this rank.
        advantages: of its rows.
        options: of `kondo.check`.
    """
    calls, generator = counted(inner), torch.Generator().manual_seed(3)
    gate = kondo.UnbiasedGate(rate=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(model, gate, generator)
    given = kondo.Options(generator=generator, **options.pop("options", {}))
    found = said(
        lambda: kondo.check(policy, batch, advantages, gate=gate, options=given, **options)
    )
    return found | {"calls": calls[0], "same": same(before, state_of(model, gate, generator))}


def summing(wrapping):
    return {"all_reduce": True} if wrapping == "plain" else {}


def check(group, wrapping, unit, splits, widths=None, fault=None, uncounted=()):
    """Check a policy on this rank's rows.

    Args:
        group: of the ranks.
        wrapping: "plain", "ddp", "fsdp"; or "root", sharded with parameters of the root.
        unit: "sample", or of rows of tokens.
        splits: rows of each rank.
        widths: tokens of each rank's rows.
        fault: (rank, kind, number of the call), or None.
        uncounted: ranks on which nothing counts.
    """
    rank, inner = group.rank(), Policy(unit)
    batch, advantages, mask = problem(unit, splits, widths=widths).part(rank)
    sharded = {"fsdp": (), "root": [inner.read]}
    model = wrap(inner, group, "fsdp" if wrapping in sharded else wrapping, sharded.get(wrapping))
    planted = fault is not None and fault[0] == rank
    return checked(
        inner,
        model,
        Planted(model, *fault[1:]) if planted else Planted(model),
        batch,
        advantages,
        mask=torch.zeros_like(mask) if rank in uncounted else mask,
        unit=unit,
        group=group,
        options=summing(wrapping),
    )


def check_moving(group, wrapping, splits):
    """Check a policy whose forwards move a buffer."""
    inner = Moving()
    batch, advantages, _ = problem("sample", splits).part(group.rank())
    model = wrap(inner, group, wrapping)
    return checked(inner, model, model, batch, advantages, group=group, options=summing(wrapping))


def check_alone(group, faulty_rank):
    """Check each for itself: one is at fault, and the others do not hear of it."""
    inner = Policy("sample")
    batch, advantages, _ = problem("sample", (9,) * group.size()).part(group.rank())
    policy = Planted(inner, "mean" if group.rank() == faulty_rank else None)
    return checked(inner, inner, policy, batch, advantages, group="local")


def check_screen(group, splits, stale_rank):
    """Check log-probs that are known: those of one rank are another policy's."""
    inner, rank = Policy("sample"), group.rank()
    batch, advantages, mask = problem("sample", splits).part(rank)
    with torch.no_grad():
        known = Policy("sample", seed=9 if rank == stale_rank else 0)(batch)
    return checked(
        inner,
        inner,
        inner,
        batch,
        advantages,
        mask=mask,
        screen=known,
        group=group,
        options=summing("plain"),
    )


def check_language(group, wrapping, splits, widths, max_tokens):
    """Check a language model; its backbone's calls are counted."""
    lm = cases.causal_policy(max_tokens)
    model = wrap(TokenLogProb(lm), group, wrapping, [lm.backbone.mix])
    rows, advantages = cases.token_rows(splits, widths, group.rank())
    return checked(
        lm.backbone, model, model, rows, advantages, group=group, options=summing(wrapping)
    )


def check_while_gradients_are_held(group, wrapping):
    """Check between two steps of an accumulation; return the gradients of both, and no check's."""
    spec = {"unit": "sample", "splits": (9, 6), "gate": {"rate": 1.0}, "wrap": wrapping}
    found = []
    for checks in (True, False):
        model = wrap(Policy("sample"), group, wrapping)
        cases.step(group, model, spec, sync="never", denominator=1.0)
        if checks:
            batch, advantages, _ = problem("sample", (9, 6)).part(group.rank())
            kondo.check(model, batch, advantages, group=group)
        between = gradients(model)
        cases.step(group, model, spec | {"seed": 1}, denominator=1.0)
        found += [between, gradients(model)]
    return found
