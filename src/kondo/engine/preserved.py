"""Run a policy several times and leave everything as it was found.

What is put back: random numbers (torch's, Python's, NumPy's), training flags, flags of parameters,
buffers, and the state of a gate and of a generator. State that a policy hides elsewhere cannot be
put back.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def preserved(
    modules: Sequence[Any],
    devices: Sequence[torch.device],
    gate: Any,
    generator: torch.Generator | None,
) -> Iterator[None]:
    """Put back the state of these objects, and random numbers, when the context ends.

    Args:
        modules: of the policy, with their parts.
        devices: CUDA devices whose random numbers may be drawn.
        gate: a `kondo.BaseGate`, or None.
        generator: of the gate's draws, or None.
    """
    reshard(modules)
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(devices))
        undo.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            undo.callback(numpy.random.set_state, numpy.random.get_state())
        if generator is not None:
            undo.callback(generator.set_state, generator.get_state())
        if gate is not None:
            undo.callback(gate.load_state_dict, gate.state_dict())
        for module in modules:
            flags = [(each, each.requires_grad) for each in module.parameters(recurse=False)]
            buffers = {
                name: (buffer, buffer.detach().clone())
                for name, buffer in module.named_buffers(recurse=False)
            }
            undo.callback(_put_back, module, module.training, flags, buffers)
            if isinstance(module, DistributedDataParallel):
                undo.enter_context(module.no_sync())  # else its next step waits for this backward
                if module.static_graph:  # it would learn its graph in this backward
                    if "forward" in vars(module):
                        undo.callback(setattr, module, "forward", module.forward)
                    undo.callback(delattr, module, "forward")
                    module.forward = module.module.__call__  # type: ignore[method-assign]
            elif _is_sharded(module):  # else gradients that it holds would be exchanged here
                module.set_requires_gradient_sync(False, recurse=False)
                undo.callback(module.set_requires_gradient_sync, True, recurse=False)
        undo.callback(reshard, modules)
        yield


def _put_back(
    module: nn.Module,
    training: bool,
    flags: list[tuple[nn.Parameter, bool]],
    buffers: dict[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    if module.training != training:
        module.training = training
    for parameter, flag in flags:
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)
    for name, (buffer, value) in buffers.items():
        if getattr(module, name, None) is not buffer:
            setattr(module, name, buffer)
        buffer.detach().copy_(value)


def reshard(modules: Sequence[Any]) -> None:
    """Give modules of `fully_shard` their shards back, which a forward replaces in a root."""
    for module in modules:
        if _is_sharded(module):
            module.reshard()


def _is_sharded(module: Any) -> bool:
    # Who sharded a module has imported it; others need not wait for the seconds that it takes.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextmanager
def calm(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put these modules, not their parts, into evaluation mode, for a forward with a graph."""
    modes = [module.training for module in modules]
    # cuDNN differentiates recurrent layers in training mode alone.
    recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not recurrent):
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
