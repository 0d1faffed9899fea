"""One model end to end through the product, with clocks: sample, pay, learn, step.

    generate   prompts and completions, with the log-probs they were drawn with
    reward     of every completion
    learn      screen, select, train: see `updates`
    optimiser  norm, clip, Adam

At the end of each stage the clock waits for the device. The learner's seconds are those after the
reward, bookkeeping included.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from kondo import lm
from kondo_lab.draws import Draws
from kondo_lab.language.contenders import Contender
from kondo_lab.language.sampler import sample
from kondo_lab.language.supervised import HeldOut
from kondo_lab.language.transformer import StackedLM
from kondo_lab.language.updates import (
    LEARNER,
    LOOP,
    Clock,
    Learned,
    plain_backward,
    product_backward,
)
from kondo_lab.part import Context, Record, Stopped
from kondo_lab.population.cuda_graphs import Captured
from kondo_lab.population.networks import Parameters
from kondo_lab.population.train import save
from kondo_lab.text import TextTask

CHECKPOINT_SECONDS = 60.0
"""Between two checkpoints of a run: what a crash can cost."""
WARM_UP_CALLS = 5
"""Of each stage before the first step: graphs are recorded and kernels chosen there."""

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
    graph_tokens: int = 16_384
    """On a GPU, packs of at most so many tokens are replayed from CUDA graphs. Larger ones take
    longer to compute than to launch, and would have to be recorded again wherever their number of
    tokens changes from step to step."""

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


class Step(NamedTuple):
    """One step's numbers."""

    seconds: dict[str, float]
    """Of every stage, of the learner and of the loop."""
    learned: Learned
    means: dict[str, float]
    """What describes the experience and the gradient, by metric."""


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
                f"kondo_lab.language.population trains several."
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
        self._held_out = HeldOut(model, parameters, task, self.draws, shape.num_held_out)

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
        return {name: float(value) for name, value in self._held_out().items()}

    def step(self) -> Step:
        """Make one step, and add it to the totals."""
        clock = Clock(self.device)
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
            self._held_out()  # recording empties the allocator's cache: not between timed steps
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
