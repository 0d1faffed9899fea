"""Doctests of the source: what is not collected where it cannot be imported."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("triton") is None:  # CPU builds of torch come without it
    collect_ignore += [
        "kondo_lab/models/attend_kernel.py",
        "kondo_lab/tasks/draw_kernel.py",
        "kondo_lab/models/layer_kernels.py",
    ]
