# SPDX-License-Identifier: Apache-2.0
"""Cold prompts that several engines compute together (option `cold_parallel`): HYPIC §4.4.

The daemon assigns a part of a prompt's missing segments to engines that serve prefill (serving.py). This engine runs
the others alone at the same time. Afterwards the prompt is looked up again, and takes all of them from the cache.
"""

from __future__ import annotations

import time

import ashlar


class Sharing:
    """Waits for the segments of one prompt that other engines compute. Does not block."""

    def __init__(self, lookup: ashlar.Request, deadline: float) -> None:
        """`lookup`: with a plan, and segments elsewhere. The caller ends it."""
        self._lookup, self._deadline = lookup, deadline
        self._known = 0
        self._own: list[int] = []
        self._over = False
        self._wait()

    def _wait(self) -> None:
        runs = self._lookup.missing
        self._own += [run.segment for run in runs[self._known :]]
        self._known = len(runs)
        left = max(0.0, self._deadline - time.monotonic())
        self._job = self._lookup.start_wait_cold(int(1000 * left))

    def take_own(self) -> list[int]:
        """Returns the segments that have become this engine's since the last call."""
        taken, self._own = self._own, []
        return taken

    @property
    def late(self) -> bool:
        return time.monotonic() > self._deadline

    def over(self) -> bool:
        """Returns whether all other engines have ended their part of the prompt, or the wait has timed out."""
        if self._over or not self._job.poll():
            return self._over or self.late
        self._over = self._job.result() != ashlar.Verdict.RESTART or self.late
        if not self._over:
            self._wait()  # some engines have failed
        return self._over

    @property
    def ended(self) -> bool:
        """Returns whether the call to the daemon has ended. It ends shortly after the lookup."""
        return self._job.poll()
