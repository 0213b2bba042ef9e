# SPDX-License-Identifier: Apache-2.0
"""engine.cc in Python. usage: engine.py RPC-SOCKET SESSION-SOCKET PAGES wall|thread"""

import sys
import time

import numpy as np

import ashlar

LAYERS, HEADS, DIM, PAGE_TOKENS = 8, 8, 128, 32
now = time.perf_counter_ns


class Engine:
    def __init__(self, rpc_socket, session_socket, pages):
        model = ashlar.Model(
            model_id="overhead",
            weights_digest="1",
            page_tokens=PAGE_TOKENS,
            layers=[ashlar.Attention(HEADS, DIM, DIM, ashlar.DType.BF16)] * LAYERS,
        )
        self.cache = ashlar.Cache(model, rpc_socket, session_socket, pages=pages + 1, name="overhead")
        self.table = np.arange(pages + 1, dtype=np.int32)

    @staticmethod
    def text(seed, pages):
        tokens = (seed * 1_000_003 + np.arange(pages * PAGE_TOKENS + 1)) & 0x7FFFFFFF
        return tokens.astype(np.int32), [pages * PAGE_TOKENS]

    def publish(self, seed, pages):
        tokens, lengths = self.text(seed, pages)
        with self.cache.begin(tokens, lengths, self.table[: pages + 1], fill=True) as request:
            begun = now()
            outcome = request.publish(0, [], self.table)
            took = now() - begun
            assert outcome == "published", outcome
        return took

    def land(self, seed, pages):
        tokens, lengths = self.text(seed, pages)
        table = self.table[: pages + 1]
        begun = now()
        with self.cache.begin(tokens, lengths, table) as request:
            verdict = request.finish()
            assert verdict == ashlar.Verdict.OK and request.plan.cached_tokens == pages * PAGE_TOKENS
        return now() - begun

    def look(self, seed, pages):
        tokens, lengths = self.text(seed, pages)
        begun = now()
        with self.cache.begin(tokens, lengths) as request:
            assert request.plan.cached_tokens == pages * PAGE_TOKENS
        return now() - begun


if __name__ == "__main__":
    if sys.argv[4] == "thread":
        now = time.thread_time_ns
    engine = Engine(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    for line in sys.stdin:
        verb, seed, pages, *count = line.split()
        times = range(int(count[0]) if count else 1)
        print(*(getattr(engine, verb)(int(seed), int(pages)) for _ in times), flush=True)
