# SPDX-License-Identifier: Apache-2.0
"""Jumps in vLLM's model runner V2, which counts the computed tokens of each request on the device."""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    """Makes all V2 runners of this process copy the scheduler's counts after jumps. Call it in the worker."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    own = GPUModelRunner.update_requests
    if getattr(own, "moves_for_ashlar", False):
        return

    @functools.wraps(own)
    def update_requests(self: Any, scheduler_output: Any) -> None:
        own(self, scheduler_output)
        if not scheduler_output.has_sync_kv_loads:  # set for each step with jumps
            return
        states, cached = self.req_states, scheduler_output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens):
            index = states.req_id_to_index[name]
            if computed < states.prefill_len.np[index]:  # no drafts yet: the scheduler's number is exact
                states.num_computed_tokens.gpu[index].fill_(computed)

    update_requests.moves_for_ashlar = True  # type: ignore[attr-defined]
    GPUModelRunner.update_requests = update_requests
