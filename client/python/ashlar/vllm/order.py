"""The order between the engine's work on a device and what the connector and the daemon do in its blocks.

A processor's work has ended when its call returns. A GPU's goes on: the daemon, another process, knows nothing of the
engine's streams, and so nothing is handed to it before that work has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the engine's work."""

    def query(self) -> bool:
        """Whether all work before it has ended."""

    def synchronize(self) -> None: ...


class Order(Protocol):
    def mark(self) -> Mark | None:
        """All that the engine has submitted so far; None: it has ended."""

    def copies(self) -> contextlib.AbstractContextManager[None]:
        """Where tensors are copied to and from the processor's memory: at its end, the copies have ended. Any thread."""


class ProcessorOrder:
    def mark(self) -> Mark | None:
        return None

    def copies(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class GpuOrder:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

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
