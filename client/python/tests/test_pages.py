# SPDX-License-Identifier: Apache-2.0
"""PageStore: pages of bytes under their callers' keys, against a real daemon."""

import hashlib
import os
import signal
import threading
import time

import numpy as np
import pytest
from frozen import freeze

import ashlar
import ashlar.daemon

PAGE = 100_003  # not a multiple of anything


def key(text):
    return hashlib.sha256(str(text).encode()).digest()


def page(text, size=PAGE):
    seed = int.from_bytes(key(text)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def open_store(client, **changed):
    options = dict(model_id="m", weights_digest="1", content="kv", page_bytes=PAGE, page_tokens=16, slots=4)
    return ashlar.PageStore(client, **{**options, **changed})


@pytest.fixture
def client(daemon):
    return ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)


def put(store, texts, size=PAGE):
    return store.put([key(text) for text in texts], lambda i, slot: np.copyto(slot, page(texts[i], size)))


def get(store, texts, size=PAGE):
    found = {}
    misses = store.get([key(text) for text in texts], lambda i, slot: found.update({i: slot.copy()}))
    for i, miss in enumerate(misses):
        assert (miss is None) == (i in found)
        if miss is None:
            assert np.array_equal(found[i], page(texts[i], size))
    return misses


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_pages_are_restored_byte_for_byte_in_any_batch(client):
    with open_store(client) as store:
        texts = [f"text {i}" for i in range(11)]  # more texts than slots
        assert not any(store.exists([key(text) for text in texts]))
        assert put(store, texts) == ["published"] * 11
        assert all(store.exists([key(text) for text in texts]))
        assert get(store, texts) == [None] * 11
        assert get(store, ["unknown", *texts[5:8], "unknown, too", texts[0]]) == [
            "never_seen",
            None,
            None,
            None,
            "never_seen",
            None,
        ]
        assert put(store, [texts[3], "new"]) == ["already_present", "published"]


@pytest.mark.parametrize("size", [1, 8, 4096, 3 << 20])
def test_any_size_of_page(client, size):
    with open_store(client, page_bytes=size, page_tokens=8) as store:
        assert put(store, ["a"], size) == ["published"]
        assert get(store, ["a"], size) == [None]


def test_nothing_is_shared_across_models_weights_and_contents(client):
    with open_store(client) as store:
        put(store, ["a"])
        for other in (dict(model_id="n"), dict(weights_digest="2"), dict(content="mamba"), dict(page_bytes=PAGE // 2)):
            with open_store(client, **other) as elsewhere:
                assert elsewhere.exists([key("a")]) == [False]
        with open_store(client) as same:
            assert get(same, ["a"]) == [None]


def test_only_one_of_two_engines_stores_a_page(daemon):
    stores = [open_store(ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)) for _ in range(2)]
    inner = []
    outcome = stores[0].put(
        [key("a")], lambda i, slot: inner.extend(put(stores[1], ["a"])) or np.copyto(slot, page("a"))
    )
    assert outcome == ["published"] and inner == ["being_published"]
    assert get(stores[1], ["a"]) == [None]


def test_a_page_whose_source_fails_is_abandoned(client):
    with open_store(client) as store:

        def fail(i, slot):
            raise KeyError("the engine's own mistake")

        with pytest.raises(KeyError):
            store.put([key("a")], fail)
        assert store.exists([key("a")]) == [False]
        assert put(store, ["a"]) == ["published"], "no reservation is left behind"
        with pytest.raises(KeyError):
            store.get([key("a")], fail)
        assert get(store, ["a"] * 9) == [None] * 9, "no slot is left behind"


def test_a_refused_call_changes_nothing_and_holds_no_slot(client):
    with open_store(client, slots=2, land_ms=200) as store:
        assert put(store, ["a"]) == ["published"]
        seen = []
        for wrong, error in ((b"short", ValueError), ("text", TypeError)):
            for call in (store.get, store.put):
                with pytest.raises(error, match=r"keys\[3\]"):
                    call([*map(key, "abc"), wrong], lambda i, slot: seen.append(i))
        assert seen == []
        assert get(store, ["a"]) == [None] and put(store, ["b"]) == ["published"]


def test_wrong_arguments_name_the_field(client):
    for field, value in (("page_bytes", 0), ("page_tokens", 7), ("slots", 0), ("weights_digest", "")):
        with pytest.raises(ValueError, match=field):
            open_store(client, **{field: value})
    with open_store(client) as store, pytest.raises(ValueError, match=r"keys\[1\]"):
        store.exists([key("a"), b"short"])
    with pytest.raises(ConnectionError):
        ashlar.PageClient("/nowhere/rpc.sock", "/nowhere/session.sock")


def test_many_threads_share_few_slots(client):
    with open_store(client, slots=3) as store:
        errors = []

        def work(number):
            try:
                texts = [f"{number % 2} {i}" for i in range(20)]  # two threads request the same pages
                assert set(put(store, texts)) <= {"published", "already_present", "being_published"}
                while get(store, texts) != [None] * 20:
                    time.sleep(0.01)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert sorted(store._free) == [0, 1, 2]


def test_a_dead_daemon_is_a_miss_and_a_new_one_serves(daemon):
    with open_store(ashlar.PageClient(daemon.rpc_socket, daemon.session_socket, timeout_ms=1000)) as store:
        put(store, ["a"])
        daemon.kill()
        assert store.exists([key("a")]) == [False]
        assert get(store, ["a"]) != [None]
        assert put(store, ["b"]) != ["published"]
        daemon.start()
        until(lambda: put(store, ["b"]) in (["published"], ["already_present"]))
        until(lambda: get(store, ["b"]) == [None])


def test_a_page_refused_by_a_busy_daemon_can_be_stored_again(tmp_path):
    tenant = {"name": "default", "uids": [os.getuid()], "dram_bytes": "64MiB", "region_bytes": "64KiB"}
    sizes = dict(dram="64MiB", arena="8MiB", folder=str(tmp_path))
    with ashlar.daemon.start(**sizes) as large:
        with open_store(ashlar.PageClient(large.rpc_socket, large.session_socket)) as store:
            large.stop()
            with ashlar.daemon.start(**sizes, config={"tenants": [tenant]}):  # no space for the store's slots
                until(lambda: put(store, ["a"]) == ["busy"])
                assert put(store, ["a"]) == ["busy"], "it is not being published"
            with ashlar.daemon.start(**sizes):
                until(lambda: put(store, ["a"]) == ["published"])


def test_a_frozen_daemon_costs_the_timeout_and_frees_its_slots(daemon):
    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket, timeout_ms=1000)
    with open_store(client, land_ms=1000) as store:
        texts = ["a", "b", "c"]
        until(lambda: put(store, texts) == ["already_present"] * 3)  # a busy machine may need more than a second
        freeze(daemon)
        try:
            begun = time.monotonic()
            assert None not in get(store, texts)
            assert time.monotonic() - begun < 10
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: get(store, texts) == [None] * 3)


def test_a_frozen_daemon_costs_one_timeout_for_all_batches_of_a_call(daemon):
    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket, timeout_ms=1000)
    with open_store(client, slots=1, land_ms=1000) as store:
        texts = [f"text {i}" for i in range(12)]
        freeze(daemon)
        try:
            for call in (get, put):
                begun = time.monotonic()
                outcomes = call(store, texts)
                assert time.monotonic() - begun < 6, "not a second for each"
                assert len(outcomes) == 12 and not {None, "published"} & set(outcomes)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_unfilled_pages_are_abandoned_together(daemon):
    client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket, timeout_ms=1000)
    begun = []

    def fill(_, slot):
        freeze(daemon)
        begun.append(time.monotonic())
        raise ArithmeticError

    try:
        with open_store(client, slots=16) as store:
            with pytest.raises(ArithmeticError):
                store.put([key(i) for i in range(16)], fill)
            assert time.monotonic() - begun[0] < 8, "not a second for each"
            os.kill(daemon.pid, signal.SIGCONT)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_pages_survive_a_restart_on_the_disk(tmp_path):
    with ashlar.daemon.start(dram="32MiB", arena="8MiB", ssd="64MiB", admission="all", folder=str(tmp_path)) as daemon:
        with open_store(ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)) as store:
            put(store, ["a", "b"])
        daemon.stop()
        daemon.start()
        with open_store(ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)) as store:
            assert get(store, ["a", "b"]) == [None, None]


def test_a_full_cache_evicts_pages(tmp_path):
    with ashlar.daemon.start(dram="16MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        with open_store(ashlar.PageClient(daemon.rpc_socket, daemon.session_socket), page_bytes=1 << 20) as store:
            texts = [f"{i}" for i in range(30)]
            outcomes = [put(store, [text], 1 << 20)[0] for text in texts]
            assert outcomes.count("published") > 12
            kept = store.exists([key(text) for text in texts])
            assert 5 < sum(kept) < 16


def test_a_full_cache_evicts_the_pages_that_save_least(tmp_path):
    def store_one(store, text):
        until(lambda: put(store, [text], 1 << 20)[0] in ("published", "already_present"))

    with ashlar.daemon.start(dram="16MiB", arena="8MiB", folder=str(tmp_path)) as daemon:
        client = ashlar.PageClient(daemon.rpc_socket, daemon.session_socket)
        kept = {}
        for content, flops, pages in (("dear", 1e12, 5), ("cheap", 1e6, 5), ("new", 1e9, 7)):
            with open_store(client, content=content, page_bytes=1 << 20, flops_per_token=flops) as store:
                for i in range(pages):
                    store_one(store, f"{i}")
        for content, flops in (("dear", 1e12), ("cheap", 1e6)):
            with open_store(client, content=content, page_bytes=1 << 20, flops_per_token=flops) as store:
                kept[content] = sum(store.exists([key(f"{i}") for i in range(5)]))
        assert kept["dear"] == 5 > kept["cheap"]


def test_the_example_stores_and_lands_a_page(capsys):
    import pages

    assert pages.main()
    assert capsys.readouterr().out == "published; landed: True\n"
