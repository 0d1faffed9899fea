"""Cheaper screens than the exact forward, and how far they agree with it.

A screen maps rows to log-probs [N, S] and is given as `screen=`. The gate only ranks by it; the
gradient of what is kept is always that of the policy itself.

| screen                  | costs                         | is wrong by                          |
|-------------------------|-------------------------------|--------------------------------------|
| the rollout's log-probs | nothing                       | the sampler's precision, its age     |
| `stale(lm)`             | F, on any device, any time    | the updates since `refresh`          |
| `quantised(lm, "fp8")`  | F with cheaper linear layers  | rounding, and the updates            |
| `truncated(lm, k)`      | k / layers of F, and the head | the layers left out                  |
| `draft(small, lm)`      | the small model's forward     | another model's opinion              |

`agreement` compares kept sets, `gradient_cosine` the gradients they lead to. `CheckedScreen` falls
back to the exact screen when a free one stops agreeing.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kondo.core.base_gate import Unit
from kondo.core.given_gates import as_gate
from kondo.engine.policy import LogProb, evaluation
from kondo.engine.select import select
from kondo.engine.step import backward
from kondo.lm.model import CausalLM
from kondo.lm.quantise import Format, LinearBackend, QuantisedLinear, quantise_linears, requantised
from kondo.lm.rows import TokenRows


class FrozenCopy:
    """A copy of a policy, as it was at the latest `refresh`; made by `stale` or `quantised`."""

    backend: str
    quantised: int
    skipped: int

    def __init__(
        self,
        lm: CausalLM,
        number: Format | None = None,
        backend: LinearBackend = "auto",
        compile_options: dict[str, Any] | None = None,
    ):
        self._lm, self._number = lm, number
        self._frozen = copy.deepcopy(lm)
        self._frozen.module.eval()
        for parameter in parameters_of(self._frozen):
            parameter.requires_grad_(False)
        if number is not None:
            self.backend, self.quantised, self.skipped = quantise_linears(
                self._frozen.module, number, skip=self._frozen.head.weight, backend=backend
            )
        for name, theirs in lm.module.named_modules():  # a copy is not compiled
            if theirs._compiled_call_impl is not None:
                self._frozen.module.get_submodule(name).compile(**(compile_options or {}))

    def __call__(self, rows: Any) -> Tensor:
        """Return the copy's log-probs, [N, S]."""
        return self._frozen.log_prob(rows)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's present weights and buffers, in place; quantise where that is done."""
        frozen, lm = self._frozen, self._lm
        for name, theirs in lm.module.named_modules():
            mine = frozen.module.get_submodule(name)
            if isinstance(mine, QuantisedLinear):
                assert isinstance(theirs, nn.Linear)
                mine.refresh(theirs)
                continue
            for old, new in (
                *zip(mine.parameters(False), theirs.parameters(False), strict=True),
                *zip(mine.buffers(False), theirs.buffers(False), strict=True),
            ):
                if type(old.data) is type(new.data):
                    old.copy_(new)
                else:  # torchao's tensors stand in an nn.Linear
                    assert self._number is not None
                    assert isinstance(theirs, nn.Linear)
                    mine.weight = requantised(theirs, self._number).weight
        frozen.head.weight.copy_(lm.head.weight)  # a head may stand beside the module
        if frozen.head.bias is not None and lm.head.bias is not None:
            frozen.head.bias.copy_(lm.head.bias)


def stale(lm: CausalLM, *, compile_options: dict[str, Any] | None = None) -> FrozenCopy:
    """Return a frozen copy of `lm` as a screen; its `.refresh()` takes the present weights.

    It costs as much as the exact screen, but not on the learner's device or time: and it shows how
    stale a rollout's log-probs may grow before they stop to agree.

    Args:
        lm: the policy.
        compile_options: layers that are compiled in `lm` (`layer.compile()`) are compiled in the
            copy, with these arguments of `nn.Module.compile`; a layer does not tell its own.
    """
    return FrozenCopy(lm, compile_options=compile_options)


def quantised(
    lm: CausalLM,
    number: Format = "fp8",
    *,
    backend: LinearBackend = "auto",
    compile_options: dict[str, Any] | None = None,
) -> FrozenCopy:
    """Return a copy of `lm` with int8 or float8 linear layers, to `.refresh()` as `lm` learns.

    The head and the embeddings keep their precision, and so do layers whose sizes do not fit the
    format: the result's `quantised` and `skipped` count the linear layers.

    Args:
        lm: the policy; it is left as it is.
        number: "fp8" (CUDA, compute capability 8.9 or higher) or "int8".
        backend: "torch" for the layers of `kondo.lm.quantise`, "torchao", or "auto": "torch".
        compile_options: see `stale`.
    """
    return FrozenCopy(lm, number, backend, compile_options)


def truncated(lm: CausalLM, num_layers: int) -> LogProb:
    """Return an early exit of `lm` as a screen: its first layers, then its final norm and head.

    Weights are the policy's own: nothing is copied, and there is nothing to refresh. The policy is
    in evaluation mode meanwhile, and must not run in another thread.

    Args:
        lm: a policy with the layout of Llama, Qwen, Gemma or Mistral (`layers`, `norm`) or of GPT-2
            (`h`, `ln_f`).
        num_layers: how many layers to run, at least 1.
    """
    owner, name = _find_layers(lm.module)
    depth = len(getattr(owner, name))
    if not 1 <= num_layers <= depth:
        raise ValueError(
            f"num_layers must lie between 1 and the model's {depth}, got {num_layers}."
        )

    def log_prob(rows: Any) -> Tensor:
        layers: nn.ModuleList = getattr(owner, name)
        # A list of its own: modules and weights are shared.
        owner._modules[name] = nn.ModuleList(layers[:num_layers])
        try:
            with evaluation(lm.modules()):
                return lm.log_prob(rows)
        finally:
            owner._modules[name] = layers

    return log_prob


def draft(small: CausalLM, lm: CausalLM, *, vocab_size: int | None = None) -> LogProb:
    """Return another model's `log_prob` as a screen for `lm`, after checking the vocabularies.

    Args:
        small: the draft, on the same token ids.
        lm: the policy.
        vocab_size: of the tokeniser, for families whose heads are padded differently; by default
            the two heads must have the same size.

    Raises:
        ValueError: the heads do not fit.
    """
    sizes = {"small": small.vocab_size, "lm": lm.vocab_size}
    if vocab_size is None and sizes["small"] != sizes["lm"]:
        raise ValueError(
            f"small must have the vocabulary of lm, {sizes['lm']} tokens, got {sizes['small']}; "
            f"use a draft of the same family, or give the tokeniser's vocab_size if only the "
            f"padding of the heads differs."
        )
    for name, size in sizes.items():
        if vocab_size is not None and size < vocab_size:
            raise ValueError(
                f"{name} must have at least vocab_size={vocab_size} tokens, got {size}; it does "
                f"not share the tokeniser."
            )
    return small.log_prob


class Agreement(NamedTuple):
    """How alike two screens choose. A is what the screen keeps, B what the exact one keeps."""

    overlap: float
    """|A & B| / |A | B|; 1 where both are empty."""
    recall: float
    """|A & B| / |B|; 1 where B is empty."""
    delight_share: float
    """Exact delight of A / exact delight of B; NaN where B's is not positive."""
    kept: int
    """|A|."""
    kept_exact: int
    """|B|."""


@torch.no_grad()
def agreement(
    screen_log_probs: Tensor,
    exact_log_probs: Tensor,
    advantages: Tensor,
    *,
    gate: Any,
    mask: Tensor | None = None,
    unit: Unit = "sequence",
    generator: torch.Generator | None = None,
) -> Agreement:
    """Return how far a screen's kept set agrees with the exact one, at the gate's own rate.

    The gate is copied for each side, so its window and running scale stay as they are; a gate that
    draws makes the same draws for both.

    Args:
        screen_log_probs: [N] or [N, S] float.
        exact_log_probs: like screen_log_probs.
        advantages: [N] or [N, S] float.
        gate: as for `kondo.backward`; a `BudgetGate` bound to these rows.
        mask: like screen_log_probs, bool.
        unit: what is gated.
        generator: for the gate's draws; left as it is.

    Example:
        >>> import torch, kondo
        >>> exact = torch.tensor([-3.0, -2.0, -1.0, -0.5])
        >>> draft = torch.tensor([-3.0, -0.5, -2.0, -1.0])
        >>> gate = kondo.Gate(rate=0.5)
        >>> agreement(draft, exact, torch.ones(4), gate=gate, unit="sample")
        Agreement(overlap=0.3333333333333333, recall=0.5, delight_share=0.8, kept=2, kept_exact=2)
    """
    if screen_log_probs.shape != exact_log_probs.shape:
        raise ValueError(
            f"screen_log_probs must have the shape of exact_log_probs, "
            f"{list(exact_log_probs.shape)}, got {list(screen_log_probs.shape)}."
        )

    def choose(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        chosen = select(
            log_probs.to(exact_log_probs.device),
            advantages.to(exact_log_probs.device),
            gate=copy.deepcopy(as_gate(gate)),
            unit=unit,
            mask=mask,
            generator=_same_draws(generator),
        )
        return chosen.choice.keep, chosen.values

    ours, _ = choose(screen_log_probs)
    exact, worth = choose(exact_log_probs)
    counts = [(ours & exact).sum(), (ours | exact).sum(), ours.sum(), exact.sum()]
    bought = [torch.where(keep, worth, 0.0).sum() for keep in (ours, exact)]
    both, either, kept, kept_exact, delight_ours, delight_exact = torch.stack(
        [number.double() for number in (*counts, *bought)]
    ).tolist()  # one device sync
    return Agreement(
        overlap=both / either if either else 1.0,
        recall=both / kept_exact if kept_exact else 1.0,
        delight_share=delight_ours / delight_exact if delight_exact > 0 else math.nan,
        kept=int(kept),
        kept_exact=int(kept_exact),
    )


def gradient_cosine(
    lm: CausalLM,
    rows: TokenRows,
    advantages: Tensor,
    *,
    screen: Tensor | LogProb,
    gate: Any,
    unit: Literal["sequence", "token"] = "sequence",
    against: Tensor | LogProb | None = None,
) -> float:
    """Return the cosine similarity of the gated gradients that two screens lead to.

    cos = <g_1, g_2> / (|g_1| |g_2|) over all parameters that require grad; NaN where one screen
    keeps nothing. `.grad` and the gate's state are afterwards what they were.

    Args:
        lm: the policy.
        rows: N rows of S tokens.
        advantages: [N] or [N, S] float.
        screen: log-probs [N, S], or a draft.
        gate: as for `kondo.backward`; hard, since two draws would differ.
        unit: what is gated.
        against: the other screen; None is the exact one.
    """
    found = []
    for each in (screen, against):
        with fresh_gradients(lm) as gradients:
            own = copy.deepcopy(gate)
            backward(lm, rows, advantages, gate=own, unit=unit, screen=each, group="local")
            found.append(gradients())
    return cosine(*found)


@contextmanager
def fresh_gradients(lm: CausalLM) -> Iterator[Callable[[], list[Tensor | None]]]:
    """Start with no gradients; yield a function that returns them; put the earlier ones back."""
    parameters = [p for p in parameters_of(lm) if p.requires_grad]
    before = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield lambda: [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def cosine(first: list[Tensor | None], second: list[Tensor | None]) -> float:
    """Return the cosine similarity of two lists of gradients; None is zero. NaN if one is zero."""
    sums = [torch.zeros((), dtype=torch.float64)] * 3
    for a, b in zip(first, second, strict=True):
        for index, (x, y) in enumerate(((a, b), (a, a), (b, b))):
            if x is not None and y is not None:
                sums[index] = sums[index].to(x.device) + (x.double() * y.double()).sum()
    inner, *squares = (float(each) for each in sums)
    return math.nan if 0 in squares else inner / math.sqrt(math.prod(squares))


def parameters_of(lm: CausalLM) -> list[Tensor]:
    """Return the parameters of a policy, each once; its head may stand beside the module."""
    head = [part for part in (lm.head.weight, lm.head.bias) if part is not None]
    return list({id(part): part for part in (*lm.module.parameters(), *head)}.values())


def _same_draws(generator: torch.Generator | None) -> torch.Generator:
    """Return a new generator in the given one's state, or in the default one's."""
    if generator is None:
        return torch.Generator().set_state(torch.get_rng_state())
    return torch.Generator(generator.device).set_state(generator.get_state())


def _find_layers(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the decoder that holds the layers, and their name in it."""
    layouts = {"layers": "norm", "h": "ln_f"}
    found = [
        (owner, name)
        for owner in module.modules()
        for name, norm in layouts.items()
        if isinstance(getattr(owner, name, None), nn.ModuleList) and hasattr(owner, norm)
    ]
    if len(found) != 1:
        raise ValueError(
            f"truncated needs one list of layers beside a final norm, layers and norm (Llama, "
            f"Qwen) or h and ln_f (GPT-2), got {len(found)} in {type(module).__name__}; use a "
            f"quantised, stale or small draft."
        )
    return found[0]
