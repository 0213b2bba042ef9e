# SPDX-License-Identifier: Apache-2.0
"""Counts in the engine's own statistics: its log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# name: (labels, help). All are counters.
COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "hits": (("tier", "kind"), "Requests that resumed from the cache."),
    "saved_tokens": (("tier", "kind"), "Prompt tokens that were not computed."),
    "saved_seconds": ((), "Prefill time of the saved tokens at the engine's recent rate, minus the loading time."),
    "load_seconds": ((), "Time from the start of a load until its request can be scheduled."),
    "load_failures": ((), "Loads that failed; the engine recomputed their tokens."),
    "lookups": (
        ("outcome",),
        "Prompt lookups by outcome. no_gain: the hit is no longer than that of the engine's own cache. paused: skipped after a timeout. queued: segments that waited too long for the landings of other prompts. unnamed: an adapter or a medium was not hashed.",
    ),
    "jumps": ((), "Parts of prompts that were composed from cached segments instead of computed."),
    "segments_refused": (
        ("reason",),
        "Cached segments that were computed. no_gain: taking them would save no time. no_space: their prompt needs more space than segment_tokens.",
    ),
    "published_segments": ((), "Segments that this engine computed alone and published."),
    "dropped_segments": (
        (),
        "Segments that this engine computed alone and did not publish, because too few pages of segment_tokens were free.",
    ),
    "shared_segments": ((), "Segments of this engine's prompts that other engines were asked to compute."),
    "served_segments": (
        ("outcome",),
        "Segments that other engines or an operator asked for, by outcome. busy: the engine got requests first.",
    ),
    "handoffs": (("outcome",), "States sent to the node of a decode engine, by outcome."),
    "stores": (("outcome",), "Prompts offered to the cache by outcome. busy: too many stores were in progress."),
}
PREFIX = "vllm:ashlar_"
STATE = "state"  # key in `data`: "state|reason" of the scheduler, if it has changed


def key(name: str, *labels: str) -> str:
    return "|".join((name, *labels))


class AshlarStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: the sum of each counter, by name and labels, and the state."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def add(self, value: float, name: str, *labels: str) -> None:
        assert len(labels) == len(COUNTERS[name][0])
        at = key(name, *labels)
        self.data[at] = self.data.get(at, 0) + value

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for at, value in other.data.items():
            self.data[at] = value if at == STATE else self.data.get(at, 0) + value
        return self

    def reduce(self) -> dict[str, Any]:
        return {
            at.replace("|", " "): value.replace("|", " ") if at == STATE else round(value, 4)
            for at, value in sorted(self.data.items())
        }

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> AshlarStats | None:
        """Returns the counts since the last call, or None if there are none."""
        if self.is_empty():
            return None
        taken = AshlarStats(data=self.data)
        self.reset()
        return taken


class AshlarPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=PREFIX + name, documentation=text, labelnames=[*labelnames, *labels])
            for name, (labels, text) in COUNTERS.items()
        }
        self._state = self._gauge_cls(
            name=PREFIX + STATE,
            documentation="1 for the current state of the cache and its reason, 0 for earlier ones.",
            labelnames=[*labelnames, "state", "reason"],
        )
        self._states: dict[int, tuple[str, str]] = {}  # by engine

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for at, value in transfer_stats_data.items():
            if at == STATE:
                self._observe_state(engine_idx, *value.split("|"))
                continue
            name, *labels = at.split("|")
            if name in self._counters and value > 0:
                values = [*self.per_engine_labelvalues[engine_idx], *labels]
                self._counters[name].labels(*values).inc(value)

    def _observe_state(self, engine_idx: int, state: str, reason: str) -> None:
        before = self._states.get(engine_idx)
        if before is not None:
            self._state.labels(*self.per_engine_labelvalues[engine_idx], *before).set(0)
        self._state.labels(*self.per_engine_labelvalues[engine_idx], state, reason).set(1)
        self._states[engine_idx] = (state, reason)
