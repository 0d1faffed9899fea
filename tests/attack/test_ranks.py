"""Attack `kondo.backward` over ranks: four processes, any rows, gate, loss, options and faults.

The expected gradient is that of the dense masked loss of all rows in this process, by plain torch.
What was kept is read from the gate, must be the same on all ranks, and is held to its oracle. Where
one rank fails or differs, all must raise, and the next step must be right.
"""

import functools
import math

import torch
from torch import nn

from attack import random_gates, rank_steps
from oracles import causal, core
from ranks import cases
from ranks.problems import Policy
from tolerances import TOLERANCES

STEPS = 10
"""Of one case: sending one costs as much as making a few."""
KINDS = (*random_gates.KINDS, "dense", "dense")
FAULTS = {
    # kind: whether it is this rank's own error, rather than a difference that all of them see
    "screen": True,
    "forward": True,
    "backward": True,
    "nan advantage": True,
    "shape": True,
    "nan screen": False,
    "bad denominator": True,
    "structure": False,
    "denominator": False,
    "micro_batch": False,
    "gate": False,
    "loss": False,
    "rebalance": False,
}
OWN = {"rank_kept", "rank_rows_trained", "rank_tokens_trained", "rank_loss", "rank_fillers"}


def draw_spec(draw, size):
    """Return a step of `size` ranks, in plain values."""
    unit = draw.choice(("sample", "token", "sequence"))
    splits = [draw.choice((0, 0, 1, 2, 3, 6)) for _ in range(size)]
    if not any(splits):
        splits[draw.randrange(size)] = draw.randint(1, 4)
    width = draw.randint(1, 6)
    widths = [draw.choice((width, draw.randint(1, 6))) for _ in splits]
    kind = draw.choice(KINDS)
    gate = None if kind == "dense" else random_gates.draw_gate(draw, (kind,))
    advantages = draw.choice(("normal", "normal", "ties", "zero", "negative", "tokens"))
    if unit == "sample" or (gate and gate["signal"] == "advantage"):
        advantages = "normal" if advantages == "tokens" else advantages
    wrapping = draw.choice(("plain", "plain", "plain", "ddp", "fsdp"))
    mask = draw.choice(("drawn", "drawn", "ones", "rows", "none"))
    if mask == "rows" and unit == "sample":
        mask = "drawn"
    if gate is None and unit != "sample" and mask in ("rows", "none"):
        widths = [width] * size  # otherwise a dense step needs a mask per token, and says so
    return {
        "language": False,
        "unit": unit,
        "splits": tuple(splits),
        "widths": None if unit == "sample" else tuple(widths),
        "seed": draw.randrange(10**6),
        "dtype": draw.choice(("double", "double", "float")),
        "advantages": advantages,
        "mask": mask,
        "gate": gate,
        "loss": draw.choice(tuple(rank_steps.LOSSES)),
        "screen": draw.choice((None, None, "free", "coarse", "draft")) if gate else None,
        "generator": draw.randrange(1000),
        "wrap": wrapping,
        "all_reduce": draw.random() < 0.7,
        "before": draw.random() < 0.2,
        "fault": None,
        "options": draw_options(draw),
    }


def draw_options(draw):
    """What changes nothing but how the work is shared, and the denominator."""
    return {
        "micro_batch": draw.choice((None, None, 1, 2, 3)),
        "denominator": draw.choice(("full", "full", "kept", 3.5)),
        "rebalance": draw.random() < 0.7,
        "screen_chunk": draw.choice((None, 1, 2)),
        "screen_rows": draw.choice((None, "all", "promising")),
    }


def draw_language(draw, size):
    """Return a step of a language model."""
    spec = draw_spec(draw, size)
    kind = draw.choice(("budget", "budget", "rate", "unbiased", "variance", "dense"))
    wrapping = draw.choice(("plain", "ddp", "fsdp"))
    return spec | {
        "language": True,
        "unit": draw.choice(("token", "sequence")),
        "widths": tuple(draw.randint(5, 9) for _ in spec["splits"]),
        "dtype": "double",
        "max_tokens": draw.choice((8, 20, 1000)),
        "gate": None if kind == "dense" else random_gates.draw_gate(draw, (kind,)),
        "loss": "pg",
        "screen": None,
        "wrap": wrapping,
        "all_reduce": True,
        "before": False,
    }


def draw_fault(draw, spec):
    """Spoil a step on one rank that has rows; a policy fails at a call that it surely makes."""
    kind = draw.choice(tuple(FAULTS))
    rank = draw.choice([r for r, rows in enumerate(spec["splits"]) if rows])
    spec = spec | {"fault": {"kind": kind, "rank": rank, "number": 1}, "wrap": "plain"}
    spec["mask"] = "drawn" if spec["mask"] != "ones" else "ones"
    if kind in ("screen", "forward", "backward"):
        # Everything is screened and kept where it is, so that every rank with rows has calls.
        spec |= {"gate": {"kind": "price", "options": {"price": -1e9}, "signal": "delight"}}
        spec |= {"screen": None, "advantages": "normal", "mask": "ones"}
        spec["options"] = spec["options"] | {"screen_rows": "all", "rebalance": False}
    if kind in ("nan advantage", "nan screen") and spec["gate"] is None:
        spec |= {"gate": {"kind": "rate", "options": {"rate": 0.5}, "signal": "delight"}}
    if kind == "nan screen":
        spec |= {"screen": "free"}
    return spec


def all_log_probs(spec):
    """Return model, log-probs with a graph, what screens say, and rows' facts, by torch alone."""
    if spec["language"]:
        rows, advantages = cases.token_rows(spec["splits"], spec["widths"], None, spec["seed"])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.ModuleDict({"embed": cases.Causal().double()})
            head = nn.Linear(6, 11).double()
        backbone = model["embed"]
        real, sampled = rows.attention_mask, rows.completion_mask
        hidden = backbone(rows.input_ids, real, causal.positions(real))
        log_probs = causal.token_log_probs(head(hidden), rows.input_ids, sampled)
        named = dict(backbone.named_parameters())
        named |= {f"head.{name}": p for name, p in head.named_parameters()}
        return named, log_probs, log_probs.detach(), advantages, sampled, None
    every = rank_steps.whole(spec)
    model = Policy(spec["unit"], dtype=rank_steps.DTYPES[spec["dtype"]])
    log_probs = model(every.batch)
    screen = log_probs.detach()
    if spec["screen"]:
        screen = rank_steps.known_log_probs(spec, every.batch)
    named = dict(model.named_parameters())
    return named, log_probs, screen, every.advantages, every.mask, every.batch["old"]


def chosen(spec, results, screen, advantages, mask):
    """Return kept elements, their weights and how many units; the same on all ranks."""
    if spec["gate"] is None:
        return mask, torch.ones(mask.shape, dtype=torch.float64), int(mask.sum())
    (first,) = results[0]["seen"]
    for result in results[1:]:
        (other,) = result["seen"]
        assert torch.equal(other["keep"], first["keep"]), "ranks kept different units"
        assert torch.equal(other["weight"], first["weight"]), "ranks gave different weights"
        assert other["price"] == first["price"], "ranks found different prices"
    values, counts = random_gates.unit_values(
        spec["gate"]["signal"], screen, advantages, mask, spec["unit"]
    )
    keep, weight = first["keep"], first["weight"].double()
    if spec["unit"] == "token":  # seen in one dimension; a rank without rows may be the widest
        keep, weight = keep.reshape(len(mask), -1), weight.reshape(len(mask), -1)
        room = (0, mask.shape[1] - keep.shape[1])
        keep, weight = (nn.functional.pad(part, room) for part in (keep, weight))
    slack = 1e-9 if spec["dtype"] == "double" else 1e-4
    random_gates.judge(
        spec["gate"],
        values,
        counts,
        keep.flatten().tolist(),
        weight.flatten().tolist(),
        first["price"],
        slack,
    )
    if spec["gate"]["kind"] == "budget":
        every, _ = cases.token_rows(spec["splits"], spec["widths"], None, spec["seed"])
        rows = (every.attention_mask, every.completion_mask)
        random_gates.judge_budget(spec["gate"], values, keep, mask, rows, slack)
    number = int(keep.sum())
    if spec["unit"] == "sequence":
        keep, weight = keep[:, None] & mask, weight[:, None].expand(mask.shape)
    return keep, weight, number


def expected(spec, named, log_probs, facts, keep, weight):
    """Return the gradients of the dense masked loss by name, and its value."""
    advantages, mask, old = facts
    spread = advantages if advantages.ndim == log_probs.ndim else advantages[:, None]
    inputs = [log_probs, spread.expand(log_probs.shape)]
    inputs += [old] if spec["loss"] == "ppo" else []
    options = rank_steps.LOSSES[spec["loss"]]
    values, slopes = core.elementwise(getattr(core, spec["loss"]), *inputs, **options)
    asked = spec["options"]["denominator"]
    number = {"full": int(mask.sum()), "kept": int(keep.sum())}
    denominator = max(1.0, number[asked]) if isinstance(asked, str) else asked
    factor = torch.where(keep, weight, 0.0) / denominator
    graph = (torch.where(keep, factor * slopes, 0.0) * log_probs.double()).sum()
    found = torch.autograd.grad(graph, list(named.values()), allow_unused=True)
    value = float(torch.where(keep, factor * values, 0.0).sum())
    return dict(zip(named, found, strict=True)), value


def compare(spec, results):
    """Hold what the ranks did to the oracle."""
    named, log_probs, screen, *facts = all_log_probs(spec)
    advantages, mask, _ = facts
    assert all(result["error"] is None for result in results), results[0]["message"]
    keep, weight, number = chosen(spec, results, screen, advantages, mask)
    wanted, value = expected(spec, named, log_probs, facts, keep, weight)
    limit = TOLERANCES[rank_steps.DTYPES[spec["dtype"]]]
    limit = 10 * (
        limit["atol"] + limit["rtol"] * max(float(g.abs().max()) for g in wanted.values())
    )
    parts = spec["wrap"] == "plain" and not spec["all_reduce"]
    before = 1.0 if spec["before"] and spec["wrap"] == "plain" else 0.0
    for name, target in wanted.items():
        grads = [result["grads"][name] for result in results]
        if number == 0:
            untouched = [g is None if not before else bool((g == 1).all()) for g in grads]
            assert all(untouched), f"{name}: an empty step touched the gradient"
            continue
        added = [torch.zeros_like(target) if g is None else g - before for g in grads]
        for mine in [sum(added)] if parts else added:
            error = float((mine - target).abs().max())
            assert error <= limit, f"{name}: {error} > {limit}"
    compare_reports(spec, [r["report"] for r in results], value, limit, keep, mask, number)


def compare_reports(spec, reports, value, limit, keep, mask, number):
    shared = [{k: v for k, v in report.items() if k not in OWN} for report in reports]
    assert all(same(report, shared[0]) for report in shared), "ranks report different numbers"
    report = shared[0]
    assert abs(report["loss"] - value) <= limit * max(1.0, abs(value)), (report["loss"], value)
    assert (report["kept"], report["empty"]) == (number, number == 0)
    assert report["tokens_seen"] == int(mask.sum())
    assert report["rows_seen"] == sum(spec["splits"]) == len(mask)
    rows = keep if keep.ndim == 1 else keep.any(1)
    assert report["rows_trained"] == int(rows.sum())
    for name in ("rows_trained", "kept", "tokens_trained"):
        own = sum(each[f"rank_{name}"] for each in reports)
        assert own == report[name], f"{name}: {own} of the ranks are {report[name]} of all"


def same(one, other):
    """Equal numbers; NaN equals NaN."""
    return all(
        a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def refused(spec, results):
    """Every rank raised, the failing one its own error, and no gradient of a plain module moved."""
    kind, rank = spec["fault"]["kind"], spec["fault"]["rank"]
    for number, result in enumerate(results):
        assert result["error"] is not None, f"{kind} on rank {rank}: rank {number} did not raise"
        if FAULTS[kind] and number != rank:
            assert result["error"] == "RankError", (kind, result["error"], result["message"])
            assert f"rank {rank} failed" in result["message"], result["message"]
        elif not FAULTS[kind]:
            assert result["error"] in ("ValueError", "RankError"), (kind, result["message"])
        before = spec["before"]
        for name, grad in result["grads"].items():
            same_as = bool((grad == 1).all()) if before and grad is not None else grad is None
            assert same_as, f"{kind} on rank {rank}: {name} changed on rank {number}"


def case(draw, counts, crew):
    """Some steps on 2 or 4 ranks, in one call of the crew; faults among them."""
    size, specs = draw.choice((2, 4, 4)), []
    for _ in range(STEPS):
        spec = (draw_language if draw.random() < 0.2 else draw_spec)(draw, size)
        if not spec["language"] and draw.random() < 0.2:
            spec = draw_fault(draw, spec)
        specs.append(spec)
    results = crew.run(rank_steps.steps, size, specs)
    for number, spec in enumerate(specs):
        found = [result[number] for result in results]
        try:
            (refused if spec["fault"] else compare)(spec, found)
        except Exception as error:
            raise AssertionError(f"step {number}: {error}; {spec}") from error
        counts["faults" if spec["fault"] else "steps"] += 1


def test_ranks(campaign, crew):
    campaign.run(functools.partial(case, crew=crew))
