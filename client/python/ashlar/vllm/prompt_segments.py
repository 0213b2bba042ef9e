# SPDX-License-Identifier: Apache-2.0
"""The segments of requests: declared by the request, or found by boundaries."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from ashlar.boundaries import Boundaries
from ashlar.vllm.segments import declared

logger = init_logger("vllm.ashlar")


def _scores_prompt(sampling: Any) -> bool:
    """Returns whether log-probabilities of the prompt are requested. A caller may request them without
    `skip_reading_prefix_cache`; model runner V2 would return uninitialized numbers for tokens that it does not
    compute."""
    return sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None


class PromptSegments:
    def __init__(self, enabled: bool, boundaries: Boundaries | None) -> None:
        self.enabled, self._boundaries = enabled, boundaries

    def lengths_of(self, request: Any) -> list[int]:
        """Returns the lengths of a request's segments, from position 0 on; empty if it has none."""
        if not self.enabled or request.lora_request or request.mm_features:
            return []
        if request.skip_reading_prefix_cache or _scores_prompt(request.sampling_params):
            return []
        try:
            given = declared(request)
            if given is None and self._boundaries is not None:
                return self._boundaries.lengths(request.all_token_ids)
            return given or []
        except ValueError as error:
            logger.warning("Ashlar: request %s: %s; it is computed without segments", request.request_id, error)
            return []
