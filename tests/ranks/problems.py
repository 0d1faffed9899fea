"""Small policies and batches, made alike in every process, and cut into the ranks' parts."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributions import Independent, Normal
from torch.nn.parallel import DistributedDataParallel

import kondo

NUM_ACTIONS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """All rows together. The tokens of rank r are the first widths[r] of each of its rows."""

    batch: dict
    advantages: torch.Tensor
    mask: torch.Tensor
    splits: tuple[int, ...]
    widths: tuple[int, ...] | None

    def part(self, rank):
        """Return what one rank is given: batch, advantages, mask."""
        start = sum(self.splits[:rank])
        rows = slice(start, start + self.splits[rank])

        def cut(values):
            values = values[rows]
            return (
                values if self.widths is None or values.ndim < 2 else values[:, : self.widths[rank]]
            )

        return {k: cut(v) for k, v in self.batch.items()}, cut(self.advantages), cut(self.mask)


def problem(unit, splits, *, widths=None, seed=0, dtype=torch.float64):
    """Draw a problem: unit "sample" has rows of three numbers, the others rows of tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(splits)
    if unit == "sample":
        batch = {
            "x": torch.randn(num_rows, 3, generator=generator, dtype=dtype),
            "a": torch.randint(NUM_ACTIONS, (num_rows,), generator=generator),
        }
        shape = (num_rows,)
    else:
        widths = widths or (5,) * len(splits)
        shape = (num_rows, max(widths))
        batch = {"a": torch.randint(NUM_ACTIONS, shape, generator=generator)}
    advantages = torch.randn(num_rows, generator=generator, dtype=dtype)
    mask = torch.rand(shape, generator=generator) < 0.8
    if unit != "sample":
        width_of = torch.tensor(widths).repeat_interleave(torch.tensor(splits))
        mask &= torch.arange(shape[1]) < width_of[:, None]
    else:
        widths = None
    return Problem(
        batch=batch, advantages=advantages, mask=mask, splits=tuple(splits), widths=widths
    )


def normal_problem(num_rows):
    """Return mean, policy, batch and advantages: normals so narrow that densities exceed 1."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
    observations, noise, advantages = numbers[:, :3], numbers[:, 3:5], numbers[:, 5]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.float64)
    actions = (model(observations) + 0.1 * noise).detach()
    policy = kondo.DistributionPolicy(lambda seen: Independent(Normal(model(seen), 0.1), 1))
    return model, policy, (observations, actions), advantages


class Policy(nn.Module):
    """Log-probs of the taken actions: [n] for unit "sample", else [n, T], causal."""

    def __init__(self, unit, *, seed=0, dtype=torch.float64):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            samples = unit == "sample"
            self.read = (nn.Linear(3, 6) if samples else nn.Embedding(NUM_ACTIONS, 6)).to(dtype)
            self.choose = nn.Linear(6, NUM_ACTIONS, dtype=dtype)
        # DDP exchanges buffers in every forward: one forward too few on a rank, and it would hang.
        self.register_buffer("exchanged", torch.zeros(1))

    def forward(self, rows):
        if "x" in rows:
            hidden = self.read(rows["x"])
        else:
            own = self.read(rows["a"])
            hidden = own.cumsum(1) - own  # of the tokens before it
        log_probs = self.choose(hidden.tanh()).log_softmax(-1)
        return log_probs.gather(-1, rows["a"].unsqueeze(-1)).squeeze(-1)


def wrap(module, group, kind, units=(), **options):
    """Spread a module over the ranks of a group: "plain", "ddp", or "fsdp" with those units."""
    if kind == "ddp":
        return DistributedDataParallel(module, process_group=group, **options)
    if kind == "fsdp":
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        for child in units or module.children():
            fully_shard(child, mesh=mesh, **options)
        return fully_shard(module, mesh=mesh, **options)
    return module


def gradients(module):
    """Return every gradient by its plain name, whole; None where there is none."""
    found = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.replace("module.", "")] = None if whole is None else whole.clone()
    return found
