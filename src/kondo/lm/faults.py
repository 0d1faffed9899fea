"""Try what only a language model can get wrong, on the rows of a batch, for `kondo.check`.

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

from kondo.engine.policy import given_modules, parts_of
from kondo.engine.preserved import calm
from kondo.engine.trial import Precision, different_gradients, gradients_of, tensors_of
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
        yield from _of_tokens(lm, log_prob, batch, modules)
        yield from _of_model(lm, log_prob, batch, modules)


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
        if isinstance(layer, Head):
            logits = bend(nn.functional.linear(hidden, layer.weight, layer.bias), layer)
        else:
            logits = layer(hidden)
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_probs = (logits[:, :-1].to(wide) / lm.temperature).log_softmax(-1)
    taken = log_probs.gather(-1, ids[:, 1:, None].to(logits.device)).squeeze(-1)
    return nn.functional.pad(taken, (1, 0))


def _precision(log_probs: Tensor, modules: list[nn.Module]) -> Precision:
    # Norms and scans sum in float32, whatever the weights are.
    return Precision(log_probs, [*(value for _, value in tensors_of(modules)), torch.zeros(())])


def _of_tokens(
    lm: "CausalLM", log_prob: LogProb, batch: TokenRows, modules: list[nn.Module]
) -> Iterator[str]:
    """Change tokens, lengths and positions, and judge which log-probs change with them."""
    wanted, real, positions = batch.completion_mask, batch.attention_mask, batch.position_ids
    half = first_half(wanted)

    def read(some: TokenRows, counted: Tensor, *, change: bool = False) -> Tensor:
        """Return log-probs of rows in one pack, [N, S]; 0 where they do not count."""
        (pack,) = packs(
            some,
            counted,
            layout=lm.layout,
            max_tokens=lm.max_tokens,
            device=lm.device,
        )
        found = log_prob(_with_later_tokens_changed(pack) if change else pack)
        places = pack.rows.to(found.device), pack.columns.to(found.device)
        return found.new_zeros(wanted.shape).index_put(places, found)

    with torch.no_grad():
        plain, changed = read(batch, wanted), read(batch, wanted, change=True)
        cut, uncounted = read(batch, half), None
        if positions is not None:
            uncounted = read(dataclasses.replace(batch, position_ids=None), wanted)
    precision = _precision(plain, modules)
    ahead = precision.apart(changed, plain, half, share=_SAME_SHAPES)
    if ahead is not None:
        yield (
            f"Log-probs change by {ahead:.2g} when later tokens of the row change: the model sees "
            f"tokens that follow the one it predicts, and CausalLM cuts rows after their last kept "
            f"token. Load it as a causal decoder (is_decoder=True, no bidirectional attention), or "
            f"use another model."
        )
    elif (by := precision.apart(cut, plain, half)) is not None:
        yield (
            f"Log-probs change by {by:.2g} when all rows are cut after half of their sampled "
            f"tokens: the model depends on the longest row of a forward, as dynamic RoPE and "
            f"longrope do. Dropping rows and tokens then changes the others. Use a model of "
            f"another rope_type, such as default, linear, llama3 or yarn."
        )
    if positions is None or uncounted is None:
        return
    steps = positions.diff(dim=1)[real[:, 1:] & real[:, :-1]]
    if bool((steps != 1).any()) and precision.apart(uncounted, plain, wanted) is None:
        yield (
            "position_ids are not used: log-probs are the same without them, though they do not go "
            "up by one from token to token. Leave them out, or use a model that reads them."
        )


def _of_model(
    lm: "CausalLM", log_prob: LogProb, batch: TokenRows, modules: list[nn.Module]
) -> Iterator[str]:
    """Compare with the model as given: every second row loses its second half."""
    wanted, real = batch.completion_mask.clone(), batch.attention_mask
    wanted[1::2] = first_half(wanted)[1::2]
    two = dataclasses.replace(batch, completion_mask=wanted)
    left = bool((~real[:, 0]).any()) and lm._given_head is None
    longest = torch.tensor([int(real[::2].sum(1).argmax()) * 2], device=real.device)
    one: TokenRows = take(two, longest)

    def theirs(rows: TokenRows) -> Tensor:
        """Return the model's own log-probs of the tokens that count, [K]."""
        found = log_prob(AsGiven(rows))
        return found[rows.completion_mask.to(found.device)]

    with torch.enable_grad():
        every = log_prob(two)
        ours = every[wanted.to(every.device)]
        gradients = gradients_of(ours.sum())
        beside = theirs(_laid(two, left=False, padding=0, spare=1))
        expected = gradients_of(beside.sum())
    with torch.no_grad():
        other = theirs(_laid(two, left=left, padding=lm.vocab_size - 1, spare=1))
        alone = theirs(_laid(one, left=False, padding=0))
        here = every[longest.to(every.device)][one.completion_mask.to(every.device)]
    precision = _precision(every, modules)
    around = precision.apart(here, alone, None)
    right, away = (precision.apart(ours.detach(), each.detach(), None) for each in (beside, other))
    if around is not None:
        yield (
            f"Log-probs differ from those of the model's own forward by {around:.2g}, also for a "
            f"row alone, without padding: CausalLM runs the backbone and reads the weight of the "
            f"output layer, and leaves out what stands around them (a wrapper that scales, caps or "
            f"replaces logits, hooks of the model or of its output layer, an adapter that acts in "
            f"the model's own forward). Remove it, or give the parts: CausalLM(backbone, "
            f"head=Head(...))."
        )
    elif right is not None or away is not None:
        side = "right" if right is not None or not left else "left"
        yield (
            f"Padding matters: the model's own forward gives other log-probs, by "
            f"{right or away:.2g}, for rows that are padded on the {side}, than for a row alone. "
            f"CausalLM cuts padding off, so it does not train what a padded rollout sampled from. "
            f"Use a model that masks padding, or sample without padding."
        )
    else:
        shared, sides = set(expected) & set(gradients), ("the model's own", "CausalLM's")
        found = different_gradients(expected, gradients, precision, modules, shared, sides)
        if found:
            yield (
                f"The gradient is not that of the model's own forward in {found}, though log-probs "
                f"are the same: hooks, custom functions or a detach stand around the layers. "
                f"Remove them."
            )


def first_half(mask: Tensor) -> Tensor:
    """Return the first half of what counts in each row, rounded up: bool [N, S]."""
    place = mask.long().cumsum(1)
    return mask & (2 * place <= mask.sum(1, keepdim=True) + 1)


def _with_later_tokens_changed(pack: Pack) -> Pack:
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
