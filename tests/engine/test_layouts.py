"""Tensors that are not dense, and records that cannot be written to, in a step."""

import dataclasses
import types
from typing import NamedTuple

import attrs
import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor

import kondo
from oracles import engine as oracle
from steps import run_step
from tolerances import assert_close

ROWS = 6


def problem():
    """A policy of observations [n, 3], the observations and advantages, in float64."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1).double()
    return net, torch.randn(ROWS, 3).double(), torch.randn(ROWS).double()


def log_prob_of(net, seen):
    return torch.nn.functional.logsigmoid(net(seen)).squeeze(-1)


def nested(values, layout=torch.jagged):
    return torch.nested.nested_tensor([*values.split(1)], layout=layout)


LAYOUTS = {
    "jagged": (nested, "nested one.*torch.nested.to_padded_tensor"),
    "nested": (lambda values: nested(values, torch.strided), "nested one.*to_padded_tensor"),
    "csr": (lambda values: values.to_sparse_csr(), r"torch\.sparse_csr.*\.to_dense\(\)"),
    "csc": (lambda values: values.to_sparse_csc(), r"torch\.sparse_csc.*\.to_dense\(\)"),
    "coo": (lambda values: values.to_sparse(), r"torch\.sparse_coo.*\.to_dense\(\)"),
    "meta": (lambda values: values.to("meta"), "on the meta device"),
}


@pytest.mark.filterwarnings("ignore:Sparse CS.* tensor support")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", [kondo.backward, kondo.check, kondo.plan])
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "coo"])
def test_rows_that_cannot_be_taken_are_refused_by_their_path(kind, call):
    net, seen, advantages = problem()
    make, message = LAYOUTS[kind]
    given = {"advantages": advantages} | (
        {} if call is kondo.plan else {"gate": kondo.Gate(rate=1)}
    )
    with pytest.raises(ValueError, match=rf"batch\['deep'\]\[0\] must be .*{message}"):
        call(lambda rows: log_prob_of(net, rows["x"]), {"x": seen, "deep": [make(seen)]}, **given)


@pytest.mark.filterwarnings("ignore:Sparse CS.* tensor support")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "nested"])
def test_tensordicts_are_looked_into(kind):
    net, seen, advantages = problem()
    make, message = LAYOUTS[kind]
    batch = TensorDict({"x": seen, "in": {"odd": make(seen)}}, [ROWS])
    with pytest.raises(ValueError, match=rf"batch\[\('in', 'odd'\)\] must be .*{message}"):
        kondo.backward(lambda rows: log_prob_of(net, rows["x"]), batch, advantages)


@pytest.mark.filterwarnings("ignore:Sparse CS.* tensor support")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ["advantages", "mask", "screen", "loss_inputs"])
def test_other_arguments_must_be_dense(name, kind):
    net, seen, advantages = problem()
    make, message = LAYOUTS[kind]
    column = advantages.abs().neg().unsqueeze(1)
    value = make(column.bool() if name == "mask" and kind not in ("csr", "csc") else column)
    if name == "mask" and kind in ("csr", "csc"):
        value = value.bool()
    given = {"advantages": advantages, "gate": kondo.Gate(rate=0.5), name: value}
    if name == "loss_inputs":
        given |= {"loss": kondo.losses.ppo, name: {"old_log_probs": value}}
        name = r"loss_inputs\['old_log_probs'\]"
    with pytest.raises(ValueError, match=rf"{name} must be .*{message}"):
        kondo.backward(lambda rows: log_prob_of(net, rows), seen, **given)


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("dims", [1, 2])
def test_rows_in_coordinate_format_have_the_dense_gradient(dims, micro_batch):
    net, seen, advantages = problem()
    seen = seen * (seen > 0)
    log_probs = log_prob_of(net, seen)
    keep = oracle.keep_top(-advantages * log_probs.detach(), torch.ones(ROWS).bool(), 0.5)
    expected = oracle.gradients(net, oracle.dense_gated_loss(log_probs, advantages, keep, ROWS))
    run_step(
        lambda rows: log_prob_of(net, rows["x"].to_dense()),
        {"x": seen.to_sparse(dims)},
        advantages,
        gate=kondo.Gate(rate=0.5),
        micro_batch=micro_batch,
    )
    for name, parameter in net.named_parameters():
        assert_close(parameter.grad, expected[name])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class InSlots:
    x: Tensor
    name: str = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    given: Tensor
    x: Tensor = dataclasses.field(init=False)
    name: str = dataclasses.field(init=False, default="kept")
    never_set: Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "x", self.given * 1)


class Named(NamedTuple):
    x: Tensor
    name: str = "kept"


@attrs.frozen
class FrozenAttrs:
    x: Tensor
    name: str = "kept"


@attrs.frozen(slots=False)
class AttrsWithoutSlots:
    x: Tensor
    name: str = "kept"


@attrs.define
class ConvertedAttrs:
    x: Tensor = attrs.field(converter=lambda value: value.clone())
    name: str = attrs.field(init=False, default="kept")

    @x.validator
    def has_all_rows(self, attribute, value):
        assert len(value) == ROWS  # kept rows do not go through it


@tensorclass(frozen=True)
class FrozenTensors:
    x: Tensor


RECORDS = {
    **{
        kind.__name__: (kind, lambda rows: rows.x)
        for kind in (
            *(Frozen, InSlots, Computed, Named),
            *(FrozenAttrs, AttrsWithoutSlots, ConvertedAttrs),
        )
    },
    "FrozenTensors": (lambda x: FrozenTensors(x, batch_size=[ROWS]), lambda rows: rows.x),
    "mappingproxy": (lambda x: types.MappingProxyType({"x": x}), lambda rows: rows["x"]),
    "locked": (lambda x: TensorDict({"x": x}, [ROWS]).lock_(), lambda rows: rows["x"]),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", RECORDS)
def test_rows_of_what_cannot_be_written_to_are_taken(name, inside):
    make, read = RECORDS[name]
    net, seen, advantages = problem()
    log_probs = log_prob_of(net, seen)
    keep = oracle.keep_top(-advantages * log_probs.detach(), torch.ones(ROWS).bool(), 0.5)
    expected = oracle.gradients(net, oracle.dense_gated_loss(log_probs, advantages, keep, ROWS))
    names = set()

    def log_prob(rows):
        record = rows["in"] if inside else rows
        names.add(getattr(record, "name", "kept"))
        return log_prob_of(net, read(record))

    batch = {"in": make(seen)} if inside else make(seen)
    run_step(log_prob, batch, advantages, gate=kondo.Gate(rate=0.5), micro_batch=2)
    for key, parameter in net.named_parameters():
        assert_close(parameter.grad, expected[key])
    assert names == {"kept"}
    assert torch.equal(read(batch["in"] if inside else batch), seen)


def test_what_is_no_record_is_refused_with_what_would_be():
    with pytest.raises(ValueError, match=r"got SimpleNamespace without any.*classes of attrs"):
        kondo.backward(lambda rows: rows.x, types.SimpleNamespace(x=torch.ones(3)), torch.ones(3))
