"""Between a GPU and the CPU, in one piece and without waiting where that is possible."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors, those of larger elements first, to a device in one piece.

    To a GPU without waiting; to the CPU that is the one read of a step.
    """
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    together, to_gpu = torch.cat(flat), device.type == "cuda"
    if to_gpu:
        together = together.pin_memory()
    there = together.to(device, non_blocking=to_gpu)
    pieces = torch.split(there, [part.numel() for part in flat])
    return [
        piece.view(part.dtype).view(part.shape) for piece, part in zip(pieces, parts, strict=True)
    ]
