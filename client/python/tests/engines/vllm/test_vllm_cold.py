# SPDX-License-Identifier: Apache-2.0
"""Servers that compute segments for other engines, and for an operator's `ashlarctl warm`."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import daemon_view
import pytest
from http_server import Served, with_tokenizer
from tiny_engines import prompt

import ashlar.daemon

HEAD = TAIL = 8
TEXT, STEP = 120, 1024  # tokens of a text, and of a step
# Patient on a busy machine. Segments of few tokens are taken, and the daemon believes that computing is slow.
PATIENT = dict(
    segments=True, min_segment_tokens=16, call_ms=10000, land_ms=60000, lookup_ms=10000, tokens_per_second=1.0,
)  # fmt: skip


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cold")
    with ashlar.daemon.start(dram="512MiB", arena="8MiB", folder=str(folder / "daemon")) as daemon:
        yield folder, daemon, with_tokenizer(folder / "tiny")


def start(shared, name, **options):
    folder, daemon, model = shared
    sockets = dict(rpc_socket=daemon.rpc_socket, session_socket=daemon.session_socket)
    transfer = dict(kv_connector="AshlarConnector", kv_role="kv_both", kv_connector_extra_config=sockets | options)
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager",
            "--gpu-memory-utilization", "0.2", "--max-num-batched-tokens", str(STEP), "--kv-transfer-config",
            json.dumps(transfer)]  # fmt: skip
    (folder / name).mkdir()
    return Served(os.environ, line, folder / name)


@pytest.fixture(scope="module")
def servers(shared):
    """One computes for others, the other one asks. They start at the same time."""
    both = []
    try:
        both.append(start(shared, "worker", serve_prefill=True, **PATIENT))
        both.append(start(shared, "asker", cold_parallel=True, **PATIENT))
        for server in both:
            server.wait(1500)
        yield both
    finally:
        for server in both:
            server.close()


@pytest.fixture
def worker(shared, servers):
    """At first it has never had a request."""
    wait_until(lambda: workers(shared) == 1)
    return servers[0]


@pytest.fixture
def asker(servers):
    return servers[1]


def workers(shared):
    return daemon_view.scrape(shared[1].metrics_socket).get("ashlar_prefill_workers", 0)


def given(shared):
    """The number of segments that engines were asked for, and that have not ended."""
    return daemon_view.scrape(shared[1].metrics_socket).get("ashlar_prefill_assigned_segments", 0)


def control(shared, *words):
    """Runs ashlarctl. Returns its exit code and its JSON document."""
    program = pathlib.Path(os.environ.get("ASHLARD", "ashlard")).with_name("ashlarctl")
    line = [program, words[0], "--socket", shared[1].admin_socket, "--json", *words[1:]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout)


def namespace(shared):
    """Returns the namespace of segments. That of exact prefixes has the convolution's head, and no tail."""
    _, found = control(shared, "models", "--tenant", "default")
    models = found["tenants"][0]["models"]
    (ns,) = {each["namespace"] for each in models if (each["head"], each["tail"]) == (HEAD, TAIL)}
    return ns


def files(folder, **texts):
    for name, tokens in texts.items():
        (folder / name).write_text(json.dumps(tokens))
    return [str(folder / name) for name in texts]


def warm(shared, folder, kind, seconds=240, **texts):
    words = ["--tenant", "default", "--namespace", namespace(shared), "--kind", kind, "--seconds", str(seconds)]
    return control(shared, "warm", *words, *files(folder, **texts))


def ask(server, parts, query):
    return server.complete(
        sum(parts, []) + query, kv_transfer_params={"ashlar_segments": [len(each) for each in parts]}
    )


def count(server, name, *labels):
    """Counts are reported with a later step."""
    server.complete(prompt(f"step {time.monotonic()}", 5))
    return server.scrape().get((name, tuple(sorted(labels))), 0)


def test_an_operator_warms_a_prefix_and_segments(shared, worker, tmp_path):
    lead, second, query = (prompt(f"warm {name}", TEXT) for name in ("lead", "second", "query"))
    body = {"model": "tiny", "prompt": " ".join(f"w{i}" for i in range(200, 300)), "add_special_tokens": False}
    first = json.loads(worker.post("/tokenize", body))["tokens"]
    assert first == list(range(200, 300))
    code, found = warm(shared, tmp_path, "segment", first=first, second=second)
    assert code == 0 and all(each["warm"] for each in found["texts"]), found
    code, found = warm(shared, tmp_path, "checkpoint", lead=lead)
    assert code == 0 and found["texts"][0]["warm"], found
    assert count(worker, "served_segments", "published") == 3
    answer = ask(worker, [lead, first, second], query)
    saved = TEXT + len(first) + TEXT - 2 * (HEAD + TAIL)
    wait_until(lambda: count(worker, "saved_tokens", "composed", "dram") == saved)
    worker.post("/reset_prefix_cache")
    assert ask(worker, [lead, first, second], query) == answer, "landed as before"


def test_an_operator_warms_a_text_longer_than_a_step(shared, worker, tmp_path):
    """It runs in three parts."""
    published = count(worker, "served_segments", "published")
    text = prompt("longer than a step", 2500)
    code, found = warm(shared, tmp_path, "segment", long=text)
    assert code == 0 and found["texts"][0]["warm"], found
    assert count(worker, "served_segments", "published") == published + 1
    lead, query = prompt("lead of a long text", TEXT), prompt("query of a long text", TEXT)
    taken = count(worker, "saved_tokens", "composed", "dram")
    ask(worker, [lead, text], query)
    wait_until(lambda: count(worker, "saved_tokens", "composed", "dram") == taken + len(text) - HEAD - TAIL)


def test_a_warm_up_waits_until_the_server_has_no_requests(shared, worker, tmp_path):
    """Meanwhile no engine offers to compute the text."""
    body = dict(model="tiny", prompt=prompt("busy", TEXT), temperature=0, max_tokens=500, ignore_eos=True)
    thread = threading.Thread(target=worker.post, args=("/v1/completions", body))
    thread.start()
    try:
        wait_until(lambda: workers(shared) == 0)
        code, found = warm(shared, tmp_path, "segment", later=prompt("warmed later", TEXT))
        assert code == 0 and found["texts"][0]["warm"], found
    finally:
        thread.join()


def test_a_text_that_is_too_long_for_the_server_is_refused(shared, worker, tmp_path):
    """It is asked for once, and the warm-up ends."""
    failed = count(worker, "served_segments", "failed")
    code, found = warm(shared, tmp_path, "segment", short=prompt("not too long", TEXT), long=prompt("too long", 5000))
    assert code == 1 and [each["warm"] for each in found["texts"]] == [True, False]
    assert [each["reason"] for each in found["texts"]] == ["none", "refused"]
    assert count(worker, "served_segments", "failed") == failed + 1


def test_servers_share_a_cold_prompt(shared, worker, asker):
    """The asking server's answer is composed of what both have computed."""
    parts = [prompt(f"shared {i}", TEXT) for i in range(6)]
    query = prompt("shared query", 20)
    before = count(worker, "served_segments", "published")
    answer = ask(asker, parts, query)
    elsewhere = wait_until(lambda: count(asker, "shared_segments"))
    assert 0 < elsewhere <= 6
    wait_until(lambda: count(worker, "served_segments", "published") - before == elsewhere)
    saved = TEXT + 5 * (TEXT - HEAD - TAIL)
    assert wait_until(lambda: count(asker, "saved_tokens", "composed", "dram")) == saved
    assert count(asker, "published_segments") == 6 - elsewhere
    assert ask(worker, parts, query) == answer, "the other server finds the same"


def test_servers_share_a_cold_prompt_of_segments_longer_than_a_step(shared, worker, asker):
    parts = [prompt(f"shared long {i}", STEP + 200) for i in range(3)]
    query = prompt("shared long query", 20)
    served, shares = count(worker, "served_segments", "published"), count(asker, "shared_segments")
    saved, published = count(asker, "saved_tokens", "composed", "dram"), count(asker, "published_segments")
    answer = ask(asker, parts, query)
    elsewhere = wait_until(lambda: count(asker, "shared_segments") - shares)
    assert 0 < elsewhere <= 3
    wait_until(lambda: count(worker, "served_segments", "published") - served == elsewhere)
    more = len(parts[0]) + 2 * (len(parts[0]) - HEAD - TAIL)
    wait_until(lambda: count(asker, "saved_tokens", "composed", "dram") == saved + more)
    assert count(asker, "published_segments") == published + 3 - elsewhere
    assert ask(worker, parts, query) == answer, "the other server finds the same"


def test_a_prompt_that_resumes_from_a_prefix_asks_no_other_engine(worker, asker):
    exact = prompt("exact", 500)
    asker.complete(exact)
    wait_until(lambda: count(asker, "stores", "kept") > 0)
    asker.post("/reset_prefix_cache")
    asked = count(asker, "shared_segments")
    ask(asker, [exact[:250], exact[250:]], prompt("exact query", 20))
    assert count(asker, "shared_segments") == asked


def test_segments_of_a_server_that_is_killed_are_computed_by_the_asking_one(shared, worker, asker):
    """The last test: it ends the other server, after it was asked and before it has answered. One segment is longer than
    a step, in parts of which the asking server then runs it beside the prompt's request."""
    query = prompt("killed query", 20)
    asked = count(asker, "shared_segments")
    for attempt in range(20):
        wait_until(lambda: workers(shared) == 1)
        parts = [prompt(f"killed {attempt} {i}", STEP + 200 if i == 3 else TEXT) for i in range(6)]
        worker.signal(signal.SIGSTOP)
        published = asker.scrape().get(("published_segments", ()), 0)
        thread = threading.Thread(target=ask, args=(asker, parts, query))
        thread.start()
        wait_until(lambda thread=thread: given(shared) > 0 or not thread.is_alive())
        if given(shared) > 0:
            break
        worker.signal(signal.SIGCONT)  # the daemon no longer expected it to answer
        thread.join()
    assert given(shared) > 0
    worker.signal(signal.SIGKILL)
    thread.join(120)
    assert not thread.is_alive() and workers(shared) == 0
    assert count(asker, "shared_segments") > asked
    wait_until(lambda: count(asker, "published_segments") == published + 6)
    answer = ask(asker, parts, query)
    asker.post("/reset_prefix_cache")
    assert ask(asker, parts, query) == answer
