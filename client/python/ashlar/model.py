# SPDX-License-Identifier: Apache-2.0
"""An engine's description of its model: identity, layers, and the shape of their cached state.

The numbers of the enumerations are the ones in docs/formats.md and never change.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class DType(enum.Enum):
    """The type of an element."""

    F32 = 1
    F16 = 2
    BF16 = 3
    F8E4M3 = 4
    F8E5M2 = 5


class LayerKind(enum.Enum):
    """The kind of state that a layer keeps."""

    GQA = 1  # a key and a value per head; also MHA and MQA
    MLA = 2  # a latent and a rotary key
    LINEAR = 3
    OPAQUE = 4


class RopeStyle(enum.Enum):
    """The pairs of dimensions that are rotated together: i with i + rotary_dim / 2, or 2i with 2i + 1."""

    NONE = 0
    HALF_SPLIT = 1
    INTERLEAVED = 2


class StoredKeys(enum.Enum):
    """The form of the keys in the engine's pages: rotated to their position, or not rotated."""

    ZERO_BASED = 1
    UNROTATED = 2


class Family(enum.Enum):
    """The recurrence of a linear layer, which decides the form of its transitions and of its gates."""

    RETNET = 1
    LIGHTNING = 2
    MAMBA2 = 3
    MAMBA1 = 4
    GLA = 5
    DELTANET = 6
    GDN = 7
    KDA = 8


class StateOrder(enum.Enum):
    """The order of a state's dimensions."""

    KEY_FIRST = 1  # [d_k, d_v]
    VALUE_FIRST = 2  # [d_v, d_k]


class TailOrder(enum.Enum):
    """The order of a convolution tail's dimensions."""

    TOKEN_FIRST = 1  # [conv_kernel − 1, conv_channels]
    CHANNEL_FIRST = 2  # [conv_channels, conv_kernel − 1]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    frequencies: Sequence[float]  # radians per position, one per pair of dimensions: [rotary_dim / 2]
    style: RopeStyle = RopeStyle.HALF_SPLIT
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Attention:
    """A layer that keeps a key and a value per token and head (MLA: a latent and a rotary part, `kv_heads` 1)."""

    kv_heads: int
    key_dim: int  # MLA: width of the latent
    value_dim: int  # MLA: width of the rotary part of the key
    dtype: DType = DType.F32
    rope: Rope | None = None
    stored: StoredKeys = StoredKeys.ZERO_BASED
    scales: bool = False  # fp8: one float32 scale per token and head
    kind: LayerKind = LayerKind.GQA


@dataclasses.dataclass(frozen=True)
class Linear:
    """A layer with a state of [value_heads, d_k, d_v] and, if `conv_kernel` is above 0, a convolution before it."""

    family: Family
    key_heads: int
    value_heads: int
    d_k: int
    d_v: int
    state_dtype: DType = DType.F32
    order: StateOrder = StateOrder.KEY_FIRST
    conv_channels: int = 0
    conv_kernel: int = 0
    conv_dtype: DType | None = None  # None: state_dtype
    conv_order: TailOrder = TailOrder.TOKEN_FIRST
    # RetNet, Lightning, Mamba-2: [value_heads]. Mamba-1: [value_heads, d_k, d_v], flattened. Other families: None.
    decay_table: Sequence[float] | None = None
    rope: Rope | None = None  # only for families with scalar transitions

    @property
    def kind(self) -> LayerKind:
        return LayerKind.LINEAR


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A layer whose bytes are stored and landed unchanged. Its model has exact prefixes but no segments.

    Both sizes are sums over the tensor-parallel ranks, which have equal parts. At least one of them is positive.
    """

    token_bytes: int = 0  # bytes of one token in the pages; 0: no pages
    state_bytes: int = 0  # bytes of the state after a token; 0: no state

    @property
    def kind(self) -> LayerKind:
        return LayerKind.OPAQUE


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's identity and layout. Engines share objects only if both agree.

    `Cache` checks the values, and raises ValueError with the field's name.
    """

    model_id: str
    weights_digest: str  # digest of the weights as loaded; required
    layers: Sequence[Attention | Linear | Opaque]
    page_tokens: int  # tokens per page
    head: int = 0  # seam widths in tokens: of a segment of n tokens, [head, n − tail) is cached
    tail: int = 0
    dtype: str = ""
    quantization: str = ""
    tokenizer_digest: str = ""
    lora: str = ""
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    # Cost of prefill of n tokens by the unsharded model: flops_per_token · n + flops_per_token_squared · n². If
    # flops_per_token is 0, the daemon estimates both.
    flops_per_token: float = 0.0
    flops_per_token_squared: float = 0.0
    tokens_per_second: float = 0.0  # rate of prefill, for the break-even check of hits; 0: no check
