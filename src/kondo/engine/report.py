"""What one gated step did: counts from the calls made, seconds from clocks around them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

# What a logger is given whatever its value is.
LOSSES = ("loss", "rank_loss")


class Late(NamedTuple):
    """What is read from the device after a step."""

    loss: float
    tokens_trained: int
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of `kondo.backward`. Print it, or log `as_dict()`.

    Example:
        >>> import torch, kondo
        >>> policy = torch.nn.Linear(2, 1)
        >>> log_prob = lambda rows: -policy(rows).squeeze(1).square()
        >>> report = kondo.backward(
        ...     log_prob, torch.randn(100, 2), torch.ones(100), gate=kondo.Gate(rate=0.03)
        ... )
        >>> report.seen, report.kept, report.rows_trained, report.empty
        (100, 3, 3, False)
    """

    seen: int
    """Units that count."""
    kept: int
    """Units that were worth it."""
    rate: float
    """kept / seen."""
    price: float
    """The gate's price, in the signal's units; minus infinity where it has none. A unit below it is
    skipped, or, by `kondo.UnbiasedGate`, not kept for certain."""
    rows_seen: int
    """Rows of the batch."""
    rows_screened: int
    """Rows that entered a screening forward; 0 where the log-probs were known."""
    rows_trained: int
    """Rows that entered a forward with a graph, and its backward."""
    tokens_seen: int
    """Elements of log_probs that count."""
    calls: int
    """Forward/backward calls made, one per micro-batch."""
    _late: Callable[[], "Late"] = dataclasses.field(repr=False, compare=False)
    _diagnose: Callable[[], dict[str, float]] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def late(self) -> "Late":
        """What the device knows only after the step. Read once, when first asked for: a loop that
        logs nothing does not wait."""
        return self._late()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a file holds: numbers that are read, and no way to read them."""
        read = {"late": self.late, "diagnostics": self.diagnostics}
        return self.__dict__ | read | {"_late": None, "_diagnose": None}

    @property
    def loss(self) -> float:
        """The gated loss whose gradient was added to `.grad`."""
        return self.late.loss

    @property
    def tokens_trained(self) -> int:
        """What the backward was paid for: elements that count in the trained rows, or, where the
        compaction cuts rows, tokens that entered the forward."""
        return self.late.tokens_trained

    @property
    def seconds(self) -> dict[str, float]:
        """Per stage: screen, select, compact, forward, backward."""
        return self.late.seconds

    @functools.cached_property
    def diagnostics(self) -> dict[str, float]:
        """See `kondo.diagnostics`. Computed when first read: who logs nothing pays nothing."""
        return self._diagnose()

    @property
    def empty(self) -> bool:
        """Whether nothing was kept: `.grad` was not touched, and stepping would only decay."""
        return self.kept == 0

    def as_dict(self, prefix: str = "kondo/") -> dict[str, float]:
        """Return flat, plain numbers for a logger, each key with `prefix`.

        A number that this step does not have is left out: the price of a dense step, the entropy
        without log-probs, a share of no units. Loggers reject or misdraw NaN and infinity. A loss
        is never left out: a loss that is not finite must be seen.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name[0] != "_"]
        flat: dict[str, float] = {name: getattr(self, name) for name in names}
        flat |= {"empty": float(self.empty), "loss": self.loss}
        flat |= {"tokens_trained": self.tokens_trained}
        flat |= {f"seconds_{stage}": spent for stage, spent in self.seconds.items()}
        found = {
            key: value
            for key, value in (self.diagnostics | flat).items()
            if math.isfinite(value) or key in LOSSES
        }
        return {prefix + key: value for key, value in found.items()}

    def __str__(self) -> str:
        stages = "  ".join(f"{name} {1e3 * spent:.1f}" for name, spent in self.seconds.items())
        price = "" if self.price == -math.inf else f" at price {self.price:.4g}"
        head = f"loss {self.loss:.6g}"
        if self.empty:
            head = "nothing kept" + (", .grad untouched" if self.calls == 0 else "")
        return (
            f"{head}: kept {self.kept} of {self.seen} units ({self.rate:.2%}){price}; "
            f"differentiated {self.rows_trained} of {self.rows_seen} rows in {self.calls} calls; "
            f"ms: {stages}"
        )
