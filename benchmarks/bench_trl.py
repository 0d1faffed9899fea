"""One optimizer step of GRPO in TRL, timed: TRL's own trainer, and ours by rate and screen.

    python benchmarks/bench_trl.py --device cuda [--micro-rows 8] [--checkpointing] [--rates 3]
    python benchmarks/bench_trl.py --quick --out FILE            # does it run? seconds, on a CPU

    trl      trl.GRPOTrainer
    rollout  KondoGRPOTrainer, the sampler's log-probs are the screen
    exact    KondoGRPOTrainer, a forward without a graph is the screen
             (both by delight, which leaves nothing to chance: all rounds train the same rows)

    the same weights and completions -> a new trainer -> train(): a step to warm up, then timed ones

The trainers are real. A stand-in sampler (TRL's `rollout_func`) hands every one of them the same
completions, so nothing is generated. A step is timed from the sampler's return until optimizer and
schedule have moved: TRL's padding, decoding and scoring, then screen, select, plan, forwards,
backwards, clipping and AdamW. Rewards are looked up. `learner` leaves out what comes before TRL's
batch is scored, which costs both alike.

Before anything is timed, our gradient is compared with that of TRL's trainer whose skipped rows
have advantage 0; a wrong one ends the run. Tokens that enter a forward with a graph are counted by
a hook, and the run ends if the trainer's own log tells another number.
"""

import argparse
import dataclasses
import gc
import importlib.metadata
import math
import random
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2ForCausalLM, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import kondo
from harness import Row, environment, percentile, synchronise, write_csv
from kondo.integrations.trl import KondoGRPOConfig, KondoGRPOTrainer
from lm_workloads import QUICK, SHAPES, Shape, build_model

DATA = Path(__file__).resolve().parent / "data"
TRL, ROLLOUT, EXACT = "trl", "rollout", "exact"
SEED = 0
PAD, EOS = 0, 1
TOLERANCE = {torch.bfloat16: 0.08, torch.float32: 1e-4}
"""Relative difference allowed between gradients of the same rows."""
TINY = Shape(layers=3, width=192, heads=3, key_heads=1, ff_width=512, vocabulary=2048)
MODELS = {"tiny": TINY, "quick": QUICK, **SHAPES}
SIZES = {
    "cpu": {"model": "tiny", "completions": 64, "prompt_tokens": 16, "completion_tokens": 80},
    "cuda": {
        "model": "qwen2-0.5b",
        "completions": 256,
        "prompt_tokens": 128,
        "completion_tokens": 768,
    },
}
"""What is run on a device unless the command line says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrlRow(Row):
    """One line of the CSV: the schema of all benchmarks, and what only a trainer's step has.

    `speedup` is over TRL's own trainer. `stages`: `score` ends with TRL's scored batch, screen to
    backward are by the trainer's log, `rest` is clipping, the optimizer and TRL's own loop.
    """

    tokens_trained: int
    """Tokens that entered a forward with a graph; prompts included, as in `tokens`."""
    tokens_screened: int
    """Tokens that entered a forward without one."""
    learner_ms_p50: float
    """Milliseconds of the step after TRL has scored the batch."""
    learner_speedup_p20: float
    """As `speedup`, of these."""
    learner_speedup_p50: float
    learner_speedup_p80: float
    trl: str
    """Version."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """TRL's trainer, or ours with a screen and a rate."""

    name: str
    rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A shape, and what a sampler returned for it: N completions, groups of them to a prompt."""

    shape: Shape
    device: torch.device
    micro_rows: int
    group: int
    checkpointing: bool
    prompts: list[list[int]]
    """N lists, of P tokens each."""
    completions: list[list[int]]
    """N lists, of T tokens each."""
    log_probs: list[list[float]]
    """As `completions`; by the policy that every trainer starts from."""
    rewards: list[float]
    """N numbers, 0 or 1."""

    @property
    def num_tokens(self) -> int:
        """N * (P + T)."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step as it was measured."""

    seconds: float
    """From the sampler's return to the end."""
    scoring: float
    """The part of them until TRL's batch was scored."""
    peak: int
    rows: int
    """That entered a forward with a graph."""
    tokens: int
    """Of these rows."""
    screened: int
    """Tokens that entered a forward without a graph."""


class Stopwatch(TrainerCallback):
    """The clock, and the counts, of a trainer's optimizer steps."""

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Step] = []
        self._device = device
        self._trained: list[Tensor] = []
        self._screened: list[Tensor] = []

    def start(self) -> None:
        """Begin a step: the sampler is about to return."""
        self._trained.clear()
        self._screened.clear()
        synchronise(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def scored(self) -> None:
        """Note that TRL has scored its batch."""
        synchronise(self._device)
        self._scored = time.perf_counter()

    def count(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Note the mask of a forward, before the model's layers."""
        seen = self._trained if torch.is_grad_enabled() else self._screened
        seen.append(kwargs["attention_mask"])

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """End a step: optimizer and schedule have moved, gradients are gone."""
        synchronise(self._device)
        end = time.perf_counter()
        cuda = self._device.type == "cuda"
        self.steps.append(
            Step(
                seconds=end - self._start,
                scoring=self._scored - self._start,
                peak=torch.cuda.max_memory_allocated() if cuda else 0,
                rows=sum(len(mask) for mask in self._trained),
                tokens=sum(int(mask.sum()) for mask in self._trained),
                screened=sum(int(mask.sum()) for mask in self._screened),
            )
        )


# TRL calls itself typed, but hardly is: to mypy, its trainers are Any.
_Trl: Any = GRPOTrainer
_Kondo: Any = KondoGRPOTrainer


class TimedTrl(_Trl):  # type: ignore[misc]
    """TRL's trainer, which tells `stopwatch` when a batch is scored.

    `keep`: bool [N]; where it is given, the advantage of the other rows becomes 0.
    """

    stopwatch: Stopwatch
    keep: Tensor | None = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if self.keep is not None:
            output["advantages"] = output["advantages"] * self.keep
        self.stopwatch.scored()
        return output


class TimedKondo(_Kondo, TimedTrl):  # type: ignore[misc]
    """Our trainer over `TimedTrl`: `scored` is told between TRL's part and ours."""


class Gradients(TrainerCallback):
    """Copies of the gradients an optimizer step would have applied."""

    def on_pre_optimizer_step(self, *_args: Any, **kwargs: Any) -> None:
        """Copy them."""
        self.copies = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad.detach().clone()
            for weight in kwargs["model"].parameters()
        ]


def build_policy(shape: Shape, device: torch.device, positions: int) -> Any:
    """Return a new Qwen2; its weights depend on nothing but its shape and device."""
    policy, _ = build_model(shape, device, max_tokens=1, compiled=False, positions=positions)
    for config in (policy.config, policy.generation_config):
        config.pad_token_id, config.eos_token_id, config.bos_token_id = PAD, EOS, None
    return policy


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word per token."""
    words = {f"w{token}": token for token in range(EOS + 1, vocabulary)}
    inner = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": EOS, **words}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_workload(options: argparse.Namespace, device: torch.device) -> Workload:
    """Draw prompts, completions and rewards; score the completions as their sampler would."""
    shape = MODELS[options.model]
    data = torch.Generator().manual_seed(SEED)
    rows, prompt = options.completions, options.prompt_tokens
    total = prompt + options.completion_tokens
    ids = torch.randint(EOS + 1, shape.vocabulary, (rows, total), generator=data)
    first_of_group = torch.arange(rows) // options.group * options.group
    ids[:, :prompt] = ids[first_of_group, :prompt]
    rewards = torch.randint(2, (rows,), generator=data).float()
    policy = build_policy(shape, device, total)
    return Workload(
        shape=shape,
        device=device,
        micro_rows=options.micro_rows,
        group=options.group,
        checkpointing=options.checkpointing,
        prompts=ids[:, :prompt].tolist(),
        completions=ids[:, prompt:].tolist(),
        log_probs=sampler_log_probs(policy, ids.to(device), prompt, options.micro_rows).tolist(),
        rewards=rewards.tolist(),
    )


@torch.no_grad()
def sampler_log_probs(policy: Qwen2ForCausalLM, ids: Tensor, start: int, chunk: int) -> Tensor:
    """Return log-probs of the tokens from `start` on, [N, T]."""
    found = []
    for part in torch.split(ids, chunk):
        logits = policy(input_ids=part).logits[:, start - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(2, part[:, start:, None]).squeeze(2))
    return torch.cat(found)


def build_trainer(
    work: Workload,
    contender: Contender,
    tokenizer: PreTrainedTokenizerFast,
    folder: str,
    *,
    steps: int,
    max_grad_norm: float,
) -> tuple[Any, Stopwatch]:
    """Return a contender's trainer around a new policy, and its clock."""
    stopwatch = Stopwatch(work.device)
    rows = len(work.completions)

    def sample(_prompts: Any, _trainer: Any) -> dict[str, Any]:
        named: dict[str, list[list[Any]]] = {
            "prompt_ids": work.prompts,
            "completion_ids": work.completions,
            "logprobs": work.log_probs,
        }
        copied = {name: [list(row) for row in values] for name, values in named.items()}
        stopwatch.start()
        return copied

    def reward(completions: Any, **_kwargs: Any) -> list[float]:
        return work.rewards

    cuda = work.device.type == "cuda"
    ours = contender.name != TRL
    kind: Any = KondoGRPOConfig if ours else GRPOConfig
    gate = (
        {"kondo_gate": f"delight:{contender.rate}", "kondo_screen": contender.name} if ours else {}
    )
    args = kind(
        folder,
        per_device_train_batch_size=work.micro_rows,
        gradient_accumulation_steps=rows // work.micro_rows,
        num_generations=work.group,
        max_completion_length=len(work.completions[0]),
        max_steps=steps,
        learning_rate=1e-6,  # TRL's own; the policy hardly moves, so every step is alike
        max_grad_norm=max_grad_norm,
        gradient_checkpointing=work.checkpointing,
        bf16=cuda,
        use_cpu=not cuda,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        **gate,
    )
    policy = build_policy(work.shape, work.device, len(work.prompts[0]) + len(work.completions[0]))
    policy.model.register_forward_pre_hook(stopwatch.count, with_kwargs=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        trainer: Any = (TimedKondo if ours else TimedTrl)(
            policy,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["w2"] * (rows // work.group)}),
            processing_class=tokenizer,
            rollout_func=sample,
            callbacks=[stopwatch],
        )
    trainer.stopwatch = stopwatch
    trainer.remove_callback(PrinterCallback)
    return trainer, stopwatch


@dataclasses.dataclass
class Turn:
    """Timed steps of one contender in one round, and what the trainer logged of each."""

    steps: list[Step]
    logs: list[dict[str, float]]


def run_turn(
    work: Workload, contender: Contender, tokenizer: PreTrainedTokenizerFast, *, steps: int
) -> Turn:
    """Train with a new trainer: one step to warm up, then `steps` that count."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, stopwatch = build_trainer(
            work, contender, tokenizer, folder, steps=1 + steps, max_grad_norm=1.0
        )
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
    if contender.name != TRL:
        check_counts(contender, stopwatch.steps[1:], logs[1:])  # the first step checks the policy
    del trainer
    release(work.device)
    return Turn(stopwatch.steps[1:], logs[1:])


def release(device: torch.device) -> None:
    """Free the last trainer, which holds itself in cycles, before another takes its place."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check_counts(
    contender: Contender, steps: Sequence[Step], logs: Sequence[dict[str, float]]
) -> None:
    """End the run unless the trainer tells the tokens and rows that the hook counted."""
    for step, log in zip(steps, logs, strict=True):
        told = (log["kondo/rows_trained"], log["kondo/tokens_trained"])
        if told != (step.rows, step.tokens):
            raise SystemExit(
                f"{contender.name} at {contender.rate:.0%}: the trainer tells of {told} rows and "
                f"tokens, the hook counted {(step.rows, step.tokens)}."
            )


def check_gradient(work: Workload, rate: float, tokenizer: PreTrainedTokenizerFast) -> None:
    """End the run unless our gradient is TRL's with the advantages of skipped rows at 0."""
    keep = kept_rows(work, rate)
    wanted = gradient_of(work, Contender(name=TRL, rate=1.0), tokenizer, keep)
    for name in (ROLLOUT, EXACT):
        found = gradient_of(work, Contender(name=name, rate=rate), tokenizer)
        error = total = 0.0
        for ours, theirs in zip(found, wanted, strict=True):
            error += float((ours.float() - theirs.float()).square().sum())
            total += float(theirs.float().square().sum())
        relative = math.sqrt(error / total)
        print(f"gradient of {name} at {rate:.0%}: {relative:.1e} from TRL's masked", flush=True)
        if not relative <= TOLERANCE[wanted[0].dtype]:
            raise SystemExit(f"the gradient of {name} is wrong; nothing was timed.")


def kept_rows(work: Workload, rate: float) -> Tensor:
    """Return which completions the gate keeps, bool [N], by the sampler's log-probs."""
    groups = torch.tensor(work.rewards).view(-1, work.group)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    delight = -advantages * torch.tensor(work.log_probs).sum(1)
    return kondo.Gate(rate=rate)(delight).keep.to(work.device)


def gradient_of(
    work: Workload,
    contender: Contender,
    tokenizer: PreTrainedTokenizerFast,
    keep: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradient of a first step, not clipped: a clipped one hides a wrong scale."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = build_trainer(work, contender, tokenizer, folder, steps=1, max_grad_norm=0.0)
        trainer.keep = keep
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train()
    del trainer
    release(work.device)
    return gradients.copies


def contenders_for(rates: Sequence[float], screens: Sequence[str]) -> list[Contender]:
    """Return TRL's trainer, then ours."""
    ours = [Contender(name=screen, rate=rate) for screen in screens for rate in rates]
    return [Contender(name=TRL, rate=1.0), *ours]


def run_rounds(
    work: Workload,
    contenders: Sequence[Contender],
    tokenizer: PreTrainedTokenizerFast,
    *,
    rounds: int,
    steps: int,
) -> Iterator[list[list[Turn]]]:
    """Give every contender a turn in every round, in an order drawn anew.

    Yields:
        After each round, per contender, its turns so far.
    """
    taken: list[list[Turn]] = [[] for _ in contenders]
    order = list(range(len(contenders)))
    draw = random.Random(SEED)
    for _ in range(rounds):
        draw.shuffle(order)
        for index in order:
            taken[index].append(run_turn(work, contenders[index], tokenizer, steps=steps))
        yield taken


def summarise(
    work: Workload,
    contenders: Sequence[Contender],
    taken: Sequence[Sequence[Turn]],
    shared: dict[str, Any],
) -> list[TrlRow]:
    """Turn what was taken into CSV lines; ratios are between steps of the same round."""
    whole = [percentile([step.seconds for step in turn.steps], 0.5) for turn in taken[0]]
    learner = [percentile([_learner(step) for step in turn.steps], 0.5) for turn in taken[0]]
    lines = []
    for contender, turns in zip(contenders, taken, strict=True):
        steps = [step for turn in turns for step in turn.steps]
        last = steps[-1]
        ratios, learner_ratios, limits, shares = [], [], [], []
        for dense, dense_learner, turn in zip(whole, learner, turns, strict=True):
            own = [dense / step.seconds for step in turn.steps]
            ratios += own
            learner_ratios += [dense_learner / _learner(step) for step in turn.steps]
            if contender.name != TRL:
                limits.append(limit(turn, dense, last.tokens / work.num_tokens))
                shares += [ratio / limits[-1] for ratio in own]
        times = [1e3 * step.seconds for step in steps]
        stages = stage_shares(turns)
        lines.append(
            TrlRow(
                contender=contender.name,
                rate=contender.rate,
                unit="sequence",
                rows=len(work.completions),
                tokens=work.num_tokens,
                rows_differentiated=last.rows,
                step_ms_p20=percentile(times, 0.2),
                step_ms_p50=percentile(times, 0.5),
                step_ms_p80=percentile(times, 0.8),
                speedup_p20=percentile(ratios, 0.2),
                speedup_p50=percentile(ratios, 0.5),
                speedup_p80=percentile(ratios, 0.8),
                limit=percentile(limits, 0.5) if limits else None,
                share_of_limit=percentile(shares, 0.5) if shares else None,
                gate_overhead=stages.get("select"),
                stages=" ".join(f"{stage}={share:.4f}" for stage, share in stages.items()),
                peak_memory_mb=max(step.peak for step in steps) / 2**20,
                repeats=len(turns),
                tokens_trained=last.tokens,
                tokens_screened=last.screened,
                learner_ms_p50=percentile([1e3 * _learner(step) for step in steps], 0.5),
                learner_speedup_p20=percentile(learner_ratios, 0.2),
                learner_speedup_p50=percentile(learner_ratios, 0.5),
                learner_speedup_p80=percentile(learner_ratios, 0.8),
                trl=importlib.metadata.version("trl"),
                **shared,
            )
        )
    return lines


def _learner(step: Step) -> float:
    return step.seconds - step.scoring


def limit(turn: Turn, dense: float, share: float) -> float:
    """Return dense / (F + share * dense); F is what this turn's own screen took, 0 if free."""
    screen = percentile([log["kondo/seconds_screen"] for log in turn.logs], 0.5)
    return 1 / (screen / dense + share)


def stage_shares(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the median share of the step that each stage took; of TRL's trainer, two are known."""
    shares: dict[str, list[float]] = {}
    for turn in turns:
        for step, log in zip(turn.steps, turn.logs, strict=True):
            spent = {"score": step.scoring}
            for stage in ("screen", "select", "forward", "backward"):
                if (name := f"kondo/seconds_{stage}") in log:
                    spent[stage] = log[name]
            spent["rest"] = step.seconds - sum(spent.values())
            for stage, seconds in spent.items():
                shares.setdefault(stage, []).append(seconds / step.seconds)
    return {stage: percentile(values, 0.5) for stage, values in shares.items()}


def print_table(lines: Sequence[TrlRow]) -> None:
    """Print what the CSV holds, in short."""
    first = lines[0]
    print(f"\n{first.model}: {first.config}; {first.repeats} rounds")
    print(
        f"{'contender':<10}{'rate':>5}{'tokens trained':>16}{'of':>8}{'speed-up p20/p50/p80':>24}"
        f"{'limit':>8}{'learner p50':>13}{'peak MB':>9}{'ms p50':>10}  stages"
    )
    for line in lines:
        spread = f"{line.speedup_p20:.2f} / {line.speedup_p50:.2f} / {line.speedup_p80:.2f}"
        most = "" if line.limit is None else f"{line.limit:.2f}"
        print(
            f"{line.contender:<10}{line.rate:>5.0%}{line.tokens_trained:>16}{line.tokens:>8}"
            f"{spread:>24}{most:>8}{line.learner_speedup_p50:>13.2f}{line.peak_memory_mb:>9.0f}"
            f"{line.step_ms_p50:>10.1f}  {line.stages}",
            flush=True,
        )


def describe(options: argparse.Namespace) -> str:
    """Return everything that changes the numbers, in words."""
    cuda = options.device == "cuda"
    return (
        f"{options.completions} completions of {options.completion_tokens} tokens, prompts of "
        f"{options.prompt_tokens}, groups of {options.group}, micro-batches of "
        f"{options.micro_rows}, "
        f"{'bfloat16 weights, bfloat16 autocast' if cuda else 'float32'}, gradient checkpointing "
        f"{'on' if options.checkpointing else 'off'}, {options.steps} steps a round"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what it leaves open follows from the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS))
    parser.add_argument("--completions", type=int, help="of an optimizer step")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--completion-tokens", type=int)
    parser.add_argument("--group", type=int, default=8, help="completions to a prompt")
    parser.add_argument("--micro-rows", type=int, default=8, help="completions of a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--rates", nargs="+", type=float, default=(3.0, 10.0, 30.0), help="percent")
    parser.add_argument("--screens", nargs="+", choices=(ROLLOUT, EXACT), default=[ROLLOUT, EXACT])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed, of a trainer")
    parser.add_argument("--out", type=Path, help="the CSV; data/trl_DEVICE.csv if left out")
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--quick", action="store_true", help="a tiny model; needs --out")
    options = parser.parse_args(arguments)
    if options.quick:
        if options.out is None:
            parser.error("--quick needs --out: its numbers must not replace the real ones.")
        options.model, options.rounds, options.steps = "quick", 1, 1
        options.completions, options.prompt_tokens, options.completion_tokens = 32, 4, 12
        torch.set_num_threads(1)
    for name, value in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("group", "micro_rows"):
        if options.completions % getattr(options, name):
            parser.error(
                f"--completions must be a multiple of --{name.replace('_', '-')}, got "
                f"{options.completions} and {getattr(options, name)}."
            )
    options.out = options.out or DATA / f"trl_{options.device}.csv"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the gradient, run the rounds, write the CSV."""
    options = parse(arguments)
    device = torch.device(options.device)
    where = environment(device, options.commit)
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    work = build_workload(options, device)
    tokenizer = build_tokenizer(work.shape.vocabulary)
    rates = [percent / 100 for percent in options.rates]
    check_gradient(work, max(rates), tokenizer)
    contenders = contenders_for(rates, options.screens)
    shared = {"benchmark": "trl", "model": options.model, "config": describe(options), **where}
    for taken in run_rounds(
        work, contenders, tokenizer, rounds=options.rounds, steps=options.steps
    ):
        lines = summarise(work, contenders, taken, shared)
        write_csv(options.out, lines)  # after each, so that an interrupted run leaves some
        print(f"round {len(taken[0])} of {options.rounds}", flush=True)
    print_table(lines)
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
