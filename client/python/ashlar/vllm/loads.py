# SPDX-License-Identifier: Apache-2.0
"""Loads of a worker: lands plans in the engine's blocks, directly or through staging pages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from vllm.logger import init_logger

import ashlar
from ashlar.vllm.caches import EngineCaches, page_tables
from ashlar.vllm.messages import Load, StepMetadata, WorkerReport
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options
from ashlar.vllm.order import Copies, Mark
from ashlar.vllm.pace import Pace
from ashlar.vllm.reloads import Seen, StepWeights
from ashlar.vllm.staging import Staging
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

_NULL_BLOCK = 0
# Seconds for a load: the minimum, and the default if the engine's pace is unknown.
_LEAST_PATIENCE, _USUAL_PATIENCE = 2.0, 5.0


@dataclasses.dataclass
class _Landing:
    load: Load
    since: float
    mark: Mark | None  # the engine's earlier work, which may still use its blocks; None: it has ended
    seen: Seen | None
    begun: bool = False
    handle: ashlar.Request | None = None  # None: not started, or could not start
    staged: list[int] = dataclasses.field(default_factory=list)  # staging pages of the table's last blocks
    copies: Copies | None = None  # copies into the engine's blocks; None: not started


class Loads:
    """The loads of a worker. The engine's thread calls all methods."""

    def __init__(
        self,
        described: Described,
        options: Options,
        caches: EngineCaches,
        weights: StepWeights,
        cache: Callable[[], ashlar.Cache | None],
        pace: Pace,
        stats: AshlarStats | None,
    ) -> None:
        """`cache`: returns the open cache. `stats`: counts outcomes; None: this rank does not count."""
        self._described, self._options = described, options
        self._caches, self._weights, self._cache, self._pace, self._stats = caches, weights, cache, pace, stats
        self._landings: list[_Landing] = []
        self._unresolved: list[_Landing] = []  # landings whose blocks or staging pages the daemon may still write
        self._report = WorkerReport()

    @property
    def busy(self) -> bool:
        """Returns whether a load has not ended."""
        return bool(self._landings)

    def start(self, step: StepMetadata) -> None:
        if not step.loads:
            return
        seen, mark = self._weights.look(step), self._caches.order.mark()
        self._landings += [_Landing(load, time.monotonic(), mark, seen) for load in step.loads]
        self._begin()

    def poll(self) -> dict[str, bool]:
        """Returns the requests whose loads have ended since the last call, and whether each is complete."""
        ended: dict[str, bool] = {}
        self._begin()
        for landing in list(self._landings):
            done = self._poll(landing)
            if done is not None:
                self._landings.remove(landing)
                ended[landing.load.request] = done
                self._count(landing, done)
        return ended

    def collect_quiesced(self) -> None:
        """Ends the abandoned landings for which the daemon no longer writes."""
        for landing in list(self._unresolved):
            assert landing.handle is not None
            if landing.handle.poll_quiesced() != ashlar.Verdict.PENDING:
                self._unresolved.remove(landing)
                self._resolve(landing)

    def suspend(self) -> None:
        """Ends all loads. Afterwards nothing lands in the engine's blocks, so their memory may be released."""
        for landing in self._landings:  # usually none, because the engine has drained
            landing.begun = True
            self._end_landing(landing)
        for landing in self._unresolved:
            self._resolve(landing)
        self._unresolved = []

    def take_report(self) -> WorkerReport | None:
        """Returns what has happened since the last call."""
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        for landing in self._landings + self._unresolved:
            self._end_landing(landing)
        self._landings, self._unresolved = [], []

    # ---- starting

    def _begin(self) -> None:
        """Starts the loads whose blocks the engine no longer uses. Loads get staging pages in their order."""
        staging = self._caches.staging
        for landing in self._landings:
            if landing.begun:
                continue
            load = landing.load
            try:
                if landing.mark is not None and not landing.mark.query():
                    continue
                cache = self._cache() if load.plan else None
                if cache is not None and staging is not None and not self._take_pages(staging, landing):
                    break
                landing.begun = True
                current = self._weights.has_adapter(load.adapter) and cache is not None
                if not current or not self._weights.are_current(landing.seen, self._caches.order):
                    continue
                assert cache is not None
                tables = self._staged_tables(landing) if staging is not None else self._mapped_tables(load)
                landing.handle = cache.land(load.plan, page_tables(tables), present_tokens=load.present, wait=False)
            except Exception as error:  # after any error the request is computed instead
                landing.begun = True
                logger.warning("Ashlar: cannot start a load: %s", error)

    def _mapped_tables(self, load: Load) -> list[list[int]]:
        """Returns the engine's blocks, by group of layers."""
        tables = self._described.pages(load.blocks, load.tokens)
        held = load.present // self._described.block
        for group, table in enumerate(tables):
            # Running requests share these blocks: what lands there goes to the block that the engine never reads.
            spare = load.spare[group] if load.spare else []
            table[:held] = [_NULL_BLOCK] * (held - len(spare)) + spare
            table += [table[-1]] * (load.table - len(table))  # nothing lands after the prefix
        return tables

    def _take_pages(self, staging: Staging, landing: _Landing) -> bool:
        """Takes a page for each block in which something lands. False: too few are free. ValueError: the load needs
        more pages than there are."""
        described, load = self._described, landing.load
        if not described.attention:
            return True
        first = load.present // described.prefix_block * described.prefix_block // described.block
        count = described.count(load.tokens) - first
        if count > staging.pages:
            raise ValueError(
                f"staging_bytes: {load.tokens} tokens need {count} pages; expected at most {staging.pages}"
            )
        taken = staging.take(count)
        landing.staged = taken or []
        return taken is not None

    def _staged_tables(self, landing: _Landing) -> list[list[int]]:
        """One table for all groups: every layer has its own part of a page. Nothing lands in the entries before and
        after the load's pages, so they repeat its first page."""
        described, load, staged = self._described, landing.load, landing.staged
        if not staged:
            return []
        before = described.count(load.tokens) - len(staged)
        table = staged[:1] * before + staged
        table += staged[:1] * (load.table - len(table))
        return [table] * len(described.attention_groups)

    # ---- ending

    def _poll(self, landing: _Landing) -> bool | None:
        """Returns whether the load is complete; None: not yet."""
        try:
            return self._advance(landing)
        except Exception as error:
            logger.warning("Ashlar: a load failed, and the engine recomputes its tokens: %s", error)
            return self._leave(landing)

    def _advance(self, landing: _Landing) -> bool | None:
        handle, load = landing.handle, landing.load
        if landing.copies is not None:
            return self._complete(landing) if landing.copies.ended() else None
        verdict = ashlar.Verdict.PENDING
        if landing.begun:
            if handle is None:
                return self._leave(landing)
            verdict = handle.poll_plan()
            if verdict == ashlar.Verdict.OK:
                verdict = handle.poll_finish()
        if verdict == ashlar.Verdict.PENDING:
            late = time.monotonic() - landing.since > self._patience(load)
            return self._leave(landing) if late else None
        assert handle is not None
        if verdict != ashlar.Verdict.OK or handle.plan.prefix_tokens != load.tokens:
            return self._leave(landing)
        copies = self._caches.fill(handle, load, landing.staged)
        if copies is None:
            return self._leave(landing)
        if self._caches.staging is not None:
            landing.copies = copies
        return self._complete(landing) if landing.copies is None or copies.ended() else None

    def _complete(self, landing: _Landing) -> bool:
        assert landing.handle is not None
        landing.handle.end()
        if self._caches.staging is not None:
            self._caches.staging.give(landing.staged)
        return True

    def _patience(self, load: Load) -> float:
        """Returns the seconds after which a load is abandoned: as long as computing its tokens would take."""
        options, computing = self._options, (load.tokens - load.present) * self._pace.seconds_per_token
        longest = (2 * options.call_ms + options.land_ms + options.quiet_ms) / 1000
        return min(longest, max(_LEAST_PATIENCE, computing or _USUAL_PATIENCE))

    def _leave(self, landing: _Landing) -> bool:
        """Abandons a landing. Blocks that the daemon may still write to are not used until they are quiesced."""
        handle, name = landing.handle, landing.load.request
        self._report.failed[name] += 1
        if handle is not None:
            handle.cancel()
            if handle.poll_quiesced() != ashlar.Verdict.OK:
                self._unresolved.append(landing)
                if self._caches.staging is None:
                    self._report.unresolved[name] += 1
                return False
        self._end_landing(landing)
        return False

    def _resolve(self, landing: _Landing) -> None:
        if self._caches.staging is None:
            self._report.quiesced[landing.load.request] += 1
        self._end_landing(landing)

    def _end_landing(self, landing: _Landing) -> None:
        """Ends a landing to which the daemon no longer writes, or whose session ends next."""
        if landing.copies is not None:
            landing.copies.wait()
        if landing.handle is not None:
            landing.handle.end()
            landing.handle = None
        if self._caches.staging is not None:
            self._caches.staging.give(landing.staged)
            landing.staged = []

    def _count(self, landing: _Landing, done: bool) -> None:
        if self._stats is None:
            return
        load, seconds = landing.load, time.monotonic() - landing.since
        self._stats.add(seconds, "load_seconds")
        if not done:
            self._stats.add(1, "load_failures")
            return
        kind = "states_and_keys" if self._caches.states else "keys"
        tokens = load.tokens - load.present
        self._stats.add(1, "hits", load.tier, kind)
        self._stats.add(tokens, "saved_tokens", load.tier, kind)
        self._stats.add(self._pace.saved(tokens, seconds), "saved_seconds")
