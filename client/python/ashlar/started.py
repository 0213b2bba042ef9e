# SPDX-License-Identifier: Apache-2.0
"""Started calls, whose results are polled (ashlar/engine.h, Job)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from ashlar._ashlar import Verdict

if TYPE_CHECKING:
    from ashlar import _ashlar

T = TypeVar("T")


class Started(Generic[T]):
    """A call to the daemon in progress. Destroying it waits until the call is over."""

    def __init__(self, job: _ashlar.Job, result: Callable[[], T]) -> None:
        self._job = job
        self._result = result

    def poll(self) -> bool:
        """Returns whether the call is over. Does not wait."""
        return self._job.poll() == Verdict.OK

    def result(self) -> T:
        """Waits, and returns or raises what the call itself would. Call it once."""
        self._job.wait()
        return self._result()

    async def result_async(self) -> T:
        """Like `result`, for asyncio."""
        return await asyncio.to_thread(self.result)
