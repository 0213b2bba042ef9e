# SPDX-License-Identifier: Apache-2.0
"""The segments of requests: declared by the request, or found by boundaries."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from ashlar.boundaries import Boundaries
from ashlar.vllm.segments import declared

logger = init_logger("vllm.ashlar")


class PromptSegments:
    def __init__(self, enabled: bool, boundaries: Boundaries | None) -> None:
        self.enabled, self._boundaries = enabled, boundaries

    def lengths_of(self, request: Any) -> list[int]:
        """Returns the lengths of a request's segments, from position 0 on; empty if it has none."""
        if not self.enabled or request.lora_request or request.mm_features:
            return []
        if request.skip_reading_prefix_cache:  # log-probabilities of the prompt need all of its tokens
            return []
        try:
            given = declared(request)
            if given is None and self._boundaries is not None:
                return self._boundaries.lengths(request.all_token_ids)
            return given or []
        except ValueError as error:
            logger.warning("Ashlar: request %s: %s", request.request_id, error)
            return []
