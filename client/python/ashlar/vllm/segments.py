# SPDX-License-Identifier: Apache-2.0
"""Segments that prompts declare: whether the layout supports them, how many may land at once, the layout under which they
are cached, and the names of composed blocks.

A request declares segments in its `kv_transfer_params`: {"ashlar_segments": [lengths, from position 0 on]}. States and
keys after the first composed segment must not be used as exact ones. So the engine's own prefix cache gets separate
names for its blocks from there on, and Ashlar's exact prefixes do not include them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import ashlar
from ashlar.tensors import SEGMENT_TYPES
from ashlar.vllm import landed_tuples
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options

PAGE_TOKENS = 16
NORM_EPSILON, GPU_NORM_EPSILON = 1e-5, 1e-6  # added by vLLM's kernels to the squares of q and k
KEY_TYPES = {ashlar.DType.F32: torch.float32, ashlar.DType.F16: torch.float16, ashlar.DType.BF16: torch.bfloat16}
_USUAL_TOKENS, _USUAL_BYTES = 65536, 4 << 30  # limits of the default for segment_tokens
_MAX_TABLES = 32 << 20  # bytes of all decay tables and frequencies of a layout
PARAMETER = "ashlar_segments"
_OURS = "ashlar-segments-"
ADAPTERS = "ashlar-adapter-"  # salts of prompts with an adapter begin with this


def refused(vllm_config: Any, options: Options) -> str:
    """Returns why an engine with this configuration does not use segments; empty if it may."""
    device, parallel = str(vllm_config.device_config.device_type), vllm_config.parallel_config
    if vllm_config.lora_config is not None:
        return "enable_lora is not supported"
    if vllm_config.aux_output_config.enabled:  # it asserts that each token is computed or comes from vLLM's own cache
        return "enable_return_routed_experts is not supported"
    if device != "cpu" and not options.segments_on_gpu:
        return f"they have never run on {device}; run tools/gpu-check, then set segments_on_gpu"
    if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:  # all ranks would have to run a segment
        return "data_parallel_size above 1 is not supported for mixtures of experts"
    return ""


def unsupported(described: Described) -> str:
    """Returns why this layout does not support segments; empty if it does.

    Only the worker can check whether it can run the engine's model, and whether keys rotate by fixed frequencies.
    """
    reasons = [each for each in described.segments if isinstance(each, str)]
    if reasons:
        return f"not for models with {reasons[0]}"
    if not described.keys:
        return "only for models with attention layers"
    for layer in described.segments:
        if isinstance(layer, ashlar.Attention) and layer.dtype not in KEY_TYPES:
            return f"not for keys of {layer.dtype.name}"
        if isinstance(layer, ashlar.Linear) and layer.family is ashlar.Family.GDN and described.packed:
            if layer.conv_dtype is ashlar.DType.F16:  # Triton's kernels have other inputs and states
                return "gated delta nets in float16 only on GPUs"
    return ""


def token_bytes(layer: ashlar.Attention) -> int:
    """Returns the bytes of a token's keys and values in this layer."""
    width: int = KEY_TYPES[layer.dtype].itemsize
    return layer.kv_heads * (layer.key_dim + layer.value_dim) * width


def segment_tokens(described: Described, options: Options) -> int:
    """Returns the option, or its default: 65,536, or as many tokens as 4 GiB of landed segments have."""
    if options.segment_tokens:
        return options.segment_tokens
    keys = _key_bytes(described)
    return min(_USUAL_TOKENS, _USUAL_BYTES // max(1, keys + _tuples_part(keys) if _linear(described) else keys))


def segment_tuples(described: Described, options: Options) -> int:
    """Returns the number of segments whose tuples fit into host memory together."""
    dtype = SEGMENT_TYPES[options.segment_dtype]
    layers = (dataclasses.replace(layer, state_dtype=dtype) for layer in _linear(described))
    size = sum(map(landed_tuples.tuple_bytes, layers))
    return tuple_memory(described, options) // size if size else sys.maxsize


def tuple_memory(described: Described, options: Options) -> int:
    """Returns the bytes of host memory for landed tuples."""
    return segment_tokens(described, options) * _tuples_part(_key_bytes(described))


def _tuples_part(keys: int) -> int:
    """Returns the bytes for tuples that belong to one of `segment_tokens`: what its keys and values, of `keys` bytes,
    leave of 64 KiB, and at least as much as these take."""
    return max(keys, _USUAL_BYTES // _USUAL_TOKENS - keys)


def _key_bytes(described: Described) -> int:
    attention = (layer for layer in described.segments if isinstance(layer, ashlar.Attention))
    return sum(token_bytes(layer) for layer in attention if layer.dtype in KEY_TYPES)


def _linear(described: Described) -> list[ashlar.Linear]:
    return [layer for layer in described.segments if isinstance(layer, ashlar.Linear)]


def segments_model(
    described: Described,
    ropes: Mapping[str, ashlar.Rope | None],
    decays: Mapping[str, torch.Tensor],
    options: Options,
) -> ashlar.Model:
    """Returns the layout of this rank's segments: with rotated keys, and states as the engine's kernels store them.

    `ropes`: the rotation of each layer that rotates keys, by name. `decays`: decay tables of linear layers. Each rank's
    segments have their own namespace. Only that of rank 0 has the engine's model_id, so probes ask rank 0. A prompt
    jumps over an interior if all ranks have landed it. Unsupported: the tables are too large.
    """
    size = sum(4 * table.numel() for table in decays.values())
    size += sum(8 * len(rope.frequencies) for rope in ropes.values() if rope is not None)
    if size > _MAX_TABLES:
        raise Unsupported(
            f"segments: decay tables and frequencies of a rank take {size} bytes; expected at most {_MAX_TABLES}; use a "
            "larger tensor_parallel_size"
        )
    names = {place.layer: place.name for place in described.linear} | {layer: name for layer, name, _ in described.keys}
    layers: list[ashlar.Attention | ashlar.Linear] = []
    head, whole = options.seam_head, described.model
    for number, layer in enumerate(described.segments):
        assert not isinstance(layer, str)
        if isinstance(layer, ashlar.Attention):
            layers.append(dataclasses.replace(layer, rope=ropes[names[number]]))
            continue
        table = decays[names[number]].flatten().cpu().tolist() if names[number] in decays else None
        tuples, rope = SEGMENT_TYPES[options.segment_dtype], ropes.get(names[number])
        layers.append(dataclasses.replace(layer, state_dtype=tuples, decay_table=table, rope=rope))
        head = max(head, layer.conv_kernel - 1)
    rank, ranks = whole.tensor_parallel_rank, whole.tensor_parallel_size
    part = f" rank {rank} of {ranks}" if ranks > 1 else ""
    norm = NORM_EPSILON if described.packed else GPU_NORM_EPSILON  # tuples depend on it
    return dataclasses.replace(
        whole, model_id=whole.model_id + (part if rank > 0 else ""), layers=layers, page_tokens=PAGE_TOKENS,
        head=head, tail=options.seam_tail, tensor_parallel_rank=0, tensor_parallel_size=1,
        dtype=f"{whole.dtype}, norm {norm}{part}",
    )  # fmt: skip


def declared(request: Any) -> list[int] | None:
    """Returns the lengths of the segments that a request declares, from position 0 on; None: it declares none.
    ValueError says what is wrong.

    A prompt's last token is always computed: if nothing follows the last segment, that one does not count as a segment.
    """
    given = (request.kv_transfer_params or {}).get(PARAMETER)
    if given is None:
        return None
    lengths = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if lengths is None or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in lengths):
        raise ValueError(f"kv_transfer_params.{PARAMETER}: {given!r} was given; expected a list of positive lengths")
    if sum(lengths) > request.num_prompt_tokens:
        raise ValueError(
            f"kv_transfer_params.{PARAMETER}: the lengths add up to {sum(lengths)}; the prompt has {request.num_prompt_tokens} tokens"
        )
    return lengths[:-1] if sum(lengths) == request.num_prompt_tokens else lengths


def salt_of(request: Any) -> str:
    """Returns the caller's salt. Call it before `name_alone`."""
    return request.cache_salt or ""


def named_apart(request: Any) -> bool:
    """Returns whether the salt is one of the connector's own. A caller must not use one, because it would find other
    requests' blocks."""
    return salt_of(request).startswith((_OURS, ADAPTERS))


class Names:
    """Block hashes of a request in the engine's own prefix cache. The hash of a block after jumps depends on these
    jumps."""

    def __init__(self, request: Any, tokens: int) -> None:
        """`tokens`: tokens per hash."""
        self._request, self._tokens = request, tokens
        self._own = request._block_hasher
        self._exact: list[bytes] = []
        self._jumps: list[tuple[int, int]] = []

    def set(self, jumps: list[tuple[int, int]]) -> None:
        """Renames the blocks. `jumps`: begin and end of each jump."""
        self._jumps = jumps
        self._request._block_hasher = self._hash
        self._request.block_hashes.clear()
        self._request.update_block_hashes()

    def reset(self) -> None:
        """Restores the hashes of an exact prompt."""
        if self._jumps:
            self._jumps, self._request._block_hasher = [], self._own
            self._request.block_hashes.clear()
            self._request.update_block_hashes()

    def _hash(self, request: Any) -> list[bytes]:
        """The engine's hasher continues from the last hash. It gets the exact one, so that hashes do not depend on when
        tokens were appended."""
        named = request.block_hashes
        del self._exact[len(named) :]  # the next turn of a session replaces the last token, which may end a block
        request.block_hashes = self._exact
        try:
            new = self._own(request)
        finally:
            request.block_hashes = named
        first, found = len(named), []
        for number, name in enumerate(new, first):
            before = [jump for jump in self._jumps if jump[0] < (number + 1) * self._tokens]
            found.append(hashlib.sha256(name + repr(before).encode()).digest() if before else name)
        self._exact += new
        return found


def name_alone(request: Any) -> None:
    """Renames the request's blocks so that no other request finds them: its keys are of two sets of weights."""
    _rename(request, uuid.uuid4().hex)


def _rename(request: Any, name: str) -> None:
    request.cache_salt = _OURS + name
    request.block_hashes.clear()
    request.update_block_hashes()
