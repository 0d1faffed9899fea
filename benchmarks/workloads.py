"""What the step benchmark differentiates: random weights, random rows, one log-prob function.

Shapes: N rows, T tokens, V vocabulary or actions.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]

SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, one batch and the log-prob function that all contenders share."""

    name: str
    config: str
    model: nn.Module
    log_prob: Callable[[Batch], Tensor]
    """rows -> [n] or [n, T - 1]."""
    batch: Batch
    advantages: Tensor
    """[N]."""
    unit: Literal["sample", "sequence"]
    tokens: int
    """In all rows; N where a row is one sample."""
    micro_batch: int | None
    """Rows per forward and backward of every contender; all at once if None."""
    repeats: int
    """Rounds by default."""
    tolerance: float
    """Relative difference allowed between gradients of the same rows in other batches."""

    @property
    def rows(self) -> int:
        """N."""
        return self.batch[0].shape[0]

    def slices(self, size: int | None) -> Iterator[slice]:
        """Yield the rows, `size` at a time."""
        step = size or self.rows
        for start in range(0, self.rows, step):
            yield slice(start, start + step)

    def held(self) -> list[Tensor]:
        """Return what lies in memory before a step."""
        return [*self.model.parameters(), *self.model.buffers(), *self.batch, self.advantages]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpShape:
    """Sizes of a fully connected policy."""

    rows: int = 4096
    inputs: int = 784
    width: int = 1024
    actions: int = 10
    repeats: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmShape:
    """Sizes of a causal language model."""

    rows: int
    tokens: int
    layers: int
    width: int
    vocabulary: int
    repeats: int
    micro_batch: int | None = None
    bfloat16: bool = False


GPT2 = LmShape(rows=64, tokens=64, layers=4, width=256, vocabulary=1024, repeats=8)
# In one piece the dense step is a fifth slower: it waits for the system to hand out 1.6 GB. The
# baseline is the faster one.
LARGER_CPU = LmShape(
    rows=64, tokens=64, layers=6, width=512, vocabulary=4096, repeats=3, micro_batch=32
)
# GPT-2 medium. The logits of the whole batch would fill the GPU, hence the micro-batches.
LARGER_CUDA = LmShape(
    rows=256,
    tokens=512,
    layers=24,
    width=1024,
    vocabulary=50257,
    repeats=5,
    micro_batch=32,
    bfloat16=True,
)
QUICK_MLP = MlpShape(rows=64, inputs=16, width=32, actions=4, repeats=1)
QUICK_GPT2 = LmShape(rows=16, tokens=8, layers=1, width=64, vocabulary=32, repeats=1)
QUICK_LARGER = dataclasses.replace(QUICK_GPT2, layers=2, micro_batch=4)


def build(name: str, device: torch.device, *, quick: bool) -> Workload:
    """Return the workload of that name at the size for this device."""
    builders: dict[str, Callable[[], Workload]] = {
        "mlp": lambda: mlp(name, QUICK_MLP if quick else MlpShape(), device),
        "gpt2": lambda: language_model(name, QUICK_GPT2 if quick else GPT2, device),
        "larger": lambda: language_model(name, _larger(device, quick), device),
    }
    if name not in builders:
        raise ValueError(f"models must be among {', '.join(builders)}, got {name!r}.")
    return builders[name]()


def _larger(device: torch.device, quick: bool) -> LmShape:
    if quick:
        return QUICK_LARGER
    return LARGER_CUDA if device.type == "cuda" else LARGER_CPU


def mlp(name: str, shape: MlpShape, device: torch.device) -> Workload:
    """Return a policy on vectors: one row is one sample."""
    torch.manual_seed(SEED)
    policy = nn.Sequential(
        nn.Linear(shape.inputs, shape.width),
        nn.ReLU(),
        nn.Linear(shape.width, shape.width),
        nn.ReLU(),
        nn.Linear(shape.width, shape.actions),
    ).to(device)

    def log_prob(rows: Batch) -> Tensor:
        states, actions = rows
        logits: Tensor = policy(states)
        return logits.log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)

    data = torch.Generator().manual_seed(SEED)
    states = torch.randn(shape.rows, shape.inputs, generator=data)
    actions = torch.randint(shape.actions, (shape.rows,), generator=data)
    advantages = torch.randn(shape.rows, generator=data)
    return Workload(
        name=name,
        config=f"{shape.inputs}-{shape.width}-{shape.width}-{shape.actions}, {shape.rows} rows, "
        f"float32",
        model=policy,
        log_prob=log_prob,
        batch=(states.to(device), actions.to(device)),
        advantages=advantages.to(device),
        unit="sample",
        tokens=shape.rows,
        micro_batch=None,
        repeats=shape.repeats,
        tolerance=1e-4,
    )


def language_model(name: str, shape: LmShape, device: torch.device) -> Workload:
    """Return a GPT-2 with tied embeddings and no dropout: one row is one sequence."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.width // 64,
        n_positions=shape.tokens,
        vocab_size=shape.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    policy: Any = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    policy.to(device)

    def log_prob(rows: Batch) -> Tensor:
        (ids,) = rows
        half = torch.autocast(device.type, torch.bfloat16)
        with half if shape.bfloat16 else contextlib.nullcontext():
            logits: Tensor = policy(input_ids=ids).logits[:, :-1]
        return logits.float().log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)

    data = torch.Generator().manual_seed(SEED)
    ids = torch.randint(shape.vocabulary, (shape.rows, shape.tokens), generator=data)
    advantages = torch.randn(shape.rows, generator=data)
    split = f", micro-batches of {shape.micro_batch}" if shape.micro_batch else ""
    dtype = "bfloat16 autocast" if shape.bfloat16 else "float32"
    return Workload(
        name=name,
        config=f"GPT-2 shape, {shape.layers} layers, width {shape.width}, {shape.rows} x "
        f"{shape.tokens} tokens, vocabulary {shape.vocabulary}, {dtype}{split}",
        model=policy,
        log_prob=log_prob,
        batch=(ids.to(device),),
        advantages=advantages.to(device),
        unit="sequence",
        tokens=shape.rows * shape.tokens,
        micro_batch=shape.micro_batch,
        repeats=shape.repeats,
        tolerance=5e-2 if shape.bfloat16 else 1e-4,
    )
