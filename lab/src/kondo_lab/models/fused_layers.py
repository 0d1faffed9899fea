"""The layers of `StackedDecoder` by Triton kernels: a layer in one, sampling in another.

The networks of a population are so small that plain products mostly move memory: every sum, norm
and softmax writes thousands of short rows, and the next one reads them again. Here a program
holds one tile of tokens, a prompt and some of its answers, and computes the whole layer on it, with
products of float16: the plain path's TF32 has as many bits of mantissa (tested).

Shapes: P members, N tiles, S tokens of a tile, D width, F feed-forward width, M tokens of the
vocabulary.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 128
"""Most tokens of a tile: its scores, TILE x TILE, are held in registers."""
PROGRAMS = 264
"""Two for each of an H200's processors."""
TUNED: dict[str, dict[str, int]] = {
    "forward": {"num_stages": 2, "maxnreg": 128},
    "feed-forward backward": {"BLOCK": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    "attention backward": {"num_stages": 2},
    "sample": {"ROWS": 16, "KEYS": 4, "PROMPT_KEYS": 32, "num_warps": 2, "num_stages": 2},
}
"""Options of the kernels: the fastest of some that were tried on an H200, with 300 members. A
program of the sampler has ROWS answers, and attends to PROMPT_KEYS tokens of their prompts at once,
and to KEYS of what each has written."""


class Tiles(NamedTuple):
    """How tokens lie in a tile: a prompt, then answers one after another."""

    prompt: int
    """Tokens of the prompt."""
    answer: int
    """Tokens of each answer that are read."""
    answers: int
    """In a tile."""

    @property
    def tokens(self) -> int:
        """Of a tile, S."""
        return self.prompt + self.answer * self.answers


def answers_per_tile(prompt: int, answer: int, answers: int) -> int:
    """Return how many answers to a prompt share a tile, a divisor of `answers`.

    The fewer tiles, the fewer times a prompt is read; the smaller, the more of them run at once.

    Raises:
        ValueError: a prompt and one answer do not fit into a tile.
    """
    fitting = [
        several
        for several in range(1, answers + 1)
        if answers % several == 0 and prompt + several * answer <= TILE
    ]
    if not fitting:
        raise ValueError(f"prompt + answer must be <= {TILE} tokens, got {prompt} + {answer}.")

    def cost(several: int) -> float:
        block = _block(prompt + several * answer)
        return answers / several * block * (1.25 if block == TILE else 1.0)

    return min(fitting, key=cost)


def _block(tokens: int) -> int:
    """Return the size of the matrices that hold so many tokens: a power of 2, at least 16."""
    return max(16, 1 << (tokens - 1).bit_length())


def fit(width: int, num_heads: int, ff_width: int) -> bool:
    """Return whether the kernels can hold a layer of this size."""
    sizes = (width, width // num_heads, ff_width)
    return width <= 64 and all(size >= 16 and size & (size - 1) == 0 for size in sizes)


@functools.cache
def _kernels() -> ModuleType:
    # Triton compiles them at their first call. Its products by wgmma, which it takes for 64 rows
    # and more on Hopper, come out wrong here (Triton 3.6); those by mma are right, in about the
    # same time.
    os.environ["DISABLE_MMA_V3"] = "1"
    from kondo_lab.models import layer_kernels  # Triton, which a CPU build does not have

    return layer_kernels


class LayerWeights(NamedTuple):
    """One layer's weights, each [P, in, out].

    The norms' factors are multiplied into `qkv` and `up`, the scale of attention into the query's
    part of `qkv`: once for the weights instead of once for every token.
    """

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor


class _Layer(torch.autograd.Function):
    """One layer on tiles [N, S, D]; differentiated in the tiles and the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiles: Tiles, num_heads: int, *weights: Tensor) -> Tensor:
        x = x.contiguous()
        qkv, out, up, down = weights = tuple(weight.half() for weight in weights)
        middle, result = torch.empty_like(x), torch.empty_like(x)
        _kernels().layer[len(x),](
            x, qkv, out, up, down, middle, result, tiles_per_member=len(x) // len(qkv),
            **_seen(tiles), **_widths(up, num_heads), **_tuned("forward", tiles),
        )  # fmt: skip
        ctx.save_for_backward(x, middle, *weights)
        ctx.tiles, ctx.num_heads = tiles, num_heads
        return result

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
        x, middle, qkv, out, up, down = ctx.saved_tensors
        members, seen, widths = len(qkv), _seen(ctx.tiles), _widths(up, ctx.num_heads)
        tiles = len(x) // members
        tuned = TUNED["feed-forward backward"]
        blocks = -(-tiles * ctx.tiles.tokens // tuned["BLOCK"])
        of_middle, of_x = torch.empty_like(x), torch.empty_like(x)
        own = _per_program(blocks, members)
        programs = -(-blocks // own)
        of_up, of_down = (x.new_empty(members, programs, *each.shape[1:]) for each in (up, down))
        _kernels().feed_forward_backward[members * programs,](
            middle, up, down, of_result.contiguous(), of_middle, of_up, of_down,
            programs_per_member=programs, BLOCKS=own, TOKENS=tiles * ctx.tiles.tokens,
            D=widths["D"], F=widths["F"], CHUNK=widths["CHUNK"], **tuned,
        )  # fmt: skip
        own = _per_program(tiles, members)
        programs = -(-tiles // own)
        of_qkv, of_out = (x.new_empty(members, programs, *each.shape[1:]) for each in (qkv, out))
        _kernels().attention_backward[members * programs,](
            x, qkv, out, of_middle, of_x, of_qkv, of_out, programs_per_member=programs, TILES=own,
            tiles_per_member=tiles, **seen, D=widths["D"], HEADS=widths["HEADS"],
            **_tuned("attention backward", ctx.tiles),
        )  # fmt: skip
        # Summed in a fixed order; atomic additions would come in any.
        of_weights = (found.sum(dim=1) for found in (of_qkv, of_out, of_up, of_down))
        return of_x, None, None, *of_weights


def apply(x: Tensor, weights: LayerWeights, tiles: Tiles, *, num_heads: int) -> Tensor:
    """Return the layer's output [N, S, D] of tiles [N, S, D], those of a member neighbours.

    Every token attends to what precedes it in its own answer and in the prompt of its tile.
    """
    result: Tensor = _Layer.apply(x, tiles, num_heads, *weights)  # type: ignore[no-untyped-call]
    return result


def _per_program(count: int, members: int) -> int:
    """Return how many of a member's `count` blocks a program of the backward pass takes in turn.

    It sums their gradients of the weights where it has them: the more, the less is written. Enough
    programs must be left to fill a GPU.
    """
    return -(-count // min(count, -(-PROGRAMS // members)))


def _seen(tiles: Tiles) -> dict[str, int]:
    """Return what says which tokens see which."""
    return {"PROMPT": tiles.prompt, "ANSWER": max(1, tiles.answer), "TOKENS": tiles.tokens}


def _widths(up: Tensor, num_heads: int) -> dict[str, int]:
    width, ff_width = up.shape[-2:]
    return {"D": width, "HEADS": num_heads, "F": ff_width, "CHUNK": min(64, ff_width)}


def _tuned(kernel: str, tiles: Tiles) -> dict[str, Any]:
    """Return a block that holds a tile, and what was fastest for it."""
    block = _block(tiles.tokens)
    return {"BLOCK": block, "num_warps": 8 if block > 64 else 4, **TUNED[kernel]}


def sample(
    first: Tensor,
    parameters: Mapping[str, Tensor],
    layers: Sequence[LayerWeights],
    prompts: Sequence[Tensor],
    gumbel: Tensor,
    *,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """Return answers [P, N, L] int64 and their log-probs [P, N, L].

    Args:
        first: [P, N, D], last layer's output at the end of each row's prompt.
        parameters: "tokens" [P, M, D], "positions" [P, prompt + L, D] and "head" [P, D, M].
        layers: weights.
        prompts: of each layer keys and values of the prompts, [P, prompts, tokens, 2 D]; neighbours
            among the rows share one.
        gumbel: [P, N, L, M], noise of the tokens' draws.
        num_heads: of attention.
    """
    members, num_rows, length, num_tokens = gumbel.shape
    _, num_prompts, prompt_length, _ = prompts[0].shape
    stacked = [torch.stack(list(several)).half() for several in zip(*layers, strict=True)]
    shape = (len(layers), members, num_rows, length - 1, 2 * first.shape[-1])
    cache = torch.empty(shape, dtype=torch.float16, device=first.device)
    answers = torch.empty(members, num_rows, length, dtype=torch.int64, device=first.device)
    log_probs = first.new_empty(members, num_rows, length)
    _kernels().sample[members, -(-num_rows // TUNED["sample"]["ROWS"])](
        first.contiguous(),
        parameters["tokens"],
        parameters["positions"],
        parameters["head"].half(),
        *stacked,
        torch.stack(list(prompts)).half(),
        cache,
        gumbel.contiguous(),
        answers,
        log_probs,
        num_rows=num_rows,
        members=members,
        REPEATS=num_rows // num_prompts,
        PROMPT=prompt_length,
        LENGTH=length,
        M=num_tokens,
        LAYERS=len(layers),
        WORDS=_block(num_tokens),
        **_widths(layers[0].up, num_heads),
        **TUNED["sample"],
    )
    return answers, log_probs
