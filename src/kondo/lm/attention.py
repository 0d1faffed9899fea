"""Attention within packs laid end to end, for Hugging Face models: no padding, no mask, no sync.

A function is registered under a name of our own with transformers' `AttentionInterface`. The model
is switched to it only while it runs a pack, and while that pack is differentiated, because a
checkpointed layer runs again there. At all other times, e.g. in generation, it has its own.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

NAME = "kondo_varlen"

# What models pass down that says nothing we do not know, or nothing about attention.
_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "is_causal", "max_length_k", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
# torch 2.11 shares key heads among query heads unasked; later ones want to be asked.
_ALLOW_FEWER_KEYS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
_CAUSAL_LAYERS = {"full_attention", "sliding_attention"}
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


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

    Args:
        module: the attention module, not used.
        query: [1, H, total, D]; key and value may have fewer heads.
        key: see query.
        value: see query.
        attention_mask: must be None; the rows' ends say it all.
        scaling: factor of the scores.
        dropout: must be 0.
        sliding_window: a token sees itself and sliding_window - 1 before it.
        cu_seq_lens_q: int32 [B + 1]: where each row starts.
        max_length_q: tokens of the longest row.
        others: anything that would change the scores is refused.

    Returns:
        [1, total, H, D], and no weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            f'attention "{NAME}" must be called with cu_seq_lens_q and max_length_q, got a call '
            f"without: it only serves packs of kondo.lm. A backward that failed half-way may have "
            f"left the model on it; set the model's own with model.set_attn_implementation(...)."
        )
    others["attention_mask"] = attention_mask
    others["dropout"] = dropout or None
    strange = sorted(
        name for name, got in others.items() if name not in _HARMLESS and got is not None
    )
    if strange:
        raise ValueError(
            f'attention "varlen" must be plain causal attention, got {", ".join(strange)} from '
            f'{type(module).__name__}; use attention="padded".'
        )
    ends = (cu_seq_lens_q, max_length_q)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings of float32 weights leave float32 queries and keys behind.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (part.to(dtype) for part in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _flash(query, key, value, ends, scaling, sliding_window), None
    return _block_diagonal(query, key, value, ends[0], scaling, sliding_window), None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    starts, longest = ends
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    out = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **_ALLOW_FEWER_KEYS,
    )
    assert isinstance(out, Tensor)  # no auxiliary output was asked for
    return out.unsqueeze(0)


def _block_diagonal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """The same with a [total, total] mask: any device and dtype, at quadratic cost."""
    place = torch.arange(query.shape[2], device=query.device)
    row = torch.searchsorted(starts.long(), place, right=True)
    behind = place[:, None] - place
    allowed = (row[:, None] == row) & (behind >= 0)
    if window is not None:
        allowed &= behind < window
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2)


def varlen_fault(backbone: nn.Module) -> str | None:
    """Return why a backbone cannot take packs laid end to end, None if nothing speaks against it.

    What supports flash attention passes everything that shapes its scores as arguments, so that
    `varlen_attention` can refuse what it does not know; the rest hides it in masks.
    """
    config = getattr(backbone, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return "it is not a Hugging Face model, whose attention can be replaced"
    if not _flag(backbone, "_supports_flash_attn") or not _flag(
        backbone, "_supports_attention_backend"
    ):
        return "its attention cannot be replaced"
    strange = set(getattr(config, "layer_types", None) or ()) - _CAUSAL_LAYERS
    if _flag(backbone, "_is_stateful") or strange:
        return f"it has layers that are not attention ({', '.join(sorted(strange)) or 'recurrent'})"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention scores are soft-capped"
    if any(getattr(config, name, 0.0) for name in _DROPOUTS):
        return "its attention has dropout"
    return None


def _flag(backbone: nn.Module, name: str) -> bool:
    return bool(getattr(backbone, name, False))


class VarlenSwitch:
    """Gives a Hugging Face backbone `varlen_attention` inside a `with`, and takes it away."""

    def __init__(self, backbone: nn.Module):
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, varlen_attention)
        configs = {id(c): c for c in map(_config, backbone.modules()) if c is not None}
        self._configs = list(configs.values())
        self._own: list[str | None] | None = None

    def __enter__(self) -> None:
        if self._own is None:
            self._own = [config._attn_implementation for config in self._configs]
            for config in self._configs:
                config._attn_implementation = NAME

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            for config, own in zip(self._configs, self._own, strict=True):
                config._attn_implementation = own
            self._own = None

    def during_backward(self, hidden: Tensor) -> None:
        """Switch again while `hidden` is differentiated: checkpointed layers run again then."""
        hidden.register_hook(self._on_backward)  # type: ignore[no-untyped-call]

    def _on_backward(self, _: Tensor) -> None:
        self.__enter__()
        queue: Callable[[Callable[[], None]], None]
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(self.__exit__)


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, "_attn_implementation") else None
