# SPDX-License-Identifier: Apache-2.0
"""Orders the engine's work on a device, and the work of the connector and the daemon in the engine's blocks.

On a CPU, work has ended when its call returns. On other devices it continues. The daemon is another process and does
not know the engine's streams, so it gets blocks only after that work has ended. The connector's own copies run on
separate streams.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in the engine's work."""

    def query(self) -> bool:
        """Returns whether all work before the mark has ended."""

    def synchronize(self) -> None: ...


class Timer(Protocol):
    """Measures the engine's work from the timer's creation to `stop`."""

    def stop(self) -> None: ...

    def seconds(self) -> float | None:
        """Returns None if the work has not ended."""


class Copies:
    """Copies between the device and CPU memory. They have ended when `mark` has; without a mark they have already
    ended."""

    mark: Mark | None = None

    def ended(self) -> bool:
        return self.mark is None or self.mark.query()

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.synchronize()


class Order(Protocol):
    def timer(self) -> Timer: ...

    def mark(self) -> Mark | None:
        """Returns a mark after all work that the engine has submitted so far; None: that work has ended."""

    def copies(self, wait: bool = True) -> contextlib.AbstractContextManager[Copies]:
        """Returns the context in which tensors are copied to and from CPU memory, on any thread, after a mark has
        ended.

        With `wait`, the copies have ended at the end of the context.
        """


class CpuTimer:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: float | None = None

    def stop(self) -> None:
        self._seconds = time.monotonic() - self._began

    def seconds(self) -> float | None:
        return self._seconds


class CpuOrder:
    def timer(self) -> Timer:
        return CpuTimer()

    def mark(self) -> Mark | None:
        return None

    def copies(self, wait: bool = True) -> contextlib.AbstractContextManager[Copies]:
        return contextlib.nullcontext(Copies())


class _DeviceTimer:
    def __init__(self, streams: Any, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._began, self._ended = (streams.Event(enable_timing=True) for _ in range(2))
        self._began.record(streams.current_stream(device))

    def stop(self) -> None:
        self._ended.record(self._streams.current_stream(self._device))

    def seconds(self) -> float | None:
        return float(self._began.elapsed_time(self._ended)) / 1000 if self._ended.query() else None


class DeviceOrder:
    """The order on a torch device with streams and events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, torch.get_device_module(device)
        self._events = {"blocking": True} if device.type == "cuda" else {}  # threads that wait do not spin
        self._own = threading.local()

    def timer(self) -> Timer:
        return _DeviceTimer(self._streams, self._device)

    def _mark_of(self, stream: Any) -> Mark:
        event: Any = self._streams.Event(**self._events)
        event.record(stream)
        return event  # type: ignore[no-any-return]

    def mark(self) -> Mark | None:
        return self._mark_of(self._streams.current_stream(self._device))

    @contextlib.contextmanager
    def copies(self, wait: bool = True) -> Iterator[Copies]:
        """Uses a stream of this thread that does not wait for the engine's streams."""
        with self._streams.device(self._device):
            if not hasattr(self._own, "stream"):
                self._own.stream = self._streams.Stream()
            stream, copies = self._own.stream, Copies()
            with self._streams.stream(stream):
                try:
                    yield copies
                except BaseException:
                    wait = True
                    raise
                finally:
                    if wait:
                        stream.synchronize()
                    else:
                        copies.mark = self._mark_of(stream)
