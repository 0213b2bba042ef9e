# SPDX-License-Identifier: Apache-2.0
"""The engine's model as the cache knows it: its identity, its layers, and the depths at which the engine can resume.

Scheduler and workers describe it from the same configuration and come to the same namespace.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import ashlar
from ashlar.vllm.identity import Identity, Unsupported, identify
from ashlar.vllm.options import Options
from ashlar.vllm.rows import packs
from ashlar.vllm.versions import unknown_version

_BLOCK = 256  # tokens of the cache's blocks, at least
_CAPTURE = 16  # tokens
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
_GDN_STATES = (torch.float32, torch.bfloat16)
_FLOPS_PER_SQUARED_WIDTH = 24  # of a token and layer: two for each of the 12 w² weights of a layer of width w


@dataclasses.dataclass(frozen=True)
class LinearPlace:
    """A layer with a state at a block's end."""

    layer: int  # of the cache's layout
    name: str
    group: int  # of the engine's caches
    shapes: tuple[tuple[int, ...], ...]  # of this rank's tensors in a block: convolution, state; or a state alone
    dtypes: tuple[torch.dtype, ...]


@dataclasses.dataclass(frozen=True)
class WindowPlace:
    """An attention layer that reads the last tokens alone. The blocks that hold these are its state."""

    layer: int  # of the cache's layout
    name: str
    group: int  # of the engine's caches
    reach: int  # tokens that the next one sees
    blocks: int  # that the tokens before a block's end that it sees lie in: its state has so many
    block_bytes: int  # of this rank's block
    chunk: int = 0  # the next token sees none before a multiple of so many tokens; 0: it sees `reach` tokens
    heads: int = 0  # of this rank; 0: where a token is in a block is unknown
    row: int = 0  # numbers of a token and head: key, and value behind it


@dataclasses.dataclass(frozen=True)
class Described:
    identity: Identity
    model: ashlar.Model  # its weights are named once the cache is opened: `named`
    attention: list[tuple[int, str]]  # layer, name, of those with all blocks of a text
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
    def whole_blocks(self) -> bool:
        """Whether texts are resumed at the ends of blocks alone, as where a token is in one is unknown."""
        layers = [self.model.layers[layer] for layer, _ in self.attention]
        return any(isinstance(layer, ashlar.Opaque) for layer in layers) or not all(w.heads for w in self.windows)

    @property
    def a_layer(self) -> str:
        """The name of one that has a cache."""
        places: list[LinearPlace | WindowPlace] = [*self.linear, *self.windows]
        return self.attention[0][1] if self.attention else places[0].name

    @property
    def attention_group(self) -> int:
        """Of engines that have one alone."""
        return next(iter(self.attention_groups))

    @property
    def layer_groups(self) -> list[ashlar.LayerGroup]:
        """As the cache is to know them: none where one page table serves all layers."""
        if len(self.attention_groups) < 2:
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
        """Likewise: those that hold what the next token sees of so many. There may be fewer than the place has."""
        first = tokens // place.chunk * place.chunk if place.chunk else max(0, tokens - place.reach)
        return blocks[place.group][first // self.block : self.count(tokens)]

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


def _fields(value: Any) -> Any:
    """What makes a spec, by name, the same in every process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: _fields(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": f"{type(value).__module__}.{type(value).__qualname__}", **found}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_fields(each) for each in value]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    return _fields(vars(value)) if hasattr(value, "__dict__") else str(value)


def _manager(spec: Any, group: Any, name: str) -> type:
    """The class by which vLLM keeps the layer's blocks: it says which of them a prefix is resumed from."""
    role = getattr(group, "role", None)
    manager: type | None = KVCacheSpecRegistry.get_manager_class(spec, getattr(role, "value", role))
    served = (FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager)
    kind = type(spec).__name__
    if manager not in served:
        raise Unsupported(
            f"{name}: {kind} is managed by {getattr(manager, '__name__', manager)}, which is not supported; expected "
            f"{', '.join(each.__name__ for each in served)}; run the model without this layer, or without the connector"
        )
    if not spec.prefix_cacheable or not getattr(group, "enable_kv_transfer", True):
        raise Unsupported(f"{name}: vLLM takes no prefixes of {kind} from a cache; run without the connector")
    if getattr(spec, "non_causal", False):
        raise Unsupported(
            f"{name}: keys of non-causal attention depend on what follows them; run without the connector"
        )
    assert manager is not None
    return manager


def _block_bytes(spec: Any, name: str) -> int:
    """Of one rank's block, without padding."""
    size = int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
    if size % spec.block_size != 0:
        raise Unsupported(
            f"{name}: a block of {size} bytes and {spec.block_size} tokens is not divisible; set another block_size"
        )
    return size


def _has_rows(spec: Any) -> bool:
    """Whether a block has one key and one value a token and head."""
    return (
        type(spec) in (FullAttentionSpec, SlidingWindowSpec)
        and not getattr(spec, "attention_chunk_size", None)
        and spec.tokens_per_state == 1
        and spec.kv_quant_mode.name in ("NONE", "FP8_PER_TENSOR")
        and spec.num_head_slots in (None, spec.num_kv_heads)
        and spec.state_content_bytes is None
        and spec.dtype in _TYPES
    )


def _attention(spec: Any, name: str, tp: int) -> ashlar.Attention | ashlar.Opaque:
    """A window whose spec is that of full attention is one of an engine that keeps all blocks of it."""
    if not _has_rows(spec):
        return ashlar.Opaque(token_bytes=_block_bytes(spec, name) // spec.block_size * tp)
    return ashlar.Attention(
        kv_heads=spec.num_kv_heads * tp,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        dtype=_TYPES[spec.dtype],
        stored=ashlar.StoredKeys.UNROTATED,
    )


def _window(spec: Any, manager: type, layer: int, name: str, group: int) -> WindowPlace:
    size, block = _block_bytes(spec, name), spec.block_size
    if manager is ChunkedLocalAttentionManager:
        chunk = int(spec.attention_chunk_size)
        return WindowPlace(layer, name, group, chunk, -(-chunk // block), size, chunk)
    reach = max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
    heads, row = (spec.num_kv_heads, spec.head_size + spec.head_size_v) if _has_rows(spec) else (0, 0)
    return WindowPlace(layer, name, group, reach, -(-reach // block), size, heads=heads, row=row)


def _check_states(spec: Any, name: str) -> None:
    if spec.mamba_cache_mode != "align":
        raise Unsupported(
            f"mamba_cache_mode: {spec.mamba_cache_mode} keeps no states at block ends; set mamba_cache_mode to align"
        )
    if spec.num_speculative_blocks:
        raise Unsupported(f"{name}: several states per block are not supported; remove speculative_config")


def _tail(spec: Any, tp: int) -> dict[str, Any]:
    """The last inputs of a layer's convolution, as `ashlar.Linear` says it."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    channels_first = is_conv_state_dim_first()
    channels, taps = spec.shapes[0] if channels_first else reversed(spec.shapes[0])
    order = ashlar.TailOrder.CHANNEL_FIRST if channels_first else ashlar.TailOrder.TOKEN_FIRST
    return dict(
        conv_channels=channels * tp, conv_kernel=taps + 1, conv_dtype=_TYPES[spec.dtypes[0]], conv_order=order
    )  # fmt: skip


def _linear(spec: Any, name: str, tp: int, text: Any) -> ashlar.Linear | ashlar.Opaque:
    _check_states(spec, name)
    shapes, key_heads = spec.shapes, getattr(text, "linear_num_key_heads", None)  # kda has no such field
    is_gdn = spec.mamba_type.name == "GDN_ATTN" and len(shapes) == 2 and len(shapes[1]) == 3
    if not is_gdn or key_heads is None or spec.dtypes[1] not in _GDN_STATES or spec.dtypes[0] not in _TYPES:
        return ashlar.Opaque(state_bytes=spec.state_content_size_bytes * tp)
    heads, d_v, d_k = shapes[1]
    return ashlar.Linear(
        family=ashlar.Family.GDN,
        key_heads=int(key_heads),
        value_heads=heads * tp,
        d_k=d_k,
        d_v=d_v,
        state_dtype=_TYPES[spec.dtypes[1]],
        order=ashlar.StateOrder.VALUE_FIRST,
        **_tail(spec, tp),
    )


def _flops(model: Any, layers: Sequence[Any]) -> float:
    """Of prefill, a token: an estimate where the layout does not tell, because a layer is opaque. 0: the daemon's own."""
    if not any(isinstance(layer, ashlar.Opaque) for layer in layers):
        return 0.0
    return float(_FLOPS_PER_SQUARED_WIDTH * len(layers) * model.get_hidden_size() ** 2)


def _layers(kv_cache_config: Any) -> list[tuple[str, int, Any]]:
    found = []
    for group, each in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(each.kv_cache_spec, "kv_cache_specs", None)
        for name in each.layer_names:
            found.append((name, group, each.kv_cache_spec if specs is None else specs[name]))
    return sorted(found, key=lambda layer: _layer_number(layer[0]))


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of an engine's caches, as the cache keeps them."""

    layout: list[ashlar.Attention | ashlar.Linear | ashlar.Opaque]
    attention: list[tuple[int, str]]
    linear: list[LinearPlace]
    windows: list[WindowPlace]
    attention_groups: dict[int, list[int]]
    block: int
    within: bool  # all states can be kept within a step
    specs: list[Any]  # fields of the engine's specs of opaque layers

    @property
    def grain(self) -> int:
        grain = max([_BLOCK, *(place.blocks * self.block for place in self.windows)])
        return -(-grain // self.block) * self.block


def layers_of(kv_cache_config: Any, text: Any, tp: int) -> Layers:
    """`text`: the configuration of the language model. Raises Unsupported."""
    layout: list[ashlar.Attention | ashlar.Linear | ashlar.Opaque] = []
    attention: list[tuple[int, str]] = []
    linear: list[LinearPlace] = []
    windows: list[WindowPlace] = []
    groups: dict[int, list[int]] = {}
    within: list[bool] = []
    specs, blocks = [], set()
    for name, group, spec in _layers(kv_cache_config):
        if getattr(spec, "is_draft", False):  # of vLLM 0.33 and later
            raise Unsupported(f"{name}: layers of a draft model are not supported; remove speculative_config")
        manager = _manager(spec, kv_cache_config.kv_cache_groups[group], name)
        blocks.add(spec.block_size)
        if manager is MambaManager:
            linear.append(LinearPlace(len(layout), name, group, spec.shapes, spec.dtypes))
            within.append(spec.num_prefill_checkpoint_blocks > 0)
            layout.append(_linear(spec, name, tp, text))
        elif manager is FullAttentionManager:
            groups.setdefault(group, []).append(len(layout))
            attention.append((len(layout), name))
            layout.append(_attention(spec, name, tp))
        else:
            windows.append(_window(spec, manager, len(layout), name, group))
            layout.append(ashlar.Opaque(state_bytes=windows[-1].blocks * windows[-1].block_bytes * tp))
        if isinstance(layout[-1], ashlar.Opaque):
            specs.append(_fields(spec))
    if len(blocks) != 1:
        raise Unsupported(
            f"blocks of {sorted(blocks)} tokens are not supported; expected one block_size for all layers"
        )
    return Layers(layout, attention, linear, windows, groups, blocks.pop(), bool(within) and all(within), specs)


def describe(vllm_config: Any, kv_cache_config: Any, options: Options, rank: int) -> Described:
    """Raises Unsupported with a reason."""
    _check(vllm_config)
    tp = vllm_config.parallel_config.tensor_parallel_size
    layers = layers_of(kv_cache_config, vllm_config.model_config.hf_text_config, tp)
    cache, model = vllm_config.cache_config, vllm_config.model_config
    form: dict[str, Any] = {
        "caches": str(cache.cache_dtype),
        "states": str(cache.mamba_ssm_cache_dtype),
        "page": str(kv_cache_config.kv_cache_layout),
        "linear": sorted({type(each).__name__ for each in layers.layout}),
    }
    if any(place.heads for place in layers.windows):
        form["windows"] = "by token"
    layout = {"form": form, "layers": repr(layers.layout), "ranks": tp}
    if layers.specs:
        layout["specs"] = layers.specs
    identity = identify(vllm_config, options, layout)
    convolutions = [each.conv_kernel - 1 for each in layers.layout if isinstance(each, ashlar.Linear)]
    return Described(
        identity=identity,
        model=ashlar.Model(
            model_id=identity.model_id,
            weights_digest="",
            layers=layers.layout,
            page_tokens=layers.block,
            head=max([0, *convolutions]),
            dtype=f"{model.dtype} {json.dumps(form, sort_keys=True)}",
            quantization=str(model.quantization or ""),
            tokenizer_digest=identity.tokenizer,
            tensor_parallel_rank=rank,
            tensor_parallel_size=tp,
            flops_per_token=_flops(model, layers.layout),
        ),
        attention=layers.attention,
        linear=layers.linear,
        windows=layers.windows,
        attention_groups=layers.attention_groups,
        groups=len(kv_cache_config.kv_cache_groups),
        block=layers.block,
        grain=layers.grain,
        packed=packs(),
        keeps_within=layers.within and kv_cache_config.cache_hit_alignment_tokens in (None, layers.block),
    )
