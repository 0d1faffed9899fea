"""One model end to end through the product, with clocks: sample, pay, learn, step.

    generate   prompts and completions, with the log-probs they were drawn with
    reward     of every completion
    screen     log-probs to decide by: the sampler's (free), or a forward without a graph (exact)
    select     priority -> gate -> kept tokens, and packs of what they need
    train      forward and backward of the packs
    optimiser  norm, clip, Adam

Every contender goes through `kondo.lm.backward`, and so has the same packing and head; a dense one
keeps everything. The path "plain" is the same update as somebody without a gate would write it, all
rows padded to one length: a second witness of what dense costs. At the end of each stage the clock
waits for the device. The learner's seconds are those after the reward, bookkeeping included.
"""

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import kondo
from kondo import lm
from kondo.core import losses
from kondo.engine.select import GateLike, Priority
from kondo.lab.draws import Draws
from kondo.lab.language import contenders
from kondo.lab.language.contenders import Contender
from kondo.lab.language.model import StackedLM
from kondo.lab.language.sampler import Sampled, sample
from kondo.lab.language.warm import mean_reward
from kondo.lab.population.graphs import Captured
from kondo.lab.population.networks import Parameters
from kondo.lab.population.train import save
from kondo.lab.studies.study import Context, Record, Stopped
from kondo.lab.text import TextTask
from kondo.lm.budget import BudgetGate

STAGES = ("generate", "reward", "screen", "select", "train", "optimiser")
LEARNER, LOOP = "learner", "loop"
"""Everything after the reward, and everything: measured, not summed."""

CHECKPOINT_SECONDS = 60.0
"""Between two checkpoints of a run: what a crash can cost."""
WARM_UP_CALLS = 5
"""Of each stage before the first step: graphs are recorded and kernels chosen there."""
EQUAL_TIME = 0.02
"""Loop times this close, relatively, are equal."""

Path = Literal["product", "plain"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How much is sampled, and how an update is made."""

    num_prompts: int = 32
    """G, fresh prompts per step."""
    repeats: int = 8
    """A, completions per prompt: a group."""
    num_held_out: int = 128
    """Prompts of an evaluation, the same at each."""
    max_norm: float = 1.0
    """The gradient's norm is clipped here."""
    max_tokens: int = 65_536
    """Most tokens of a forward, screening or training."""
    graph_tokens: int = 65_536
    """On a GPU, packs of at most so many tokens are replayed from CUDA graphs: dense ones too."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_held_out", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.repeats < 2:
            raise ValueError(
                f"repeats must be >= 2, got {self.repeats}: an advantage is measured from "
                f"the other answers to the same prompt."
            )
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be > 0, got {self.max_norm}; infinite does not clip.")

    @property
    def num_rows(self) -> int:
        """N."""
        return self.num_prompts * self.repeats


class Learned(NamedTuple):
    """What a backward did, by counts of what it was called with."""

    rows: int
    """That entered a training forward."""
    tokens: int
    """That entered a training forward: prompts, prefixes and padding included."""
    kept: int
    """Tokens with a loss; 0 where nothing was worth it, and `.grad` is untouched."""
    loss: float
    """Whose gradient it is."""
    seconds: dict[str, float]
    """Of screen, select and train."""


class Everything:
    """A gate that keeps all units that count: dense, or DG with a temperature.

    Unlike `kondo.Gate(rate=1)` it also keeps units of zero delight: dense pays for them.

    Args:
        eta: weigh units by sigmoid(delight / eta); None weighs all by 1.
    """

    def __init__(self, eta: float | None = None):
        self.eta = eta

    def __call__(
        self, delight: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> kondo.GateOutput:
        """Keep whatever the mask says; nothing is drawn."""
        weight = torch.ones_like(delight) if self.eta is None else (delight / self.eta).sigmoid()
        return _decision(mask, weight * mask, mask)


class Prechosen:
    """A gate that keeps the units it was told to, whatever their delight.

    Args:
        keep: bool, like the delight it will be shown.
    """

    def __init__(self, keep: Tensor):
        self.keep = keep

    def __call__(
        self, delight: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> kondo.GateOutput:
        """Keep them, where they count; nothing is drawn."""
        keep = self.keep & mask
        return _decision(keep, keep.to(delight.dtype), mask)


def _decision(keep: Tensor, weight: Tensor, mask: Tensor) -> kondo.GateOutput:
    return kondo.GateOutput(
        keep=keep,
        weight=weight,
        price=torch.tensor(-math.inf, dtype=torch.float64),
        rate=keep.sum().double() / mask.sum(),
        probability=keep.to(weight.dtype),
    )


def product_backward(
    contender: Contender,
    policy: lm.CausalLM,
    sampled: Sampled,
    rewards: Tensor,
    draws: Draws,
    step: int,
    group: int,
) -> Learned:
    """Add to `.grad` the gradient of the contender's loss, through `kondo.lm.backward`.

    The choices are those of `contenders.decide` for one member.

    Args:
        contender: the rule.
        policy: the model.
        sampled: N completions of one member, [1, N, ...].
        rewards: [N].
        draws: of this member.
        step: of the draws.
        group: A, answers per prompt.
    """
    tokens, log_probs, entropies, mask = (part[0] for part in sampled)
    prompt_length = tokens.shape[1] - mask.shape[1]
    on_rows = partial(pad, pad=(prompt_length, 0))  # [N, La] -> [N, Lp + La]
    rows = lm.TokenRows(
        input_ids=tokens,
        attention_mask=pad(mask, (prompt_length, 0), value=True),
        completion_mask=on_rows(mask),
    )
    gate, advantages = _gate(contender, rows, rewards, draws, step, group)
    kept: Counter[str] = Counter()

    def loss(log_probs: Tensor, _: Tensor, *, own: Tensor, old: Tensor) -> Tensor:
        kept["tokens"] += log_probs.numel()  # a pack holds kept tokens alone
        if contender.loss == "pg":
            return losses.pg(log_probs, own)
        return losses.ppo(log_probs, own, old, clip=contender.clip)

    report = lm.backward(
        policy,
        rows,
        kondo.advantage.group_mean(rewards, group),
        gate=gate,
        unit=contender.unit,
        screen=on_rows(log_probs) if contender.screen == "free" else None,
        loss=loss,
        denominator=contender.denominator,
        loss_inputs={"own": advantages, "old": on_rows(log_probs)},
        priority=_priority(contender, on_rows(entropies), draws, step, prompt_length),
    )
    spent = report.seconds
    return Learned(
        rows=report.rows_trained,
        tokens=report.tokens_trained,
        kept=kept["tokens"],
        loss=report.loss,
        seconds={
            "screen": spent["screen"],
            "select": spent["select"] + spent["compact"],
            "train": spent["forward"] + spent["backward"],
        },
    )


def _gate(
    contender: Contender,
    rows: lm.TokenRows,
    rewards: Tensor,
    draws: Draws,
    step: int,
    group: int,
) -> tuple[GateLike, Tensor]:
    """Return the contender's gate for these rows, and the advantages [N] of its loss."""
    together = rewards.unsqueeze(0)
    advantages = contenders.loss_advantages(contender, together, group)[0]
    match contender.gate:
        case "dense":
            return Everything(), advantages
        case "soft":
            return Everything(contender.eta), advantages
        case "top" | "filter":
            return kondo.Gate(rate=contender.rate), advantages
        case "budget":
            return BudgetGate(budget=contender.rate).for_rows(rows), advantages
        case "variance":
            keep = contenders.vary_most(contender, together, draws, step, group)
            if contender.scope == "group":
                advantages = contenders.loss_advantages(contender, together, group, among=keep)[0]
            return Prechosen(keep[0]), advantages


def _priority(
    contender: Contender, entropies: Tensor, draws: Draws, step: int, prompt_length: int
) -> Priority:
    """Return what the gate looks at."""
    name = "abs_advantage" if contender.gate == "filter" else contender.priority
    if name == "delight":
        return kondo.delight
    if name == "surprisal":
        return kondo.priorities.surprisal

    def other(log_probs: Tensor, advantages: Tensor, *, mask: Tensor) -> Tensor:
        num_rows, num_columns = log_probs.shape
        if name == "entropy":
            return entropies.where(mask, 0.0)
        if contender.unit == "sequence":  # one value per row: a sum over tokens would favour length
            drawn = draws.uniform("priority", step, num_rows)[0]
            of_row = {"uniform": drawn, "advantage": advantages, "abs_advantage": advantages.abs()}
            return of_row[name]
        if name == "uniform":
            drawn = draws.uniform("priority", step, num_rows, num_columns - prompt_length)[0]
            return pad(drawn, (prompt_length, 0)).where(mask, 0.0)
        signal: Tensor = getattr(kondo.priorities, name)(log_probs, advantages, mask=mask)
        return signal

    return other


def plain_backward(
    contender: Contender,
    module: torch.nn.Module,
    sampled: Sampled,
    rewards: Tensor,
    draws: Draws,
    step: int,
    group: int,
    *,
    max_tokens: int,
) -> Learned:
    """Add the same gradient to `.grad` by a loop without a gate: all rows, weighted afterwards.

    Args:
        contender: the rule; of a gate, the choice is only a mask and saves nothing.
        module: token ids [B, T] -> logits [B, T, V].
        sampled: N completions of one member, [1, N, ...].
        rewards: [N].
        draws: of this member.
        step: of the draws.
        group: A, answers per prompt.
        max_tokens: most tokens of a forward.
    """
    clock, total = _Clock(rewards.device), rewards.new_zeros(())
    tokens, log_probs, entropies, mask = sampled
    _, num_rows, num_columns = tokens.shape
    prompt_length = num_columns - mask.shape[2]
    size = max(1, max_tokens // num_columns)
    with clock.stage("select"):
        chosen = contenders.decide(
            contender,
            log_probs,
            rewards.unsqueeze(0),
            mask,
            draws,
            step,
            group,
            entropies,
            prompt_length=prompt_length,
        )
    with clock.stage("train"):
        for start in range(0, num_rows, size):
            some = torch.arange(start, min(start + size, num_rows), device=tokens.device)
            logits = module(tokens[0, some, :-1])[:, prompt_length - 1 :]
            of_tokens = tokens[0, some, prompt_length:].unsqueeze(2)
            new = logits.log_softmax(dim=2).gather(2, of_tokens).squeeze(2)
            part = contenders.loss(
                contender, new.unsqueeze(0), log_probs, chosen, mask, rows=some.unsqueeze(0)
            ).sum()
            part.backward()  # type: ignore[no-untyped-call]
            total = total + part.detach()
    return Learned(
        rows=num_rows,
        tokens=num_rows * num_columns,
        kept=int(chosen.tokens_kept),
        loss=float(total),
        seconds={stage: clock.seconds[stage] for stage in ("screen", "select", "train")},
    )


class Step(NamedTuple):
    """One step's numbers."""

    seconds: dict[str, float]
    """Of every stage, of the learner and of the loop."""
    learned: Learned
    means: dict[str, float]
    """What describes the experience and the gradient, by metric."""


class _Clock:
    """Seconds per stage; it waits for the device at the end of each."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds = dict.fromkeys((*STAGES, LEARNER, LOOP), 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside."""
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Learner:
    """One model, its sampler, its contender and its optimiser.

    Where nothing was kept Adam steps with a gradient of 0, as a population's member does: its
    moments decay and move on.

    Args:
        task: prompts and rewards.
        model: shapes and products.
        parameters: of one member, [1, ...]; trained in place.
        contender: the rule of its updates; may be exchanged between steps.
        shape: see `Shape`.
        learning_rate: of Adam. 0 does all the work and changes nothing, to measure seconds.
        seed: of prompts and completions.
        path: see the module; may be exchanged between steps.
        compiled: compile the layers in place.
    """

    def __init__(
        self,
        task: TextTask,
        model: StackedLM,
        parameters: Parameters,
        contender: Contender,
        *,
        shape: Shape,
        learning_rate: float,
        seed: int,
        path: Path = "product",
        compiled: bool = False,
    ):
        members = parameters["head"].shape[0]
        if members != 1:
            raise ValueError(
                f"parameters must be those of one member, [1, ...], got {members} members; "
                f"kondo.lab.language.population trains several."
            )
        self.task, self.shape = task, shape
        self.contender, self.path, self.seed = contender, path, seed
        self.learning_rate, self.device = learning_rate, parameters["head"].device
        self.draws = Draws([seed], self.device)
        self.module = model.as_module(parameters, 0)
        if compiled:
            for layer in self.module.backbone.layers:
                layer.compile(dynamic=True)
        on_gpu = self.device.type == "cuda"
        self.policy = lm.CausalLM(
            self.module.backbone,
            head=self.module.head,
            max_tokens=shape.max_tokens,
            attention="varlen" if on_gpu else "auto",
            graph_tokens=shape.graph_tokens if on_gpu else 0,
        )
        self.optimiser = torch.optim.Adam(self.module.parameters(), lr=learning_rate, fused=True)
        self.num_steps = 0
        self.totals: dict[str, float] = {}
        """Of all steps, by metric."""
        self._model, self._parameters = model, parameters
        self._step = torch.zeros((), dtype=torch.int64, device=self.device)
        self._experience: list[Any] = []
        self._generate = Captured(self._sample, self.device)
        self._pay = Captured(self._reward, self.device)

    def _sample(self) -> None:
        """Draw what a population's member of this seed would draw."""
        prompts = self.task.prompts(self.draws, "prompts", self._step, self.shape.num_prompts)
        repeats = self.shape.repeats
        sampled = sample(
            self._model,
            self._parameters,
            prompts,
            repeats=repeats,
            draws=self.draws,
            step=self._step,
        )
        self._experience = [prompts.repeat_interleave(repeats, 1), sampled]

    def _reward(self) -> None:
        asked, sampled = self._experience[:2]
        self._experience[2:] = [self.task.reward(asked, sampled.completions)[0]]

    def evaluate(self) -> dict[str, float]:
        """Return mean rewards on held-out prompts, the same ones every time, by metric."""
        inputs = self._model, self._parameters, self.task, self.draws, self.shape.num_held_out
        return {
            "held-out reward": float(mean_reward(*inputs, greedy=True)),
            "held-out sampled reward": float(mean_reward(*inputs)),
        }

    def step(self) -> Step:
        """Make one step, and add it to the totals."""
        clock = _Clock(self.device)
        with clock.stage(LOOP):
            with clock.stage("generate"):
                self._step.fill_(self.num_steps + 1)  # steps are counted from 1
                self._generate()
            with clock.stage("reward"):
                self._pay()
            with clock.stage(LEARNER):
                learned = self._backward()
                with clock.stage("optimiser"):
                    norm = self._update(learned)
        self.num_steps += 1
        done = Step(clock.seconds | learned.seconds, learned, self._means(learned, norm))
        self._count(done)
        return done

    def warm_up(self) -> None:
        """Run every stage a few times and leave no trace: graphs are recorded, kernels chosen."""
        self._step.fill_(self.num_steps + 1)
        for _ in range(WARM_UP_CALLS):
            self._generate()
            self._pay()
            self._backward()
        self.optimiser.zero_grad()

    def _backward(self) -> Learned:
        self.optimiser.zero_grad()
        _, sampled, rewards = self._experience
        given = (sampled, rewards, self.draws, self.num_steps + 1, self.shape.repeats)
        if self.path == "product":
            return product_backward(self.contender, self.policy, *given)
        return plain_backward(self.contender, self.module, *given, max_tokens=self.shape.max_tokens)

    def _update(self, learned: Learned) -> float:
        """Clip and step; return the norm before."""
        if not learned.kept:
            for parameter in self.module.parameters():
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.shape.max_norm)
        self.optimiser.step()
        return float(norm)

    def _means(self, learned: Learned, norm: float) -> dict[str, float]:
        _, sampled, rewards = self._experience
        groups = rewards.view(-1, self.shape.repeats)
        numbers = {
            "train reward": rewards.mean(),
            "mixed groups": (groups.amax(dim=1) != groups.amin(dim=1)).double().mean(),
            "completion length": sampled.mask.sum(dim=2).double().mean(),
            "entropy": sampled.entropies.sum() / sampled.mask.sum(),
        }
        read = torch.stack([number.double() for number in numbers.values()]).tolist()
        return dict(zip(numbers, read, strict=True)) | {
            "kept rows": learned.rows,
            "kept tokens": learned.kept,
            "gradient norm": norm,
        }

    def _count(self, done: Step) -> None:
        generated = done.means["completion length"] * self.shape.num_rows
        numbers = {f"seconds {name}": spent for name, spent in done.seconds.items()} | {
            "tokens generated": round(generated),
            "tokens differentiated": done.learned.tokens,
            "rows differentiated": done.learned.rows,
            "empty steps": done.learned.kept == 0,
        }
        for name, number in numbers.items():
            self.totals[name] = self.totals.get(name, 0.0) + number

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, loadable with weights_only=True."""
        return {
            "num_steps": self.num_steps,
            "totals": dict(self.totals),
            "module": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned for the same model."""
        self.num_steps, self.totals = state["num_steps"], dict(state["totals"])
        self.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])


def train(
    learner: Learner,
    context: Context,
    *,
    part: str,
    num_steps: int,
    log_steps: Sequence[int],
    evaluate_steps: Sequence[int] = (),
    setting: float = math.nan,
) -> list[Record]:
    """Train to `num_steps` and return the records of every logged step.

    Seconds and counts are sums since the first step; rewards and the like are means since the
    previous logged step. What evaluation, logging and the warm-up take is in no number of seconds.
    Resumes from context.checkpoint if it is there; writes it every minute, and when the user stops,
    to raise Stopped then.

    Args:
        learner: a fresh one; `records` are named after its contender.
        context: progress, stop and checkpoint.
        part: written into the records.
        num_steps: updates to make.
        log_steps: after which steps to log; `num_steps` is always among them.
        evaluate_steps: after which steps to log, and measure the held-out reward as well; 0 is
            before the first.
        setting: written into the records.
    """
    log_at, evaluate_at = {*log_steps, *evaluate_steps, num_steps}, set(evaluate_steps)
    history: list[dict[str, Any]] = []
    recent: list[dict[str, float]] = []
    if context.checkpoint.exists():
        state = torch.load(context.checkpoint, map_location=context.device, weights_only=True)
        learner.load_state_dict(state["learner"])
        history, recent = state["history"], state["recent"]
    elif 0 in evaluate_at:
        history.append(_entry(learner, [], evaluated=True))
    learner.warm_up()
    saved_at = time.monotonic()
    while learner.num_steps < num_steps:
        recent.append(learner.step().means)
        done = learner.num_steps
        if done in log_at:
            history.append(_entry(learner, recent, evaluated=done in evaluate_at))
            recent = []
        context.progress(done / num_steps, _note(learner, history))
        stopped = context.stopped()
        if done < num_steps and (stopped or time.monotonic() - saved_at > CHECKPOINT_SECONDS):
            state = {"learner": learner.state_dict(), "history": history, "recent": recent}
            save(context.checkpoint, state)
            saved_at = time.monotonic()
            if stopped:
                raise Stopped(part)
    return [record for entry in history for record in _records(part, learner, setting, entry)]


def _entry(
    learner: Learner, recent: Sequence[dict[str, float]], *, evaluated: bool
) -> dict[str, Any]:
    """Return what is logged after a step."""
    values = dict(learner.totals)
    for metric in recent[0] if recent else ():
        values[metric] = statistics.fmean(means[metric] for means in recent)
    if evaluated:
        values |= learner.evaluate()
    return {"step": learner.num_steps, "values": values}


def _records(
    part: str, learner: Learner, setting: float, entry: dict[str, Any]
) -> Iterator[Record]:
    for metric, value in entry["values"].items():
        yield Record(
            part=part,
            series=learner.contender.name,
            setting=setting,
            seed=learner.seed,
            step=entry["step"],
            forward=entry["step"] * learner.shape.num_rows,
            backward=int(entry["values"].get("rows differentiated", 0)),
            metric=metric,
            value=float(value),
        )


def _note(learner: Learner, history: Sequence[dict[str, Any]]) -> str:
    rewards = [e["values"]["held-out reward"] for e in history if "held-out reward" in e["values"]]
    found = f", held-out reward {rewards[-1]:.2f}" if rewards else ""
    return f"{learner.contender.name}{found}"


class StageSeconds(NamedTuple):
    """How long a stage of a contender's step takes."""

    contender: str
    """Its name; with " plain" behind it for that path."""
    stage: str
    p20: float
    p50: float
    p80: float
    tokens: float
    """Differentiated per step, the mean over rounds."""


def seconds_per_step(
    learner: Learner,
    others: Sequence[Contender],
    *,
    rounds: int,
    progress: Callable[[float, str], None] = lambda share, note: None,
) -> list[StageSeconds]:
    """Measure one step of every contender in turn, round after round; dense ones also plain.

    The learner's rate must be 0: Adam does its work, and the weights stay, so that all contenders
    meet the same policy, and in a round the same prompts and completions. The learner is left with
    the contender and path it had; its counters move on.

    Args:
        learner: with learning_rate 0.
        others: whom to measure.
        rounds: samples of each.
        progress: called after every round.
    """
    if learner.learning_rate != 0:
        raise ValueError(
            f"learning_rate must be 0 to measure seconds, got {learner.learning_rate}: the policy "
            f"would change between contenders."
        )
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}.")
    plain = [each for each in others if each.gate in ("dense", "soft")]
    turns: list[tuple[Contender, Path]] = [(each, "product") for each in others]
    turns += [(each, "plain") for each in plain]
    found: dict[str, list[Step]] = {_title(*turn): [] for turn in turns}
    before = learner.contender, learner.path
    try:
        for turn in turns:
            learner.contender, learner.path = turn
            learner.warm_up()
        for number in range(rounds):
            first = learner.num_steps
            for turn in turns:
                learner.num_steps = first  # the same experience for all
                learner.contender, learner.path = turn
                found[_title(*turn)].append(learner.step())
            progress((number + 1) / rounds, f"round {number + 1}")
    finally:
        learner.contender, learner.path = before
    return [
        StageSeconds(name, stage, *_percentiles([step.seconds[stage] for step in steps]), tokens)
        for name, steps in found.items()
        for tokens in [statistics.fmean(step.learned.tokens for step in steps)]
        for stage in (*STAGES, LEARNER, LOOP)
    ]


def seconds_records(part: str, found: Sequence[StageSeconds], learner: Learner) -> list[Record]:
    """Return measured seconds as records, three metrics per stage."""
    return [
        Record(
            part=part,
            series=line.contender,
            setting=math.nan,
            seed=learner.seed,
            step=0,
            forward=learner.shape.num_rows,
            backward=0,
            metric=metric,
            value=value,
        )
        for line in found
        for metric, value in (
            (f"seconds {line.stage} p20", line.p20),
            (f"seconds {line.stage} p50", line.p50),
            (f"seconds {line.stage} p80", line.p80),
            *([("tokens differentiated", line.tokens)] if line.stage == LOOP else []),
        )
    ]


def _title(contender: Contender, path: Path) -> str:
    return contender.name if path == "product" else f"{contender.name} plain"


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.tensor(values, dtype=torch.float64).quantile(at).tolist()
    return p20, p50, p80


def prompts_for_seconds(
    seconds_of: Callable[[int], float], target: float, *, fewest: int, most: int, tries: int = 4
) -> int:
    """Return how many prompts a step can hold so that it takes as long as `target`.

    What a cheap learner saves can buy rollouts. Seconds are nearly a straight line in the number of
    prompts: each try aims at where the line through the latest two measurements meets the target.

    Args:
        seconds_of: measures a step with so many prompts, e.g. the p50 of its loop.
        target: seconds of the dense contender's step.
        fewest: the dense contender's prompts; the answer where even these take longer.
        most: what memory holds.
        tries: measurements after the first.

    Returns:
        The largest number measured that took no longer than the target, within 2%.

    Example:
        >>> from kondo.lab.language.loop import prompts_for_seconds
        >>> prompts_for_seconds(lambda number: 1 + 0.1 * number, 5.0, fewest=10, most=1000)
        40
    """
    if not 1 <= fewest <= most:
        raise ValueError(f"fewest must lie between 1 and most ({most}), got {fewest}.")
    number, measured = fewest, [(fewest, seconds_of(fewest))]
    aim = fewest * target / measured[0][1]
    for _ in range(tries):
        number = min(max(round(aim), fewest), most)
        if number in dict(measured):
            break
        measured.append((number, seconds_of(number)))
        (a, seconds_a), (b, seconds_b) = measured[-2:]
        slope = (seconds_b - seconds_a) / (b - a)
        if slope <= 0:  # noise: the two cannot be told apart
            break
        aim = b + (target - seconds_b) / slope
    fitting = [each for each, spent in measured if spent <= target * (1 + EQUAL_TIME)]
    return max(fitting, default=fewest)


def prompts_for_equal_time(
    make: Callable[[int], Learner],
    contender: Contender,
    target: float,
    *,
    fewest: int,
    most: int,
    rounds: int,
) -> int:
    """Return how many prompts of `contender` take as long as `target`, the dense loop's p50.

    Args:
        make: number of prompts -> a learner with learning_rate 0.
        contender: whose loop is measured.
        target: see `prompts_for_seconds`.
        fewest: see there.
        most: see there.
        rounds: of each measurement.
    """

    def seconds_of(num_prompts: int) -> float:
        found = seconds_per_step(make(num_prompts), [contender], rounds=rounds)
        (line,) = (x for x in found if (x.contender, x.stage) == (contender.name, LOOP))
        return line.p50

    return prompts_for_seconds(seconds_of, target, fewest=fewest, most=most)
