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

from ashlar.proxy.backends import Backend, Backends, Choice, Estimate
from ashlar.proxy.prompts import Prompts, Question, Unprobed

logger = logging.getLogger("ashlar.proxy")

PROBED = ("/v1/chat/completions", "/v1/completions")
# Headers of one connection only. All others are forwarded.
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailers transfer-encoding upgrade host "
    "content-length expect".split()
)
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
    idle_seconds: float = 300.0  # between two chunks of an answer
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


class _Failed(Exception):
    """A backend failed before the first byte. The message is the reason, a label of metrics."""


class _Broken(Exception):
    """A backend failed after the first byte."""


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
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, read_bufsize=1 << 20
        ) as self._client:
            checks = [asyncio.create_task(self._check(backend)) for backend in self.backends.all]
            yield
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self.backends.close()

    async def _check(self, backend: Backend) -> None:
        assert self._client is not None
        limit = aiohttp.ClientTimeout(total=self._limits.check_seconds)
        while True:
            try:
                async with self._client.get(backend.url + "/health", timeout=limit) as answer:
                    self._mark(backend, answer.status == 200, f"status {answer.status}")
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                self._mark(backend, False, str(error) or type(error).__name__)
            await self._wake()
            await asyncio.sleep(self._limits.check_seconds)

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
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = self._limits.body_bytes
            return self._refuse(413, f"body: more than {limit} bytes", "invalid_request_error")
        estimates: dict[str, Estimate] = {}
        tokens = 0
        if self._prompts is not None and request.method == "POST" and request.path in PROBED:
            try:
                tokens, estimates = await self._probe(request.path, body)
            except ValueError as error:
                return self._refuse(400, f"body: {error}", "invalid_request_error")
            self.metrics.probe_seconds.observe(time.perf_counter() - began)
        return await self._forward(request, body, estimates, tokens, began)

    async def _probe(self, path: str, body: bytes) -> tuple[int, dict[str, Estimate]]:
        """Returns the number of the prompt's tokens, and estimates by URL. ValueError: the body is not a JSON
        object."""
        asked = json.loads(body)
        if not isinstance(asked, dict):
            raise ValueError("expected a JSON object")
        outcome, tokens, estimates = "found", 0, {}
        try:
            async with asyncio.timeout(self._probe_seconds):
                question = await self._question(path, asked)
            tokens = len(question.tokens)
            estimates = await self.backends.probe(question)
            if not estimates:
                outcome = "no_answer"
            elif not any(estimate.saved for estimate in estimates.values()):
                outcome = "nothing_cached"
        except Unprobed as error:
            outcome = str(error)
        except TimeoutError:
            outcome = "late"
        self.metrics.probes.labels(outcome).inc()
        return tokens, estimates

    async def _question(self, path: str, asked: Mapping[str, Any]) -> Question:
        assert self._prompts is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, self._prompts.question, path, asked)

    def _refuse(self, status: int, message: str, kind: str) -> web.Response:
        self.metrics.requests.labels("none", status).inc()
        return refusal(status, message, kind)

    async def _take(self, choice: Choice, failed: set[str]) -> Backend | None:
        """Waits for the best backend below its limit of requests, and returns it. None: all have failed."""
        async with self._free:
            while True:
                left = [backend for backend in choice.order if backend.url not in failed]
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

    async def _forward(
        self, request: web.Request, body: bytes, estimates: dict[str, Estimate], tokens: int, began: float
    ) -> web.StreamResponse:
        failed: set[str] = set()
        why = "no backend"
        while len(failed) < self._limits.tries:
            if self._waiting >= self._limits.waiting:
                return self._refuse(429, "the proxy's queue is full; try again", "rate_limit_error")
            choice = self.backends.choose(estimates, tokens)
            try:
                async with asyncio.timeout(self._limits.wait_seconds):
                    backend = await self._take(choice, failed)
            except TimeoutError:
                return self._refuse(503, "all backends are busy; try again", "overloaded_error")
            if backend is None:
                break
            computed = choice.computed(backend, tokens)
            self.backends.begin(backend, computed)
            attempt = _Attempt(self, request, body, backend, estimates.get(backend.url), tokens, computed, began)
            try:
                return await attempt.run()
            except _Failed as error:
                why = f"{backend.url}: {error.__cause__ or error}"
                failed.add(backend.url)
                self.metrics.failovers.labels(backend.url, str(error)).inc()
                logger.warning("%s: %s; another backend is tried", backend.url, error.__cause__ or error)
            finally:
                attempt.started()
                self.backends.end(backend)
                await self._wake()
        return self._refuse(503, f"no backend answered; the last failure: {why}", "service_unavailable_error")


class _Attempt:
    """One request at one backend."""

    def __init__(
        self, proxy: Proxy, request: web.Request, body: bytes, backend: Backend, estimate: Estimate | None,
        tokens: int, computed: float, began: float,
    ) -> None:  # fmt: skip
        self._proxy, self._request, self._body, self._backend = proxy, request, body, backend
        self._estimate, self._tokens, self._computed, self._began = estimate, tokens, computed, began
        self._limits = proxy._limits
        self._has_started = False

    def started(self) -> None:
        """Called when the backend has computed the prompt, or has failed."""
        if not self._has_started:
            self._has_started = True
            Backends.first_byte(self._backend, self._computed)

    async def run(self) -> web.StreamResponse:
        """Returns the answer. _Failed: the backend failed, and nothing was sent to the client."""
        client, backend, request = self._proxy._client, self._backend, self._request
        assert client is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = backend.url + request.rel_url.raw_path_qs  # the request line may contain the proxy's host
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=self._limits.connect_seconds, sock_read=self._limits.first_byte_seconds
        )
        try:
            answer = await client.request(
                request.method, url, data=self._body, headers=headers, timeout=limit, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._proxy._mark(backend, False, str(error))
            raise _Failed("connect") from error
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise _Failed("timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            self._proxy._mark(backend, False, str(error))
            raise _Failed("disconnect") from error
        try:
            return await self._answer(answer)
        finally:
            answer.close()  # stops the backend's work if the client has disconnected

    async def _answer(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        backend, metrics = self._backend, self._proxy.metrics
        if answer.status in _UNAVAILABLE:
            raise _Failed(f"status_{answer.status}")
        chunks = answer.content.iter_any().__aiter__()
        # Read before the headers are sent, so that another backend can answer after a failure.
        first = await self._chunk(chunks)
        self.started()
        metrics.first_byte_seconds.labels(backend.url).observe(time.perf_counter() - self._began)
        metrics.requests.labels(backend.url, answer.status).inc()
        if self._estimate is not None:
            metrics.prompt_tokens.labels(backend.url).inc(self._tokens)
            metrics.saved_tokens.labels(backend.url).inc(self._estimate.saved)
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        headers["X-Ashlar-Backend"] = backend.url
        if self._estimate is not None:
            headers["X-Ashlar-Saved-Tokens"] = str(self._estimate.saved)
        out = web.StreamResponse(status=answer.status, headers=headers)
        await out.prepare(self._request)
        try:
            while first is not None:
                await out.write(first)
                first = await self._chunk(chunks, self._limits.idle_seconds)
        except _Failed as error:
            logger.warning("%s: the answer ended early: %s", backend.url, error.__cause__ or error)
            if self._request.transport is not None:
                self._request.transport.abort()  # marks the answer as incomplete for the client
            raise _Broken from error
        await out.write_eof()
        return out

    async def _chunk(self, chunks: AsyncIterator[bytes], seconds: float | None = None) -> bytes | None:
        """Returns the next bytes, or None at the end."""
        try:
            async with asyncio.timeout(seconds):
                return await anext(chunks, None)
        except TimeoutError as error:
            raise _Failed("timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed("disconnect") from error
