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
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kondo.arguments import check_float, check_number

Backend = Literal["torch", "liger", "cce"]

# A chunk's float32 logits take this much, or as much as MIN_CHUNK_CUDA tokens need. In the backward
# each chunk reads the weight, and reads and writes the float32 sum of its gradient: 10 bytes an
# entry, for 6 n operations with n tokens. An H200 does 165 operations a byte, so 300 tokens would
# only balance the two.
CHUNK_BYTES = 512 * 2**20
MIN_CHUNK_CUDA = 2048

# Logits of less than this are one chunk on a GPU: the gradient of the weight is written once,
# in the weight's own dtype, and needs no float32 sum.
ONE_CHUNK_BYTES_CUDA = 2_500_000_000

# A log-sum-exp reads a row of logits twice: from memory, unless the row is this short.
MAX_BLOCK = 8192

_HAS_TRITON = importlib.util.find_spec("triton") is not None

# Sizes that change become symbols, those that stay are constants: a row of logits is cut by its own
# length in every index.
_compiled = functools.cache(torch.compile)


class Head(NamedTuple):
    """What turns hidden states into logits: soft_cap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor
    """[V, D]."""
    bias: Tensor | None = None
    """[V]."""
    soft_cap: float | None = None
    """logits = cap * tanh(logits / cap), as in Gemma 2."""
    scale: float = 1.0
    """Multiplies the logits before the cap: Cohere's logit_scale, 1 / Granite's logits_scaling."""


def token_log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    backend: Backend = "torch",
    check: bool = True,
) -> Tensor:
    """Return log pi(target | hidden state) of each token, never holding [K, V].

    Differentiated with respect to hidden, head.weight and head.bias, each only if it requires
    grad. Matrix products are in the dtype of hidden, or autocast's; log-sum-exp, and sums of
    gradients over chunks, in float32 (float64 for float64).

    Args:
        hidden: [K, D], in the head's dtype unless autocast is on.
        head: what makes logits of them.
        targets: int64 [K], each in [0, V).
        temperature: divides the logits. Not differentiated.
        chunk: tokens whose logits exist at a time; by default see `default_chunk`.
        backend: "torch" computes everything, anywhere. "liger" and "cce" are the kernels of the
            packages liger-kernel and cut-cross-entropy, half precision on CUDA. They round logits
            (liger) or sums of gradients (cce) to half precision: an importance ratio of two such
            log-probs is off by percents.
        check: look at the values of targets, which waits for the device. False is for callers that
            have looked: a target that is out of range then ends in a device-side assertion.

    Returns:
        float32 [K] (float64 for float64).

    Raises:
        ValueError: for every argument that cannot be right, naming it.

    Example:
        >>> import torch
        >>> from kondo.lm.head import Head, token_log_probs
        >>> hidden, weight = torch.zeros(3, 8), torch.randn(100, 8)
        >>> token_log_probs(hidden, Head(weight), torch.tensor([0, 7, 99])).exp()
        tensor([0.0100, 0.0100, 0.0100])
    """
    how = prepare(hidden, head, temperature, chunk)
    wanted, vocabulary = hidden.shape[:1], head.weight.shape[0]
    if targets.dtype != torch.int64 or targets.shape != wanted or targets.device != hidden.device:
        raise ValueError(
            f"targets must be token ids, int64 {list(wanted)} on {hidden.device}, one per row of "
            f"hidden, got {targets.dtype} {list(targets.shape)} on {targets.device}."
        )
    if check and targets.numel():
        low, high = torch.stack(targets.aminmax()).tolist()
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"targets must lie in [0, {vocabulary}), the head's vocabulary, got "
                f"{low if low < 0 else high}; were these tokens sampled with another model's "
                f"tokeniser, or is padding (-100) among them?"
            )
    if backend != "torch":
        from kondo.lm.head_kernels import kernel_of

        kernel = kernel_of(backend, head, how)
        if targets.numel():  # a kernel cannot be launched for no token
            return kernel(hidden, head, targets, how)
    inputs = (hidden, head.weight, head.bias)
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)):
        return _forward(hidden, head, targets, how)[0]
    found: Tensor = _TokenLogProbs.apply(*inputs, targets, how)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def token_entropy(
    hidden: Tensor, head: Head, *, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Return the entropy of each token's distribution, -sum p log p; not differentiable.

    Args and dtypes are those of `token_log_probs`; returns [K].

    Example:
        >>> import torch
        >>> from kondo.lm.head import Head, token_entropy
        >>> token_entropy(torch.zeros(2, 8), Head(torch.randn(100, 8))).exp()
        tensor([100.0000, 100.0000])
    """
    how = prepare(hidden, head, temperature, chunk)
    entropy = torch.empty(hidden.shape[0], dtype=how.wide, device=hidden.device)
    with how.no_autocast():
        head = how.cast_head(head)
        for part in how.chunks(hidden.shape[0]):
            probs = _chunk_logits(hidden[part].to(how.dtype), head, how).softmax(dim=1)
            entropy[part] = torch.special.entr(probs, out=probs).sum(dim=1)
            del probs  # before the next chunk's logits exist
    return entropy


def default_chunk(vocabulary: int, device: torch.device, num_tokens: int | None = None) -> int:
    """Return how many tokens' logits exist at a time: CHUNK_BYTES, or more where a GPU wants it.

    Told how many tokens there are, all of them if they take less than ONE_CHUNK_BYTES_CUDA there.
    """
    fitting = max(1, CHUNK_BYTES // (4 * vocabulary))
    if device.type != "cuda":
        return fitting
    if num_tokens is not None and 4 * vocabulary * num_tokens < ONE_CHUNK_BYTES_CUDA:
        fitting = max(fitting, num_tokens)
    return max(fitting, MIN_CHUNK_CUDA)


def can_fuse(device: torch.device) -> bool:
    """Return whether `fused` makes one kernel there: on CUDA, where Triton is installed."""
    return device.type == "cuda" and _HAS_TRITON


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a chain of elementwise operations and sums as one kernel, where that can be had.

    Inside a layer that is compiled itself it becomes a part of that layer's kernels.
    """
    as_it_is = torch.compiler.is_compiling() or not can_fuse(device)
    return function if as_it_is else _compiled(function)


class How(NamedTuple):
    """All that is not differentiated: the head's numbers, the temperature, dtypes, chunks."""

    slope: float  # d logits / d raw without the cap's part, s / T
    inner: float  # what multiplies raw before a cap, s / c; the slope without one
    top: float | None  # where capped logits end, c / T
    chunk: int
    dtype: torch.dtype  # of matrix products
    wide: torch.dtype  # of logits, log-sum-exp, sums over chunks and the result
    device: torch.device

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield slices of at most `chunk` tokens: as few as can be, of nearly equal length."""
        pieces = math.ceil(num_tokens / self.chunk)
        for piece in range(pieces):
            yield slice(num_tokens * piece // pieces, num_tokens * (piece + 1) // pieces)

    def cast_head(self, head: Head) -> Head:
        """Return the head as matrix products take it."""
        bias = None if head.bias is None else head.bias.to(self.dtype)
        return head._replace(weight=head.weight.to(self.dtype), bias=bias)

    def no_autocast(self) -> torch.autocast:
        """Casts are written out here; autocast would repeat them in every chunk."""
        return torch.autocast(self.device.type, enabled=False)


def prepare(hidden: Tensor, head: Head, temperature: float, chunk: int | None) -> How:
    """Check everything but the targets, and say how to compute."""
    check_float("hidden", hidden)
    check_float("head.weight", head.weight)
    if hidden.ndim != 2:
        raise ValueError(
            f"hidden must have shape [K, D], one row per token, got {list(hidden.shape)}; gather "
            f"the states whose log-probs are read, or flatten with hidden.flatten(0, -2)."
        )
    vocabulary, width = head.weight.shape[:1], hidden.shape[1]
    if head.weight.shape != (*vocabulary, width) or (
        head.bias is not None and head.bias.shape != vocabulary
    ):
        bias = "" if head.bias is None else f" and {list(head.bias.shape)}"
        raise ValueError(
            f"head.weight must have shape [V, {width}] like hidden {list(hidden.shape)}, and "
            f"head.bias [V], got {list(head.weight.shape)}{bias}."
        )
    if head.weight.device != hidden.device:
        raise ValueError(
            f"hidden must be on the head's device, {head.weight.device}, got {hidden.device}."
        )
    for name, given in {"temperature": temperature, "head.soft_cap": head.soft_cap}.items():
        if given is not None and not 0 < check_number(name, given) < math.inf:
            raise ValueError(
                f"{name} must be positive and finite, got {given}; the temperature is the one that "
                f"the tokens were sampled with, 1.0 for greedy ones; a soft_cap of None is no cap."
            )
    if not math.isfinite(head.scale):
        raise ValueError(f"head.scale must be finite, got {head.scale}.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}; None chooses.")
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)  # it leaves float64 alone
    elif head.weight.dtype != dtype:
        raise ValueError(
            f"hidden must have the head's dtype, {head.weight.dtype}, got {dtype}; convert it with "
            f"hidden.to(head.weight.dtype), or use torch.autocast."
        )
    scale, cap = float(head.scale), head.soft_cap
    return How(
        slope=scale / temperature,
        inner=scale / (temperature if cap is None else cap),
        top=None if cap is None else cap / temperature,
        chunk=chunk or default_chunk(head.weight.shape[0], hidden.device, hidden.shape[0]),
        dtype=dtype,
        wide=torch.float64 if dtype == torch.float64 else torch.float32,
        device=hidden.device,
    )


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
        log_probs, log_sums, saved = _forward(hidden, Head(weight, bias), targets, how, ctx.saves)
        if ctx.saves == "delta_w":
            ctx.save_for_backward(saved)
        elif ctx.saves == "delta":
            ctx.save_for_backward(hidden, weight, bias, saved)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, log_probs, log_sums)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: How = ctx.how
        factor = -grad.unsqueeze(1) * how.slope  # -g s / T, [K, 1]
        if ctx.saves == "delta_w":
            (delta_w,) = ctx.saved_tensors
            return (delta_w * factor).to(ctx.hidden_dtype), None, None, None, None
        hidden, weight, bias, *known = ctx.saved_tensors
        parts = list(how.chunks(hidden.shape[0]))
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # One chunk is no sum: its product may be rounded as it is written.
        sum_dtype = weight.dtype if len(parts) == 1 else how.wide
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        d_weight = torch.empty_like(weight, dtype=sum_dtype) if for_weight else None
        d_bias = weight.new_zeros(weight.shape[0], dtype=how.wide) if for_bias else None
        with how.no_autocast():
            head = how.cast_head(Head(weight, bias))
            for part in parts:
                low_hidden = hidden[part].to(how.dtype)
                if ctx.saves == "delta":
                    (delta,) = known
                else:
                    targets, log_probs, log_sums = (each[part] for each in known)
                    logits = _chunk_logits(low_hidden, head, how)
                    delta = _delta(logits, targets.unsqueeze(1), log_probs, log_sums, how)
                    del logits
                if d_hidden is not None:
                    d_hidden[part] = (delta @ head.weight) * factor[part]
                if d_weight is not None:
                    rows = (low_hidden * factor[part]).to(how.dtype)
                    _add_product(d_weight, delta.T, rows, beta=float(part.start > 0))
                if d_bias is not None:
                    _add_product(d_bias.unsqueeze(1), delta.T, factor[part].to(how.dtype))
                del delta  # before the next chunk's logits exist
        if d_weight is not None:
            d_weight = (d_weight if parts else d_weight.zero_()).to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None


def _forward(
    hidden: Tensor, head: Head, targets: Tensor, how: How, wants: str = ""
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probs [K], log sum exp(logits) [K] and what is wanted.

    "delta", [K, V], is that of a single chunk; "delta_w", [K, D], is delta W.
    """
    num_tokens, width = hidden.shape
    log_probs = torch.empty(num_tokens, dtype=how.wide, device=hidden.device)
    log_sums = torch.empty_like(log_probs)
    delta = delta_w = None
    if wants == "delta_w":
        delta_w = hidden.new_empty(num_tokens, width, dtype=how.dtype)
    with how.no_autocast():
        head = how.cast_head(head)
        for part in how.chunks(num_tokens):
            target = targets[part].unsqueeze(1)
            logits = _chunk_logits(hidden[part].to(how.dtype), head, how)
            log_probs[part], log_sums[part] = _at_target(logits, target)
            if wants.startswith("delta"):
                delta = _delta(logits, target, log_probs[part], log_sums[part], how)
            del logits
            if delta is not None and delta_w is not None:
                torch.mm(delta, head.weight, out=delta_w[part])
                delta = None  # before the next chunk's logits exist
    return log_probs, log_sums, delta if delta_w is None else delta_w


def _chunk_logits(hidden: Tensor, head: Head, how: How) -> Tensor:
    """Return logits / T, [n, V] in the wide dtype; the scale costs no pass over them."""
    logits = hidden.new_empty(hidden.shape[0], head.weight.shape[0], dtype=how.wide)
    _add_product(logits, hidden, head.weight.T, alpha=how.inner, beta=0.0)
    if head.bias is not None:
        logits.add_(head.bias, alpha=how.inner)
    return logits if how.top is None else logits.tanh_().mul_(how.top)


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
    bend = None if how.top is None else (logits / how.top).square_().neg_().add_(1.0)
    if can_fuse(logits.device):
        one_pass = fused(_delta_in_one_pass, logits.device)
        delta: Tensor = one_pass(logits, target, log_probs, log_sums, how.dtype)
    else:
        logits.sub_(log_sums.unsqueeze(1))
        same = logits.dtype == how.dtype
        delta = torch.exp(logits, out=logits if same else torch.empty_like(logits, dtype=how.dtype))
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
