# SPDX-License-Identifier: Apache-2.0
"""Pages of a lookup that found nothing to land."""

import numpy as np
import shortest

import ashlar


def test_pages_belong_to_the_engine_once_the_plan_is_known(daemon):
    tokens, table = np.arange(40, dtype=np.int32), np.arange(8, dtype=np.int32)
    with ashlar.Cache(shortest.MODEL, daemon.rpc_socket, daemon.session_socket, pages=8) as cache:
        for _ in range(2):
            request = cache.begin(tokens, (), table)
            assert request.plan.cached_tokens == 0
            request.end()  # the request has not finished
        assert cache.take_quiesced_pages(8) == []
