"""Tensor in, tensor out: surprisal, advantage, delight, signals, gates, losses. Torch alone.

Data flows  advantage + signals -> gates -> diagnostics;  losses stand beside.
"""
