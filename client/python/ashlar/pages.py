# SPDX-License-Identifier: Apache-2.0
"""Pages of bytes in the cache under keys that the caller makes. For engines that hash prefixes themselves.

    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)
    store = ashlar.PageStore(client, model_id="m", weights_digest="w", content="kv pages", page_bytes=1 << 20,
                             page_tokens=64)
    store.put([key], lambda i, slot: copy_into(slot, page))
    store.get([key], lambda i, slot: copy_out_of(slot))

A key is a 32-byte hash that always names the same content. Pages have the cache's tenants, namespaces, checksums, tiers
and prices. A cache failure is a miss.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ashlar import _ashlar

Slot = npt.NDArray[np.uint8]
# A function that is called with the index of a key and the page's bytes, [page_bytes], in memory that is shared with
# the daemon. It may use these bytes until it returns.
PageCall = Callable[[int, Slot], None]


_KEY_BYTES = 32
_UNANSWERED = frozenset(["unavailable", "daemon_unavailable", "timed_out"])


def _checked(keys: Sequence[bytes]) -> list[bytes]:
    """Checks all keys of a call before the first of them takes a slot."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        raise TypeError(f"keys: {type(keys).__name__} was given; expected a sequence of bytes")
    for i, key in enumerate(keys):
        if not isinstance(key, bytes):
            raise TypeError(f"keys[{i}]: {type(key).__name__} was given; expected bytes")
        if len(key) != _KEY_BYTES:
            raise ValueError(f"keys[{i}]: {len(key)} bytes; expected {_KEY_BYTES}")
    return list(keys)


def _check_call(name: str, call: PageCall) -> None:
    if not callable(call):
        raise TypeError(f"{name}: {type(call).__name__} was given; expected a function of a key's index and a slot")


class Fetched(NamedTuple):
    """The outcome of fetching one page."""

    miss: str | None  # reason of the miss; None: hit
    tier: str | None  # tier of the hit


class PageClient:
    """One session with the node's daemon, for several stores. It ends with its last store and its last reference.

    `name`: shown in the daemon's logs. `timeout_ms`: limit of one call to the daemon. ConnectionError: no daemon.
    """

    def __init__(
        self,
        rpc_socket: str | os.PathLike[str],
        session_socket: str | os.PathLike[str],
        *,
        name: str = "pages",
        timeout_ms: int = 5000,
    ) -> None:
        self._handle = _ashlar.connect_pages(rpc_socket, session_socket, name, timeout_ms)


class PageStore:
    """Pages of one size and content. Thread-safe.

    `client`: its session; several stores may share it. `model_id`, `weights_digest`: the model of the pages. `content`:
    everything else that must agree between engines that share pages, such as their layout and rank. `page_bytes`: size
    of a page. `page_tokens`: tokens per page, at least 8. `tokens_per_second`: rate of prefill, for the break-even
    check; 0: no check. `flops_per_token`: FLOPs that a hit saves per token of its page, for eviction; 0: the daemon
    estimates them from the page's bytes. `slots`: pages of memory shared with the daemon; a call with more keys proceeds
    in batches. `land_ms`: limit of a landing, and of the wait for a free slot.
    """

    def __init__(
        self,
        client: PageClient,
        *,
        model_id: str,
        weights_digest: str,
        content: str,
        page_bytes: int,
        page_tokens: int = 8,
        tokens_per_second: float = 0.0,
        flops_per_token: float = 0.0,
        slots: int = 16,
        land_ms: int = 5000,
    ) -> None:
        self._handle = _ashlar.open_pages(
            getattr(client, "_handle", client), model_id, weights_digest, content, page_bytes, page_tokens,
            tokens_per_second, flops_per_token, slots, land_ms,
        )  # fmt: skip
        self.page_bytes = page_bytes
        self.slots = slots
        self._wait_s = land_ms / 1000
        self._memory = self._handle.memory()
        self._free = list(range(slots))  # guarded by _changed
        self._changed = threading.Condition()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False

    def close(self) -> None:
        """Releases the memory once nothing can write to it any longer. Does nothing in a forked child.

        No other call may be in progress. Later calls raise RuntimeError. Slots that a caller still holds stay mapped.
        """
        self._memory = np.empty((0, 0), np.uint8)
        self._handle.close()

    @property
    def connected(self) -> bool:
        """Whether the session is connected now. It reconnects by itself after the daemon restarts."""
        return self._handle.connected()

    def _slot(self, slot: int) -> Slot:
        return self._memory[slot, : self.page_bytes]

    def _take(self, most: int) -> list[int]:
        """Returns 1 to `most` free slots, or none if no slot becomes free in time."""
        deadline = time.monotonic() + self._wait_s
        with self._changed:
            while True:
                if len(self._free) < most:
                    self._free += self._handle.take_quiesced(self.slots)
                if self._free:
                    taken, self._free = self._free[:most], self._free[most:]
                    return taken
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(min(left, 0.05))  # unresolved slots become free without a notification

    def _give(self, slots: list[int]) -> None:
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def _checked(self, keys: Sequence[bytes]) -> list[bytes]:
        self._handle.check_open()  # before a lock is taken: a lock that another thread held at a fork is never released
        return _checked(keys)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether the cache has its page. A page may be evicted afterwards."""
        return list(self._handle.exists(self._checked(keys)))

    def put(self, keys: Sequence[bytes], fill: PageCall) -> list[str]:
        """Stores pages. Calls `fill` for each page that the cache accepts, to write the page's bytes.

        `keys`: 32 bytes each. Returns one outcome per key: "published", "already_present", "being_published" (another
        engine stores it), or why the cache does not accept the page. If `fill` raises, its exception is raised, and
        pages that are not yet published are abandoned. If the daemon does not answer, the call requests no more pages.
        """
        outcomes: list[str] = []
        wanted = self._checked(keys)
        _check_call("fill", fill)
        for begin in range(0, len(wanted), self.slots):
            outcomes += self._put(wanted[begin : begin + self.slots], begin, fill)
            if not _UNANSWERED.isdisjoint(outcomes):
                break
        return outcomes + ["unavailable"] * (len(wanted) - len(outcomes))

    def _put(self, keys: list[bytes], first: int, fill: PageCall) -> list[str]:
        outcomes, granted = [], []
        for i, (outcome, reservation) in enumerate(self._handle.reserve(keys)):
            outcomes.append(outcome)
            if reservation is not None:
                outcomes[i] = "busy"  # replaced when the slot is published
                granted.append((i, reservation))
        try:
            while granted:
                slots = self._take(len(granted))
                if not slots:
                    break
                try:
                    part = granted[: len(slots)]
                    for slot, (i, _) in zip(slots, part):
                        fill(first + i, self._slot(slot))
                    granted = granted[len(slots) :]
                    published = self._handle.publish([one for _, one in part], slots[: len(part)])
                    for (i, _), outcome in zip(part, published):
                        outcomes[i] = outcome
                finally:
                    self._give(slots)
                if not _UNANSWERED.isdisjoint(published):
                    break
        finally:
            if granted:
                self._handle.abandon([reservation for _, reservation in granted])
        return outcomes

    def get(self, keys: Sequence[bytes], take: PageCall) -> list[str | None]:
        """Fetches pages. Calls `take` for each page found, to read its bytes. Returns for each key the reason of its
        miss, or None for a hit. If the daemon does not answer, the call requests no more pages."""
        return [page.miss for page in self.fetch(keys, take)]

    def fetch(self, keys: Sequence[bytes], take: PageCall) -> list[Fetched]:
        """Like `get`, but also returns the tier of each hit."""
        fetched: list[Fetched] = []
        wanted = self._checked(keys)
        _check_call("take", take)
        while len(fetched) < len(wanted):
            slots = self._take(min(self.slots, len(wanted) - len(fetched)))
            if not slots:
                return fetched + [Fetched("busy", None)] * (len(wanted) - len(fetched))
            ours: list[int] = []
            try:
                first = len(fetched)
                landed = self._handle.get(wanted[first : first + len(slots)], slots)
                ours = [slot for slot, (_, quiesced, _) in zip(slots, landed) if quiesced]
                for i, (slot, (miss, _, tier)) in enumerate(zip(slots, landed)):
                    if miss is None:
                        take(first + i, self._slot(slot))
                    fetched.append(Fetched(miss, tier))
            finally:
                self._give(ours)
            unanswered = next((page.miss for page in fetched[first:] if page.miss in _UNANSWERED), None)
            if unanswered is not None:
                return fetched + [Fetched(unanswered, None)] * (len(wanted) - len(fetched))
        return fetched

    def memory(self) -> Any:
        """Returns all slots, in place: [slots, page bytes and padding]."""
        return self._memory
