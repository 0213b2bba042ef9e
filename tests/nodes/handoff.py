# SPDX-License-Identifier: Apache-2.0
"""Sends a text from one node to another, and resumes there from its own memory.

usage: handoff.py RPC-SOCKET SESSION-SOCKET NODE RPC-SOCKET-THERE SESSION-SOCKET-THERE
"""

import asyncio
import sys

import numpy as np

import ashlar

MODEL = ashlar.Model(
    model_id="handoff",
    weights_digest="1",
    page_tokens=16,
    layers=[
        ashlar.Linear(ashlar.Family.RETNET, 2, 2, 8, 8, decay_table=[-0.3, -0.01]),
        ashlar.Attention(2, 8, 8),
    ],
)
CONVERSATION = bytes(range(1, 17))
TEXT, LATER = np.arange(592, dtype=np.int32) % 249, np.arange(300, dtype=np.int32) % 241
TABLE = np.arange(64)


def commit(cache, tokens, number, **options):
    keys, values = cache.page_rows(1)
    keys[:], values[:] = number, -number
    state = ashlar.LinearTensors(0, np.full((2, 8, 8), number, np.float32))
    assert cache.commit(tokens, [(len(tokens), [state])], page_table=TABLE, **options) == ["kept"]


def expect(cache, tokens, number, **options):
    with cache.begin(np.append(tokens, 7), page_table=TABLE, **options) as request:
        assert (request.plan.prefix_tokens, request.plan.prefix_tier) == (len(tokens), "dram"), request.plan
        state = np.zeros((2, 8, 8), np.float32)
        assert request.advance(0, 0, len(tokens), state) == ashlar.Verdict.OK
        assert request.wait_layer(1) == ashlar.Verdict.OK
        assert request.finish() == ashlar.Verdict.OK
        assert (state == number).all()
        for rows, sign in zip(cache.page_rows(1), (1, -1)):
            assert (rows.reshape(-1, 16)[: len(tokens)] == sign * number).all()


rpc, session, node, rpc_there, session_there = sys.argv[1:]
with ashlar.Cache(MODEL, rpc, session, pages=64, capture_tokens=16) as here:
    commit(here, TEXT, 5)
    commit(here, LATER, 6, conversation=CONVERSATION, composed=True)
    assert here.handoff(TEXT, "nobody", wait_ms=1000) == "no_node"
    assert here.handoff(LATER, node, wait_ms=20000) == "no_states", "it is the conversation's own"
    assert here.handoff(TEXT, node, wait_ms=20000) == "completed"
    handed = asyncio.run(here.handoff_async(LATER, node, conversation=CONVERSATION, wait_ms=20000))
    assert handed == "completed"
with ashlar.Cache(MODEL, rpc_there, session_there, pages=64, capture_tokens=16) as there:
    expect(there, TEXT, 5)
    expect(there, LATER, 6, conversation=CONVERSATION)
