# SPDX-License-Identifier: Apache-2.0
"""The engines of the proxy: the state of each, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ashlar.probe import NodeProbe, Prober
from ashlar.proxy.prompts import Question
from ashlar.sockets import default_sockets

logger = logging.getLogger("ashlar.proxy")

_UNKNOWN_RATE = 1000.0  # tokens per second, as the daemon assumes
_CLOSE = 1.05  # estimates within 5 % are equal
_REOPEN_SECONDS = 2.0


@dataclasses.dataclass
class Backend:
    """One engine's server, with the daemon that it uses."""

    url: str  # without a slash at the end
    rpc_socket: str = ""  # its daemon's socket; empty: the default sockets
    session_socket: str = ""
    node: str = ""  # not empty: the engine runs on this node of the cluster, of which the daemon is a member

    healthy: bool = True  # until a check or a request fails
    in_flight: int = 0
    pending_tokens: float = 0.0  # tokens to compute for requests without a first byte
    sent: int = 0  # number of the last request that it got; ties are broken by it

    @property
    def sockets(self) -> tuple[str, str]:
        rpc, session = default_sockets()
        return self.rpc_socket or rpc, self.session_socket or session


def parse_backend(text: str) -> Backend:
    """Reads URL[,rpc=PATH,session=PATH][,node=NAME]. ValueError says what is wrong."""
    url, *options = text.split(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"--backend: {url!r} was given; expected a URL like http://127.0.0.1:8000")
    backend = Backend(url.rstrip("/"))
    names = {"rpc": "rpc_socket", "session": "session_socket", "node": "node"}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in names or not equals or not value:
            raise ValueError(f"--backend: {option!r} was given; expected rpc=PATH, session=PATH or node=NAME")
        setattr(backend, names[name], value)
    if bool(backend.rpc_socket) != bool(backend.session_socket):
        raise ValueError("--backend: rpc and session: one was given; expected both or none")
    return backend


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The expected cost of a prompt at a backend's node."""

    saved: int  # tokens from the cache
    tokens: int  # tokens to compute
    fetch_seconds: float
    wait_seconds: float
    rate: float  # tokens per second; 0: unknown
    usable: bool  # whether the node has an engine and is not draining


def estimate_of(probe: NodeProbe) -> Estimate:
    return Estimate(
        saved=probe.saved_tokens,
        tokens=max(1, probe.prompt_tokens - probe.saved_tokens),
        fetch_seconds=probe.fetch_seconds,
        wait_seconds=probe.wait_seconds,
        rate=probe.tokens_per_second,
        usable=probe.sessions > 0 and not probe.draining,
    )


@dataclasses.dataclass(frozen=True)
class Choice:
    """Backends in the order in which a request tries them."""

    order: tuple[Backend, ...]
    estimates: dict[str, Estimate]  # by URL; without backends whose node did not answer

    def computed(self, backend: Backend, tokens: int) -> float:
        found = self.estimates.get(backend.url)
        return found.tokens if found else tokens


class Backends:
    """The backends of a proxy, and their probes. Call all public methods on the event loop's thread."""

    def __init__(self, backends: Sequence[Backend], model_id: str, probe_seconds: float, round_robin: bool) -> None:
        self.all = list(backends)
        self._model_id, self._probe_seconds, self._round_robin = model_id, probe_seconds, round_robin
        self._probers: dict[tuple[str, str], Prober | None] = {backend.sockets: None for backend in backends}
        self._opened_at: dict[tuple[str, str], float] = {}
        # Each daemon has its own threads, so that a hanging daemon does not delay the answers of others.
        self._threads = {sockets: concurrent.futures.ThreadPoolExecutor(2, "probe") for sockets in self._probers}
        self._sent = 0

    @property
    def probes(self) -> bool:
        return not self._round_robin

    def _prober(self, sockets: tuple[str, str]) -> Prober:
        """Returns a daemon's prober. ConnectionError: no daemon answers; it is tried again after `_REOPEN_SECONDS`."""
        prober = self._probers[sockets]
        if prober is not None:
            return prober
        if time.monotonic() < self._opened_at.get(sockets, 0.0) + _REOPEN_SECONDS:
            raise ConnectionError("no daemon")
        self._opened_at[sockets] = time.monotonic()
        prober = Prober(*sockets, name="proxy", timeout_ms=max(1, int(1000 * self._probe_seconds)))
        self._probers[sockets] = prober
        return prober

    def _ask(self, sockets: tuple[str, str], question: Question, cluster: bool) -> dict[str, NodeProbe]:
        """Returns the answers by node. The daemon's own node is also in the result as ""."""
        prober = self._prober(sockets)
        options: dict[str, Any] = dict(model_id=self._model_id, salt=question.salt, cluster=cluster)
        try:
            found = prober.probe(question.tokens, question.segments, **options)
        except ValueError:  # several layouts for segments are open, or the prompt has too many segments
            if not question.segments:
                raise
            found = prober.probe(question.tokens, **options)
        return {node.node: node for node in found.nodes} | {"": found.nodes[0]}

    async def probe(self, question: Question) -> dict[str, Estimate]:
        """Returns estimates by URL of the backend, without backends whose daemon does not answer in time."""
        loop = asyncio.get_running_loop()
        asked: dict[tuple[str, str], asyncio.Future[dict[str, NodeProbe]]] = {}
        for sockets in self._probers:
            cluster = any(backend.node for backend in self.all if backend.sockets == sockets)
            asked[sockets] = loop.run_in_executor(self._threads[sockets], self._ask, sockets, question, cluster)
        await asyncio.wait(asked.values(), timeout=self._probe_seconds)
        estimates: dict[str, Estimate] = {}
        for backend in self.all:
            answer = asked[backend.sockets]
            if not answer.done() or answer.cancelled() or answer.exception() is not None:
                continue
            if (node := answer.result().get(backend.node)) is not None:
                estimates[backend.url] = estimate_of(node)
        for answer in asked.values():
            answer.cancel()
        return estimates

    def choose(self, estimates: dict[str, Estimate], tokens: int) -> Choice:
        """Orders the backends by the expected time to the first token of a prompt with this number of tokens.

        Backends with close or missing estimates are ordered by their requests in flight, then round-robin. Unhealthy
        backends come last: they are tried if all others have failed.
        """
        rates = [estimate.rate for estimate in estimates.values() if estimate.rate > 0]
        known = max(rates, default=_UNKNOWN_RATE)

        def seconds(backend: Backend) -> float:
            found = estimates.get(backend.url)
            rate = found.rate if found and found.rate > 0 else known
            pending = backend.pending_tokens / rate
            if found is None:
                return pending + tokens / rate
            return max(pending, found.wait_seconds) + found.fetch_seconds + found.tokens / rate

        def usable(backend: Backend) -> bool:
            found = estimates.get(backend.url)
            return backend.healthy and (found is None or found.usable)

        if self._round_robin:
            order = sorted(self.all, key=lambda backend: (not backend.healthy, backend.sent))
            return Choice(tuple(order), estimates)
        expected = {backend.url: seconds(backend) for backend in self.all}
        ordered = sorted(self.all, key=lambda backend: (not usable(backend), expected[backend.url]))
        best = ordered[0]
        limit = _CLOSE * expected[best.url] + 0.001
        close = [b for b in ordered if usable(b) == usable(best) and expected[b.url] <= limit]
        close.sort(key=lambda backend: (backend.in_flight, backend.sent))
        return Choice((*close, *(backend for backend in ordered if backend not in close)), estimates)

    def begin(self, backend: Backend, tokens: float) -> None:
        self._sent += 1
        backend.sent = self._sent
        backend.in_flight += 1
        backend.pending_tokens += tokens

    @staticmethod
    def first_byte(backend: Backend, tokens: float) -> None:
        backend.pending_tokens = max(0.0, backend.pending_tokens - tokens)

    @staticmethod
    def end(backend: Backend) -> None:
        backend.in_flight -= 1

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for prober in self._probers.values():
            if prober is not None:
                prober.close()
