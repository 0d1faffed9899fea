# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806 (sizes are in capitals)
"""The kernels of `fused_layers`: a layer, its gradients, and sampling. Imported where Triton is.

A program of a layer holds one tile of tokens, one of its gradients takes some tiles or blocks of
tokens of a member in turn, and one that samples holds some answers of a member.
"""

import triton
from triton import language as tl


@triton.jit
def _dot(a, b):
    """Return the product of matrices, of float16 and summed in float32.

    Its 10 bits of mantissa are TF32's, at half the memory and without TF32's slow transposes. What
    float16 has less of is range: gradients are scaled before they get here.
    """
    return tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def _norm(x, D: tl.constexpr):
    """Return the rows of x with mean 0 and variance 1, and what they were divided by, inverted."""
    centred = x - tl.sum(x, 1)[:, None] / D
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 1) / D + 1e-6)
    return centred * inverse[:, None], inverse


@triton.jit
def _norm_backward(gradient, normal, inverse, D: tl.constexpr):
    """Return the gradient of what `_norm` was given, from that of its rows."""
    along = tl.sum(gradient * normal, 1)[:, None] / D
    return inverse[:, None] * (gradient - tl.sum(gradient, 1)[:, None] / D - normal * along)


@triton.jit
def _matrix(start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, row_stride, column_stride):
    """Return the addresses of a matrix."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return start + rows[:, None] * row_stride + columns[None, :] * column_stride


@triton.jit
def _query_key_value(normal, columns, D: tl.constexpr, SIZE: tl.constexpr):
    """Return query, key and value of one head, whose weights begin at `columns`."""
    query = _dot(normal, tl.load(_matrix(columns, D, SIZE, 3 * D, 1)))
    key = _dot(normal, tl.load(_matrix(columns + D, D, SIZE, 3 * D, 1)))
    value = _dot(normal, tl.load(_matrix(columns + 2 * D, D, SIZE, 3 * D, 1)))
    return query, key, value


@triton.jit
def _weights_of_attention(query, key, PROMPT, ANSWER, TOKENS, BLOCK: tl.constexpr):
    """Return softmax(query key^T): a token sees what precedes it in its prompt and its answer."""
    place, other = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    same = (place - PROMPT) // ANSWER == (other - PROMPT) // ANSWER
    seen = (other < PROMPT) | ((place >= PROMPT) & same)
    seen = seen & (other < TOKENS) & ((other <= place) | (place >= TOKENS))
    # A place after the last token belongs to nobody; it sees something, so that nothing is 0 / 0.
    seen = seen | ((place >= TOKENS) & (other == 0))
    scores = tl.where(seen, _dot(query, tl.trans(key)), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit(do_not_specialize=["tiles_per_member", "PROMPT", "ANSWER", "TOKENS"])
def layer(
    x, qkv, out, up, down, middle, result, tiles_per_member, PROMPT, ANSWER, TOKENS,
    D: tl.constexpr, HEADS: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the layer's `result` and its `middle`, the residual stream after attention."""
    SIZE: tl.constexpr = D // HEADS
    tile = tl.program_id(0).to(tl.int64)
    member = tile // tiles_per_member
    qkv += member * D * 3 * D
    out += member * D * D
    up += member * D * F
    down += member * F * D
    kept = (tl.arange(0, BLOCK) < TOKENS)[:, None]
    place = tile * TOKENS * D
    hidden = tl.load(_matrix(x + place, BLOCK, D, D, 1), mask=kept, other=0.0)
    normal, _ = _norm(hidden, D)
    for head in range(HEADS):
        columns = qkv + head * SIZE
        query, key, value = _query_key_value(normal, columns, D, SIZE)
        weights = _weights_of_attention(query, key, PROMPT, ANSWER, TOKENS, BLOCK)
        attended = _dot(weights, value)
        hidden += _dot(attended, tl.load(_matrix(out + head * SIZE * D, SIZE, D, D, 1)))
    tl.store(_matrix(middle + place, BLOCK, D, D, 1), hidden, mask=kept)
    normal, _ = _norm(hidden, D)
    for start in range(0, F, CHUNK):
        inner = _dot(normal, tl.load(_matrix(up + start, D, CHUNK, F, 1)))
        inner = tl.maximum(inner, 0.0)
        hidden += _dot(inner, tl.load(_matrix(down + start * D, CHUNK, D, D, 1)))
    tl.store(_matrix(result + place, BLOCK, D, D, 1), hidden, mask=kept)


@triton.jit
def _scaled(gradient):
    """Return a gradient with 1 as its largest size, for float16's range, and what that was."""
    scale = tl.max(tl.max(tl.abs(gradient), 1), 0)
    scale = tl.where(scale > 0, scale, 1.0)
    return gradient / scale, scale


@triton.jit
def _add(at, value, more):
    """Add `value` to what lies there, or write it where nothing does yet."""
    seen = tl.full(value.shape, 1, tl.int1) & more
    tl.store(at, value + tl.load(at, mask=seen, other=0.0))


@triton.jit(do_not_specialize=["programs_per_member", "BLOCKS", "TOKENS"])
def feed_forward_backward(
    middle, up, down, of_result, of_middle, of_up, of_down, programs_per_member, BLOCKS, TOKENS,
    D: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients `of_middle` and, summed over this program's BLOCKS, of the weights.

    Tokens do not see each other here: a member's TOKENS are cut into blocks, whatever their tiles.
    """
    program = tl.program_id(0).to(tl.int64)
    member = program // programs_per_member
    first = program % programs_per_member * BLOCKS * BLOCK
    up += member * D * F
    down += member * F * D
    of_up += program * D * F
    of_down += program * F * D
    for number in range(BLOCKS):  # those of the last program may be past the tokens: masked
        start_token = first + number * BLOCK
        kept = (start_token + tl.arange(0, BLOCK) < TOKENS)[:, None]
        place = (member * TOKENS + start_token) * D
        gradient = tl.load(_matrix(of_result + place, BLOCK, D, D, 1), mask=kept, other=0.0)
        gradient, scale = _scaled(gradient)
        hidden = tl.load(_matrix(middle + place, BLOCK, D, D, 1), mask=kept, other=0.0)
        normal, inverse = _norm(hidden, D)
        of_normal = tl.zeros([BLOCK, D], tl.float32)
        for start in range(0, F, CHUNK):
            inner = _dot(normal, tl.load(_matrix(up + start, D, CHUNK, F, 1)))
            of_inner = _dot(gradient, tl.load(_matrix(down + start * D, D, CHUNK, 1, D)))
            of_inner = tl.where(inner > 0, of_inner, 0.0)
            of_normal += _dot(of_inner, tl.load(_matrix(up + start, CHUNK, D, 1, F)))
            of_chunk = scale * _dot(tl.trans(normal), of_inner)
            _add(_matrix(of_up + start, D, CHUNK, F, 1), of_chunk, number > 0)
            of_chunk = scale * _dot(tl.trans(tl.maximum(inner, 0.0)), gradient)
            _add(_matrix(of_down + start * D, CHUNK, D, D, 1), of_chunk, number > 0)
        gradient = scale * (gradient + _norm_backward(of_normal, normal, inverse, D))
        tl.store(_matrix(of_middle + place, BLOCK, D, D, 1), gradient, mask=kept)


@triton.jit(
    do_not_specialize=[
        "programs_per_member", "tiles_per_member", "TILES", "PROMPT", "ANSWER", "TOKENS"
    ]
)  # fmt: skip
def attention_backward(
    x, qkv, out, of_middle, of_x, of_qkv, of_out, programs_per_member, tiles_per_member, TILES,
    PROMPT, ANSWER, TOKENS, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients `of_x` and, summed over this program's TILES, of the weights."""
    SIZE: tl.constexpr = D // HEADS
    program = tl.program_id(0).to(tl.int64)
    member = program // programs_per_member
    qkv += member * D * 3 * D
    out += member * D * D
    of_qkv += program * D * 3 * D
    of_out += program * D * D
    kept = (tl.arange(0, BLOCK) < TOKENS)[:, None]
    first = program % programs_per_member * TILES
    for number in range(tl.minimum(TILES, tiles_per_member - first)):
        more = number > 0
        place = (member * tiles_per_member + first + number) * TOKENS * D
        gradient = tl.load(_matrix(of_middle + place, BLOCK, D, D, 1), mask=kept, other=0.0)
        gradient, scale = _scaled(gradient)
        hidden = tl.load(_matrix(x + place, BLOCK, D, D, 1), mask=kept, other=0.0)
        normal, inverse = _norm(hidden, D)
        of_normal = tl.zeros([BLOCK, D], tl.float32)
        for head in range(HEADS):
            columns = qkv + head * SIZE
            of_columns = of_qkv + head * SIZE
            query, key, value = _query_key_value(normal, columns, D, SIZE)
            weights = _weights_of_attention(query, key, PROMPT, ANSWER, TOKENS, BLOCK)
            of_rows = scale * _dot(tl.trans(_dot(weights, value)), gradient)
            _add(_matrix(of_out + head * SIZE * D, SIZE, D, D, 1), of_rows, more)
            rows = tl.load(_matrix(out + head * SIZE * D, D, SIZE, 1, D))
            of_attended = _dot(gradient, rows)
            of_value = _dot(tl.trans(weights), of_attended)
            of_weights = _dot(of_attended, tl.trans(value))
            of_scores = weights * (of_weights - tl.sum(of_weights * weights, 1)[:, None])
            of_query = _dot(of_scores, key)
            of_key = _dot(tl.trans(of_scores), query)
            turned = tl.trans(normal)
            at = _matrix(of_columns, D, SIZE, 3 * D, 1)
            _add(at, scale * _dot(turned, of_query), more)
            _add(at + D, scale * _dot(turned, of_key), more)
            _add(at + 2 * D, scale * _dot(turned, of_value), more)
            of_normal += _dot(of_query, tl.load(_matrix(columns, SIZE, D, 1, 3 * D)))
            of_normal += _dot(of_key, tl.load(_matrix(columns + D, SIZE, D, 1, 3 * D)))
            of_normal += _dot(of_value, tl.load(_matrix(columns + 2 * D, SIZE, D, 1, 3 * D)))
        gradient = scale * (gradient + _norm_backward(of_normal, normal, inverse, D))
        tl.store(_matrix(of_x + place, BLOCK, D, D, 1), gradient, mask=kept)


@triton.jit
def _attend_to_prompts(
    query, prompt, keys, count, PROMPT, HEADS: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the state of attention, see `_attend`, of rows [rows, heads x size] to their prompts.

    A row sees the keys of prompt number `prompt`, [rows], among the `count` that lie at `keys`, one
    prompt after another. One product scores all rows and heads: a row is there once for each
    head, with zeros in the places of the others.
    """
    D: tl.constexpr = HEADS * SIZE
    width = tl.arange(0, D)
    own = width[None, None, :] // SIZE == tl.arange(0, HEADS)[:, None, None]
    apart = tl.reshape(tl.where(own, query[None, :, :], 0.0), [HEADS * ROWS, D])
    prompt = tl.reshape(tl.broadcast_to(prompt[None, :], [HEADS, ROWS]), [HEADS * ROWS])
    largest = tl.full([HEADS * ROWS], -1e30, tl.float32)
    total = tl.zeros([HEADS * ROWS], tl.float32)
    attended = tl.zeros([HEADS * ROWS, D], tl.float32)
    for start in range(0, count, KEYS):
        place = start + tl.arange(0, KEYS)
        there = (place < count)[:, None]
        found = keys + place[:, None] * (2 * D) + width[None, :]
        scores = _dot(apart, tl.trans(tl.load(found, mask=there, other=0.0)))
        seen = place[None, :] // PROMPT == prompt[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        shrunk, weights = tl.exp(largest - new), tl.exp(scores - new[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        values = tl.load(found + D, mask=there, other=0.0)
        attended = attended * shrunk[:, None] + _dot(weights, values)
        largest = new
    attended = tl.sum(tl.where(own, tl.reshape(attended, [HEADS, ROWS, D]), 0.0), 0)
    return (
        tl.trans(tl.reshape(largest, [HEADS, ROWS])),
        tl.trans(tl.reshape(total, [HEADS, ROWS])),
        tl.reshape(attended, [ROWS, HEADS, SIZE]),
    )


@triton.jit
def _attend(
    state, query, at, count, kept, HEADS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr
):
    """Return the state of attention after `count` more keys and values, which lie `at` each row.

    The state is the largest score so far, the sum of exp(score - largest), [rows, heads] each, and
    the values weighted by the same, [rows, heads, size].
    """
    largest, total, attended = state
    size, head = tl.arange(0, SIZE)[None, None, None, :], tl.arange(0, HEADS)[None, None, :, None]
    for start in range(0, count, KEYS):
        place = start + tl.arange(0, KEYS)[None, :, None, None]
        there = kept[:, None, None, None] & (place < count)
        found = at[:, None, None, None] + place * (2 * HEADS * SIZE) + head * SIZE + size
        scores = tl.sum(tl.load(found, mask=there, other=0.0) * query[:, None, :, :], 3)
        scores = tl.where(start + tl.arange(0, KEYS)[None, :, None] < count, scores, float("-inf"))
        values = tl.load(found + HEADS * SIZE, mask=there, other=0.0)
        new = tl.maximum(largest, tl.max(scores, 1))
        shrunk, weights = tl.exp(largest - new), tl.exp(scores - new[:, None, :])
        attended = attended * shrunk[:, :, None] + tl.sum(values * weights[:, :, :, None], 1)
        total = total * shrunk + tl.sum(weights, 1)
        largest = new
    return largest, total, attended


@triton.jit
def _with_own(
    state, query, key, value, ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    """Return the state of attention after one more key and value of each row, [rows, width]."""
    largest, total, attended = state
    score = tl.sum(query * tl.reshape(key, [ROWS, HEADS, SIZE]), 2)
    new = tl.maximum(largest, score)
    shrunk, weight = tl.exp(largest - new), tl.exp(score - new)
    value = tl.reshape(value, [ROWS, HEADS, SIZE])
    attended = attended * shrunk[:, :, None] + value * weight[:, :, None]
    return new, total * shrunk + weight, attended


@triton.jit(do_not_specialize=["num_rows", "members", "REPEATS", "PROMPT", "LENGTH", "M"])
def sample(
    first, tokens, positions, head_weights, qkv, out, up, down, prompts, cache, gumbel,
    answers, log_probs, num_rows, members, REPEATS, PROMPT, LENGTH, M,
    LAYERS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, F: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, KEYS: tl.constexpr,
    PROMPT_KEYS: tl.constexpr,
):  # fmt: skip
    """Write `answers` and their `log_probs`, token by token.

    Keys and values of `prompts` are [layers, prompts, PROMPT, 2 D]; REPEATS answers share each.
    `cache` is for those of the answers, [layers, rows, LENGTH - 1, 2 D].
    """
    SIZE: tl.constexpr = D // HEADS
    member = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    kept = row < num_rows
    last = tl.minimum(tl.program_id(1) * ROWS + ROWS, num_rows) - 1
    first_prompt = tl.program_id(1) * ROWS // REPEATS
    asked_keys = (last // REPEATS - first_prompt + 1) * PROMPT
    prompt = tl.where(kept, row // REPEATS - first_prompt, 0)
    first_prompt += member * (num_rows // REPEATS)
    all_rows = members.to(tl.int64) * num_rows
    row = member * num_rows + tl.where(kept, row, 0)
    word, width = tl.arange(0, WORDS)[None, :], tl.arange(0, D)[None, :]
    head_weights += member * D * M
    tokens += member * M * D
    positions += member * (PROMPT + LENGTH) * D
    hidden = tl.load(first + row[:, None] * D + width)
    to_words = tl.load(_matrix(head_weights, D, WORDS, M, 1), mask=word < M, other=0.0)
    for place in range(LENGTH):
        logits = tl.where(word < M, _dot(hidden, to_words), float("-inf"))
        at = gumbel + (row[:, None] * LENGTH + place) * M + word
        token = tl.argmax(logits + tl.load(at, mask=word < M, other=0.0), 1)
        token = tl.minimum(token, M - 1)  # where the policy is not finite any more
        top = tl.max(logits, 1)
        normaliser = tl.log(tl.sum(tl.exp(logits - top[:, None]), 1)) + top
        own = tl.sum(tl.where(word == token[:, None], logits, 0.0), 1)
        tl.store(answers + row * LENGTH + place, token.to(tl.int64), mask=kept)
        tl.store(log_probs + row * LENGTH + place, own - normaliser, mask=kept)
        if place < LENGTH - 1:
            hidden = tl.load(tokens + token[:, None] * D + width)
            hidden += tl.load(positions + (PROMPT + place) * D + width)
            for layer in range(LAYERS):
                slot = layer * members.to(tl.int64) + member
                normal, _ = _norm(hidden, D)
                columns = qkv + slot * D * 3 * D
                query = _dot(normal, tl.load(_matrix(columns, D, D, 3 * D, 1)))
                key = _dot(normal, tl.load(_matrix(columns + D, D, D, 3 * D, 1)))
                value = _dot(normal, tl.load(_matrix(columns + 2 * D, D, D, 3 * D, 1)))
                told = cache + (layer * all_rows + row) * (LENGTH - 1) * 2 * D
                asked = prompts + (layer * all_rows // REPEATS + first_prompt) * PROMPT * 2 * D
                own_place = told[:, None] + place * 2 * D + width
                tl.store(own_place, key, mask=kept[:, None])
                tl.store(own_place + D, value, mask=kept[:, None])
                state = _attend_to_prompts(
                    query, prompt, asked, asked_keys, PROMPT, HEADS, SIZE, ROWS, PROMPT_KEYS
                )
                query = tl.reshape(query, [ROWS, HEADS, SIZE])
                # The row's own key is the last it sees; the cache has those before it.
                state = _with_own(state, query, key, value, ROWS, HEADS, SIZE)
                _, total, attended = _attend(state, query, told, place, kept, HEADS, SIZE, KEYS)
                attended = tl.reshape(attended / total[:, :, None], [ROWS, D])
                hidden += _dot(attended, tl.load(_matrix(out + slot * D * D, D, D, D, 1)))
                normal, _ = _norm(hidden, D)
                for start in range(0, F, CHUNK):
                    above = up + slot * D * F + start
                    inner = _dot(normal, tl.load(_matrix(above, D, CHUNK, F, 1)))
                    below = down + slot * F * D + start * D
                    inner = tl.maximum(inner, 0.0)
                    hidden += _dot(inner, tl.load(_matrix(below, CHUNK, D, D, 1)))
            # What a thread wrote into the cache, others read for the next token.
            tl.debug_barrier()
