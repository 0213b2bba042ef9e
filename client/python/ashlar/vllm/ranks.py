# SPDX-License-Identifier: Apache-2.0
"""Ranks of tensor parallelism that run the model outside the engine's steps: all of them run it, or none.

A forward pass has collectives, which each rank must enter in the same order. If one rank omits a forward pass, or leaves
it in the middle, the collectives of the others pair with those of its next step, and the results of both are wrong.
Ranks agree over the engine's group for CPU tensors, which no forward pass uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

logger = init_logger("vllm.ashlar")


class RanksApart(Exception):
    """The ranks have entered different collectives. No later step can be right, so the engine must end."""


class Ranks:
    """Every rank must make the same calls in the same order."""

    def __init__(self, count: int) -> None:
        self.count = count

    def all(self, able: bool) -> bool:
        """Returns whether all ranks are able. Waits for the others."""
        return self._count(able) == self.count

    def _count(self, able: bool) -> int:
        if self.count == 1:
            return int(able)
        votes = torch.tensor([int(able)], dtype=torch.int32, device="cpu")
        try:
            torch.distributed.all_reduce(votes, group=get_tp_group().cpu_group)
        except Exception as error:
            raise RanksApart("a rank has ended") from error
        return int(votes.item())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within the block, all ranks run the model. RanksApart: it failed on some ranks. An error that all ranks have
        is passed on."""
        try:
            yield
        except Exception as error:
            if self.count > 1:
                logger.exception("Ashlar: the model failed on this rank outside the engine's steps")
            # The others may still be in the block. Without this wait, the next step's collectives would pair with theirs.
            if self._count(False) == 0:
                raise
            raise RanksApart("the model failed on this rank outside the engine's steps") from error
        if not self.all(True):
            raise RanksApart("the model failed on another rank outside the engine's steps")
