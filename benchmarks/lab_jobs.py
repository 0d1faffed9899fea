"""What a process of the laboratory's benchmark does: build one contender's share, check it, run it.

parent -- Order --> worker: build once, keep, step -- seconds, or what it found --> parent
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness import peak_bytes_cpu, peak_bytes_cuda, synchronise
from kondo_lab.models.architecture import Architecture
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.models.decoder_module import Decoder
from kondo_lab.models.networks import MLP
from kondo_lab.tasks import seeds
from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.tasks.images import Images
from kondo_lab.tasks.reversal import ReversalTask
from kondo_lab.training.arms import Arm
from kondo_lab.training.gates import Everything, QuantileGate
from kondo_lab.training.member import Member
from kondo_lab.training.population import Population
from kondo_lab.training.programs import BanditProgram, SequenceProgram
from lab_check import gradient_error
from plain_loop import RATE, BanditLoop, Loop, MethodName, ReversalLoop

TaskName = Literal["mnist", "reversal"]
WARM_UP_STEPS = 6
"""On CUDA a population records its graphs at the fourth."""
PROBE_STEPS = 3
ARMS: dict[MethodName, Arm] = {
    "DG": Arm(unit="token", gate=Everything(eta=1.0)),
    "DG-K 3%": Arm(gate=QuantileGate(rate=RATE)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of tasks and policies: the papers' where nothing else is said."""

    images: int = 60_000
    pixels: int = 784
    mlp_width: int = 100
    batch: int = 100
    length: int = 10
    num_tokens: int = 2
    width: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_prompts: int = 10
    num_answers: int = 10


QUICK = Sizes(images=100, pixels=16, mlp_width=8, length=3, width=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One process's share of a contender."""

    task: TaskName
    method: MethodName
    members: int
    """Of a population; 0 for the plain loop, which trains one seed."""
    seed: int
    """Of the first member."""
    sizes: Sizes


class Order(NamedTuple):
    """What the parent asks for."""

    job: Job
    steps: int
    """0: inspect."""


class Finding(NamedTuple):
    """What one untimed step of a job did."""

    rows: int
    """Differentiated, per member."""
    peak_memory_mb: float
    gradient_error: float
    """Relative, of a population's first member against plain PyTorch on the same rows."""
    step_seconds: float


def serve(pipe: Connection, threads: int, device_name: str) -> None:
    """Answer orders until None comes."""
    torch.set_num_threads(threads)
    device = torch.device(device_name)
    built: dict[Job, Loop | Population] = {}
    while (order := pipe.recv()) is not None:
        if order.steps == 0:
            pipe.send(inspect(order.job, built, device))
        else:
            pipe.send(seconds_of(built[order.job], order.steps, device))


def seconds_of(learner: Loop | Population, steps: int, device: torch.device) -> float:
    """Return the seconds that some steps take."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        learner.step()
    synchronise(device)
    return time.perf_counter() - start


def inspect(job: Job, built: dict[Job, Loop | Population], device: torch.device) -> Finding:
    """Build a job's learner and keep it; check its gradient, count its rows, warm it up."""
    find_peak = peak_bytes_cuda if device.type == "cuda" else peak_bytes_cpu
    learner = built[job] = build(job, device)
    error = 0.0
    if isinstance(learner, Population):
        twin = plain_policy(job.task, job.sizes, job.seed).to(device)
        error = gradient_error(learner, twin, job.method)
        held = list(learner.parameters.values())
    else:
        held = list(learner.policy.parameters())
    rows = count_rows(learner)
    peak, _ = find_peak(learner.step, held)
    seconds_of(learner, WARM_UP_STEPS, device)
    step_seconds = seconds_of(learner, PROBE_STEPS, device) / PROBE_STEPS
    return Finding(rows, peak / 2**20, error, step_seconds)


def build(job: Job, device: torch.device) -> Loop | Population:
    """Return the learner of a job."""
    sizes = job.sizes
    learning_rate = 1e-3 if job.task == "mnist" else 1e-4
    if job.members == 0:
        common: Any = {"method": job.method, "seed": job.seed, "learning_rate": learning_rate}
        policy = plain_policy(job.task, sizes, job.seed).to(device)
        if isinstance(policy, MLP):
            return BanditLoop(bandit(sizes, device), policy, batch=sizes.batch, **common)
        common |= {"num_prompts": sizes.num_prompts, "num_answers": sizes.num_answers}
        return ReversalLoop(reversal(sizes), policy, **common)
    members = [
        Member(
            series=job.method,
            seed=job.seed + number,
            learning_rate=learning_rate,
            arm=ARMS[job.method],
        )
        for number in range(job.members)
    ]
    return Population(program(job.task, sizes, device), members, device=device)


@functools.cache
def bandit(sizes: Sizes, device: torch.device) -> ImageBandit:
    """Return a bandit of MNIST's shape with random pixels: no time depends on them."""
    generator = seeds.generator(0, "images")
    shape = (sizes.images, sizes.pixels)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (sizes.images,), generator=generator)
    data = Images(images, labels, images[:10], labels[:10], white=255)
    return ImageBandit("random images", data, num_actions=10, device=device)


def reversal(sizes: Sizes) -> ReversalTask:
    """Return the rule."""
    return ReversalTask(length=sizes.length, num_tokens=sizes.num_tokens)


def program(task: TaskName, sizes: Sizes, device: torch.device) -> BanditProgram | SequenceProgram:
    """Return what a population runs."""
    if task == "mnist":
        return BanditProgram(bandit(sizes, device), width=sizes.mlp_width, batch=sizes.batch)
    network = StackedDecoder(
        _architecture(sizes),
        prompt_length=sizes.length,
        answer_length=sizes.length,
        num_tokens=sizes.num_tokens,
    )
    return SequenceProgram(
        reversal(sizes), network, num_prompts=sizes.num_prompts, num_answers=sizes.num_answers
    )


def plain_policy(task: TaskName, sizes: Sizes, seed: int) -> MLP | Decoder:
    """Return what the plain loop trains: a member's twin."""
    generator = seeds.generator(seed, "weights")
    if task == "mnist":
        return MLP(sizes.pixels, 10, width=sizes.mlp_width, generator=generator)
    return Decoder.fresh(
        _architecture(sizes),
        prompt_length=sizes.length,
        num_tokens=sizes.num_tokens,
        generator=generator,
    )


def _architecture(sizes: Sizes) -> Architecture:
    return Architecture(
        width=sizes.width,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        ff_width=4 * sizes.width,
    )


def count_rows(learner: Loop | Population) -> int:
    """Make one step; return how many rows per member had a gradient arrive at the output."""
    counted = 0

    def watched(outputs: Callable[..., Tensor], dimension: int) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            found = outputs(*arguments)
            found.register_hook(count)  # type: ignore[no-untyped-call]
            return found

        def count(gradient: Tensor) -> None:
            nonlocal counted
            counted += gradient.shape[dimension]

        return call

    owner: Any
    owner, name, dimension = (
        (learner.program, "outputs", 1)
        if isinstance(learner, Population)
        else (learner, "log_probs", 0)
    )
    setattr(owner, name, watched(getattr(owner, name), dimension))
    try:
        learner.step()
    finally:
        delattr(owner, name)  # the class's own comes back
    return counted
