"""A framework's forward of rows of tokens, as `kondo.check` sees it.

rows of tokens -> the forward that the framework trains with -> log-probs   tried like any policy
the same rows, cut after half of their tokens -> the same ones      no token sees later ones
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from kondo.engine.findings import Precision
from kondo.engine.policy import Policy
from kondo.engine.untraced import without_trace
from kondo.lm.rows import TokenRows

Run = Callable[[nn.Module, TokenRows], Tensor]
"""(model, rows) -> log-probs [n, S]: 0 or anything else where `completion_mask` is False."""


class Forward(nn.Module):
    """A forward as a module: of all that a trainer or an engine holds, only its model is tried."""

    def __init__(self, model: nn.Module, run: Run):
        super().__init__()
        self.model, self._run = model, run

    def forward(self, rows: TokenRows) -> Tensor:
        """Return log-probs, [n, S]."""
        return self._run(self.model, rows)


class TrainedForward(Policy):
    """A forward that knows its rows of tokens.

    Args:
        log_prob: the forward.
        most: rows that it can hold with a graph.
    """

    unit = "sequence"

    def __init__(self, log_prob: Forward, most: int):
        super().__init__(log_prob)
        self.log_prob: Forward = log_prob
        self.most = most

    def mask(self, batch: Any) -> Tensor:
        """Return the completion mask."""
        mask: Tensor = batch.completion_mask
        return mask

    def screen_calls(self, batch: Any, size: int, chunk: int | None) -> int:
        """Return how many forwards these rows take."""
        return -(-size // self.most)

    def faults(self, batch: Any) -> Iterator[str]:
        """Yield what is wrong with a model that looks ahead: gated rows are cut after the last kept
        token."""
        counted = batch.completion_mask
        before = counted.sum(0).cumsum(0)
        end = int((2 * before >= before[-1]).int().argmax()) + 1
        names = ("input_ids", "attention_mask", "completion_mask")
        cut = TokenRows(**{name: getattr(batch, name)[:, :end] for name in names})
        whole, again, alone = (
            without_trace(partial(self.log_prob, rows), self.log_prob)
            for rows in (batch, batch, cut)
        )
        precision = Precision(whole, list(self.log_prob.parameters()))
        random = precision.apart(again, whole, counted) is not None
        apart = precision.apart(alone, whole[:, :end], counted[:, :end])
        if apart is not None and not random:
            yield (
                f"Log-probs of a token depend on later tokens: they change by {apart:.2g} when the "
                f"row is cut after it, as a gated step cuts rows after their last kept token. Use "
                f"a causal model: is_decoder=True, no attention in both directions."
            )
