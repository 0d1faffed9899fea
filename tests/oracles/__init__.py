"""Slow, obvious, float64 references. They import torch and math, and nothing from kondo."""
