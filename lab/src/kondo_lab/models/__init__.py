"""Models: networks, transformers and their samplers, stacked for many members or alone; kernels."""
