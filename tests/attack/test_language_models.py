"""Attack `kondo.backward` of language models: any model, rows, gate, loss, screen and packing.

The expected gradient is that of the dense masked loss: all rows, all logits, plain transformers.
What was kept is read from the gate, and held to the oracle of its kind.
"""

import contextlib
import dataclasses
import functools
import math
import re

import torch

import kondo
from attack import random_gates
from attack.language_faults import FAULTS, NEEDS_A_GATE
from attack.random_language import (
    WITHOUT_POSITIONS,
    draw_language,
    draw_policy,
    draw_rows,
    freeze,
    unfreeze,
)
from kondo.lm import head as head_module
from lm import models
from oracles import causal, core
from steps import run_step
from tolerances import TOLERANCES

KINDS = (*random_gates.KINDS, "budget", "budget", "dense", "dense")
LOSSES = {
    "pg": {},
    "dg": {"eta": 0.7},
    "ppo": {"clip": 0.2, "beta": 0.1},
    "pmpo": {"alpha": 0.4, "gamma": 1e-3, "beta": 0.1},
    "is_pg": {"max_weight": 1.5},
    "awr": {"beta": 0.8, "max_weight": 3.0},
}
OTHER = {"ppo": "old_log_probs", "pmpo": "old_log_probs", "is_pg": "behaviour_log_probs"}


@dataclasses.dataclass(kw_only=True)
class Case:
    """One step, and what the oracle needs of it."""

    language: object
    lm: object
    policy: object
    rows: object
    given: dict
    """Arguments of `kondo.backward` beside policy and rows."""
    advantages: torch.Tensor
    gate: dict | None
    unit: str
    loss: str
    mask: torch.Tensor
    """[N, S] bool, what counts."""
    screen: torch.Tensor
    """[N, S], what the gate's signal is made of."""
    seen: list
    screened_in: torch.dtype
    """The narrowest that the screen was computed in."""


def draw_advantages(draw, shape, dtype):
    numbers = draw.choice(((-1.0, 0.0, 0.5, 2.0), None, None, (0.0,), (1.0,), (-1.0, -2.0)))
    flat = [draw.gauss(0, 1) if numbers is None else draw.choice(numbers) for _ in range(shape[0])]
    rows = torch.tensor(flat, dtype=dtype)
    if len(shape) == 1:
        return rows
    if draw.random() < 0.3:
        return rows[:, None].expand(shape).contiguous()
    flat = [draw.choice((0.0, draw.gauss(0, 1), draw.gauss(0, 1))) for _ in range(math.prod(shape))]
    return torch.tensor(flat, dtype=dtype).view(shape)


def aligned(model, rows, temperature, one_by_one):
    """Return the log-probs of all rows, with a graph, [N, S].

    Rows are moved to the left and padded on the right: what follows a token cannot matter.
    """
    ids, real, sampled = models.inside(rows)
    if one_by_one and rows.position_ids is None:
        return causal.one_by_one(model, ids, real, sampled, temperature)
    # Real tokens first, in their order.
    order = (~real).byte().argsort(dim=1, stable=True)
    moved, there = ids.gather(1, order), real.gather(1, order)
    options = {}
    if rows.position_ids is not None:
        options = {"position_ids": rows.position_ids.gather(1, order), "attention_mask": there}
    logits = model(input_ids=torch.where(there, moved, 0), use_cache=False, **options).logits
    found = causal.token_log_probs(logits, moved, sampled.gather(1, order), temperature)
    return torch.zeros_like(found).scatter(1, order, found)


def draw_case(draw):
    language = draw_language(draw)
    lm, policy = draw_policy(draw, language)
    rows = draw_rows(draw, language)
    shape, dtype = rows.input_ids.shape, next(language.model.parameters()).dtype
    unit = draw.choice(("sequence", "token"))
    kind = draw.choice(KINDS)
    spec = None if kind == "dense" else random_gates.draw_gate(draw, (kind,))
    per_row = spec is not None and spec["signal"] == "advantage" and unit == "sequence"
    of_rows = per_row or draw.random() < 0.6
    advantages = draw_advantages(draw, shape[:1] if of_rows else shape, dtype)
    given, mask, seen = {"gate": None}, rows.completion_mask, []
    if spec is not None:
        given["gate"] = random_gates.make(spec, seen)
    if draw.random() < 0.3:
        of_tokens = [[draw.random() < 0.6 for _ in range(shape[1])] for _ in range(shape[0])]
        narrower = torch.tensor(of_tokens)
        given["mask"] = draw.choice((narrower, narrower, narrower[:, 0], narrower[:, :1]))
        mask = mask & given["mask"].view(shape[0], -1)
    if unit == "token" or draw.random() < 0.5:
        given["unit"] = unit
    draw_options(draw, given)
    with torch.no_grad():
        exact = aligned(language.model, rows, lm.temperature, one_by_one=False)
    loss = draw.choice(tuple(LOSSES))
    given["loss"] = functools.partial(getattr(kondo.losses, loss), **LOSSES[loss])
    if loss in OTHER:
        noise = torch.tensor([[draw.gauss(0, 0.3) for _ in row] for row in mask.tolist()])
        given["loss_inputs"] = {OTHER[loss]: (exact + noise).to(dtype)}
    case = Case(
        language=language, lm=lm, policy=policy, rows=rows, given=given, advantages=advantages,
        gate=spec, unit=unit, loss=loss, mask=mask, screen=exact, seen=seen,
        screened_in=language.dtype,
    )  # fmt: skip
    draw_screen(draw, case)
    draw_seam(draw, case)
    return case


def draw_options(draw, given):
    """What changes nothing but how the work is cut up, and the denominator."""
    given["micro_batch"] = draw.choice((None, None, 1, 2, 3))
    given["screen_chunk"] = draw.choice((None, None, 1, 2))
    given["screen_rows"] = draw.choice((None, "all", "promising"))
    given["denominator"] = draw.choice(("full", "full", "kept", 3.5))
    given["generator"] = torch.Generator().manual_seed(draw.randrange(1000))


def draw_screen(draw, case):
    """Log-probs that exist already, right or stale, or a draft; `case.screen` is what it says."""
    if case.gate is None or draw.random() < 0.4:
        return
    sampled, kind = case.rows.completion_mask, draw.choice(("draft", "exact", "stale"))
    if kind == "draft":
        other = draw_language(draw)
        if case.rows.position_ids is not None and other.kind in WITHOUT_POSITIONS:
            return
        lm, draft = draw_policy(draw, other)
        case.given["screen"] = lm.log_prob if draft is lm else draft
        case.screened_in = other.dtype
        with torch.no_grad():
            case.screen = aligned(other.model, case.rows, lm.temperature, one_by_one=False)
        return
    if kind == "stale":
        stale = [[-abs(draw.gauss(0, 1)) - 1e-3 for _ in row] for row in sampled.tolist()]
        case.screen = torch.where(sampled, torch.tensor(stale).to(case.screen.dtype), 0.0)
    beside = torch.full_like(case.screen, draw.choice((0.0, -1.0, 7.0)))
    case.given["screen"] = torch.where(sampled, case.screen, beside)


def draw_seam(draw, case):
    """Sometimes give the step a plain function, and its compaction beside it."""
    if case.policy is case.lm and draw.random() < 0.15:
        case.policy = case.lm.log_prob
        case.given |= {"mask": case.mask, "unit": case.unit}
        if draw.random() < 0.6:
            case.given["compact"] = case.lm.compact
        if (case.gate or {}).get("kind") == "budget":
            case.given["gate"] = case.given["gate"].for_rows(case.rows)


@contextlib.contextmanager
def small_chunks(draw):
    """Let the head make logits of a few tokens at a time."""
    before = head_module.CHUNK_BYTES
    head_module.CHUNK_BYTES = draw.choice((before, before, 4 * models.VOCAB * draw.randint(1, 5)))
    try:
        yield
    finally:
        head_module.CHUNK_BYTES = before


def expected_loss(case, log_probs, keep, weight):
    """Return the dense masked loss, with its gradient, and its value."""
    spread = case.advantages
    spread = spread[:, None].expand(log_probs.shape) if spread.ndim == 1 else spread
    inputs = [log_probs, spread, *case.given.get("loss_inputs", {}).values()]
    if case.loss == "pmpo":
        inputs = inputs[:3]
    values, slopes = core.elementwise(getattr(core, case.loss), *inputs, **LOSSES[case.loss])
    number = {"full": int(case.mask.sum()), "kept": int(keep.sum())}
    asked = case.given["denominator"]
    denominator = max(1.0, number[asked]) if isinstance(asked, str) else asked
    factor = torch.where(keep, weight.double(), 0.0) / denominator
    graph = (torch.where(keep, factor * slopes, 0.0) * log_probs.double()).sum()
    return graph, float(torch.where(keep, factor * values, 0.0).sum())


def kept_elements(case):
    """Return which tokens were kept, and their weights; hold the choice to its oracle."""
    if case.gate is None:
        return case.mask, torch.ones_like(case.mask, dtype=torch.float64), int(case.mask.sum())
    ((values, counted, choice),) = case.seen
    signal = case.gate["signal"]
    worth, counts = random_gates.unit_values(
        signal, case.screen, case.advantages, case.mask, case.unit
    )
    assert counted.flatten().tolist() == counts
    wide = torch.float64 in (values.dtype, case.screened_in) and case.screened_in != torch.float32
    slack = 1e-9 if wide else 1e-4
    for ours, theirs in zip(values.flatten().tolist(), worth, strict=True):
        # A row that was not screened is shown as 0, where it could not be kept.
        unseen = ours == 0 and theirs <= slack
        assert unseen or abs(ours - theirs) <= slack * max(1.0, abs(theirs)), (ours, theirs)
    keep, weight = choice.keep, choice.weight.double()
    random_gates.judge(
        case.gate,
        worth,
        counts,
        keep.flatten().tolist(),
        weight.flatten().tolist(),
        float(choice.price),
        slack,
    )
    if case.gate["kind"] == "budget":
        rows = (case.rows.attention_mask, case.rows.completion_mask)
        random_gates.judge_budget(case.gate, worth, keep, case.mask, rows, slack)
    number = int(keep.sum())
    if case.unit == "sequence":
        keep, weight = keep[:, None] & case.mask, weight[:, None].expand(case.mask.shape)
    # A function is shown units in one dimension.
    return keep.reshape(case.mask.shape), weight.reshape(case.mask.shape), number


def compare(case, report, before, log_probs, keep, weight, number):
    """Hold gradients, loss and counts to the oracle's."""
    graph, value = expected_loss(case, log_probs, keep, weight)
    named = {n: p for n, p in case.language.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(graph, list(named.values()), allow_unused=True)
    tolerance = TOLERANCES[case.language.dtype]
    wanted = dict(zip(named, found, strict=True))
    largest = max([1.0, *(float(g.abs().max()) for g in found if g is not None)])
    limit = 10 * (tolerance["atol"] + tolerance["rtol"] * largest)
    for name, parameter in case.language.model.named_parameters():
        grad, (old, _) = parameter.grad, before[name]
        if number == 0 or not parameter.requires_grad:
            assert grad is old if old is None else torch.equal(grad, old), name
            continue
        extra = torch.zeros_like(parameter) if grad is None else grad - (0 if old is None else old)
        target = torch.zeros_like(parameter) if wanted[name] is None else wanted[name]
        error = float((extra - target).abs().max())
        assert error <= limit, f"{name}: {error} > {limit}"
    assert abs(report.loss - value) <= limit * max(1.0, abs(value)), (report.loss, value)
    assert report.kept == number
    assert report.empty == (number == 0)
    assert report.tokens_seen == int(case.mask.sum())
    assert report.rows_seen == len(case.mask)
    assert report.rows_trained == int(keep.any(1).sum())
    if "screen" in case.given and not callable(case.given["screen"]):
        assert report.rows_screened == 0


def state_of(model):
    """Return gradients, flags and modes: what a refused step must leave alone."""
    return {
        name: (None if p.grad is None else p.grad.clone(), p.requires_grad)
        for name, p in model.named_parameters()
    }, [module.training for module in model.modules()]


def assert_untouched(model, before):
    gradients, modes = before
    assert modes == [module.training for module in model.modules()]
    for name, parameter in model.named_parameters():
        old, needed = gradients[name]
        assert parameter.requires_grad == needed
        same = parameter.grad is None if old is None else torch.equal(parameter.grad, old)
        assert same, f"{name}: the gradient of a refused step is not that before it"


def prepare(draw, model):
    """Freeze some of the model, put it into some mode, and give it gradients to add to."""
    freeze(draw, model)
    model.train(draw.random() < 0.5)  # there is no dropout in it
    if draw.random() < 0.2:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    return state_of(model)


def step(draw, counts):
    """One step that must be right."""
    case = draw_case(draw)
    model = case.language.model
    try:
        before = prepare(draw, model)
        log_probs = aligned(model, case.rows, case.lm.temperature, draw.random() < 0.2)
        with small_chunks(draw):
            report = run_step(case.policy, case.rows, case.advantages, **case.given)
        keep, weight, number = kept_elements(case)
        compare(case, report, before[0], log_probs, keep, weight, number)
        assert before[1] == [module.training for module in model.modules()]
    finally:
        unfreeze(model)
    counts["steps"] += 1
    counts["empty" if number == 0 else "kept"] += 1


def fault(draw, counts):
    """One step that must be refused, and leave nothing behind."""
    case, spoil = draw_case(draw), draw.choice(tuple(FAULTS))
    if case.policy is not case.lm or not bool(case.mask.any()):
        return
    if case.gate is None and spoil in NEEDS_A_GATE:
        case.given["gate"] = kondo.Gate(rate=0.5)
    spoil(draw, case)
    model = case.language.model
    try:
        before = prepare(draw, model)
        try:
            run_step(case.policy, case.rows, case.advantages, **case.given)
        except ValueError as error:
            message = str(error)
        else:
            raise AssertionError(f"{spoil.__name__} was not refused")
        assert re.search(FAULTS[spoil], message), f"{spoil.__name__}: {message}"
        assert_untouched(model, before)
    finally:
        unfreeze(model)
    counts["faults"] += 1


def case(draw, counts):
    """A step, or now and then a fault."""
    (fault if draw.random() < 0.15 else step)(draw, counts)


def test_language_models(campaign):
    campaign.run(case)
