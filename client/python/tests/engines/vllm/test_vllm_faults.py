# SPDX-License-Identifier: Apache-2.0
"""A fault around the connector is a miss: no request fails, and no answer differs."""

import os
import random
import signal
import socket
import threading
import time

import pytest
from test_vllm_resets import BEGIN
from tiny_engines import (
    BLOCK,
    CLOSE,
    PAIR,
    Child,
    connector,
    count,
    prompt,
    repeated,
    same,
    saved,
    serves_again,
    settle,
)

import ashlar.daemon


def short_waits(daemon):
    return connector(daemon, call_ms=400, land_ms=600, quiet_ms=200, lookup_ms=100)


@pytest.fixture(scope="module", params=PAIR)
def harmed(request, tmp_path_factory):
    """(model, a daemon that tests kill or stop, an engine that waits for it only briefly)"""
    with ashlar.daemon.start(dram="256MiB", arena="8MiB", folder=str(tmp_path_factory.mktemp("harmed"))) as daemon:
        with Child(request.param, short_waits(daemon)) as child:
            yield request.param, daemon, child


def test_a_daemon_killed_and_restarted_at_random_moments(harmed, expected):
    model, daemon, child = harmed
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    texts = [prompt(f"killed {model} {i}", 2 * BLOCK[model] + 20 + i) for i in range(3)]
    wanted = expected(model, texts)
    moments = int(os.environ.get("ASHLAR_VLLM_KILLS", "6"))
    same(child.generate(texts), wanted, CLOSE)
    child.call("erase")
    free, files = child.call("free_blocks"), child.call("files")
    for _ in range(moments):
        child.call("erase")
        killer = threading.Timer(draw.uniform(0, 0.25), daemon.kill)
        killer.start()
        same(child.generate(texts), wanted, CLOSE)
        killer.join()
        daemon.start()
    serves_again(child, texts, wanted, CLOSE)
    settle(child, free)
    assert child.call("files") <= files + 2, "nor a file"


def test_a_frozen_daemon_only_delays(harmed, expected):
    model, daemon, child = harmed
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    texts = [prompt(f"frozen {model} {i}", 2 * BLOCK[model] + 5 + i) for i in range(2)]
    wanted = expected(model, texts)
    same(child.generate(texts), wanted, CLOSE)
    child.call("erase")
    free = child.call("free_blocks")
    for _ in range(3):
        stop = threading.Timer(draw.uniform(0, 0.05), lambda: os.kill(daemon.pid, signal.SIGSTOP))
        stop.start()
        began = time.monotonic()
        same(child.generate(texts), wanted, CLOSE)
        stop.join()
        assert time.monotonic() - began < 30
        same(child.generate(texts), wanted, CLOSE)  # still frozen
        os.kill(daemon.pid, signal.SIGCONT)
        child.call("evaluate", "__import__('time').sleep(1.5)")
        same(child.generate(texts), wanted, CLOSE)
        child.call("erase")
    deadline = time.monotonic() + 20
    while child.call("free_blocks") != free and time.monotonic() < deadline:
        child.call("erase")
    assert child.call("free_blocks") == free, "unresolved blocks came back"


def test_a_daemon_that_starts_later_is_used(tmp_path, expected):
    text = prompt("later", 600)
    sockets = dict(rpc_socket=str(tmp_path / "rpc.sock"), session_socket=str(tmp_path / "session.sock"))
    with Child("qwen3", dict(sockets, reopen_ms=100, wait_for_saves=True)) as child:
        same(child.generate([text]), expected("qwen3", [text]))
        assert child.call("metrics") == {}
        with ashlar.daemon.start(dram="128MiB", arena="8MiB", folder=str(tmp_path)):
            deadline = time.monotonic() + 20
            while saved(child) == 0 and time.monotonic() < deadline:
                child.call("erase")
                same(child.generate([text]), expected("qwen3", [text]))
            assert saved(child) > 0


def test_sockets_of_other_programs_are_not_a_cache(tmp_path, expected):
    """Like a daemon of another version: the connector refuses it, and the engine runs without a cache."""
    paths = [str(tmp_path / name) for name in ("rpc.sock", "session.sock")]
    listeners = []
    for path in paths:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        listeners.append(listener)
    text = prompt("other version", 600)
    began = time.monotonic()
    with Child("qwen3", dict(rpc_socket=paths[0], session_socket=paths[1], call_ms=300)) as child:
        same(child.generate([text]), expected("qwen3", [text]))
        assert child.call("metrics") == {}
    assert time.monotonic() - began < 170
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("model", PAIR)
def test_a_plan_of_another_version_is_computed_instead(model, engine, expected):
    """The engine's own path for loads that fail."""
    child = engine(model)
    text = prompt(f"version {model}", 2 * BLOCK[model] + 3)
    same(child.generate([text]), expected(model, [text]))
    child.call("erase")
    child.call(
        "execute",
        "import ashlar\n"
        "server.real = ashlar.Request.plan_bytes\n"
        "ashlar.Request.plan_bytes = lambda self: server.real(self)[:4] + b'\\x63' + server.real(self)[5:]",
    )
    failures, before = count(child, "load_failures"), saved(child)
    same(child.generate([text]), expected(model, [text]))
    assert count(child, "load_failures") == failures + 1 and saved(child) == before
    child.call("execute", "import ashlar\nashlar.Request.plan_bytes = server.real")
    child.call("erase")
    same(child.generate([text]), expected(model, [text]))
    assert saved(child) - before == repeated(model, len(text))


IN_DOUBT = """
import ashlar
from vllm.distributed.kv_transfer import get_kv_transfer_group
half, scheduler = get_kv_transfer_group()._worker, server.connector()._scheduler
server.real = half._loads._advance, ashlar.Request.poll_quiesced, scheduler.step
server.used = []
half._loads._advance = half._loads._leave
ashlar.Request.poll_quiesced = lambda self: ashlar.Verdict.PENDING
def step(output):
    for data in output.scheduled_new_reqs:
        server.used += data.block_ids[0][data.num_computed_tokens // {block} :]
    return server.real[2](output)
scheduler.step = step
"""


def test_blocks_that_the_daemon_may_still_write_to_are_not_computed_into(engine, expected):
    """Also if the engine itself has the beginning: it would then keep a request's blocks, unless failures are reported
    by request."""
    child, block = engine("qwen3"), BLOCK["qwen3"]
    text = prompt("unresolved", 3 * block + 40)
    same(child.generate([text]), expected("qwen3", [text]))
    child.call("erase")
    free = child.call("free_blocks")
    child.generate([text[: block + 5]])
    child.call("execute", IN_DOUBT.format(block=block))
    same(child.generate([text]), expected("qwen3", [text]))
    held = child.call(
        "evaluate",
        "[b.block_id for held, _ in server.connector()._scheduler._blocks._unresolved.values() for b in held]",
    )
    used = child.call("evaluate", "server.used")
    assert len(held) == 4 and len(used) == 3 and not set(held) & set(used)
    child.call(
        "execute",
        "import ashlar\nfrom vllm.distributed.kv_transfer import get_kv_transfer_group\nhalf = get_kv_transfer_group()._worker\n"
        "half._loads._advance, ashlar.Request.poll_quiesced, server.connector()._scheduler.step = server.real",
    )
    settle(child, free)


LATE_LOADS = """
import time
from vllm.distributed.kv_transfer import get_kv_transfer_group
loads, requests = get_kv_transfer_group()._worker._loads, server.core().scheduler.requests
server.advance, server.go = loads._advance, False
loads._advance = lambda landing: server.advance(landing) if server.go else None
"""
ABORT_LOADING = """
deadline = time.monotonic() + 20
while [each.status.name for each in requests.values()] != ["WAITING_FOR_REMOTE_KVS"]:
    assert time.monotonic() < deadline
    llm.llm_engine.step()
llm.llm_engine.abort_request(["aborted"])
for _ in range(5):
    llm.llm_engine.step()
"""


@pytest.mark.parametrize("model", PAIR)
def test_an_aborted_request_keeps_its_blocks_until_its_load_has_ended(model, engine, expected):
    child, text = engine(model), prompt(f"aborted load {model}", 2 * BLOCK[model] + 40)
    same(child.generate([text]), expected(model, [text]))
    settle(child, 255)
    child.call("execute", LATE_LOADS + BEGIN.format(name="aborted", text=text, tokens=4, steps=1) + ABORT_LOADING)
    assert child.call("free_blocks") < 255, "the daemon may still write to them"
    child.call("execute", "server.go = True")
    settle(child, 255)
    before = saved(child)
    same(child.generate([text]), expected(model, [text]))
    assert saved(child) - before == repeated(model, len(text))


@pytest.mark.parametrize("model", PAIR)
def test_a_full_cache_evicts_old_objects(model, tmp_path, expected):
    texts = [prompt(f"full {model} {i}", 3 * BLOCK[model] + 1) for i in range(8)]
    with (
        ashlar.daemon.start(dram="8MiB", arena="2MiB", folder=str(tmp_path)) as daemon,
        Child(model, connector(daemon)) as child,
    ):
        for _ in range(2):
            for text in texts:
                child.call("erase")
                same(child.generate([text], 3), expected(model, [text], 3))
        assert child.call("free_blocks") == 255


BREAK = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
half = server.connector()._scheduler if {scheduler} else get_kv_transfer_group()._worker
server.kept = half.{name}
def broken(*args): raise RuntimeError('broken on purpose')
half.{name} = broken
"""
MEND = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
half = server.connector()._scheduler if {scheduler} else get_kv_transfer_group()._worker
half.{name} = server.kept
"""


def test_connector_exceptions_fail_no_request(engine, expected):
    child = engine("qwen3_5")
    text = prompt("raises", 900)
    same(child.generate([text]), expected("qwen3_5", [text]))
    settle(child, 255)
    of_scheduler = (
        "match", "_lookups.match", "_offers.offer", "_offers.offer_end", "allocated", "sources", "finished", "take_events",
        "awaits_reports",
    )  # fmt: skip
    for name in of_scheduler:
        child.call("erase")
        child.call("execute", BREAK.format(name=name, scheduler=True))
        same(child.generate([text], timeout=20), expected("qwen3_5", [text]))
        child.call("execute", MEND.format(name=name, scheduler=True))
    child.call("erase")
    child.call("execute", BREAK.format(name="begin_step", scheduler=False))
    same(child.generate([text], timeout=20), expected("qwen3_5", [text]))
    child.call("execute", MEND.format(name="begin_step", scheduler=False))
    settle(child, 255)
    before = saved(child)
    same(child.generate([text]), expected("qwen3_5", [text]))
    assert saved(child) - before == 768


@pytest.mark.parametrize("half", ["scheduler.Scheduler", "worker.Worker"])
def test_a_half_that_cannot_start_turns_the_cache_off(half, shared_daemon, engine, expected, monkeypatch):
    text = prompt("a half", 600)
    same(engine("qwen3").generate([text]), expected("qwen3", [text]))

    def broken(*args, **options):
        raise RuntimeError("broken on purpose")

    # Engines are forked from this process.
    monkeypatch.setattr(f"ashlar.vllm.connector.{half.partition('.')[2]}", broken)
    with Child("qwen3", connector(shared_daemon)) as child:
        for each in (text, prompt(f"{half} of its own", 600)):
            same(child.generate([each], timeout=20), expected("qwen3", [each]))
        settle(child, 255)
        assert saved(child) == 0


def test_a_killed_engine_holds_nothing_in_the_daemon(shared_daemon, engine, expected):
    text, other = prompt("engine killed", 700), engine("qwen3")
    child = Child("qwen3", connector(shared_daemon))
    child.generate([text])
    os.kill(child._process.pid, signal.SIGKILL)
    child.kill()
    before = saved(other)
    same(other.generate([text]), expected("qwen3", [text]))
    assert saved(other) - before == repeated("qwen3", 700)
