"""One learner step of a language model, timed: plain, the best dense, and ours by rate and screen.

    python benchmarks/bench_lm_step.py --device cuda [--models qwen2-0.5b] [--rows 128 256 1024]
    python benchmarks/bench_lm_step.py --quick --out FOLDER      # does it run? seconds, on a CPU

    plain    logits of every position, log_softmax, gather, backward: a user without kondo
    trl      TRL's own log-probs (completion only, logits of a micro-batch materialised)
    dense    the best dense: our head, our packing, our compiled layers; nothing is skipped
    free     ours, the sampler's log-probs are the screen
    exact    ours, a forward without a graph is the screen, of rows with a positive advantage
    all      the same, of all rows
    fp8      ours, a float8 copy of the model is the screen, of rows with a positive advantage

A step is zero_grad and everything up to gradients in `.grad`; the optimiser costs all the same.
Speed-ups are over `dense`. Before anything is timed, gradients of few rows are compared with those
of the plain masked loss; a wrong one ends the run. Tokens that enter a forward with a graph are
counted at the backbone's door, not taken from the report. Peak memory is that of a step that
allocates everything it needs: without CUDA graphs, which keep theirs from step to step.
"""

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import kondo
from harness import Row, environment, percentile, synchronise, write_csv
from kondo.lm.graphs import shape_of
from kondo.lm.pack import Pack, packs
from kondo_lab.models.drafts import agreement, quantised
from lm_workloads import QUICK, SHAPES, LmWorkload, build_batch, build_model

ROOT = Path(__file__).resolve().parent.parent
RATES = (1.0, 3.0, 10.0, 30.0)
ROWS = (128, 256, 1024)
PLAIN, TRL, DENSE, FORWARD = "plain", "trl", "dense", "forward"
FREE, EXACT, ALL, FP8 = "free", "exact", "all", "fp8"
OURS = (FREE, EXACT, ALL, FP8)
SEED_OF_ORDER = 0
Unit = Literal["sequence", "token"]
Screen = Tensor | Callable[[Any], Tensor] | None
TOLERANCE = {torch.bfloat16: 0.08, torch.float32: 1e-4}
"""Relative difference allowed between gradients of the same rows."""
TARGETS = {(FREE, 1024): 30.0, (FREE, 128): 22.0, (FP8, 1024): 3.5}
"""Speed-ups to reach at 3% of the sequences, 0.5B shape, by screen and rows."""
TARGET_SHARE = 0.95
"""Of the cost model's limit, with an exact screen of all rows."""
TARGET_MEMORY = 0.4
"""Of dense, with a free screen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmRow(Row):
    """One line of the CSV: the schema of all benchmarks, and what only tokens have."""

    tokens_kept: int
    """Tokens the gate was asked to train on."""
    tokens_differentiated: int
    """Tokens that entered a forward with a graph: prompts and prefixes included."""
    tokens_per_second: float
    """Tokens seen / step, p50."""
    agreement: float | None
    """Share of the exactly screened kept set that a draft keeps too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the step."""

    name: str
    rate: float
    unit: Unit
    step: Callable[[], kondo.Report | None]
    limited: bool = False
    """Whether the cost model says what it can reach."""
    agreement: float | None = None


@dataclasses.dataclass
class Taken:
    """What was measured of one contender."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    peak: int = 0
    tokens: int = 0
    report: kondo.Report | None = None


def plain_step(work: LmWorkload, keep: Tensor | None = None) -> None:
    """Differentiate the loss over logits of every position, in micro-batches.

    Args:
        work: the workload.
        keep: bool [N, S]: a mask on the loss; all that counts if None.
    """
    rows, denominator = work.rows, work.counted
    wanted = rows.completion_mask if keep is None else keep
    for start in range(0, work.num_rows, work.micro_rows):
        part = slice(start, start + work.micro_rows)
        ids = rows.input_ids[part]
        logits = work.plain(input_ids=ids).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        losses = -log_probs * work.advantages[part, None] * wanted[part, 1:]
        _differentiate(losses.sum() / denominator)


def trl_step(work: LmWorkload, log_softmax: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Differentiate the loss over TRL's log-probs: logits of the completion only."""
    rows, denominator = work.rows, work.counted
    length = rows.input_ids.shape[1] - work.prompt
    for start in range(0, work.num_rows, work.micro_rows):
        part = slice(start, start + work.micro_rows)
        ids = rows.input_ids[part]
        logits = work.plain(
            input_ids=ids, attention_mask=rows.attention_mask[part], logits_to_keep=length + 1
        ).logits[:, :-1]
        log_probs = log_softmax(logits, ids[:, -length:]) * rows.completion_mask[part, -length:]
        _differentiate(-(log_probs * work.advantages[part, None]).sum() / denominator)


def dense_step(work: LmWorkload) -> None:
    """Differentiate everything with our head and our packing: ours without a gate."""
    lm, rows, denominator = work.lm, work.rows, work.counted
    for pack in packs(
        rows, rows.completion_mask, layout=lm.layout, max_tokens=lm.max_tokens, device=lm.device
    ):
        log_probs = lm.log_prob(pack)
        _differentiate(-(log_probs * work.advantages[pack.rows]).sum() / denominator)


def _differentiate(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def forward_step(work: LmWorkload) -> None:
    """Screen exactly, and nothing else: F."""
    with torch.no_grad():
        work.lm.log_prob(work.rows)


def gated_step(
    work: LmWorkload, rate: float, unit: Unit, screen: Screen, *, all_rows: bool = False
) -> kondo.Report:
    """Do the step by `kondo.backward`."""
    return kondo.backward(
        work.lm,
        work.rows,
        work.advantages,
        gate=kondo.Gate(rate=rate),
        unit=unit,
        screen=screen,
        options=kondo.Options(screen_rows="all" if all_rows else "promising"),
    )


def limit(forward: float, screened: float, trained: float) -> float:
    """Return dense / (screened * F + trained * dense), with F as a share of dense.

    Args:
        forward: F / dense.
        screened: share of the rows that a screening forward was made for.
        trained: share of the tokens that were differentiated.
    """
    return 1 / (screened * forward + trained)


def contenders_for(
    work: LmWorkload,
    rates: Sequence[float],
    units: Sequence[Unit],
    wanted: Sequence[str],
    drafts: dict[str, Any],
) -> list[Contender]:
    """Return the baselines and ours; `wanted` names the kinds to run besides dense and F."""
    with torch.no_grad():
        known = work.lm.log_prob(work.rows)
    found = [
        Contender(name=DENSE, rate=1, unit="sequence", step=partial(dense_step, work)),
        Contender(name=FORWARD, rate=1, unit="sequence", step=partial(forward_step, work)),
    ]
    if PLAIN in wanted:
        found.append(Contender(name=PLAIN, rate=1, unit="sequence", step=partial(plain_step, work)))
    if TRL in wanted and (log_softmax := trl_log_softmax()) is not None:
        step = partial(trl_step, work, log_softmax)
        found.append(Contender(name=TRL, rate=1, unit="sequence", step=step))
    ours: dict[str, Screen] = {FREE: known, EXACT: None, ALL: None, **drafts}
    for unit in units:
        for rate in rates:
            for name, screen in ours.items():
                if name not in wanted or (name in drafts and unit == "token"):
                    continue
                found.append(
                    Contender(
                        name=name,
                        rate=rate,
                        unit=unit,
                        step=partial(gated_step, work, rate, unit, screen, all_rows=name == ALL),
                        limited=name not in drafts,
                        agreement=_agreement(work, known, screen, rate) if name in drafts else None,
                    )
                )
    return found


def _agreement(work: LmWorkload, known: Tensor, draft: Any, rate: float) -> float:
    """Return the share of the exact kept sequences that the draft keeps too."""
    return float(
        agreement(
            draft(work.rows),
            known,
            work.advantages,
            gate=kondo.Gate(rate=rate),
            mask=work.rows.completion_mask,
            unit="sequence",
        ).recall
    )


def trl_log_softmax() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return TRL's own function, or None with the reason told."""
    try:
        from trl.trainer.utils import selective_log_softmax
    except ImportError as error:
        print(f"trl is left out: {error}", flush=True)
        return None
    found: Callable[[Tensor, Tensor], Tensor] = selective_log_softmax
    return found


def make_drafts(work: LmWorkload, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the draft screens that this device can make, and tell of those it cannot."""
    if FP8 not in wanted:
        return {}
    try:
        return {FP8: quantised(work.lm, "fp8").log_prob}
    except ValueError as error:
        print(f"fp8 is left out: {error}", flush=True)
        return {}


@contextmanager
def counted_tokens(work: LmWorkload) -> Iterator[list[int]]:
    """Count the tokens that enter a forward with a graph, padding included, in either model."""
    seen, inside = [0], list[Pack]()
    lm, run = work.lm, work.lm._hidden

    def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not inside:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            seen[0] += ids.numel()

    def counted(pack: Pack) -> Tensor:
        if torch.is_grad_enabled():
            graphed = pack.num_tokens <= lm.graph_tokens
            shape = (pack.num_tokens, pack.num_rows, pack.max_length)
            seen[0] += shape_of(*shape).tokens if graphed else pack.num_tokens
        inside.append(pack)  # not to count it again where both models are one
        try:
            return run(pack)
        finally:
            inside.clear()

    hook = work.plain.model.register_forward_pre_hook(count, with_kwargs=True)
    lm._hidden = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        hook.remove()
        del lm._hidden


def warm_up(contender: Contender, work: LmWorkload) -> int:
    """Do the step untimed, and return its peak memory in bytes; then record CUDA graphs, if any."""
    graph_tokens, work.lm.graph_tokens = work.lm.graph_tokens, 0
    cuda = work.advantages.is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    work.plain.zero_grad(set_to_none=True)
    contender.step()
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    work.lm.graph_tokens = graph_tokens
    if graph_tokens and contender.name in OURS:
        work.plain.zero_grad(set_to_none=True)
        contender.step()
    return peak


def measure(contender: Contender, work: LmWorkload, taken: Taken) -> None:
    """Time one step, and count the tokens that it differentiated."""
    device = work.advantages.device
    synchronise(device)
    with counted_tokens(work) as seen:
        start = time.perf_counter()
        work.plain.zero_grad(set_to_none=True)
        taken.report = contender.step()
        synchronise(device)
        taken.seconds.append(time.perf_counter() - start)
    taken.tokens = seen[0]


def check_gradients(work: LmWorkload, units: Sequence[Unit]) -> None:
    """End the run unless our gradient of a few rows is that of the plain masked loss."""
    with torch.no_grad():
        known = work.lm.log_prob(work.rows)
    for unit in units:
        chosen = kondo_keep(work, known, 0.25, unit)
        work.plain.zero_grad(set_to_none=True)
        plain_step(work, chosen)
        expected = [_grad(weight) for weight in work.plain.parameters()]
        for name, screen in ((FREE, known), (EXACT, None), (ALL, None)):
            work.plain.zero_grad(set_to_none=True)
            gated_step(work, 0.25, unit, screen, all_rows=name == ALL)
            error = total = 0.0
            for weight, wanted in zip(work.plain.parameters(), expected, strict=True):
                error += float((_grad(weight) - wanted).square().sum())
                total += float(wanted.square().sum())
            relative = math.sqrt(error / total)
            print(f"gradient of {name}, {unit}: {relative:.1e} from plain masked", flush=True)
            if not relative <= TOLERANCE[next(work.plain.parameters()).dtype]:
                raise SystemExit(f"{work.name}: the gradient is wrong; nothing was timed.")
    work.plain.zero_grad(set_to_none=True)


def kondo_keep(work: LmWorkload, known: Tensor, rate: float, unit: Unit) -> Tensor:
    """Return the kept tokens, bool [N, S], by the gate itself."""
    mask = work.rows.completion_mask
    delight = kondo.delight(known, work.advantages, mask=mask)
    gate = kondo.Gate(rate=rate)
    if unit == "token":
        return gate(delight, mask).keep
    return gate(delight.sum(1)).keep[:, None] & mask


def _grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.detach().float()


def bench(
    work: LmWorkload,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    where: dict[str, Any],
) -> list[LmRow]:
    """Warm all up; then run every contender in every round, in an order drawn anew."""
    samples = [Taken(peak=warm_up(contender, work)) for contender in contenders]
    draw = random.Random(SEED_OF_ORDER)
    turns = list(range(len(contenders)))
    for _ in range(rounds):
        draw.shuffle(turns)
        for index in turns:
            measure(contenders[index], work, samples[index])
    return summarise(work, contenders, samples, where)


def summarise(
    work: LmWorkload,
    contenders: Sequence[Contender],
    samples: Sequence[Taken],
    where: dict[str, Any],
) -> list[LmRow]:
    """Turn samples into CSV lines; ratios are between steps of the same round."""
    dense, forward = samples[0].seconds, samples[1].seconds
    lines = []
    for contender, taken in zip(contenders, samples, strict=True):
        ratios = [whole / spent for whole, spent in zip(dense, taken.seconds, strict=True)]
        share = taken.tokens / work.num_tokens
        report = taken.report
        limits: list[float] = []
        if contender.limited and report and share:
            screened = report.rows_screened / work.num_rows
            limits = [limit(f / d, screened, share) for f, d in zip(forward, dense, strict=True)]
        shares = [ratio / best for ratio, best in zip(ratios, limits, strict=False)]
        times = [1e3 * spent for spent in taken.seconds]
        overhead = (
            (report.seconds["select"] + report.seconds["compact"]) / taken.seconds[-1]
            if report
            else None
        )
        lines.append(
            LmRow(
                benchmark="lm_step",
                model=work.name,
                config=work.config,
                contender=contender.name,
                rate=contender.rate,
                unit=contender.unit,
                rows=work.num_rows,
                tokens=work.num_tokens,
                rows_differentiated=report.rows_trained if report else work.num_rows,
                step_ms_p20=percentile(times, 0.2),
                step_ms_p50=percentile(times, 0.5),
                step_ms_p80=percentile(times, 0.8),
                speedup_p20=percentile(ratios, 0.2),
                speedup_p50=percentile(ratios, 0.5),
                speedup_p80=percentile(ratios, 0.8),
                limit=percentile(limits, 0.5) if limits else None,
                share_of_limit=percentile(shares, 0.5) if shares else None,
                gate_overhead=overhead,
                stages=" ".join(
                    f"{stage}={spent / taken.seconds[-1]:.4f}"
                    for stage, spent in (report.seconds.items() if report else ())
                ),
                peak_memory_mb=taken.peak / 2**20,
                repeats=len(times),
                tokens_kept=_kept_tokens(work, contender, taken),
                tokens_differentiated=taken.tokens,
                tokens_per_second=work.num_tokens / percentile(taken.seconds, 0.5),
                agreement=contender.agreement,
                **where,
            )
        )
    return lines


def _kept_tokens(work: LmWorkload, contender: Contender, taken: Taken) -> int:
    if taken.report is None:
        return 0 if contender.name == FORWARD else int(work.counted)
    if contender.unit == "token":
        return taken.report.kept
    return taken.tokens - taken.report.rows_trained * work.prompt


def print_table(lines: Sequence[LmRow]) -> None:
    """Print one table per workload."""
    first = lines[0]
    print(f"\n{first.model}: {first.config}; {first.repeats} rounds")
    print(
        f"{'contender':<10}{'unit':<10}{'rate':>5}{'tokens kept':>13}{'trained':>10}"
        f"{'speed-up p20/p50/p80':>24}{'limit':>8}{'share':>7}{'peak MB':>9}{'ms p50':>10}"
        f"{'agree':>7}"
    )
    for line in lines:
        spread = f"{line.speedup_p20:.2f} / {line.speedup_p50:.2f} / {line.speedup_p80:.2f}"
        limit = "" if line.limit is None else f"{line.limit:.2f}"
        share = "" if line.share_of_limit is None else f"{line.share_of_limit:.0%}"
        agree = "" if line.agreement is None else f"{line.agreement:.0%}"
        print(
            f"{line.contender:<10}{line.unit:<10}{line.rate:>5.0%}{line.tokens_kept:>13}"
            f"{line.tokens_differentiated:>10}{spread:>24}{limit:>8}{share:>7}"
            f"{line.peak_memory_mb:>9.0f}{line.step_ms_p50:>10.1f}{agree:>7}",
            flush=True,
        )


def print_targets(lines: Sequence[LmRow]) -> None:
    """Print what the 0.5B shape was to reach at 3% of the sequences, and whether it did."""
    print("\nTargets, qwen2-0.5b, 3% of the sequences, p50 over the best dense:")
    for (name, rows), wanted in TARGETS.items():
        for line in lines:
            if (line.model, line.contender, line.rows) == ("qwen2-0.5b", name, rows) and (
                math.isclose(line.rate, 0.03) and line.unit == "sequence"
            ):
                met = "met" if line.speedup_p50 >= wanted else "MISSED"
                print(f"  {name}, {rows} rows: {line.speedup_p50:.1f}x, wanted {wanted}x: {met}")
    dense = {(line.model, line.rows): line for line in lines if line.contender == DENSE}
    for line in lines:
        if not math.isclose(line.rate, 0.03) or line.unit != "sequence":
            continue
        where = f"{line.model}, {line.rows} rows"
        if line.contender == ALL and line.share_of_limit is not None:
            met = "met" if line.share_of_limit >= TARGET_SHARE else "MISSED"
            print(f"  exact screen of all, {where}: {line.share_of_limit:.0%} of its limit: {met}")
        if line.contender == FREE and dense[line.model, line.rows].peak_memory_mb:
            memory = line.peak_memory_mb / dense[line.model, line.rows].peak_memory_mb
            met = "met" if memory <= TARGET_MEMORY else "MISSED"
            print(f"  free screen, {where}: {memory:.0%} of dense memory: {met}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=["qwen2-0.5b"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row, prompt included")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="in percent")
    parser.add_argument("--units", nargs="+", default=["sequence"], choices=("sequence", "token"))
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=(PLAIN, TRL, *OURS),
        default=[PLAIN, TRL, *OURS],
        help="besides dense and its forward",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32_768, help="of a forward")
    parser.add_argument("--micro-rows", type=int, default=8, help="rows where logits exist")
    parser.add_argument("--eager", action="store_true", help="do not compile the decoder layers")
    parser.add_argument(
        "--graph-tokens",
        type=int,
        default=8192,
        help="forwards of at most so many tokens are replayed from CUDA graphs; 0 for none",
    )
    parser.add_argument(
        "--spread",
        action="store_true",
        help="rows of log-normal lengths instead of equal ones; plain and trl pay for the padding",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "lm-step-v1")
    parser.add_argument("--name", default="steps", help="of the CSV, for a run in several calls")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="a tiny model; needs --out")
    options = parser.parse_args(arguments)
    options.compiled = options.device == "cuda" and not options.eager
    if options.device == "cpu":
        options.graph_tokens = 0
    if options.quick:
        if options.out == parser.get_default("out"):
            parser.error("--quick needs --out: its numbers must not replace the real ones.")
        options.rows, options.tokens, options.rounds = [16], 16, 1
        options.models = ["quick"]
        torch.set_num_threads(1)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; write the CSV after each workload, and the manifest."""
    options = parse(arguments)
    device = torch.device(options.device)
    where = environment(device, options.commit)
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    rates = [percent / 100 for percent in options.rates]
    lines: list[LmRow] = []
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.out / f"{options.name}.csv"
    for name in options.models:
        shape = QUICK if options.quick else SHAPES[name]
        plain, lm = build_model(
            shape,
            device,
            max_tokens=options.max_tokens,
            compiled=options.compiled,
            positions=options.tokens,
            graph_tokens=options.graph_tokens,
        )
        rows, advantages = build_batch(
            shape, max(options.rows), options.tokens, device, spread=options.spread
        )
        largest = LmWorkload(
            name=name,
            config="",
            plain=plain,
            lm=lm,
            rows=rows,
            advantages=advantages,
            micro_rows=options.micro_rows,
        )
        check_gradients(largest.take(16), options.units)
        drafts = make_drafts(largest, options.contenders)
        for num_rows in sorted(options.rows):
            work = dataclasses.replace(
                largest.take(num_rows), config=describe(options, num_rows, lm.layout)
            )
            found = bench(
                work,
                contenders_for(work, rates, options.units, options.contenders, drafts),
                rounds=options.rounds,
                where=where,
            )
            print_table(found)
            lines += found
            write_csv(table, lines)  # after each, so that an interrupted run leaves some
    write_manifest(options, where)
    if not options.quick:
        print_targets(lines)
    print(f"\nwrote {table}")
    from plot_lm import draw

    print(f"wrote {draw(table)}")


def describe(options: argparse.Namespace, num_rows: int, layout: str) -> str:
    """Return everything that changes the numbers, in words."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    compiled = "compiled layers" if options.compiled else "eager"
    lengths = "log-normal lengths" if options.spread else "equal lengths"
    return (
        f"{num_rows} x {options.tokens} tokens, {lengths}, {dtype}, {layout} packs "
        f"of {options.max_tokens} tokens, {compiled}, CUDA graphs up to {options.graph_tokens} "
        f"tokens; plain and trl: {options.micro_rows} rows"
    )


def write_manifest(options: argparse.Namespace, where: dict[str, Any]) -> None:
    """Write what made the CSV."""
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    content = {
        "command": "python benchmarks/bench_lm_step.py " + " ".join(sys.argv[1:]),
        "settings": settings,
        "environment": where,
    }
    path = options.out / f"{options.name}.manifest.json"
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
