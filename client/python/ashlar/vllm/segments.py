# SPDX-License-Identifier: Apache-2.0
"""Prompts that say where their segments end, and what is decided of them without the cache: whether they can be set at
all, the layout of what is kept for them, and the names of what is composed.

A request declares segments in its `kv_transfer_params`: {"ashlar_segments": [lengths, from position 0 on]}. Its states
and keys are composed, so nothing of it may be taken for exact: neither by the engine's own prefix cache, whose blocks of
such a request get names of their own, nor by Ashlar's, which is not offered any of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import ashlar
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options

PAGE_TOKENS = 16
NORM_EPSILON = 1e-5  # that vLLM's kernels of processors add to the squares of q and k; those of GPUs add 1e-6
KEY_TYPES = {ashlar.DType.F32: torch.float32, ashlar.DType.F16: torch.float16, ashlar.DType.BF16: torch.bfloat16}
PARAMETER = "ashlar_segments"
_OURS = "ashlar-segments-"
ADAPTERS = "ashlar-adapter-"  # begins the salts of prompts with an adapter


def unsupported(described: Described) -> str:
    """Why no prompt of this layout can be set from segments; empty: nothing of the layout is against it.

    Whether the engine's model can be run for it, and turns keys by fixed frequencies, is seen by the worker alone.
    """
    if any(isinstance(layer, ashlar.Opaque) for layer in described.model.layers):
        return "hybrid models with gated delta nets alone"
    model, linear = described.model, [described.model.layers[place.layer] for place in described.linear]
    if not linear or any(
        not isinstance(each, ashlar.Linear) or each.family is not ashlar.Family.GDN for each in linear
    ):
        return "hybrid models with gated delta nets alone"
    if model.tensor_parallel_size > 1:
        return "on one worker alone"
    if described.windows or len(described.attention_groups) > 1:
        return "one group of attention layers alone"
    for layer in model.layers:
        if isinstance(layer, ashlar.Attention) and layer.dtype not in KEY_TYPES:
            return f"keys of {layer.dtype.name}"
        if isinstance(layer, ashlar.Linear) and layer.state_dtype is not ashlar.DType.F32:
            return f"states of {layer.state_dtype.name} (mamba_ssm_cache_dtype: float32)"
    return ""


def segments_model(described: Described, rope: ashlar.Rope, options: Options) -> ashlar.Model:
    """The layout of segments: keys that turn, states as the processor's kernels have them."""
    layers: list[ashlar.Attention | ashlar.Linear] = []
    head = options.seam_head
    for layer in described.model.layers:
        if isinstance(layer, ashlar.Attention):
            layers.append(dataclasses.replace(layer, rope=rope, stored=ashlar.StoredKeys.ZERO_BASED))
        elif isinstance(layer, ashlar.Linear):
            # Declared as [V, K]; the kernels of processors keep [K, V] there.
            layers.append(dataclasses.replace(layer, order=ashlar.StateOrder.KEY_FIRST))
            head = max(head, layer.conv_kernel - 1)
    return dataclasses.replace(
        described.model, layers=layers, page_tokens=PAGE_TOKENS, head=head, tail=options.seam_tail,
        dtype=f"{described.model.dtype}, norm {NORM_EPSILON}",  # tuples made with another one are other tuples
    )  # fmt: skip


def declared(request: Any) -> list[int]:
    """Lengths of the segments that a request declares, from position 0 on. ValueError says what is wrong.

    A prompt's last token is always computed: where nothing stands behind the last segment, that one is no segment.
    """
    given = (request.kv_transfer_params or {}).get(PARAMETER)
    if given is None:
        return []
    lengths = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if lengths is None or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in lengths):
        raise ValueError(f"kv_transfer_params.{PARAMETER}: {given!r} was given; expected a list of positive lengths")
    if sum(lengths) > request.num_prompt_tokens:
        raise ValueError(
            f"kv_transfer_params.{PARAMETER}: the lengths add up to {sum(lengths)}; the prompt has {request.num_prompt_tokens} tokens"
        )
    return lengths[:-1] if sum(lengths) == request.num_prompt_tokens else lengths


def salt_of(request: Any) -> str:
    """The salt that the caller gave. To be asked before `name_apart`."""
    return request.cache_salt or ""


def named_apart(request: Any) -> bool:
    """Whether the salt is one of ours. Of a caller's prompt it would find what belongs to others."""
    return salt_of(request).startswith((_OURS, ADAPTERS))


def name_apart(request: Any, lengths: list[int]) -> None:
    """Renames the request's blocks in the engine's own prefix cache, before it is asked for the first time.

    The name holds all segments and the caller's salt, so that a block is found again behind the same segments in the
    same order alone: what stands there was composed from just these.
    """
    tokens = np.array(request.all_token_ids[: sum(lengths)], np.int32)
    salt = salt_of(request)
    named = repr((lengths, salt) if salt else lengths).encode()
    _rename(request, hashlib.sha256(named + tokens.tobytes()).hexdigest())


def name_alone(request: Any) -> None:
    """Renames the request's blocks so that no other request finds them: its keys are of two sets of weights."""
    _rename(request, uuid.uuid4().hex)


def _rename(request: Any, name: str) -> None:
    request.cache_salt = _OURS + name
    request.block_hashes.clear()
    request.update_block_hashes()
