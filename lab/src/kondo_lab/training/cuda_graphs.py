"""CUDA graphs: a step of small kernels costs more to launch than to compute.

A captured function reads and writes tensors that stay where they are. Its first calls run as they
stand, and are real work (lazy initialisation happens there); then one call is recorded and from
there on replayed. On a CPU nothing is captured.
"""

import gc
from collections.abc import Callable

import torch

EAGER_CALLS = 3
"""Calls before the recording; torch asks for a few on a side stream."""


class Captured:
    """A function without arguments and results, replayed from a CUDA graph where there is one."""

    def __init__(self, function: Callable[[], None], device: torch.device):
        self._function, self._device = function, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        """Do the work once."""
        if self._device.type != "cuda":
            self._function()
        elif self._graph is not None:
            self._graph.replay()
        elif self._calls < EAGER_CALLS:
            self._calls += 1
            self._on_side_stream()
        else:
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(self._graph, stream=self._stream_to_record_on()):
                self._function()
            self._graph.replay()

    def _stream_to_record_on(self) -> torch.cuda.Stream | None:
        # Graphs recorded on one stream share its cuBLAS workspace. Recorded where they will be
        # replayed they take turns; on torch's common capture stream, populations that run side by
        # side would write to one workspace at once. The default stream cannot record.
        stream = torch.cuda.current_stream(self._device)
        return None if stream == torch.cuda.default_stream(self._device) else stream

    def _on_side_stream(self) -> None:
        # Memory that one stream frees may be taken by another before its work is done; these few
        # calls therefore wait for everything, before and after.
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(new_stream(self._device)):
            self._function()
        torch.cuda.synchronize(self._device)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of its own on a CUDA device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def free(device: torch.device) -> None:
    """Free what earlier runs left on the device.

    A graph that is freed takes the cuBLAS workspace of its stream along: those of earlier runs
    must be gone before new ones are recorded, not whenever Python finds the time.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
