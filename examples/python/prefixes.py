# SPDX-License-Identifier: Apache-2.0
"""Commits the states of a text, and resumes a longer text from them. docs/python.md walks through it.

usage: prefixes.py    (it starts a private daemon)
"""

import sys

import numpy as np
from shortest import ATTENTION, DIM, HEADS, LINEAR, MODEL, weights

import ashlar
import ashlar.daemon

TABLE = np.arange(64, dtype=np.int32)


def serve(cache: ashlar.Cache, tokens: np.ndarray) -> tuple[int, list[str]]:
    """Runs a text and commits it. Returns how many tokens came from the cache, and the outcome of the commit."""
    keys, values = cache.page_rows(ATTENTION)
    state, offers = np.zeros((HEADS, DIM, DIM), np.float32), []
    with cache.begin(tokens, page_table=TABLE) as request:
        for step in request.plan.steps:
            rows = weights(tokens[step.begin : step.end]) if step.kind is ashlar.StepKind.COMPUTE else None
            request.advance(LINEAR, step.begin, step.end, state, k=rows, v=rows)
            if rows is not None:
                positions = np.arange(step.begin, step.end)
                slots = TABLE[positions // MODEL.page_tokens], positions % MODEL.page_tokens
                keys[slots] = values[slots] = rows.reshape(-1, HEADS, DIM)
            # The daemon asks for some depths; the text's end can always be offered.
            if step.capture or step.end == len(tokens):
                offers.append((step.end, [ashlar.LinearTensors(LINEAR, state.copy())]))
        request.finish()
        outcomes = cache.commit(tokens, offers, request=request, page_table=TABLE)
        return request.plan.cached_tokens, outcomes


def main() -> bool:
    with ashlar.daemon.start(dram="64MiB", arena="8MiB") as daemon:
        text = np.arange(600, dtype=np.int32) % 97
        with ashlar.Cache(MODEL, daemon.rpc_socket, daemon.session_socket, pages=64, capture_tokens=64) as cache:
            _, outcomes = serve(cache, text)
            cached, _ = serve(cache, np.append(text, text[:20]))
    print(f"{', '.join(outcomes)}; {cached} of {len(text) + 20} tokens from the cache")
    return cached == len(text)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
