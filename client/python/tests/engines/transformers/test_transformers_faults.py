# SPDX-License-Identifier: Apache-2.0
"""Daemons that hang, are full, or speak another version, and processes that die: `generate` returns the same answer as
without a cache."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny_transformers as tiny
import torch
from daemon_view import REFUSES, WELCOMES, OtherVersion, held, scrape

import ashlar
import ashlar.daemon
from ashlar.transformers.assembly import Assembler, Restart
from ashlar.transformers.model_cache import Fault

SEGMENTS = [tiny.tokens(60, seed) for seed in range(3)]
QUERY = tiny.tokens(12, 99)
PROMPT = torch.tensor([tiny.tokens(300, 7)])
GREEDY = {"max_new_tokens": 8, "do_sample": False}
WAITS = dict(timeout_ms=500, land_ms=500, quiet_ms=500)


@pytest.fixture(scope="module")
def model():
    return tiny.build("qwen3_next")


@pytest.fixture(scope="module")
def plain(model):
    return model.generate(PROMPT, **GREEDY)


def test_a_frozen_daemon_only_delays(model, daemon, plain):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    prompt = ashlar.Prompt(SEGMENTS, QUERY)
    computed = model.generate(torch.tensor([prompt.tokens.tolist()]), **GREEDY)
    with ashlar.cache_for(model, daemon, tokens=1024, **WAITS) as cache, ashlar.attach(model, cache) as reuse:
        model.generate(prompt, **GREEDY)
        composed = model.generate(prompt, **GREEDY)
        assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
        pages = cache.pages
        for _ in range(3):
            stop = threading.Timer(draw.uniform(0, 0.1), lambda: os.kill(daemon.pid, signal.SIGSTOP))
            stop.start()
            began, turns = time.monotonic(), 0
            try:
                while stop.is_alive() or turns < 2:  # before and while the daemon hangs
                    turns += not stop.is_alive()
                    assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
                    said = model.generate(prompt, **GREEDY)
                    assert torch.equal(said, composed) or torch.equal(said, computed)
                assert time.monotonic() - began < 120
                assert reuse.last.cached_tokens == 0, "while it hangs nothing comes from it"
            finally:  # closing the cache waits for unresolved landings
                stop.join()
                os.kill(daemon.pid, signal.SIGCONT)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
                if reuse.last.cached_tokens >= 256:
                    break
                time.sleep(0.1)
            assert reuse.last.cached_tokens >= 256, "it is of use again"
        deadline = time.monotonic() + 20
        while sorted(cache.free) != list(range(pages)) and time.monotonic() < deadline:
            model.generate(PROMPT, **GREEDY)
        assert sorted(cache.free) == list(range(pages)), "unresolved pages came back"


def test_a_failure_after_a_restart_loses_no_pages(model, daemon, plain):
    class Failing(Assembler):
        turns = 0

        def _follow(self, *given):
            self.turns += 1
            if self.turns > 2:
                return super()._follow(*given)
            raise Restart if self.turns == 1 else Fault("on purpose")

    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache, assembler=Failing) as reuse:
        for faults in (1, 1, 1):
            assert torch.equal(model.generate(PROMPT, **GREEDY), plain) and reuse.faults == faults
        assert reuse.last.fault is None and sorted(cache.free) == list(range(cache.pages))


@pytest.mark.parametrize("moment", ["twice", "another text"])
def test_states_of_other_tokens_are_not_offered(model, daemon, plain, moment):
    class Wrong(Assembler):
        def commit(self, assembled, text, *given):
            if moment == "twice":  # a prefill that feeds a prompt into the cache that already holds it
                self.run(assembled.cache, text, len(text))
            else:
                text = text.copy()
                text[3] += 1
            return super().commit(assembled, text, *given)

    with ashlar.cache_for(model, daemon, tokens=512) as cache:
        with ashlar.attach(model, cache, assembler=Wrong) as reuse:
            assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
            assert reuse.last.commits == [] and reuse.faults == 1
        with ashlar.attach(model, cache) as reuse:
            assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
            assert reuse.last.cached_tokens == 0 and sorted(cache.free) == list(range(cache.pages))


def test_a_full_cache_evicts_old_objects(model, tmp_path):
    prompts = [torch.tensor([tiny.tokens(300, 100 + i)]) for i in range(20)]
    wanted = [model.generate(each, **GREEDY) for each in prompts]
    with ashlar.daemon.start(dram="8MiB", arena="2MiB", ssd="8MiB", admission="all", folder=str(tmp_path)) as daemon:
        with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
            cached = 0
            for each, answer in [*zip(prompts, wanted)] * 2 + [(prompts[-1], wanted[-1])]:
                assert torch.equal(model.generate(each, **GREEDY), answer)
                assert reuse.last.fault is None
                cached += reuse.last.cached_tokens
            assert cached > 0
            assert sorted(cache.free) == list(range(cache.pages))
        gone = [
            name
            for name, value in scrape(daemon.metrics_socket).items()
            if name.startswith("ashlar_evictions_total{") and value
        ]
        assert gone, "it was full"


@pytest.mark.parametrize(
    "reply, reason", [(REFUSES, "98 to 99"), (WELCOMES, "chose protocol version 99")], ids=["refuses", "welcomes"]
)
def test_opening_refuses_a_daemon_of_another_version(model, tmp_path, reply, reason):
    sockets = str(tmp_path / "rpc.sock"), str(tmp_path / "session.sock")
    with OtherVersion(*sockets, reply) as other, pytest.raises(RuntimeError, match=reason):
        ashlar.cache_for(model, sockets, tokens=512, timeout_ms=1000)
    assert other.heard


def test_replacing_the_daemon_by_another_version_causes_misses(model, daemon, plain):
    with ashlar.cache_for(model, daemon, tokens=512, **WAITS) as cache, ashlar.attach(model, cache) as reuse:
        for _ in range(2):
            assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
        assert reuse.last.cached_tokens >= 256
        daemon.kill()
        for path in (daemon.rpc_socket, daemon.session_socket):
            pathlib.Path(path).unlink(missing_ok=True)
        with OtherVersion(daemon.rpc_socket, daemon.session_socket) as other:
            deadline = time.monotonic() + 20
            while not other.heard and time.monotonic() < deadline:
                assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
            assert other.heard
            assert torch.equal(model.generate(PROMPT, **GREEDY), plain) and reuse.last.cached_tokens == 0


def test_a_killed_process_holds_nothing_in_the_daemon(model, daemon, plain):
    nothing = dict(sessions=0, leases=0, regions=0, region_bytes=0)
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv[1])\n"
        "import ashlar, test_transformers_faults as t, tiny_transformers as tiny\n"
        "model = tiny.build('qwen3_next')\n"
        "with ashlar.cache_for(model, (sys.argv[2], sys.argv[3]), tokens=1024) as cache, ashlar.attach(model, cache):\n"
        "    while True:\n"
        "        model.generate(t.PROMPT, **t.GREEDY)\n"
        "        model.generate(ashlar.Prompt(t.SEGMENTS, t.QUERY), **t.GREEDY)\n"
        "        print('served', flush=True)\n"
    )
    folder = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{folder.parent}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([sys.executable, "-c", code, str(folder), daemon.rpc_socket, daemon.session_socket],
                               stdout=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    try:
        assert process.stdout.readline() == "served\n"
        while_it_lived = held(daemon.metrics_socket)
        time.sleep(random.uniform(0, 0.3))
    finally:
        process.kill()
        process.wait()
    assert while_it_lived["sessions"] == 1 and while_it_lived["region_bytes"] > 0
    deadline = time.monotonic() + 20
    while held(daemon.metrics_socket) != nothing and time.monotonic() < deadline:
        time.sleep(0.1)
    assert held(daemon.metrics_socket) == nothing
    with ashlar.cache_for(model, daemon, tokens=512) as cache, ashlar.attach(model, cache) as reuse:
        assert torch.equal(model.generate(PROMPT, **GREEDY), plain)
        assert reuse.last.cached_tokens >= 256, "what it had offered is there"
