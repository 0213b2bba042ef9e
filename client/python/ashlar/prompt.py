"""A prompt that says where its segments end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def _row(tokens: Any) -> npt.NDArray[np.int32]:
    return np.asarray(tokens, dtype=np.int64).ravel().astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Texts that may be reused wherever they stand, and the tokens behind them, which are always computed.

    Each segment, and the query, is a list of tokens, an array or a tensor. `conversation`: 16 random bytes, the same in
    every turn: the next turn may then resume from the states of this one, though they are composed. `salt`: prompts with
    different salts, or with none, share nothing.
    """

    segments: Sequence[Any]
    query: Any = ()
    conversation: bytes = b""
    salt: str | bytes = b""

    def __post_init__(self) -> None:
        if len(self.conversation) not in (0, 16):
            raise ValueError(f"conversation: 16 bytes are needed, not {len(self.conversation)}")
        if len(self.tokens) == 0:
            raise ValueError("segments: no tokens, and none in the query")

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        parts: Iterable[Any] = [*self.segments, self.query]
        return np.concatenate([np.zeros(0, np.int32), *(_row(part) for part in parts)])

    @property
    def lengths(self) -> list[int]:
        return [length for length in (len(_row(segment)) for segment in self.segments) if length > 0]
