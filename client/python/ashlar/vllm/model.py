# SPDX-License-Identifier: Apache-2.0
"""The engine's model as the cache sees it: its identity, its layers, and the depths at which the engine can resume.

Scheduler and workers describe the model from the same configuration and derive the same namespace.
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SparseCacheRole
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import ashlar
from ashlar.vllm.drafts import Place
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
    torch.uint8: ashlar.DType.F8E4M3,  # vLLM's view of fp8 with one scale per tensor: bytes
}
_BYTES = {
    ashlar.DType.F32: 4,
    ashlar.DType.F16: 2,
    ashlar.DType.BF16: 2,
    ashlar.DType.F8E4M3: 1,
    ashlar.DType.F8E5M2: 1,
}
# Supported methods of speculative decoding. Drafts come from the text, or from layers whose caches are saved with the
# other ones. A step offers only accepted tokens, and overwrites the keys of rejected drafts. Keys of a draft model
# never decide a token.
_SPECULATIVE = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp")
# Kinds of states that vLLM keeps for each draft. Its Mamba-1 has no inputs of drafts.
_DRAFT_STATES = ("GDN_ATTN", "MAMBA2", "SHORT_CONV", "LINEAR")
_GDN_STATES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 256  # largest d_v of the kernels
_FLOPS_PER_SQUARED_WIDTH = 24  # per token and layer: two for each of the 12 w² weights of a layer of width w


def _without_inputs(
    shapes: tuple[tuple[int, ...], ...], dimension: int | None, count: int
) -> tuple[tuple[int, ...], ...]:
    if dimension is None:
        return shapes
    first = tuple(size - count * (each == dimension) for each, size in enumerate(shapes[0]))
    return (first, *shapes[1:])


@dataclasses.dataclass(frozen=True)
class LinearPlace:
    """A layer with a state at a block's end."""

    layer: int  # index in the cache's layout
    name: str
    group: int  # index among the engine's cache groups
    # Shapes of this rank's tensors in a block: convolution and state, or only one of them.
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    inputs: int | None = None  # dimension of the first shape along which a convolution's last inputs are; None: no such
    # Most drafts of a step. The state after each draft is in a separate block after that of the step's first state,
    # whose convolution has the inputs of all drafts.
    drafts: int = 0

    @property
    def kept(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of one state, without inputs of drafts."""
        return _without_inputs(self.shapes, self.inputs, self.drafts)


@dataclasses.dataclass(frozen=True)
class WindowPlace:
    """An attention layer that only reads the last tokens. The blocks that hold these are its state."""

    layer: int  # index in the cache's layout
    name: str
    group: int  # index among the engine's cache groups
    reach: int  # tokens that the next one sees
    blocks: int  # number of blocks with the tokens that a token at a block's end sees; its state has as many
    block_bytes: int  # bytes of this rank's block
    chunk: int = 0  # attention does not reach across multiples of `chunk` tokens; 0: the next token sees `reach` tokens
    heads: int = 0  # heads of this rank; 0: the place of a token in a block is unknown
    row: int = 0  # numbers per token and head: key and value, one after the other


@dataclasses.dataclass(frozen=True)
class Described:
    identity: Identity
    model: ashlar.Model  # without a weights digest until the cache is opened: see `named`
    attention: list[tuple[int, str]]  # index and name of layers that have all blocks of a text
    linear: list[LinearPlace]
    windows: list[WindowPlace]
    # Groups of the engine's caches that have all blocks of a text, and their layers.
    attention_groups: dict[int, list[int]]
    groups: int
    block: int  # tokens of the engine's blocks
    grain: int  # tokens between the depths that are kept of a text without linear layers
    packed: bool  # a block's rows are not its tokens: a part of a block is moved through a spare block
    keeps_within: bool  # a step leaves the state at its last block's end even if the step continues after it
    staged: int = 0  # bytes of host memory through which the caches are copied; 0: the daemon maps them
    # This rank's layers as segments store them, without the fields that only workers have
    # (`segments.segments_model`). A string is the reason why segments do not support the layer.
    segments: list[ashlar.Attention | ashlar.Linear | str] = dataclasses.field(default_factory=list)

    def named(self, model: ashlar.Model) -> ashlar.Model:
        """Returns the model with its weights' digest. RuntimeError: the digest is not known yet."""
        digest = self.identity.weights_digest()
        if digest is None:
            raise RuntimeError("the weights are not hashed yet")
        return dataclasses.replace(model, weights_digest=digest)

    @property
    def whole_blocks(self) -> bool:
        """Returns whether texts resume only at the ends of blocks, because the place of a token in a block is
        unknown."""
        layers = [self.model.layers[layer] for layer, _ in self.attention]
        return any(isinstance(layer, ashlar.Opaque) for layer in layers) or not all(w.heads for w in self.windows)

    @property
    def drafts(self) -> int:
        """Returns the number of drafts after which the engine has separate states."""
        return max((place.drafts for place in self.linear), default=0)

    @property
    def a_layer(self) -> str:
        """Returns the name of one layer that has a cache."""
        places: list[LinearPlace | WindowPlace] = [*self.linear, *self.windows]
        return self.attention[0][1] if self.attention else places[0].name

    @property
    def keys(self) -> list[tuple[int, str, int]]:
        """Index, name and group of all attention layers, windows included."""
        groups = {layer: group for group, layers in self.attention_groups.items() for layer in layers}
        found = [(layer, name, groups[layer]) for layer, name in self.attention]
        return sorted(found + [(place.layer, place.name, place.group) for place in self.windows])

    @property
    def key_groups(self) -> list[int]:
        return sorted({group for _, _, group in self.keys})

    @property
    def layer_groups(self) -> list[ashlar.LayerGroup]:
        """Returns the groups for the cache; none if one page table serves all layers."""
        if len(self.attention_groups) < 2:
            return []
        return [ashlar.LayerGroup(layers) for layers in self.attention_groups.values()]

    @property
    def page_bytes(self) -> int:
        """The bytes of one block of all attention layers, on this rank."""
        size = 0
        for layer, _ in self.attention:
            shape = self.model.layers[layer]
            if isinstance(shape, ashlar.Attention):
                numbers = shape.kv_heads // self.model.tensor_parallel_size * (shape.key_dim + shape.value_dim)
                size += numbers * _BYTES[shape.dtype]
            elif isinstance(shape, ashlar.Opaque):
                size += shape.token_bytes // self.model.tensor_parallel_size
        return size * self.block

    @property
    def staged_pages(self) -> int:
        """The number of blocks that fit into the staging memory."""
        return self.staged // self.page_bytes if self.attention else 0

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the longest text that can be loaded or saved; None: no limit."""
        return self.staged_pages * self.block if self.staged and self.attention else None

    @property
    def prefix_block(self) -> int:
        """Tokens of one object of a prefix. Objects whose tokens the engine has already are not landed."""
        return -(-_BLOCK // self.block) * self.block

    def count(self, tokens: int) -> int:
        """Returns the number of blocks of this number of tokens. The last block has the state after them."""
        return -(-tokens // self.block)

    def capture_tokens(self, options: Options) -> int:
        """States inside prompts can be captured at multiples of this."""
        return _CAPTURE if not self.linear or options.checkpoint_tokens > 0 else self.block

    def pages(self, blocks: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Returns, from a text's blocks by group of the engine's caches, the blocks with keys and values of its first
        tokens."""
        return [blocks[group][: self.count(tokens)] for group in self.attention_groups]

    def window(self, place: WindowPlace, blocks: Sequence[list[int]], tokens: int) -> list[int]:
        """Like `pages`, but returns the blocks with the window of the next token after this number of tokens. At the
        start of a text there are fewer."""
        first = tokens // place.chunk * place.chunk if place.chunk else max(0, tokens - place.reach)
        return blocks[place.group][first // self.block : self.count(tokens)]

    def resumes_from(self, blocks: Sequence[list[int]], tokens: int, at: Place | None = None) -> list[int]:
        """Returns all blocks of a text from which its first tokens are resumed; empty if one is missing.

        `at`: the place of the states, by default the block of the last token.
        """
        count, at = self.count(tokens), at or Place(self.count(tokens) - 1)
        found = [page for table in self.pages(blocks, tokens) for page in table]
        for group in {place.group for place in self.linear}:
            for column in {at.column, at.column + at.accepted}:
                found += blocks[group][column : column + 1] or [0]
        for place in {place.group: place for place in self.windows}.values():
            found += self.window(place, blocks, tokens)
        short = any(len(blocks[group]) < count for group in (*self.attention_groups, *(w.group for w in self.windows)))
        return [] if short or 0 in found else list(dict.fromkeys(found))


def _layer_number(name: str) -> tuple[bool, int, str]:
    """Sort key of layers: layers of a draft model follow the engine's own."""
    numbers = re.findall(r"\d+", name)
    return (name.startswith("draft_model."), int(numbers[0]) if numbers else 0, name)


def check_version() -> None:
    """Unsupported: the installed version of vLLM is not supported."""
    unknown = unknown_version()
    if unknown is not None:
        raise Unsupported(unknown)


def is_staged(vllm_config: Any, options: Options) -> bool:
    """Returns whether the engine's caches are copied through host memory. Otherwise the daemon maps them."""
    device = str(vllm_config.device_config.device_type)
    return options.kv_memory == "staged" or (options.kv_memory == "auto" and device != "cpu")


def _check(vllm_config: Any, options: Options) -> None:
    check_version()
    device = str(vllm_config.device_config.device_type)
    is_rocm = device == "cuda" and torch.version.hip is not None
    if not is_staged(vllm_config, options) and (device not in ("cpu", "cuda") or is_rocm):
        raise Unsupported(
            f"kv_memory: the daemon cannot map the memory of {'ROCm' if is_rocm else device}; set kv_memory to staged"
        )
    if device != "cpu" and vllm_config.model_config.enable_sleep_mode:
        if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            raise Unsupported("enable_sleep_mode: not supported by this version of vLLM; use 0.33 or later")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported(f"pipeline_parallel_size: {parallel.pipeline_parallel_size} is not supported; expected 1")
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("decode_context_parallel_size, prefill_context_parallel_size: expected 1")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _SPECULATIVE:
        raise Unsupported(
            f"speculative_config: method {speculative.method} is not supported; expected {', '.join(_SPECULATIVE)}"
        )
    if vllm_config.diffusion_config is not None:
        raise Unsupported("diffusion models are not supported")
    if not vllm_config.cache_config.enable_prefix_caching:
        raise Unsupported("prefix caching is off; set enable_prefix_caching")
    # KDA's RecoverSSM keeps one state per step, after all accepted drafts, even if a stop token precedes some of them.
    if vllm_config.cache_config.use_kda_recoverssm:
        raise Unsupported("use_replayssm: not supported with speculative decoding of KDA; expected false")


def _fields(value: Any) -> Any:
    """Returns the fields of a spec by name, in a form that is equal in every process."""
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
    """Returns the class by which vLLM manages the layer's blocks. It decides from which blocks a prefix resumes."""
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
    """Returns the size of one rank's block, without padding."""
    size = int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
    if size % spec.block_size != 0:
        raise Unsupported(
            f"{name}: a block of {size} bytes and {spec.block_size} tokens is not divisible; set another block_size"
        )
    return size


def _has_rows(spec: Any) -> bool:
    """Returns whether a block has one key and one value per token and head."""
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
    """Returns the attention layer of a spec. A sliding window with the spec of full attention belongs to an engine that
    keeps all blocks of a text."""
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


def _inputs_dimension(spec: Any) -> int | None:
    """Returns the dimension of a convolution's inputs in the first shape; None: the layer has no convolution."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    if spec.mamba_type.name == "LINEAR":
        return None
    return 1 if is_conv_state_dim_first() else 0


def _check_states(spec: Any, name: str) -> None:
    if spec.mamba_cache_mode != "align":
        raise Unsupported(
            f"mamba_cache_mode: {spec.mamba_cache_mode} keeps no states at block ends; set mamba_cache_mode to align"
        )
    if getattr(spec, "is_draft", False):
        raise Unsupported(f"{name}: states of a draft model are not supported; remove speculative_config")
    drafts, kind = spec.num_speculative_blocks, spec.mamba_type.name
    if drafts and (kind not in _DRAFT_STATES or len(spec.shapes) > 2):
        raise Unsupported(
            f"{name}: {len(spec.shapes)} tensors of {kind} are not supported after drafts; expected a convolution and a "
            f"state of {', '.join(_DRAFT_STATES)}; remove speculative_config"
        )


def _check_drafts(vllm_config: Any, layers: Layers) -> None:
    adaptive = getattr(vllm_config.speculative_config, "enable_adaptive_verification", False)
    if adaptive and any(place.drafts for place in layers.linear):
        raise Unsupported(
            "speculative_config: enable_adaptive_verification is not supported with layers that have states, because the "
            "scheduler does not know how many drafts a step verifies; expected false"
        )


def _without_drafts(spec: Any) -> Any:
    """Returns the spec of an engine without speculative decoding, which keeps the same states."""
    drafts = spec.num_speculative_blocks
    shapes = _without_inputs(spec.shapes, _inputs_dimension(spec), drafts)
    return dataclasses.replace(spec, shapes=shapes, num_speculative_blocks=0) if drafts else spec


def _tail(spec: Any, tp: int) -> dict[str, Any]:
    """Returns the convolution fields of `ashlar.Linear` for a layer."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    channels_first = is_conv_state_dim_first()
    channels, taps = spec.shapes[0] if channels_first else reversed(spec.shapes[0])
    order = ashlar.TailOrder.CHANNEL_FIRST if channels_first else ashlar.TailOrder.TOKEN_FIRST
    return dict(
        conv_channels=channels * tp, conv_kernel=taps + 1, conv_dtype=_TYPES[spec.dtypes[0]], conv_order=order
    )  # fmt: skip


def _linear(spec: Any, tp: int, text: Any) -> ashlar.Linear | ashlar.Opaque:
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


def _swaps_states() -> bool:
    """Returns whether states of delta nets are declared as [V, K], but stored as [K, V], as CPU kernels do."""
    return packs()


def mamba1_width(channels: int) -> int:
    """Returns the number of channels that form one head of Mamba-1, as the kernels take them."""
    return next(width for width in range(min(channels, _MAX_HEAD_DIM), 0, -1) if channels % width == 0)


def _latents(spec: Any, text: Any) -> ashlar.Attention | str:
    """Like `_segment_layer`, for MLA. A token's row is the latent and the rotary part of the key."""
    rank = getattr(text, "kv_lora_rank", None) or 0
    if hasattr(text, "index_topk") or spec.cache_role is SparseCacheRole.INDEXER:
        return "sparse MLA"
    if spec.kv_quant_mode.name != "NONE" or spec.state_content_bytes is not None:
        return f"latents in {spec.cache_dtype_str}"
    one_row = spec.tokens_per_state == 1 and spec.model_version is None  # DeepSeek V4 has other rows
    if not one_row or spec.dtype not in _TYPES or not 0 < rank < spec.head_size:
        return "MLAAttentionSpec whose rows are unknown"
    return ashlar.Attention(1, rank, spec.head_size - rank, _TYPES[spec.dtype], kind=ashlar.LayerKind.MLA)


def _segment_layer(spec: Any, manager: type, layer: Any, tp: int, text: Any) -> ashlar.Attention | ashlar.Linear | str:
    """Returns this rank's layer as segments store it, or why they do not support it."""
    if manager is FullAttentionManager:
        if type(spec) is MLAAttentionSpec:
            return _latents(spec, text)
        if not isinstance(layer, ashlar.Attention):
            return f"{type(spec).__name__} whose rows are unknown"
        return dataclasses.replace(layer, kv_heads=layer.kv_heads // tp, stored=ashlar.StoredKeys.ZERO_BASED)
    if manager is SlidingWindowManager and _has_rows(spec):
        return ashlar.Attention(spec.num_kv_heads, spec.head_size, spec.head_size_v, _TYPES[spec.dtype])
    if manager is not MambaManager:
        return f"{type(spec).__name__} whose rows are unknown"
    kind, state = spec.mamba_type.name, spec.shapes[-1]
    known = len(spec.shapes) == (1 if kind == "LINEAR" else 2) and all(each in _TYPES for each in spec.dtypes)
    tail: dict[str, Any] = _tail(spec, 1) if known and kind != "LINEAR" else {}
    order = ashlar.StateOrder.VALUE_FIRST
    if known and isinstance(layer, ashlar.Linear):
        key_heads, value_heads = layer.key_heads // tp, layer.value_heads // tp
        order = ashlar.StateOrder.KEY_FIRST if _swaps_states() else layer.order
        family, d_k, d_v = layer.family, layer.d_k, layer.d_v
    elif known and kind == "GDN_ATTN" and _is_kda(spec, text):
        key_heads, (value_heads, d_v, d_k), family = state[0], state, ashlar.Family.KDA
    elif known and kind == "MAMBA2" and len(state) == 3:
        value_heads, d_v, d_k = state
        key_heads, family = (tail["conv_channels"] - value_heads * d_v) // (2 * d_k), ashlar.Family.MAMBA2
    elif known and kind == "MAMBA1" and len(state) == 2:
        d_k, d_v, key_heads, family = state[1], mamba1_width(state[0]), 1, ashlar.Family.MAMBA1
        value_heads = state[0] // d_v
    elif known and kind == "LINEAR" and len(state) == 3:
        key_heads, (value_heads, d_k, d_v), family = state[0], state, ashlar.Family.LIGHTNING
        order = ashlar.StateOrder.KEY_FIRST
    else:
        return f"states of {kind}"
    return ashlar.Linear(
        family, key_heads, value_heads, d_k, d_v, state_dtype=_TYPES[spec.dtypes[-1]], order=order, **tail
    )  # fmt: skip


def _is_kda(spec: Any, text: Any) -> bool:
    """Returns whether states of vLLM's type GDN_ATTN are KDA's, whose keys and values have heads of one size."""
    heads, d_v, d_k = spec.shapes[1] if len(spec.shapes[1]) == 3 else (0, 0, 0)
    own_size = d_v == d_k and _tail(spec, 1)["conv_channels"] == 3 * heads * d_k
    return own_size and getattr(text, "linear_num_key_heads", None) is None


def _flops(model: Any, layers: Sequence[Any]) -> tuple[float, float]:
    """Returns the FLOPs of prefill per token and per squared number of tokens. If a layer is opaque, they are estimated
    from the model's width. (0, 0): the daemon estimates them from the layout."""
    if not any(isinstance(layer, ashlar.Opaque) for layer in layers):
        return 0.0, 0.0
    width = model.get_hidden_size()
    # Layers with bytes per token attend; layers with states alone are linear.
    attend = sum(isinstance(layer, ashlar.Attention) or getattr(layer, "token_bytes", 0) > 0 for layer in layers)
    return float(_FLOPS_PER_SQUARED_WIDTH * len(layers) * width**2), float(2 * attend * width)


def _layers(kv_cache_config: Any) -> list[tuple[str, int, Any]]:
    found = []
    for group, each in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(each.kv_cache_spec, "kv_cache_specs", None)
        for name in each.layer_names:
            found.append((name, group, each.kv_cache_spec if specs is None else specs[name]))
    return sorted(found, key=lambda layer: _layer_number(layer[0]))


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of an engine's caches as the cache stores them."""

    layout: list[ashlar.Attention | ashlar.Linear | ashlar.Opaque]
    attention: list[tuple[int, str]]
    linear: list[LinearPlace]
    windows: list[WindowPlace]
    attention_groups: dict[int, list[int]]
    block: int
    within: bool  # whether all states can be kept within a step
    specs: list[Any]  # fields of the engine's specs of opaque layers
    segments: list[ashlar.Attention | ashlar.Linear | str]  # as in `Described`

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
    segments: list[ashlar.Attention | ashlar.Linear | str] = []
    for name, group, spec in _layers(kv_cache_config):
        manager = _manager(spec, kv_cache_config.kv_cache_groups[group], name)
        blocks.add(spec.block_size)
        if manager is MambaManager:
            _check_states(spec, name)
            drafts, inputs = spec.num_speculative_blocks, _inputs_dimension(spec)
            linear.append(LinearPlace(len(layout), name, group, spec.shapes, spec.dtypes, inputs, drafts))
            # If EAGLE or MTP drafts, the block may have the state of one block less.
            within.append(spec.num_prefill_checkpoint_blocks > 0 and not drafts)
            spec = _without_drafts(spec)
            layout.append(_linear(spec, tp, text))
        elif manager is FullAttentionManager:
            groups.setdefault(group, []).append(len(layout))
            attention.append((len(layout), name))
            layout.append(_attention(spec, name, tp))
        else:
            windows.append(_window(spec, manager, len(layout), name, group))
            layout.append(ashlar.Opaque(state_bytes=windows[-1].blocks * windows[-1].block_bytes * tp))
        segments.append(_segment_layer(spec, manager, layout[-1], tp, text))
        if linear and linear[-1].name == name and linear[-1].drafts:
            segments[-1] = "states of drafts (speculative_config)"
        if isinstance(layout[-1], ashlar.Opaque):
            specs.append(_fields(spec))
    if len(blocks) != 1:
        raise Unsupported(
            f"blocks of {sorted(blocks)} tokens are not supported; expected one block_size for all layers"
        )
    return Layers(
        layout, attention, linear, windows, groups, blocks.pop(), bool(within) and all(within), specs, segments
    )


def describe(vllm_config: Any, kv_cache_config: Any, options: Options, rank: int) -> Described:
    """Returns the description of the engine's model. Unsupported: the cache cannot serve it; the message has the
    reason."""
    _check(vllm_config, options)
    tp = vllm_config.parallel_config.tensor_parallel_size
    layers = layers_of(kv_cache_config, vllm_config.model_config.hf_text_config, tp)
    _check_drafts(vllm_config, layers)
    cache, model = vllm_config.cache_config, vllm_config.model_config
    form: dict[str, Any] = {
        "caches": str(cache.cache_dtype),
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
    per_token, per_square = _flops(model, layers.layout)
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
            flops_per_token=per_token,
            flops_per_token_squared=per_square,
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
        staged=max(1, options.staging_bytes) if is_staged(vllm_config, options) else 0,
        segments=layers.segments,
    )
