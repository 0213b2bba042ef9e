# SPDX-License-Identifier: Apache-2.0
"""Daemons that die, hang, are full or speak another version: each costs misses, but no wrong page and no error."""

import os
import pathlib
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="sglang is not installed (tools/engines-environment)")

from daemon_view import REFUSES, WELCOMES, OtherVersion, scrape
from test_hicache import PAGE, PoolName, chain, fill, held, kv_host, make, pages_of

import ashlar.daemon

COUNT = 6  # pages of one call
WAITS = {"timeout_ms": 500, "land_ms": 500}


class Pages:
    """Pages of one text in a host pool, from page `first`. They are read into the COUNT pages after them."""

    def __init__(self, backend, host, first=0, seed=0):
        self.backend, self.host, self.first, self.seed = backend, host, first, seed
        self.hashes = chain(range(seed * 1000, seed * 1000 + PAGE * COUNT))
        self.data = [fill(host, (first + i) * PAGE, 100 * seed + i) for i in range(COUNT)]

    def store(self):
        return sum(self.backend.batch_set_v1(self.hashes, pages_of(range(self.first, self.first + COUNT))))

    def fetch(self):
        """Returns how many pages arrive, and checks that they are equal to the stored ones."""
        behind = self.first + COUNT
        for i in range(COUNT):
            fill(self.host, (behind + i) * PAGE, 99999)
        found = self.backend.batch_get_v1(self.hashes, pages_of(range(behind, behind + COUNT)))
        for i, there in enumerate(found):
            assert not there or (held(self.host, (behind + i) * PAGE) == self.data[i]).all()
        return sum(found)


def serves_again(pages):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pages.store()
        if pages.fetch() == COUNT:
            return
        time.sleep(0.05)
    raise AssertionError("it is of no use any more")


def test_killing_the_daemon_at_random_moments_only_causes_misses(daemon):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw, host = random.Random(seed), kv_host()
    backend = make(daemon, [(PoolName.KV, host)], extra=WAITS)
    stop, errors = threading.Event(), []
    texts = [Pages(backend, host, first, seed) for first, seed in ((0, 1), (2 * COUNT, 2))]

    def work(pages):
        try:
            while not stop.is_set():
                pages.store()
                pages.fetch()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(pages,)) for pages in texts]
    for thread in threads:
        thread.start()
    for _ in range(int(os.environ.get("ASHLAR_SGLANG_KILLS", "5"))):
        time.sleep(draw.uniform(0, 0.3))
        daemon.kill()
        daemon.start()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for pages in texts:
        serves_again(pages)


def test_a_frozen_daemon_only_delays(daemon):
    host = kv_host()
    pages = Pages(make(daemon, [(PoolName.KV, host)], extra=WAITS), host)
    assert pages.store() == COUNT and pages.fetch() == COUNT
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for call in (pages.fetch, pages.store, lambda: pages.backend.batch_exists(pages.hashes), pages.fetch):
            began = time.monotonic()
            assert call() == 0
            assert time.monotonic() - began < 10
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    serves_again(pages)


def test_metrics_do_not_wait_while_a_cache_is_opened(daemon):
    """SGLang's scheduler reads them in each of its steps."""
    backend = make(daemon, [(PoolName.KV, kv_host())], extra={"timeout_ms": 3000})
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        opening = threading.Thread(target=backend.batch_exists, args=(chain(range(PAGE)),))
        opening.start()
        while not backend._lock.locked():
            time.sleep(0.01)
        began = time.monotonic()
        assert backend.get_stats() is not None and time.monotonic() - began < 1
        assert backend._lock.locked(), "it is still being opened"
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    opening.join()


def test_a_full_daemon_evicts_old_pages(tmp_path):
    host = kv_host()
    with ashlar.daemon.start(dram="8MiB", arena="2MiB", folder=str(tmp_path)) as daemon:
        backend = make(daemon, [(PoolName.KV, host)])
        for seed in range(400):
            pages = Pages(backend, host, seed=seed)
            pages.store()
            if seed % 20 == 0:
                if sum(
                    value for name, value in scrape(daemon.metrics_socket).items() if name == "ashlar_evictions_total"
                ):
                    break
        assert seed < 399, "it was full"
        assert Pages(backend, host, seed=0).fetch() == 0, "what is gone is a miss"
        serves_again(pages)


@pytest.mark.parametrize("reply", [REFUSES, WELCOMES], ids=["refuses", "welcomes"])
def test_a_daemon_of_another_version_causes_misses_until_it_is_replaced(tmp_path, reply):
    sockets = SimpleNamespace(rpc_socket=f"{tmp_path}/rpc.sock", session_socket=f"{tmp_path}/session.sock")
    host = kv_host()
    with OtherVersion(sockets.rpc_socket, sockets.session_socket, reply) as other:
        pages = Pages(make(sockets, [(PoolName.KV, host)], extra=WAITS), host)
        assert pages.store() == 0 and pages.fetch() == 0 and pages.backend.batch_exists(pages.hashes) == 0
        assert other.heard
    for path in (sockets.rpc_socket, sockets.session_socket):
        pathlib.Path(path).unlink()
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=str(tmp_path)):
        serves_again(pages)
