# SPDX-License-Identifier: Apache-2.0
"""Prefill steps of hybrids that end where the cache wants a state (option `checkpoint_tokens`).

vLLM's scheduler cuts such steps at the ends of blocks in one method, which may also end them inside a block. What it
returns is made smaller here, never larger: as if the step had room for fewer tokens.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


def install() -> None:
    """For all schedulers of this process whose connector has `prefill_end`."""
    own = Scheduler._mamba_block_aligned_split
    if getattr(own, "stops_for_ashlar", False):  # a wrapper around this one has the mark, too
        return

    @functools.wraps(own)
    def split(self: Any, request: Any, tokens: int, local: int = 0, external: int = 0) -> int:
        count: int = own(self, request, tokens, local, external)
        prefill_end = getattr(self.connector, "prefill_end", None)
        start = request.num_computed_tokens + local + external
        if prefill_end is None or count <= 0 or start >= request.num_prompt_tokens:
            return count
        end = prefill_end(request, start, start + count)
        return end - start if start < end < start + count else count

    split.stops_for_ashlar = True  # type: ignore[attr-defined]
    Scheduler._mamba_block_aligned_split = split
