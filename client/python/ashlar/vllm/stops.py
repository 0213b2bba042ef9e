# SPDX-License-Identifier: Apache-2.0
"""Ends prefill steps where the cache requests a state (option `checkpoint_tokens`) or where a jump follows (segments).

In one method, vLLM's scheduler ends the prefill steps of hybrids at block ends; it may also end them inside a block.
The wrapper here only makes the returned step shorter, as if fewer tokens fitted into it. A request at the start of a
jump is moved to the jump's end there, before blocks are allocated for the step. If a segment runs alone in a step (see
cold_segments.py), the step has fewer tokens for requests. A run that is not complete yields its blocks to requests for
which no other blocks are free, and to a reset of the engine's own cache.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


def install() -> None:
    """Wraps all schedulers of this process whose connector, or one that it contains, has `prefill_end` and `leap`."""
    own = Scheduler._mamba_block_aligned_split
    if getattr(own, "stops_for_ashlar", False):  # a wrapper around this one also has the mark
        return

    @functools.wraps(own)
    def split(self: Any, request: Any, tokens: int, local: int = 0, external: int = 0) -> int:
        each = next((each for each in _connectors(self.connector) if hasattr(each, "prefill_end")), None)
        if each is None or request.num_computed_tokens + local + external >= request.num_prompt_tokens:
            return int(own(self, request, tokens, local, external)) if self.has_mamba_layers else tokens
        running = request.status == RequestStatus.RUNNING
        if running:
            count = each.leap(request, tokens, self.kv_cache_manager.coordinator.single_type_managers)
            if count is not None:
                return int(count)
            tokens = min(tokens, max(1, request.num_tokens - request.num_computed_tokens))
        start = request.num_computed_tokens + local + external
        stop = None if running else each.next_stop(request, start)
        if stop is not None and stop <= start + tokens:
            block = self.cache_config.block_size
            # A state inside a block only continues to the block's end.
            return int(min(stop, (start // block + 1) * block if start % block else stop) - start)
        if not self.has_mamba_layers:
            return tokens
        count = int(own(self, request, tokens, local, external))
        if count <= 0 or start >= request.num_prompt_tokens:
            return count
        end = each.prefill_end(request, start, start + count)
        return end - start if start < end < start + count else count

    split.stops_for_ashlar = True  # type: ignore[attr-defined]
    Scheduler._mamba_block_aligned_split = split
    own_schedule = Scheduler.schedule

    @functools.wraps(own_schedule)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(getattr(each, "jumps", False) for each in _connectors(self.connector)):
            self.need_mamba_block_aligned_split = True  # models without states also jump
        limit = self.max_num_scheduled_tokens
        reserved = sum(
            each.reserved_tokens() for each in _connectors(self.connector) if hasattr(each, "reserved_tokens")
        )
        self.max_num_scheduled_tokens = limit - reserved
        try:
            with _more_blocks(self):
                return own_schedule(self, *args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = limit

    Scheduler.schedule = schedule
    own_reset = Scheduler.reset_prefix_cache

    @functools.wraps(own_reset)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> bool:
        _yield_blocks(self)
        return bool(own_reset(self, *args, **kwargs))

    Scheduler.reset_prefix_cache = reset_prefix_cache


@contextlib.contextmanager
def _more_blocks(scheduler: Any) -> Iterator[None]:
    """Within the block, a request that gets no blocks gets those of a segment's run."""
    manager = scheduler.kv_cache_manager
    own = manager.allocate_slots

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return own(*args, **kwargs) if found is None and _yield_blocks(scheduler) else found

    manager.allocate_slots = allocate_slots
    try:
        yield
    finally:
        del manager.allocate_slots


def _yield_blocks(scheduler: Any) -> bool:
    return any([each.yield_blocks() for each in _connectors(scheduler.connector) if hasattr(each, "yield_blocks")])


def _connectors(connector: Any) -> list[Any]:
    """Returns the engine's connector, or the connectors that it contains."""
    return getattr(connector, "_connectors", [connector])
