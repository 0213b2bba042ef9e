# SPDX-License-Identifier: Apache-2.0
"""Segments that this engine runs alone and publishes: those that its prompts lack, and those of other engines.

A segment runs when the engine has no requests, or when a second request has it. Those of other engines come first (see
serving.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
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
    published: dict[int, int] = dataclasses.field(default_factory=dict)  # number of published segments, by rank


class ColdSegments:
    def __init__(
        self, described: Described, options: Options, publishes: bool, stats: AshlarStats, ranks: int = 1
    ) -> None:
        """`publishes`: whether missing segments are computed and stored."""
        self._described, self._options, self._stats = described, options, stats
        self.publishes, self._ranks = publishes, ranks
        self._states = sorted({place.group for place in described.linear})
        self._generation = ""
        self._segments: OrderedDict[bytes, _Cold] = OrderedDict()
        self._unpublished: OrderedDict[bytes, None] = OrderedDict()  # runs that the cache did not keep
        self._running: _Run | None = None
        self._number = 0
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
            if lengths[number] < options.seam_head + options.seam_tail + max(1, options.min_segment_tokens):
                continue
            begin = sum(lengths[:number])
            tokens: npt.NDArray[np.int32] = np.array(token_ids[begin : begin + lengths[number]], np.int32)
            name = hashlib.sha256(repr((number == 0, salt)).encode() + tokens.tobytes()).digest()
            cold = self._segments.pop(name, None) or _Cold(tokens, number == 0, salt)
            if asked > 1 or name not in self._unpublished:  # such a segment runs again only if the engine is idle
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

    def next(self, idle: bool, pool: Any) -> Alone | None:
        """Returns a segment to run alone in this step: any segment if the engine is idle, else one that two requests
        had."""
        self._count_served()
        if self._running is not None:
            return None
        served = self.serving.take() if self.serving is not None and idle else None
        if served is not None:
            name, cold = b"", _Cold(served.tokens, served.first, "")
        else:
            wanted = [(name, cold) for name, cold in self._segments.items() if idle or cold.asked > 1]
            if not wanted:
                return None
            name, cold = max(wanted, key=lambda each: each[1].asked)
        count, groups = self._described.count(len(cold.tokens)), self._described.key_groups
        needed = count * len(groups) + len(self._states)
        fits = pool.get_num_free_blocks() >= 2 * needed
        if fits or idle:
            self._segments.pop(name, None)
        if served is not None and self._generation:  # its name does not belong to the new weights
            fits = False
        if not fits:
            self._end_served(served, False)
            return None
        blocks = pool.get_new_blocks(needed)
        self._number += 1
        self._running = _Run(self._number, name, blocks, served)
        ids = [each.block_id for each in blocks]
        pages = {group: ids[place * count : (place + 1) * count] for place, group in enumerate(groups)}
        states = dict(zip(self._states, ids[count * len(groups) :]))
        return Alone(self._number, cold.tokens, cold.first, cold.salt, pages, states)

    def ran(self, ended: dict[tuple[int, int], int], pool: Any) -> None:
        """`ended`: published segments by number of the run, and rank."""
        run = self._running
        if run is None:
            return
        run.published |= {rank: published for (number, rank), published in ended.items() if number == run.number}
        if len(run.published) == self._ranks:
            pool.free_blocks(run.blocks)
            self._stats.add(max(run.published.values()), "published_segments")
            self._end_served(run.served, all(run.published.values()))
            self._unpublished.pop(run.name, None)
            if not any(run.published.values()):
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
