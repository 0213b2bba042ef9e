# SPDX-License-Identifier: Apache-2.0
"""The backend's counters, in SGLang's own Prometheus endpoint."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from typing import Any

import prometheus_client
from sglang.srt.observability.metrics_collector import StorageMetrics

PREFIX = "sglang:ashlar_"
COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "loaded_pages": (("tier", "kind"), "Pages fetched from the cache."),
    "saved_tokens": (("tier", "kind"), "Tokens of the key and value pages fetched from the cache."),
    "load_seconds": ((), "Time spent fetching pages."),
    "saved_seconds": (
        (),
        "Prefill time of the saved tokens at tokens_per_second, minus the fetching time.",
    ),
    "missed_pages": (("reason",), "Pages that the cache could not deliver, by reason."),
    "stored_pages": (("outcome",), "Pages offered to the cache, by outcome."),
}
_registered: dict[str, Any] = {}  # a process can register a counter only once
_registering = threading.Lock()


@dataclasses.dataclass
class AshlarMetrics(StorageMetrics):
    """SGLang's metrics. `ashlar`: the backend's counts since the last call, by (name, labels…)."""

    ashlar: dict[tuple[str, ...], float] = dataclasses.field(default_factory=dict)


class Counts:
    def __init__(self, ranks: dict[str, int]) -> None:
        self._ranks = {name: str(rank) for name, rank in ranks.items()}
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, value: float, name: str, *labels: str) -> None:
        assert len(labels) == len(COUNTERS[name][0])
        with self._lock:
            self._values[name, *labels] += value

    def take(self) -> dict[tuple[str, ...], float]:
        """Returns the counts since the last call and adds them to the process's counters."""
        with self._lock:
            taken, self._values = dict(self._values), defaultdict(float)
        for (name, *labels), value in taken.items():
            if value > 0:
                self._counter(name).labels(*self._ranks.values(), *labels).inc(value)
        return taken

    def _counter(self, name: str) -> Any:
        labels, text = COUNTERS[name]
        with _registering:
            if name not in _registered:
                _registered[name] = prometheus_client.Counter(PREFIX + name, text, [*self._ranks, *labels])
            return _registered[name]
