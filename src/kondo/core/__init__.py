"""Tensor in, tensor out: surprisal, advantage, delight, pricing, gates, losses. Needs torch alone.

Data flows  advantage + delight -> pricing -> gates -> diagnostics;  losses stand beside.
"""
