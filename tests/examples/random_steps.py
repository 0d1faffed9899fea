"""Many steps of an example's learner with selections that are hard on ranks; run on two processes.

    torchrun --nproc_per_node 2 random_steps.py accelerate FOLDER STEPS
    python random_steps.py fabric FOLDER STEPS

Every process draws the same steps and gives its own rows: many, few or none. Beside the learner
each trains a copy alone on the rows of all processes. What each ends with goes into the folder.
"""

import copy
import importlib.util
import random
import sys
from pathlib import Path

import torch
from torch import nn

import kondo

EXAMPLES = Path(__file__).parents[2] / "examples"
GATES = (
    "delight:0.1",
    "delight:0.5,negative_quota=0.5",
    "price:0",
    "price:100",  # keeps nothing
    "unbiased:0.2",
    "noise:1.2",
    "variance:0.3",
    "dense",
)


def load(name):
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(framework, example):
    """Return the learner of two processes, and this one's number."""
    if framework == "accelerate":
        from accelerate import Accelerator

        given = Accelerator(cpu=True)
        return example.Learner(given, "dense"), given.process_index
    from lightning_fabric import Fabric

    given = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    given.launch()
    return example.Learner(given, "dense"), given.global_rank


def draw_step(draw, number, example):
    """Return the rows of all processes, how many are the first's, and a gate."""
    size = draw.choice((1, 2, 3, 17, 64))
    first = draw.choice((0, size, size // 2, 1, draw.randint(0, size)))
    generator = torch.Generator().manual_seed(number)
    contexts = torch.randn(size, example.INPUTS, generator=generator)
    actions = torch.randint(example.ACTIONS, (size,), generator=generator)
    advantages = torch.randn(size, generator=generator)
    kind = draw.choice(("normal", "zero", "negative", "first", "second", "one"))
    if kind == "zero":
        advantages = torch.zeros(size)
    elif kind == "negative":
        advantages = -advantages.abs()
    elif kind == "first":  # the second process keeps nothing
        advantages[first:] = 0.0
    elif kind == "second":
        advantages[:first] = 0.0
    elif kind == "one":
        advantages[1:] = 0.0
    return (contexts, actions, advantages), min(first, size), draw.choice(GATES)


def alone(model, optimizer, rows, gate, generator):
    """Take the step on one process with all rows."""
    contexts, actions, advantages = rows

    def log_prob(given):
        found = model(given[0]).log_softmax(-1)
        return found.gather(1, given[1][:, None]).squeeze(1)

    optimizer.zero_grad()
    report = kondo.backward(
        log_prob,
        (contexts, actions),
        advantages,
        gate=gate,
        group="local",
        options=kondo.Options(generator=generator),
    )
    if not report.empty:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return report


def main():
    framework, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    example = load({"accelerate": "accelerate_ddp", "fabric": "fabric_ddp"}[framework])
    learner, rank = start(framework, example)
    model = copy.deepcopy(example.make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    draw, counts, own = random.Random(0), [], []
    for number in range(steps):
        rows, first, spec = draw_step(draw, number, example)
        mine = [part[:first] if rank == 0 else part[first:] for part in rows]
        learner.gate = kondo.parse_gate(spec)
        report = learner.step(*mine)
        reference = alone(model, optimizer, rows, kondo.parse_gate(spec), generator)
        counts.append((report.kept, report.empty, report.rows_seen))
        own.append((reference.kept, reference.empty, reference.rows_seen))
    weights, expected = (
        nn.utils.parameters_to_vector(one.parameters()).detach() for one in (learner.model, model)
    )
    found = {"weights": weights, "expected": expected, "counts": counts, "alone": own}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
