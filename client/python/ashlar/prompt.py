# SPDX-License-Identifier: Apache-2.0
"""A prompt that declares where its segments end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ashlar._ashlar import whole

Tokens = npt.NDArray[np.int32]
_MOST = np.iinfo(np.int32).max


def token_row(name: str, given: Any) -> Tokens:
    """Returns a part of a prompt as 32-bit integers, from a list, an array, or a tensor of one sequence, [n] or [1, n].

    TypeError, ValueError: no such tokens; the message begins with `name` and never contains the text itself.
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


def encoded_row(name: str, given: Any, tokenizer: Any, *, special: bool) -> Tokens:
    """As `token_row`; also accepts text. `tokenizer`: a Transformers tokenizer; None: text raises TypeError. `special`:
    whether to include the tokens that the tokenizer adds to a text."""
    if isinstance(given, str):
        if tokenizer is None:
            raise TypeError(f"{name}: a str of {len(given)} characters was given; expected tokens, or also a tokenizer")
        given = tokenizer.encode(given, add_special_tokens=special)
    return token_row(name, given)


def separator_ends(tokens: Tokens, separator: Sequence[int]) -> list[int]:
    """Returns the positions after each separator; none for an empty separator."""
    if len(separator) == 0 or len(tokens) < len(separator):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(separator))
    ends: list[int] = ((windows == np.asarray(separator)).all(1).nonzero()[0] + len(separator)).tolist()
    return ends


def lengths_between(ends: Iterable[int], count: int, min_tokens: int = 0) -> list[int]:
    """Returns the lengths of the segments that end at `ends`, in a prompt of `count` tokens. Its last token is in none.

    Adjacent segments of fewer than `min_tokens` are joined.
    """
    lengths: list[int] = []
    before = min_tokens
    for length in np.diff(sorted({0, *ends})).tolist():
        # A segment below the minimum is not joined with longer neighbours, because that would change their names.
        if length < min_tokens and before < min_tokens:
            lengths[-1] += length
        else:
            lengths.append(length)
        before = length
    return lengths if sum(lengths) < count else lengths[:-1]


def segment_lengths(tokens: Any, separator: Any, *, min_tokens: int = 0, tokenizer: Any = None) -> list[int]:
    """Returns the lengths of a prompt's segments in tokens, from position 0 on, for `Cache.begin`. Each ends with the
    separator.

    `tokens`, `separator`: lists, arrays or tensors of tokens; with a Transformers `tokenizer` also text. The tokens of
    a text are those of `tokenizer.encode(text)`. The separator is found by its tokens, so use one that has the same
    tokens in every text, such as a special token. The tokens after the last separator are the query, which has at least
    one token. Adjacent segments of fewer than `min_tokens` are joined. ValueError: the separator is empty.
    """
    row = encoded_row("tokens", tokens, tokenizer, special=True)
    end = encoded_row("separator", separator, tokenizer, special=False)
    if len(end) == 0:
        raise ValueError("separator: no tokens; expected at least one")
    return lengths_between(separator_ends(row, end.tolist()), len(row), whole("min_tokens", min_tokens))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Segments that may be reused at any position, and the query after them, which is always computed.

    Each segment, and the query, is a list of tokens, an array or a tensor. `conversation`: 16 random bytes, the same in
    every turn. The next turn may then resume from this turn's composed states. `salt`: prompts with different salts
    share nothing, nor do prompts with and without a salt. TypeError, ValueError: a field is wrong, or there are no
    tokens.
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

    @classmethod
    def split(
        cls,
        tokens: Any,
        separator: Any,
        *,
        tokenizer: Any = None,
        conversation: bytes = b"",
        salt: str | bytes = b"",
    ) -> Self:
        """Returns a prompt whose segments end with the separator: see `segment_lengths`."""
        row = encoded_row("tokens", tokens, tokenizer, special=True)
        lengths = segment_lengths(row, separator, tokenizer=tokenizer)
        *segments, query = np.split(row, np.cumsum([0, *lengths])[1:])
        return cls(segments, query, conversation, salt)

    @functools.cached_property
    def _rows(self) -> list[Tokens]:
        return [token_row(f"segments[{i}]", segment) for i, segment in enumerate(self.segments)]

    @functools.cached_property
    def tokens(self) -> Tokens:
        """All tokens, of the segments and the query: [tokens]."""
        return np.concatenate([np.zeros(0, np.int32), *self._rows, token_row("query", self.query)])

    @property
    def lengths(self) -> list[int]:
        """The lengths of the segments in tokens, without empty ones."""
        return [len(row) for row in self._rows if len(row) > 0]
