# SPDX-License-Identifier: Apache-2.0
"""Events for routers that route requests by cache contents (vLLM's `kv_events_config`)."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

MEDIUM = "ASHLAR"


def stored_events(request: Any, tokens: int, block: int) -> list[Any]:
    """Returns events that say that the blocks of a request's first tokens are in the node's cache, by the engine's own
    hashes."""
    hashes = list(request.block_hashes[: tokens // block])
    if not hashes:
        return []
    # As in the engine's own events: what each block's hash includes besides tokens.
    extra, medium = [], 0
    for begin in range(0, len(hashes) * block, block):
        keys, medium = generate_block_hash_extra_keys(request, begin, begin + block, medium)
        extra.append(keys)
    adapter = request.lora_request
    return [
        BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes],
            parent_block_hash=None,
            token_ids=list(request.all_token_ids[: len(hashes) * block]),
            block_size=block,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys(extra) if any(extra) else None,
        )
    ]
