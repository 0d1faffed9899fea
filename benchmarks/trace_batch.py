"""The modules that a batch passes from the call of `kondo.backward` to `.grad`, and their lines.

    python benchmarks/trace_batch.py

Counts a module of `kondo` if one of its functions runs in the second call: the first one imports
and warms up. Lines are those of the whole file. Prints the modules in the order in which the batch
reaches them, with the functions that ran, for a plain function and for a `kondo.lm.CausalLM`.
`docs/contributing/layers.md` shows the same list. A test holds what is reached.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import kondo

ROOT = Path(kondo.__file__).parent

# Modules and lines of a batch of each kind: what we aim for, and what it may not exceed today.
AIMS = {"plain function": (15, 3_000), "CausalLM": (25, 5_000)}
LIMITS = {"plain function": (18, 4_100), "CausalLM": (23, 5_700)}


class Passed(NamedTuple):
    """A module that a batch passed."""

    module: str
    lines: int
    functions: list[str]
    """Those that ran, in order."""


def trace(step: Callable[[], Any]) -> list[Passed]:
    """Return the modules of `kondo` with a function that ran in the second call of a step."""
    step()
    ran: dict[str, dict[str, None]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(str(ROOT))
        if ours and not code.co_name.startswith("<"):
            ran.setdefault(code.co_filename, {})[code.co_qualname] = None

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return [
        Passed(
            str(Path(file).relative_to(ROOT).with_suffix("")).replace("/", "."),
            len(Path(file).read_text().splitlines()),
            list(functions),
        )
        for file, functions in ran.items()
    ]


def plain_function() -> Callable[[], Any]:
    """Return a step of a plain function, with the gate that README shows."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    batch = torch.randn(64, 4), torch.randint(3, (64,))
    advantages, gate = torch.randn(64), kondo.UnbiasedGate(rate=0.1)

    def log_prob(rows: Any) -> torch.Tensor:
        states, actions = rows
        log_probs: torch.Tensor = net(states).log_softmax(-1)
        return log_probs.gather(1, actions[:, None]).squeeze(1)

    return lambda: kondo.backward(log_prob, batch, advantages, gate=gate)


class _Bigram(nn.Module):
    """The smallest backbone: a token's hidden state is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return self.embedding(input_ids)


def causal_lm() -> Callable[[], Any]:
    """Return a step of a `kondo.lm.CausalLM`."""
    torch.manual_seed(0)
    policy = kondo.lm.CausalLM(_Bigram(), head=nn.Linear(4, 10))
    ids = torch.randint(10, (64, 12))
    completion = torch.arange(12).expand(64, 12) >= 4
    batch = kondo.lm.TokenRows(
        input_ids=ids, attention_mask=torch.ones_like(ids), completion_mask=completion
    )
    advantages, gate = torch.randn(64), kondo.UnbiasedGate(rate=0.1)
    return lambda: kondo.backward(policy, batch, advantages, gate=gate)


STEPS = {"plain function": plain_function, "CausalLM": causal_lm}


def main() -> int:
    """Print the modules of each kind of batch; return 1 if there are more than the limit."""
    over = 0
    for kind, make in STEPS.items():
        passed = trace(make())
        lines = sum(each.lines for each in passed)
        (aim_modules, aim_lines), (most_modules, most_lines) = AIMS[kind], LIMITS[kind]
        print(f"\n{kind}: {len(passed)} modules, {lines:,} lines ", end="")
        print(f"(aim {aim_modules} and {aim_lines:,}, limit {most_modules} and {most_lines:,})")
        for each in passed:
            print(f"  {each.module:24} {each.lines:5}  {', '.join(each.functions)}")
        over += len(passed) > most_modules or lines > most_lines
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
