# SPDX-License-Identifier: Apache-2.0
"""Segments that this engine computes for other engines and for operators' warm-ups (option `serve_prefill`).

While the engine has no requests, a thread in the scheduler's process waits for segments at the daemon, one at a time.
The scheduler runs each one alone, like a missing segment of its own prompts, and a worker publishes it. So the segments
have the engine's own namespace and weights, and pass through no request, tokenizer or HTTP server. A separate process
would need all of these, and the layout that only workers have.

An engine's core without requests does not step. The thread wakes it with the message that vLLM itself puts into the
core's input queue at shutdown; the core then steps while `pending`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

import ashlar

logger = init_logger("vllm.ashlar")

_INTRODUCTION = 60.0  # seconds in which a worker reports the layout of segments, after the engine has started
_WAIT_MS = 500  # limit of one call to the daemon
_BUSY = 0.1  # seconds between two checks while the engine has requests
_PATIENCE = 2.0  # seconds; if the engine gets requests first, the asking engine computes the segment after this


def find_wake() -> Callable[[], None] | None:
    """Returns a function that wakes the engine's core. Call it while the core creates its scheduler.

    Returns None if the core has no loop, because the caller of `LLM` steps it.
    """
    frame = sys._getframe()
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, EngineCoreProc):
            inputs = maker.input_queue
            return lambda: inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back  # type: ignore[assignment]
    return None


@dataclasses.dataclass(eq=False)
class Served:
    """A segment of another engine. Serving's lock guards `started` and `published`."""

    tokens: npt.NDArray[np.int32]
    first: bool  # the first segment of prompts
    since: float = dataclasses.field(default_factory=time.monotonic)  # its last progress
    started: bool = False  # whether it was taken, or is no longer needed
    published: bool | None = None  # None: it has not ended
    refused: bool = False  # whether this engine can never compute it; set before its end


class Serving:
    """Computes segments for other engines. The engine's thread calls all methods above "the thread"."""

    def __init__(
        self,
        cache: Callable[[], ashlar.Cache | None],
        may_serve: Callable[[], bool],
        wake: Callable[[], None],
        run_seconds: float,
    ) -> None:
        """`cache`: returns the open cache of segments. `may_serve`: called by any thread. `run_seconds`: limit of a
        run without progress."""
        self._cache, self._may_serve, self._wake, self._run_seconds = cache, may_serve, wake, run_seconds
        self._given: Served | None = None
        self._changed = threading.Condition()
        self._using = threading.Lock()  # the thread holds it until it has reported all results to the daemon
        self._outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ashlar-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call it before the cache is closed."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout=2 * _WAIT_MS / 1000)

    @property
    def pending(self) -> bool:
        """Returns whether a segment waits to be run."""
        given = self._given
        return given is not None and not given.started

    def take(self) -> Served | None:
        """Returns the segment that waits. Call `end` for it."""
        with self._changed:
            if self._given is None or self._given.started:
                return None
            self._given.started = True
            return self._given

    def awaits(self, served: Served) -> bool:
        """Returns whether the daemon still expects this segment."""
        return self._given is served

    def end(self, served: Served, published: bool) -> None:
        with self._changed:
            served.published = published
            self._changed.notify_all()
        self._outcomes.put("published" if published else "failed")

    def take_outcomes(self) -> list[str]:
        """Returns one outcome per segment that has ended since the last call."""
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    def when_unused(self, replace: Callable[[], None]) -> None:
        """Calls `replace`, which may replace the cache, unless the thread is using the cache."""
        if self._using.acquire(blocking=False):
            try:
                replace()
            finally:
                self._using.release()

    # ---- the thread

    def _serve(self) -> None:
        while not self._ended.is_set():
            with self._using:
                served = self._may_serve() and self._serve_some()
            if not served:
                self._ended.wait(_BUSY)

    def _serve_some(self) -> bool:
        """Waits for a segment, and serves until all results are reported to the daemon. Returns False if there is no
        daemon."""
        idle, reports = True, False  # the next call reports a segment's result to the daemon
        while (cache := self._cache()) is not None:
            try:
                with cache.serve_prefill(_WAIT_MS if idle else 0) or contextlib.nullcontext() as work:
                    reports = work is not None
                    if work is not None and not idle:
                        self._outcomes.put("busy")
                    elif work is not None:
                        (run,) = work.missing
                        served = Served(run.tokens, first=not run.transition)
                        if self._compute(served):
                            work.mark_published(0)
                        elif served.refused:
                            work.abandon(0)
            except Exception as error:  # the asking engine computes the segment
                if not self._ended.wait(1):
                    logger.warning("Ashlar: cannot serve other engines: %s: %s", type(error).__name__, error)
            if not reports or self._ended.is_set():
                return True
            idle = self._may_serve()
        return False

    def _compute(self, served: Served) -> bool:
        """Returns whether the segment was published."""
        with self._changed:
            self._given = served
        self._wake()
        with self._changed:
            while served.published is None and not self._ended.is_set():
                limit = self._run_seconds if served.started else _PATIENCE
                if time.monotonic() - served.since > limit:
                    break
                self._changed.wait(_BUSY)
            if not served.started:
                self._outcomes.put("busy")
            served.started, self._given = True, None
            return bool(served.published)


class ServingStart:
    """Starts `Serving` once a worker has reported the layout of segments, for which the engine is woken first."""

    def __init__(self, wake: Callable[[], None] | None) -> None:
        """None: the engine serves no prefill."""
        self._wake = wake
        self._until = time.monotonic() + _INTRODUCTION
        if wake is not None:
            wake()  # a worker reports the layout of segments with the engine's first step

    @property
    def awaits_layout(self) -> bool:
        return self._wake is not None and time.monotonic() < self._until

    def cancel(self) -> None:
        self._wake = None

    def start(
        self, cache: Callable[[], ashlar.Cache | None], may_serve: Callable[[], bool], run_seconds: float
    ) -> Serving | None:
        """Arguments as of `Serving`. Returns None if it was started or cancelled before."""
        wake, self._wake = self._wake, None
        return None if wake is None else Serving(cache, may_serve, wake, run_seconds)
