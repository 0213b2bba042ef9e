"""A load that makes every metric of a lone node move: an engine in Python that publishes, reuses, commits and resumes."""

import dataclasses
import random
import threading

import numpy as np
import shortest

import ashlar

MODEL = dataclasses.replace(shortest.MODEL, flops_per_token=1e6, tokens_per_second=1000.0)
STATE = shortest.HEADS * shortest.DIM**2


def text(number, length=200):
    words = random.Random(number)
    return "".join(words.choice("abcdefgh ") for _ in range(length))


class Load:
    """Runs until `stop`; more texts than memory holds, some of them asked for again and again."""

    def __init__(self, rpc_socket, session_socket):
        self._engine = shortest.Engine(rpc_socket, session_socket)
        self._cache = ashlar.Cache(MODEL, rpc_socket, session_socket, pages=64, capture_tokens=16)
        self._stop = threading.Event()
        self.prompts = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        draw = random.Random(1)
        while not self._stop.is_set():
            number = draw.randrange(1_000_000)
            self._segments([text(0, 40), text(draw.randrange(8), 150), text(number, 150)])
            self._conversation(draw.randrange(6) if draw.random() < 0.7 else number)
            self.prompts += 1
            self._stop.wait(0.02)

    def _segments(self, segments):
        self._engine.serve(segments, "?", 1)

    def _conversation(self, number):
        tokens = np.frombuffer(text(number, 600).encode(), np.uint8).astype(np.int32)
        table = np.arange(64, dtype=np.int32)
        with self._cache.begin(np.append(tokens, 1).astype(np.int32), page_table=table) as request:
            state = np.full(STATE, number % 97, np.float32)
            if request.plan.prefix_tokens > 0:
                request.advance(shortest.LINEAR, 0, request.plan.prefix_tokens, state)
            if request.finish() != ashlar.Verdict.OK:
                return
            self._cache.commit(tokens, [(len(tokens), [ashlar.LinearTensors(shortest.LINEAR, state)])], page_table=table)

    def stop(self):
        self._stop.set()
        self._thread.join()
