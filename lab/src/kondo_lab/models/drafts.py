"""Draft screens of a language model, and how far they choose as the exact one does.

| draft                   | costs                         | is wrong by                          |
|-------------------------|-------------------------------|--------------------------------------|
| `cached(lm)`            | a forward, at any time        | the updates since it was made        |
| `quantised(lm, "fp8")`  | cheaper linear layers         | rounding, and the updates            |
| `truncated(lm, k)`      | k / layers, and the head      | the layers left out                  |

A linear layer is quantised with one scale per token and one per output,

    y = (round(x / a) @ round(W / b).T) * a * b,   a = max|x| / m,  b = max|W| / m

with m the largest number of the format. `agreement` compares kept sets, `gradient_cosine` the
gradients that they lead to.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import kondo
from kondo.engine.policy import LogProb, evaluation
from kondo.lm import CausalLM, TokenRows
from kondo.lm.head import fused

Format = Literal["int8", "fp8"]
Unit = Literal["sample", "sequence", "token"]

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}

# The matrix units take rows of these many numbers at a time.
_MULTIPLE = {"int8": 8, "fp8": 16}

# torch._int_mm on CUDA refuses fewer rows.
_LEAST_INT8_ROWS = 17


def cached(lm: CausalLM) -> CausalLM:
    """Return a frozen copy of a policy; what is compiled in it is compiled in the copy."""
    frozen = copy.deepcopy(lm)
    frozen.module.eval()
    for parameter in parameters_of(frozen):
        parameter.requires_grad_(False)
    for name, module in lm.module.named_modules():
        if module._compiled_call_impl is not None:
            frozen.module.get_submodule(name).compile()
    return frozen


def quantised(lm: CausalLM, number: Format) -> CausalLM:
    """Return a frozen copy with int8 or float8 (e4m3) linear layers, its head as it is.

    Layers whose sizes do not fit the format (routers, small LoRA) are left as they are.

    Raises:
        ValueError: no layer fits, or the device cannot do the format.
    """
    frozen, device, multiple = cached(lm), lm.device, _MULTIPLE[number]
    if number == "fp8" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)
    ):
        raise ValueError(
            f'"fp8" needs a CUDA device of compute capability 8.9 or higher, got {device}; use '
            f'"int8".'
        )
    fitting = [
        (parent, name, layer)
        for parent in frozen.module.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and layer.weight is not frozen.head.weight
        if layer.in_features % multiple == layer.out_features % multiple == 0
    ]
    if not fitting:
        raise ValueError(
            f"the model must have nn.Linear layers outside its head whose sizes are multiples of "
            f"{multiple}, got none in {type(lm.module).__name__}; use another draft."
        )
    for parent, name, layer in fitting:
        setattr(parent, name, QuantisedLinear(layer, number))
    return frozen


class QuantisedLinear(nn.Module):
    """A linear layer whose product is computed in int8 or float8: [..., I] -> [..., O].

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(32, 16)
        >>> x = torch.randn(5, 32)
        >>> exact = layer(x).detach()
        >>> bool((QuantisedLinear(layer, "int8")(x) - exact).norm() < 0.03 * exact.norm())
        True
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, number: Format):
        super().__init__()
        self.number: Format = number
        weight, scale = quantise_rows(layer.weight.detach(), number)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())  # [1, O]
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b in x's dtype."""
        rows, scale = fused(quantise_rows, x.device)(x.reshape(-1, x.shape[-1]), self.number)
        product = self._float8_product if self.number == "fp8" else self._int8_product
        return product(rows, scale, x.dtype).view(*x.shape[:-1], -1)

    def _float8_product(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        half = torch.bfloat16
        bias = None if self.bias is None else self.bias.to(half)
        return torch._scaled_mm(
            rows, self.weight.t(), scale_a=scale, scale_b=self.scale, bias=bias, out_dtype=half
        ).to(dtype)

    def _int8_product(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        missing = _LEAST_INT8_ROWS - rows.shape[0]
        padded = nn.functional.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows
        product = torch._int_mm(padded, self.weight.t())[: rows.shape[0]]
        found: Tensor = fused(_scaled, product.device)(product, scale, self.scale, self.bias, dtype)
        return found


def quantise_rows(x: Tensor, number: Format) -> tuple[Tensor, Tensor]:
    """Return x / scale in the format, and the scale: [R, I] -> [R, I] and [R, 1] float32."""
    wide = x.float()
    # A row of zeros has no scale of its own; any will do.
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / _LARGEST[number]
    scaled = wide / scale
    return (scaled.round() if number == "int8" else scaled).to(_DTYPES[number]), scale


def _scaled(
    product: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return product * scale * weight_scale + bias, through one float32 tensor at most."""
    y = product * scale
    y *= weight_scale
    if bias is not None:
        y += bias
    return y.to(dtype)


def truncated(lm: CausalLM, num_layers: int) -> LogProb:
    """Return an early exit of `lm`: its first layers, then its final norm and head.

    Weights are the policy's own. The policy is in evaluation mode meanwhile, and must not run in
    another thread.

    Args:
        lm: a policy with the layout of Llama, Qwen, Gemma or Mistral (`layers`, `norm`) or of GPT-2
            (`h`, `ln_f`).
        num_layers: how many layers to run, at least 1.
    """
    layouts = {"layers": "norm", "h": "ln_f"}
    ((owner, name),) = [
        (owner, name)
        for owner in lm.module.modules()
        for name, norm in layouts.items()
        if isinstance(getattr(owner, name, None), nn.ModuleList) and hasattr(owner, norm)
    ]
    assert 1 <= num_layers <= len(getattr(owner, name))

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


class Agreement(NamedTuple):
    """How alike two screens choose. A is what the screen keeps, B what the exact one keeps."""

    overlap: float
    """|A & B| / |A | B|; 1 where both are empty."""
    recall: float
    """|A & B| / |B|; 1 where B is empty."""
    delight_share: float
    """Exact delight of A / exact delight of B; NaN where B's is not positive."""


@torch.no_grad()
def agreement(
    screen_log_probs: Tensor,
    exact_log_probs: Tensor,
    advantages: Tensor,
    *,
    gate: Any,
    mask: Tensor | None = None,
    unit: Unit = "sequence",
) -> Agreement:
    """Return how far a screen's kept set agrees with the exact one, at the gate's own rate.

    The gate is copied for each side, and nothing may be drawn.

    Args:
        screen_log_probs: [N] or [N, S] float.
        exact_log_probs: like screen_log_probs.
        advantages: [N] or [N, S] float.
        gate: as for `kondo.backward`; a `BudgetGate` bound to these rows.
        mask: like screen_log_probs, bool.
        unit: what is gated.

    Example:
        >>> import torch, kondo
        >>> exact = torch.tensor([-3.0, -2.0, -1.0, -0.5])
        >>> draft = torch.tensor([-3.0, -0.5, -2.0, -1.0])
        >>> gate = kondo.Gate(rate=0.5)
        >>> agreement(draft, exact, torch.ones(4), gate=gate, unit="sample")
        Agreement(overlap=0.3333333333333333, recall=0.5, delight_share=0.8)
    """
    (ours, _), (exact, worth) = (
        (found.choice.keep, found.values)
        for found in (
            kondo.select(log_probs, advantages, gate=copy.deepcopy(gate), unit=unit, mask=mask)
            for log_probs in (screen_log_probs, exact_log_probs)
        )
    )
    both, either, kept = (int(part.sum()) for part in (ours & exact, ours | exact, exact))
    bought, wanted = (float(worth[keep].double().sum()) for keep in (ours, exact))
    return Agreement(
        overlap=both / either if either else 1.0,
        recall=both / kept if kept else 1.0,
        delight_share=bought / wanted if wanted > 0 else math.nan,
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
            kondo.backward(lm, rows, advantages, gate=own, unit=unit, screen=each, group="local")
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
