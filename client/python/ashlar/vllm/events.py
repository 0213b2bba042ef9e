# SPDX-License-Identifier: Apache-2.0
"""Events for those who route by what caches hold (vLLM's `kv_events_config`)."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

MEDIUM = "ASHLAR"


def stored_events(request: Any, tokens: int, block: int) -> list[Any]:
    """That the blocks of a request's first tokens are in the node's cache, by the engine's own hashes."""
    hashes = list(request.block_hashes[: tokens // block])
    if not hashes:
        return []
    # As the engine's own events have it: the first block's hash takes the salt in.
    salted = [(request.cache_salt,), *[None] * (len(hashes) - 1)] if request.cache_salt else None
    return [
        BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes],
            parent_block_hash=None,
            token_ids=list(request.all_token_ids[: len(hashes) * block]),
            block_size=block,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=salted,
        )
    ]
