# SPDX-License-Identifier: Apache-2.0
"""The proxy as an HTTP server: what it forwards, failures of engines, clients that go away, and queues."""

import asyncio
import gzip
import json

import aiohttp
import pytest
from fake_backend import FakeBackend
from running_proxy import CHAT, FakeProber, metrics, node, post, proxy_of, run

from ashlar.proxy.backends import Backend, Backends
from ashlar.proxy.server import Limits, Proxy


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


@pytest.mark.parametrize("policy", ["cheapest", "round-robin"])
def test_a_long_answer_that_is_not_streamed_is_computed_once(policy):
    async def test():
        probers = {"a": FakeProber(node(900)), "b": FakeProber(node(0))}
        async with proxy_of(probers=probers, policy=policy, first_byte_seconds=0.3) as (_, url, fakes, client):
            fakes["a"].failure = "hang"
            status, _, body = await post(client, url)
            assert status == 504 and "--first-byte-seconds" in json.loads(body)["error"]["message"]
            assert len(fakes["a"].requests) == 1 and not fakes["b"].requests
            found = await metrics(client, url)
            assert found[f'ashlar_proxy_requests_total{{backend="{fakes["a"].url}",code="504"}}'] == 1

    run(test)


@pytest.mark.parametrize("body", [{**CHAT, "stream": True}, {**CHAT, "stream": True, "padding": "x" * (4 << 20)}])
def test_without_probes_another_engine_answers_a_late_stream(body):
    """Also if the body is too large to be read."""

    async def test():
        async with proxy_of(policy="round-robin", first_byte_seconds=1) as (_, url, fakes, client):
            fakes["a"].failure = "hang"
            status, _, answer = await post(client, url, body)
            assert status == 200 and answer.startswith(b"data: b 0")

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


def test_an_engine_that_restarts_is_used_again():
    """The connections that were idle end with the engine."""

    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, url, fakes, client):
            port = int(fakes["a"].url.rpartition(":")[2])
            await asyncio.gather(*(post(client, url) for _ in range(4)))
            for runner in list(fakes["a"].runners):
                await runner.cleanup()
            assert (await post(client, url))[0] == 503
            async with FakeBackend("again").serving(port) as again:
                while not proxy.backends.all[0].healthy:
                    await asyncio.sleep(0.02)
                assert json.loads((await post(client, url))[2])["model"] == "again" and len(again.requests) == 1

    run(test)


def test_one_late_check_does_not_make_an_engine_unhealthy():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, _, fakes, _):
            backend, fakes["a"].late_checks = proxy.backends.all[0], 1
            for _ in range(70):  # the check, its limit and the pause after it take 1 to 1.5 s
                await asyncio.sleep(0.02)
                assert backend.healthy
            assert fakes["a"].late_checks == 0
            fakes["a"].late_checks = 2
            while backend.healthy:
                await asyncio.sleep(0.02)

    run(test)


def test_pauses_within_an_answer_have_their_own_limit():
    async def test():
        probers = {"a": FakeProber(node(0))}
        async with proxy_of("a", probers, first_byte_seconds=0.5, idle_seconds=10) as (_, url, fakes, client):
            fakes["a"].gap = 0.8
            assert (await post(client, url, {**CHAT, "stream": True}))[2].endswith(b"[DONE]\n\n")
        async with proxy_of("a", probers, first_byte_seconds=10, idle_seconds=0.3) as (_, url, fakes, client):
            fakes["a"].gap = 5.0
            with pytest.raises(aiohttp.ClientError):
                await post(client, url, {**CHAT, "stream": True})

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


def test_a_client_that_goes_away_during_its_answer_ends_the_engines_work():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, url, fakes, client):
            fakes["a"].gap = 30.0
            async with client.post(url + "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
                assert (await answer.content.readany()).startswith(b"data: a 0")
            while fakes["a"].running or proxy.backends.all[0].in_flight:
                await asyncio.sleep(0.02)
            assert fakes["a"].cancelled == 1 and proxy.backends.all[0].healthy

    run(test)


def test_a_client_that_goes_away_while_it_waits_is_not_sent():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}, in_flight=1) as (proxy, url, fakes, client):
            fakes["a"].failure = "hang"
            first = asyncio.create_task(post(client, url))
            while proxy.backends.all[0].in_flight == 0:
                await asyncio.sleep(0.01)
            with pytest.raises(TimeoutError):
                await post(client, url, timeout=aiohttp.ClientTimeout(total=0.3))
            while proxy._waiting:
                await asyncio.sleep(0.01)
            first.cancel()
            while proxy.backends.all[0].in_flight:
                await asyncio.sleep(0.01)
            assert len(fakes["a"].requests) == 1

    run(test)


def test_a_client_that_does_not_read_is_disconnected():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}, idle_seconds=0.5) as (proxy, url, fakes, client):
            fakes["a"].chunks, fakes["a"].padding, fakes["a"].gap = 1000, b"x" * (1 << 20), 0.0
            async with client.post(url + "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
                while fakes["a"].running or proxy.backends.all[0].in_flight:
                    await asyncio.sleep(0.02)
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()

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
        proxy = Proxy(Backends([first, second], "m", 0.5, "round-robin"), None, Limits(in_flight=1), 0.5)
        waiting = asyncio.create_task(proxy._take((first, second), {first.url}))
        await asyncio.sleep(0)
        served = asyncio.create_task(proxy._take((first, second), set()))
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


def test_a_body_that_is_sent_too_slowly_is_refused():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}, idle_seconds=0.5) as (_, url, fakes, _):
            host = url.removeprefix("http://")
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99\r\n\r\n{{".encode())
            assert (await reader.readline()).split()[1] == b"408"
            writer.close()
            assert fakes["a"].requests == []

    run(test)


def test_json_that_is_nested_too_deeply_is_refused():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (_, url, _, client):
            async with client.post(url + "/v1/completions", data=b"[" * 200_000) as answer:
                assert answer.status == 400 and "recursion" in (await answer.json())["error"]["message"]

    run(test)


def test_large_bodies_are_forwarded_without_a_probe():
    async def test():
        prober = FakeProber(node(0))
        async with proxy_of("a", {"a": prober}) as (_, url, fakes, client):
            body = json.dumps({"prompt": "x" * (5 << 20)}).encode()

            async def pieces():
                for begin in range(0, len(body), 1 << 20):
                    yield body[begin : begin + (1 << 20)]

            async with client.post(url + "/v1/completions", data=pieces()) as answer:  # chunked
                assert answer.status == 200
            assert fakes["a"].requests[0][2] == body and prober.asked == []
            assert (await metrics(client, url))['ashlar_proxy_probes_total{outcome="too_large"}'] == 1

    run(test)


def test_headers_of_one_connection_are_not_forwarded():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (_, url, fakes, client):
            fakes["a"].headers = [("X-Two", "1"), ("X-Two", "2"), ("Connection", "X-Hop"), ("X-Hop", "1")]
            given = [
                ("X-Own", "1"), ("X-Own", "2"), ("Connection", "close, X-Secret"), ("X-Secret", "1"), ("TE", "trailers"),
                ("Trailer", "X"), ("Upgrade", "h2c"), ("Proxy-Authorization", "Basic x"), ("Proxy-Connection", "x"),
            ]  # fmt: skip
            skipped = ("User-Agent", "Accept", "Accept-Encoding")
            _, headers, _ = await post(client, url, headers=given, skip_auto_headers=skipped)
            assert headers.getall("X-Two") == ["1", "2"] and "X-Hop" not in headers
            found = fakes["a"].requests[0][1]
            assert found.getall("X-Own") == ["1", "2"] and found["Host"] == fakes["a"].url.removeprefix("http://")
            assert set(found) <= {"X-Own", "Host", "Content-Type", "Content-Length"}

    run(test)


def test_a_compressed_body_is_forwarded_as_text():
    async def test():
        prober = FakeProber(node(0))
        async with proxy_of("a", {"a": prober}) as (_, url, fakes, client):
            packed = gzip.compress(json.dumps(CHAT).encode())
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            async with client.post(url + "/v1/chat/completions", data=packed, headers=headers) as answer:
                assert answer.status == 200
            _, found, body = fakes["a"].requests[0]
            assert json.loads(body) == CHAT and "Content-Encoding" not in found and len(prober.asked) == 1

    run(test)


def test_cookies_belong_to_clients():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, url, fakes, client):
            backend = proxy.backends.all[0]  # of addresses without a name, clients keep no cookies
            backend.url = backend.url.replace("127.0.0.1", "localhost")
            fakes["a"].headers = [("Set-Cookie", "session=1"), ("Set-Cookie", "other=2")]
            _, headers, _ = await post(client, url)
            assert headers.getall("Set-Cookie") == ["session=1", "other=2"]
            await post(client, url, cookies={"own": "3"})
            assert [found.get("Cookie") for _, found, _ in fakes["a"].requests] == [None, "own=3"]

    run(test)


@pytest.mark.parametrize(
    "line", ["CONNECT other.example:443", "GET @other.example/", "GET other.example/", "OPTIONS *"]
)
def test_requests_for_other_servers_are_refused(line):
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, url, fakes, _):
            host = url.removeprefix("http://")
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert (await reader.read()).split()[1][:1] == b"4"
            writer.close()
            assert fakes["a"].requests == [] and proxy.backends.all[0].healthy

    run(test)


def test_paths_are_forwarded_as_they_came():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (_, url, fakes, _):
            host = url.removeprefix("http://")
            reader, writer = await asyncio.open_connection(*host.split(":"))
            path = "/v1/a%2Fb%7e;c?x=%2b&x=a+b&y"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            assert fakes["a"].requests[0][0] == path

    run(test)


def test_other_requests_are_forwarded_without_a_probe():
    async def test():
        prober = FakeProber(node(0))
        async with proxy_of("a", {"a": prober}) as (_, url, fakes, client):
            async with client.get(url + "/version?x=1", headers={"Authorization": "Bearer k"}) as answer:
                assert answer.status == 200
            path, headers, _ = fakes["a"].requests[0]
            assert path == "/version?x=1" and headers["Authorization"] == "Bearer k" and prober.asked == []
            await post(client, url, {"input": "text"}, "/v1/embeddings")
            assert prober.asked == [] and len(fakes["a"].requests) == 2

    run(test)


def test_a_request_that_names_the_proxys_host_is_forwarded():
    async def test():
        async with proxy_of("a", {"a": FakeProber(node(0))}) as (proxy, url, fakes, _):
            host = url.removeprefix("http://")
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write(f"GET {url}/version?x=1 HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            assert fakes["a"].requests[0][0] == "/version?x=1" and proxy.backends.all[0].healthy

    run(test)
