# SPDX-License-Identifier: Apache-2.0
"""Tuples of linear layers that wait in host memory for their prompt's step, in the type in which the cache stores them.

The daemon's client returns tuples in float32. With `segment_dtype` float16, a stored state is float16 times a power of
two per head, and a stored dense transition is float16, so both are kept in 16 bits without loss. A transition that was
stored in a smaller form is rounded to 16 bits, like a dense one. The device converts tuples to float32.
"""

from __future__ import annotations

import dataclasses
import math

import torch

import ashlar
from ashlar.tensors import MATRIX
from ashlar.vllm.host_memory import Lease, whole_size


def state_shape(layer: ashlar.Linear) -> tuple[int, int, int]:
    """Returns the shape of a state as the engine stores it."""
    value_first = layer.order is ashlar.StateOrder.VALUE_FIRST
    return (layer.value_heads, layer.d_v, layer.d_k) if value_first else (layer.value_heads, layer.d_k, layer.d_v)


def transition_shape(layer: ashlar.Linear) -> tuple[int, ...]:
    if layer.family is ashlar.Family.MAMBA1:
        return layer.value_heads, layer.d_v
    return (layer.value_heads, layer.d_k, layer.d_k) if layer.family in MATRIX else (layer.value_heads,)


def _is_half(layer: ashlar.Linear) -> bool:
    return layer.state_dtype is ashlar.DType.F16


def tuple_bytes(layer: ashlar.Linear) -> int:
    """Returns the most bytes that a layer's tuple takes."""
    half = _is_half(layer)
    rotates = layer.family is ashlar.Family.LIGHTNING  # only a worker knows whether its keys rotate
    sizes = [
        math.prod(state_shape(layer)) * (2 if half and not rotates else 4),
        math.prod(transition_shape(layer)) * (2 if half and layer.family in MATRIX else 4),
        layer.value_heads * 4 if half else 0,
        layer.conv_channels * max(0, layer.conv_kernel - 1) * 4,
    ]
    return sum(map(whole_size, sizes))


@dataclasses.dataclass
class LandedTuple:
    """A tuple of one linear layer, in host memory of a lease: S ← transition · S + state."""

    transition: torch.Tensor | None  # as in LinearTensors, perhaps in float16; None: the state replaces S
    state: torch.Tensor  # [heads, d_k, d_v] or [heads, d_v, d_k], in the layer's order
    scales: torch.Tensor | None  # float32, [heads, 1, 1], powers of two by which the state is multiplied; None: 1
    tail: torch.Tensor | None  # bytes; None: the layer has no convolution

    def state_on(self, device: torch.device) -> torch.Tensor:
        """Returns the state in float32, without waiting for the device. The memory must not change before it has
        copied."""
        state = self.state.to(device, non_blocking=True).float()
        return state if self.scales is None else state * self.scales.to(device, non_blocking=True)


def keep(
    memory: Lease,
    layer: ashlar.Linear,
    state: torch.Tensor,
    transition: torch.Tensor | None,
    tail: torch.Tensor | None,
) -> LandedTuple:
    """Copies a tuple into the memory. `state` and `transition`: float32, as `Request.read_tuple` returns them; the
    state's keys may have been rotated since."""
    scales = None
    if _is_half(layer):
        if layer.rope is None:
            state, scales = _halves(state)
            scales = memory.copy(scales)
        if transition is not None and layer.family in MATRIX:
            transition = transition.half()
    kept = None if transition is None else memory.copy(transition)
    return LandedTuple(kept, memory.copy(state), scales, None if tail is None else memory.copy(tail))


def _halves(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float16, and scales as in LandedTuple. Loses nothing if each head is float16 times a power of two: each
    head's largest number gets float16's largest exponent, so no other one becomes smaller than it was stored."""
    exponents = torch.frexp(state.abs().flatten(1).amax(1)).exponent - 16
    scales = torch.ldexp(torch.ones(len(state)), exponents.clamp(min=-126))[:, None, None]
    return (state / scales).half(), scales
