# SPDX-License-Identifier: Apache-2.0
"""Assembles a prompt whose cached segments stay in shared pages, where all requests read one copy (MEPIC).

Its linear layers, and the tokens between segments, are computed as for any prompt. The prompt's SharedCache keeps the
pages: they return to the daemon when the last copy of that cache is destroyed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ashlar._ashlar import Verdict
from ashlar.prompt import Prompt
from ashlar.request import PageShortage, Request, Step
from ashlar.transformers.assembly import Assembler, PromptRun, Restart, planned_part
from ashlar.transformers.caches import cache_class
from ashlar.transformers.model import LinearPlace
from ashlar.transformers.model_cache import Fault, SharedPages, calling
from ashlar.transformers.shared_cache import SharedCache

_UNANSWERED = 3  # requests for pages without an answer, after which the pages are opened again


class SharedAssembler(Assembler):
    """As Assembler, but cached segments are not copied. `copies`: runs the model, and publishes segments from its own
    pages."""

    captures = False

    def __init__(self, copies: Assembler) -> None:
        super().__init__(copies.model, copies.cache, copies.forward, copies.tuple_method)
        self.copies = copies
        self._unanswered = 0  # consecutive requests for pages

    @property
    def pages(self) -> SharedPages:
        assert self.cache.shared is not None
        return self.cache.shared

    def run(self, cache: DynamicCache, tokens: np.ndarray[Any, Any], first: int, keep: int = 0) -> Any:
        return self.copies.run(cache, tokens, first, keep)

    def compose(self, request: Request, place: LinearPlace, step: Step, state: torch.Tensor) -> None:
        self.copies.compose(request, place, step, state)

    def assemble(self, prompt: Prompt, upto: int, keep: int, reserved: int = 0) -> PromptRun:
        """As Assembler.assemble. Fault: the segments cannot be shared, and their pages are released."""
        began, self.copies.model_seconds, published = time.perf_counter(), 0.0, 0
        planned, lengths = planned_part(prompt, keep)
        request = calling(self.pages.begin, planned, lengths, salt=prompt.salt)
        if any(segment.miss is not None for segment in request.plan.segments):
            request.end()
            published = self.copies.publish_missing(prompt, keep)
            request = calling(self.pages.begin, planned, lengths, salt=prompt.salt)
        try:
            if (lacks := self._admit(request)) is not None:
                raise Fault(
                    f"shared_tokens: {lacks.needed} more pages are needed; {lacks.free} are free and "
                    f"{lacks.reclaimable} can be reclaimed"
                )
            for _ in range(16):  # each restart takes less from the cache
                plan, followed = request.plan, None
                with contextlib.suppress(Restart):
                    followed = self._follow(request, plan, np.zeros(0, np.int32), prompt.tokens, upto, keep)
                verdict = calling(request.finish)
                if verdict == Verdict.OK and followed is not None:
                    saved, reached = self.copies.seconds_saved(plan, began), max(upto, plan.steps[-1].begin)
                    return PromptRun(
                        prompt.tokens, np.zeros(0, np.int32), request, plan, *followed, published, saved, reached,
                        plan.cached_tokens,
                    )  # fmt: skip
            raise Fault("the plan was restarted 16 times")
        except BaseException:
            request.end()
            raise

    def _admit(self, request: Request) -> PageShortage | None:
        """Gets the segments' pages. Computed keys and values are in the SharedCache and need none."""
        try:
            lacks = request.admit(0)
        except ConnectionError as error:
            self._unanswered += 1
            # A daemon that was restarted allocates no pages in memory that an earlier one has hosted.
            if self._unanswered >= _UNANSWERED and self.pages.connected:
                self._unanswered = 0
                self.cache.renew_shared()
            raise Fault(f"shared_tokens: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise Fault(f"shared_tokens: {error}") from error
        self._unanswered = 0
        return lacks

    def new_cache(self, request: Request) -> DynamicCache:
        cache: DynamicCache = cache_class(self.model, SharedCache)(
            self.config, self.pages.model, self.pages.shape, request
        )
        return cache

    def take_rows(self, request: Request, step: Step, table: np.ndarray[Any, Any], cache: DynamicCache) -> None:
        assert step.segment is not None  # the first segment is the only prefix
        place, start = request.shared_segments[step.segment], request.plan.segments[step.segment].start
        first = place.first_slot - start  # slot of a token minus its position
        spans = list(self._runs(place.pages, first + step.begin, first + step.end))
        for attention in self.pages.shape.attention:
            self.must(calling(request.wait_layer, attention.index))
            shared = cache.layers[attention.layer].shared
            for page, pages, begin, end in spans:
                keys, values = (rows[page : page + pages] for rows in self.pages.rows[attention.index])
                # Views: the tokens of consecutive pages are at equal distances.
                shared.add(*(rows.view(-1, *rows.shape[2:])[begin:end] for rows in (keys, values)), -first)
                shared.pages |= {key.data_ptr(): key.nbytes + value.nbytes for key, value in zip(keys, values)}

    def _runs(self, table: list[int], begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields the runs of consecutive pages with slots [begin, end): first page, number of pages, and the first and
        last slot, counted from the first page."""
        size = self.pages.model.page_tokens
        at, last = begin // size, -(-end // size)
        while at < last:
            after = at + 1
            while after < last and table[after] == table[after - 1] + 1:
                after += 1
            yield table[at], after - at, max(begin - at * size, 0), min(end, after * size) - at * size
            at = after
