# SPDX-License-Identifier: Apache-2.0
"""The options `segment_separator` and `segment_boundaries`: where the segments of prompts end."""

from __future__ import annotations

from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from ashlar.boundaries import Boundaries, message_token
from ashlar.vllm.options import Options
from ashlar.vllm.template import template_of


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
    message = None
    if kind:
        template = template_of(options)
        try:
            message = message_token(tokenizer, template)
        except ValueError as error:
            raise ValueError(
                f"kv_connector_extra_config.segment_boundaries: {error}; set segment_separator instead"
            ) from None
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
