# SPDX-License-Identifier: Apache-2.0
"""Boundaries of segments that the connector's options declare."""

from __future__ import annotations

from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from ashlar.boundaries import Boundaries, declared_boundaries
from ashlar.vllm.options import Options
from ashlar.vllm.template import template_of


def find_boundaries(options: Options, model_config: Any) -> Boundaries | None:
    """Returns None if only requests declare segments. ValueError names the option that is wrong."""
    separator, messages = options.segment_separator, options.segment_boundaries == "messages"
    needed = messages or (isinstance(separator, str) and separator)
    tokenizer = _tokenizer(model_config) if needed else None
    template = template_of(options) if messages else None
    short = options.seam_head + options.seam_tail + options.min_tokens
    try:
        return declared_boundaries(separator, options.segment_boundaries, tokenizer, template, short)
    except ValueError as error:
        raise ValueError(f"kv_connector_extra_config.{error}") from None


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
