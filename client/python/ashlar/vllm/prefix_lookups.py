# SPDX-License-Identifier: Apache-2.0
"""Lookups of prefixes by the scheduler half of the connector."""

from __future__ import annotations

import time

import numpy as np
from vllm.logger import init_logger

import ashlar
from ashlar.vllm.lookups import await_plan, lookup_wait
from ashlar.vllm.model import Described
from ashlar.vllm.opening import Opening
from ashlar.vllm.options import Options
from ashlar.vllm.requests import Followed, Lookup, Name, Names
from ashlar.vllm.stats import AshlarStats

logger = init_logger("vllm.ashlar")

_PAUSE = 1.0  # seconds without lookups after a late one
_WARN_EVERY = 60.0  # seconds
_MOST_WANTED = 4  # depths inside a prompt that the cache may request


class PrefixLookups:
    """`tokens_per_second`: rate of prefill; 0: unknown."""

    def __init__(
        self, described: Described, options: Options, names: Names, opening: Opening, stats: AshlarStats, least: int
    ) -> None:
        """Hits of fewer than `least` tokens beyond the engine's own are not taken."""
        self._described, self._options, self._names, self._opening = described, options, names, opening
        self._stats, self._least = stats, least
        self.tokens_per_second = options.tokens_per_second
        self._paused_until = self._warn_again = 0.0

    def match(self, followed: Followed, computed: int) -> tuple[int | None, bool]:
        """Returns the number of tokens beyond `computed` that the cache has, and whether they are loaded between steps;
        None: ask again."""
        request = followed.request
        asked = (request.num_tokens, computed)
        if followed.refused or followed.missed == asked or request.skip_reading_prefix_cache:
            return 0, False
        name = self._names.find(followed)
        if name is None:
            if self._names.awaits(followed):
                return None, False
            self._stats.add(1, "lookups", "unnamed")
            followed.missed = asked
            return 0, False
        lookup = self._look_up(followed, name, computed)
        if lookup is None:
            return 0, False
        if lookup.plan is None:
            return None, False
        found = lookup.plan.prefix_tokens
        inside = [step.end for step in lookup.plan.steps if step.capture and step.end < request.num_tokens]
        followed.wanted = inside[-_MOST_WANTED:]
        if found - computed < self._least:
            self._stats.add(1, "lookups", "no_gain" if found > 0 else "miss")
            self.drop(followed)
            followed.missed = asked
            return 0, False
        return found - computed, True

    def drop(self, followed: Followed) -> None:
        if followed.lookup is not None:
            followed.lookup.handle.end()
            followed.lookup = None

    def _look_up(self, followed: Followed, name: Name, computed: int) -> Lookup | None:
        request, lookup = followed.request, followed.lookup
        now = time.monotonic()
        if lookup is not None and lookup.tokens != request.num_tokens:
            self.drop(followed)
            lookup = None
        if lookup is None:
            cache = self._opening.cache
            if cache is None:
                return None
            if now < self._paused_until:
                self._stats.add(1, "lookups", "paused")
                return None
            tokens = np.array(request.all_token_ids, np.int32)
            if (most := self._described.most_tokens) is not None:
                # A lookup finds only prefixes that are shorter than the given tokens.
                tokens = tokens[: computed // self._described.prefix_block * self._described.prefix_block + most + 1]
            handle = cache.start_begin(tokens, media=name.within(len(tokens)), salt=name.salt)
            lookup = followed.lookup = Lookup(handle, name, request.num_tokens, len(tokens), now)
        if lookup.plan is not None:
            return lookup
        wait = lookup_wait(self._options, request.num_tokens - computed, self.tokens_per_second)
        verdict = await_plan(lookup.handle, lookup.since + wait)
        if verdict != ashlar.Verdict.PENDING:
            lookup.plan = lookup.handle.plan
        elif now - lookup.since > self._options.lookup_ms / 1000:
            self._stats.add(1, "lookups", "timed_out")
            self._pause(now)
            self.drop(followed)
            followed.refused = True
            return None
        return lookup

    def _pause(self, now: float) -> None:
        """Pauses lookups, because a slow daemon would also delay the next prompts."""
        self._paused_until = now + _PAUSE
        if now >= self._warn_again:
            self._warn_again = now + _WARN_EVERY
            logger.warning(
                "Ashlar: a lookup took longer than lookup_ms (%d ms): prompts of the next %g s are computed without the "
                "cache; vllm:ashlar_lookups_total counts them as paused", self._options.lookup_ms, _PAUSE,
            )  # fmt: skip
