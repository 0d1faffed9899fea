"""How the gradients of all ranks become one, for each way to spread a model over ranks.

| model             | does with gradients      | we do                                           |
|-------------------|--------------------------|-------------------------------------------------|
| DDP               | averages them            | scale the loss by ranks; no_sync until the last |
| FSDP2             | averages and shards them | the same, by set_requires_gradient_sync         |
| plain, all_reduce | nothing                  | sum what this step added, in large buckets      |
| plain             | nothing                  | nothing: each rank has its part of the sum      |
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from kondo.arguments import require
from kondo.engine.differentiate import leaves_of
from kondo.ranks.communicator import Ranks
from kondo.stage_clock import StageClock

When = Literal["last", "each", "never"]

# Elements summed over ranks in one message of our own.
_BUCKET = 2**24

# Wrapped modules whose gradients were added in a call without an exchange.
_HELD: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# Wrapped modules that have exchanged gradients in a call of a step.
_EXCHANGED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Gradients:
    """The gradients of one step.

    Args:
        roots: the modules that are trained.
        ranks: the group.
        all_reduce: whether to sum gradients of plain modules ourselves; None where none is plain.
        when: in which calls of the step wrapped modules exchange gradients.
    """

    def __init__(
        self, roots: Sequence[nn.Module], ranks: Ranks, *, all_reduce: bool | None, when: When
    ):
        self._roots, self._ranks, self._when = roots, ranks, when
        self._sums = bool(all_reduce)
        self._averaged = list(_outermost(roots, DistributedDataParallel))
        self._sharded = list(_outermost(roots, FSDPModule))
        self._outside: list[weakref.ref[Tensor]] | None = None
        wrapped = bool(self._averaged or self._sharded)
        self.scale = ranks.size if wrapped else 1
        """What the loss is multiplied by, since wrapped modules divide by it."""
        every = () if wrapped else (p for root in roots for p in root.parameters())
        self._own = list(dict.fromkeys(p for p in every if p.requires_grad))
        self._check(all_reduce, wrapped)

    def _check(self, all_reduce: bool | None, wrapped: bool) -> None:
        when, size = self._when, self._ranks.size
        require(
            when in ("last", "each", "never"),
            f'sync must be "last", "each" or "never", got {when!r}.',
        )
        require(
            bool(self._roots),
            "module must be given with a group where the policy is a plain function, got None: "
            "what ranks train, in DDP, sharded or plain, is not looked for in a function. Give "
            "kondo.Options(module=net), or several as [actor, critic], or a policy that is a "
            "module or a method of one.",
        )
        require(
            next(_outermost(self._roots, FullyShardedDataParallel), None) is None,
            "module must be DistributedDataParallel, sharded by fully_shard, or plain, got "
            "FullyShardedDataParallel; use torch.distributed.fsdp.fully_shard.",
        )
        for module in self._averaged:
            theirs = torch.distributed.get_world_size(module.process_group)
            require(
                theirs == size,
                f"group must be that of the module, {theirs} ranks in its process_group, got "
                f"{size}; gradients are averaged over the module's.",
            )
        require(
            not self._learns_graph() or (when != "never" and all(map(_exchanges, self._averaged))),
            f"sync must be 'last' or 'each', outside of no_sync, in the first step of a "
            f"DistributedDataParallel with static_graph=True, got {when!r}"
            f"{' in no_sync' * (when != 'never')}: it learns its graph in a backward that "
            f"exchanges gradients. Make one such step first, or leave static_graph out.",
        )
        require(
            all_reduce is not None or wrapped or size == 1,
            "all_reduce must be given for a plain module, and none was given in DDP or sharded by "
            "fully_shard: True sums gradients over ranks, False leaves each rank its part of the "
            "sum. Or give the wrapped module as module=...",
        )
        require(
            not (all_reduce and wrapped),
            "all_reduce must be False for a module in DDP or sharded by fully_shard, which "
            "exchange gradients themselves.",
        )
        require(
            when == "last" or wrapped,
            f"sync must be left at 'last' for plain modules, got {when!r}: nothing is exchanged in "
            f"their backward; all_reduce decides.",
        )

    def note_leaves(self, loss: Tensor) -> None:
        """Note which leaves a first backward adds gradients to that are outside the modules.

        Weights of `fully_shard` are other tensors in a forward: with them nothing is looked for.
        """
        if self._sharded or self._outside is not None:
            return
        inside = {id(each) for root in self._roots for each in root.parameters()}
        self._outside = [weakref.ref(leaf) for leaf in leaves_of(loss) if id(leaf) not in inside]

    def refuse_outside(self) -> None:
        """Raise a ValueError for a leaf outside the modules, after the backward: no rank sums it.

        Leaves that a forward made, as for PEFT's input gradients, are gone with its graph.
        """
        if self._outside and any(ref() is not None for ref in self._outside):
            gc.collect()
        left = [leaf for ref in self._outside or () if (leaf := ref()) is not None]
        if left:
            raise ValueError(
                f"module must hold all that is trained with a group, got a gradient of a tensor "
                f"{list(left[0].shape)} outside of it ({len(left)} in all): ranks would have "
                f"different gradients there. Give all modules, kondo.Options(module=[...]), make "
                f"the tensor a parameter of one, or detach it. Clear .grad before the next step."
            )

    def _learns_graph(self) -> bool:
        """Return whether the next backward may be the one in which DDP learns a static graph.

        Whether it has learnt it in steps that are not ours cannot be known.
        """
        return any(each.static_graph and each not in _EXCHANGED for each in self._averaged)

    @contextmanager
    def call(self, *, last: bool) -> Iterator[None]:
        """Hold for one forward and its backward: gradients are exchanged in it, or only added."""
        each = self._when == "each" or self._learns_graph()
        exchanged = each or (last and self._when == "last")
        with ExitStack() as stack:
            if not exchanged:
                for module in self._averaged:
                    stack.enter_context(module.no_sync())
            for sharded in self._sharded:
                sharded.set_requires_gradient_sync(exchanged)
                stack.callback(sharded.set_requires_gradient_sync, True)
            yield
            for module in (*self._averaged, *self._sharded):
                if exchanged and _exchanges(module):
                    _HELD.discard(module)
                    _EXCHANGED.add(module)
                else:
                    _HELD.add(module)

    def owes_exchange(self) -> bool:
        """Return whether gradients of earlier calls wait for an exchange that this step makes.

        Accumulation exchanges in its last call. If that one keeps nothing there is no backward to
        do it in, and ranks would be left with different gradients.
        """
        if self._when == "never":
            return False
        # DDP holds them in `.grad`, which may have been zeroed since; FSDP2 inside itself.
        averaged = (
            module
            for module in self._averaged
            if _exchanges(module) and any(p.grad is not None for p in module.parameters())
        )
        return any(module in _HELD for module in (*averaged, *self._sharded))

    @contextmanager
    def step(self, clock: StageClock) -> Iterator[None]:
        """Hold for the calls of a step; with `all_reduce`, sum what they added to `.grad`.

        What stood in `.grad` of a plain module before, from an earlier step of an accumulation, is
        not summed again. If the step fails it is all that is left there. Wrapped modules need it
        where it is: they exchange sums over steps.
        """
        before = [parameter.grad for parameter in self._own]
        for parameter in self._own:
            parameter.grad = None
        try:
            yield
            if self._sums:
                with clock.stage("reduce"):
                    self._sum()
        except BaseException:
            for parameter, old in zip(self._own, before, strict=True):
                parameter.grad = old
            raise
        for parameter, old in zip(self._own, before, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    @torch.no_grad()
    def _sum(self) -> None:
        """Replace each `.grad` by the sum over ranks; None where every rank has None."""
        found = torch.tensor([parameter.grad is not None for parameter in self._own]).long()
        grads = []
        for parameter, anywhere in zip(self._own, self._ranks.sum_(found).tolist(), strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                grads.append(parameter.grad)
        for bucket in _buckets(grads):
            together = self._ranks.sum_(torch.cat([grad.flatten() for grad in bucket]))
            parts = torch.split(together, [grad.numel() for grad in bucket])
            for grad, part in zip(bucket, parts, strict=True):
                grad.copy_(part.view_as(grad))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one dtype and device together, up to the size of a bucket."""
    bucket: list[Tensor] = []
    for grad in sorted(grads, key=lambda g: (str(g.dtype), str(g.device))):
        kind = (grad.dtype, grad.device)
        full = sum(g.numel() for g in bucket) + grad.numel() > _BUCKET
        if bucket and (full or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket


def _exchanges(module: nn.Module) -> bool:
    """Return whether a backward exchanges gradients: not in DDP's own `no_sync`."""
    return bool(getattr(module, "require_backward_grad_sync", True))


def _outermost(roots: Sequence[nn.Module], kind: type[Any]) -> Iterator[Any]:
    """Yield the modules of a kind that are not inside another of it."""
    for root in roots:
        if isinstance(root, kind):
            yield root
        else:
            yield from _outermost(list(root.children()), kind)
