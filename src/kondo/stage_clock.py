"""Seconds of the stages of a step, on the CPU or by events on a GPU."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

STAGES = ("screen", "select", "compact", "forward", "backward")


class StageClock:
    """Adds up seconds per stage. On CUDA it records events and waits once, when read.

    A stage inside another is counted once, as the inner one.

    Args:
        device: where the work happens.
        stages: their names.

    Example:
        >>> import torch
        >>> clock = StageClock(torch.device("cpu"))
        >>> with clock.stage("forward"):
        ...     pass
        >>> list(clock.seconds())
        ['screen', 'select', 'compact', 'forward', 'backward']
    """

    def __init__(self, device: torch.device, stages: Sequence[str] = STAGES):
        self._cuda = device.type == "cuda"
        self._device = device
        self._spent = dict.fromkeys(stages, 0.0)
        self._open: list[str] = []
        self._events: list[tuple[str, str | None, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the stage `name`, and take it from the one around."""
        outer = self._open[-1] if self._open else None
        self._open.append(name)
        start = self._record() if self._cuda else time.perf_counter()
        try:
            yield
        finally:
            self._open.pop()
        if isinstance(start, float):
            self._add(name, outer, time.perf_counter() - start)
        else:
            self._events.append((name, outer, start, self._record()))

    def seconds(self) -> dict[str, float]:
        """Return seconds per stage; on CUDA this is a sync point."""
        if self._events:
            torch.cuda.synchronize(self._device)
        for name, outer, first, last in self._events:
            self._add(name, outer, first.elapsed_time(last) / 1e3)
        self._events.clear()
        return dict(self._spent)

    def _add(self, name: str, outer: str | None, seconds: float) -> None:
        self._spent[name] += seconds
        if outer is not None:
            self._spent[outer] -= seconds

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
