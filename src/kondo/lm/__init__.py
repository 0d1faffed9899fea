"""Causal language models on the engine: rows of tokens, cut, packed, and read only where kept."""

from kondo.lm.attention import packed_attention
from kondo.lm.budget import BudgetGate
from kondo.lm.head import Head, token_entropy, token_log_probs
from kondo.lm.model import CausalLM
from kondo.lm.pack import Pack
from kondo.lm.rows import TokenRows
from kondo.lm.wrapped import TokenLogProb

__all__ = [
    "BudgetGate",
    "CausalLM",
    "Head",
    "Pack",
    "TokenLogProb",
    "TokenRows",
    "packed_attention",
    "token_entropy",
    "token_log_probs",
]
