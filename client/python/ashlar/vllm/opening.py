"""Opening the cache without making the engine wait for a daemon that is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm.logger import init_logger

import ashlar

logger = init_logger("vllm.ashlar")


class Opening:
    """Tries once at its start, then on a thread of its own until there is a cache. None until then: all is a miss.

    Behind a daemon's restart the cache itself reconnects.
    """

    def __init__(self, open_cache: Callable[[], ashlar.Cache], again_ms: int, what: str) -> None:
        self._open, self._again, self._what = open_cache, again_ms / 1000, what
        self._cache: ashlar.Cache | None = None
        self._said = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if not self._try():
            self._thread = threading.Thread(target=self._keep_trying, name="ashlar-open", daemon=True)
            self._thread.start()

    @property
    def cache(self) -> ashlar.Cache | None:
        """None where there is none, or its daemon has gone."""
        cache = self._cache
        return cache if cache is not None and cache.connected else None

    def _try(self) -> bool:
        try:
            self._cache = self._open()
        except Exception as error:  # whatever it is, the engine goes on without a cache
            if str(error) != self._said:
                logger.warning("Ashlar (%s): no cache yet: %s", self._what, error)
                self._said = str(error)
            return False
        logger.info("Ashlar (%s): the cache is open", self._what)
        return True

    def _keep_trying(self) -> None:
        while not self._ended.wait(self._again):
            if self._try():
                return

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self._cache is not None:
            self._cache.close()
            self._cache = None
