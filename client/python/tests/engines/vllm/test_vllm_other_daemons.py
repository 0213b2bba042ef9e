# SPDX-License-Identifier: Apache-2.0
"""Daemons of another version or with a full disk, and engines that are killed."""

import os
import random
import signal
import time

import pytest
from daemon_view import REFUSES, WELCOMES, OtherVersion, held, scrape
from tiny_engines import BLOCK, PAIR, Child, connector, prompt, repeated, same, saved

import ashlar.daemon


def test_a_daemon_of_another_version_is_refused_until_it_is_replaced(tmp_path, expected):
    text = prompt("refused version", 600)
    sockets = dict(rpc_socket=str(tmp_path / "rpc.sock"), session_socket=str(tmp_path / "session.sock"))
    said = "[half._opening._state._said[1] for half in (server.connector()._scheduler, server.worker())]"
    with OtherVersion(**sockets) as other:
        with Child("qwen3", dict(sockets, reopen_ms=100, call_ms=500, wait_for_saves=True)) as child:
            child.call(
                "execute",
                "from vllm.distributed.kv_transfer import get_kv_transfer_group\n"
                "server.worker = lambda: get_kv_transfer_group()._worker",
            )
            for reply, reason in ((REFUSES, "98 to 99"), (WELCOMES, "the daemon chose protocol version 99")):
                other.reply = reply
                deadline = time.monotonic() + 20
                while any(reason not in each for each in child.call("evaluate", said)) and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert all(reason in each for each in child.call("evaluate", said)), "said with the versions"
                child.call("erase")
                same(child.generate([text]), expected("qwen3", [text]))
            assert child.call("metrics") == {} and all(other.heard), "each was asked, and refused"
            other.close()
            for path in sockets.values():
                os.unlink(path)
            with ashlar.daemon.start(dram="128MiB", arena="8MiB", folder=str(tmp_path)):
                deadline = time.monotonic() + 20
                while saved(child) == 0 and time.monotonic() < deadline:
                    child.call("erase")
                    same(child.generate([text]), expected("qwen3", [text]))
                assert saved(child) > 0


@pytest.mark.parametrize("model", PAIR)
def test_a_full_disk_evicts_old_objects(model, tmp_path, expected):
    """More texts than dram and disk have space for: kept texts are found, and the others are computed."""

    def counted(name, tier=""):
        return sum(
            value for key, value in scrape(daemon.metrics_socket).items() if key.startswith(f"{name}{{") and tier in key
        )

    texts = []
    with (
        ashlar.daemon.start(dram="4MiB", arena="1MiB", ssd="4MiB", admission="all", folder=str(tmp_path)) as daemon,
        Child(model, connector(daemon)) as child,
    ):
        while counted("ashlar_evictions_total") == 0 and len(texts) < 60:
            texts.append(prompt(f"disk full {model} {len(texts)}", 3 * BLOCK[model] + 1))
            child.call("erase")
            same(child.generate(texts[-1:], 3), expected(model, texts[-1:], 3))
        assert counted("ashlar_evictions_total") > 0, "both tiers are full"
        assert counted("ashlar_tier_used_bytes", 'tier="ssd"') > 0
        for text in [texts[-1], texts[0], texts[1], texts[-2]]:
            child.call("erase")
            same(child.generate([text], 3), expected(model, [text], 3))
        assert saved(child) > 0
        child.call("erase")
        assert child.call("free_blocks") == 255


@pytest.mark.parametrize("model", PAIR)
def test_a_killed_engine_frees_everything_in_the_daemon(model, daemon, expected):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    nothing = dict(sessions=0, leases=0, regions=0, region_bytes=0)
    assert held(daemon.metrics_socket) == nothing
    texts = [prompt(f"engine killed {model} {i}", 2 * BLOCK[model] + 20 + i) for i in range(4)]
    for _ in range(2):
        child = Child(model, connector(daemon))
        child.generate(texts[:2])
        child.call("erase")
        deadline = time.monotonic() + 20
        while (now := held(daemon.metrics_socket))["sessions"] < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert now["sessions"] == 2 and now["regions"] >= 1 and now["region_bytes"] > 0
        child.send("generate", texts, 6)  # the engine loads two texts, and computes and saves two
        time.sleep(draw.uniform(0, 0.2))
        os.kill(child._process.pid, signal.SIGKILL)
        child.kill()
        deadline = time.monotonic() + 20
        while held(daemon.metrics_socket) != nothing and time.monotonic() < deadline:
            time.sleep(0.1)
        assert held(daemon.metrics_socket) == nothing
    with Child(model, connector(daemon)) as other:
        same(other.generate(texts[:1]), expected(model, texts[:1]))
        assert saved(other) == repeated(model, len(texts[0]))
