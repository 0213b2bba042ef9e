# SPDX-License-Identifier: Apache-2.0
"""Follows in-place changes of an engine's weights, which SGLang does not report to its storage backend.

Wraps SGLang's weight updater and its flush of GPU and host memory, once per process. Between a change and the flush,
pages of both sets of weights are in memory, so pages are neither stored nor found.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from typing import Any, Protocol

logger = logging.getLogger(__name__)

# Methods that write weights. The beginning of an update session also counts, because the session's writes may bypass
# SGLang.
_WRITES = (
    "update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc",
    "begin_weight_update", "end_weight_update",
)  # fmt: skip


class Follower(Protocol):
    def weights_change(self) -> None: ...
    def memory_flushed(self) -> None: ...


_followers: weakref.WeakSet[Any] = weakref.WeakSet()
_seen = 0


def changes() -> int:
    """Returns the number of weight changes that this process has detected."""
    return _seen


def attached_late() -> bool:
    """Returns whether the backend is attached to a running engine, instead of opened at the engine's start."""
    from sglang.srt.managers.cache_controller import HiCacheController

    attaches, frame = False, sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name == "__init__" and isinstance(frame.f_locals.get("self"), HiCacheController):
            return False
        attaches |= name == "attach_storage_backend"
        frame = frame.f_back  # type: ignore[assignment]
    return attaches


def follow(follower: Follower) -> None:
    _followers.add(follower)


def _before(own: Any) -> Any:
    @functools.wraps(own)
    def write(*args: Any, **kwargs: Any) -> Any:
        global _seen
        _seen += 1
        for follower in list(_followers):
            follower.weights_change()
        return own(*args, **kwargs)

    return write


def _after(own: Any) -> Any:
    @functools.wraps(own)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        backend = getattr(self, "storage_backend", None)
        if backend is not None and backend in _followers:
            backend.memory_flushed()
        return result

    return reset


def install() -> bool:
    """Wraps SGLang's classes. Returns False if this version has different ones; the operator must then call `clear`
    after a change."""
    try:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        wrapped = [(WeightUpdater, name, _before(getattr(WeightUpdater, name))) for name in _WRITES]
        # The hybrid controller calls this method, too.
        wrapped.append((HiCacheController, "reset", _after(HiCacheController.reset)))
    except (ImportError, AttributeError) as error:
        logger.warning(
            "Ashlar: weight changes are not detected in this version of SGLang (%s); after each change, call "
            "POST /hicache/storage-backend/clear",
            error,
        )
        return False
    for owner, name, function in wrapped:
        setattr(owner, name, function)
    return True


INSTALLED = install()
UNSEEN = INSTALLED and attached_late()  # whether weights may have changed before this module was imported
