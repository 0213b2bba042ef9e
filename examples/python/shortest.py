# SPDX-License-Identifier: Apache-2.0
"""The shortest complete engine, in Python: one linear and one attention layer, prompts assembled from cached segments,
greedy decoding. It uses the cache only through the package `ashlar`. docs/python.md walks through it.

usage: shortest.py [RPC-SOCKET SESSION-SOCKET]    (without sockets it starts a private daemon)
"""

import sys

import numpy as np

import ashlar
import ashlar.daemon

HEADS, DIM, PAGE_TOKENS, LINEAR, ATTENTION = 2, 16, 16, 0, 1
MODEL = ashlar.Model(
    model_id="shortest-python",
    weights_digest="1",
    page_tokens=PAGE_TOKENS,
    head=4,
    tail=4,
    layers=[
        ashlar.Linear(ashlar.Family.RETNET, HEADS, HEADS, DIM, DIM, decay_table=[-0.3, -0.01]),
        ashlar.Attention(HEADS, DIM, DIM),
    ],
)


def weights(tokens: np.ndarray) -> np.ndarray:
    return (0.3 * np.sin(1.7 * (tokens[:, None] + 1.0) * (np.arange(HEADS * DIM) + 3.0))).astype(np.float32)


class Engine:
    def __init__(self, rpc_socket: str, session_socket: str):
        self.cache = ashlar.Cache(MODEL, rpc_socket, session_socket, pages=64)
        self.keys, self.values = self.cache.page_rows(ATTENTION)
        self.table = np.arange(64, dtype=np.int32)  # one prompt at a time uses all pages

    def serve(self, segments: list[str], query: str, decode: int) -> tuple[str, int]:
        """Returns the decoded text, and how many tokens of the prompt came from the cache."""
        tokens = np.frombuffer("".join([*segments, query]).encode(), np.uint8).astype(np.int32)
        lengths = [len(segment) for segment in segments]
        with self.cache.begin(tokens, lengths, self.table, fill=True) as request:
            missing = request.missing
            for i, run in enumerate(missing):
                self.publish(request, i, run)
            if missing:
                request.look_again(self.table)
            while True:  # once, or again if a hit failed to land
                plan = request.plan
                positions = np.concatenate([np.arange(begin, end) for begin, end in plan.computed()])
                state = np.zeros((HEADS, DIM, DIM), np.float32)
                rows = weights(tokens[positions])
                out = np.empty_like(rows)
                done = request.advance(LINEAR, 0, len(tokens), state, q=rows, k=rows, v=rows, out=out)
                if done == ashlar.Verdict.OK and request.wait_layer(ATTENTION) == ashlar.Verdict.OK:
                    rows = self.attend(rows + out, positions)
                verdict = request.finish()
                if verdict == ashlar.Verdict.OK:
                    break
                if verdict == ashlar.Verdict.OTHER_PAGES:  # an engine with more pages would continue in others
                    raise RuntimeError("the daemon may still write to these pages")
            text = []
            for position in range(len(tokens), len(tokens) + decode):
                letters = np.arange(ord("a"), ord("z") + 1, dtype=np.int32)
                text.append(letters[np.argmax(weights(letters) @ rows[-1])])
                rows = weights(np.array(text[-1:], np.int32))
                out = np.empty_like(rows)
                request.advance(LINEAR, position, position + 1, state, q=rows, k=rows, v=rows, out=out)
                rows = self.attend(rows + out, np.array([position]))
            return bytes(text).decode(), plan.cached_tokens

    def publish(self, request: ashlar.Request, missing: int, run: ashlar.Run) -> None:
        """Computes a segment alone, from a zero state at position 0, in pages where nothing lands meanwhile."""
        rows = weights(run.tokens)
        state, transition = np.zeros((HEADS, DIM, DIM), np.float32), np.zeros(HEADS, np.float32)
        out = np.empty_like(rows)
        self.cache.compute_alone(
            request, missing, LINEAR, state, q=rows, k=rows, v=rows, out=out, transition=transition
        )
        self.attend(rows + out, np.arange(len(rows)))
        request.publish(missing, [ashlar.LinearTensors(LINEAR, state, transition=transition)], self.table)

    def attend(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """A row is its own key and value, and sees all positions up to its own."""
        heads = rows.reshape(-1, HEADS, DIM)
        slots = self.table[positions // PAGE_TOKENS], positions % PAGE_TOKENS
        self.keys[slots] = heads
        self.values[slots] = heads
        seen = np.arange(positions[-1] + 1)
        keys, values = (
            pages[self.table[seen // PAGE_TOKENS], seen % PAGE_TOKENS] for pages in (self.keys, self.values)
        )
        scores = np.einsum("thd,shd->hts", heads, keys)
        scores[:, seen[None, :] > positions[:, None]] = -np.inf
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        return (heads + np.einsum("hts,shd->thd", shares, values)).reshape(rows.shape).astype(np.float32)


def main(rpc_socket: str, session_socket: str) -> None:
    engine = Engine(rpc_socket, session_socket)
    rules, arch = "Answer from these pages.", "An arch stands because every stone wants to fall."
    stone, query = "Ashlar is cut to one face.", "Why does it stand?"
    for segments in ([rules, arch, stone], [rules, stone, arch]):
        text, cached = engine.serve(segments, query, 12)
        print(f"{cached} of {len(''.join([*segments, query]))} tokens from the cache: {text}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(sys.argv[1], sys.argv[2])
    else:
        with ashlar.daemon.start(dram="64MiB", arena="8MiB") as daemon:
            main(daemon.rpc_socket, daemon.session_socket)
