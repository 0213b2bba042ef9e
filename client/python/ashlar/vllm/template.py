# SPDX-License-Identifier: Apache-2.0
"""Finds the last tokens of a prompt that a chat template writes differently in the next turn, such as `<think>`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config

from ashlar.boundaries import template_text
from ashlar.vllm.options import Options

logger = init_logger("vllm.ashlar")

_Messages = list[dict[str, str]]
_MOST = 64  # tokens; a template that rewrites more changes messages, and not only the beginning of an answer


def rewritten_tokens(render: Callable[[_Messages], Sequence[int]]) -> int:
    """Returns the number of these tokens; 0 if it depends on the messages. `render` returns a prompt's tokens,
    including the beginning of the answer."""
    found = set()
    for question in ("Why?", "What does the second paragraph of this text say about it?"):
        messages = [{"role": "user", "content": question}]
        later = [*messages, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Go on."}]
        prompt = render(messages)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, render(later)))
        found.add(len(prompt) - sum(1 for _ in same))
    return found.pop() if len(found) == 1 and max(found) <= _MOST else 0


def template_of(options: Options) -> str | None:
    """Returns the text of the server's chat template; None: the model's own serves. ValueError: it cannot be read."""
    try:
        return template_text(options.chat_template)
    except OSError as error:
        raise ValueError(
            f"kv_connector_extra_config.chat_template: {error}; expected the value of the server's --chat-template"
        ) from None


def rewritten_by(model_config: Any, template: str | None = None) -> int:
    """Returns `rewritten_tokens` of a template, by default the model's own; 0 if there is none."""
    try:
        tokenizer = cached_tokenizer_from_config(model_config)
        if tokenizer is None or not (template or getattr(tokenizer, "chat_template", None)):
            return 0
        render = functools.partial(
            tokenizer.apply_chat_template,
            chat_template=template,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        return rewritten_tokens(render)
    except Exception as error:  # a template is a program, which may fail
        logger.info("Ashlar: cannot render the chat template (%s); checkpoint_tokens is 0", error)
        return 0
