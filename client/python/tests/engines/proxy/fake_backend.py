# SPDX-License-Identifier: Apache-2.0
"""A server that answers like an OpenAI-compatible engine, and can fail at each point of an answer."""

import asyncio
import contextlib
import json

from aiohttp import web
from multidict import CIMultiDict


class FakeBackend:
    """Answers completions with its name. The attributes change what it does."""

    def __init__(self, name):
        self.name = name
        self.healthy = True
        self.late_checks = 0  # number of the next health checks that are answered late
        self.runners = []
        self.failure = ""  # refuse (503), bad (400), cut: no answer, cut_late: after one chunk, hang
        self.delay = 0.0  # seconds before the first byte
        self.gap = 0.01  # seconds between chunks of a stream
        self.chunks, self.padding = 3, b""  # of a stream; the padding is a part of each chunk
        self.headers = []  # further headers of answers
        self.requests = []  # path, headers, body
        self.cancelled = 0  # requests whose client went away
        self.running = 0
        self.models = {"data": []}  # the answer of /v1/models
        self.checks = 0  # health checks
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self, port=0):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._list)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self.runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _):
        self.checks += 1
        if self.late_checks:
            self.late_checks -= 1
            await asyncio.sleep(3600)
        return web.Response(status=200 if self.healthy else 500)

    async def _list(self, _):
        return web.json_response(self.models)

    async def _answer(self, request):
        self.running += 1
        try:
            return await self._completion(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _completion(self, request):
        body = await request.read()
        self.requests.append((request.raw_path, request.headers.copy(), body))
        await asyncio.sleep(self.delay)
        if self.failure == "hang":
            await asyncio.sleep(3600)
        if self.failure == "cut":
            request.transport.abort()
            return web.Response()
        if self.failure in ("refuse", "bad"):
            return web.json_response({"error": {"message": self.name}}, status=503 if self.failure == "refuse" else 400)
        asked = json.loads(body) if body else {}
        if not asked.get("stream"):
            headers = CIMultiDict([("X-Engine", self.name), *self.headers])
            return web.json_response({"model": self.name, "choices": []}, headers=headers)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for number in range(self.chunks):
            await out.write(f"data: {self.name} {number}\n\n".encode() + self.padding)
            await asyncio.sleep(self.gap)
            if self.failure == "cut_late":
                request.transport.abort()
                return out
        await out.write(b"data: [DONE]\n\n")
        return out
