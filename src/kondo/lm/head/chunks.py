"""Log-probs of tokens straight from hidden states: no [K, V] tensor of logits ever exists.

    hidden [K, D] -> logits of one chunk of tokens [n, V] -> log-softmax -> its targets' entries [n]

With h a hidden state, W and b the head, s its scale, c its soft cap and T the temperature:

    raw = h W' + b
    logits = s raw / T                 or, capped,  (c / T) tanh(s raw / c)
    log p = logits[target] - log sum exp(logits)
    d log p / d raw = -s / T delta     delta = softmax(logits) - onehot(target)
                                       or, capped,  delta (1 - tanh^2(s raw / c))

Saved for the backward are the inputs and two numbers per token; it recomputes the logits of each
chunk, once. Tokens that are a single chunk save their delta instead. With g the gradient that
arrives, -g s / T is one number per token. It multiplies [n, D] tensors and never an [n, V] one:

    d h = -g s / T (delta W)           d W = delta' (-g s / T h)

A frozen head (LoRA) needs no sum over tokens, so its forward keeps delta W, [K, D], and its
backward only multiplies that by -g s / T: two matrix products in all, where a recomputing backward
takes three. A head that learns takes four in pieces, and three as a single chunk.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kondo.lm.fuse import can_fuse, fused
from kondo.lm.head.inputs import Head, How, wants_graph

# A log-sum-exp reads a row of logits twice: from memory, unless the row is this short.
MAX_BLOCK = 8192


def torch_log_probs(hidden: Tensor, head: Head, targets: Tensor, how: How) -> Tensor:
    """Return log-probs [K], with a graph only where something asks for one."""
    if not wants_graph(hidden, head):
        return _forward(hidden, head, targets, how).log_probs
    inputs = (hidden, head.weight, head.bias, targets, how)
    found: Tensor = _TokenLogProbs.apply(*inputs)  # type: ignore[no-untyped-call]
    return found


class _TokenLogProbs(torch.autograd.Function):
    """`_forward`, and the gradients of hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: How
    ) -> Tensor:
        ctx.how, ctx.hidden_dtype = how, hidden.dtype
        frozen = not any(ctx.needs_input_grad[1:3])
        # What exists once anyway, a single chunk, may stay: it saves a product with the weight.
        one_chunk = 0 < hidden.shape[0] <= how.chunk
        ctx.saves = "delta_w" if frozen else "delta" if one_chunk else "inputs"
        known = _forward(hidden, Head(weight, bias), targets, how, wants=ctx.saves)
        if ctx.saves == "delta_w":
            ctx.save_for_backward(known.delta_w)
        elif ctx.saves == "delta":
            ctx.save_for_backward(hidden, weight, bias, known.delta)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, known.log_probs, known.log_sums)
        return known.log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: How = ctx.how
        factor = -grad.unsqueeze(1) * how.slope  # -g s / T, [K, 1]
        if ctx.saves == "delta_w":
            (delta_w,) = ctx.saved_tensors
            return (delta_w * factor).to(ctx.hidden_dtype), None, None, None, None
        hidden, weight, bias, *known = ctx.saved_tensors
        head, parts = Head(weight, bias), list(how.chunks(hidden.shape[0]))
        deltas = iter(known) if ctx.saves == "delta" else _deltas(hidden, head, *known, how=how)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # One chunk is no sum: its product may be rounded as it is written.
        sum_dtype = weight.dtype if len(parts) == 1 else how.wide
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        d_weight = torch.empty_like(weight, dtype=sum_dtype) if for_weight else None
        d_bias = weight.new_zeros(weight.shape[0], dtype=how.wide) if for_bias else None
        with how.no_autocast():
            low_weight = how.cast(weight)
            for part in parts:
                delta = next(deltas)
                if d_hidden is not None:
                    d_hidden[part] = (delta @ low_weight) * factor[part]
                if d_weight is not None:
                    rows = how.cast(how.cast(hidden[part]) * factor[part])
                    _add_product(d_weight, delta.T, rows, beta=float(part.start > 0))
                if d_bias is not None:
                    _add_product(d_bias.unsqueeze(1), delta.T, how.cast(factor[part]))
                del delta  # before the next chunk's logits exist
        if d_weight is not None and not parts:
            d_weight.zero_()
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), None, None


class _Known(NamedTuple):
    """What a forward knows of K tokens."""

    log_probs: Tensor  # [K]
    log_sums: Tensor  # [K]: log sum exp(logits)
    delta: Tensor | None  # [K, V], of a single chunk
    delta_w: Tensor | None  # [K, D]: delta W


def _forward(hidden: Tensor, head: Head, targets: Tensor, how: How, wants: str = "") -> _Known:
    """Return log-probs, log-sum-exps and, if wanted, "delta" or "delta_w"."""
    num_tokens, width = hidden.shape
    log_probs = torch.empty(num_tokens, dtype=how.wide, device=hidden.device)
    log_sums = torch.empty_like(log_probs)
    delta = delta_w = None
    if wants == "delta_w":
        delta_w = hidden.new_empty(num_tokens, width, dtype=how.dtype)
    with how.no_autocast():
        head = how.cast_head(head)
        for part in how.chunks(num_tokens):
            here, target = how.at(part), targets[part].unsqueeze(1)
            logits = chunk_logits(how.cast(hidden[part]), head, here)
            log_probs[part], log_sums[part] = _at_target(logits, target)
            if wants.startswith("delta"):
                delta = _delta(logits, target, log_probs[part], log_sums[part], here)
            del logits
            if delta is not None and delta_w is not None:
                torch.mm(delta, head.weight, out=delta_w[part])
                delta = None  # before the next chunk's logits exist
    return _Known(log_probs, log_sums, delta, delta_w)


def _deltas(
    hidden: Tensor, head: Head, targets: Tensor, log_probs: Tensor, log_sums: Tensor, *, how: How
) -> Iterator[Tensor]:
    """Yield each chunk's softmax - onehot, from logits computed anew; autocast must be off."""
    head = how.cast_head(head)
    for part in how.chunks(hidden.shape[0]):
        here, target = how.at(part), targets[part].unsqueeze(1)
        # No names: neither logits nor delta outlive their turn.
        yield _delta(
            chunk_logits(how.cast(hidden[part]), head, here),
            *(target, log_probs[part], log_sums[part]),
            here,
        )


def chunk_logits(hidden: Tensor, head: Head, how: How) -> Tensor:
    """Return logits / T, [n, V] in the wide dtype."""
    if how.soft_cap is None:
        return _scaled_linear(hidden, head, how.slope, how.wide)
    raw = _scaled_linear(hidden, head, how.scale / how.soft_cap, how.wide)
    return raw.tanh_().mul_(how.top)


def _scaled_linear(
    hidden: Tensor, head: Head, factor: float | Tensor, dtype: torch.dtype
) -> Tensor:
    """Return factor * (hidden @ weight.T + bias); a number costs no pass over [n, V]."""
    number = factor if isinstance(factor, float) else 1.0
    result = hidden.new_empty(hidden.shape[0], head.weight.shape[0], dtype=dtype)
    _add_product(result, hidden, head.weight.T, alpha=number, beta=0.0)
    if head.bias is not None:
        result.add_(head.bias, alpha=number)
    return result.mul_(factor) if isinstance(factor, Tensor) else result


def _at_target(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs of targets [n, 1], and the log-sum-exps, [n] each.

    With t the largest logit of a block, s = log sum exp(logits - t) within it, and T the largest of
    all:

        log p = (logit - t) - s + log-softmax over blocks of (t - T + s)

    An offset of all logits cancels in every bracket and costs no digits, and no term is above 0.
    """
    num_tokens, vocabulary = logits.shape
    width = block_width(vocabulary)
    blocks = logits.view(num_tokens, -1, width)
    tops, log_sums = fused(_tops_and_log_sums, logits.device)(blocks)
    highest = tops.amax(dim=1, keepdim=True)
    shares = tops - highest + log_sums
    own = target // width
    found = (logits.gather(1, target) - tops.gather(1, own)) - log_sums.gather(1, own)
    # A block that a bias shuts out has no largest logit, and its targets no probability.
    found = torch.where(tops.gather(1, own) == -torch.inf, -torch.inf, found)
    found += shares.log_softmax(dim=1).gather(1, own)
    return found.squeeze(1), highest.squeeze(1) + shares.logsumexp(dim=1)


def _tops_and_log_sums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each block [n, B, width], and log sum exp(logits - it), [n, B].

    Fused, this reads the logits once.
    """
    tops = blocks.amax(dim=2)
    offset = torch.where(tops == -torch.inf, 0.0, tops)  # exp(-inf - 0) is 0, not NaN
    return tops, (blocks - offset.unsqueeze(2)).exp_().sum(dim=2).log()


@functools.cache
def block_width(vocabulary: int) -> int:
    """Return the widest equal blocks up to MAX_BLOCK tokens, or one block if only slivers fit."""
    if vocabulary <= MAX_BLOCK:
        return vocabulary
    # Multiples of 4 keep float32 blocks aligned to the 16 bytes that a GPU reads at once.
    fitting = [w for w in range(4, MAX_BLOCK + 1, 4) if vocabulary % w == 0]
    return max((w for w in fitting if w >= MAX_BLOCK // 8), default=vocabulary)


def _delta(logits: Tensor, target: Tensor, log_probs: Tensor, log_sums: Tensor, how: How) -> Tensor:
    """Return softmax - onehot, [n, V] in the products' dtype, capped as above. Spoils logits."""
    bend = None if how.soft_cap is None else (logits / how.top).square_().neg_().add_(1.0)
    if can_fuse(logits.device):
        one_pass = fused(_delta_in_one_pass, logits.device)
        delta = one_pass(logits, target, log_probs, log_sums, how.dtype)
        return delta if bend is None else delta.mul_(bend)
    logits.sub_(log_sums.unsqueeze(1))
    if logits.dtype == how.dtype:
        delta = logits.exp_()
    else:
        delta = torch.exp(logits, out=torch.empty_like(logits, dtype=how.dtype))
    # p - 1 at the target from log p: a confident token's p is 1 in half precision.
    delta.scatter_(1, target, log_probs.expm1().to(how.dtype).unsqueeze(1))
    return delta if bend is None else delta.mul_(bend)


def _delta_in_one_pass(
    logits: Tensor, target: Tensor, log_probs: Tensor, log_sums: Tensor, dtype: torch.dtype
) -> Tensor:
    column = torch.arange(logits.shape[1], device=logits.device)
    softmax = (logits - log_sums.unsqueeze(1)).exp()
    return torch.where(column == target, log_probs.expm1().unsqueeze(1), softmax).to(dtype)


def _add_product(
    total: Tensor, left: Tensor, right: Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> None:
    """total = beta total + alpha left @ right, where total may be wider than left and right."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=alpha, beta=beta)
    elif total.is_cuda:  # the product's own float32 sums, not rounded in between
        torch.addmm(total, left, right, out_dtype=total.dtype, alpha=alpha, beta=beta, out=total)
    elif beta == 0.0:  # a CPU's product has its inputs' dtype
        total.copy_(left @ right).mul_(alpha)
    else:
        total.mul_(beta).add_(left @ right, alpha=alpha)
