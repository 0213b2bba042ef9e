# SPDX-License-Identifier: Apache-2.0
"""Finds segments in the tokens of prompts that declare none, so that any client can use segments.

A separator ends a segment and is part of it. With the boundaries "messages", each message of a chat template is a
segment, between special tokens (see `chat_template`). The tokens after the last boundary are the query, which is not a
segment.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ashlar.chat_template import MessageTokens, message_tokens, special_tokens
from ashlar.prompt import encoded_row, lengths_between, separator_ends

logger = logging.getLogger("ashlar")


class Boundaries:
    def __init__(self, separator: Sequence[int], messages: MessageTokens | None = None, short: int = 0) -> None:
        """`messages`: the tokens between messages. Adjacent segments of fewer than `short` tokens are joined."""
        self._separator, self._messages, self._short = list(separator), messages or MessageTokens(), short

    def lengths(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> list[int]:
        """Returns the lengths of a prompt's segments, from position 0 on; empty if it has no boundary."""
        text: npt.NDArray[np.int32] = np.asarray(tokens, np.int32)
        ends = separator_ends(text, self._separator)
        for each, length in ((self._messages.begins, 0), (self._messages.ends, 1)):
            if each:
                ends += (np.isin(text, each).nonzero()[0] + length).tolist()
        return lengths_between(ends, len(text), self._short)


def declared_boundaries(
    segment_separator: Any,
    segment_boundaries: str,
    tokenizer: Any,
    template: str | None = None,
    short: int = 0,
) -> Boundaries | None:
    """Returns None if there is no separator and `segment_boundaries` is empty.

    `segment_separator`: tokens or text that end a segment; empty: no separator. `segment_boundaries`: "messages" or "".
    `tokenizer`: a Transformers tokenizer, required for text and messages. `template`: the chat template; None: the
    tokenizer's. `short`: as in `Boundaries`, in tokens. TypeError, ValueError: the message begins with the argument's
    name.
    """
    if segment_boundaries not in ("", "messages"):
        raise ValueError(f"segment_boundaries: {segment_boundaries!r} was given; expected 'messages' or ''")
    given = () if isinstance(segment_separator, str) and not segment_separator else segment_separator
    separator, messages = encoded_row("segment_separator", given, tokenizer, special=False).tolist(), None
    if isinstance(given, str) and (len(separator) != 1 or given not in special_tokens(tokenizer)):
        logger.warning(
            "Ashlar: segment_separator: %r has the token ids %s; expected one special or added token, because other text "
            "may change these ids, and the boundary is then missed; use a special token, or pass token ids here and in prompts",
            given,
            separator,
        )
    if segment_boundaries:
        if tokenizer is None:
            raise ValueError("segment_boundaries: no tokenizer was given; expected one for messages")
        messages = message_tokens(tokenizer, template)
    return Boundaries(separator, messages, short) if separator or segment_boundaries else None


def template_text(given: str) -> str | None:
    """Returns the text of a server's `--chat-template`, which is a file or the template itself; None: `given` is empty.
    OSError: the file cannot be read."""
    if not given or any(each in given for each in "{}\n"):
        return given or None
    return pathlib.Path(given).read_text()
