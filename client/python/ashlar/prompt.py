# SPDX-License-Identifier: Apache-2.0
"""A prompt that says where its segments end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
_MOST = np.iinfo(np.int32).max


def token_row(name: str, given: Any) -> Tokens:
    """A part of a prompt as 32-bit integers: of a list, an array, or a tensor of one sequence, [n] or [1, n].

    Raises TypeError or ValueError whose message begins with `name`, and never shows the text itself.
    """
    if isinstance(given, (str, bytes)):
        raise TypeError(f"{name}: a str of {len(given)} characters was given; expected tokens, which are whole numbers")
    try:
        row = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {type(given).__name__} was given; expected tokens, which are whole numbers") from None
    if row.size == 0:
        return np.zeros(0, np.int32)
    if row.ndim == 0 or row.dtype.kind not in "iu":
        kind = str(row.dtype) if row.ndim > 0 and row.dtype.kind in "bf" else type(given).__name__
        raise TypeError(f"{name}: {kind} was given; expected tokens, which are whole numbers")
    if row.ndim != 1 and row.shape != (1, row.size):
        raise ValueError(f"{name}: an array of shape {row.shape}; expected the tokens of one sequence")
    for number in (row.min(), row.max()):
        if not 0 <= number <= _MOST:
            raise ValueError(f"{name}: token {number} is out of range; expected 0 to {_MOST}")
    return row.ravel().astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Texts that may be reused at any position, and the query after them, which is always computed.

    Each segment, and the query, is a list of tokens, an array or a tensor. `conversation`: 16 random bytes, the same in
    every turn: the next turn may then resume from the states of this one, though they are composed. `salt`: prompts with
    different salts, or with none, share nothing.
    """

    segments: Sequence[Any]
    query: Any = ()
    conversation: bytes = b""
    salt: str | bytes = b""

    def __post_init__(self) -> None:
        if isinstance(self.segments, (str, bytes)) or not isinstance(self.segments, Sequence):
            given = type(self.segments).__name__
            raise TypeError(f"segments: {given} was given; expected a sequence with the tokens of each segment")
        if not isinstance(self.conversation, bytes):
            raise TypeError(f"conversation: {type(self.conversation).__name__} was given; expected bytes")
        if len(self.conversation) not in (0, 16):
            raise ValueError(f"conversation: {len(self.conversation)} bytes were given; expected 16")
        if not isinstance(self.salt, (str, bytes)):
            raise TypeError(f"salt: {type(self.salt).__name__} was given; expected str or bytes")
        if len(self.tokens) == 0:
            raise ValueError("segments: no tokens in segments or query; expected at least one")

    @functools.cached_property
    def _rows(self) -> list[Tokens]:
        return [token_row(f"segments[{i}]", segment) for i, segment in enumerate(self.segments)]

    @functools.cached_property
    def tokens(self) -> Tokens:
        return np.concatenate([np.zeros(0, np.int32), *self._rows, token_row("query", self.query)])

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self._rows if len(row) > 0]
