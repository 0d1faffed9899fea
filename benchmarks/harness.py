"""What every benchmark shares: the CSV schema, fair timing, peak memory and where it all ran.

    contenders -> inspect, once each    -> rows differentiated, peak memory
               -> rounds of everything  -> step times -> ratios inside each round -> CSV rows

Every round runs every contender, in an order of its own, so that a slow minute of the machine hits
all alike. A speed-up is the round's median dense time over a time of the same round.
"""

import csv
import dataclasses
import datetime
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kondo

DENSE, FORWARD = "dense", "forward"

# Dense and F enter every ratio and limit of a round, so they have several turns in it.
BASELINE_TURNS = 3

# A step shorter than this is run several times a turn: one sample of it would be mostly noise.
MIN_SAMPLE_SECONDS = 0.1
MAX_SAMPLES_PER_TURN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the CSV: the schema of every benchmark. None is an empty cell."""

    benchmark: str
    """Name of the script without `bench_`."""
    model: str
    config: str
    """Sizes, dtype and micro-batch, in words."""
    contender: str
    rate: float
    """Rate asked for; 1 where there is no gate."""
    unit: str
    """What is gated."""
    rows: int
    tokens: int
    """Tokens in all rows; equals rows where a row is one sample."""
    rows_differentiated: int
    """Rows whose gradient arrived at the model's output, counted by a hook on the model."""
    step_ms_p20: float
    step_ms_p50: float
    step_ms_p80: float
    speedup_p20: float
    """Median dense time of a round / each own time of the round."""
    speedup_p50: float
    speedup_p80: float
    limit: float | None
    """The cost model's speed-up at the rate realised, from dense and F of the same rounds."""
    share_of_limit: float | None
    """Speed-up / limit inside one round, p50."""
    gate_overhead: float | None
    """(select + compact) / step, p50."""
    stages: str
    """Shares of the step by the report's clock, p50."""
    peak_memory_mb: float
    """Peak of what tensors held during one step, weights and batch included."""
    device: str
    threads: int
    torch: str
    transformers: str
    python: str
    commit: str
    date: str
    repeats: int
    """Rounds."""


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the step."""

    name: str
    rate: float
    step: Callable[[], kondo.Report | None]
    """From gradients that are None to gradients in `.grad`; returns the report if it has one."""
    limit: Callable[[float, float], float] | None
    """(F / dense, realised rate) -> the speed-up the cost model allows; None where it says none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """What one untimed step of a contender did."""

    rows: int
    peak_memory_mb: float
    report: kondo.Report | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Timed steps of one contender: per round, the seconds and the report of each step."""

    seconds: list[list[float]] = dataclasses.field(default_factory=list)
    reports: list[list[kondo.Report | None]] = dataclasses.field(default_factory=list)


def run_rounds(
    contenders: Sequence[Contender], model: nn.Module, *, repeats: int, device: torch.device
) -> list[Samples]:
    """Time every contender in every round; the order is drawn anew for each round."""
    turns = [
        index
        for index, contender in enumerate(contenders)
        for _ in range(BASELINE_TURNS if contender.name in (DENSE, FORWARD) else 1)
    ]
    shuffle = random.Random(0).shuffle
    samples = [Samples() for _ in contenders]
    for _ in range(repeats):
        shuffle(turns)
        for taken in samples:
            taken.seconds.append([])
            taken.reports.append([])
        for index in turns:
            start = len(samples[index].seconds[-1])
            while _wants_more(samples[index].seconds[-1][start:]):
                spent, report = _timed(contenders[index].step, model, device)
                samples[index].seconds[-1].append(spent)
                samples[index].reports[-1].append(report)
    return samples


def _wants_more(seconds: list[float]) -> bool:
    return sum(seconds) < MIN_SAMPLE_SECONDS and len(seconds) < MAX_SAMPLES_PER_TURN


def _timed(
    step: Callable[[], kondo.Report | None], model: nn.Module, device: torch.device
) -> tuple[float, kondo.Report | None]:
    """Time zero_grad and the step, up to gradients that are there and not only queued."""
    synchronise(device)
    start = time.perf_counter()
    model.zero_grad(set_to_none=True)
    report = step()
    synchronise(device)
    return time.perf_counter() - start, report


def synchronise(device: torch.device) -> None:
    """Wait for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def inspect(
    contender: Contender, model: nn.Module, *, held: Iterable[Tensor], device: torch.device
) -> Inspection:
    """Run one untimed step: count the rows differentiated, and find the peak memory.

    Args:
        contender: what to run; its gradients are left in `.grad`.
        model: counted at its output.
        held: tensors that exist before the step: weights, buffers, batch.
        device: of the model.
    """
    counted = 0

    def count(gradient: Tensor) -> None:
        nonlocal counted
        counted += gradient.shape[0]

    def watch(_module: nn.Module, _args: Any, output: Any) -> None:
        logits = output if isinstance(output, Tensor) else output.logits
        if logits.requires_grad:
            logits.register_hook(count)

    model.zero_grad(set_to_none=True)
    hook = model.register_forward_hook(watch)
    try:
        find_peak = peak_bytes_cuda if device.type == "cuda" else peak_bytes_cpu
        peak, report = find_peak(contender.step, held)
    finally:
        hook.remove()
    return Inspection(rows=counted, peak_memory_mb=peak / 2**20, report=report)


def peak_bytes_cuda(
    step: Callable[[], kondo.Report | None], _held: Iterable[Tensor]
) -> tuple[int, kondo.Report | None]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    report = step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), report


def peak_bytes_cpu(
    step: Callable[[], kondo.Report | None], held: Iterable[Tensor]
) -> tuple[int, kondo.Report | None]:
    """Add up the allocator's own events, as max_memory_allocated does on CUDA.

    The resident size of a process cannot be used: it keeps what was freed, counts Python and the
    libraries, and depends on what ran before.
    """
    # Otherwise the profiler writes a line to stderr at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        report = step()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    current = sum(tensor.nbytes for tensor in held)
    peak = current
    for _, change in sorted(changes, key=lambda event: event[0]):
        current += change
        peak = max(peak, current)
    return peak, report


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile of a few numbers, interpolated."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def summarise(
    contenders: Sequence[Contender],
    samples: Sequence[Samples],
    inspections: Sequence[Inspection],
    shared: dict[str, Any],
) -> list[Row]:
    """Turn samples into CSV rows. `shared` holds the columns that all contenders have in common."""
    by_name = {contender.name: taken for contender, taken in zip(contenders, samples, strict=True)}
    dense = [percentile(seconds, 0.5) for seconds in by_name[DENSE].seconds]
    forward = [percentile(seconds, 0.5) for seconds in by_name[FORWARD].seconds]
    lines = []
    for contender, taken, seen in zip(contenders, samples, inspections, strict=True):
        speedups, limits, shares = [], [], []
        realised = seen.rows / shared["rows"]
        for whole, free, seconds in zip(dense, forward, taken.seconds, strict=True):
            speedups += [whole / spent for spent in seconds]
            if contender.limit is not None:
                limits.append(contender.limit(free / whole, realised))
                shares += [whole / spent / limits[-1] for spent in seconds]
        times = [1e3 * spent for seconds in taken.seconds for spent in seconds]
        stages = _stage_shares(taken)
        lines.append(
            Row(
                contender=contender.name,
                rate=contender.rate,
                rows_differentiated=seen.rows,
                step_ms_p20=percentile(times, 0.2),
                step_ms_p50=percentile(times, 0.5),
                step_ms_p80=percentile(times, 0.8),
                speedup_p20=percentile(speedups, 0.2),
                speedup_p50=percentile(speedups, 0.5),
                speedup_p80=percentile(speedups, 0.8),
                limit=percentile(limits, 0.5) if limits else None,
                share_of_limit=percentile(shares, 0.5) if shares else None,
                gate_overhead=stages["select"] + stages["compact"] if stages else None,
                stages=" ".join(f"{name}={share:.4f}" for name, share in stages.items()),
                peak_memory_mb=seen.peak_memory_mb,
                repeats=len(taken.seconds),
                **shared,
            )
        )
    return lines


def _stage_shares(taken: Samples) -> dict[str, float]:
    """Return the median share of the step that each stage of the report took."""
    shares: dict[str, list[float]] = {}
    for seconds, reports in zip(taken.seconds, taken.reports, strict=True):
        for spent, report in zip(seconds, reports, strict=True):
            for stage, stage_seconds in report.seconds.items() if report is not None else ():
                shares.setdefault(stage, []).append(stage_seconds / spent)
    return {stage: percentile(values, 0.5) for stage, values in shares.items()}


def write_csv(path: Path, lines: Sequence[Row]) -> None:
    """Write rows under the schema, and the further columns of their kind, numbers to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [field.name for field in dataclasses.fields(lines[0])] if lines else COLUMNS
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for line in lines:
            cells = dataclasses.asdict(line)
            writer.writerow(
                {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells.items()}
            )


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Return the columns that say where and from what the numbers came."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": _transformers_version(),
        "python": platform.python_version(),
        "commit": commit or current_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor after `cpu`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"cpu: {names[0] if names else platform.processor() or platform.machine()}"


def current_commit() -> str:
    """Return the commit, with `-dirty` if code differs from it; `unknown` without git."""
    here = Path(__file__).resolve().parent
    code = ["../src", ".", ":(exclude)data"]
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _transformers_version() -> str:
    try:
        import transformers
    except ImportError:
        return ""
    return str(transformers.__version__)
