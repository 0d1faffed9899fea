"""One update of verl's actor, timed: verl's own on all rows, and ours by rate.

    .venv-verl/bin/python benchmarks/bench_verl.py               # minutes, on a CPU
    .venv-verl/bin/python benchmarks/bench_verl.py --quick --out FILE      # does it run? seconds

    verl     verl's worker on the whole batch
    kondo    select by delight, plan, and our worker on the kept rows

The same worker process, engine (FSDP2), weights and batch for all. Only the CPU platform under verl
is ours, that of the tests. A step is timed from the batch with its old log-probs until optimizer
and schedule have moved: for us the gate and the plan, then for both micro-batches, clipping and
AdamW. What happens before is verl's, and the same for both: generation, rewards, old log-probs (not
computed in bypass mode), advantages. So is what the controller does to move rows between processes.

Before anything is timed, our gradient is compared with verl's on the full batch whose skipped rows
have advantage 0; a wrong one ends the run. Rows are counted by a hook on the model.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path.insert(0, str(TESTS))

import kondo  # noqa: E402
from harness import Row, environment, percentile, write_csv  # noqa: E402
from integrations.verl.worker_runs import DEFAULTS, ENVIRONMENT  # noqa: E402
from kondo.integrations.verl.update_plan import Plan, make_plan, mini_batches  # noqa: E402

VERL, KONDO = "verl", "kondo"
TOLERANCE = 1e-4
"""Relative difference allowed between gradients of the same rows."""
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerlRow(Row):
    """One line of the CSV: the schema of all benchmarks, and what only this one has.

    `speedup` is over verl's own update. `rows_differentiated` includes fillers.
    """

    tokens_trained: int
    """Tokens that entered the forward; prompts included, as in `tokens`."""
    verl: str
    """Version."""


class Bench:
    """A worker, a batch, and updates of either kind."""

    def __init__(self, options: argparse.Namespace, folder: str):
        from integrations.verl.tiny import make_rows, save_model
        from integrations.verl.worker_process import build
        from kondo.integrations.verl.worker import KondoTrainingWorker

        path = save_model(folder, scale=1.0, **SHAPE)
        self.micro = options.micro_rows
        self.num_rows = options.rows
        chosen = {"micro": self.micro, "mini": self.num_rows, "optimizer": "AdamW", "lr": 1e-6}
        self.worker = build(KondoTrainingWorker, path, DEFAULTS | chosen)
        lengths = {"prompts": (16, 16), "responses": options.responses}
        rows = make_rows(self.num_rows, vocabulary=SHAPE["vocab_size"], **lengths)
        self.rows = self._with_log_probs(rows)
        self.sizes: list[int] = rows["input_ids"].offsets().diff().tolist()
        self.counted = [int(mask.sum()) for mask in rows["loss_mask"].unbind()]
        self.seen = [0, 0]
        self.worker.engine.module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _with_log_probs(self, rows: Any) -> Any:
        """Return the batch with the policy's own log-probs as old ones."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import response_from_nested

        data = tu.index_select_tensor_dict(rows, list(range(self.num_rows)))
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0)
        found = tu.get(self.worker.infer_batch(data), "log_probs")
        rows["old_log_probs"] = response_from_nested(found, rows["response_mask"])
        return rows

    def _count(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.seen[0] += kwargs["attention_mask"].shape[0]
        self.seen[1] += int(kwargs["attention_mask"].sum())

    def select(self, rate: float) -> kondo.Selection:
        """Gate the rows by delight, which leaves nothing to chance."""
        mask = self.rows["response_mask"].to_padded_tensor(0).bool()
        return kondo.select(
            self.rows["old_log_probs"].to_padded_tensor(0.0),
            self.rows["advantages"].to_padded_tensor(0.0),
            gate=kondo.Gate(rate=rate),
            unit="sequence",
            mask=mask,
        )

    def plan(self, chosen: kondo.Selection) -> Plan:
        """Return what the trainer's plan would be."""
        epochs = mini_batches(self.num_rows, size=self.num_rows, ranks=1, epochs=1)
        return make_plan(
            chosen.keep,
            chosen.weight,
            self.sizes,
            self.counted,
            epochs,
            ranks=1,
            micro_batch=self.micro,
        )

    def update(self, rate: float | None, rows: Any = None) -> None:
        """Run one update: verl's own if the rate is None."""
        from verl.utils import tensordict_utils as tu

        from kondo.integrations.verl.worker import PLAN

        rows = self.rows if rows is None else rows
        plan = None if rate is None else self.plan(self.select(rate))
        own = list(range(self.num_rows)) if plan is None else plan.ranks[0]
        data = tu.index_select_tensor_dict(rows, own)
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            global_batch_size=self.num_rows,
            mini_batch_size=self.num_rows,
            temperature=1.0,
        )
        if plan is not None:
            tu.assign_non_tensor_data(data, PLAN, {"steps": plan.steps})
        self.worker.train_mini_batch(data)

    def check(self) -> float:
        """Return the seconds of the check of the first batch."""
        from verl.utils import tensordict_utils as tu

        from kondo.integrations.verl.first_batch import rows_to_try

        mask = self.rows["response_mask"].to_padded_tensor(0).bool()
        data = tu.index_select_tensor_dict(self.rows, rows_to_try(mask, self.sizes, 1))
        tu.assign_non_tensor(data, temperature=1.0)
        found = tu.get(self.worker.check_policy(data), "found")
        if found["findings"]:
            raise SystemExit(f"kondo.check found {found['findings']}; nothing was timed.")
        return float(found["seconds"])

    def gradient(self, rate: float | None, rows: Any = None) -> Tensor:
        """Return the gradient of an update; the optimizer does not move."""
        engine, found = self.worker.engine, list[Tensor]()
        step = engine.optimizer_step

        def record() -> float:
            found.extend(w.grad.full_tensor().flatten().clone() for w in engine.module.parameters())
            return 0.0

        engine.optimizer_step = record
        try:
            self.update(rate, rows)
        finally:
            engine.optimizer_step = step
        return torch.cat(found)

    def check_gradient(self, rate: float) -> None:
        """End the run unless our gradient is verl's with the advantages of skipped rows at 0."""
        keep = self.select(rate).keep
        masked = self.rows.clone()
        values = [
            row * float(kept)
            for row, kept in zip(masked["advantages"].unbind(), keep.tolist(), strict=True)
        ]
        masked["advantages"] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        wanted, found = self.gradient(None, masked), self.gradient(rate)
        relative = float((found - wanted).norm() / wanted.norm())
        print(f"gradient at {rate:.0%}: {relative:.1e} from verl's masked", flush=True)
        if not relative <= TOLERANCE:
            raise SystemExit("the gradient is wrong; nothing was timed.")


def run(options: argparse.Namespace, folder: str) -> list[VerlRow]:
    """Check gradients, time rounds of everything, and return the lines."""
    bench = Bench(options, folder)
    contenders: list[float | None] = [None, *options.rates]
    for rate in options.rates:
        bench.check_gradient(rate)
    counts = {}
    for rate in contenders:  # warm up, and count
        bench.seen = [0, 0]
        bench.update(rate)
        counts[rate] = tuple(bench.seen)
    checks = [bench.check() for _ in range(options.repeats)]
    print(f"check of the first batch: {1e3 * percentile(checks, 0.5):.0f} ms", flush=True)
    seconds: dict[float | None, list[float]] = {rate: [] for rate in contenders}
    shuffle = random.Random(0).shuffle
    for _ in range(options.repeats):
        order = list(contenders)
        shuffle(order)
        for rate in order:
            start = time.perf_counter()
            bench.update(rate)
            seconds[rate].append(time.perf_counter() - start)
    config = (
        f"{options.rows} rows, prompts of 16, responses of {options.responses[0]} to "
        f"{options.responses[1]} tokens, micro-batches of {options.micro_rows}, float32, FSDP2, "
        f"1 process"
    )
    where = environment(torch.device("cpu"), options.commit)
    total = sum(bench.sizes)
    lines = []
    for rate in contenders:
        ratios = [base / own for base, own in zip(seconds[None], seconds[rate], strict=True)]
        rows, tokens = counts[rate]
        lines.append(
            VerlRow(
                benchmark="verl",
                model="tiny",
                config=config,
                contender=VERL if rate is None else KONDO,
                rate=1.0 if rate is None else rate,
                unit="sequence",
                rows=options.rows,
                tokens=total,
                rows_differentiated=rows,
                step_ms_p20=1e3 * percentile(seconds[rate], 0.2),
                step_ms_p50=1e3 * percentile(seconds[rate], 0.5),
                step_ms_p80=1e3 * percentile(seconds[rate], 0.8),
                speedup_p20=percentile(ratios, 0.2),
                speedup_p50=percentile(ratios, 0.5),
                speedup_p80=percentile(ratios, 0.8),
                limit=total / tokens,
                share_of_limit=percentile(ratios, 0.5) * tokens / total,
                gate_overhead=None,
                stages="",
                peak_memory_mb=0.0,
                repeats=options.repeats,
                tokens_trained=tokens,
                verl=importlib.metadata.version("verl"),
                **where,
            )
        )
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--responses", type=int, nargs=2, default=[48, 96])
    parser.add_argument("--micro-rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=HERE / "data" / "verl_cpu.csv")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.responses, options.micro_rows, options.repeats = 16, [4, 8], 4, 2
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    wanted = ENVIRONMENT | {"PYTHONPATH": str(TESTS), "WG_BACKEND": "ray", "RANK": "0"}
    wanted |= {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(wanted)
    torch.set_num_threads(1)
    import verl  # noqa: F401  it imports the CPU platform

    with tempfile.TemporaryDirectory() as folder:
        lines = run(options, folder)
    write_csv(options.out, lines)
    for line in lines:
        print(
            f"{line.contender:6} {line.rate:5.0%} rows {line.rows_differentiated:4} tokens "
            f"{line.tokens_trained:6}  {line.step_ms_p50:8.0f} ms  speed-up "
            f"{line.speedup_p20:.2f} / {line.speedup_p50:.2f} / {line.speedup_p80:.2f}"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
