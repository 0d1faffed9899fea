"""A framework's forward of rows of tokens, as `kondo.check` sees it.

    rows of tokens -> the framework's own forward -> log-probs      tried like any policy
    the same rows, cut after half of their tokens -> the same ones  no token sees later ones

Each integration brings its forward as a function of its model and rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kondo import rows
from kondo.engine.check import CheckError, in_words
from kondo.engine.policy import LogProb, Policy, evaluation
from kondo.engine.preserved import preserved
from kondo.engine.trial import MOST_ROWS, Precision, Trial, draw_from
from kondo.lm.rows import TokenRows

__all__ = ["MOST_ROWS", "Forward", "Run", "TrainedForward", "check_forwards"]

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
        self.forward, self.most = log_prob, most

    def log_prob(self, rows: TokenRows) -> Tensor:
        """Return log-probs, [n, S]."""
        found: Tensor = self.forward(rows)
        return found

    def modules(self) -> list[nn.Module]:
        """Return the forward."""
        return [self.forward]

    def screened(self, rows: TokenRows) -> Tensor:
        """Return log-probs as a screen makes them: in evaluation mode, without a graph."""
        with torch.no_grad(), evaluation([self.forward]):
            return self.log_prob(rows)

    def mask(self, batch: Any) -> Tensor:
        """Return the completion mask."""
        mask: Tensor = batch.completion_mask
        return mask

    def screen_calls(self, batch: Any, size: int, chunk: int | None) -> int:
        """Return how many forwards these rows take."""
        return -(-size // self.most)

    def faults(self, batch: Any, log_prob: LogProb) -> Iterator[str]:
        """Yield what is wrong with a model that looks ahead, which gated rows are cut for."""
        counted = batch.completion_mask
        before = counted.sum(0).cumsum(0)
        end = int((2 * before >= before[-1]).int().argmax()) + 1
        names = ("input_ids", "attention_mask", "completion_mask")
        cut = TokenRows(**{name: getattr(batch, name)[:, :end] for name in names})
        whole, again, alone = map(self.screened, (batch, batch, cut))
        precision = Precision(whole, list(self.forward.parameters()))
        random = precision.apart(again, whole, counted) is not None
        apart = precision.apart(alone, whole[:, :end], counted[:, :end])
        if apart is not None and not random:
            yield (
                f"Log-probs of a token depend on later tokens: they change by {apart:.2g} when the "
                f"row is cut after it, as a gated step cuts rows after their last kept token. Use "
                f"a causal model: is_decoder=True, no attention in both directions."
            )


def check_forwards(policy: TrainedForward, batch: TokenRows) -> None:
    """Try a forward in evaluation mode and without a graph, where gradients cannot be compared.

    Every rank makes the same thirteen forwards.

    Args:
        policy: the forward.
        batch: N >= 1 rows by length, of which as many are tried as the forward holds.

    Raises:
        kondo.CheckError: what makes the model one that rows cannot be dropped from.
    """
    size, device = len(batch.input_ids), batch.device
    places = torch.linspace(0, size - 1, min(size, policy.most)).round().long()
    some: TokenRows = rows.take(batch, places)

    cuda = [device] if device.type == "cuda" else []

    def run(what: str, some: TokenRows, seed: int) -> Tensor:
        draw_from(seed, cuda)
        return policy.screened(some)

    found: list[str] = []
    numbers = list(policy.forward.parameters())
    with preserved(list(policy.forward.modules()), cuda, None, None):
        try:
            trial = Trial(run, run, some, some.completion_mask, [], numbers)
            found.extend(trial.faults(named=True))
            found.extend(policy.faults(some, policy.log_prob))
        except Exception as error:  # as in `kondo.check`, whatever a model raises is a finding
            found.append(in_words(error))
    if found:
        raise CheckError(found)
