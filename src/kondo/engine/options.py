"""Options of the step that few people set, in one object."""

import dataclasses
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kondo.arguments import check_flag, check_size, check_whole
from kondo.engine.differentiate import BackwardFn, Compact

# Beyond this many units over all ranks a sketch sets the price: 16 MB of float32 on every rank.
EXACT_UNITS = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `kondo.backward` does otherwise than by default. The last four are for many ranks.

    Example:
        >>> import kondo
        >>> kondo.Options(denominator="kept").denominator
        'kept'
    """

    denominator: Literal["full", "kept"] | float = "full"
    """What the sum of losses is divided by. "full": the elements that count in the whole batch, so
    that a learning rate means what it means for dense. "kept": the kept elements. A number: itself,
    for batches that are spread over calls. Counts are those of all ranks."""
    generator: torch.Generator | None = None
    """For the gate's draws; with ranks rank 0's is used, and those of the others are set to it."""
    screen_chunk: int | None = None
    """Rows per screening forward; by default four micro-batches."""
    screen_rows: Literal["all", "promising"] | None = None
    """"promising": rows with advantage <= 0 are not scored if the gate cannot keep them (a hard
    rate or price by delight); nor are rows whose advantages are all 0, by signals that are then 0.
    The kept set is the same. NaN in a row that was left out is not noticed, diagnostics leave out
    rows of unknown value, and the entropy is that of the screened rows. By default so for language
    models, "all" otherwise."""
    backward_fn: BackwardFn = Tensor.backward
    """How to differentiate a loss: `lambda loss: scaler.scale(loss).backward()` for gradient
    scaling, `accelerator.backward` for Accelerate."""
    compact: Compact | None = None
    """Another compaction of the kept rows, called like `kondo.Policy.compact`; its micro-batches go
    to the policy's log_prob."""
    module: nn.Module | Sequence[nn.Module] | None = None
    """The modules behind a policy that is a plain function, one or several: they are in evaluation
    mode during the screen, and with a group they are what ranks train: in DDP, sharded by
    `fully_shard`, or plain."""
    rebalance: bool = True
    """Move kept rows between ranks until each has about the same number of tokens."""
    all_reduce: bool | None = None
    """For plain modules, where it must be given: True sums over ranks what this call adds to
    `.grad`; False leaves each rank its part, and the parts add up to the gradient."""
    sync: Literal["last", "each", "never"] = "last"
    """In which forward/backward calls wrapped modules exchange gradients: the "last" of this step;
    "each", so that FSDP2 holds no unsharded gradients; or "never", for all but the last step of an
    accumulation. DDP's own `no_sync` around the call is respected."""
    exact_units: int = EXACT_UNITS
    """Beyond this many units of all ranks a sketch sets the price, and values are not gathered, for
    gates that a price alone decides."""

    modules: tuple[nn.Module, ...] = dataclasses.field(init=False, repr=False, compare=False)
    """`module` as a tuple."""

    def __post_init__(self) -> None:
        given: Any = self.module
        listed = given if isinstance(given, list | tuple) else [given] * (given is not None)
        object.__setattr__(self, "modules", tuple(listed))

    def check(self) -> None:
        """Raise a ValueError for options that cannot be right; a step calls it, on every rank."""
        number: Any = self.denominator
        real = isinstance(number, Real) and not isinstance(number, bool)
        if number not in ("full", "kept") and not (real and 0 < number < float("inf")):
            raise ValueError(
                f'denominator must be "full", "kept" or a positive number, got {number!r}; "full" '
                f"keeps the dense learning rate."
            )
        check_size("screen_chunk", self.screen_chunk)
        check_whole("exact_units", self.exact_units)
        check_flag("rebalance", self.rebalance)
        if self.all_reduce is not None:
            check_flag("all_reduce", self.all_reduce)
        strange = [each for each in self.modules if not isinstance(each, nn.Module)]
        if strange:
            raise ValueError(
                f"module must be a torch.nn.Module, or a list of some, got "
                f"{type(strange[0]).__name__}; give the modules that the policy calls."
            )
        if self.screen_rows not in ("all", "promising", None):
            raise ValueError(f'screen_rows must be "all" or "promising", got {self.screen_rows!r}.')

    def alike(self) -> dict[str, Any]:
        """Return what ranks must have in common, by name."""
        own = ("module", "modules", "screen_chunk", "backward_fn")
        names = [field.name for field in dataclasses.fields(self) if field.name not in own]
        draws = None if self.generator is None else self.generator.device.type
        return {name: getattr(self, name) for name in names} | {"generator": draws}
