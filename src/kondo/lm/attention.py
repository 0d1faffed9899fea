"""Attention within packs laid end to end, for Hugging Face models: no padding, no mask, no sync.

transformers looks up a model's attention by its name ("sdpa", "flash_attention_2", ...). What
stands there under a model's name is wrapped once, and the wrapper looks at each call: one that says
`kondo_pack` attends within the rows of the pack, any other goes through to what stood there.
Nothing of the model changes: another thread may generate with it meanwhile, a checkpointed layer
that runs again in the backward attends as it did before, and a step that fails leaves nothing to
put back.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A mask of four dimensions counts as prepared: models pass it on, and make none of their own, which
# would wait for the device to look for rows in position_ids.
_PREPARED = (1, 1, 1, 1)

# What models pass down that says nothing we do not know, or nothing about attention.
_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "is_causal", "kondo_pack", "max_length_k",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "return_dict", "use_cache",
}  # fmt: skip
_CAUSAL_LAYERS = {"full_attention", "sliding_attention"}
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_REGISTERING = threading.Lock()


def pack_arguments(
    input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int
) -> dict[str, Any]:
    """Return what a Hugging Face backbone is called with for a pack laid end to end."""
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": input_ids.new_ones(_PREPARED, dtype=torch.bool),
        "use_cache": False,
        "kondo_pack": True,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_length,
        "max_length_k": max_length,
    }


def serve_packs(configs: list[Any]) -> None:
    """Let the attentions that these configs name take packs; once each, for the whole process.

    A model that looks elsewhere is not served: `CausalLM` finds out by comparing hidden states.
    """
    if not configs:
        return
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in {config._attn_implementation for config in configs}:
        with _REGISTERING:
            own = ALL_ATTENTION_FUNCTIONS[name]
            if not hasattr(own, "serves_packs"):
                AttentionInterface.register(name, _serving_packs(own))


def _serving_packs(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def attention(module: nn.Module, *args: Any, **options: Any) -> Any:
        if options.get("kondo_pack"):
            return varlen_attention(module, *args, **options)
        return own(module, *args, **options)

    attention.serves_packs = True  # type: ignore[attr-defined]
    return attention


def configs_of(backbone: nn.Module) -> list[Any]:
    """Return the configs, each once, in which the modules of a backbone look up their attention."""
    found = (getattr(module, "config", None) for module in backbone.modules())
    return list({id(c): c for c in found if hasattr(c, "_attn_implementation")}.values())


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each row of a pack; called by transformers' attention modules.

    query is [1, H, total, D]; key and value may have fewer heads. The mask is None, or the one
    entry of `pack_arguments`: cu_seq_lens_q, int32 [B + 1], holds where each row starts. A token
    sees itself and sliding_window - 1 before it. Anything else that would change the scores is
    refused. Returns [1, total, H, D], and no weights.
    """
    assert cu_seq_lens_q is not None  # `pack_arguments` has both
    assert max_length_q is not None
    if attention_mask is not None and attention_mask.shape != _PREPARED:
        others["attention_mask"] = attention_mask
    others["dropout"] = dropout or None
    strange = sorted(name for name in others if name not in _HARMLESS and others[name] is not None)
    if strange:
        raise ValueError(
            f'attention "varlen" must be plain causal attention, got {", ".join(strange)} from '
            f'{type(module).__name__}; use attention="padded".'
        )
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings of float32 weights leave float32 queries and keys behind.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (part.to(dtype) for part in (query, key, value))
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    sizes = cu_seq_lens_q, max_length_q
    out = packed_attention(query, key, value, *sizes, scale=scaling, window=sliding_window)
    return out.unsqueeze(0), None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend causally within the rows of a pack laid end to end, for a backbone of your own.

    A backbone that has the attribute `takes_packs = True` is called with

        backbone(input_ids [1, total], position_ids=[1, total], cu_seqlens=[B + 1], max_length=int)

    and attends by this function. On CUDA in half precision it is flash attention without padding;
    elsewhere a mask of [total, total]. Differentiable with respect to query, key and value.

    Args:
        query: [total, H, D].
        key: [total, G, D], with G a divisor of H.
        value: like key.
        cu_seqlens: int32 [B + 1]: where each row starts, and where the last one ends.
        max_length: tokens of the longest row, or more.
        scale: of the scores; 1 / sqrt(D) if None.
        window: a token sees itself and window - 1 before it; all before it if None.

    Returns:
        [total, H, D].

    Example:
        >>> import torch
        >>> from kondo.lm import packed_attention
        >>> x = torch.randn(5, 2, 8)
        >>> rows_of_three_and_two = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> y = packed_attention(x, x, x, rows_of_three_and_two, max_length=3)
        >>> torch.allclose(y[3], x[3])  # the first of its row sees itself alone
        True
    """
    if _has_flash(query):
        # The kernel under torch.nn.attention.varlen, which reaches it through Python. That detour
        # costs the CPU a quarter of a millisecond per layer and direction, more than the kernel
        # itself takes for a few thousand tokens.
        out: Tensor = torch.ops.aten._flash_attention_forward(
            *(query, key, value, cu_seqlens, cu_seqlens, max_length, max_length),
            0.0,  # dropout
            window is None,  # causal
            False,  # return the mask of the dropout
            scale=scale,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
        )[0]
        return out
    place = torch.arange(query.shape[0], device=query.device)
    row = torch.searchsorted(cu_seqlens.long(), place, right=True)
    behind = place[:, None] - place
    allowed = (row[:, None] == row) & (behind >= 0)
    if window is not None:
        allowed &= behind < window
    grouped = key.shape[1] != query.shape[1]
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=scale, enable_gqa=grouped
    )
    return out.squeeze(0).transpose(0, 1)


def _has_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def varlen_fault(backbone: nn.Module) -> str | None:
    """Return why a backbone cannot take packs laid end to end, None if nothing speaks against it.

    What supports flash attention passes everything that shapes its scores as arguments, so that
    `varlen_attention` can refuse what it does not know; the rest hides it in masks.
    """

    def flag(name: str) -> bool:
        return bool(getattr(backbone, name, False))

    if flag("takes_packs"):
        return None
    config = getattr(backbone, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return (
            "it is not a Hugging Face model, whose attention can be replaced, and does not say "
            "takes_packs = True (see kondo.lm.packed_attention)"
        )
    if not (flag("_supports_flash_attn") and flag("_supports_attention_backend")):
        return "its attention cannot be replaced"
    strange = set(getattr(config, "layer_types", None) or ()) - _CAUSAL_LAYERS
    if flag("_is_stateful") or strange:
        return f"it has layers that are not attention ({', '.join(sorted(strange)) or 'recurrent'})"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention scores are soft-capped"
    if any(getattr(config, name, 0.0) for name in _DROPOUTS):
        return "its attention has dropout"
    if any(each._attn_implementation in (None, "eager") for each in configs_of(backbone)):
        return (
            'its attention is "eager", which transformers looks up nowhere; load it with '
            'attn_implementation="sdpa"'
        )
    return None
