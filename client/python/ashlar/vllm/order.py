# SPDX-License-Identifier: Apache-2.0
"""The order between the engine's work on a device and what the connector and the daemon do in its blocks.

A processor's work has ended when its call returns. A GPU's goes on: the daemon, another process, knows nothing of the
engine's streams, and so nothing is handed to it before that work has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the engine's work."""

    def query(self) -> bool:
        """Whether all work before it has ended."""

    def synchronize(self) -> None: ...


class Timer(Protocol):
    """Of the engine's work from its creation to `stop`."""

    def stop(self) -> None: ...

    def seconds(self) -> float | None:
        """None: the work has not ended."""


class Order(Protocol):
    def timer(self) -> Timer: ...

    def mark(self) -> Mark | None:
        """All that the engine has submitted so far; None: it has ended."""

    def copies(self) -> contextlib.AbstractContextManager[None]:
        """Where tensors are copied to and from the processor's memory: at its end, the copies have ended. Any thread."""


class ProcessorTimer:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: float | None = None

    def stop(self) -> None:
        self._seconds = time.monotonic() - self._began

    def seconds(self) -> float | None:
        return self._seconds


class ProcessorOrder:
    def timer(self) -> Timer:
        return ProcessorTimer()

    def mark(self) -> Mark | None:
        return None

    def copies(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _GpuTimer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record(torch.cuda.current_stream(device))

    def stop(self) -> None:
        self._ended.record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float | None:
        return float(self._began.elapsed_time(self._ended)) / 1000 if self._ended.query() else None


class GpuOrder:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def timer(self) -> Timer:
        return _GpuTimer(self._device)

    def mark(self) -> Mark | None:
        event: Mark = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[attr-defined]
        return event

    @contextlib.contextmanager
    def copies(self) -> Iterator[None]:
        """On a stream of the thread's own, which waits for nothing of the engine's: a mark comes before."""
        with torch.cuda.device(self._device):
            if not hasattr(self._own, "stream"):
                self._own.stream = torch.cuda.Stream()
            with torch.cuda.stream(self._own.stream):
                try:
                    yield
                finally:
                    self._own.stream.synchronize()
