"""What only a language model can get wrong, for `kondo.check`: try it, on the rows of a batch.

    later tokens changed      does a log-prob see what follows it?
    rows cut in half          does it depend on the longest row?
    other positions           are they used?
    the model's own forward   masks, padding, all logits: the same log-probs and gradients?

Every rank makes the same number of forwards, whatever its model answers.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kondo.engine.findings import Precision, different_gradients
from kondo.engine.policy import given_modules, parts_of
from kondo.engine.preserved import calm
from kondo.engine.trial import gradients_of, named
from kondo.lm.architecture import last_hidden
from kondo.lm.head import Head
from kondo.lm.model_checks import bend
from kondo.lm.pack import Pack, packs
from kondo.lm.rows import TokenRows
from kondo.rows import take

if TYPE_CHECKING:
    from kondo.lm.model import CausalLM


# Two forwards of the same shapes differ by less rounding than others.
_SAME_SHAPES = 0.2


@dataclasses.dataclass(frozen=True)
class AsGiven:
    """Rows for the model's own forward instead of `CausalLM`'s, as they lie, padding and all."""

    rows: TokenRows
    """With ids of the vocabulary in the padding."""


LogProb = Callable[[TokenRows | Pack | AsGiven], Tensor]


def faults(lm: "CausalLM", log_prob: LogProb, batch: TokenRows) -> Iterator[str]:
    """Yield, in words with the remedy, why rows and tokens cannot be dropped from this model.

    Args:
        lm: the policy.
        log_prob: its log-prob, or a wrapped module that ends in it.
        batch: a few rows, which fit one pack.
    """
    modules = parts_of([*given_modules(log_prob), *lm.modules()])
    with calm(modules):
        yield from _Trial(lm, log_prob, batch, modules).findings()


def as_given(lm: "CausalLM", rows: TokenRows) -> Tensor:
    """Run the model's own forward on rows as they lie, and read all its logits; [N, S]."""
    ids, real = rows.input_ids.to(lm.device), rows.attention_mask.to(lm.device)
    positions = None if rows.position_ids is None else rows.position_ids.to(lm.device)
    layer = lm._given_head
    inputs: dict[str, Any] = {"attention_mask": real, "position_ids": positions}
    if layer is None or lm._hugging_face:
        inputs |= {"attention_mask": real.long(), "use_cache": False}
        inner = lm._base if layer is None else lm.backbone
        if "position_ids" not in inspect.signature(inner.forward).parameters:
            del inputs["position_ids"]
    elif positions is None:
        inputs["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
    if layer is None:
        logits = lm.module(input_ids=ids, **inputs).logits
    else:
        hidden = lm._as_head_takes(last_hidden(lm.backbone(ids, **inputs)), lm.head)
        logits = _logits(hidden, layer)
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_probs = (logits[:, :-1].to(wide) / lm.temperature).log_softmax(-1)
    taken = log_probs.gather(-1, ids[:, 1:, None].to(logits.device)).squeeze(-1)
    return nn.functional.pad(taken, (1, 0))


def _logits(hidden: Tensor, head: nn.Module | Head) -> Tensor:
    if isinstance(head, Head):
        return bend(nn.functional.linear(hidden, head.weight, head.bias), head)
    logits: Tensor = head(hidden)
    return logits


class _Trial:
    """The forwards of one check: every second row loses its second half in some of them."""

    def __init__(
        self, lm: "CausalLM", log_prob: LogProb, batch: TokenRows, modules: list[nn.Module]
    ):
        self._lm, self._log_prob, self._batch, self._modules = lm, log_prob, batch, modules
        self._whole = batch.completion_mask
        self._half = first_half(self._whole)
        self._two = self._whole.clone()
        self._two[1::2] = self._half[1::2]

    def findings(self) -> Iterator[str]:
        with torch.no_grad():
            (whole,) = self._packs(self._whole)
            plain, changed = self._read(whole), self._read(with_later_tokens_changed(whole))
            (short,) = self._packs(self._half)
            cut = self._read(short)
            positions = self._batch.position_ids
            uncounted = None if positions is None else self._without_positions()
        # Norms and scans sum in float32, whatever the weights are.
        numbers = [*(value for _, value in named(self._modules)), torch.zeros(())]
        self._precision = Precision(plain, numbers)
        ahead = self._precision.apart(changed, plain, self._half, share=_SAME_SHAPES)
        yield from self._of_model()
        if ahead is not None:
            yield (
                f"Log-probs change by {ahead:.2g} when later tokens of the row change: the model "
                f"sees tokens that follow the one it predicts, and CausalLM cuts rows after their "
                f"last kept token. Load it as a causal decoder (is_decoder=True, no bidirectional "
                f"attention), or use another model."
            )
        elif (by := self._precision.apart(cut, plain, self._half)) is not None:
            yield (
                f"Log-probs change by {by:.2g} when all rows are cut after half of their sampled "
                f"tokens: the model depends on the longest row of a forward, as dynamic RoPE and "
                f"longrope do. Dropping rows and tokens then changes the others. Use a model of "
                f"another rope_type, such as default, linear, llama3 or yarn."
            )
        if uncounted is not None and self._precision.apart(uncounted, plain, self._whole) is None:
            yield (
                "position_ids are not used: log-probs are the same without them, though they do "
                "not go up by one from token to token. Leave them out, or use a model that reads "
                "them."
            )

    def _packs(self, wanted: Tensor, batch: TokenRows | None = None) -> Iterator[Pack]:
        lm = self._lm
        return packs(
            batch or self._batch,
            wanted,
            layout=lm.layout,
            max_tokens=lm.max_tokens,
            device=lm.device,
            bare=lm._hugging_face,
        )

    def _read(self, pack: Pack) -> Tensor:
        """Return the log-probs of a pack in the shape of the batch, [N, S]; 0 elsewhere."""
        found = self._log_prob(pack).detach()
        places = pack.rows.to(found.device), pack.columns.to(found.device)
        return found.new_zeros(self._whole.shape).index_put(places, found)

    def _without_positions(self) -> Tensor | None:
        """Return log-probs of the rows without their positions; None if those only count up."""
        bare = dataclasses.replace(self._batch, position_ids=None)
        (pack,) = self._packs(self._whole, bare)
        found = self._read(pack)
        real, positions = self._batch.attention_mask, self._batch.position_ids
        assert positions is not None
        steps = positions.diff(dim=1)[real[:, 1:] & real[:, :-1]]
        return found if bool((steps != 1).any()) else None

    def _of_model(self) -> Iterator[str]:
        """Compare with the model as given, on rows of two lengths."""
        batch, precision, last = self._batch, self._precision, self._lm.vocab_size - 1
        two = dataclasses.replace(batch, completion_mask=self._two)
        real = batch.attention_mask
        left = bool((~real[:, 0]).any()) and self._lm._given_head is None
        alone = int(real[::2].sum(1).argmax()) * 2
        one = torch.tensor([alone], device=real.device)
        right, other, single = (
            _laid(two, left=False, padding=0, spare=1),
            _laid(two, left=left, padding=last, spare=1),
            _laid(_taken(two, one), left=False, padding=0),
        )
        with torch.enable_grad():
            ours = self._log_prob(two)
            gradients = gradients_of(_of_tokens(ours, self._two).sum())
            theirs = _of_tokens(self._log_prob(AsGiven(right)), right.completion_mask)
            expected = gradients_of(theirs.sum())
        with torch.no_grad():
            padded = _of_tokens(self._log_prob(AsGiven(other)), other.completion_mask)
            by_itself = _of_tokens(self._log_prob(AsGiven(single)), single.completion_mask)
        ours, theirs = ours.detach(), theirs.detach()
        found = _of_tokens(ours, self._two)
        beside = precision.apart(found, theirs, None)
        away = precision.apart(found, padded, None)
        here = _of_tokens(ours[one.to(ours.device)], self._two[one])
        around = precision.apart(here, by_itself, None)
        if around is not None:
            yield (
                f"Log-probs differ from those of the model's own forward by {around:.2g}, also for "
                f"a row alone, without padding: CausalLM runs the backbone and reads the weight of "
                f"the output layer, and leaves out what stands around them (a wrapper that scales, "
                f"caps or replaces logits, hooks of the model or of its output layer, an adapter "
                f"that acts in the model's own forward). Remove it, or give the parts: "
                f"CausalLM(backbone, head=Head(...))."
            )
        elif beside is not None or away is not None:
            side = "right" if beside is not None else "left" if left else "right"
            yield (
                f"Padding matters: the model's own forward gives other log-probs, by "
                f"{beside or away:.2g}, for rows that are padded on the {side}, than for a row "
                f"alone. CausalLM cuts padding off, so it does not train what a padded rollout "
                f"sampled from. Use a model that masks padding, or sample without padding."
            )
        else:
            names = {id(value): name for name, value in named(self._modules)}
            # Others are made in a forward, as an embedding's output that requires grad.
            known = {*names, *(expected.keys() & gradients.keys())}
            expected, gradients = (
                {key: each for key, each in side.items() if key in known}
                for side in (expected, gradients)
            )
            different = different_gradients(
                expected, gradients, precision, names, ("the model's own", "CausalLM's")
            )
            if different:
                yield (
                    f"The gradient is not that of the model's own forward in {len(different)} of "
                    f"{len(expected)} parameters, first in {different[0]}, though log-probs are "
                    f"the same: hooks, custom functions or a detach stand around the layers. "
                    f"Remove them."
                )


def first_half(mask: Tensor) -> Tensor:
    """Return the first half of what counts in each row, rounded up: bool [N, S]."""
    place = mask.long().cumsum(1)
    return mask & (2 * place <= mask.sum(1, keepdim=True) + 1)


def with_later_tokens_changed(pack: Pack) -> Pack:
    """Return a pack in which the second half of each row's kept tokens is read as other tokens.

    The last of the first half is changed too, but not as a target: what predicts it must not see
    it. Tokens between the kept ones change with them.
    """
    counts = (pack.rows.diff(prepend=pack.rows[:1]) != 0).cumsum(0).bincount()
    ends = counts.cumsum(0)
    middle = ends - counts + (counts + 1) // 2 - 1
    first, last = pack.read[middle] + 1, pack.read[ends - 1] + 1
    slot = torch.arange(pack.input_ids.numel(), device=first.device).unsqueeze(1)
    later = ((slot >= first) & (slot <= last)).any(1).view(pack.input_ids.shape)
    # Ids of the pack itself, so that no special token comes in.
    others = pack.targets.flip(0)
    drawn = others[torch.arange(later.numel(), device=first.device) % len(others)]
    drawn = drawn.view(later.shape)
    changed = torch.where(drawn == pack.input_ids, (pack.input_ids + 1) % 2, drawn)
    return dataclasses.replace(pack, input_ids=torch.where(later, changed, pack.input_ids))


def _of_tokens(log_probs: Tensor, wanted: Tensor) -> Tensor:
    """Return the log-probs of the tokens that are wanted, in the order of the rows, [K]."""
    return log_probs[wanted.to(log_probs.device)]


def _taken(rows: TokenRows, index: Tensor) -> TokenRows:
    """Return some of the rows."""
    some: TokenRows = take(rows, index)
    return some


def _laid(rows: TokenRows, *, left: bool, padding: int, spare: int = 0) -> TokenRows:
    """Return rows cut after their last wanted token, padded on one side.

    Args:
        rows: padded anyhow.
        left: pad on the left, and count positions from the first real token, as generate does.
        padding: the id that stands there.
        spare: columns of padding for the longest row too, where the rows have as many: rows that
            were cut may all be as long as each other.
    """
    wanted, ids = rows.completion_mask, rows.input_ids
    real = rows.attention_mask & wanted.flip(1).cummax(1).values.flip(1)
    columns = real.shape[1]
    width = min(int(real.sum(1).max()) + spare, columns)
    order = (real if left else ~real).byte().argsort(dim=1, stable=True)
    order = order[:, columns - width :] if left else order[:, :width]
    there = real.gather(1, order)
    positions = rows.position_ids
    if positions is not None:
        positions = positions.gather(1, order).masked_fill(~there, 0)
    elif left:
        positions = (there.long().cumsum(1) - 1).clamp(min=0)
    return TokenRows(
        input_ids=torch.where(there, ids.gather(1, order), padding),
        attention_mask=there,
        completion_mask=wanted.gather(1, order),
        position_ids=positions,
    )
