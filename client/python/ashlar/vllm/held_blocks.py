# SPDX-License-Identifier: Apache-2.0
"""Blocks with a request's running states, held until the worker has copied the states from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class HeldBlocks:
    """Holds blocks that the scheduler would free, because the last computed token is in another block."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def hold(self, tables: Sequence[list[Any]], index: int, crosses_end: bool, pool: Any) -> bool:
        """Holds the blocks at `index`. Returns False if there is none.

        `crosses_end`: a step or a jump crosses the end of these blocks, so they have no state of their end. They are
        taken from the request, because the engine's own cache would name them as if they had.
        """
        if index < 0 or any(index >= len(table) or table[index].is_null for table in tables):
            return crosses_end and all(index >= len(table) or table[index].is_null for table in tables)
        for table in tables:
            self._blocks.append(table[index])
            if crosses_end:
                table[index] = pool.null_block
            else:
                pool.touch([table[index]])
        return True

    def free(self, pool: Any) -> None:
        if self._blocks:
            pool.free_blocks(self._blocks)
            self._blocks = []
