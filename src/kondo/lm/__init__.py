"""Causal language models on the engine: rows of tokens, cut, packed, and read only where kept."""

from kondo.lm.attention import packed_attention
from kondo.lm.budget import BudgetGate
from kondo.lm.guard import Guarded
from kondo.lm.head import Head, token_entropy, token_log_probs
from kondo.lm.model import CausalLM
from kondo.lm.pack import Pack
from kondo.lm.rows import TokenRows
from kondo.lm.screens import agreement, draft, gradient_cosine, quantised, stale, truncated
from kondo.lm.token_policy import TokenLogProb

__all__ = [
    "BudgetGate",
    "CausalLM",
    "Guarded",
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
