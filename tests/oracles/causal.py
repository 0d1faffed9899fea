"""Log-probs of a causal language model, written the obvious way: all logits, of all tokens."""

import torch


def positions(attention_mask):
    """Real tokens counted from 0; 0 in the padding on the left."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def token_log_probs(logits, input_ids, completion_mask, temperature=1.0):
    """[N, S]: position t - 1 predicts token t; 0 outside the completion."""
    log_probs = (logits / temperature).log_softmax(-1)[:, :-1]
    taken = log_probs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    taken = torch.cat([taken.new_zeros(len(taken), 1), taken], 1)
    return torch.where(completion_mask, taken, 0.0)


def padded(model, input_ids, attention_mask, completion_mask, temperature=1.0, position_ids=None):
    """One forward of the whole batch, padding and all."""
    if position_ids is None:
        position_ids = positions(attention_mask)
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
    )
    return token_log_probs(output.logits, input_ids, completion_mask, temperature)


def one_by_one(model, input_ids, attention_mask, completion_mask, temperature=1.0):
    """Each row alone, without its padding: no mask, no position, no neighbour."""
    found = []
    for ids, real, sampled in zip(input_ids, attention_mask, completion_mask, strict=True):
        logits = model(input_ids=ids[real][None], use_cache=False).logits
        taken = token_log_probs(logits, ids[real][None], sampled[real][None], temperature)[0]
        places = real.nonzero().squeeze(1)
        found.append(taken.new_zeros(len(ids)).index_put((places,), taken))
    return torch.stack(found)


def kept_prefixes(attention_mask, keep):
    """Tokens of each row from its first real one to its last kept one, by plain loops."""
    lengths = []
    for real, kept in zip(attention_mask.tolist(), keep.tolist(), strict=True):
        last = max((t for t, k in enumerate(kept) if k), default=None)
        lengths.append(0 if last is None else last + 1 - real.index(True))
    return lengths


def attention_by_rows(query, key, value, starts, *, scale, window_size):
    """Causal attention of packed rows [total, H, D], one row, head and token at a time."""
    out = torch.zeros_like(query)
    per_key = query.shape[1] // key.shape[1]
    left = window_size[0] if window_size[0] >= 0 else len(query)
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for t in range(start, stop):
            seen = slice(max(start, t - left), t + 1)
            for head in range(query.shape[1]):
                scores = scale * key[seen, head // per_key] @ query[t, head]
                out[t, head] = scores.softmax(0) @ value[seen, head // per_key]
    return out
