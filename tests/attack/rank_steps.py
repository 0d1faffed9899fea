"""Steps of many ranks from plain descriptions: what each process runs, and what all rows are.

spec -> whole(spec)            all rows together, made alike in every process; torch alone
spec -> steps(group, [spec])   what this rank's step did: gradients, report, choice or error
"""

import functools

import torch

import kondo
from attack import random_gates
from kondo.lm import TokenLogProb
from ranks import cases
from ranks.problems import Policy, Problem, gradients, problem, wrap
from steps import run_rank_step

LOSSES = {
    "pg": {},
    "dg": {"eta": 0.7},
    "ppo": {"clip": 0.2, "beta": 0.1},
    "awr": {"beta": 0.8, "max_weight": 3.0},
}
DTYPES = {"double": torch.float64, "float": torch.float32}


def whole(spec):
    """Return all rows: a `Problem` whose batch holds "old", the log-probs of a former policy."""
    unit, dtype = spec["unit"], DTYPES[spec["dtype"]]
    drawn = problem(unit, spec["splits"], widths=spec["widths"], seed=spec["seed"], dtype=dtype)
    generator = torch.Generator().manual_seed(spec["seed"] + 1)
    shape = drawn.mask.shape
    noise = torch.randn(shape, generator=generator, dtype=dtype)
    with torch.no_grad():
        old = Policy(unit, dtype=dtype)(drawn.batch) + 0.3 * noise
    advantages = {
        "normal": drawn.advantages,
        "ties": drawn.advantages.round(),
        "zero": torch.zeros_like(drawn.advantages),
        "negative": -drawn.advantages.abs(),
        "tokens": torch.randn(shape, generator=generator, dtype=dtype),
    }[spec["advantages"]]
    mask = drawn.mask
    if spec["mask"] != "drawn":  # all that a rank is given counts, or all of some rows
        widths = torch.tensor(spec["widths"] or (1,) * len(spec["splits"]))
        width = widths.repeat_interleave(torch.tensor(spec["splits"]))
        columns = torch.arange(mask.shape[-1]) if mask.ndim == 2 else torch.zeros(1).long()
        within = (columns < width.unsqueeze(1)).view(mask.shape)
        mask = within & mask.view(len(mask), -1)[:, :1] if spec["mask"] == "rows" else within
    return Problem(
        batch=drawn.batch | {"old": old},
        advantages=advantages,
        mask=mask,
        splits=drawn.splits,
        widths=drawn.widths,
    )


def known_log_probs(spec, batch):
    """Return what a screen says of some rows: those of another policy, coarse enough to tie."""
    with torch.no_grad():
        found = Policy(spec["unit"], seed=9, dtype=DTYPES[spec["dtype"]])(batch)
    return (4 * found).round() / 4 if spec["screen"] == "coarse" else found


class Fails(torch.nn.Module):
    """A policy that fails at its n-th call of a kind, as in `ranks.cases.Faulty`; or never."""

    def __init__(self, policy, fault):
        super().__init__()
        kind, number = ("never", 0) if fault is None else (fault["kind"], fault["number"])
        self.inner = cases.Faulty(policy, kind, number)

    def forward(self, rows):
        return self.inner(rows)


def spoil(fault, arguments, options):
    """Give this rank what cannot be right, or what the others are not given."""
    kind = fault["kind"]
    if kind == "nan advantage":
        arguments["advantages"] = torch.full_like(arguments["advantages"], torch.nan)
        arguments["mask"] = torch.ones_like(arguments["mask"])
    elif kind == "shape":
        arguments["advantages"] = torch.ones(len(arguments["advantages"]) + 1)
    elif kind == "nan screen":
        options["screen"] = torch.full(arguments["mask"].shape, torch.nan)
        arguments["mask"] = torch.ones_like(arguments["mask"])
    elif kind == "structure":
        arguments["batch"] = arguments["batch"] | {"extra": torch.zeros(len(arguments["mask"]))}
    else:
        options |= {
            "denominator": {"denominator": 7.25},
            "bad denominator": {"denominator": -1.0},
            "micro_batch": {"micro_batch": 5},
            "gate": {"gate": kondo.Gate(rate=0.123)},
            "loss": {"loss": functools.partial(kondo.losses.awr, beta=0.123)},
            "rebalance": {"rebalance": not options["rebalance"]},
        }.get(kind, {})


def step(group, spec):
    """Make one step; say what it did, or what it raised."""
    rank, unit = group.rank(), spec["unit"]
    batch, advantages, mask = whole(spec).part(rank)
    old = batch.pop("old")
    plain = Policy(unit, dtype=DTYPES[spec["dtype"]])
    fault = spec["fault"] if spec["fault"] and spec["fault"]["rank"] == rank else None
    inner = Fails(plain, fault) if spec["fault"] else plain
    model = wrap(inner, group, spec["wrap"])
    before = spec["before"] and spec["wrap"] == "plain"
    for parameter in plain.parameters() if before else ():
        parameter.grad = torch.ones_like(parameter)
    arguments = {"batch": batch, "advantages": advantages, "mask": mask}
    if spec["mask"] == "none":
        arguments["mask"] = None
    elif spec["mask"] == "rows":  # [n] or [n, 1]
        arguments["mask"] = mask[:, 0] if spec["seed"] % 2 else mask[:, :1]
    seen, options = [], dict(spec["options"])
    options["gate"] = None if spec["gate"] is None else random_gates.make(spec["gate"], seen)
    options["loss"] = functools.partial(getattr(kondo.losses, spec["loss"]), **LOSSES[spec["loss"]])
    if spec["loss"] == "ppo":
        options["loss_inputs"] = {"old_log_probs": old}
    if spec["screen"] in ("free", "coarse"):
        options["screen"] = known_log_probs(spec, batch)
    elif spec["screen"] == "draft":
        options["screen"] = Policy(unit, seed=9, dtype=DTYPES[spec["dtype"]])
    options["generator"] = torch.Generator().manual_seed(spec["generator"] + rank)
    if fault is not None:
        spoil(fault, arguments, options)
    return _outcome(plain, model, group, spec, arguments, options, seen)


def _outcome(plain, model, group, spec, arguments, options, seen):
    """Run it; gradients are whole, but for those of a sharded module after an error."""
    found = {"report": None, "error": None, "message": ""}
    try:
        report = run_rank_step(
            model,
            **arguments,
            group=group,
            unit=spec["unit"],
            all_reduce=spec["all_reduce"] if spec["wrap"] == "plain" else None,
            **options,
        )
        found["report"] = cases.told(report)
    except Exception as error:
        found |= {"error": type(error).__name__, "message": str(error)}
    if found["error"] is None or spec["wrap"] != "fsdp":
        found["grads"] = gradients(plain)
    found["seen"] = [
        {"keep": c.keep, "weight": c.weight, "price": float(c.price), "values": v, "mask": m}
        for v, m, c in seen
    ]
    return found


def language_step(group, spec):
    """One step of a language model: rows of tokens, cut and packed."""
    lm = cases.causal_policy(spec["max_tokens"])
    model = wrap(TokenLogProb(lm), group, spec["wrap"], [lm.backbone.mix])
    rows, advantages = cases.token_rows(spec["splits"], spec["widths"], group.rank(), spec["seed"])
    seen, options = [], dict(spec["options"])
    options["gate"] = None if spec["gate"] is None else random_gates.make(spec["gate"], seen)
    options["generator"] = torch.Generator().manual_seed(spec["generator"])
    arguments = {"batch": rows, "advantages": advantages}
    return _outcome(model, model, group, spec, arguments, options, seen)


def steps(group, specs):
    """Make one step after the other."""
    return [(language_step if spec["language"] else step)(group, spec) for spec in specs]
