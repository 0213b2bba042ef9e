# SPDX-License-Identifier: Apache-2.0
"""A server that answers like an OpenAI-compatible engine, and can fail at each point of an answer."""

import asyncio
import contextlib
import json

from aiohttp import web


class FakeBackend:
    """Answers completions with its name. The attributes change what it does."""

    def __init__(self, name):
        self.name = name
        self.healthy = True
        self.failure = ""  # refuse (503), bad (400), cut: no answer, cut_late: after one chunk, hang
        self.delay = 0.0  # before the first byte
        self.requests = []  # path, headers, body
        self.cancelled = 0  # requests whose client went away
        self.running = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _):
        return web.Response(status=200 if self.healthy else 500)

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
        self.requests.append((request.path_qs, dict(request.headers), body))
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
            return web.json_response({"model": self.name, "choices": []}, headers={"X-Engine": self.name})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for number in range(3):
            await out.write(f"data: {self.name} {number}\n\n".encode())
            await asyncio.sleep(0.01)
            if self.failure == "cut_late":
                request.transport.abort()
                return out
        await out.write(b"data: [DONE]\n\n")
        return out
