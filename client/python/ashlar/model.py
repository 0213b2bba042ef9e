# SPDX-License-Identifier: Apache-2.0
"""An engine's description of its model: identity, layers, and the shape of their cached state.

The numbers of the enumerations are the ones in docs/formats.md and never change.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class DType(enum.Enum):
    F32 = 1
    F16 = 2
    BF16 = 3
    F8E4M3 = 4
    F8E5M2 = 5


class LayerKind(enum.Enum):
    GQA = 1
    MLA = 2
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
    """The recurrence of a linear layer: its transition T and its write u for a token."""

    RETNET = 1
    LIGHTNING = 2
    MAMBA2 = 3
    MAMBA1 = 4
    GLA = 5
    DELTANET = 6
    GDN = 7
    KDA = 8


class StateOrder(enum.Enum):
    KEY_FIRST = 1
    VALUE_FIRST = 2


class TailOrder(enum.Enum):
    TOKEN_FIRST = 1
    CHANNEL_FIRST = 2


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: radians per position for each pair of dimensions, `rotary_dim / 2` of them."""

    frequencies: Sequence[float]
    style: RopeStyle = RopeStyle.HALF_SPLIT
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Attention:
    """A layer that keeps a key and a value per token and head (MLA: a latent and a rotary part, `kv_heads` 1)."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: DType = DType.F32
    rope: Rope | None = None
    stored: StoredKeys = StoredKeys.ZERO_BASED
    scales: bool = False
    kind: LayerKind = LayerKind.GQA


@dataclasses.dataclass(frozen=True)
class Linear:
    """A layer with a state of [value_heads, d_k, d_v] and, where conv_kernel > 0, a convolution before it."""

    family: Family
    key_heads: int
    value_heads: int
    d_k: int
    d_v: int
    state_dtype: DType = DType.F32
    order: StateOrder = StateOrder.KEY_FIRST
    conv_channels: int = 0
    conv_kernel: int = 0
    conv_dtype: DType | None = None
    conv_order: TailOrder = TailOrder.TOKEN_FIRST
    decay_table: Sequence[float] | None = None
    rope: Rope | None = None

    @property
    def kind(self) -> LayerKind:
        return LayerKind.LINEAR


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A layer whose bytes are stored and landed unchanged. Its model has exact prefixes but no segments.

    Both are sums over the tensor-parallel ranks, which have equal parts: `token_bytes` per token in the pages, and
    `state_bytes` of the state. At least one of them is positive.
    """

    token_bytes: int = 0
    state_bytes: int = 0

    @property
    def kind(self) -> LayerKind:
        return LayerKind.OPAQUE


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's identity and layout. Entries of one model are never found by another.

    Leave `flops_per_token` at 0 to have the daemon estimate both FLOPs from the layout. `tokens_per_second`, of prefill,
    switches the break-even check on.
    """

    model_id: str
    weights_digest: str
    layers: Sequence[Attention | Linear | Opaque]
    page_tokens: int
    head: int = 0
    tail: int = 0
    dtype: str = ""
    quantization: str = ""
    tokenizer_digest: str = ""
    lora: str = ""
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    flops_per_token: float = 0.0
    flops_per_token_squared: float = 0.0
    tokens_per_second: float = 0.0
