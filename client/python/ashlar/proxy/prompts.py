# SPDX-License-Identifier: Apache-2.0
"""Computes the tokens of a request as its engine does, for probes.

If they differ from the engine's tokens, the proxy may choose a slower engine. Answers do not change, because the
request is forwarded unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ashlar.boundaries import Boundaries
from ashlar.prompt import Tokens

# Arguments of apply_chat_template that are not template variables. With them, a small request could bring its own
# template, or use any amount of memory (padding).
_RESERVED = frozenset(
    "chat_template tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask "
    "tokenizer_kwargs".split()
)


class Tokenizer(Protocol):
    """The part of a tokenizer of Transformers that the proxy calls."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt to probe for."""

    tokens: Tokens
    segments: tuple[int, ...] = ()  # lengths, from position 0; their sum is less than the number of tokens
    salt: str = ""


class Unprobed(Exception):
    """A request is forwarded without a probe. The message is the reason, a label of metrics."""


class Prompts:
    """Converts requests into questions. Thread-safe if the tokenizer is."""

    def __init__(
        self, tokenizer: Tokenizer | None, boundaries: Boundaries | None = None, template: str | None = None
    ) -> None:
        """`tokenizer`: None: only prompts of token ids are probed. `boundaries`: the connector's; None: only requests
        declare segments. `template`: the servers' chat template; None: the tokenizer's."""
        self._tokenizer, self._boundaries, self._template = tokenizer, boundaries, template

    def question(self, path: str, body: Mapping[str, Any]) -> Question:
        """Returns the question for a request. Unprobed: the proxy cannot compute the request's tokens."""
        tokens = self._tokens(path, body)
        salt = body.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise Unprobed("salt")
        return Question(tokens, self._segments(tokens, body), salt)

    def _tokens(self, path: str, body: Mapping[str, Any]) -> Tokens:
        if path.endswith("/chat/completions"):
            return self._chat(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise Unprobed("tokenizer")
            special = body.get("add_special_tokens", True) is True
            try:
                return np.asarray(self._tokenizer.encode(prompt, add_special_tokens=special), np.int32)
            except Exception as error:  # for example, a lone surrogate cannot be encoded
                raise Unprobed("prompt") from error
        if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
            return np.asarray(prompt, np.int32)
        raise Unprobed("prompt")  # no prompt, or several

    def _chat(self, body: Mapping[str, Any]) -> Tokens:
        if self._tokenizer is None:
            raise Unprobed("tokenizer")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Unprobed("prompt")
        plain = []
        for message in messages:
            if not isinstance(message, Mapping):
                raise Unprobed("prompt")
            content = message.get("content")
            if isinstance(content, list):  # the engine joins the texts of a list with line ends
                found = [part.get("text") for part in content if isinstance(part, Mapping)]
                texts = [text for text in found if isinstance(text, str)]
                if len(texts) != len(content):
                    raise Unprobed("media")
                message = {**message, "content": "\n".join(texts)}
            plain.append(message)
        options = body.get("chat_template_kwargs")
        options = options if isinstance(options, dict) else {}
        # A client's template can run for hours, and one thread renders all of them.
        if body.get("chat_template") is not None or not _RESERVED.isdisjoint(options):
            raise Unprobed("template")
        try:
            tokens = self._tokenizer.apply_chat_template(
                plain,
                chat_template=self._template,
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                continue_final_message=body.get("continue_final_message", False),
                tokenize=True,
                return_dict=False,
                **options,
            )
        except Exception as error:
            raise Unprobed("template") from error
        return np.asarray(tokens, np.int32).reshape(-1)

    def _segments(self, tokens: Tokens, body: Mapping[str, Any]) -> tuple[int, ...]:
        parameters = body.get("kv_transfer_params")
        given = parameters.get("ashlar_segments") if isinstance(parameters, Mapping) else None
        if given is None:
            return () if self._boundaries is None else tuple(self._boundaries.lengths(tokens))
        if not isinstance(given, list) or not all(type(length) is int and length > 0 for length in given):
            return ()  # the engine also ignores malformed lengths
        if sum(given) > len(tokens):
            return ()
        return tuple(given if sum(given) < len(tokens) else given[:-1])
