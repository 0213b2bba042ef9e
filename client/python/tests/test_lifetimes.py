# SPDX-License-Identifier: Apache-2.0
"""Handles that end on one thread during a call on another."""

import asyncio
import gc
import subprocess
import threading
import time

import numpy as np
import pytest
import shortest
from frozen import freeze

import ashlar


def open_cache(daemon, **options):
    return ashlar.Cache(shortest.MODEL, daemon.rpc_socket, daemon.session_socket, **{"pages": 64, **options})


def test_a_cache_is_closed_while_it_waits_for_work(daemon):
    for _ in range(5):
        cache = open_cache(daemon)
        answers = []
        thread = threading.Thread(target=lambda cache=cache, answers=answers: answers.append(cache.serve_prefill(500)))
        thread.start()
        time.sleep(0.1)
        cache.close()
        thread.join()
        assert answers == [None]


def test_an_awaited_call_is_cancelled_and_its_cache_closed(daemon):
    async def run():
        with open_cache(daemon) as cache:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(cache.serve_prefill_async(1000), 0.1)

    asyncio.run(run())  # ends with the thread that waits


def test_a_cache_is_closed_while_work_is_awaited_by_a_job(daemon):
    cache = open_cache(daemon)
    serving = cache.start_serve_prefill(wait_ms=300)
    cache.close()
    assert serving.result() is None


class Ending:
    """A number that ends a request when it is read, as another thread could do."""

    def __init__(self, request, number):
        self.request, self.number = request, number

    def __index__(self):
        self.request.end()
        return self.number


def test_a_request_that_ends_while_a_commit_reads_its_arguments_stays_valid_for_it(daemon):
    tokens, pages = np.arange(400, dtype=np.int32), np.arange(32, dtype=np.int32)
    with open_cache(daemon, capture_tokens=16) as cache:
        request = cache.begin(tokens, page_table=pages)
        assert request.finish() == ashlar.Verdict.OK
        checkpoints = [(400, [ashlar.LinearTensors(0, np.zeros(512, np.float32))])]
        ending = Ending(request, 400)
        assert cache.commit(tokens, checkpoints, request=request, prompt_tokens=ending, page_table=pages) == ["kept"]


def test_deleting_a_handle_lets_other_threads_run(daemon):
    tokens = np.arange(400, dtype=np.int32)
    cache = open_cache(daemon, timeout_ms=300, capture_tokens=16)
    state = np.zeros(512, np.float32)
    assert cache.commit(tokens, [(400, [ashlar.LinearTensors(0, state)])], page_table=np.arange(32)) == ["kept"]
    freeze(daemon)
    # The landing is unresolved: ending the request waits until the daemon confirms that nothing is written any longer.
    request = cache.begin(np.append(tokens, 7).astype(np.int32), page_table=np.arange(32, dtype=np.int32))
    waking = subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {daemon.pid}"])
    ended = threading.Event()

    def erase():
        nonlocal request, cache
        del request, cache
        gc.collect()
        ended.set()

    thread = threading.Thread(target=erase)
    thread.start()
    counted = 0
    while not ended.is_set():
        counted += 1
        time.sleep(0.001)
    thread.join()
    assert waking.wait() == 0
    assert counted > 100


def test_arrays_of_the_memory_stay_valid_when_the_cache_is_closed(daemon):
    cache = open_cache(daemon)
    request = cache.begin(np.arange(100, dtype=np.int32), page_table=np.arange(16))
    keys, values = cache.page_rows(shortest.ATTENTION)
    memory = cache.memory
    part = keys[3:5, ::2]
    cache.close()
    with pytest.raises(RuntimeError, match="the cache is closed"):
        _ = cache.memory
    with pytest.raises(RuntimeError, match="the cache is closed"):
        cache.page_rows(shortest.ATTENTION)
    request.end()
    del request, cache
    gc.collect()
    keys[:], values[:] = 7, 8
    assert float(keys[63, 15, 1, 15]) == 7.0 and float(part[0, 0, 0, 0]) == 7.0
    del keys, values
    gc.collect()
    part[:] = 9
    assert memory.view(np.float32).max() == 9.0


def test_slots_of_a_page_store_stay_valid_when_it_is_closed(daemon):
    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)
    store = ashlar.PageStore(client, model_id="m", weights_digest="w", content="c", page_bytes=4096, slots=2)
    kept = [store.memory()]
    assert store.put([bytes(32)], lambda i, slot: kept.append(slot)) == ["published"]
    store.close()
    with pytest.raises(RuntimeError, match="the store is closed"):
        store.exists([bytes(32)])
    del store, client
    gc.collect()
    for array in kept:
        array[:] = 5
    assert kept[0].min() == 5 and kept[1].size == 4096


def test_memory_is_unmapped_with_the_last_array(daemon):
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("memfd:" in line for line in maps)

    before = mapped()
    cache = open_cache(daemon)
    keys, _ = cache.page_rows(shortest.ATTENTION)
    during = mapped()
    cache.close()
    del cache, _
    gc.collect()
    assert during > before and mapped() > before, "the array's"
    del keys
    gc.collect()
    assert mapped() == before
