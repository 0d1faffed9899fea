"""Tensor in, tensor out: surprisal, advantage, delight, signals, rules, gates, losses. Torch alone.

Data flows  advantage + signals -> gates (rules) -> diagnostics;  losses stand beside.
"""
