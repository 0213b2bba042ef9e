# SPDX-License-Identifier: Apache-2.0
"""A load that changes a node's metrics: a Python engine that publishes, reuses, commits and resumes. Engines of several
nodes share some of their texts.

usage: load.py RPC_SOCKET SESSION_SOCKET SEED UID    (such an engine as another user, until its input ends; only root
can)
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import monitoring
import numpy as np
import shortest

import ashlar
import ashlar.daemon

MODEL = dataclasses.replace(shortest.MODEL, flops_per_token=1e6, tokens_per_second=1000.0)
SECONDS_SHARED = 20
NEIGHBOUR = 65533  # a user without a name, who is the second tenant
STATE = shortest.HEADS * shortest.DIM**2


def start_daemon(folder, ssd_folder=None, **sections):
    """Starts a daemon whose memory and disk fill up quickly. Returns it and the port of its metrics."""
    port = monitoring.free_port()
    tenants = [
        {"name": "default", "uids": [os.getuid()], "dram_bytes": "16MiB", "ssd_bytes": "32MiB"},
        {"name": "neighbour", "uids": [NEIGHBOUR], "dram_bytes": "8MiB", "ssd_bytes": "16MiB"},
    ]
    if ssd_folder is not None:
        sections["ssd"] = {"folder": ssd_folder, "capacity_bytes": "48MiB", "admission": "all"}
    daemon = ashlar.daemon.start(
        dram="24MiB",
        arena="1MiB",
        ssd="" if ssd_folder else "48MiB",
        folder=folder,
        config={"tenants": tenants, **sections},
    )
    daemon.stop()
    config = pathlib.Path(folder, "ashlard.yaml")
    config.write_text(config.read_text().replace("listen: {", f'listen: {{metrics_address: "127.0.0.1:{port}", ', 1))
    daemon.start()
    return daemon, port


def text(number, length=200):
    words = random.Random(number)
    return "".join(words.choice("abcdefgh ") for _ in range(length))


class Load:
    """Runs until `stop`, with more texts than memory holds, some of which are requested repeatedly."""

    def __init__(self, rpc_socket, session_socket, seed=0):
        self._seed = seed
        self._sockets = rpc_socket, session_socket
        self._open()
        self._stop = threading.Event()
        self.only_new = False  # no text is requested twice
        self.prompts = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _open(self):
        self._engine = shortest.Engine(*self._sockets)
        self._cache = ashlar.Cache(MODEL, *self._sockets, pages=64, capture_tokens=16)

    def _run(self):
        draw = random.Random(self._seed)
        while not self._stop.is_set():
            number = draw.randrange(1_000_000)
            try:
                self._prompt(draw, number)
                self.prompts += 1
            except (RuntimeError, ConnectionError):  # the daemon died under this engine, which has no other pages
                with contextlib.suppress(ConnectionError):
                    self._open()
            self._stop.wait(0.02)

    def _prompt(self, draw, number):
        if self.only_new:  # only misses
            tokens = np.frombuffer(text(number, 600).encode(), np.uint8).astype(np.int32)
            self._cache.begin(tokens, [200, 200]).end()
            return
        # Engines in one process share these texts. They change from time to time, so that nodes keep fetching from each
        # other.
        shared = 1_000_000 + int(time.monotonic() / SECONDS_SHARED) * 8
        self._engine.serve([text(0, 40), text(shared + draw.randrange(8), 150), text(number, 150)], "?", 1)
        self._conversation(shared + draw.randrange(6) if draw.random() < 0.7 else number)

    def _conversation(self, number):
        tokens = np.frombuffer(text(number, 600).encode(), np.uint8).astype(np.int32)
        table = np.arange(64, dtype=np.int32)
        with self._cache.begin(np.append(tokens, 1).astype(np.int32), page_table=table) as request:
            state = np.full(STATE, number % 97, np.float32)
            if request.plan.prefix_tokens > 0:
                request.advance(shortest.LINEAR, 0, request.plan.prefix_tokens, state)
            if request.finish() != ashlar.Verdict.OK:
                return
            self._cache.commit(
                tokens, [(len(tokens), [ashlar.LinearTensors(shortest.LINEAR, state)])], page_table=table
            )

    def stop(self):
        self._stop.set()
        self._thread.join()


class Neighbour:
    """The second tenant's load, in a separate process, because it runs as another user."""

    def __init__(self, rpc_socket, session_socket, seed):
        self._process = subprocess.Popen(
            [sys.executable, __file__, rpc_socket, session_socket, str(seed), str(NEIGHBOUR)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def stop(self):
        ended = self._process.poll()
        self._process.stdin.close()
        self._process.wait()
        if ended is not None:
            raise RuntimeError(f"the second tenant's load had ended, with {ended}")


def main():
    rpc_socket, session_socket, seed, uid = sys.argv[1:]
    os.setgroups([os.stat(rpc_socket).st_gid])  # the group that the sockets' mode admits
    os.setuid(int(uid))
    load = Load(rpc_socket, session_socket, int(seed))
    sys.stdin.read()
    load.stop()


if __name__ == "__main__":
    main()
