# SPDX-License-Identifier: Apache-2.0
"""Prompts whose segments the workers are asked to look up and land, and the workers' answers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ashlar.vllm.messages import Fetch, Fetched


@dataclasses.dataclass
class _Asked:
    prompt: Any
    tokens: int
    segments: int
    ahead: int  # tokens of this fetch and of those before it that have no final answer
    landing_since: float | None = None
    answers: dict[int, Fetched] = dataclasses.field(default_factory=dict)  # final answers, by rank


class Fetches:
    """The fetches in progress. A prompt, which may be any object, has at most one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._asked: dict[int, _Asked] = {}
        self._new: list[Fetch] = []
        self._released: list[int] = []
        self._number = 0

    def ask(self, prompt: Any, tokens: npt.NDArray[np.int32], lengths: list[int], salt: str) -> int:
        """Returns the number of the fetch. Call `release` for it."""
        self._number += 1
        ahead = sum(each.tokens for each in self._asked.values() if len(each.answers) < self._ranks)
        self._asked[self._number] = _Asked(prompt, sum(lengths), len(lengths), ahead + sum(lengths))
        self._new.append(Fetch(self._number, tokens, lengths, salt))
        return self._number

    def release(self, number: int) -> None:
        """Makes the workers release what they have landed. Later answers are ignored."""
        self._asked.pop(number, None)
        self._new = [each for each in self._new if each.number != number]
        self._released.append(number)

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of all segments that were not released."""
        return sum(each.tokens for each in self._asked.values())

    @property
    def segments(self) -> int:
        """Returns the number of all segments that were not released."""
        return sum(each.segments for each in self._asked.values())

    def landing_since(self, number: int) -> float | None:
        """Returns when a worker first answered the fetch; None: the fetch waits for other fetches."""
        return self._asked[number].landing_since

    def tokens_ahead(self, number: int) -> int:
        """Returns the tokens of this fetch and of those that were in progress when it was asked for."""
        return self._asked[number].ahead

    def waiting(self) -> list[Any]:
        """Returns the prompts of the fetches for which no worker has reported anything."""
        return [each.prompt for each in self._asked.values() if each.landing_since is None and not each.answers]

    def prompts_of(self, numbers: Iterable[int]) -> list[Any]:
        return [self._asked[number].prompt for number in numbers if number in self._asked]

    def hear(self, fetched: dict[tuple[int, int], Fetched]) -> list[tuple[Any, list[Fetched]]]:
        """`fetched`: answers by number of the fetch, and rank. Returns the prompts for which all ranks have given their
        final answers, with these in the order of ranks."""
        ended = []
        for (number, rank), answer in fetched.items():
            asked = self._asked.get(number)
            if asked is None:
                continue
            asked.landing_since = asked.landing_since or time.monotonic()
            if not answer.ended:
                continue
            asked.answers[rank] = answer
            if len(asked.answers) == self._ranks:
                ended.append((asked.prompt, [asked.answers[each] for each in sorted(asked.answers)]))
        return ended

    def take(self) -> tuple[list[Fetch], list[int]]:
        """Returns the new fetches, and the numbers of released ones, since the last call."""
        new, self._new = self._new, []
        released, self._released = self._released, []
        return new, released
