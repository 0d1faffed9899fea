"""REINFORCE on two processes with Hugging Face Accelerate; 10% of the rows are differentiated.

Install, in a checkout:  pip install . accelerate
Run, two processes:      torchrun --nproc_per_node 2 examples/accelerate_ddp.py [--gate delight:0.1]
Run, one process:        python examples/accelerate_ddp.py

A row is a context and the action taken in it. One of ten actions is right and has reward 1. The
gate chooses among the rows of all processes, so one process with all rows ends with the same
weights, up to rounding. A step in which all actions are right keeps nothing, and no process steps
its optimizer. On GPUs remove `cpu=True`; `accelerate launch --num_processes 2` then does the same
as torchrun. On CPUs it starts a single process unless it is given MPI.

Expect the reward to rise from 0.03 to above 0.9. Two processes print, after 14 s of CPU time (other
CPUs give other digits):

    step   0  reward 0.03  differentiated 6 of 64 rows
    step  40  reward 0.89  differentiated 6 of 64 rows
    step  80  reward 0.97  differentiated 6 of 64 rows
    step 119  reward 0.98  differentiated 6 of 64 rows
    trained on 654 of 7,680 rows (8.5%); 11 steps were empty; weights equal on all 2 processes: True
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import kondo

ROWS, INPUTS, ACTIONS = 64, 16, 10


def make_model() -> nn.Module:
    """Return a policy: context -> logits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, ACTIONS))


def own_rows(number: int, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this process's part of step `number`: contexts, right actions, noise to sample by."""
    draw = torch.Generator().manual_seed(number)
    codes = torch.randn(ACTIONS, INPUTS, generator=torch.Generator().manual_seed(7))
    right = torch.randint(ACTIONS, (ROWS,), generator=draw)
    contexts = codes[right] + 0.1 * torch.randn(ROWS, INPUTS, generator=draw)
    noise = -torch.rand(ROWS, ACTIONS, generator=draw).log().neg().log()
    parts = (contexts, right, noise)
    contexts, right, noise = (part.chunk(size)[rank] for part in parts)
    return contexts, right, noise


class Learner:
    """The policy, its optimizer, and the step."""

    def __init__(self, accelerator: Accelerator, gate: str):
        self.accelerator, self.gate = accelerator, kondo.parse_gate(gate)
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        # Two processes: the model comes back in DistributedDataParallel.
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.group = "world" if accelerator.num_processes > 1 else None
        self.options = kondo.Options(
            module=self.model,
            backward_fn=accelerator.backward,
            generator=torch.Generator().manual_seed(0),  # every process takes those of the first
        )

    def log_prob(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Return log pi(action | context)."""
        contexts, actions = rows
        return self.model(contexts).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)

    def step(self, contexts: Tensor, actions: Tensor, advantages: Tensor) -> kondo.Report:
        """Train on the rows of all processes; each gives its own."""
        self.optimizer.zero_grad()
        # Was: loss = -(log_prob((contexts, actions)) * advantages).mean()
        #      accelerator.backward(loss)
        report = kondo.backward(
            self.log_prob,
            (contexts, actions),
            advantages,
            gate=self.gate,
            group=self.group,
            options=self.options,
        )
        if not report.empty:  # the same on every process
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return report


def main() -> None:
    """Train, and print what it cost."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--gate", default="delight:0.1", help="as for kondo.parse_gate")
    options.add_argument("--steps", type=int, default=120)
    options.add_argument("--save", type=Path, help="folder for the weights of every process")
    chosen = options.parse_args()

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    learner = Learner(accelerator, chosen.gate)
    seen = trained = skipped = 0
    for number in range(chosen.steps):
        contexts, right, noise = own_rows(
            number, accelerator.process_index, accelerator.num_processes
        )
        with torch.no_grad():
            actions = (learner.model(contexts) + noise).argmax(-1)
        rewards = (actions == right).float()
        mean = accelerator.gather(rewards).mean()  # the baseline is that of all rows
        if number == 0:  # once: can rows be dropped from this policy?
            kondo.check(
                learner.log_prob,
                (contexts, actions),
                rewards - mean,
                group=learner.group,
                options=learner.options,
            )
        report = learner.step(contexts, actions, rewards - mean)
        seen, trained = seen + report.rows_seen, trained + report.rows_trained
        skipped += report.empty
        if number % 40 == 0 or number == chosen.steps - 1:
            kept = f"differentiated {report.rows_trained} of {report.rows_seen} rows"
            accelerator.print(f"step {number:3}  reward {float(mean):.2f}  {kept}", flush=True)

    weights = nn.utils.parameters_to_vector(learner.model.parameters()).detach()
    every = accelerator.gather(weights).view(accelerator.num_processes, -1)
    accelerator.print(
        f"trained on {trained:,} of {seen:,} rows ({trained / seen:.1%}); {skipped} steps were "
        f"empty; weights equal on all {len(every)} processes: {bool((every == every[0]).all())}"
    )
    if chosen.save:
        torch.save(weights, chosen.save / f"weights{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
