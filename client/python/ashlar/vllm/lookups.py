# SPDX-License-Identifier: Apache-2.0
"""Lookups of segments by the scheduler itself. A prompt of new segments does not wait for a worker's answer.

A lookup lands nothing. If it finds something, a worker looks the prompt up again and lands it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import ashlar
from ashlar.request import StepKind
from ashlar.tensors import EPSILON
from ashlar.vllm.model import Described
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.state import State

_POLL = 0.0001  # seconds
_SHARE = 0.01  # longest wait for a lookup, as a fraction of the prompt's prefill time
_USUAL_WAIT = 0.002  # seconds; the wait while the rate of prefill is unknown
_SHORTEST_WAIT, _LONGEST_WAIT = 0.0005, 0.02  # seconds


def lookup_wait(options: Options, tokens: int, tokens_per_second: float) -> float:
    """Returns how long the scheduler waits for the lookup of a prompt before it serves other requests, in seconds."""
    if options.lookup_wait_ms > 0:
        return options.lookup_wait_ms / 1000
    if tokens_per_second <= 0:
        return _USUAL_WAIT
    return min(_LONGEST_WAIT, max(_SHORTEST_WAIT, _SHARE * tokens / tokens_per_second))


def await_plan(handle: ashlar.Request, deadline: float) -> ashlar.Verdict:
    """Returns PENDING if there is no plan by the deadline."""
    while (verdict := handle.poll_plan()) == ashlar.Verdict.PENDING and time.monotonic() < deadline:
        time.sleep(_POLL)
    return verdict


def missing_segments(plan: ashlar.Plan) -> list[int]:
    """Returns the segments that the cache lacks; not those that it has and that load more slowly than computing."""
    misses = (segment.miss for segment in plan.segments)
    return [number for number, miss in enumerate(misses) if miss not in (None, "slower_than_recompute")]


def finds_segments(plan: ashlar.Plan) -> bool:
    return any(step.kind is not StepKind.COMPUTE for step in plan.steps)


class SegmentLookups:
    """Unavailable until a worker has reported the layout of segments, a part of which only workers know."""

    def __init__(self, described: Described, options: Options) -> None:
        self._described, self._options = described, options
        self._opening: Opening | None = None
        self._tokens_per_second = options.tokens_per_second
        self.available = False

    def open(self, model: ashlar.Model) -> None:
        """`model`: as `segments_model` returns it. Later calls change nothing."""
        if self.available:
            return
        options = self._options

        def open_cache() -> ashlar.Cache:
            return ashlar.Cache(
                self._described.named(dataclasses.replace(model, tokens_per_second=self._tokens_per_second)),
                options.rpc_socket,
                options.session_socket,
                name="vllm-segment-lookups",
                timeout_ms=options.call_ms,
                memory_kind=ashlar.MemoryKind.NONE,
                epsilon=EPSILON[options.segment_dtype],
            )

        state = State("segment lookups")
        self._opening = Opening(open_cache, self._described.identity.weights, options, "segment lookups", state)
        self.available = True

    def set_rate(self, tokens_per_second: float) -> None:
        """Reports a measured rate of prefill to the daemon. Call `refresh` later."""
        self._tokens_per_second = tokens_per_second
        if self._opening is not None:
            self._opening.reopen()

    def refresh(self, unused: bool) -> None:
        """`unused`: whether no lookup is in progress. New lookups use the rate as soon as the cache is reopened."""
        if self._opening is not None:
            self._opening.refresh(unused, early=True)

    @property
    def cache(self) -> ashlar.Cache | None:
        return None if self._opening is None else self._opening.cache

    def start(
        self, tokens: npt.NDArray[np.int32], lengths: Sequence[int], salt: str, shares: bool = False
    ) -> ashlar.Request | None:
        """`tokens`: those of all segments and one more. Returns None if there is no daemon, so that nothing is found.

        `shares`: other engines may be asked for missing segments.
        """
        cache = self.cache
        return (
            None if cache is None else cache.start_begin(tokens, lengths, salt=salt, fill=shares, cold_parallel=shares)
        )

    def close(self) -> None:
        if self._opening is not None:
            self._opening.close()
