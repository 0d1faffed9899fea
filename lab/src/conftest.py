"""Doctests of the source: what is not collected where it cannot be imported."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("triton") is None:  # CPU builds of torch come without it
    collect_ignore += [
        "kondo_lab/language/attend_kernel.py",
        "kondo_lab/draw_kernel.py",
        "kondo_lab/population/layer_kernels.py",
    ]
