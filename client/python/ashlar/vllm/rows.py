# SPDX-License-Identifier: Apache-2.0
"""The places of a token's key and value in a block of the engine.

On a GPU a token is a row of the block. CPU kernels pack the tokens of a block in a different order: whole blocks are
moved unchanged, and parts of blocks row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from ashlar.vllm.identity import Unsupported

_DIGIT = 128  # numbers below this are exact in every supported type of keys


def packs() -> bool:
    """Returns whether the engine's kernels pack blocks in a different order."""
    return bool(current_platform.is_cpu())


class RowOrder:
    """The order of rows in one layer's blocks, [heads, tokens, row] each."""

    def __init__(self, index: torch.Tensor | None = None) -> None:
        """`index`: for each token, the places of its row's numbers within a head's part of a block. None:
        consecutive."""
        self._index = index

    def read(self, stored: torch.Tensor, tokens: int) -> torch.Tensor:
        """Returns the rows of the first tokens of blocks: [..., heads, tokens, row] from [..., heads, block, row]."""
        if self._index is None:
            return stored[..., :tokens, :]
        index = self._index[:tokens]
        return stored.flatten(-2)[..., index.flatten()].unflatten(-1, index.shape)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Converts rows into whole blocks as the engine stores them. The inverse of `read`."""
        if self._index is None:
            return rows
        stored = torch.empty_like(rows.flatten(-2))
        stored[..., self._index.flatten()] = rows.flatten(-2)
        return stored.view(rows.shape)


def measure(layer: Any, tensor: torch.Tensor, value_dim: int) -> RowOrder:
    """Finds the order of an attention layer by running the engine's own writer. Raises Unsupported."""
    if not packs():
        return RowOrder()
    heads, block, row = tensor.shape[1:]
    count = block * row
    numbers, place, factor = torch.arange(count).view(block, row), torch.zeros(heads, count, dtype=torch.long), 1
    try:
        while factor < count:
            digits = (numbers // factor % _DIGIT).to(tensor.dtype)
            rows = digits[:, None].expand(block, heads, row)
            stored = torch.zeros(1, heads, block, row, dtype=tensor.dtype)
            keys, values = rows[..., : row - value_dim].contiguous(), rows[..., row - value_dim :].contiguous()
            layer.impl.do_kv_cache_update(layer, keys, values, stored, torch.arange(block))
            place += stored.view(heads, count).long() * factor
            factor *= _DIGIT
    except Exception as error:
        raise Unsupported(f"the order of keys in a block is unknown: {error}") from error
    index = place[0].argsort()
    if not (place == place[0]).all() or not torch.equal(place[0][index], torch.arange(count)):
        raise Unsupported("the order of keys in a block is unknown")
    return RowOrder(index.view(block, row))
