"""Policies that are plain functions, on each rank: which modules they name, and what they hide."""

import torch
from torch import nn

import kondo
from ranks.cases import failure, told
from ranks.problems import NUM_ACTIONS, Policy, gradients, problem, wrap
from steps import run_rank_step

SPLITS = (11, 8)
OPTIONS = {"gate": kondo.Gate(rate=0.5), "micro_batch": 3, "rebalance": False}


class Actor(Policy):
    """Log-probs from the hidden states of another module."""

    def __init__(self):
        super().__init__("sample", seed=1)

    def forward(self, rows, hidden):
        log_probs = self.choose((self.read(rows["x"]) + hidden).tanh()).log_softmax(-1)
        return log_probs.gather(-1, rows["a"].unsqueeze(-1)).squeeze(-1)


def two_modules():
    """Return a trunk and an actor, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Linear(3, 6, dtype=torch.float64), Actor()


def named_step(group, wrapping, number):
    """A step of a function that names one module, or two."""
    batch, advantages, mask = problem("sample", SPLITS).part(group.rank())
    trunk, actor = (
        wrap(each, group, wrapping, () if isinstance(each, nn.Linear) else [each.read, each.choose])
        for each in two_modules()
    )
    modules = [trunk, actor]
    if number == 1:
        policy = wrap(Policy("sample"), group, wrapping)
        modules = [policy]
    report = run_rank_step(
        (lambda rows: policy(rows))
        if number == 1
        else (lambda rows: actor(rows, trunk(rows["x"]))),
        batch,
        advantages,
        mask=mask,
        group=group,
        module=modules[0] if number == 1 else modules,
        all_reduce=True if wrapping == "plain" else None,
        **OPTIONS,
    )
    return {"grads": [gradients(each) for each in modules], "report": told(report)}


def unnamed_step(group, call, wrapping):
    """A function that names no module; what `backward` or `check` says."""
    model = wrap(Policy("sample"), group, wrapping)
    batch, advantages, _ = problem("sample", SPLITS).part(group.rank())
    options = kondo.Options(all_reduce=True if wrapping == "plain" else None)
    run = getattr(kondo, call)
    found = failure(
        lambda: run(lambda rows: model(rows), batch, advantages, group=group, options=options)
    )
    return found | {"grads": gradients(model)}


def hidden_leaf(group, wrapping, ranks, gated):
    """Some ranks train a tensor that no module holds; then all make a good step."""
    hidden = torch.zeros(NUM_ACTIONS, dtype=torch.float64, requires_grad=True)
    inner = Policy("sample")
    model = wrap(inner, group, wrapping)
    batch, advantages, _ = problem("sample", (9,) * group.size()).part(group.rank())

    def log_prob(rows):
        found = model(rows)
        return found + hidden[rows["a"]] if group.rank() in ranks else found

    options = OPTIONS | {"gate": OPTIONS["gate"] if gated else None}
    options |= {"group": group, "module": model}
    options["all_reduce"] = True if wrapping == "plain" else None
    found = failure(lambda: run_rank_step(log_prob, batch, advantages, **options))
    found["grads"] = gradients(inner)
    model.zero_grad()
    ranks = ()
    run_rank_step(log_prob, batch, advantages, **options)
    return found | {"good": gradients(inner)}


def frozen_leaf(group):
    """A tensor outside of the modules that no gradient reaches."""
    model, scale = Policy("sample"), torch.ones(1, dtype=torch.float64, requires_grad=True)
    batch, advantages, _ = problem("sample", SPLITS).part(group.rank())
    return failure(
        lambda: run_rank_step(
            lambda rows: model(rows) * scale.detach(),
            batch,
            advantages,
            group=group,
            module=model,
            all_reduce=True,
            **OPTIONS,
        )
    )


class Seen(nn.Module):
    """Takes down its mode in every forward, and ends the n-th one with a graph."""

    def __init__(self, kind, error):
        super().__init__()
        self.policy, self.kind, self.error = Policy("sample"), kind, error
        self.modes = {"screen": [], "forward": []}

    def forward(self, rows):
        kind = "forward" if torch.is_grad_enabled() else "screen"
        self.modes[kind].append([self.training, self.policy.read.training])
        if kind == self.kind:
            raise self.error(f"the {kind} ends")
        return self.policy(rows)


def modes(group, wrapping, as_function, kind, error):
    """The modes of a module during a step that ends well or not, and afterwards.

    Args:
        group: of the ranks.
        wrapping: as in `wrap`.
        as_function: whether the policy is a plain function that names its module.
        kind: "screen" or "forward", in which every rank raises; or None.
        error: "ValueError" or "KeyboardInterrupt".
    """
    errors = {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}
    inner = Seen(kind, errors[error])
    inner.policy.choose.eval()  # as someone froze it
    children = [inner.policy.read, inner.policy.choose, inner.policy]
    model = wrap(inner, group, wrapping, children if wrapping == "fsdp" else ())
    batch, advantages, _ = problem("sample", SPLITS).part(group.rank())
    for parameter in inner.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [part.training for part in model.modules()]
    try:
        run_rank_step(
            (lambda rows: model(rows)) if as_function else model,
            batch,
            advantages,
            group=group,
            module=model if as_function else None,
            all_reduce=True if wrapping == "plain" else None,
            **OPTIONS,
        )
        said = "nothing"
    except (Exception, KeyboardInterrupt) as raised:
        said = type(raised).__name__
    held = [bool((grad == 1).all()) for grad in gradients(inner).values()]
    return {
        "said": said,
        "seen": inner.modes,
        "same": [part.training for part in model.modules()] == before,
        "grad mode": torch.is_grad_enabled(),
        "exchanges": exchanges(model),
        "held": all(held),
    }


def exchanges(model):
    """Whether the next backward of a wrapped module exchanges gradients."""
    if hasattr(model, "require_backward_grad_sync"):
        return model.require_backward_grad_sync
    if hasattr(model, "_get_fsdp_state"):
        group = model.policy.read._get_fsdp_state()._fsdp_param_group
        return bool(group.reduce_grads)
    return True
