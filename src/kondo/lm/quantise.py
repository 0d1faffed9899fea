"""Low-precision linear layers for drafts, with one scale per token and one per output.

    y = (round(x / a) @ round(W / b).T) * a * b,   a = max|x| / m,  b = max|W| / m

with m the largest number of the format, int8 or float8. In: a module. Out: the same module, its
linear layers replaced. Only for screening: nothing here has a gradient.
"""

import importlib
from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from kondo.lm.fuse import fused

Format = Literal["int8", "fp8"]
LinearBackend = Literal["auto", "torch", "torchao"]

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}

# The matrix units take rows of these many numbers at a time.
_MULTIPLE = {"int8": 8, "fp8": 16}

# torch._int_mm on CUDA refuses fewer rows.
_LEAST_INT8_ROWS = 17


class Quantisation(NamedTuple):
    """What became of the linear layers of a module."""

    backend: Literal["torch", "torchao"]  # what computes the products
    quantised: int  # layers replaced
    skipped: int  # their sizes do not fit the format (routers, small LoRA)


def quantise_linears(
    module: nn.Module,
    number: Format,
    *,
    skip: Tensor | None = None,
    backend: LinearBackend = "auto",
) -> Quantisation:
    """Replace the linear layers of `module` in place where their sizes fit; say how many did.

    The module is frozen. "fp8" is e4m3. The layer with the weight `skip`, the head, is left alone
    and not counted. Backend "torch" is `QuantisedLinear`, and "auto" is "torch".

    Raises:
        ValueError: unknown options, no linear layer that fits, a device the format cannot do.
        ImportError: torchao was asked for and is not installed.
    """
    if number not in _DTYPES:
        raise ValueError(f'number must be "int8" or "fp8", got {number!r}.')
    if backend not in ("auto", "torch", "torchao"):
        raise ValueError(f'backend must be "auto", "torch" or "torchao", got {backend!r}.')
    layers = [
        (f"{path}.{name}" if path else name, parent, layer)
        for path, parent in module.named_modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and layer.weight is not skip
    ]
    if not layers:
        raise ValueError(
            f"the model must have nn.Linear layers outside its head to be quantised, got none in "
            f"{type(module).__name__} (GPT-2 has layers of its own kind); use another draft."
        )
    multiple = _MULTIPLE[number]
    fitting = [
        (name, parent, layer)
        for name, parent, layer in layers
        if layer.in_features % multiple == layer.out_features % multiple == 0
    ]
    if not fitting:
        name, _, layer = layers[0]
        raise ValueError(
            f"linear layers must have sizes that are multiples of {multiple} for this "
            f"format, got none of {len(layers)}, the first {layer.in_features} x "
            f"{layer.out_features} in {name}; use another draft."
        )
    if number == "fp8":
        _check_float8(fitting[0][2].weight.device)
    skipped = len(layers) - len(fitting)
    if backend == "torchao":
        chosen = {id(layer) for _, _, layer in fitting}
        _by_torchao(module, number, lambda layer, _: id(layer) in chosen)
        return Quantisation("torchao", len(fitting), skipped)
    for name, parent, layer in fitting:
        setattr(parent, name.rpartition(".")[2], QuantisedLinear(layer, number))
    return Quantisation("torch", len(fitting), skipped)


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
    def refresh(self, layer: nn.Linear) -> None:
        """Take the present weights of `layer`, in place."""
        weight, scale = quantise_rows(layer.weight.detach(), self.number)
        self.weight.copy_(weight)
        self.scale.copy_(scale.t())
        if self.bias is not None:
            self.bias.copy_(layer.bias)

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
        return fused(_scaled, product.device)(product, scale, self.scale, self.bias, dtype)


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


def _by_torchao(
    module: nn.Module, number: Format, chosen: Callable[[nn.Module, str], bool]
) -> None:
    try:
        quantization = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ImportError(
            'backend="torchao" needs torchao, which is not installed; pip install torchao, or '
            'give backend="torch".'
        ) from error
    config = {
        "int8": quantization.Int8DynamicActivationInt8WeightConfig,
        "fp8": quantization.Float8DynamicActivationFloat8WeightConfig,
    }[number]
    # It would otherwise change torch.compile's settings for the whole process.
    settings = config(granularity=quantization.PerRow(), set_inductor_config=False)
    quantization.quantize_(module, settings, filter_fn=chosen)


def requantised(layer: nn.Linear, number: Format) -> nn.Linear:
    """Return a layer with the weight of `layer` as torchao quantises it; it has no bias."""
    alike = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    alike.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    holder = nn.Sequential(alike)
    _by_torchao(holder, number, lambda each, _: isinstance(each, nn.Linear))
    return cast(nn.Linear, holder[0])


def _check_float8(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f'"fp8" needs a CUDA device of compute capability 8.9 or higher (Ada, Hopper), got '
            f'{device}; use "int8".'
        )
