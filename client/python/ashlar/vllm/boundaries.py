# SPDX-License-Identifier: Apache-2.0
"""Segments of prompts whose requests declare none: found in the prompt's tokens, so that any client can use them.

`segment_separator` ends a segment and is part of it. With `segment_boundaries: messages`, each message of the model's
chat template begins a segment. The tokens after the last boundary are the query, which is not a segment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.tokenizers import cached_tokenizer_from_config

from ashlar.prompt import lengths_between, separator_ends
from ashlar.vllm.options import Options
from ashlar.vllm.template import template_of

# Some templates have no system message.
_ROLES = (("system", "user", "assistant", "user"), ("user", "assistant", "user"))


class Boundaries:
    def __init__(self, separator: Sequence[int], message: int | None, short: int) -> None:
        """`message`: the token with which messages begin. Neighbouring segments of fewer than `short` tokens are
        joined."""
        self._separator, self._message, self._short = list(separator), message, short

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        """Returns the lengths of a prompt's segments, from position 0 on; empty if it has no boundary."""
        text: npt.NDArray[np.int32] = np.asarray(tokens, np.int32)
        ends = separator_ends(text, self._separator)
        if self._message is not None:
            ends += (text == self._message).nonzero()[0].tolist()
        return lengths_between(ends, len(text), self._short)


def find_boundaries(options: Options, model_config: Any) -> Boundaries | None:
    """Returns None if only requests declare segments. ValueError names the option that is wrong."""
    separator, kind = options.segment_separator, options.segment_boundaries
    if kind not in ("", "messages"):
        raise ValueError(f"kv_connector_extra_config.segment_boundaries: {kind!r} was given; expected 'messages' or ''")
    if not separator and not kind:
        return None
    tokenizer: Any = None
    if isinstance(separator, str) or kind:
        tokenizer = _tokenizer(model_config)
    if isinstance(separator, str):
        separator = tokenizer.encode(separator, add_special_tokens=False) if separator else []
    message = message_token(tokenizer, template_of(options)) if kind else None
    return Boundaries(separator, message, options.seam_head + options.seam_tail + options.min_tokens)


def _tokenizer(model_config: Any) -> Any:
    reason = "the engine has none (skip_tokenizer_init)"
    try:
        tokenizer = cached_tokenizer_from_config(model_config)
    except Exception as error:
        tokenizer, reason = None, str(error).partition("\n")[0]
    if tokenizer is None:
        raise ValueError(
            f"kv_connector_extra_config.segment_separator, segment_boundaries: no tokenizer in {model_config.tokenizer} "
            f"({reason}); expected one for text; give segment_separator as a list of token ids"
        )
    return tokenizer


def message_token(tokenizer: Any, template: str | None = None) -> int:
    """Returns the special token with which the chat template, by default the model's, begins each message. ValueError:
    there is none."""
    specials = sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len, reverse=True)
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
        f"kv_connector_extra_config.segment_boundaries: messages cannot be found in the chat template ({reason}); "
        "expected a special token at the beginning of each message; set segment_separator instead"
    )
