# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of handoffs: prompts of finished requests that name a node. Workers hand them off after their
saves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllm.v1.request import RequestStatus

from ashlar.vllm.handoffs import Handoff, handed_depths
from ashlar.vllm.requests import Followed, Names

_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class FinishedPrompts:
    def __init__(self, names: Names) -> None:
        self._names = names
        self._new: list[Handoff] = []

    def add(self, followed: Followed, exact: int | None) -> None:
        """`exact`: number of the request's tokens before the first composed token; None: all."""
        request = followed.request
        if not followed.node or followed.mixed or request.status not in _COMPLETE:
            return
        own = [] if followed.present is None else [followed.present]  # from the engine's own cache
        known = [
            depth for depth in followed.depths + own if 0 < depth <= (request.num_tokens if exact is None else exact)
        ]
        depths = handed_depths(known, request.num_prompt_tokens)
        name = self._names.find(followed)
        if name is None or not depths:
            return
        tokens: npt.NDArray[np.int32] = np.array(request.all_token_ids[: depths[-1]], np.int32)
        self._new.append(Handoff(followed.node, tokens, depths, name.salt, name.within(depths[-1])))

    @property
    def waiting(self) -> bool:
        return bool(self._new)

    def take(self) -> list[Handoff]:
        new, self._new = self._new, []
        return new
