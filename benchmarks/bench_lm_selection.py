"""What a budget of tokens buys, and what a cheaper screen costs: delight, cosine, agreement, time.

    python benchmarks/bench_lm_selection.py [--device cuda] [--models reversal] [--quick --out F]

    synthetic   heavy-tailed delight on rows of realistic lengths; selection alone
    reversal    a small transformer, trained a little here; selection, whole steps, and screens
    qwen2-0.5b  random weights, bfloat16, CUDA only; screens

Selections are compared at equal tokens trained: the plain ones keep as much as the budget holds.
A CSV line is one of `harness.Row` with the columns of `Line` after it.
"""

import argparse
import copy
import csv
import dataclasses
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Some virtual machines advertise AMX and then trap on it. Must be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor

import kondo
import kondo.lm
from harness import Row, environment, peak_bytes_cpu, peak_bytes_cuda, percentile, synchronise
from kondo.lm import BudgetGate, CausalLM, TokenRows
from kondo_lab.models import drafts

BUDGETS = (0.01, 0.03, 0.1, 0.3)
SCREEN_RATE = 0.1
MODELS = ("synthetic", "reversal", "qwen2-0.5b")
DATA = Path(__file__).resolve().parent / "data"
LogProb = Callable[[TokenRows], Tensor]
GROUP = 8
"""Completions of one prompt."""

Keep = Callable[[int], Tensor]
Unit = Literal["token", "sequence"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(Row):
    """A line of the CSV. For selections `rate` is the budget, for screens the gate's rate.

    Speed-ups compare with plain top tokens where selection alone is timed, with the dense step
    where steps are, and with the exact screen where screens are.
    """

    tokens_trained: int
    """Prompts and prefixes included; all tokens for a screen."""
    delight_bought: float | None
    """Selections: kept delight / all positive delight, mean over batches. Screens: exact delight
    of what they keep / that of what the exact screen keeps."""
    cosine: float | None
    """Selections: to the dense gradient, mean over batches. Screens: to the gated gradient of the
    exact screen."""
    overlap: float | None
    """Screens: |A & B| / |A | B| of the kept sets."""
    recall: float | None
    """Screens: |A & B| / |B|."""
    gap: float | None
    """Budget gates: share of the optimum that may have been missed."""


class Batch(NamedTuple):
    """What a selection looks at. N rows of S tokens."""

    rows: TokenRows
    advantages: Tensor
    """[N]."""
    log_probs: Tensor
    """[N, S], exact."""
    delight: Tensor
    """[N, S]."""

    @property
    def num_tokens(self) -> int:
        """Real tokens, prompts included."""
        return int(self.rows.attention_mask.sum())


def batch_of(rows: TokenRows, advantages: Tensor, log_probs: Tensor) -> Batch:
    delight = kondo.delight(log_probs, advantages, mask=rows.completion_mask)
    return Batch(rows, advantages, log_probs, delight)


@torch.no_grad()
def log_probs_of(policy: LogProb, rows: TokenRows) -> Tensor:
    """Return the log-probs of all rows, [N, S], without a graph."""
    return policy(rows)


class Choice(NamedTuple):
    """One way to select."""

    name: str
    unit: Unit
    gate: Any


# Selections


def tokens_trained(keep: Tensor, rows: TokenRows) -> int:
    """Return the tokens that enter the backward: each row up to its last kept token."""
    places = rows.attention_mask.cumsum(1)
    return int(torch.where(keep, places, 0).amax(1).sum())


def most_within(keep: Keep, most: int, rows: TokenRows, capacity: int) -> int:
    """Return the largest count whose tokens fit; `keep` of a larger count drags in no fewer."""
    fits, too_many = 0, most + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if tokens_trained(keep(count), rows) <= capacity:
            fits = count
        else:
            too_many = count
    return fits


def choices(batch: Batch, budget: float) -> list[Choice]:
    """Return the budget gate, plain top-rate and random rows, for tokens and sequences."""
    rows, delight, mask = batch.rows, batch.delight, batch.rows.completion_mask
    capacity = int(budget * batch.num_tokens + 1e-9)
    by_row, size = delight.sum(1), delight.shape[0]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).to(delight.device)

    def top_tokens(count: int) -> Tensor:
        return kondo.Gate(rate=count / int(mask.sum()))(delight, mask).keep

    def top_rows(count: int) -> Tensor:
        return kondo.Gate(rate=count / size)(by_row).keep.unsqueeze(1) & mask

    def random_rows(count: int) -> Tensor:
        return (
            torch.isin(torch.arange(size, device=order.device), order[:count]).unsqueeze(1) & mask
        )

    bound = BudgetGate(budget=budget).for_rows(rows)
    found = [
        Choice("budget", "token", bound),
        Choice("budget", "sequence", bound),
    ]
    if count := most_within(top_tokens, int(mask.sum()), rows, capacity):
        found.append(Choice("top", "token", kondo.Gate(rate=count / int(mask.sum()))))
    if count := most_within(top_rows, size, rows, capacity):
        found.append(Choice("top", "sequence", kondo.Gate(rate=count / size)))
    if count := most_within(random_rows, size, rows, capacity):
        chosen = random_rows(count).any(1)
        found.append(Choice("random", "sequence", kondo.Choice.of(chosen)))
    return found


def keep_of(choice: Choice, batch: Batch) -> Tensor:
    """Return the tokens a choice keeps, bool [N, S]."""
    selection = kondo.select(
        batch.log_probs,
        batch.advantages,
        gate=choice.gate,
        mask=batch.rows.completion_mask,
        unit=choice.unit,
    )
    return selection.elements.keep


def selection_numbers(choice: Choice, batch: Batch) -> dict[str, Any]:
    """Return what a choice trains and buys."""
    keep, delight = keep_of(choice, batch), batch.delight
    return {
        "rows_differentiated": int(keep.any(1).sum()),
        "tokens_trained": tokens_trained(keep, batch.rows),
        "delight_bought": float(delight[keep].sum() / delight.clamp_min(0).sum()),
        "gap": choice.gate.purchase.gap if isinstance(choice.gate, BudgetGate) else None,
    }


# Workloads


def synthetic(num_rows: int, width: int, device: torch.device) -> Batch:
    """Return delight as language models have it, without a model.

    Lengths are log-normal; most tokens are nearly certain and few carry most of the surprise; one
    reward of 0 or 1 per completion, centred on its group of eight.
    """
    draws = torch.Generator().manual_seed(0)
    prompts = _lognormal(num_rows // GROUP, width / 10, 0.5, draws).repeat_interleave(GROUP)
    lengths = _lognormal(num_rows, width / 3, 0.7, draws)
    prompt_width = max(8, width // 4)
    prompts = prompts.clamp(4, prompt_width).unsqueeze(1)
    lengths = lengths.clamp(4, width - prompt_width).unsqueeze(1)
    rows = TokenRows.join(
        torch.zeros(num_rows, prompt_width, dtype=torch.long),
        torch.arange(prompt_width) >= prompt_width - prompts,
        torch.zeros(num_rows, width - prompt_width, dtype=torch.long),
        torch.arange(width - prompt_width) < lengths,
    )
    noise = torch.randn(rows.input_ids.shape, generator=draws)
    surprisal = torch.exp(2.0 * noise - 3.0).clamp_max(15.0)
    solved = torch.rand(num_rows // GROUP, generator=draws).repeat_interleave(GROUP)
    rewards = (torch.rand(num_rows, generator=draws) < solved).float()
    advantages = kondo.advantage.group_mean(rewards, GROUP)
    log_probs = torch.where(rows.completion_mask, -surprisal, 0.0)
    return batch_of(_rows_to(rows, device), advantages.to(device), log_probs.to(device))


def _lognormal(count: int, median: float, spread: float, draws: torch.Generator) -> Tensor:
    return (median * torch.exp(spread * torch.randn(count, generator=draws))).long()


def _rows_to(rows: TokenRows, device: torch.device) -> TokenRows:
    return TokenRows(
        input_ids=rows.input_ids.to(device),
        attention_mask=rows.attention_mask.to(device),
        completion_mask=rows.completion_mask.to(device),
    )


# The reversal task: digits and a separator, then the digits backwards and an end.
DIGITS, SEPARATOR, END = 10, 10, 11


def transformer(num_layers: int, width: int, device: torch.device, seed: int) -> CausalLM:
    """Return a small Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    build: Any = AutoModelForCausalLM.from_config
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = build(config)
    return CausalLM(model.to(device))


def prompts_of(count: int, longest: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return prompts padded on the left, [count, longest + 1], and their masks."""
    lengths = torch.randint(4, longest + 1, (count, 1), generator=draws)
    ids = torch.randint(DIGITS, (count, longest + 1), generator=draws)
    ids[:, -1] = SEPARATOR
    return ids, torch.arange(longest + 1) >= longest - lengths


def answers_to(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the right completions, padded on the right, and their masks."""
    digits = mask[:, :-1]
    count = digits.sum(1, keepdim=True)
    places = torch.arange(ids.shape[1])
    answers = ids.clone()
    answers[:, :-1] = ids[:, :-1].flip(1)
    answers.scatter_(1, count, END)
    return answers, places <= count


def imitate(lm: CausalLM, steps: int, longest: int, *, seed: int, rate: float = 2e-3) -> None:
    """Train a little on right answers."""
    draws, device = torch.Generator().manual_seed(seed), lm.device
    optimiser = torch.optim.AdamW(lm.module.parameters(), lr=rate)
    for step in range(steps):
        prompts, mask = prompts_of(64, longest, draws)
        rows = _rows_to(TokenRows.join(prompts, mask, *answers_to(prompts, mask)), device)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        optimiser.zero_grad(set_to_none=True)
        loss = -lm.log_prob(rows).sum() / rows.completion_mask.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@torch.no_grad()
def rollout(lm: CausalLM, num_rows: int, longest: int, *, seed: int) -> tuple[TokenRows, Tensor]:
    """Sample completions, eight a prompt; return rows and centred advantages.

    The reward is the share of the answer that stands in its place.
    """
    draws = torch.Generator().manual_seed(seed)
    prompts, mask = prompts_of(num_rows // GROUP, longest, draws)
    prompts, mask = prompts.repeat_interleave(GROUP, 0), mask.repeat_interleave(GROUP, 0)
    answers, wanted = answers_to(prompts, mask)
    ids, positions = prompts, mask.long().cumsum(1).sub(1).clamp_min(0)
    attention, alive = mask, torch.ones(num_rows, dtype=torch.bool)
    taken = []
    for _ in range(longest + 1):
        logits = lm.module(
            input_ids=ids.to(lm.device),
            attention_mask=attention.to(lm.device),
            position_ids=positions.to(lm.device),
        ).logits[:, -1]
        probs = logits.float().softmax(-1).cpu()
        token = torch.multinomial(probs, 1, generator=draws)
        taken.append(alive)
        alive = alive & (token.squeeze(1) != END)
        ids = torch.cat([ids, token], 1)
        attention = torch.cat([attention, taken[-1].unsqueeze(1)], 1)
        positions = torch.cat([positions, positions[:, -1:] + 1], 1)
    completions, sampled = ids[:, prompts.shape[1] :], torch.stack(taken, 1)
    right = (completions == answers) & sampled & wanted
    rewards = right.sum(1) / torch.maximum(sampled.sum(1), wanted.sum(1))
    rows = TokenRows.join(prompts, mask, completions, sampled)
    advantages = kondo.advantage.group_mean(rewards.float(), GROUP)
    return _rows_to(rows, lm.device), advantages.to(lm.device)


# Measuring


class Cost(NamedTuple):
    """Seconds of each round, and the peak of one call."""

    seconds: list[float]
    peak_memory_mb: float


def measure(calls: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[Cost]:
    """Run every call in every round, in an order drawn anew."""
    find_peak = peak_bytes_cuda if device.type == "cuda" else peak_bytes_cpu
    peaks = [find_peak(call, ())[0] / 2**20 for call in calls]  # also warms up
    seconds: list[list[float]] = [[] for _ in calls]
    turns, shuffle = list(range(len(calls))), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(turns)
        for turn in turns:
            synchronise(device)
            start = time.perf_counter()
            calls[turn]()
            synchronise(device)
            seconds[turn].append(time.perf_counter() - start)
    return [Cost(*pair) for pair in zip(seconds, peaks, strict=True)]


def line(cost: Cost, baseline: Cost, shared: dict[str, Any], **own: Any) -> Line:
    """Return a CSV line; what is not given is empty."""
    times = [1e3 * spent for spent in cost.seconds]
    ratios = [base / spent for base, spent in zip(baseline.seconds, cost.seconds, strict=True)]
    empty: dict[str, Any] = dict.fromkeys(("delight_bought", "cosine", "overlap", "recall", "gap"))
    return Line(
        benchmark="lm_selection",
        step_ms_p20=percentile(times, 0.2),
        step_ms_p50=percentile(times, 0.5),
        step_ms_p80=percentile(times, 0.8),
        speedup_p20=percentile(ratios, 0.2),
        speedup_p50=percentile(ratios, 0.5),
        speedup_p80=percentile(ratios, 0.8),
        limit=None,
        share_of_limit=None,
        gate_overhead=None,
        stages="",
        peak_memory_mb=cost.peak_memory_mb,
        repeats=len(times),
        **(empty | shared | own),
    )


def bench_selection(batch: Batch, repeats: int, shared: dict[str, Any]) -> Iterator[Line]:
    """Compare selections on delight alone; the time is that of `kondo.select`."""
    device = batch.log_probs.device
    for budget in BUDGETS:
        found = choices(batch, budget)
        costs = measure([partial(keep_of, choice, batch) for choice in found], repeats, device)
        plain = next(
            cost
            for cost, choice in zip(costs, found, strict=True)
            if (choice.name, choice.unit) == ("top", "token")
        )
        for choice, cost in zip(found, costs, strict=True):
            yield line(
                cost,
                plain,
                shared,
                contender=f"select/{choice.name}",
                unit=choice.unit,
                rate=budget,
                **selection_numbers(choice, batch),
            )


def bench_steps(
    lm: CausalLM, batches: Sequence[Batch], repeats: int, shared: dict[str, Any]
) -> Iterator[Line]:
    """Compare whole steps with a free screen: time, and cosine to the dense gradient.

    The first batch is timed and counted; delight and cosine are means over all batches, since the
    few rows of a low budget make one batch a matter of luck.
    """

    def step(batch: Batch, choice: Choice) -> kondo.Report:
        lm.module.zero_grad(set_to_none=True)
        return kondo.backward(
            lm,
            batch.rows,
            batch.advantages,
            gate=choice.gate,
            unit=choice.unit,
            screen=batch.log_probs,
        )

    def gradient(batch: Batch, choice: Choice) -> list[Tensor | None]:
        with drafts.fresh_gradients(lm) as gradients:
            step(batch, choice)
            return gradients()

    dense = (1.0, Choice("dense", "token", kondo.Gate(price=-torch.inf)))
    quality: dict[tuple[float, str, str], list[dict[str, Any]]] = {}
    found: list[tuple[float, Choice]] = []
    for batch in batches:
        contenders = [dense, *((b, choice) for b in BUDGETS for choice in choices(batch, b))]
        true = gradient(batch, dense[1])
        for budget, choice in contenders:
            numbers = selection_numbers(choice, batch)
            numbers["cosine"] = drafts.cosine(gradient(batch, choice), true)
            quality.setdefault((budget, choice.name, choice.unit), []).append(numbers)
        found = found or contenders
    calls = [partial(step, batches[0], choice) for _, choice in found]
    costs = measure(calls, repeats, lm.device)
    for (budget, choice), cost in zip(found, costs, strict=True):
        seen = quality[budget, choice.name, choice.unit]
        means = {
            name: sum(numbers[name] for numbers in seen) / len(seen)
            for name in ("delight_bought", "cosine")
        }
        yield line(
            cost,
            costs[0],
            shared,
            contender=f"step/{choice.name}",
            unit=choice.unit,
            rate=budget,
            **(seen[0] | means),
        )


def bench_screens(
    lm: CausalLM,
    batch: Batch,
    found: dict[str, Tensor | LogProb],
    repeats: int,
    shared: dict[str, Any],
) -> Iterator[Line]:
    """Compare screens: forward time, agreement of the kept sets, cosine of the gradients."""

    def forward(screen: Tensor | LogProb | None) -> Tensor:
        if isinstance(screen, Tensor):
            return screen
        return log_probs_of(lm.log_prob if screen is None else screen, batch.rows)

    contenders: dict[str, Tensor | LogProb | None] = {"exact": None, **found}
    calls = [partial(forward, screen) for screen in contenders.values()]
    costs = measure(calls, repeats, lm.device)
    gate, mask = kondo.Gate(rate=SCREEN_RATE), batch.rows.completion_mask
    units: tuple[Unit, ...] = ("sequence", "token")
    for unit in units:
        for (name, screen), cost in zip(contenders.items(), costs, strict=True):
            seen = forward(screen)
            alike = drafts.agreement(
                seen, batch.log_probs, batch.advantages, gate=gate, mask=mask, unit=unit
            )
            cosine = drafts.gradient_cosine(
                lm,
                batch.rows,
                batch.advantages,
                screen=seen,
                against=batch.log_probs,
                gate=gate,
                unit=unit,
            )
            yield line(
                cost,
                costs[0],
                shared,
                contender=f"screen/{name}",
                unit=unit,
                rate=SCREEN_RATE,
                rows_differentiated=0,
                tokens_trained=batch.num_tokens,
                delight_bought=alike.delight_share,
                cosine=cosine,
                overlap=alike.overlap,
                recall=alike.recall,
            )


def low_precision(lm: CausalLM) -> dict[str, Tensor | LogProb]:
    """Return the quantised screens this device can do."""
    numbers: list[Any] = ["int8", "fp8"] if lm.device.type == "cuda" else ["int8"]
    backends: list[Any] = ["torch", "torchao"] if importlib.util.find_spec("torchao") else ["torch"]
    if lm.device.type != "cuda":
        print("fp8 is left out: it needs CUDA.")
    if "torchao" not in backends:
        print("torchao is left out: it is not installed.")
    make = {"torch": drafts.quantised, "torchao": by_torchao}
    return {
        f"{number}-{backend}": make[backend](lm, number).log_prob
        for number in numbers
        for backend in backends
    }


def by_torchao(lm: CausalLM, number: drafts.Format) -> CausalLM:
    """Return a copy that torchao has quantised but for its head."""
    quantization = importlib.import_module("torchao.quantization")
    draft = drafts.cached(lm)
    config = {
        "int8": quantization.Int8DynamicActivationInt8WeightConfig,
        "fp8": quantization.Float8DynamicActivationFloat8WeightConfig,
    }[number]
    # It would otherwise change torch.compile's settings for the whole process.
    settings = config(granularity=quantization.PerRow(), set_inductor_config=False)
    quantization.quantize_(draft.backbone, settings)
    return draft


def sampler_log_probs(lm: CausalLM, rows: TokenRows) -> Tensor:
    """Return what a bfloat16 sampler with the same weights would have recorded."""
    half = copy.deepcopy(lm)
    half.module.to(torch.bfloat16)
    return log_probs_of(half.log_prob, rows)


def describe(batch: Batch, **words: Any) -> dict[str, Any]:
    num_rows, width = batch.rows.input_ids.shape
    return {
        "config": ", ".join(f"{value}" for value in (f"{num_rows} x {width}", *words.values())),
        "rows": num_rows,
        "tokens": batch.num_tokens,
    }


def run_synthetic(options: argparse.Namespace, where: dict[str, Any]) -> Iterator[Line]:
    """Selections on 1024 rows of 1024 tokens."""
    batch = synthetic(64 if options.quick else 1024, 64 if options.quick else 1024, options.device)
    shared = where | describe(batch) | {"model": "synthetic"}
    yield from bench_selection(batch, options.repeats, shared)


def run_reversal(options: argparse.Namespace, where: dict[str, Any]) -> Iterator[Line]:
    """Train a little, sample, and compare selections, steps and screens on what came."""
    steps, num_rows, longest = (5, 32, 8) if options.quick else (250, 256, 24)
    layers, width = (2, 32) if options.quick else (4, 64)
    lm = transformer(layers, width, options.device, seed=0)
    imitate(lm, steps, longest, seed=0)
    small = transformer(1, width // 2, options.device, seed=1)
    imitate(small, steps, longest, seed=1)
    stale = {"stale-10": drafts.cached(lm).log_prob}
    imitate(lm, 7, longest, seed=2, rate=5e-4)
    stale["stale-3"] = drafts.cached(lm).log_prob
    imitate(lm, 3, longest, seed=3, rate=5e-4)
    batches = []
    for seed in range(2 if options.quick else 4):
        rows, advantages = rollout(lm, num_rows, longest, seed=4 + seed)
        batches.append(batch_of(rows, advantages, log_probs_of(lm.log_prob, rows)))
    batch = batches[0]
    words = {"size": f"{layers} layers of {width}", "trained": f"{steps} steps", "dtype": "float32"}
    shared = where | describe(batch, **words) | {"model": "reversal"}
    yield from bench_steps(lm, batches, options.repeats, shared)
    found: dict[str, Tensor | LogProb] = {
        "rollout-bfloat16": sampler_log_probs(lm, batch.rows),
        **stale,
        **low_precision(lm),
        **{f"truncated-{k}": drafts.truncated(lm, k) for k in range(1, layers)},
        "draft": small.log_prob,
    }
    yield from bench_screens(lm, batch, found, options.repeats, shared)


def run_qwen(options: argparse.Namespace, where: dict[str, Any]) -> Iterator[Line]:
    """Screens of a model of real size. Its weights are random, so its agreement is pessimistic."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(  # Qwen2-0.5B
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    build: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    with torch.device(options.device):
        model = build(config, dtype=torch.bfloat16)
    lm = CausalLM(model)
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (128, 1024), generator=draws)
    place = torch.arange(1024).expand(128, 1024)
    rows = TokenRows(input_ids=ids, attention_mask=place >= 0, completion_mask=place >= 128)
    rows = _rows_to(rows, options.device)
    advantages = torch.randn(128, generator=draws).to(options.device)
    batch = batch_of(rows, advantages, log_probs_of(lm.log_prob, rows))
    shared = where | describe(batch, weights="random", dtype="bfloat16") | {"model": "qwen2-0.5b"}
    found = low_precision(lm) | {f"truncated-{k}": drafts.truncated(lm, k) for k in (6, 12, 18)}
    yield from bench_screens(lm, batch, found, options.repeats, shared)


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """Write lines under the schema and its further columns, numbers to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        names = [field.name for field in dataclasses.fields(Line)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for each in lines:
            cells = dataclasses.asdict(each)
            writer.writerow(
                {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells.items()}
            )


def print_line(each: Line) -> None:
    numbers = {
        "trained": each.tokens_trained / each.tokens,
        "delight": each.delight_bought,
        "cosine": each.cosine,
        "overlap": each.overlap,
        "recall": each.recall,
        "gap": each.gap,
    }
    shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items() if value is not None)
    print(
        f"{each.contender:<26}{each.unit:<10}{each.rate:>6.0%}{each.step_ms_p50:>10.1f} ms"
        f"{each.speedup_p50:>8.2f}x  {shown}",
        flush=True,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--out", type=Path, help="CSV; default: data/lm_selection_<device>.csv")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="toy sizes; needs --out")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers must not replace the real ones.")
    on_cuda = options.device.type == "cuda"
    options.models = options.models or (MODELS if on_cuda and not options.quick else MODELS[:2])
    if "qwen2-0.5b" in options.models and not on_cuda:
        parser.error("qwen2-0.5b needs --device cuda.")
    options.out = options.out or DATA / f"lm_selection_{options.device.type}.csv"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write the CSV."""
    options = parse(arguments)
    where = environment(options.device, options.commit)
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    runs = {"synthetic": run_synthetic, "reversal": run_reversal, "qwen2-0.5b": run_qwen}
    lines: list[Line] = []
    for model in options.models:
        print(f"\n{model}")
        for each in runs[model](options, where):
            print_line(each)
            lines.append(each)
        write_csv(options.out, lines)  # after each model, so that an interrupted run leaves some
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
