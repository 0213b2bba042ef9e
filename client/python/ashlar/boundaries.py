# SPDX-License-Identifier: Apache-2.0
"""Finds segments in the tokens of prompts that declare none, so that any client can use segments.

A separator ends a segment and is part of it. With the boundaries "messages", each message of a chat template begins a
segment. The tokens after the last boundary are the query, which is not a segment.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ashlar.prompt import encoded_row, lengths_between, separator_ends

logger = logging.getLogger("ashlar")

# Some templates have no system message.
_ROLES = (("system", "user", "assistant", "user"), ("user", "assistant", "user"))


class Boundaries:
    def __init__(self, separator: Sequence[int], message: int | None = None, short: int = 0) -> None:
        """`message`: the token with which messages begin. Adjacent segments of fewer than `short` tokens are
        joined."""
        self._separator, self._message, self._short = list(separator), message, short

    def lengths(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> list[int]:
        """Returns the lengths of a prompt's segments, from position 0 on; empty if it has no boundary."""
        text: npt.NDArray[np.int32] = np.asarray(tokens, np.int32)
        ends = separator_ends(text, self._separator)
        if self._message is not None:
            ends += (text == self._message).nonzero()[0].tolist()
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
    separator, message = encoded_row("segment_separator", given, tokenizer, special=False).tolist(), None
    if isinstance(given, str) and (len(separator) != 1 or given not in _special_tokens(tokenizer)):
        logger.warning(
            "Ashlar: segment_separator: %r has the token ids %s; expected one special or added token, because next to other "
            "text, these ids may change, and no boundary is found; use a special token, or pass token ids here and in "
            "prompts",
            given,
            separator,
        )
    if segment_boundaries:
        if tokenizer is None:
            raise ValueError("segment_boundaries: no tokenizer was given; expected one for messages")
        message = message_token(tokenizer, template)
    return Boundaries(separator, message, short) if separator or segment_boundaries else None


def template_text(given: str) -> str | None:
    """Returns the text of a server's `--chat-template`, which is a file or the template itself; None: `given` is empty.
    OSError: the file cannot be read."""
    if not given or any(each in given for each in "{}\n"):
        return given or None
    return pathlib.Path(given).read_text()


def _special_tokens(tokenizer: Any) -> set[str]:
    """Returns the texts that the tokenizer replaces by one token wherever they are."""
    return {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}


def message_token(tokenizer: Any, template: str | None = None) -> int:
    """Returns the special token with which the chat template, by default the model's, begins each message. ValueError:
    there is none."""
    specials = sorted(_special_tokens(tokenizer), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
    reason = "no special token begins each message"
    for roles in _ROLES:
        contents = [f"content{number}" for number in range(len(roles))]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
        try:
            text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        before = [pattern.findall(part) for part in re.split("|".join(contents), text)[:-1]]
        in_all = [token for token in before[-1] if all(token in each for each in before)]
        if in_all:
            return int(tokenizer.convert_tokens_to_ids(in_all[0]))
    raise ValueError(
        f"segment_boundaries: messages cannot be found in the chat template ({reason}); "
        "expected a special token at the beginning of each message; set segment_separator instead"
    )
