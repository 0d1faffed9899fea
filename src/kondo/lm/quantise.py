"""Low-precision linear layers for drafts, with one scale per token and one per output.

    y = (round(x / a) @ round(W / b).T) * a * b,   a = max|x| / m,  b = max|W| / m

with m the largest number of the format, int8 or float8. In: a module. Out: the same module, its
linear layers replaced. Only for screening: nothing here has a gradient.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

Format = Literal["int8", "fp8"]
Backend = Literal["auto", "torch", "torchao"]

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}

# The matrix units take rows of these many numbers at a time.
_MULTIPLE = {"int8": 8, "fp8": 16}

# torch._int_mm on CUDA refuses fewer rows.
_LEAST_INT8_ROWS = 17


def quantise_linears(
    module: nn.Module, number: Format, *, skip: Tensor | None = None, backend: Backend = "auto"
) -> str:
    """Replace the linear layers of `module` in place; return the backend that did it.

    Args:
        module: frozen; every `nn.Linear` below it is replaced.
        number: "int8" or "fp8" (e4m3).
        skip: weight of a layer to leave alone: the head.
        backend: "torchao", "torch" for `QuantisedLinear`, or "auto": torchao where it is installed.

    Raises:
        ValueError: unknown options, no linear layer, sizes or a device the format cannot do.
        ImportError: torchao was asked for and is not installed.
    """
    if number not in _DTYPES:
        raise ValueError(f'number must be "int8" or "fp8", got {number!r}.')
    if backend not in ("auto", "torch", "torchao"):
        raise ValueError(f'backend must be "auto", "torch" or "torchao", got {backend!r}.')
    layers = list(_linears(module, skip))
    if not layers:
        raise ValueError(
            f"the model must have nn.Linear layers outside its head to be quantised, got none in "
            f"{type(module).__name__} (GPT-2 has layers of its own kind); use another draft."
        )
    if number == "fp8":
        _check_float8(layers[0][2].weight.device)
    if backend == "auto":
        backend = "torchao" if importlib.util.find_spec("torchao") else "torch"
    for name, _, layer in layers:
        _check_sizes(name, layer, _MULTIPLE[number])
    if backend == "torchao":
        chosen = {id(layer) for _, _, layer in layers}
        _by_torchao(module, number, lambda layer, _: id(layer) in chosen)
    else:
        for name, parent, layer in layers:
            setattr(parent, name.rpartition(".")[2], QuantisedLinear(layer, number))
    return backend


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
        self._quantise = _fused(weight.device)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b in x's dtype."""
        rows, scale = self._quantise(x.reshape(-1, x.shape[-1]), self.number)
        product = _float8_product if self.number == "fp8" else _int8_product
        y = product(rows, scale, self.weight, self.scale).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


def quantise_rows(x: Tensor, number: Format) -> tuple[Tensor, Tensor]:
    """Return x / scale in the format, and the scale: [R, I] -> [R, I] and [R, 1] float32."""
    wide = x.float()
    # A row of zeros has no scale of its own; any will do.
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / _LARGEST[number]
    scaled = wide / scale
    return (scaled.round() if number == "int8" else scaled).to(_DTYPES[number]), scale


def _fused(device: torch.device) -> Callable[[Tensor, Format], tuple[Tensor, Tensor]]:
    # Five passes over the activations would cost what the cheaper product saves.
    return _compiled() if device.type == "cuda" else quantise_rows


@functools.cache
def _compiled() -> Callable[[Tensor, Format], tuple[Tensor, Tensor]]:
    return torch.compile(quantise_rows, dynamic=True)


def _float8_product(rows: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return torch._scaled_mm(
        rows, weight.t(), scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16
    )


def _int8_product(rows: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    missing = _LEAST_INT8_ROWS - rows.shape[0]
    padded = nn.functional.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows
    return torch._int_mm(padded, weight.t())[: rows.shape[0]] * scale * weight_scale


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


def _linears(module: nn.Module, skip: Tensor | None) -> Iterator[tuple[str, nn.Module, nn.Linear]]:
    """Yield (name, parent, layer) of each linear layer but the one whose weight is `skip`."""
    for path, parent in module.named_modules():
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) and layer.weight is not skip:
                yield f"{path}.{name}" if path else name, parent, layer


def _check_sizes(name: str, layer: nn.Linear, multiple: int) -> None:
    if layer.in_features % multiple or layer.out_features % multiple:
        raise ValueError(
            f"linear layers must have sizes that are multiples of {multiple} for this format, got "
            f"{layer.in_features} x {layer.out_features} in {name}; use another draft."
        )


def _check_float8(device: torch.device) -> None:
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if not able:
        raise ValueError(
            f'"fp8" needs a CUDA device of compute capability 8.9 or higher (Ada, Hopper), got '
            f'{device}; use "int8".'
        )
