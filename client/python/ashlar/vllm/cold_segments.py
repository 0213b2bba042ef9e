# SPDX-License-Identifier: Apache-2.0
"""Segments that this engine runs alone and publishes: those that its prompts lack, and those of other engines.

To run a segment alone means to compute it in a forward pass of its own, from a zero state, without a request. The
engine runs a segment when it has no requests, or when a second request contains the segment. Segments of other engines
come first (see serving.py). A run's tokens count in the step's budget (`max_num_batched_tokens`), so other requests
wait no longer than for a prefill chunk. If steps are full, every second step leaves space for a segment that two
requests contain.

An idle engine also runs segments that only one prompt contained, so that a document's first repetition hits. Such a run
delays no request. The daemon, which knows the reuse of all engines, decides whether a segment is worth its bytes: it
evicts by expected uses, and by default writes a segment to the disk after its second use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ashlar.vllm.messages import Alone
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options
from ashlar.vllm.serving import Served, Serving
from ashlar.vllm.stats import AshlarStats

_REMEMBERED = 512  # maximum number of missing segments kept for later runs


@dataclasses.dataclass
class _Cold:
    """A segment that is missing in the cache."""

    name: bytes  # empty for a segment of another engine
    tokens: npt.NDArray[np.int32]
    first: bool
    salt: str
    asked: int = 0  # number of requests that contained it


@dataclasses.dataclass
class _Run:
    """The segment that currently runs separately."""

    number: int
    name: bytes  # empty for a segment of another engine
    blocks: list[Any]
    served: Served | None
    published: dict[int, int] = dataclasses.field(default_factory=dict)  # as of WorkerReport.ran, by rank


class ColdSegments:
    def __init__(
        self,
        described: Described,
        options: Options,
        publishes: bool,
        stats: AshlarStats,
        ranks: int = 1,
        step_tokens: int = sys.maxsize,
    ) -> None:
        """`publishes`: whether missing segments are computed and stored. `step_tokens`: the engine's limit of tokens
        per step."""
        self._described, self._options, self._stats = described, options, stats
        self.publishes, self._ranks, self._step_tokens = publishes, ranks, step_tokens
        self._states = sorted({place.group for place in described.linear})
        self._generation = ""
        self._segments: OrderedDict[bytes, _Cold] = OrderedDict()
        self._unpublished: OrderedDict[bytes, None] = OrderedDict()  # segments whose runs the cache did not keep
        self._running: _Run | None = None
        self._number = 0
        self._reserved = False  # whether the last step left space for a run
        self.serving: Serving | None = None

    def close(self) -> None:
        if self.serving is not None:
            self.serving.close()

    def reset(self, generation: str) -> None:
        """Discards what was found missing with former weights. `generation`: that of the engine's weights."""
        self._segments.clear()
        self._generation = generation

    def add(
        self, token_ids: Sequence[int], lengths: Sequence[int], salt: str, missing: Iterable[int], asked: int = 1
    ) -> list[bytes]:
        """Adds the `missing` segments of a prompt. Returns the names of those that this engine will run alone."""
        names: list[bytes] = []
        if not self.publishes:
            return names
        options = self._options
        for number in missing:
            least = options.seam_head + options.seam_tail + max(1, options.min_segment_tokens)
            if not least <= lengths[number] <= self._step_tokens:
                continue
            begin = sum(lengths[:number])
            tokens: npt.NDArray[np.int32] = np.array(token_ids[begin : begin + lengths[number]], np.int32)
            name = hashlib.sha256(repr((number == 0, salt)).encode() + tokens.tobytes()).digest()
            cold = self._segments.pop(name, None) or _Cold(name, tokens, number == 0, salt)
            if asked > 1 or name not in self._unpublished:  # else it runs again only when idle
                cold.asked += asked
            self._segments[name] = cold
            names.append(name)
        while len(self._segments) > _REMEMBERED:
            self._segments.popitem(last=False)
        return names

    def has_any(self, names: Iterable[bytes]) -> bool:
        """Returns whether one of these segments waits or runs."""
        running = b"" if self._running is None else self._running.name
        return any(name in self._segments or name == running for name in names)

    @property
    def pending(self) -> bool:
        serves = self.serving is not None and self.serving.pending
        return self._running is not None or bool(self._segments) or serves

    def reserve(self, pool: Any) -> int:
        """Call it before each step is scheduled. Returns the number of the step's tokens to leave for a run."""
        cold = self._wanted(False, self._step_tokens) if self._running is None and not self._reserved else None
        self._reserved = cold is not None and self._fits(len(cold.tokens), pool)
        return len(cold.tokens) if cold is not None and self._reserved else 0

    def _wanted(self, idle: bool, most: int) -> _Cold | None:
        """Returns the segment of at most this number of tokens that most requests contained. Unless `idle`, at
        least two requests must contain it."""
        wanted = [cold for cold in self._segments.values() if (idle or cold.asked > 1) and len(cold.tokens) <= most]
        return max(wanted, key=lambda cold: cold.asked, default=None)

    def _blocks(self, tokens: int) -> int:
        return self._described.count(tokens) * len(self._described.key_groups) + len(self._states)

    def _fits(self, tokens: int, pool: Any) -> bool:
        free: int = pool.get_num_free_blocks()
        return free >= 2 * self._blocks(tokens)

    def next(self, idle: bool, pool: Any, scheduled: int = 0) -> Alone | None:
        """Returns a segment to run alone in this step: any segment if the engine is idle, else one that two requests
        contain and that fits into the step.

        `scheduled`: tokens of requests in this step.
        """
        self._count_served()
        if self._running is not None:
            return None
        served = self.serving.take() if self.serving is not None and idle else None
        if served is not None:
            cold = _Cold(b"", served.tokens, served.first, "")
        elif (found := self._wanted(idle, self._step_tokens - scheduled)) is not None:
            cold = found
        else:
            return None
        count, groups = self._described.count(len(cold.tokens)), self._described.key_groups
        fits = self._fits(len(cold.tokens), pool)
        if fits or idle:
            self._segments.pop(cold.name, None)
        if served is not None and self._generation:  # its name does not belong to the new weights
            fits = False
        if not fits:
            self._end_served(served, False)
            return None
        blocks = pool.get_new_blocks(self._blocks(len(cold.tokens)))
        self._number += 1
        self._running = _Run(self._number, cold.name, blocks, served)
        ids = [each.block_id for each in blocks]
        pages = {group: ids[place * count : (place + 1) * count] for place, group in enumerate(groups)}
        states = dict(zip(self._states, ids[count * len(groups) :]))
        return Alone(self._number, cold.tokens, cold.first, cold.salt, pages, states)

    def ran(self, ended: dict[tuple[int, int], int], pool: Any) -> None:
        """`ended`: published segments by number of the run, and rank, or UNAVAILABLE."""
        run = self._running
        if run is None:
            return
        run.published |= {rank: published for (number, rank), published in ended.items() if number == run.number}
        if len(run.published) == self._ranks:
            pool.free_blocks(run.blocks)
            most = max(run.published.values())
            self._stats.add(max(0, most), "published_segments")
            self._end_served(run.served, min(run.published.values()) > 0)
            self._unpublished.pop(run.name, None)
            if most == 0:
                self._unpublished[run.name] = None
            if len(self._unpublished) > _REMEMBERED:
                self._unpublished.popitem(last=False)
            self._running = None

    def _end_served(self, served: Served | None, published: bool) -> None:
        if self.serving is not None and served is not None:
            self.serving.end(served, published)
            self._count_served()

    def _count_served(self) -> None:
        if self.serving is not None:
            for outcome in self.serving.take_outcomes():
                self._stats.add(1, "served_segments", outcome)
