# SPDX-License-Identifier: Apache-2.0
"""The engine's model as the cache knows it: its identity, its layers, and the depths at which the engine can resume.

Scheduler and workers describe it from the same configuration and come to the same namespace.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

import ashlar
from ashlar.vllm.identity import Identity, Unsupported, identify
from ashlar.vllm.options import Options
from ashlar.vllm.rows import packs
from ashlar.vllm.versions import unknown_version

_BLOCK = 256  # tokens of the cache's blocks, at least
_CAPTURE = 16  # tokens
_MOST_DIM, _MOST_HEADS = 256, 1024  # of a state
_TYPES = {
    torch.float32: ashlar.DType.F32,
    torch.float16: ashlar.DType.F16,
    torch.bfloat16: ashlar.DType.BF16,
    torch.float8_e4m3fn: ashlar.DType.F8E4M3,
    torch.float8_e5m2: ashlar.DType.F8E5M2,
    torch.uint8: ashlar.DType.F8E4M3,  # vLLM's view of fp8 with one scale a tensor: bytes
}
# Methods of speculative decoding. Drafts come from the text, or from layers whose caches are kept with the others. A step
# offers accepted tokens alone, and overwrites the keys of rejected drafts. Keys of a draft model decide no token.
_SPECULATIVE = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp")
_STATE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class LinearPlace:
    layer: int  # of the cache's layout
    name: str
    group: int  # of the engine's caches
    shapes: tuple[tuple[int, ...], ...]  # convolution, state; or a state alone. Of this rank, as the cache has them
    dtypes: tuple[torch.dtype, ...]


@dataclasses.dataclass(frozen=True)
class WindowPlace:
    """An attention layer that sees a window of the last tokens alone. The blocks of that window are its state."""

    layer: int  # of the cache's layout
    name: str
    group: int  # of the engine's caches
    reach: int  # tokens that the next one sees
    blocks: int  # that the window before a block's end reaches into: its state has so many tokens
    heads: int  # of this rank
    row: int  # numbers of a token and head: key, and value behind it
    dtype: torch.dtype  # of the state


@dataclasses.dataclass(frozen=True)
class Described:
    identity: Identity
    model: ashlar.Model  # its weights are named once the cache is opened: `named`
    attention: list[tuple[int, str]]  # layer, name
    linear: list[LinearPlace]
    windows: list[WindowPlace]
    attention_groups: dict[int, list[int]]  # groups of the engine's caches that have all of a text, and their layers
    groups: int
    block: int  # tokens of the engine's blocks
    grain: int  # tokens between the depths that are kept of a text without linear layers
    packed: bool  # a block's rows are not its tokens: parts of blocks are moved by a block of their own
    keeps_within: bool  # a step leaves the state at its last block's end also where it goes on behind that

    def named(self, model: ashlar.Model) -> ashlar.Model:
        """The model with its weights' digest, which is known by now. Raises RuntimeError where it is not."""
        digest = self.identity.weights_digest()
        if digest is None:
            raise RuntimeError("the weights are not hashed yet")
        return dataclasses.replace(model, weights_digest=digest)

    @property
    def attention_group(self) -> int:
        """Of engines that have one alone."""
        return next(iter(self.attention_groups))

    @property
    def layer_groups(self) -> list[ashlar.LayerGroup]:
        """As the cache is to know them: none where one page table serves all layers."""
        if len(self.attention_groups) == 1:
            return []
        return [ashlar.LayerGroup(layers) for layers in self.attention_groups.values()]

    def count(self, tokens: int) -> int:
        """The blocks of so many tokens. The last one has the state behind them."""
        return -(-tokens // self.block)

    def capture_tokens(self, options: Options) -> int:
        """At multiples of it states can be had inside of prompts."""
        return _CAPTURE if not self.linear or options.checkpoint_tokens > 0 else self.block

    def pages(self, blocks: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Of a text's blocks by groups of the engine's caches: those with keys and values of its first tokens."""
        return [blocks[group][: self.count(tokens)] for group in self.attention_groups]

    def window(self, place: WindowPlace, blocks: Sequence[list[int]], tokens: int) -> list[int]:
        """Likewise: those that hold the window before so many tokens. A text that is shorter has fewer."""
        return blocks[place.group][max(0, tokens - place.reach) // self.block : self.count(tokens)]

    def resumes_from(self, blocks: Sequence[list[int]], tokens: int) -> list[int]:
        """All blocks of a text that its first tokens are resumed from; empty: some are not there."""
        count = self.count(tokens)
        found = [page for table in self.pages(blocks, tokens) for page in table]
        for group in {place.group for place in self.linear}:
            found += blocks[group][count - 1 : count] or [0]
        for place in {place.group: place for place in self.windows}.values():
            found += self.window(place, blocks, tokens)
        short = any(len(blocks[group]) < count for group in (*self.attention_groups, *(w.group for w in self.windows)))
        return [] if short or 0 in found else list(dict.fromkeys(found))


def _layer_number(name: str) -> tuple[bool, int, str]:
    """The order of layers: those of a draft model follow the engine's own."""
    numbers = re.findall(r"\d+", name)
    return (name.startswith("draft_model."), int(numbers[0]) if numbers else 0, name)


def check_version() -> None:
    """Raises Unsupported."""
    unknown = unknown_version()
    if unknown is not None:
        raise Unsupported(unknown)


def _check(vllm_config: Any) -> None:
    check_version()
    device = str(vllm_config.device_config.device_type)
    if device not in ("cpu", "cuda") or (device == "cuda" and torch.version.hip is not None):
        raise Unsupported(f"device {'ROCm' if device == 'cuda' else device} is not supported")
    if device == "cuda" and vllm_config.model_config.enable_sleep_mode:
        if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            raise Unsupported("sleep mode is not supported by this version of vLLM; expected 0.33 or later")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("pipeline parallelism is not supported")
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("context parallelism is not supported")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _SPECULATIVE:
        raise Unsupported(
            f"speculative_config: method {speculative.method} is not supported; expected {', '.join(_SPECULATIVE)}"
        )
    if vllm_config.diffusion_config is not None:
        raise Unsupported("diffusion models are not supported")
    if not vllm_config.cache_config.enable_prefix_caching:
        raise Unsupported("prefix caching is off; set enable_prefix_caching")


def _check_rows(spec: Any, name: str) -> None:
    if spec.kv_quant_mode.name not in ("NONE", "FP8_PER_TENSOR") or spec.num_head_slots not in (
        None,
        spec.num_kv_heads,
    ):
        raise Unsupported(f"{name}: keys and values packed as {spec.kv_quant_mode.name} are not supported")
    if spec.dtype not in _TYPES:
        raise Unsupported(f"{name}: keys of {spec.dtype} are not supported")


def _attention(spec: Any, name: str, tp: int) -> ashlar.Attention:
    """A window whose spec is that of full attention is one of an engine that keeps all blocks of it."""
    if type(spec) is not FullAttentionSpec or spec.attention_chunk_size:
        raise Unsupported(f"{name}: {type(spec).__name__} is not supported; expected full attention")
    _check_rows(spec, name)
    return ashlar.Attention(
        kv_heads=spec.num_kv_heads * tp,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        dtype=_TYPES[spec.dtype],
        stored=ashlar.StoredKeys.UNROTATED,
    )


def _largest_divisor(value: int, most: int) -> int:
    return next(each for each in range(min(value, most), 0, -1) if value % each == 0)


def _kept(name: str, heads: int, numbers: int, dtype: torch.dtype, tp: int) -> ashlar.Linear:
    """A layer's state that nothing composes, `numbers` for each of a rank's heads: its bytes, cut into even parts."""
    columns = _largest_divisor(numbers, _MOST_DIM)
    rows = _largest_divisor(numbers // columns, _MOST_DIM)
    parts = heads * (numbers // columns // rows) * tp
    if parts > _MOST_HEADS:
        raise Unsupported(f"{name}: a state of {heads} heads with {numbers} values exceeds the limit")
    return ashlar.Linear(
        family=ashlar.Family.GLA,
        key_heads=parts,
        value_heads=parts,
        d_k=rows,
        d_v=columns,
        state_dtype=_TYPES[dtype],
    )


def _kept_type(dtype: torch.dtype) -> torch.dtype:
    """Kernels hand on finite numbers as they are. Finite fp16 numbers and pairs of fp8 ones are finite bf16, too."""
    return torch.float32 if dtype.itemsize == 4 else torch.bfloat16


def _window(spec: Any, name: str, place: WindowPlace, tp: int) -> ashlar.Linear:
    if type(spec) is not SlidingWindowSpec or spec.extra_retained_tokens:
        raise Unsupported(f"{name}: {type(spec).__name__} is not supported; expected sliding-window attention")
    _check_rows(spec, name)
    width = place.dtype.itemsize // spec.dtype.itemsize or 1
    if place.row % width != 0:
        raise Unsupported(f"{name}: rows of {place.row} values of {spec.dtype} are not supported")
    return _kept(name, place.heads, place.blocks * spec.block_size * place.row // width, place.dtype, tp)


def _check_states(spec: Any, name: str) -> None:
    if spec.mamba_cache_mode != "align":
        raise Unsupported(
            f"mamba_cache_mode: {spec.mamba_cache_mode} keeps no states at block ends; set mamba_cache_mode to align"
        )
    if spec.num_speculative_blocks:
        raise Unsupported(f"{name}: several states per block are not supported; remove speculative_config")
    if any(dtype not in _STATE_TYPES for dtype in spec.dtypes):
        raise Unsupported(f"{name}: states of {spec.dtypes} are not supported")


def _tail(spec: Any, tp: int) -> dict[str, Any]:
    """The last inputs of a layer's convolution, as `ashlar.Linear` says it."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    channels_first = is_conv_state_dim_first()
    channels, taps = spec.shapes[0] if channels_first else reversed(spec.shapes[0])
    order = ashlar.TailOrder.CHANNEL_FIRST if channels_first else ashlar.TailOrder.TOKEN_FIRST
    return dict(
        conv_channels=channels * tp, conv_kernel=taps + 1, conv_dtype=_TYPES[spec.dtypes[0]], conv_order=order
    )  # fmt: skip


def _linear(spec: Any, place: LinearPlace, tp: int, text: Any) -> tuple[LinearPlace, ashlar.Linear]:
    """Prefixes alone are kept: states and tails go through the cache as they are, and nothing composes them."""
    kind, shapes, name = spec.mamba_type.name, spec.shapes, place.name
    _check_states(spec, name)
    if kind == "GDN_ATTN" and len(shapes) == 2 and len(shapes[1]) == 3 and spec.dtypes[1] is not torch.float16:
        heads, d_v, d_k = shapes[1]
        return place, ashlar.Linear(
            family=ashlar.Family.GDN,
            key_heads=int(getattr(text, "linear_num_key_heads", heads * tp)),
            value_heads=heads * tp,
            d_k=d_k,
            d_v=d_v,
            state_dtype=_TYPES[spec.dtypes[1]],
            order=ashlar.StateOrder.VALUE_FIRST,
            **_tail(spec, tp),
        )
    if kind == "MAMBA2" and len(shapes) == 2 and len(shapes[1]) == 3:
        # As Mamba-2's the layout would have the decays of its heads, which are among the weights: nobody has read them yet.
        heads, tail = shapes[1][0], _tail(spec, tp)
    elif kind == "SHORT_CONV" and len(shapes) == 1:
        heads, tail = 1, {}
    else:
        raise Unsupported(f"{name}: states of {kind}, {shapes}, {spec.dtypes} are not supported")
    dtype = _kept_type(spec.dtypes[-1])
    layer = dataclasses.replace(_kept(name, heads, math.prod(shapes[-1]) // heads, dtype, tp), **tail)
    state = (layer.value_heads // tp, layer.d_k, layer.d_v)
    return dataclasses.replace(place, shapes=(*shapes[:-1], state), dtypes=(*spec.dtypes[:-1], dtype)), layer


def _layers(kv_cache_config: Any) -> list[tuple[str, int, Any]]:
    found = []
    for group, each in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(each.kv_cache_spec, "kv_cache_specs", None)
        for name in each.layer_names:
            found.append((name, group, each.kv_cache_spec if specs is None else specs[name]))
    return sorted(found, key=lambda layer: _layer_number(layer[0]))


def describe(vllm_config: Any, kv_cache_config: Any, options: Options, rank: int) -> Described:
    """Raises Unsupported with a reason."""
    _check(vllm_config)
    text = vllm_config.model_config.hf_text_config
    tp = vllm_config.parallel_config.tensor_parallel_size
    layers: list[ashlar.Attention | ashlar.Linear] = []
    attention: list[tuple[int, str]] = []
    linear: list[LinearPlace] = []
    windows: list[WindowPlace] = []
    groups: dict[int, list[int]] = {}
    within: list[bool] = []
    blocks = set()
    for name, group, spec in _layers(kv_cache_config):
        if getattr(spec, "is_draft", False):  # of vLLM 0.33 and later
            raise Unsupported(f"{name}: layers of a draft model are not supported")
        blocks.add(spec.block_size)
        if isinstance(spec, MambaSpec):
            place, layer = _linear(spec, LinearPlace(len(layers), name, group, spec.shapes, spec.dtypes), tp, text)
            linear.append(place)
            within.append(spec.num_prefill_checkpoint_blocks > 0)
            layers.append(layer)
        elif isinstance(spec, SlidingWindowSpec):
            reach = max(1, spec.sliding_window - 1)
            span, row = -(-reach // spec.block_size), spec.head_size + spec.head_size_v
            kept = _kept_type(spec.dtype)
            windows.append(WindowPlace(len(layers), name, group, reach, span, spec.num_kv_heads, row, kept))
            layers.append(_window(spec, name, windows[-1], tp))
        else:
            groups.setdefault(group, []).append(len(layers))
            attention.append((len(layers), name))
            layers.append(_attention(spec, name, tp))
    if not groups or len(blocks) != 1:
        raise Unsupported(
            f"{len(groups)} groups of full attention with blocks of {sorted(blocks)} tokens are not supported"
        )
    block = blocks.pop()
    grain = max([_BLOCK, *(place.blocks * block for place in windows)])
    cache, model = vllm_config.cache_config, vllm_config.model_config
    form: dict[str, Any] = {
        "caches": str(cache.cache_dtype),
        "states": str(cache.mamba_ssm_cache_dtype),
        "page": str(kv_cache_config.kv_cache_layout),
        "linear": sorted({type(each).__name__ for each in layers}),
    }
    if windows:
        form["windows"] = "by token"
    identity = identify(vllm_config, options, {"form": form, "layers": repr(layers), "ranks": tp})
    return Described(
        identity=identity,
        model=ashlar.Model(
            model_id=identity.model_id,
            weights_digest="",
            layers=layers,
            page_tokens=block,
            head=max([0, *(each.conv_kernel - 1 for each in layers if isinstance(each, ashlar.Linear))]),
            dtype=f"{model.dtype} {json.dumps(form, sort_keys=True)}",
            quantization=str(model.quantization or ""),
            tokenizer_digest=identity.tokenizer,
            tensor_parallel_rank=rank,
            tensor_parallel_size=tp,
        ),
        attention=attention,
        linear=linear,
        windows=windows,
        attention_groups=groups,
        groups=len(kv_cache_config.kv_cache_groups),
        block=block,
        grain=-(-grain // block) * block,
        packed=packs(),
        keeps_within=bool(within) and all(within) and kv_cache_config.cache_hit_alignment_tokens in (None, block),
    )
