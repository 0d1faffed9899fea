import sys

import pytest
import torch
from torch import nn

from kondo.lm import fuse, quantise
from kondo.lm.quantise import QuantisedLinear, quantise_linears, quantise_rows

NUMBERS = ["int8", "fp8"]

# Half a step of 1/127 of the largest, and half of the last of three bits.
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 2.0**-4}


@pytest.mark.parametrize("number", NUMBERS)
def test_rows_are_scaled_by_their_own_largest_number(number, generator):
    x = torch.randn(9, 32, generator=generator) * torch.logspace(-6, 6, 9).unsqueeze(1)
    x[4] = 0
    small, scale = quantise_rows(x, number)
    restored = small.float() * scale
    assert bool(restored.isfinite().all())
    bound = x.abs() if number == "fp8" else x.abs().amax(1, keepdim=True)
    # float8 below its smallest normal number has fixed steps, 2^-10 of a scale that makes 448
    assert bool(((restored - x).abs() <= LARGEST_ERROR[number] * bound + scale * 2.0**-9).all())


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (40, 32), (2, 3, 32)])
def test_a_quantised_layer_is_close_to_its_own(number, bias, shape, generator):
    layer = nn.Linear(32, 48, bias=bias)
    if bias:
        nn.init.normal_(layer.bias, std=3.0)
    x = torch.randn(shape, generator=generator)
    found, true = QuantisedLinear(layer, number)(x), layer(x).detach()
    assert found.shape == true.shape
    assert found.dtype == x.dtype
    assert not found.requires_grad
    assert 0 < float((found - true).norm() / true.norm()) < {"int8": 0.03, "fp8": 0.08}[number]


def test_the_product_of_integers_is_exact():
    layer = nn.Linear(16, 8, bias=False)
    weight = torch.arange(128.0).view(8, 16) - 64
    weight[:, 0] = 127  # so that every scale is 1
    x = torch.arange(48.0).view(3, 16) - 20
    x[:, 1] = -127
    with torch.no_grad():
        layer.weight.copy_(weight)
    assert torch.equal(QuantisedLinear(layer, "int8")(x), x @ weight.T)


@pytest.mark.parametrize("backend", ["torch", "torchao"])
def test_every_linear_layer_but_the_skipped_one_is_replaced(backend):
    if backend == "torchao":
        pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 8))
    head = model[2].weight
    assert quantise_linears(model, "int8", skip=head, backend=backend) == (backend, 2, 0)
    assert model[2].weight is head
    kinds = [type(layer.weight).__name__ for layer in (model[0], model[1][0])]
    names = {"torch": ["Tensor"] * 2, "torchao": ["Int8Tensor"] * 2}
    assert kinds == names[backend]


def test_both_backends_are_equally_close(generator):
    pytest.importorskip("torchao")
    layer, x = nn.Linear(64, 32), torch.randn(20, 64, generator=generator)
    theirs = nn.Sequential(nn.Linear(64, 32))
    theirs[0].load_state_dict(layer.state_dict())
    quantise_linears(theirs, "int8", backend="torchao")
    with torch.no_grad():
        true, other = layer(x), theirs(x)
    error = float((QuantisedLinear(layer, "int8")(x) - true).norm())
    assert 0.5 < float((other - true).norm()) / error < 2


def test_auto_is_torch():
    model = nn.Sequential(nn.Linear(16, 16))
    assert quantise_linears(model, "int8").backend == "torch"
    assert isinstance(model[0], QuantisedLinear)


def test_layers_that_do_not_fit_are_left_and_counted():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 16), nn.Linear(16, 8))
    assert quantise_linears(model, "int8") == ("torch", 2, 2)
    kinds = [type(layer) for layer in model]
    assert kinds == [QuantisedLinear, nn.Linear, nn.Linear, QuantisedLinear]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_refreshed_layer_is_a_new_one_in_the_old_buffers(number, bias, generator):
    old, new = nn.Linear(32, 16, bias=bias), nn.Linear(32, 16, bias=bias)
    x = torch.randn(5, 32, generator=generator)
    layer = QuantisedLinear(old, number)
    places = [buffer.data_ptr() for buffer in layer.buffers()]
    layer.refresh(new)
    assert torch.equal(layer(x), QuantisedLinear(new, number)(x))
    assert [buffer.data_ptr() for buffer in layer.buffers()] == places


def test_a_compiled_layer_quantises_inside_itself(generator, monkeypatch):
    """One graph, without a compiled function inside it, as on a GPU it would otherwise have."""
    monkeypatch.setattr(fuse, "_compiled", lambda _: pytest.fail("compiled within"))
    monkeypatch.setattr(fuse, "can_fuse", lambda _: True)
    layer = QuantisedLinear(nn.Linear(32, 16), "int8")
    x = torch.randn(20, 32, generator=generator)
    with monkeypatch.context() as eager:
        eager.setattr(fuse, "can_fuse", lambda _: False)
        expected = layer(x)
    torch.compiler.reset()
    layer.compile(backend="eager", fullgraph=True)
    assert torch.equal(layer(x), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert fuse.fused(quantise.quantise_rows, torch.device("cuda")) is quantise.quantise_rows


def test_torchao_that_is_asked_for_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match='pip install torchao, or give backend="torch"'):
        quantise_linears(nn.Sequential(nn.Linear(16, 16)), "int8", backend="torchao")


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (nn.Sequential(nn.Linear(16, 16)), {"number": "int4"}, "number must be"),
        (nn.Sequential(nn.Linear(16, 16)), {"backend": "tpu"}, "backend must be"),
        (nn.Sequential(nn.ReLU()), {}, "got none in Sequential"),
        (nn.Sequential(nn.Linear(16, 12)), {}, r"multiples of 8 .*none of 1.* 16 x 12 in 0"),
    ],
)
def test_what_cannot_be_quantised_is_refused(model, options, match):
    with pytest.raises(ValueError, match=match):
        quantise_linears(model, **({"number": "int8"} | options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_float8_says_that_it_needs_a_gpu():
    with pytest.raises(ValueError, match=r'"fp8" needs a CUDA device .* got cpu; use "int8"'):
        quantise_linears(nn.Sequential(nn.Linear(16, 16)), "fp8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("num_rows", [1, 17, 333])
def test_a_quantised_layer_is_close_to_its_own_on_a_gpu(number, num_rows):
    layer = nn.Linear(128, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, 128, device="cuda", dtype=torch.bfloat16)
    found, true = QuantisedLinear(layer, number)(x).float(), layer(x).detach().float()
    assert float((found - true).norm() / true.norm()) < 0.08
