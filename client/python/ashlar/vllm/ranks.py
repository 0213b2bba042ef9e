# SPDX-License-Identifier: Apache-2.0
"""Ranks of tensor parallelism that run the model outside the engine's steps: all of them run it, or none.

A forward pass has collectives, which each rank must enter in the same order. If one rank omits a forward pass, or leaves
it in the middle, the collectives of the others pair with those of its next step, and the results of both are wrong.
Ranks agree over the engine's group for CPU tensors, which no forward pass uses.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from ashlar.vllm.identity import Unsupported

logger = init_logger("vllm.ashlar")

Made = TypeVar("Made")
_UNKNOWN = -1


class RanksApart(Exception):
    """The ranks have entered different collectives. No later step can be right, so the engine must end."""


class Ranks:
    """Every rank must make the same calls in the same order."""

    def __init__(self, count: int) -> None:
        self.count = count
        # Of the last `together`: a digest of the operations so far that may have collectives, and whether this rank is in
        # an operation that has none.
        self._digest, self._is_local = 0, False

    def all(self, able: bool) -> bool:
        """Returns whether all ranks are able. Waits for the others."""
        return self._largest(int(not able)) == [0]

    def agree(self, make: Callable[[], Made]) -> Made:
        """Returns what `make` returns, if it succeeds on all ranks. Otherwise all ranks raise: its own error, or
        Unsupported if only other ranks have one. `make` must not run the model."""
        try:
            made = make()
        except Exception:
            self.all(False)
            raise
        if not self.all(True):
            raise Unsupported("segments: another rank cannot run the model")
        return made

    def _largest(self, *numbers: int) -> list[int]:
        """Returns the largest of all ranks' numbers, by place."""
        if self.count == 1:
            return list(numbers)
        votes = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group=get_tp_group().cpu_group)
        except Exception as error:
            raise RanksApart(f"the ranks cannot agree: {error}") from error
        return [int(each) for each in votes.tolist()]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within the block, all ranks run the model. RanksApart: it failed on some ranks, or between different collectives.
        Otherwise an error that all ranks have is passed on."""
        self._digest, self._is_local = 0, False
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            logger.exception("Ashlar: the model failed on this rank outside the engine's steps")
            stop = self._digest if self._is_local else _UNKNOWN
            # The others may still be in the block. Without this wait, the next step's collectives would pair with theirs.
            _, some_ran, last, first = self._largest(1, 0, stop, -stop)
            if some_ran:
                raise RanksApart("the model failed on this rank outside the engine's steps") from error
            if last != -first or last == _UNKNOWN:
                raise RanksApart("the model failed on all ranks, which may be between different collectives") from error
            raise
        if self._largest(0, 1, _UNKNOWN, _UNKNOWN)[0]:
            raise RanksApart("the model failed on another rank outside the engine's steps")

    def enter(self, operation: str, is_local: bool) -> None:
        """Call it within `together` before each operation. `is_local`: it has no collectives."""
        if not is_local:
            self._digest = zlib.crc32(operation.encode(), self._digest)
        self._is_local = is_local

    def leave(self) -> None:
        """Call it after an operation that did not fail."""
        self._is_local = False
