# SPDX-License-Identifier: Apache-2.0
"""Opens the cache without blocking the engine if no daemon answers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm.logger import init_logger

import ashlar
from ashlar.checkpoint import Weights
from ashlar.vllm.options import Options
from ashlar.vllm.state import State, why_unreachable

logger = init_logger("vllm.ashlar")

_LONGEST = 60.0  # seconds between two attempts to open another cache


class Opening:
    """Tries once at its start, then on a separate thread until the cache is open. Until then `cache` is None and all
    requests miss.

    The cache is opened once the weights' digest is known. After a restart of the daemon the cache reconnects by itself.
    """

    def __init__(
        self,
        open_cache: Callable[[], ashlar.Cache],
        weights: Weights,
        options: Options,
        what: str,
        state: State,
    ) -> None:
        self._open, self._weights, self._again, self._what = open_cache, weights, options.reopen_ms / 1000, what
        self._rpc_socket, self._state = options.rpc_socket, state
        self._sockets = f"rpc_socket {options.rpc_socket}, session_socket {options.session_socket}"
        self._cache: ashlar.Cache | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._next: ashlar.Cache | None = None
        self._former: ashlar.Cache | None = None
        self._outdated = False
        if self._weights.digest() is None:
            state.set("weights")
            self._begin(self._keep_trying)
        elif not self._try():
            self._begin(self._keep_trying)

    def _begin(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="ashlar-open", daemon=True)
        self._thread.start()

    @property
    def cache(self) -> ashlar.Cache | None:
        """The open cache. None: it is not open, or not connected."""
        cache = self._cache
        if cache is None:
            return None
        if not cache.connected:
            self._state.set("lost", "the daemon has closed the session")
            return None
        self._state.set("none", self._sockets)
        return cache

    def _try(self) -> bool:
        try:
            self._cache = self._open()
        except Exception as error:  # whatever fails, the engine continues without a cache
            self._state.set(why_unreachable(self._rpc_socket), str(error))
            return False
        self._state.set("none", self._sockets)
        return True

    def _keep_trying(self) -> None:
        if self._weights.digest() is None:
            if self._weights.wait() is None:
                if self._weights.failed():
                    self._state.set("unhashed")
                return
            if self._ended.is_set() or self._try():
                return
        while not self._ended.wait(self._again):
            if self._try():
                return

    def reopen(self) -> None:
        """Makes `refresh` open the cache again, because `open_cache` now declares the model differently."""
        self._outdated = True

    def refresh(self, unused: bool, early: bool = False) -> None:
        """After `reopen`, opens another cache on a thread, which tries until it succeeds, while the current one stays
        open. A later call replaces the current one: at once if `early`, otherwise when it is `unused`. Closes the
        replaced cache once it is unused.

        `unused`: whether no request of the caches is in progress.
        """
        if self._outdated and self._former is None:
            self._outdated = False
            if not self._renew():
                self._outdated = True
        if self._next is not None and (unused or early):
            self._former, self._cache, self._next = self._cache, self._next, None
        if self._former is not None and unused:  # the daemon may take long to answer
            threading.Thread(target=self._former.close, name="ashlar-close", daemon=True).start()
            self._former = None

    def _renew(self) -> bool:
        """Returns False if a cache cannot be opened now."""
        if self.cache is None or self._next is not None or (self._thread is not None and self._thread.is_alive()):
            return False
        self._begin(self._open_next)
        return True

    def _open_next(self) -> None:
        pause = self._again
        while not self._ended.is_set():
            try:
                self._next = self._open()
                return
            except Exception as error:  # the current cache stays open
                logger.warning(
                    "Ashlar (%s): cannot reopen the cache: %s; next attempt in %.1f s", self._what, error, pause
                )
            self._ended.wait(pause)
            pause = min(2 * pause, max(self._again, _LONGEST))

    def close(self) -> None:
        self._weights.close()
        self.suspend()

    def suspend(self) -> None:
        """Closes the cache for good. The weights' digest is kept, or still computed, for another opening."""
        self._ended.set()
        if self._thread is not None and self._weights.digest() is not None:  # otherwise the thread waits for the digest
            self._thread.join(timeout=5)
        for cache in (self._cache, self._next, self._former):
            if cache is not None:
                cache.close()
        self._cache = self._next = self._former = None
