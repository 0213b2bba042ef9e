# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of fake engines, with fake answers of daemons."""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import tomllib

import aiohttp
import numpy as np
import pytest
import shortest
from aiohttp import web
from fake_backend import FakeBackend

import ashlar
from ashlar.boundaries import Boundaries, declared_boundaries
from ashlar.probe import NodeProbe, Probed
from ashlar.proxy.__main__ import arguments, main, model_id
from ashlar.proxy.backends import Backend, Backends, Choice, parse_backend
from ashlar.proxy.prompts import Prompts, Question, Unprobed
from ashlar.proxy.server import Limits, Proxy

SOURCE = pathlib.Path(os.environ["ASHLAR_SOURCE"])
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}


def node(saved=0, **changes):
    fields = dict(
        node="", prompt_tokens=1000, prefix_tokens=saved, segment_tokens=0, tiers={}, fetch_seconds=0.0,
        compute_seconds=0.0, wait_seconds=0.0, queued_tokens=0, tokens_per_second=1000.0, sessions=1, landings=0,
        draining=False,
    )  # fmt: skip
    return NodeProbe(**{**fields, **changes})


class Words:
    """A tokenizer of words; `sep` is 7."""

    def encode(self, text, add_special_tokens=True):
        if "\ud800" in text:
            raise TypeError("TextEncodeInput must be Union[TextInputSequence, …]")
        words = [7 if word == "sep" else 100 + len(word) for word in text.split()]
        return [1, *words] if add_special_tokens else words

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **options):
        if any(message["role"] == "forbidden" for message in messages):
            raise ValueError("role")
        tokens = [token for message in messages for token in (2, *self.encode(message["content"], False))]
        return tokens + ([3] if add_generation_prompt else [])


class FakeProber:
    """Answers with `nodes`, of one daemon."""

    def __init__(self, *nodes):
        self.nodes, self.asked, self.error, self.seconds = nodes, [], None, 0.0

    def probe(self, tokens, segments=(), **options):
        self.asked.append((list(tokens), tuple(segments), options))
        if self.seconds:
            import time

            time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return Probed(tuple(self.nodes), 0)

    def close(self):
        pass


@contextlib.asynccontextmanager
async def proxy_of(names="ab", probers=None, round_robin=False, probe_seconds=0.5, **limits):
    """Yields the proxy, its URL, the fake engines and a client."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = {name: await stack.enter_async_context(FakeBackend(name).serving()) for name in names}
        parsed = [Backend(fake.url, f"/{name}/rpc", f"/{name}/session") for name, fake in fakes.items()]
        backends = Backends(parsed, "m", probe_seconds, round_robin)
        for name, prober in (probers or {}).items():
            backends._probers[f"/{name}/rpc", f"/{name}/session"] = prober
        prompts = None if round_robin else Prompts(Words())
        usual = dict(check_seconds=0.1, connect_seconds=0.5, wait_seconds=5)
        proxy = Proxy(backends, prompts, Limits(**{**usual, **limits}), probe_seconds)
        runner = web.AppRunner(proxy.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stack.push_async_callback(runner.cleanup)
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield proxy, url, fakes, client


def run(test):
    asyncio.run(asyncio.wait_for(test(), 60))


async def post(client, url, body=CHAT, path="/v1/chat/completions", **options):
    async with client.post(url + path, json=body, **options) as answer:
        return answer.status, answer.headers, await answer.read()


async def metrics(client, url):
    async with client.get(url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_a_prompt_goes_to_the_engine_that_has_it_cached():
    async def test():
        probers = {"a": FakeProber(node(0)), "b": FakeProber(node(800))}
        async with proxy_of(probers=probers) as (_, url, fakes, client):
            for _ in range(4):
                status, headers, body = await post(client, url)
                assert status == 200 and json.loads(body)["model"] == "b"
            assert headers["X-Ashlar-Backend"] == fakes["b"].url
            assert headers["X-Ashlar-Saved-Tokens"] == "800" and headers["X-Engine"] == "b"
            assert probers["a"].asked[0] == ([2, 103, 103, 105, 3], (), dict(model_id="m", salt="", cluster=False))
            found = await metrics(client, url)
            assert found[f'ashlar_proxy_saved_tokens_total{{backend="{fakes["b"].url}"}}'] == 3200
            assert found['ashlar_proxy_probes_total{outcome="found"}'] == 4

    run(test)


def test_an_engine_that_is_busy_or_drains_loses_its_prompts():
    async def test():
        probers = {"a": FakeProber(node(0)), "b": FakeProber(node(800, wait_seconds=5.0))}
        async with proxy_of(probers=probers) as (_, url, _, client):
            assert json.loads((await post(client, url))[2])["model"] == "a"
            probers["b"].nodes = (node(800, draining=True),)
            assert json.loads((await post(client, url))[2])["model"] == "a"
            probers["b"].nodes = (node(800, sessions=0),)
            assert json.loads((await post(client, url))[2])["model"] == "a"
            probers["b"].nodes = (node(800),)
            assert json.loads((await post(client, url))[2])["model"] == "b"

    run(test)


def test_uncached_prompts_are_spread():
    async def test():
        probers = {name: FakeProber(node(0)) for name in "abc"}
        async with proxy_of("abc", probers) as (_, url, fakes, client):
            for fake in fakes.values():
                fake.delay = 0.2
            await asyncio.gather(*(post(client, url) for _ in range(9)))
            assert [len(fake.requests) for fake in fakes.values()] == [3, 3, 3]

    run(test)


def test_a_daemon_that_is_away_or_late_costs_nothing_but_its_estimate():
    async def test():
        late = FakeProber(node(900))
        late.seconds = 2.0
        gone = FakeProber()
        gone.error = ConnectionError("no daemon")
        probers = {"a": late, "b": gone, "c": FakeProber(node(4, prompt_tokens=5))}
        async with proxy_of("abc", probers, probe_seconds=0.2) as (_, url, _, client):
            began = asyncio.get_running_loop().time()
            assert json.loads((await post(client, url))[2])["model"] == "c"
            assert asyncio.get_running_loop().time() - began < 1.5
            probers["c"].error = RuntimeError("no engine has opened the model")
            assert (await post(client, url))[0] == 200
            assert (await metrics(client, url))['ashlar_proxy_probes_total{outcome="no_answer"}'] == 1

    run(test)


def test_streams_are_forwarded_as_they_come():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (_, url, _, client):
            status, headers, body = await post(client, url, {**CHAT, "stream": True})
            assert status == 200 and headers["Content-Type"] == "text/event-stream"
            assert body == b"data: a 0\n\ndata: a 1\n\ndata: a 2\n\ndata: [DONE]\n\n"

    run(test)


@pytest.mark.parametrize("failure, reason", [("refuse", "status_503"), ("cut", "disconnect"), ("hang", "timeout")])
def test_another_engine_answers_if_one_fails_before_the_first_byte(failure, reason):
    async def test():
        probers = {"a": FakeProber(node(900)), "b": FakeProber(node(0))}
        patience = 2 if failure == "hang" else 60
        async with proxy_of(probers=probers, first_byte_seconds=patience) as (_, url, fakes, client):
            fakes["a"].failure = failure
            status, headers, body = await post(client, url, {**CHAT, "stream": True})
            assert status == 200 and body.startswith(b"data: b 0")
            found = await metrics(client, url)
            assert found[f'ashlar_proxy_failovers_total{{backend="{fakes["a"].url}",reason="{reason}"}}'] == 1
            assert fakes["a"].requests[0][2] == fakes["b"].requests[0][2]

    run(test)


def test_an_engine_that_is_down_is_not_asked_until_it_is_back():
    async def test():
        probers = {"a": FakeProber(node(900)), "b": FakeProber(node(0))}
        async with proxy_of(probers=probers) as (proxy, url, fakes, client):
            fakes["a"].healthy = False
            while proxy.backends.all[0].healthy:
                await asyncio.sleep(0.02)
            assert json.loads((await post(client, url))[2])["model"] == "b"
            async with client.get(url + "/health") as answer:
                assert answer.status == 200 and (await answer.json())["healthy"] == [fakes["b"].url]
            fakes["a"].healthy = True
            while not proxy.backends.all[0].healthy:
                await asyncio.sleep(0.02)
            assert json.loads((await post(client, url))[2])["model"] == "a"

    run(test)


def test_an_answer_that_breaks_off_ends_the_clients_connection():
    async def test():
        async with proxy_of(probers={name: FakeProber(node(0)) for name in "ab"}) as (_, url, fakes, client):
            for fake in fakes.values():
                fake.failure = "cut_late"
            with pytest.raises(aiohttp.ClientError):
                await post(client, url, {**CHAT, "stream": True})
            assert sum(len(fake.requests) for fake in fakes.values()) == 1  # no second engine after the first byte

    run(test)


def test_a_client_that_goes_away_ends_the_engines_work():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, url, fakes, client):
            fakes["a"].failure = "hang"
            with pytest.raises(TimeoutError):
                await post(client, url, timeout=aiohttp.ClientTimeout(total=0.3))
            while fakes["a"].running or proxy.backends.all[0].in_flight:
                await asyncio.sleep(0.02)
            assert fakes["a"].cancelled == 1
            assert proxy.backends.all[0].pending_tokens == 0

    run(test)


def test_without_an_engine_the_error_says_why():
    async def test():
        async with proxy_of(probers={name: FakeProber(node(0)) for name in "ab"}) as (_, url, fakes, client):
            for fake in fakes.values():
                fake.failure = "refuse"
            status, headers, body = await post(client, url)
            assert status == 503 and headers["Retry-After"] == "1"
            assert "no backend answered; the last failure: http://127.0.0.1:" in json.loads(body)["error"]["message"]

    run(test)


def test_errors_of_the_engine_are_the_clients():
    async def test():
        async with proxy_of(probers={name: FakeProber(node(0)) for name in "ab"}) as (_, url, fakes, client):
            for fake in fakes.values():
                fake.failure = "bad"
            status, _, body = await post(client, url)
            assert status == 400 and json.loads(body)["error"]["message"] in "ab"
            assert sum(len(fake.requests) for fake in fakes.values()) == 1

    run(test)


def test_queues_are_bounded():
    async def test():
        limits = dict(in_flight=1, waiting=1, wait_seconds=0.4)
        async with proxy_of("a", {"a": FakeProber(node(0))}, **limits) as (proxy, url, fakes, client):
            fakes["a"].failure = "hang"
            first = asyncio.create_task(post(client, url))
            while proxy.backends.all[0].in_flight == 0:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(post(client, url))
            while proxy._waiting == 0:
                await asyncio.sleep(0.01)
            status, headers, body = await post(client, url)
            assert status == 429 and "queue is full" in json.loads(body)["error"]["message"]
            status, _, body = await second
            assert status == 503 and "all backends are busy" in json.loads(body)["error"]["message"]
            first.cancel()

    run(test)


def test_a_waiting_request_takes_the_space_that_becomes_free():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}, in_flight=1) as (_, url, fakes, client):
            fakes["a"].delay = 0.1
            answers = await asyncio.gather(*(post(client, url) for _ in range(5)))
            assert [status for status, *_ in answers] == [200] * 5

    run(test)


def test_free_space_goes_to_a_request_that_can_use_it():
    """The request that has waited longest needs the other backend."""

    async def test():
        first, second = (Backend(f"http://{name}", in_flight=1) for name in "ab")
        proxy = Proxy(Backends([first, second], "m", 0.5, True), None, Limits(in_flight=1), 0.5)
        choice = Choice((first, second), {})
        waiting = asyncio.create_task(proxy._take(choice, {first.url}))
        await asyncio.sleep(0)
        served = asyncio.create_task(proxy._take(choice, set()))
        while proxy._waiting < 2:
            await asyncio.sleep(0)
        Backends.end(first)
        await proxy._wake()
        assert await asyncio.wait_for(served, 5) is first and not waiting.done()
        waiting.cancel()
        proxy.backends.close()

    run(test)


def test_a_request_that_waits_takes_a_backend_that_becomes_healthy():
    async def test():
        probers = {name: FakeProber(node(0)) for name in "ab"}
        async with proxy_of(probers=probers, in_flight=1) as (proxy, url, fakes, client):
            fakes["b"].healthy = False
            while proxy.backends.all[1].healthy:
                await asyncio.sleep(0.02)
            fakes["a"].failure = "hang"
            hanging = asyncio.create_task(post(client, url))
            while proxy.backends.all[0].in_flight == 0:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(post(client, url))
            while proxy._waiting == 0:
                await asyncio.sleep(0.01)
            fakes["b"].healthy = True
            status, _, body = await waiting
            assert status == 200 and json.loads(body)["model"] == "b"
            hanging.cancel()

    run(test)


def test_malformed_and_large_bodies_are_refused_by_name():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}, body_bytes=4096) as (_, url, fakes, client):
            for body, status, error in (
                (b"{", 400, "body: "),
                (b"[]", 400, "body: expected a JSON object"),
                (b"x" * 5000, 413, "body: more than 4096 bytes"),
            ):
                async with client.post(url + "/v1/completions", data=body) as answer:
                    assert answer.status == status
                    assert (await answer.json())["error"]["message"].startswith(error)
            assert fakes["a"].requests == []

    run(test)


def test_other_requests_are_forwarded_without_a_probe():
    async def test():
        prober = FakeProber(node(0))
        async with proxy_of("a", {"a": prober}) as (_, url, fakes, client):
            async with client.get(url + "/v1/models?x=1", headers={"Authorization": "Bearer k"}) as answer:
                assert answer.status == 200
            path, headers, _ = fakes["a"].requests[0]
            assert path == "/v1/models?x=1" and headers["Authorization"] == "Bearer k" and prober.asked == []
            await post(client, url, {"input": "text"}, "/v1/embeddings")
            assert prober.asked == [] and len(fakes["a"].requests) == 2

    run(test)


def test_a_request_that_names_the_proxys_host_is_forwarded():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, url, fakes, _):
            host = url.removeprefix("http://")
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(f"GET {url}/v1/models?x=1 HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            assert fakes["a"].requests[0][0] == "/v1/models?x=1" and proxy.backends.all[0].healthy

    run(test)


def test_round_robin_takes_turns_without_probes():
    async def test():
        async with proxy_of("abc", round_robin=True) as (_, url, fakes, client):
            for _ in range(6):
                await post(client, url)
            assert [len(fake.requests) for fake in fakes.values()] == [2, 2, 2]

    run(test)


def test_nodes_of_a_cluster_are_asked_through_one_daemon():
    prober = FakeProber(node(0, node="x"), node(700, node="y"))

    async def test():
        parsed = [parse_backend("http://127.0.0.1:1,node=x"), parse_backend("http://127.0.0.1:2,node=y")]
        backends = Backends(parsed, "m", 0.5, False)
        for sockets in backends._probers:
            backends._probers[sockets] = prober
        estimates = await backends.probe(Question(np.arange(1000, dtype=np.int32)))
        assert [estimates[backend.url].saved for backend in parsed] == [0, 700]
        assert len(prober.asked) == 1 and prober.asked[0][2]["cluster"] is True
        assert backends.choose(estimates, 1000).order[0] is parsed[1]
        backends.close()

    run(test)


def test_if_segments_cannot_be_probed_the_prefix_is():
    asked = []

    def probe(tokens, segments=(), **_):
        asked.append(segments)
        if segments and refuses:
            raise ValueError("ns: 2 open models match")
        return Probed((node(600 if segments else 200),), 0)

    prober, refuses = FakeProber(), False
    prober.probe = probe

    async def saved():
        backends = Backends([Backend("http://x", "/r", "/s")], "m", 0.5, False)
        backends._probers["/r", "/s"] = prober
        estimates = await backends.probe(Question(np.arange(1000, dtype=np.int32), (400, 400)))
        backends.close()
        return estimates["http://x"].saved

    assert asyncio.run(saved()) == 600 and asked == [(400, 400)]
    refuses = True
    assert asyncio.run(saved()) == 200


def test_hybrids_are_probed_in_both_of_their_layouts(daemon, monkeypatch):
    """As vLLM's connector opens them: exact prefixes with the convolution's head, and segments with seams."""
    pieces = dataclasses.replace(shortest.MODEL, head=8, tail=8, dtype="segments")
    convolution = ashlar.Linear(ashlar.Family.GDN, 2, 2, 16, 16, conv_channels=8, conv_kernel=4)
    exact = dataclasses.replace(shortest.MODEL, head=3, tail=0, layers=[convolution, shortest.MODEL.layers[1]])
    monkeypatch.setattr(shortest, "MODEL", pieces)
    rules, arch, stone = (f"The {name} are quoted here." for name in ("rules", "arches", "stones"))
    tokens = np.frombuffer((rules + stone + arch + "Why?").encode(), np.uint8).astype(np.int32)
    lengths, sockets = (len(rules), len(stone), len(arch)), (daemon.rpc_socket, daemon.session_socket)
    engine = shortest.Engine(*sockets)
    engine.serve([rules, arch, stone], "Why?", 4)

    async def estimate(segments):
        backends = Backends([Backend("http://x", *sockets)], pieces.model_id, 5.0, False)
        found = await backends.probe(Question(tokens, segments))
        backends.close()
        return found["http://x"]

    with ashlar.Cache(exact, *sockets, pages=64, capture_tokens=16):
        found = asyncio.run(estimate(lengths))
        assert found.saved == len(rules) + len(stone) + len(arch) - 2 * 16 and found.usable
        assert asyncio.run(estimate(())).saved == 0
    engine.cache.close()


@pytest.mark.parametrize(
    "text, error",
    [
        ("127.0.0.1:8000", "expected a URL"),
        ("ftp://x", "expected a URL"),
        ("http://x,socket=/a", "expected rpc=PATH, session=PATH or node=NAME"),
        ("http://x,rpc=/a", "one was given; expected both or none"),
        ("http://x,node=", "expected rpc=PATH"),
    ],
)
def test_wrong_backends_are_refused(text, error):
    with pytest.raises(ValueError, match="^--backend: .*" + error):
        parse_backend(text)


def test_prompts_become_the_engines_tokens():
    prompts = Prompts(Words(), Boundaries([7], None, 2))

    def of(body, path="/v1/completions"):
        return prompts.question(path, body)

    assert list(of({"prompt": "a bb"}).tokens) == [1, 101, 102]
    assert list(of({"prompt": "a bb", "add_special_tokens": False}).tokens) == [101, 102]
    assert list(of({"prompt": [5, 6]}).tokens) == [5, 6]
    assert list(of({"prompt": [[5, 6]]}).tokens) == [5, 6]
    assert of({"prompt": "a", "cache_salt": "user"}).salt == "user"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = of({"messages": [{"role": "user", "content": parts}]}, "/v1/chat/completions")
    assert list(chat.tokens) == [2, 101, 101, 3]
    segmented = of({"prompt": "aa bb sep cc dd sep ee", "add_special_tokens": False})
    assert segmented.segments == (3, 3) and len(segmented.tokens) == 7
    ended = of({"prompt": "aa bb sep cc dd sep", "add_special_tokens": False})
    assert ended.segments == (3,)  # the last token is always computed
    declared = of({"prompt": [5] * 9, "kv_transfer_params": {"ashlar_segments": [4, 4]}})
    assert declared.segments == (4, 4)
    assert of({"prompt": [5] * 9, "kv_transfer_params": {"ashlar_segments": [4, 40]}}).segments == ()


@pytest.mark.parametrize(
    "body, path, reason",
    [
        ({}, "/v1/completions", "prompt"),
        ({"prompt": ["a", "b"]}, "/v1/completions", "prompt"),
        ({"prompt": [1, -1]}, "/v1/completions", "prompt"),
        ({"messages": []}, "/v1/chat/completions", "prompt"),
        ({"messages": ["x"]}, "/v1/chat/completions", "prompt"),
        ({"messages": [{"role": "forbidden", "content": ""}]}, "/v1/chat/completions", "template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "/v1/chat/completions", "media"),
        ({"prompt": "a", "cache_salt": 5}, "/v1/completions", "salt"),
        ({"prompt": "\ud800"}, "/v1/completions", "prompt"),
        ({**CHAT, "chat_template": "{{ 1 }}"}, "/v1/chat/completions", "template"),
        ({**CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "/v1/chat/completions", "template"),
        *(
            ({**CHAT, "chat_template_kwargs": kwargs}, "/v1/chat/completions", "template")
            for kwargs in (
                {"padding": "max_length", "max_length": 10**9},
                {"tokenizer_kwargs": {"padding": "max_length", "max_length": 10**9}},
            )
        ),
    ],
)
def test_prompts_that_cannot_be_known_are_not_probed(body, path, reason):
    with pytest.raises(Unprobed, match=reason):
        Prompts(Words()).question(path, body)


def test_variables_of_a_template_are_passed():
    body = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert list(Prompts(Words()).question("/v1/chat/completions", body).tokens) == [2, 103, 103, 105, 3]


@pytest.mark.parametrize(
    "given, wanted",
    [
        ([], None),
        (["--segment-separator", "sep"], [6]),
        (["--segment-separator", "[7]"], [6]),
        (["--segment-separator", "[7, 9]"], []),
        (["--segment-separator", "[SEP]"], []),  # text
        (["--segment-boundaries", "messages"], [3]),
        (["--segment-boundaries", "messages", "--segment-separator", "[7]"], [3, 3]),
    ],
)
def test_segments_end_where_the_connectors_do(given, wanted, monkeypatch):
    monkeypatch.setattr("ashlar.boundaries.message_token", lambda tokenizer, template: 2)
    options = arguments().parse_args(["--backend", "http://x", "--model", "m", *given])
    found = declared_boundaries(options.segment_separator, options.segment_boundaries, Words(), short=2)
    assert (None if found is None else found.lengths([5, 5, 5, 2, 5, 7, 5])) == wanted


def test_without_a_tokenizer_only_token_ids_are_known():
    prompts = Prompts(None)
    assert list(prompts.question("/v1/completions", {"prompt": [5, 6]}).tokens) == [5, 6]
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        with pytest.raises(Unprobed, match="tokenizer"):
            prompts.question(path, body)


def test_the_default_model_id_is_the_connectors(tmp_path):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "qwen")

    def of(*given):
        return model_id(arguments().parse_args(["--backend", "http://x", *given]))

    assert of("--model", str(tmp_path / "qwen")) == of("--model", str(tmp_path / "link")) == "qwen"
    assert of("--model", "org/name") == "org/name"
    assert of("--model", str(tmp_path / "qwen"), "--model-id", "other") == "other"
    assert of() == of("--model", "org/name", "--model-id", "") == ""


def test_the_extra_has_what_chat_templates_need():
    project = tomllib.loads((SOURCE / "client/python/pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.match(r"[\w.-]+", each)[0].lower() for each in requirements}

    needed = [each for each in importlib.metadata.requires("transformers") if 'extra == "chat-template"' in each]
    assert needed and names(needed) <= names(project["optional-dependencies"]["proxy"])


@pytest.mark.parametrize(
    "given, error",
    [
        ([], "--backend"),
        (["--backend", "x"], "--backend: 'x' was given; expected a URL"),
        (["--backend", "http://x", "--backend", "http://x"], "--backend: a URL was given twice"),
        (["--backend", "http://x", "--tries", "0"], "--tries: 0 was given; expected more than 0"),
        (["--backend", "http://x", "--segment-separator", "#"], "--segment-separator: --model is required"),
        (["--backend", "http://x", "--segment-boundaries", "messages"], "--segment-boundaries: --model is required"),
        (["--backend", "http://x", "--segment-boundaries", "lines"], "--segment-boundaries: invalid choice: 'lines'"),
        (["--backend", "http://x", "--model", "/nowhere"], "--model: no tokenizer in '/nowhere'"),
    ],
)
def test_wrong_options_are_refused_by_name(given, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2 and error in capsys.readouterr().err
