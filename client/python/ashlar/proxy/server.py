# SPDX-License-Identifier: Apache-2.0
"""The proxy's HTTP server, by aiohttp, which vLLM already requires."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import prometheus_client as prometheus
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from ashlar.proxy.backends import Backend, Backends, Known
from ashlar.proxy.prompts import Prompts, Question, Unprobed

logger = logging.getLogger("ashlar.proxy")

PROBED = ("/v1/chat/completions", "/v1/completions")
# Headers of one connection only. All others are forwarded, except those that Connection names.
_HOP_BY_HOP = frozenset(
    "connection proxy-connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    "host content-length expect".split()
)
_ADDED = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")  # by aiohttp, unless they are skipped
_PROBED_BYTES = 4 << 20  # larger bodies are forwarded without a probe: parsing them would delay other requests
_HASHED_TOKENS = 256  # of a prompt's beginning, for the policy prefix-hash
_LATE_CHECKS = 2  # in a row make a backend unhealthy: a busy server may be late once
_KEEP_ALIVE_SECONDS = 2.0  # of idle connections to backends; vLLM closes them after 5 seconds
_UNAVAILABLE = (502, 503)  # status codes of a backend that has not begun to compute
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the proxy."""

    in_flight: int = 256  # requests per backend
    waiting: int = 1024  # requests in the queue for a backend
    wait_seconds: float = 30.0  # longest time in the queue
    connect_seconds: float = 2.0
    first_byte_seconds: float = 600.0
    idle_seconds: float = 300.0  # between two chunks of an answer, for a client to take one, and to send its body
    tries: int = 3  # backends per request
    body_bytes: int = 64 << 20
    check_seconds: float = 2.0  # interval of health checks, and the limit of each


class Metrics:
    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        kept: dict[str, Any] = {"registry": self.registry}
        self.requests = prometheus.Counter(
            "ashlar_proxy_requests",
            "Requests by backend and status; backend none: refused",
            ["backend", "code"],
            **kept,
        )
        self.failovers = prometheus.Counter(
            "ashlar_proxy_failovers", "Backends that failed before the first byte", ["backend", "reason"], **kept
        )
        self.probes = prometheus.Counter(
            "ashlar_proxy_probes", "Requests by outcome of their probe", ["outcome"], **kept
        )
        self.probe_seconds = prometheus.Histogram(
            "ashlar_proxy_probe_seconds", "Time of tokenizing and probing", buckets=_BUCKETS, **kept
        )
        self.first_byte_seconds = prometheus.Histogram(
            "ashlar_proxy_first_byte_seconds", "Time from a request to the first byte of its answer", ["backend"],
            buckets=_BUCKETS, **kept,
        )  # fmt: skip
        self.prompt_tokens = prometheus.Counter(
            "ashlar_proxy_prompt_tokens", "Tokens of probed prompts by backend", ["backend"], **kept
        )
        self.saved_tokens = prometheus.Counter(
            "ashlar_proxy_saved_tokens", "Of these, tokens that the probe found cached", ["backend"], **kept
        )
        self.in_flight = prometheus.Gauge("ashlar_proxy_in_flight", "Requests in flight", ["backend"], **kept)
        self.healthy = prometheus.Gauge("ashlar_proxy_backend_healthy", "1: healthy", ["backend"], **kept)
        self.waiting = prometheus.Gauge("ashlar_proxy_waiting", "Requests that wait for a backend", **kept)


def refusal(status: int, message: str, kind: str) -> web.Response:
    """Returns an error in OpenAI's format."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return web.json_response(body, status=status, headers=headers)


def _object(body: bytes) -> tuple[dict[str, Any] | None, str]:
    """Returns the JSON object of a body, or None and what is wrong with it; the text is empty if it is too large."""
    if len(body) > _PROBED_BYTES:
        return None, ""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return None, str(error)
    return (found, "") if isinstance(found, dict) else (None, "expected a JSON object")


class _Failed(Exception):
    """A backend failed before the first byte. The message is the reason, a label of metrics."""


class Proxy:
    def __init__(self, backends: Backends, prompts: Prompts | None, limits: Limits, probe_seconds: float) -> None:
        """`prompts`: None if nothing is probed."""
        self.backends, self._prompts, self._limits = backends, prompts, limits
        self._probe_seconds = probe_seconds
        self.metrics = Metrics()
        self._tokenizing = concurrent.futures.ThreadPoolExecutor(1, "tokenize")
        self._free = asyncio.Condition()
        self._waiting = 0
        self._client: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._limits.body_bytes)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_route("*", "/{path:.*}", self._serve)
        app.cleanup_ctx.append(self._run)
        return app

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_seconds)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, read_bufsize=1 << 20,
            skip_auto_headers=_ADDED, cookie_jar=aiohttp.DummyCookieJar(),  # cookies belong to clients
        ) as self._client:  # fmt: skip
            checks = [asyncio.create_task(self._check(backend)) for backend in self.backends.all]
            yield
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self.backends.close()

    async def _check(self, backend: Backend) -> None:
        assert self._client is not None
        limit, late, named = aiohttp.ClientTimeout(total=self._limits.check_seconds), 0, False
        while True:
            named = named and backend.healthy
            try:
                async with self._client.get(backend.url + "/health", timeout=limit) as answer:
                    self._mark(backend, answer.status == 200, f"status {answer.status}")
                    late = 0
                if backend.healthy and not named:
                    named = await self._read_names(backend, limit)
            except TimeoutError:
                late += 1
                if late >= _LATE_CHECKS:
                    self._mark(backend, False, f"{late} checks were late")
            except (aiohttp.ClientError, OSError) as error:
                self._mark(backend, False, str(error) or type(error).__name__)
            await self._wake()
            await asyncio.sleep(self._limits.check_seconds)

    async def _read_names(self, backend: Backend, limit: aiohttp.ClientTimeout) -> bool:
        """Asks the backend for its models. Returns whether it has answered."""
        assert self._client is not None
        try:
            async with self._client.get(backend.url + "/v1/models", timeout=limit) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError):
            return False
        try:
            names = [model["id"] for model in json.loads(body)["data"] if model.get("parent") is None]
            backend.base_names = frozenset(names)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # for example, it requires a key
            backend.base_names = frozenset()
        return True

    def _mark(self, backend: Backend, healthy: bool, why: str) -> None:
        if healthy != backend.healthy:
            logger.warning("backend %s is %s", backend.url, "healthy" if healthy else f"unhealthy: {why}")
        backend.healthy = healthy
        self.metrics.healthy.labels(backend.url).set(healthy)

    async def _health(self, _: web.Request) -> web.Response:
        up = [backend.url for backend in self.backends.all if backend.healthy]
        return web.json_response({"healthy": up}, status=200 if up else 503)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        for backend in self.backends.all:
            self.metrics.in_flight.labels(backend.url).set(backend.in_flight)
        self.metrics.waiting.set(self._waiting)
        text = prometheus.generate_latest(self.metrics.registry)
        return web.Response(body=text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                body = await request.read()
        except TimeoutError:
            return self._refuse(408, f"body: not complete after {self._limits.idle_seconds} s", "invalid_request_error")
        except web.HTTPRequestEntityTooLarge:
            limit = self._limits.body_bytes
            return self._refuse(413, f"body: more than {limit} bytes", "invalid_request_error")
        asked, error = _object(body) if request.method == "POST" else (None, "")
        known = Known(streams=None if asked is None else asked.get("stream") is True)
        if self._prompts is not None and request.method == "POST" and request.path in PROBED:
            if error:
                return self._refuse(400, f"body: {error}", "invalid_request_error")
            known = await self._probe(request.path, asked, known)
            self.metrics.probe_seconds.observe(time.perf_counter() - began)
        return await self._forward(request, body, known, began)

    async def _probe(self, path: str, asked: Mapping[str, Any] | None, known: Known) -> Known:
        """`asked`: the request's body; None: it is too large."""
        if asked is None:
            self.metrics.probes.labels("too_large").inc()
            return known
        try:
            async with asyncio.timeout(self._probe_seconds):
                question = await self._question(path, asked)
        except (Unprobed, TimeoutError) as error:
            self.metrics.probes.labels(str(error) if isinstance(error, Unprobed) else "timed_out").inc()
            return known
        beginning = question.tokens[:_HASHED_TOKENS].tobytes()
        known = dataclasses.replace(known, tokens=len(question.tokens), beginning=beginning)
        if self.backends.policy != "cheapest":
            return known
        if not self.backends.is_base(asked.get("model")):  # its objects have other names
            self.metrics.probes.labels("adapter").inc()
            return known
        estimates, unopened = await self.backends.probe(question)
        outcome = "nothing_cached" if estimates else "no_model" if unopened else "no_answer"
        if any(estimate.saved for estimate in estimates.values()):
            outcome = "found"
        self.metrics.probes.labels(outcome).inc()
        return dataclasses.replace(known, estimates=estimates)

    async def _question(self, path: str, asked: Mapping[str, Any]) -> Question:
        assert self._prompts is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, self._prompts.question, path, asked)

    def _refuse(self, status: int, message: str, kind: str) -> web.Response:
        self.metrics.requests.labels("none", status).inc()
        return refusal(status, message, kind)

    async def _take(self, order: tuple[Backend, ...], failed: set[str]) -> Backend | None:
        """Waits for the first backend below its limit of requests, and returns it. None: all have failed."""
        async with self._free:
            while True:
                left = [backend for backend in order if backend.url not in failed]
                up = [backend for backend in left if backend.healthy] or left
                if not up:
                    return None
                for backend in up:
                    if backend.in_flight < self._limits.in_flight:
                        return backend
                self._waiting += 1
                try:
                    await self._free.wait()
                finally:
                    self._waiting -= 1

    async def _wake(self) -> None:
        """Wakes all waiting requests. They may need different backends, so waking one is not enough."""
        async with self._free:
            self._free.notify_all()

    async def _forward(self, request: web.Request, body: bytes, known: Known, began: float) -> web.StreamResponse:
        failed: set[str] = set()
        why = "no backend"
        while len(failed) < self._limits.tries:
            if self._waiting >= self._limits.waiting:
                return self._refuse(429, "the proxy's queue is full; try again", "rate_limit_error")
            try:
                async with asyncio.timeout(self._limits.wait_seconds):
                    backend = await self._take(self.backends.choose(known), failed)
            except TimeoutError:
                return self._refuse(503, "all backends are busy; try again", "overloaded_error")
            if backend is None:
                break
            attempt = _Attempt(self, request, body, backend, known, began)
            try:
                return await attempt.run()
            except _Failed as error:
                why = f"{backend.url}: {error.__cause__ or error}"
                failed.add(backend.url)
                logger.warning("backend %s failed before the first byte: %s", backend.url, error.__cause__ or error)
                if str(error) == "timeout" and known.streams is False:
                    # The backend may be computing a long answer. Another would need as long.
                    self.metrics.requests.labels(backend.url, 504).inc()
                    limit = self._limits.first_byte_seconds
                    return refusal(504, f"no answer after {limit} s (--first-byte-seconds)", "timeout_error")
                self.metrics.failovers.labels(backend.url, str(error)).inc()
            finally:
                attempt.end()
                await self._wake()
        return self._refuse(503, f"no backend answered; the last failure: {why}", "service_unavailable_error")


class _Attempt:
    """One request at one backend."""

    def __init__(
        self, proxy: Proxy, request: web.Request, body: bytes, backend: Backend, known: Known, began: float
    ) -> None:
        self._proxy, self._request, self._body, self._backend = proxy, request, body, backend
        self._known, self._computed, self._began = known, known.computed(backend), began
        self._limits = proxy._limits
        self._has_started = False
        expected = proxy.backends.seconds(backend, known)
        proxy.backends.begin(backend, self._computed)
        self._timer = None if known.streams else asyncio.get_running_loop().call_later(expected, self._started)

    def _started(self) -> None:
        """Called when the backend has computed the prompt. An answer that is not streamed does not show when: then,
        after the expected time."""
        if not self._has_started:
            self._has_started = True
            Backends.first_byte(self._backend, self._computed)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._started()
        Backends.end(self._backend)

    async def run(self) -> web.StreamResponse:
        """Returns the answer. _Failed: the backend failed, and nothing was sent to the client."""
        client, backend, request = self._proxy._client, self._backend, self._request
        assert client is not None
        headers = _forwarded(request.headers)
        headers.popall("Content-Encoding", None)  # aiohttp has decoded the body
        # The request line may contain the proxy's host. The path is forwarded as it came.
        url = URL(backend.url + request.rel_url.raw_path_qs, encoded=True)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_seconds)
        until = asyncio.get_running_loop().time() + self._limits.first_byte_seconds
        try:
            async with asyncio.timeout_at(until):
                answer = await client.request(
                    request.method, url, data=self._body or None, headers=headers, timeout=limit, allow_redirects=False
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._proxy._mark(backend, False, str(error))
            raise _Failed("connect") from error
        except TimeoutError as error:
            raise _Failed("timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            self._proxy._mark(backend, False, str(error))
            raise _Failed("disconnect") from error
        try:
            return await self._answer(answer, until)
        finally:
            answer.close()  # stops the backend's work if the client has disconnected

    async def _answer(self, answer: aiohttp.ClientResponse, until: float) -> web.StreamResponse:
        """`until`: the loop's time at which the first byte is late."""
        backend, metrics, known = self._backend, self._proxy.metrics, self._known
        if answer.status in _UNAVAILABLE:
            raise _Failed(f"status_{answer.status}")
        chunks = answer.content.iter_any().__aiter__()
        # Read before the headers are sent, so that another backend can answer after a failure.
        chunk = await self._chunk(chunks, until)
        self._started()
        metrics.first_byte_seconds.labels(backend.url).observe(time.perf_counter() - self._began)
        metrics.requests.labels(backend.url, answer.status).inc()
        headers = _forwarded(answer.headers)
        headers["X-Ashlar-Backend"] = backend.url
        if (estimate := known.estimates.get(backend.url)) is not None:
            metrics.prompt_tokens.labels(backend.url).inc(known.tokens)
            metrics.saved_tokens.labels(backend.url).inc(estimate.saved)
            headers["X-Ashlar-Saved-Tokens"] = str(estimate.saved)
        out = web.StreamResponse(status=answer.status, headers=headers)
        await out.prepare(self._request)
        loop, seconds = asyncio.get_running_loop(), self._limits.idle_seconds
        while chunk is not None:
            try:
                async with asyncio.timeout(seconds):
                    await out.write(chunk)
            except TimeoutError:
                raise self._broken("the client does not read") from None
            try:
                chunk = await self._chunk(chunks, loop.time() + seconds)
            except _Failed as error:
                raise self._broken(f"the backend failed: {error.__cause__ or error}") from error
        await out.write_eof()
        return out

    def _broken(self, why: str) -> ConnectionError:
        """Ends the client's connection, which marks the answer as incomplete."""
        logger.warning("%s: the answer ended early: %s", self._backend.url, why)
        if self._request.transport is not None:
            self._request.transport.abort()
        return ConnectionError(why)

    async def _chunk(self, chunks: AsyncIterator[bytes], until: float) -> bytes | None:
        """Returns the next bytes, or None at the end."""
        try:
            async with asyncio.timeout_at(until):
                return await anext(chunks, None)
        except TimeoutError as error:
            raise _Failed("timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed("disconnect") from error


def _forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Returns the headers without those of one connection. Repeated headers stay repeated."""
    listed = ",".join(value for name, value in headers.items() if name.lower() == "connection")
    left_out = _HOP_BY_HOP | {name.strip().lower() for name in listed.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)
