"""What runs on each rank: functions of a group and plain arguments that return plain values."""

import contextlib
import dataclasses
import functools
import math
import os
import random
import time
import warnings

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import kondo
import kondo.ranks
from core.entries import page_gate
from kondo.lm import CausalLM, TokenRows
from kondo.lm.budget import BudgetGate
from kondo.ranks.communicator import Ranks
from kondo.ranks.rebalance import move
from ranks.problems import Policy, gradients, normal_problem, problem, wrap
from steps import run_rank_step, run_step
from tolerances import assert_close

COUNTS = (
    "seen kept rate price loss rows_seen rows_screened rows_trained tokens_seen tokens_trained "
    "calls ranks rank_kept rank_rows_trained rank_tokens_trained rank_loss rank_fillers "
    "rows_moved bytes_moved"
)


def told(report):
    return {name: getattr(report, name) for name in COUNTS.split()} | {"empty": report.empty}


def generator_of(seed):
    return None if seed is None else torch.Generator().manual_seed(seed)


def step(group, model, spec, *, gate=None, **options):
    """One gated step of this rank's part of the problem; return the report."""
    rank = group.rank()
    whole = problem(
        spec["unit"], spec["splits"], widths=spec.get("widths"), seed=spec.get("seed", 0)
    )
    batch, advantages, mask = whole.part(rank)
    screen = None
    if spec.get("screen") == "free":
        screen = free_screen(spec, batch)
    if spec.get("screen") == "draft":
        screen = Policy(spec["unit"], seed=9)
    return run_rank_step(
        model,
        batch,
        advantages,
        gate=gate or kondo.Gate(**spec["gate"]),
        group=group,
        mask=mask,
        screen=screen,
        unit=spec["unit"],
        generator=generator_of(spec.get("generator")),
        all_reduce=spec["wrap"] == "plain",
        **spec.get("options", {}),
        **options,
    )


def free_screen(spec, batch):
    """Log-probs known beforehand: the same in every process and for every split of the rows."""
    with torch.no_grad():
        log_probs = Policy(spec["unit"], seed=9)(batch)
    # Coarse, so that many units tie and their places decide.
    return (4 * log_probs).round() / 4 if spec.get("ties") else log_probs


class Coin(kondo.BaseGate):
    """A gate of nobody's: draws among what has positive delight, fewer with every call."""

    calls = 1

    def choose(self, values, mask, generator=None):
        self.calls += 1
        draws = torch.rand(values.shape, generator=generator, dtype=values.dtype)
        return kondo.Choice.of(mask & (values > 0) & (draws < 1 / self.calls), mask)

    def state_dict(self):
        return {"calls": self.calls}


def drawing_gate(options):
    return Coin() if options == "coin" else kondo.UnbiasedGate(**options)


def unbiased_step(group, spec, options=None):
    """A step by a gate that draws, with a generator that is rank 0's alone."""
    batch, advantages, mask = problem(spec["unit"], spec["splits"]).part(group.rank())
    model, generator = Policy(spec["unit"]), generator_of(spec["generator"] + group.rank())
    report = run_rank_step(
        model,
        batch,
        advantages.abs() if spec.get("positive") else advantages,
        gate=drawing_gate(spec["gate"]),
        group=group,
        mask=mask,
        screen=free_screen(spec, batch),
        unit=spec["unit"],
        generator=generator,
        all_reduce=True,
        **(options or {}),
    )
    return {
        "grads": gradients(model),
        "report": told(report),
        "diagnostics": report.diagnostics,
        "next": torch.rand(1, generator=generator).item(),
    }


def one_step(group, spec):
    """Wrap a policy, make a step, return gradients and counts."""
    model = wrap(Policy(spec["unit"]), group, spec["wrap"], **spec.get("wrapping", {}))
    gate = kondo.Gate(**spec["gate"])
    report = step(group, model, spec, gate=gate)
    return {
        "grads": gradients(model),
        "report": told(report),
        "state": gate.state_dict(),
        "diagnostics": report.diagnostics,
    }


def density_step(group, splits, screen, gate):
    """A step of a normal policy: its modes come from the policy, a draft or a pair of tensors."""
    model, policy, (observations, actions), advantages = normal_problem(sum(splits))
    start = sum(splits[: group.rank()])
    own = slice(start, start + splits[group.rank()])
    batch = (observations[own], actions[own])
    known = None
    if screen == "pair" and splits[group.rank()]:
        with torch.no_grad():
            known = policy.screen(batch)
    elif screen == "pair":
        known = (advantages[:0], advantages[:0])
    elif screen == "draft":
        known = policy.screen
    report = run_rank_step(
        policy,
        batch,
        advantages[own],
        gate=kondo.Gate(**gate),
        screen=known,
        group=group,
        module=model,
        all_reduce=True,
    )
    return {"grads": gradients(model), "report": told(report)}


def dense_step(group, splits, widths, mask_of):
    """A dense step of rows of tokens, with a mask "per token", "per row" or none."""
    batch, advantages, mask = problem("token", splits, widths=widths).part(group.rank())
    masks = {"per token": mask, "per row": torch.ones(len(mask), dtype=torch.bool)}
    model, reports = Policy("token"), []

    def step():
        reports.append(
            run_rank_step(
                model,
                batch,
                advantages,
                group=group,
                mask=masks.get(mask_of),
                unit="token",
                all_reduce=True,
            )
        )

    found = failure(step)
    return found | {"grads": gradients(model), "report": told(reports[0]) if reports else None}


def differing_density_step(group):
    """Rank 0 gives log-probs alone, rank 1 a pair: refused on both."""
    model, policy, batch, advantages = normal_problem(8)
    with torch.no_grad():
        pair = policy.screen(batch)
    try:
        run_rank_step(
            policy,
            batch,
            advantages,
            gate=kondo.Gate(rate=0.5),
            screen=pair[0] - pair[1] if group.rank() == 0 else pair,
            group=group,
            module=model,
            all_reduce=True,
        )
    except ValueError as error:
        return str(error)
    return ""


def rounded_step(group, spec):
    """A step with whole-numbered advantages: many delights are equal."""
    whole = problem(spec["unit"], spec["splits"], widths=spec.get("widths"))
    batch, advantages, mask = whole.part(group.rank())
    model, gate = Policy(spec["unit"]), kondo.Gate(**spec["gate"])
    report = run_rank_step(
        model,
        batch,
        advantages.round(),
        gate=gate,
        group=group,
        mask=mask,
        screen=free_screen(spec, batch),
        unit=spec["unit"],
        generator=generator_of(spec["generator"]),
        all_reduce=True,
    )
    return {
        "grads": gradients(model),
        "report": told(report),
        "state": gate.state_dict(),
        "diagnostics": report.diagnostics,
    }


def variance_step(group, spec, rates, options=None):
    """A step by `kondo.VarianceGate`, with a rate of each rank's own; log-probs are not needed."""
    whole = problem(spec["unit"], spec["splits"], widths=spec["widths"])
    batch, advantages, mask = whole.part(group.rank())
    model = Policy(spec["unit"])
    report = run_rank_step(
        model,
        batch,
        advantages.round(),
        gate=kondo.VarianceGate(rate=rates[group.rank()]),
        group=group,
        mask=mask,
        unit=spec["unit"],
        all_reduce=True,
        **(options or {}),
    )
    assert report.rows_screened == 0  # no screen is needed
    return {"grads": gradients(model), "report": told(report)}


def page_gate_step(group, spec):
    """A step by the gate of the page, "Add a gate", of which ranks know nothing."""
    model = Policy(spec["unit"])
    report = step(group, model, spec, gate=page_gate())
    return {"grads": gradients(model), "report": told(report)}


def ungated_step(group, spec):
    """A dense step of all ranks."""
    whole = problem(spec["unit"], spec["splits"], widths=spec.get("widths"))
    batch, advantages, mask = whole.part(group.rank())
    model = wrap(Policy(spec["unit"]), group, spec["wrap"])
    masked = {"mask": mask} if spec["masked"] else {}
    report = run_rank_step(
        model,
        batch,
        advantages,
        group=group,
        unit=spec["unit"],
        micro_batch=3,
        all_reduce=spec["wrap"] == "plain",
        **masked,
    )
    return {"grads": gradients(model), "report": told(report)}


def refused_variance(group, *arguments):
    return failure(lambda: variance_step(group, *arguments))


def failure(call):
    """Return the type and message of what a call raises, and how long that took."""
    start = time.perf_counter()
    try:
        call()
    except Exception as error:
        spent = time.perf_counter() - start
        return {"type": type(error).__name__, "message": str(error), "seconds": spent}
    return {"type": "nothing", "message": "", "seconds": 0.0}


class Faulty(torch.nn.Module):
    """A policy that fails at its n-th call of a kind: "screen", "forward" or "backward"."""

    def __init__(self, policy, kind, number):
        super().__init__()
        self.policy, self.kind, self.number = policy, kind, number
        self.calls = {"screen": 0, "forward": 0, "backward": 0}

    def forward(self, rows):
        self.count("forward" if torch.is_grad_enabled() else "screen")
        log_probs = self.policy(rows)
        if log_probs.requires_grad:
            log_probs.register_hook(lambda _: self.count("backward"))
        return log_probs

    def count(self, kind):
        self.calls[kind] += 1
        if kind == self.kind and self.calls[kind] == self.number:
            raise FloatingPointError(f"{kind} {self.number} of this policy fails")


def faulty_step(group, wrapping, kind, number, faulty_rank):
    """One rank's policy fails; then all make a good step, to show that the group is still sound.

    wrapping: as in `wrap`, or "parts" for a plain module whose gradients are not summed.
    """
    parts, wrapping = wrapping == "parts", "plain" if wrapping == "parts" else wrapping
    spec = {"unit": "sample", "splits": (9,) * group.size(), "gate": {"rate": 0.9}}
    inner = Policy("sample")
    policy = Faulty(inner, kind if group.rank() == faulty_rank else "never", number)
    inner.choose.bias.grad = torch.ones_like(inner.choose.bias)
    # In DDP one call, the last, in which the others must not wait for this rank's gradients.
    options = {"micro_batch": None if wrapping == "ddp" else 2, "screen_chunk": 3}
    model = wrap(policy, group, wrapping)
    told_wrap = "not summed" if parts else wrapping
    found = failure(lambda: step(group, model, spec | {"wrap": told_wrap}, **options))
    found["grads"] = gradients(inner)
    good = Policy("sample")
    step(group, good, spec | {"wrap": "plain"}, **options)
    return found | {"good": gradients(good)}


def scaled(factor, log_probs, advantages):
    """A loss, or a signal, with an option in front."""
    return -factor * (log_probs * advantages)


def bound(factor):
    return functools.partial(scaled, factor)


def gated_by(factor):
    return kondo.Gate(rate=0.5, signal=functools.partial(signal_of, functools.partial(pow, factor)))


def signal_of(power, log_probs, advantages, *, mask=None):
    return (power(2) * advantages * -log_probs).detach()


def old_log_probs(num_rows, broken=False):
    return {"old_log_probs": torch.full((num_rows,), torch.nan if broken else -1.0)}


# What all ranks are given, by kind.
ALL_OPTIONS = {
    "bound number": lambda: {"loss": bound(1.0)},
    "bound tensor": lambda: {"loss": bound(torch.tensor([1.0, 2.0]).sum())},
    "bound signal": lambda: {"gate": gated_by(2.0)},
    "leak": lambda: {"gate": kondo.Gate(rate=1.0), "rebalance": False},
    "state": lambda: {"gate": kondo.Gate(rate=0.5, window=4)},
    "nan loss input": lambda: {"loss": kondo.losses.ppo, "loss_inputs": old_log_probs(9)},
}
OTHER_OPTIONS = {
    "bound number": lambda: {"loss": bound(0.5)},
    "bound tensor": lambda: {"loss": bound(torch.tensor([1.0, 2.5]).sum())},
    "bound signal": lambda: {"gate": gated_by(3.0)},
    "nan loss input": lambda: {"loss_inputs": old_log_probs(9, broken=True)},
    "rate": lambda: {"gate": kondo.Gate(rate=0.25)},
    "unit": lambda: {"unit": "sequence"},
    "micro_batch": lambda: {"micro_batch": 3},
    "denominator": lambda: {"denominator": 7.0},
    "wrong denominator": lambda: {"denominator": -1.0},
}


class Scaled(Policy):
    """Multiplies its log-probs with what the rows bring: NaN there is NaN in the gradient."""

    def forward(self, rows):
        return super().forward(rows) * rows["scale"]


def bad_rows(group, kind, unit, faulty_rank):
    """One rank is given what cannot be right, or what the others are not given."""
    batch, advantages, mask = problem(unit, (9,) * group.size()).part(group.rank())
    options = {"gate": kondo.Gate(rate=0.5), "unit": unit}
    options |= ALL_OPTIONS.get(kind, dict)()
    model = Scaled(unit) if kind == "leak" else Policy(unit)
    batch["scale"] = torch.ones(mask.shape, dtype=torch.float64)
    if group.rank() == faulty_rank:
        options |= OTHER_OPTIONS.get(kind, dict)()
        if kind == "nan advantage":
            advantages[3], mask[3] = torch.nan, True
        if kind == "leak":
            batch["scale"][3, 0], mask[3, 0], mask[3, 1] = torch.nan, False, True
        if kind == "too few advantages":
            advantages = advantages[:5]
        if kind == "nan weights":
            torch.nn.init.constant_(model.choose.bias, torch.nan)
        if kind == "state":
            options["gate"](torch.ones(3))
        if kind == "structure":
            batch["extra"] = torch.zeros(9)
        if kind == "dtype":
            batch["x"] = batch["x"].float()
    return failure(
        lambda: run_rank_step(
            model, batch, advantages, mask=mask, group=group, all_reduce=True, **options
        )
    )


def all_empty(group):
    batch, advantages, mask = problem("sample", (0,) * group.size()).part(group.rank())
    gate = kondo.Gate(rate=0.5)
    return failure(
        lambda: run_rank_step(
            Policy("sample"), batch, advantages, gate=gate, mask=mask, group=group, all_reduce=True
        )
    )


def gates_that_differ(group, what):
    """A gate that looks at something else than its arguments: at the rank, for price or units."""
    own = group.rank() if what == "price" else 0

    def gate(delight, mask, generator):
        keep = mask & (torch.arange(len(mask)) == group.rank() - own)
        price = torch.zeros((), dtype=torch.float64)
        return kondo.Choice(keep, keep.double(), price + own, price, keep.double())

    spec = {"unit": "sample", "splits": (5,) * group.size(), "wrap": "plain"}
    return failure(lambda: step(group, Policy("sample"), spec, gate=gate))


class Pattern:
    """A gate that keeps what a pattern says, by the rank a row belongs to."""

    def __init__(self, kind, owner, draws):
        self.kind, self.owner, self.draws = kind, owner, draws

    def __call__(self, delight, mask, generator=None):
        rows = len(self.owner)
        row = torch.arange(rows).repeat_interleave(len(mask) // rows)
        owner = self.owner[row]
        keep = {
            "none": torch.zeros_like(mask),
            "all": mask,
            "one rank": mask & (owner == 0),
            "all but one": mask & (owner != 0),
            "one row": mask & (row == rows - 1),
            "some": mask & (self.draws[row] < 0.3),
        }[self.kind]
        number = keep.sum().double()
        return kondo.Choice(keep, keep.double(), number, number, keep.double())


def adversarial_steps(group, unit, steps, wrapping, seed):
    """Random patterns, sizes and lengths; rank 0 compares each gradient with one process."""
    draw = random.Random(seed)
    model, alone = wrap(Policy(unit), group, wrapping), Policy(unit)
    made = []
    for number in range(steps):
        splits = [draw.choice((0, 1, 2, 5)) for _ in range(group.size())]
        if not any(splits):
            splits[draw.randrange(group.size())] = 3
        widths = [draw.randint(1, 6) for _ in splits]
        whole = problem(unit, splits, widths=widths, seed=1000 * seed + number)
        owner = torch.arange(group.size()).repeat_interleave(torch.tensor(splits))
        draws = torch.tensor([draw.random() for _ in owner])
        kind = draw.choice(("none", "all", "one rank", "all but one", "one row", "some"))
        options = {
            "micro_batch": draw.choice((None, 1, 2)),
            "denominator": draw.choice(("full", "kept", 11.0)),
        }
        ranks_only = {"rebalance": draw.random() < 0.7, "all_reduce": wrapping == "plain"}
        free = draw.random() < 0.5

        def screen(batch, free=free):
            return free_screen({"unit": unit}, batch) if free else None

        batch, advantages, mask = whole.part(group.rank())
        gate = Pattern(kind, owner, draws)
        model.zero_grad()
        report = run_rank_step(
            model,
            batch,
            advantages,
            gate=gate,
            group=group,
            mask=mask,
            screen=screen(batch),
            unit=unit,
            **options,
            **ranks_only,
        )
        made.append([report.calls, report.kept, report.rows_trained, int(report.empty)])
        if group.rank() == 0:
            alone.zero_grad()
            run_step(
                alone,
                whole.batch,
                whole.advantages,
                gate=gate,
                mask=whole.mask,
                screen=screen(whole.batch),
                unit=unit,
                group="local",
                **options,
            )
        theirs, ours = gradients(alone), gradients(model)
        for name, grad in ours.items():
            if report.empty:
                assert grad is None, (number, kind)
            elif group.rank() == 0:
                assert_close(grad, theirs[name])
    return made


def accumulated_steps(group, wrapping, how, spec, seeds):
    """Several backward calls before a step, each with its own rows and one denominator for all."""
    model = wrap(Policy(spec["unit"]), group, wrapping)
    spec = spec | {"wrap": wrapping}
    for number, seed in enumerate(seeds):
        held = how != "each" and number < len(seeds) - 1
        options = {"sync": "never"} if held and how == "never" else {}
        context = model.no_sync() if held and how == "no_sync" else contextlib.nullcontext()
        with context:
            step(group, model, spec | {"seed": seed}, **options)
    return gradients(model)


def accumulated_to_nothing(group, wrapping, how, spec):
    """Two calls before a step: the first holds its gradients back, the last keeps nothing."""
    model = wrap(Policy(spec["unit"]), group, wrapping)
    spec, nothing = spec | {"wrap": wrapping}, kondo.Gate(price=math.inf)
    report = step(group, model, spec, gate=nothing)
    untouched = all(grad is None for grad in gradients(model).values())
    calls_before = report.calls
    with model.no_sync() if how == "no_sync" else contextlib.nullcontext():
        step(group, model, spec, **({"sync": "never"} if how == "never" else {}))
        held = step(group, model, spec, gate=nothing, sync="never")
    last = step(group, model, spec, gate=nothing)
    found = gradients(model)
    again = step(group, model, spec, gate=nothing)
    return {
        "grads": found,
        "untouched": untouched,
        "calls": [calls_before, held.calls, last.calls, again.calls],
        "empty": last.empty,
        "fillers": last.rank_fillers,
    }


def low_precision_step(group, kind, spec):
    """Under autocast, or with bf16 parameters gathered by FSDP2."""
    if kind == "autocast":
        model = wrap(Policy(spec["unit"], dtype=torch.float32), group, "ddp")
        context = torch.autocast("cpu", torch.bfloat16)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        plain = Policy(spec["unit"], dtype=torch.float32)
        model, context = wrap(plain, group, "fsdp", mp_policy=policy), contextlib.nullcontext()
    with context:
        report = step(
            group, model, spec | {"wrap": "ddp"}, backward_fn=lambda loss: loss.backward()
        )
    return {"grads": gradients(model), "report": told(report)}


def windowed_steps(group, state, seeds, spec):
    """Steps with a rolling window, from a gate's state to a gate's state."""
    gate, prices = kondo.Gate(**spec["gate"]), []
    if state is not None:
        gate.load_state_dict(state)
    for seed in seeds:
        report = step(group, Policy(spec["unit"]), spec | {"seed": seed}, gate=gate)
        prices.append((report.price, report.kept))
    return {"state": gate.state_dict(), "prices": prices}


def different_sums(group):
    """A plain module without all_reduce: each rank has its part. Unused parameters stay None."""
    spec = {"unit": "sample", "splits": (9, 5), "gate": {"rate": 0.5}, "wrap": "ddp"}
    model = Policy("sample")
    step(group, model, spec)
    own = gradients(model)
    model.unused = torch.nn.Parameter(torch.ones(2))
    model.zero_grad()
    step(group, model, spec | {"wrap": "plain"})
    return {"own": own, "sum": gradients(model)}


class Causal(torch.nn.Module):
    """A backbone: hidden states that depend on the tokens so far, and on their positions."""

    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.mix = torch.nn.Linear(width, width)

    def forward(self, input_ids, attention_mask, position_ids):
        seen = (self.embed(input_ids) * attention_mask.unsqueeze(-1)).cumsum(1)
        return self.mix((seen + 0.1 * position_ids.unsqueeze(-1)).tanh())


def token_rows(splits, widths, rank=None, seed=0):
    """Rows of tokens padded on both sides; those of one rank, or all, as wide as the widest."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, widest = sum(splits), max(widths)
    width = torch.tensor(widths).repeat_interleave(torch.tensor(splits)).unsqueeze(1)
    column = torch.arange(widest)
    start = torch.randint(0, 3, (num_rows, 1), generator=generator)
    stop = width - torch.randint(0, 2, (num_rows, 1), generator=generator)
    real = (column >= start) & (column < stop)
    sampled = real & (column >= start + 2) & (torch.rand(real.shape, generator=generator) < 0.8)
    sampled |= column == stop - 1
    ids = torch.randint(11, real.shape, generator=generator)
    advantages = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    rows, columns = slice(None), slice(None)
    if rank is not None:
        begin = sum(splits[:rank])
        rows, columns = slice(begin, begin + splits[rank]), slice(0, widths[rank])
    parts = (part[rows, columns] for part in (ids, real, sampled))
    names = ("input_ids", "attention_mask", "completion_mask")
    return TokenRows(**dict(zip(names, parts, strict=True))), advantages[rows]


def causal_policy(max_tokens):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone, head = Causal().double(), torch.nn.Linear(6, 11).double()
    return CausalLM(backbone, head=head, max_tokens=max_tokens)


def stale_log_probs(rows):
    """Log-probs of another policy, the same for every split of the rows."""
    spread = rows.input_ids.double()
    return {"behaviour_log_probs": -2.0 - (spread * rows.completion_mask).sin()}


def corrected_step(group, wrapping, splits, widths, max_tokens, rate):
    """A step of a language model with the ratios of whole answers."""
    lm = causal_policy(max_tokens)
    model = wrap(kondo.lm.TokenLogProb(lm), group, wrapping, [lm.backbone.mix])
    rows, advantages = token_rows(splits, widths, group.rank())
    report = run_rank_step(
        model,
        rows,
        advantages,
        gate=None if rate is None else kondo.Gate(rate=rate),
        group=group,
        loss=kondo.losses.sequence_is_pg,
        loss_inputs=stale_log_probs(rows),
    )
    return {"grads": gradients(model), "report": told(report)}


def language_step(group, wrapping, unit, splits, widths, max_tokens, screen, rate=0.3):
    """A gated step of a language model, cut and packed; and the tokens that its backbone saw."""
    lm = causal_policy(max_tokens)
    seen = {"graph": 0, "screen": 0, "calls": 0}

    def count(_, inputs):
        seen["calls"] += 1
        seen["graph" if torch.is_grad_enabled() else "screen"] += inputs[0].numel()

    lm.backbone.register_forward_pre_hook(count)
    model = wrap(kondo.lm.TokenLogProb(lm), group, wrapping, [lm.backbone.mix])
    rows, advantages = token_rows(splits, widths, group.rank())
    known = None
    if screen == "free":
        with torch.no_grad():
            known = (
                causal_policy(64).log_prob(rows)
                if len(advantages)
                else advantages.new_zeros(0, widths[group.rank()])
            )
    report = run_rank_step(
        lm.log_prob if wrapping == "plain" else model,
        rows,
        advantages,
        gate=kondo.Gate(rate=rate),
        group=group,
        unit=unit,
        screen=known,
        all_reduce=wrapping == "plain",
        module=model if wrapping == "plain" else None,
    )
    return {"grads": gradients(model), "report": told(report), "seen": seen}


def sketched_step(group, gate, unit, splits, ties):
    """Decide by a sketch: not one unit may be gathered."""
    batch, advantages, mask = problem(unit, splits).part(group.rank())
    model, gate = Policy(unit), kondo.Gate(**gate)
    report = run_rank_step(
        model,
        batch,
        advantages.round() if ties else advantages,
        gate=gate,
        group=group,
        mask=mask,
        screen=free_screen({"unit": unit, "ties": ties}, batch),
        unit=unit,
        all_reduce=True,
        exact_units=0,
    )
    return {
        "report": told(report),
        "grads": gradients(model),
        "state": gate.state_dict(),
        "diagnostics": report.diagnostics,
    }


@dataclasses.dataclass
class Nest:
    ids: torch.Tensor
    inner: tuple
    name: str = "a"


def any_nest(rank, num_rows, width):
    """Rows that say where they come from, in many dtypes and containers."""
    import tensordict

    base = 100 * rank + torch.arange(num_rows)
    wide = base.unsqueeze(1).expand(num_rows, width)
    held = {"half": wide.to(torch.bfloat16), "deep": {"bytes": (wide % 128).to(torch.uint8)}}
    return {
        "rows": Nest(ids=wide.int(), inner=(wide % 2 == 0, [base.double()]), name=f"rank {rank}"),
        "dict": tensordict.TensorDict(held, batch_size=[num_rows]),
        "cube": base.view(-1, 1, 1).expand(num_rows, 2, width).float(),
        "prompts": [f"row {number}" for number in base.tolist()],
        "pair": ([{"number": number} for number in base.tolist()], base),
    }


def moved_nest(group, num_rows, widths, targets):
    """Move rows as told; return what arrived, as lists."""
    rank = group.rank()
    nest = any_nest(rank, num_rows[rank], widths[rank])
    moved = move(Ranks(group), nest, [torch.tensor(own, dtype=torch.int64) for own in targets])
    found = moved.nest
    return {
        "num_rows": moved.num_rows,
        "num_bytes": moved.num_bytes,
        "name": found["rows"].name,
        "ids": found["rows"].ids,
        "even": found["rows"].inner[0],
        "base": found["rows"].inner[1][0],
        "half": found["dict"]["half"],
        "bytes": found["dict"]["deep", "bytes"],
        "cube": found["cube"],
        "prompts": found["prompts"],
        "numbers": [each["number"] for each in found["pair"][0]],
        "same": found["pair"][1],
    }


def sharded_head(group):
    """A head that is a unit of its own cannot be read."""
    lm = causal_policy(64)
    policy = kondo.lm.TokenLogProb(lm)
    model = wrap(policy, group, "fsdp", [lm.backbone, policy.head])
    rows, advantages = token_rows((3, 3), (6, 6), group.rank())
    gate = kondo.Gate(rate=0.5)
    return failure(
        lambda: run_rank_step(model, rows, advantages, gate=gate, group=group, unit="sequence")
    )


def bad_token_rows(group, screen):
    """One rank has ids that the model does not know: found before any forward."""
    lm = causal_policy(64)
    rows, advantages = token_rows((3, 3), (6, 6), group.rank())
    if group.rank() == 0:
        rows.input_ids[1, 4] = 11
        rows.attention_mask[1, 4] = True
    known = torch.full(rows.input_ids.shape, -1.0, dtype=torch.float64) if screen else None
    gate = kondo.Gate(rate=0.5)
    return failure(
        lambda: run_rank_step(
            lm.log_prob,
            rows,
            advantages,
            gate=gate,
            group=group,
            unit="sequence",
            screen=known,
            all_reduce=True,
        )
    )


def death(group, dying_rank):
    """A process ends in the middle of its screen, without a word."""

    policy = Policy("sample")

    def log_prob(rows):
        if group.rank() == dying_rank:
            os._exit(1)
        return policy(rows)

    spec = {"unit": "sample", "splits": (5,) * group.size(), "gate": {"rate": 0.5}, "wrap": "plain"}
    return failure(lambda: step(group, log_prob, spec, module=policy))


class Scatters(TorchDispatchMode):
    """Counts the reduce-scatters that sharded modules make in a backward."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def exchanges(group, wrapping, sync):
    """Count how often gradients are exchanged in a step of several calls."""
    spec = {"unit": "sample", "splits": (6, 6), "gate": {"rate": 1.0}, "wrap": wrapping}
    model, count = wrap(Policy("sample"), group, wrapping), [0]

    def hook(_, bucket):
        count[0] += 1
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    if wrapping == "ddp":
        model.register_comm_hook(None, hook)
        report = step(group, model, spec, micro_batch=2, sync=sync)
        return {"exchanges": count[0], "calls": report.calls, "units": 1}
    with Scatters() as counter:
        report = step(group, model, spec, micro_batch=2, sync=sync)
    return {"exchanges": counter.count, "calls": report.calls, "units": 2}


def static_graph_steps(group, spec, options, before=None):
    """Steps of DDP that takes its graph for static, and of DDP that does not.

    before: "check", "plan" or "plain", what the module is used for first.
    """
    made = []
    for static in (True, False):
        model = wrap(Policy(spec["unit"]), group, "ddp", static_graph=static)
        batch, advantages, mask = problem(spec["unit"], spec["splits"]).part(group.rank())
        if before == "check":
            kondo.check(model, batch, advantages, mask=mask, group=group)
        elif before == "plan":
            kondo.plan(model, {k: v[:4] for k, v in batch.items()}, rates=(0.5,), repeats=1)
        elif before == "plain":
            model(batch).sum().backward()
        found = []
        for seed in range(3):
            model.zero_grad()
            given = spec | {"seed": seed, "wrap": "ddp"}
            found.append(failure(lambda: step(group, model, given, **options)))  # noqa: B023
            found[-1]["grads"] = gradients(model)
        made.append(found)
    return made


def budgeted_step(group, unit, splits, widths):
    """A budget of tokens over the rows of all ranks."""
    lm, gate = causal_policy(64), BudgetGate(budget=0.3)
    model = wrap(kondo.lm.TokenLogProb(lm), group, "ddp")
    rows, advantages = token_rows(splits, widths, group.rank())
    report = run_rank_step(model, rows, advantages, gate=gate, group=group, unit=unit)
    bound = failure(
        lambda: run_rank_step(
            model, rows, advantages, gate=gate.for_rows(rows), group=group, unit=unit
        )
    )
    return {"grads": gradients(model), "report": told(report), "bound": bound["message"]}


def undecided(group):
    """A plain module, and nobody says who adds up its gradients."""
    spec = {"unit": "sample", "splits": (5, 5), "gate": {"rate": 0.5}}
    batch, advantages, _ = problem("sample", spec["splits"]).part(group.rank())
    policy, gate = Policy("sample"), kondo.Gate(rate=0.5)
    missing = failure(lambda: run_rank_step(policy, batch, advantages, gate=gate, group=group))
    wrapped = wrap(Policy("sample"), group, "ddp")
    twice = failure(
        lambda: run_rank_step(wrapped, batch, advantages, gate=gate, group=group, all_reduce=True)
    )
    return {"missing": missing, "twice": twice}


def without_a_group(group, call, said):
    """Rank 0 keeps nothing. What a call says of `group=said`, and the gradients it leaves."""
    rank, model = group.rank(), Policy("sample")
    batch, advantages, _ = problem("sample", (6,) * group.size()).part(rank)
    options = {} if said is None else {"group": said}
    if call == "backward":
        advantages, options["gate"] = advantages.abs(), kondo.Gate(price=1e9 * (rank == 0))
    found = failure(lambda: getattr(kondo, call)(model, batch, advantages, **options))
    return found | {"grads": gradients(model)}


def logged(group):
    """What a logger is given."""
    spec = {"unit": "sample", "splits": (5, 5), "gate": {"rate": 0.5}, "wrap": "plain"}
    report = step(group, Policy("sample"), spec)
    return {"dict": report.as_dict(), "text": str(report)}


def watched_steps(group, advantages):
    """What 100 steps of a gate warn of, where each rank has rows of its own advantages."""
    model, own = torch.nn.Linear(2, 3), torch.tensor(advantages[group.rank()])
    gate = kondo.UnbiasedGate(rate=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(100):
            kondo.backward(
                lambda rows: model(rows).log_softmax(-1)[:, 0],
                torch.ones(len(own), 2),
                own,
                gate=gate,
                group=group,
                options=kondo.Options(module=model, all_reduce=True),
            )
    return {"told": [str(each.message) for each in caught]}
