# SPDX-License-Identifier: Apache-2.0
"""Forked children: a daemon and handles belong only to the parent. A child that uses or ends its copies does no harm."""

import gc
import multiprocessing
import os
import pathlib
import sys
import threading

import numpy as np
import pytest
import shortest

import ashlar
import ashlar.daemon

TOKENS = np.arange(400, dtype=np.int32)
STATE = np.zeros((shortest.HEADS, shortest.DIM, shortest.DIM), np.float32)


def in_child(body):
    """Returns what `body` returns or raises in a forked child that exits normally."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            said = repr(body())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode()[:4000])
        gc.collect()
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return said


def open_cache(daemon):
    return ashlar.Cache(shortest.MODEL, daemon.rpc_socket, daemon.session_socket, pages=64, capture_tokens=16)


@pytest.mark.parametrize("way", ["exit of a with block", "stop", "kill", "end of the object"])
def test_a_forked_child_leaves_its_parents_daemon_and_folder(way):
    with ashlar.daemon.start(dram="64MiB", arena="8MiB") as daemon:
        child = os.fork()
        if child == 0:
            try:
                with daemon:
                    if way == "stop":
                        daemon.stop()
                    elif way == "kill":
                        daemon.kill()
                    elif way == "end of the object":
                        daemon.__dict__.clear()
                        os._exit(0)
                    sys.exit(3)
            except SystemExit as ending:
                os._exit(ending.code)
            os._exit(9)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (0 if way == "end of the object" else 3)
        assert pathlib.Path(daemon.folder).is_dir() and ashlar.daemon._answers(daemon.admin_socket), (
            "it serves, and its folder is there"
        )
        assert in_child(daemon.start).startswith("RuntimeError: start: the daemon belongs to the parent process")
        folder = daemon.folder
    assert not pathlib.Path(folder).exists()


def test_a_process_forked_by_multiprocessing_leaves_the_daemon_and_folder():
    with ashlar.daemon.start(dram="64MiB", arena="8MiB") as daemon:
        with open_cache(daemon) as cache:
            process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
            process.start()
            process.join(30)
            assert process.exitcode == 4
            assert ashlar.daemon._answers(daemon.admin_socket) and cache.connected
            with cache.begin(TOKENS) as request:
                assert request.plan.cached_tokens == 0


def test_handles_are_refused_in_a_child_and_work_in_the_parent(daemon):
    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)
    options = dict(model_id="m", weights_digest="w", content="c", page_bytes=4096, slots=2)
    store, cache = ashlar.PageStore(client, **options), open_cache(daemon)
    request = cache.begin(TOKENS, [100], np.arange(32), fill=True)
    serving = cache.start_serve_prefill(wait_ms=1)
    linear = [ashlar.LinearTensors(shortest.LINEAR, STATE)]
    calls = {
        "memory": lambda: cache.memory,
        "page_rows": lambda: cache.page_rows(shortest.ATTENTION),
        "connected": lambda: cache.connected,
        "begin": lambda: cache.begin(TOKENS),
        "start_begin": lambda: cache.start_begin(TOKENS),
        "land": lambda: cache.land(b"plan", np.arange(32)),
        "commit": lambda: cache.commit(TOKENS, [(400, linear)], page_table=np.arange(32)),
        "handoff": lambda: cache.handoff(TOKENS, "a"),
        "compute_alone": lambda: cache.compute_alone(request, 0, 0, STATE),
        "serve_prefill": lambda: cache.serve_prefill(1),
        "start_serve_prefill": lambda: cache.start_serve_prefill(1),
        "stored_segments": lambda: cache.stored_segments(),
        "take_quiesced_pages": lambda: cache.take_quiesced_pages(1),
        "missing": lambda: request.missing,
        "segments_computed_elsewhere": lambda: request.segments_computed_elsewhere,
        "publish": lambda: request.publish(0, linear, np.arange(32)),
        "advance": lambda: request.advance(0, 0, 4, STATE),
        "wait_layer": lambda: request.wait_layer(1),
        "wait_cold": lambda: request.wait_cold(1),
        "look_again": lambda: request.look_again(np.arange(32)),
        "move": lambda: request.move(np.arange(32)),
        "finish": lambda: request.finish(),
        "poll_quiesced": lambda: request.poll_quiesced(),
        "cancel": lambda: request.cancel(),
        "release": lambda: request.release(),
        "abandon": lambda: request.abandon(0),
        "mark_published": lambda: request.mark_published(0),
        "drop_segments": lambda: request.drop_segments([0]),
        "plan_bytes": lambda: request.plan_bytes(),
        "exists": lambda: store.exists([bytes(32)]),
        "put": lambda: store.put([bytes(32)], print),
        "get": lambda: store.get([bytes(32)], print),
        "store.connected": lambda: store.connected,
        "another store": lambda: ashlar.PageStore(client, **options),
        "poll": lambda: serving.poll(),
        "result": lambda: serving.result(),
    }

    def try_all():
        said = {}
        for name, call in calls.items():
            try:
                said[name] = repr(call())
            except RuntimeError as error:
                said[name] = str(error)
        return [
            name for name, each in said.items() if not each.startswith("made before fork(): it belongs to the parent")
        ]

    assert in_child(try_all) == "[]"
    assert in_child(lambda: open_cache(daemon)).startswith("RuntimeError: this process was forked")
    assert request.missing and cache.connected and store.exists([bytes(32)]) == [False]
    assert cache.serve_prefill(1) is None and serving.result() is None
    for each in (request.end, cache.close, store.close):
        each()


def test_a_child_that_closes_its_copies_does_not_affect_the_parent(daemon):
    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)
    store = ashlar.PageStore(client, model_id="m", weights_digest="w", content="c", page_bytes=4096, slots=2)
    cache = open_cache(daemon)
    keys, values = cache.page_rows(shortest.ATTENTION)
    request = cache.begin(TOKENS, [100], np.arange(32), fill=True)
    serving = cache.start_serve_prefill(wait_ms=300)
    held = {
        "request": request,
        "serving": serving,
        "cache": cache,
        "store": store,
        "client": client,
        "rows": (keys, values),
    }

    def end():
        request.end()
        cache.close()
        store.close()
        held.clear()
        gc.collect()
        return "ended"

    assert in_child(end) == "'ended'"
    assert cache.connected and store.connected and store.exists([bytes(32)]) == [False]
    keys[:] = 3
    assert serving.result() is None
    request.end()
    with cache.begin(TOKENS) as again:
        assert again.plan.cached_tokens == 0
    cache.close()
    store.close()


def test_a_lock_held_during_a_fork_does_not_block_the_child(daemon):
    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)
    store = ashlar.PageStore(client, model_id="m", weights_digest="w", content="c", page_bytes=4096, slots=2)
    inside, go_on = threading.Event(), threading.Event()

    def hold():
        with store._changed:
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    try:
        for call in (store.get, store.put):
            assert in_child(lambda call=call: call([bytes(32)], print)).startswith("RuntimeError: made before fork()")
    finally:
        go_on.set()
        thread.join()
    store.close()
