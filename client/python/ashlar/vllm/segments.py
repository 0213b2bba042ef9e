"""Prompts that say where their segments end, and what is decided of them without the cache.

A request declares segments in its `kv_transfer_params`: {"ashlar_segments": [lengths, from position 0 on]}. Its states
and keys are composed, so nothing of it may be taken for exact: neither by the engine's own prefix cache, whose blocks of
such a request get names of their own, nor by Ashlar's, which is not offered any of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PARAMETER = "ashlar_segments"
_OURS = "ashlar-segments-"


def declared(request: Any) -> list[int]:
    """Lengths of the segments that a request declares, from position 0 on. ValueError says what is wrong.

    A prompt's last token is always computed: where nothing stands behind the last segment, that one is no segment.
    """
    given = (request.kv_transfer_params or {}).get(PARAMETER)
    if given is None:
        return []
    lengths = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if lengths is None or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in lengths):
        raise ValueError(f"kv_transfer_params.{PARAMETER}: {given!r} is no list of lengths above 0")
    if sum(lengths) > request.num_prompt_tokens:
        raise ValueError(
            f"kv_transfer_params.{PARAMETER}: {sum(lengths)} tokens, and the prompt has {request.num_prompt_tokens}"
        )
    return lengths[:-1] if sum(lengths) == request.num_prompt_tokens else lengths


def salt_of(request: Any) -> str:
    """The salt that the caller gave. To be asked before `name_apart`."""
    return request.cache_salt or ""


def named_apart(request: Any) -> bool:
    return salt_of(request).startswith(_OURS)


def name_apart(request: Any, lengths: list[int]) -> None:
    """Renames the request's blocks in the engine's own prefix cache, before it is asked for the first time.

    The name holds all segments and the caller's salt, so that a block is found again behind the same segments in the
    same order alone: what stands there was composed from just these.
    """
    tokens = np.array(request.all_token_ids[: sum(lengths)], np.int32)
    salt = salt_of(request)
    named = repr((lengths, salt) if salt else lengths).encode()
    digest = hashlib.sha256(named + tokens.tobytes()).hexdigest()
    request.cache_salt = _OURS + digest
    request.block_hashes.clear()
    request.update_block_hashes()
