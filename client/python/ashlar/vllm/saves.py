# SPDX-License-Identifier: Apache-2.0
"""Saves of a worker: offers the texts of each step to the cache, on a separate thread."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable

import torch
from vllm.logger import init_logger

import ashlar
from ashlar.vllm.caches import EngineCaches, page_tables
from ashlar.vllm.handoffs import Handoff, Handoffs
from ashlar.vllm.messages import Save, StepMetadata, WorkerReport
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options
from ashlar.vllm.order import Mark
from ashlar.vllm.reloads import Seen, StepWeights
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

_POLL = 0.0002  # seconds
_SHUTDOWN = 3.0  # seconds to wait for saves in flight
_RUNNING = 4  # concurrent copies of running states
_COPIED = 64 << 20  # bytes of windows that one call of a save may copy if they are of several depths
_KEPT = ("kept", "already_present", "kept_as_span")


@dataclasses.dataclass
class _Saving:
    save: Save
    mark: Mark | None  # the engine's work up to the step
    seen: Seen | None
    running: list[list[torch.Tensor]] | None = None  # copies of the states that the next step overwrites


class Saves:
    def __init__(
        self,
        described: Described,
        options: Options,
        caches: EngineCaches,
        weights: StepWeights,
        cache: Callable[[], ashlar.Cache | None],
        stats: AshlarStats | None,
    ) -> None:
        """`cache`: returns the open cache. `stats`: counts outcomes; None: this rank does not count."""
        self._described, self._options = described, options
        self._caches, self._weights, self._cache, self._stats = caches, weights, cache, stats
        self._given: queue.Queue[_Saving | Handoff | None] = queue.Queue()
        self._handoffs = Handoffs(options.call_ms)
        self._ended: queue.SimpleQueue[tuple[Save, str]] = queue.SimpleQueue()
        self._running = threading.Semaphore(_RUNNING)
        self._reading = threading.Lock()  # held while the thread reads the engine's caches
        self._readable = False  # the engine's thread writes it, under _reading
        self._thread = threading.Thread(target=self._serve, name="ashlar-save", daemon=True)

    def start(self) -> None:
        """Call it when the caches are registered, and after `suspend`."""
        with self._reading:
            self._readable = True
        if not self._thread.is_alive():
            self._thread.start()

    def suspend(self) -> None:
        """Afterwards nothing reads the engine's caches: texts are not kept."""
        self.wait(_SHUTDOWN)
        with self._reading:  # waits for a save that copies
            self._readable = False

    def give(self, step: StepMetadata) -> None:
        """Takes the texts that this step has computed. The scheduler holds the blocks until the save has ended."""
        if not self._readable:  # the scheduler holds the blocks until this is reported
            for save in step.saves:
                self._ended.put((save, "unavailable"))
            for handoff in step.handoffs:
                self._handoffs.add(None, handoff)
            return
        given = [_Saving(save, None, None) for save in step.saves]
        for saving in given:
            if self._weights.has_adapter(saving.save.adapter):
                self._keep_within_blocks(saving)
                self._copy_running(saving)
        seen = self._weights.look(step) if given else None
        mark = self._caches.order.mark() if given else None  # the copies precede this mark
        for saving in given:
            saving.seen, saving.mark = seen, mark
            if not self._weights.has_adapter(saving.save.adapter):
                self._ended.put((saving.save, "weights_changed"))
            elif saving.save.depths:
                self._given.put(saving)
            else:
                self._ended.put((saving.save, "busy"))
        for handoff in step.handoffs:
            self._given.put(handoff)
        if self._options.wait_for_saves and step.saves:
            self.wait((self._options.call_ms + 100) / 1000)

    def report(self, report: WorkerReport) -> None:
        """Adds the saves that have ended."""
        while not self._ended.empty():
            save, outcome = self._ended.get()
            report.saved[save.number] += 1
            if outcome in _KEPT:
                report.kept[save.number] += 1
            if self._stats is not None:
                self._stats.add(1, "stores", outcome)
        for outcome in self._handoffs.take_outcomes():
            if self._stats is not None:
                self._stats.add(1, "handoffs", outcome)

    def wait(self, seconds: float) -> None:
        """Waits until all given texts are saved."""
        deadline = time.monotonic() + seconds
        while self._given.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(_POLL)

    def close(self) -> None:
        if self._thread.is_alive():
            self.wait(_SHUTDOWN)
            self._given.put(None)
            self._thread.join(timeout=_SHUTDOWN)
        self._handoffs.close()

    def _keep_within_blocks(self, saving: _Saving) -> None:
        """Omits depths inside blocks if the engine's keys cannot be split there."""
        if not self._caches.within_blocks:
            depths = [depth for depth in saving.save.depths if depth % self._described.block == 0]
            saving.save = dataclasses.replace(saving.save, depths=depths, running=False)

    def _copy_running(self, saving: _Saving) -> None:
        """Copies, in the order of the engine's work, the states at a save's last depth that the next step overwrites.

        Omits that depth if too many copies are in flight, or if there is no memory for one.
        """
        save = saving.save
        if not save.running or not self._caches.states:
            return
        if self._running.acquire(blocking=False):
            try:
                found = self._caches.parts(save, save.depths[-1])
                saving.running = [[part.clone() for part in parts] for parts in found]
                return
            except Exception as error:  # for example no device memory
                self._running.release()
                logger.warning("Ashlar: cannot copy states: %s", error)
        saving.save = dataclasses.replace(save, depths=save.depths[:-1], running=False)

    # ---- the thread

    def _serve(self) -> None:
        unavailable_until = 0.0
        while (given := self._given.get()) is not None:
            if isinstance(given, Handoff):
                self._handoffs.add(self._cache(), given)
                self._given.task_done()
                continue
            save, outcome = given.save, "unavailable"
            try:
                cache = self._cache()
                if cache is not None and time.monotonic() >= unavailable_until:
                    if given.mark is not None:
                        given.mark.synchronize()  # the daemon reads blocks without waiting for the engine's streams
                    current = self._weights.are_current(given.seen, self._caches.order)
                    outcome = self.commit(cache, given) if current else "weights_changed"
                    if outcome == "unavailable":  # a hung daemon would delay the next saves as well
                        unavailable_until = time.monotonic() + self._options.call_ms / 1000
            except Exception as error:
                logger.warning("Ashlar: a save failed, and its text is not stored: %s", error)
            if given.running is not None:
                given.running = None
                self._running.release()
            self._ended.put((save, outcome))
            self._given.task_done()

    def commit(self, cache: ashlar.Cache, saving: _Saving) -> str:
        save = saving.save
        size = sum(window.bytes for window in self._caches.windows)
        together = max(1, _COPIED // size) if size > 0 else len(save.depths)
        outcome = "unavailable"
        depths: list[int] = []
        for depth in save.depths:
            depths.append(depth)
            # A depth inside a block has separate rows there, which later depths must not read.
            if len(depths) < together and depth % self._described.block == 0 and depth != save.depths[-1]:
                continue
            outcome, depths = self._commit_depths(cache, saving, depths), []
            if outcome == "unavailable":
                break
        return outcome

    def _commit_depths(self, cache: ashlar.Cache, saving: _Saving, depths: list[int]) -> str:
        save = saving.save
        tables, tokens = self._described.pages(save.blocks, depths[-1]), save.tokens[: depths[-1]]
        staging, name = self._caches.staging, (save.salt, save.adapter, tuple(save.media))
        staged: list[int] = []
        known, read = 0, False
        if staging is not None and tables:
            taken = staging.take_for_save(name, tokens, self._options.call_ms / 1000)
            if taken is None:
                return "busy"
            staged, known = taken
        try:
            with self._reading:
                if not self._readable:
                    return "unavailable"
                checkpoints = self._caches.read(save, saving.running, depths, tables, staged, known)
            read = True
            if staged:
                tables = [staged] * len(tables)
            media = [medium for medium in save.media if medium[0] < len(tokens)]
            table = page_tables(tables)
            return cache.commit(
                tokens, checkpoints, prompt_tokens=save.prompt, page_table=table, media=media, salt=save.salt
            )[-1]
        finally:
            if staging is not None and read:
                staging.keep(name, tokens, staged)
            elif staging is not None:
                staging.give(staged)
