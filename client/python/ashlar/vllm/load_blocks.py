# SPDX-License-Identifier: Apache-2.0
"""The blocks of loads in the scheduler: spare ones, and those that the daemon may still write after a load."""

from __future__ import annotations

from typing import Any

from ashlar.vllm.model import Described


class LoadBlocks:
    def __init__(self, described: Described) -> None:
        self._described = described
        self._pool: Any = None
        self._loaded: dict[str, list[int]] = {}  # blocks of each load, by request
        self._spare: dict[str, list[Any]] = {}  # spare blocks of loads
        # Blocks held for unresolved loads, and the number of ranks.
        self._unresolved: dict[str, tuple[list[Any], int]] = {}

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def begin(self, name: str, ids: tuple[list[int], ...], tokens: int, present: int) -> list[list[int]]:
        """`ids`: the request's blocks. `tokens`: those of the load, whose first `present` ones the engine has. Returns
        the spare blocks of each group. ValueError: too few blocks are free."""
        spare = self._take_spare(name, present)
        self._loaded[name] = [page for table in self._described.pages(ids, tokens) + spare for page in table]
        return spare

    def _take_spare(self, name: str, present: int) -> list[list[int]]:
        """Returns blocks that replace the present ones of an object. The object lands because its later tokens are
        missing.

        Running requests share the present blocks. The null block could replace one of them, but a landing must not
        write a block twice.
        """
        described = self._described
        count = (present % described.prefix_block) // described.block
        groups = len(described.attention_groups)
        if described.staged or count * groups < 2:
            return []
        taken = self._pool.get_new_blocks(count * groups)  # ValueError: too few blocks are free
        self._spare[name] = taken
        ids = [block.block_id for block in taken]
        return [ids[group * count : (group + 1) * count] for group in range(groups)]

    def fail(self, name: str) -> None:
        """Call it if a load was not sent to the workers: no rank writes its blocks."""
        self._loaded.pop(name, None)

    def end(self, name: str) -> None:
        self._loaded.pop(name, None)
        if spare := self._spare.pop(name, None):
            self._pool.free_blocks(spare)

    def hold(self, name: str, ranks: int) -> None:
        """This number of further ranks may still write the load's blocks. Call it before `end`."""
        held = [self._pool.blocks[i] for i in self._loaded.get(name, [])]
        self._pool.touch(held)
        before, waiting = self._unresolved.get(name, ([], 0))
        self._unresolved[name] = (before + held, waiting + ranks)

    def quiesced(self, name: str, ranks: int) -> None:
        """This number of ranks no longer writes the load's blocks."""
        held, waiting = self._unresolved.pop(name, ([], 0))
        if waiting > ranks:
            self._unresolved[name] = (held, waiting - ranks)
        else:
            self._pool.free_blocks(reversed(held))

    @property
    def has_unresolved(self) -> bool:
        return bool(self._unresolved)
