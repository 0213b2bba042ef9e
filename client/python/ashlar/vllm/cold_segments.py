# SPDX-License-Identifier: Apache-2.0
"""Segments that this engine runs alone and publishes: those that its prompts lack, and those of other engines.

To run a segment alone means to compute it in a forward pass of its own, from a zero state, without a request. The
engine runs a segment when it has no requests, or when a second request contains the segment. Segments of other engines
come first (see serving.py). A run's tokens count in the step's budget (`max_num_batched_tokens`), so other requests
wait no longer than for a prefill chunk. If steps are full, every second step leaves space for a segment that two
requests contain.

A segment that does not fit into a step runs in several parts, one per step, like the chunks of a prefill. A full step
leaves half of its tokens to a part. Between parts, the run keeps its blocks. It is abandoned if requests need these, and
when the engine's weights or caches are reset. Nothing is stored before the last part.

An idle engine also runs segments that only one prompt contained, so that a document's first repetition hits. Such a run
delays no request. The daemon, which knows the reuse of all engines, decides whether a segment is worth its bytes: it
evicts by expected uses, and by default writes a segment to the disk after its second use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from ashlar.vllm.messages import CONTINUES, NO_SPACE, Alone
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options
from ashlar.vllm.segments import segment_tokens
from ashlar.vllm.serving import Served, Serving
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

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
    cold: _Cold
    blocks: list[Any]  # of the engine; empty if they were freed before the end
    pages: dict[int, list[int]]  # as of Alone
    states: dict[int, int]
    served: Served | None
    end: int = 0  # the workers were sent the tokens before it
    computing: bool = False  # whether workers have not answered for the last part
    answers: dict[int, int] = dataclasses.field(default_factory=dict)  # as of WorkerReport.ran, by rank

    @property
    def complete(self) -> bool:
        """Returns whether the workers were sent all parts."""
        return self.end == len(self.cold.tokens)


class ColdSegments:
    def __init__(
        self,
        described: Described,
        options: Options,
        publishes: bool,
        stats: AshlarStats,
        ranks: int = 1,
        step_tokens: int = sys.maxsize,
        model_tokens: int = sys.maxsize,
    ) -> None:
        """`publishes`: whether missing segments are computed and stored. `step_tokens`, `model_tokens`: the engine's
        limits of tokens per step and per prompt."""
        self._most_tokens = segment_tokens(described, options) - 2  # a segment is stored between two more tokens
        self._model_tokens = model_tokens
        self._described, self._options, self._stats = described, options, stats
        self.publishes, self._ranks, self._step_tokens = publishes, ranks, step_tokens
        self._states = sorted({place.group for place in described.linear})
        self._generation = ""
        self._segments: OrderedDict[bytes, _Cold] = OrderedDict()
        # Segments whose runs the cache declined, or which found too few free pages.
        self._unpublished: OrderedDict[bytes, None] = OrderedDict()
        self._running: _Run | None = None
        self._number = 0
        self._abandoned = False  # whether workers may keep parts of a run that has ended
        self._reserved = False  # whether the last step left space for a run
        self.serving: Serving | None = None

    def close(self) -> None:
        if self.serving is not None:
            self.serving.close()

    def reset(self, pool: Any, generation: str) -> None:
        """Discards what was found missing or computed with former weights. `generation`: that of the engine's
        weights."""
        self.abandon(pool)
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
            if not least <= lengths[number] <= self._most_tokens:
                continue
            begin = sum(lengths[:number])
            tokens: npt.NDArray[np.int32] = np.array(token_ids[begin : begin + lengths[number]], np.int32)
            name = hashlib.sha256(repr((number == 0, salt)).encode() + tokens.tobytes()).digest()
            names.append(name)
            if self._running is not None and self._running.cold.name == name:
                self._running.cold.asked += asked
                continue
            cold = self._segments.pop(name, None) or _Cold(name, tokens, number == 0, salt)
            if asked > 1 or name not in self._unpublished:  # else it runs again only when idle
                cold.asked += asked
            self._segments[name] = cold
        while len(self._segments) > _REMEMBERED:
            self._segments.popitem(last=False)
        return names

    def has_any(self, names: Iterable[bytes]) -> bool:
        """Returns whether one of these segments waits or runs."""
        running = b"" if self._running is None else self._running.cold.name
        return any(name in self._segments or name == running for name in names)

    @property
    def pending(self) -> bool:
        serves = self.serving is not None and self.serving.pending
        return self._running is not None or bool(self._segments) or self._abandoned or serves

    def tell(self) -> int:
        """Returns the number of the run whose computed parts the workers keep; 0: none. Call it for each step."""
        self._abandoned = False
        return 0 if self._running is None else self._running.number

    def reserve(self, pool: Any) -> int:
        """Call it before each step is scheduled. Returns the number of the step's tokens to leave for a run."""
        run, tokens = self._running, 0
        if not self._reserved and (run is None or not run.computing):
            if run is not None and run.cold.asked > 1:
                tokens = self._least(run.cold, run.end)
            elif (cold := self._wanted(False, self._step_tokens)) is not None and self._fits(len(cold.tokens), pool):
                tokens = self._least(cold)
        self._reserved = tokens > 0
        return tokens

    def _least(self, cold: _Cold, begin: int = 0) -> int:
        """Returns the least number of tokens of the part that begins here, beside requests."""
        left = len(cold.tokens) - begin
        return left if len(cold.tokens) <= self._step_tokens else min(left, -(-self._step_tokens // 2))

    def _wanted(self, idle: bool, most: int) -> _Cold | None:
        """Returns the segment that most requests contained, whose first part fits into this number of tokens. Unless
        `idle`, at least two requests must contain it."""
        wanted = [cold for cold in self._segments.values() if (idle or cold.asked > 1) and self._least(cold) <= most]
        return max(wanted, key=lambda cold: cold.asked, default=None)

    def _blocks(self, tokens: int) -> int:
        return self._described.count(tokens) * len(self._described.key_groups) + len(self._states)

    def _fits(self, tokens: int, pool: Any) -> bool:
        free: int = pool.get_num_free_blocks()
        return free >= 2 * self._blocks(tokens)

    def _refusal(self, tokens: int, pool: Any) -> str:
        """Returns why this engine can never run a segment of this number of tokens; empty if it can."""
        if tokens > self._model_tokens:
            return f"it has {tokens} tokens; max_model_len is {self._model_tokens}"
        if tokens > self._most_tokens:
            return f"it has {tokens} tokens; segment_tokens allows {self._most_tokens}"
        blocks, all_blocks = self._blocks(tokens), pool.num_gpu_blocks - 1  # block 0 is never free
        if 2 * blocks > all_blocks:
            return f"its {tokens} tokens take {blocks} blocks, more than half of the engine's {all_blocks}"
        return ""

    def next(self, idle: bool, pool: Any, scheduled: int = 0) -> Alone | None:
        """Returns a part of a segment to run alone in this step: of any segment if the engine is idle, else of one that
        two requests contain and that fits into the step.

        `scheduled`: tokens of requests in this step.
        """
        self._count_served()
        space = self._step_tokens - scheduled
        run = self._running
        if run is not None and not run.computing and not self._may_continue(run, idle, space):
            self.abandon(pool)
        if self._running is None:
            self._running = self._start(idle, pool, space)
        run = self._running
        if run is None or run.computing or not (idle or run.cold.asked > 1) or self._least(run.cold, run.end) > space:
            return None
        left = len(run.cold.tokens) - run.end
        begin, run.computing = run.end, True
        run.end += -(-left // -(-left // space))  # parts of similar lengths
        cold = run.cold
        return Alone(run.number, cold.tokens, begin, run.end, cold.first, cold.salt, run.pages, run.states)

    def _start(self, idle: bool, pool: Any, space: int) -> _Run | None:
        """Returns the run of the next segment."""
        served = self.serving.take() if self.serving is not None and idle else None
        if served is not None:
            cold = _Cold(b"", served.tokens, served.first, "")
        elif (found := self._wanted(idle, space)) is not None:
            cold = found
        else:
            return None
        count, groups = self._described.count(len(cold.tokens)), self._described.key_groups
        fits = self._fits(len(cold.tokens), pool)
        if fits or idle:
            self._segments.pop(cold.name, None)
        if served is not None and (reason := self._refusal(len(cold.tokens), pool)):
            logger.warning("Ashlar: a segment of another engine or of ashlarctl warm is refused: %s", reason)
            served.refused, fits = True, False
        if served is not None and self._generation:  # its name does not belong to the new weights
            fits = False
        if not fits:
            self._end_served(served, False)
            return None
        blocks = pool.get_new_blocks(self._blocks(len(cold.tokens)))
        self._number += 1
        ids = [each.block_id for each in blocks]
        pages = {group: ids[place * count : (place + 1) * count] for place, group in enumerate(groups)}
        states = dict(zip(self._states, ids[count * len(groups) :]))
        return _Run(self._number, cold, blocks, pages, states, served)

    def _may_continue(self, run: _Run, idle: bool, space: int) -> bool:
        """Returns whether a run between two parts is still needed, and does not block one that requests need more."""
        if run.served is not None and (self.serving is None or not self.serving.awaits(run.served)):
            return False
        return idle or run.cold.asked > 1 or self._wanted(False, space) is None

    def abandon(self, pool: Any) -> bool:
        """Ends the run, unless its last part is being computed. Returns whether that freed blocks.

        An abandoned segment runs again when the engine is idle. Workers write to the blocks before any work of later
        steps.
        """
        run = self._running
        if run is None or not run.blocks:
            return False
        pool.free_blocks(run.blocks)
        run.blocks = []
        if not (run.computing and run.complete):
            self._running, self._abandoned = None, True
            if run.served is None:
                run.cold.asked = min(run.cold.asked, 1)
                self._segments[run.cold.name] = run.cold
            self._end_served(run.served, False)
        return True

    def ran(self, ended: dict[tuple[int, int], int], pool: Any) -> None:
        """`ended`: as of WorkerReport.ran."""
        run = self._running
        if run is None:
            return
        run.answers |= {rank: answer for (number, rank), answer in ended.items() if number == run.number}
        if len(run.answers) < self._ranks:
            return
        answers, run.answers, run.computing = run.answers.values(), {}, False
        if not run.complete and all(answer == CONTINUES for answer in answers):
            if run.served is not None:
                run.served.since = time.monotonic()
            return
        pool.free_blocks(run.blocks)
        most = max(answers)
        if NO_SPACE in answers:  # a hit needs all ranks
            self._stats.add(1, "dropped_segments")
        else:
            self._stats.add(max(0, most), "published_segments")
        self._end_served(run.served, min(answers) > 0)
        self._unpublished.pop(run.cold.name, None)
        if most == 0 or NO_SPACE in answers:
            self._unpublished[run.cold.name] = None
        if len(self._unpublished) > _REMEMBERED:
            self._unpublished.popitem(last=False)
        self._running, self._abandoned = None, CONTINUES in answers

    def _end_served(self, served: Served | None, published: bool) -> None:
        if self.serving is not None and served is not None:
            self.serving.end(served, published)
            self._count_served()

    def _count_served(self) -> None:
        if self.serving is not None:
            for outcome in self.serving.take_outcomes():
                self._stats.add(1, "served_segments", outcome)
