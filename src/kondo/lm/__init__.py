"""Causal language models on the engine: rows of tokens, cut, packed, and read only where kept."""

from kondo.lm.attention import packed_attention
from kondo.lm.budget import BudgetGate
from kondo.lm.checked_screen import CheckedScreen
from kondo.lm.head import Head, token_entropy, token_log_probs
from kondo.lm.model import CausalLM
from kondo.lm.pack import Pack
from kondo.lm.rows import TokenRows
from kondo.lm.screens import agreement, draft, gradient_cosine, quantised, stale, truncated
from kondo.lm.wrapped import TokenLogProb

__all__ = [
    "BudgetGate",
    "CausalLM",
    "CheckedScreen",
    "Head",
    "Pack",
    "TokenLogProb",
    "TokenRows",
    "agreement",
    "draft",
    "gradient_cosine",
    "packed_attention",
    "quantised",
    "stale",
    "token_entropy",
    "token_log_probs",
    "truncated",
]
