"""Log-probs of tokens straight from hidden states: no [K, V] tensor of logits ever exists.

    hidden [K, D] -> logits of one chunk of tokens [n, V] -> log-softmax -> its targets' entries [n]

With h a hidden state, W and b the head, s its scale, c its soft cap and T the temperature:

    raw = h W' + b
    logits = s raw / T                 or, capped,  (c / T) tanh(s raw / c)
    log p = logits[target] - log sum exp(logits)
    d log p / d raw = -s / T delta     delta = softmax(logits) - onehot(target)
                                       or, capped,  delta (1 - tanh^2(s raw / c))

Saved for the backward are the inputs and two numbers per token; it recomputes the logits of each
chunk, once. With g the gradient that arrives, -g s / T is one number per token. It multiplies
[n, D] tensors and never an [n, V] one:

    d h = -g s / T (delta W)           d W = delta' (-g s / T h)

A frozen head (LoRA) needs no sum over tokens, so its forward keeps delta W, [K, D], and its
backward only multiplies that by -g s / T: two matrix products in all, where a recomputing backward
takes three. A head that learns takes four either way, and recomputes.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kondo.lm.head.inputs import Head, How, wants_graph

# Log-softmax reads a row of logits three times: from memory, unless the row is this short.
MAX_BLOCK = 8192


def torch_log_probs(hidden: Tensor, head: Head, targets: Tensor, how: How) -> Tensor:
    """Return log-probs [K], with a graph only where something asks for one."""
    inputs = (hidden, head.weight, head.bias)
    if wants_graph(hidden, head):
        found: Tensor = _TokenLogProbs.apply(*inputs, targets, how)  # type: ignore[no-untyped-call]
        return found
    return _forward(*inputs, targets, how, want_delta_w=False)[0]


class _TokenLogProbs(torch.autograd.Function):
    """`_forward` and `_backward`, made known to autograd."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: How
    ) -> Tensor:
        ctx.how, ctx.hidden_dtype = how, hidden.dtype
        ctx.frozen = not any(ctx.needs_input_grad[1:3])
        log_probs, log_sums, delta_w = _forward(
            hidden, weight, bias, targets, how, want_delta_w=ctx.frozen
        )
        if ctx.frozen:
            ctx.save_for_backward(delta_w)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, log_probs, log_sums)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = -grad.unsqueeze(1) * ctx.how.slope
        if ctx.frozen:
            (delta_w,) = ctx.saved_tensors
            return (delta_w * factor).to(ctx.hidden_dtype), None, None, None, None
        hidden, weight, bias, targets, log_probs, log_sums = ctx.saved_tensors
        known, wanted = (targets, log_probs, log_sums), ctx.needs_input_grad[:3]
        return *_backward(hidden, weight, bias, *known, factor, ctx.how, wanted), None, None


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: How,
    *,
    want_delta_w: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probs [K], log-sum-exps [K] and, if wanted, delta W [K, D]."""
    num_tokens, width = hidden.shape
    log_probs = torch.empty(num_tokens, dtype=how.wide, device=hidden.device)
    log_sums = torch.empty_like(log_probs)
    delta_w = weight.new_empty(num_tokens, width, dtype=how.dtype) if want_delta_w else None
    with how.no_autocast():
        weight, bias = how.cast(weight), how.cast(bias)
        for part in how.chunks(num_tokens):
            here, target = how.at(part), targets[part].unsqueeze(1)
            logits = chunk_logits(how.cast(hidden[part]), weight, bias, here)
            log_probs[part], log_sums[part] = _at_target(logits, target, finite=bias is None)
            if delta_w is not None:
                delta = _delta(logits, target, log_probs[part], log_sums[part], here)
                torch.mm(delta, weight, out=delta_w[part])
                del delta  # before the next chunk's logits exist
    return log_probs, log_sums, delta_w


def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_probs: Tensor,
    log_sums: Tensor,
    factor: Tensor,
    how: How,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias, given -g s / T as factor [K, 1]."""
    for_hidden, for_weight, for_bias = wanted
    parts = list(how.chunks(hidden.shape[0]))
    # One chunk is no sum: its product may be rounded as it is written.
    sum_dtype = weight.dtype if len(parts) == 1 else how.wide
    d_hidden = torch.empty_like(hidden) if for_hidden else None
    d_weight = torch.empty_like(weight, dtype=sum_dtype) if for_weight else None
    d_bias = weight.new_zeros(weight.shape[0], dtype=how.wide) if for_bias else None
    with how.no_autocast():
        low_weight, low_bias = how.cast(weight), how.cast(bias)
        for part in parts:
            here, rows = how.at(part), how.cast(hidden[part])
            logits = chunk_logits(rows, low_weight, low_bias, here)
            target = targets[part].unsqueeze(1)
            delta = _delta(logits, target, log_probs[part], log_sums[part], here)
            del logits
            if d_hidden is not None:
                d_hidden[part] = (delta @ low_weight) * factor[part]
            if d_weight is not None:
                _add_product(
                    d_weight, delta.T, how.cast(rows * factor[part]), beta=float(part.start > 0)
                )
            if d_bias is not None:
                _add_product(d_bias.unsqueeze(1), delta.T, how.cast(factor[part]))
            del delta  # before the next chunk's logits exist
    if d_weight is not None and not parts:
        d_weight.zero_()
    return (
        d_hidden,
        None if d_weight is None else d_weight.to(weight.dtype),
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    """Return logits / T, [n, V] in the wide dtype."""
    if how.soft_cap is None:
        return _scaled_linear(hidden, weight, bias, how.slope, how.wide)
    raw = _scaled_linear(hidden, weight, bias, how.scale / how.soft_cap, how.wide)
    return raw.tanh_().mul_(how.top)


def _scaled_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factor: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return factor * (hidden @ weight.T + bias); a number costs no pass over [n, V]."""
    number = factor if isinstance(factor, float) else 1.0
    result = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=dtype)
    _add_product(result, hidden, weight.T, alpha=number, beta=0.0)
    if bias is not None:
        result.add_(bias, alpha=number)
    return result.mul_(factor) if isinstance(factor, Tensor) else result


def _at_target(logits: Tensor, target: Tensor, *, finite: bool) -> tuple[Tensor, Tensor]:
    """Return the log-probs of targets [n, 1], and the log-sum-exps, [n] each.

    log p = (logit - log-sum-exp of its block) + (log-sum-exp of its block - that of all blocks)

    Both are log-softmaxes: neither is above 0, and an offset of all logits costs them no digits. A
    block's log-sum-exp is taken from its first logit, so where a bias may make that -inf, the whole
    vocabulary is one block.
    """
    num_tokens, vocabulary = logits.shape
    width = block_width(vocabulary) if finite else vocabulary
    blocks = logits.view(num_tokens, -1, width)
    inside = blocks.log_softmax(dim=2)
    sums = blocks[:, :, 0] - inside[:, :, 0] if finite else logits.logsumexp(1, keepdim=True)
    found = inside.view(num_tokens, vocabulary).gather(1, target)
    found += sums.log_softmax(dim=1).gather(1, target // width)
    return found.squeeze(1), sums.logsumexp(dim=1)


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
    logits.sub_(log_sums.unsqueeze(1))
    if logits.dtype == how.dtype:
        delta = logits.exp_()
    else:
        delta = torch.exp(logits, out=torch.empty_like(logits, dtype=how.dtype))
    # p - 1 at the target from log p: a confident token's p is 1 in half precision.
    delta.scatter_(1, target, log_probs.expm1().to(how.dtype).unsqueeze(1))
    return delta if bend is None else delta.mul_(bend)


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
