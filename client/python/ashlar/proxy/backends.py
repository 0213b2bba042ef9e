# SPDX-License-Identifier: Apache-2.0
"""The engines of the proxy: the state of each, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ashlar.probe import NodeProbe, Prober
from ashlar.proxy.prompts import Question
from ashlar.sockets import default_sockets

logger = logging.getLogger("ashlar.proxy")

_UNKNOWN_RATE = 1000.0  # tokens per second, as the daemon assumes
_CLOSE = 1.05  # costs within 5 % are equal
_REOPEN_SECONDS = 2.0

POLICIES = ("cheapest", "prefix-hash", "round-robin")


@dataclasses.dataclass
class Backend:
    """One engine's server, with the daemon that it uses."""

    url: str  # without a slash at the end
    rpc_socket: str = ""  # its daemon's socket; empty: the default sockets
    session_socket: str = ""
    node: str = ""  # not empty: the engine runs on this node of the cluster, of which the daemon is a member

    base_names: frozenset[str] = frozenset()  # names of its model, without adapters; empty: unknown
    healthy: bool = True  # until a check or a request fails
    in_flight: int = 0
    awaiting: int = 0  # requests whose prompts are not computed yet
    pending_tokens: float = 0.0  # tokens to compute for them
    sent: int = 0  # number of the last request that it got; ties are broken by it

    @property
    def sockets(self) -> tuple[str, str]:
        rpc, session = default_sockets()
        return self.rpc_socket or rpc, self.session_socket or session


def parse_backend(text: str) -> Backend:
    """Reads URL[,rpc=PATH,session=PATH][,node=NAME]. ValueError says what is wrong."""
    url, *options = text.split(",")
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:  # answers and metrics name the URL
        raise ValueError("--backend: a URL with a user or password was given; expected one without")
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
class Known:
    """What the proxy knows of a request."""

    tokens: int = 0  # of its prompt; 0: unknown
    beginning: bytes = b""  # of the prompt's tokens, for the policy prefix-hash; empty: unknown
    streams: bool | None = None  # whether the first byte of the answer follows the prompt's computation; None: unknown
    estimates: Mapping[str, Estimate] = dataclasses.field(default_factory=dict)  # by URL, of the nodes that answered

    def computed(self, backend: Backend) -> int:
        """Returns the tokens that the backend computes before the first token."""
        found = self.estimates.get(backend.url)
        return found.tokens if found else self.tokens


class Backends:
    """The backends of a proxy, and their probes. Call all public methods on the event loop's thread."""

    def __init__(self, backends: Sequence[Backend], model_id: str, probe_seconds: float, policy: str) -> None:
        self.all = list(backends)
        self.policy = policy
        self._model_id, self._probe_seconds = model_id, probe_seconds
        self._probers: dict[tuple[str, str], Prober | None] = {backend.sockets: None for backend in backends}
        self._opened_at: dict[tuple[str, str], float] = {}
        self._silent: set[tuple[str, str]] = set()  # daemons whose last answer is missing; probes do not wait for them
        self._unopened: set[tuple[str, str]] = set()  # daemons whose engines have not opened the model
        # Each daemon has its own threads, so that a hanging daemon does not delay the answers of others.
        self._threads = {sockets: concurrent.futures.ThreadPoolExecutor(2, "probe") for sockets in self._probers}
        self._sent = 0

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
        options: dict[str, Any] = dict(model_id=self._model_id, salt=question.salt, cluster=cluster)
        began = time.monotonic()
        try:
            prober = self._prober(sockets)
            try:
                found = prober.probe(question.tokens, question.segments, **options)
            except ValueError:  # several layouts for segments are open, or the prompt has too many segments
                if not question.segments:
                    raise
                found = prober.probe(question.tokens, **options)
        except ConnectionError:
            self._silent.add(sockets)
            raise
        if time.monotonic() < began + self._probe_seconds:
            self._silent.discard(sockets)
        return {node.node: node for node in found.nodes} | {"": found.nodes[0]}

    async def probe(self, question: Question) -> tuple[dict[str, Estimate], bool]:
        """Returns estimates by URL of the backend, without backends whose daemon does not answer in time, and whether a
        daemon has answered that no engine has opened the model."""
        loop = asyncio.get_running_loop()
        asked: dict[tuple[str, str], asyncio.Future[dict[str, NodeProbe]]] = {}
        for sockets in self._probers:
            cluster = any(backend.node for backend in self.all if backend.sockets == sockets)
            asked[sockets] = loop.run_in_executor(self._threads[sockets], self._ask, sockets, question, cluster)
        awaited = {sockets: answer for sockets, answer in asked.items() if sockets not in self._silent}
        if awaited:
            await asyncio.wait(awaited.values(), timeout=self._probe_seconds)
        self._silent.update(sockets for sockets, answer in awaited.items() if not answer.done())
        estimates: dict[str, Estimate] = {}
        unopened = [
            self._is_unopened(sockets, answer.exception())
            for sockets, answer in asked.items()
            if answer.done() and not answer.cancelled()
        ]
        for backend in self.all:
            answer = asked[backend.sockets]
            if not answer.done() or answer.cancelled() or answer.exception() is not None:
                continue
            if (node := answer.result().get(backend.node)) is not None:
                estimates[backend.url] = estimate_of(node)
        for answer in asked.values():
            answer.cancel()
        return estimates, any(unopened)

    def _is_unopened(self, sockets: tuple[str, str], error: BaseException | None) -> bool:
        """Returns whether a daemon has answered that no engine has opened the model, and logs the first such answer: the
        model's name may be wrong."""
        if not isinstance(error, RuntimeError) or not str(error).startswith(("model_id:", "ns:")):
            self._unopened.discard(sockets)
            return False
        if sockets not in self._unopened:
            self._unopened.add(sockets)
            logger.warning("daemon %s: %s (--model-id %r)", sockets[0], error, self._model_id)
        return True

    def choose(self, known: Known) -> tuple[Backend, ...]:
        """Returns the backends in the order in which the request tries them. Unhealthy backends come last: they are
        tried if all others have failed."""
        if self.policy == "round-robin":
            return tuple(sorted(self.all, key=lambda backend: (not backend.healthy, backend.sent)))
        if self.policy == "prefix-hash":
            return tuple(sorted(self.all, key=lambda backend: (not backend.healthy, self._rank(backend, known))))
        costs = {backend.url: self.cost(backend, known) for backend in self.all}

        def usable(backend: Backend) -> bool:
            found = known.estimates.get(backend.url)
            return backend.healthy and (found is None or found.usable)

        ordered = sorted(self.all, key=lambda backend: (not usable(backend), costs[backend.url]))
        best = ordered[0]
        limit = _CLOSE * costs[best.url] + 0.001
        close = [b for b in ordered if usable(b) == usable(best) and costs[b.url] <= limit]
        close.sort(key=lambda backend: (backend.in_flight, backend.sent))
        return (*close, *(backend for backend in ordered if backend not in close))

    def is_base(self, model: object) -> bool:
        """Returns whether requests for `model` run without an adapter, as far as the backends have named their
        models. `model`: the field of the request."""
        names = [name for backend in self.all for name in backend.base_names]
        return not model or not names or model in names

    def cost(self, backend: Backend, known: Known) -> float:
        """Returns the expected time to the request's first token, and the time by which computing its prompt delays
        later requests, in seconds. While one request waits, as many arrive as are waiting (Little's law), and each of
        them is delayed by what this prompt computes."""
        wait, compute = self._seconds(backend, known)
        waiting = sum(other.awaiting for other in self.all) / max(1, sum(other.healthy for other in self.all))
        return wait + compute * (1.0 + waiting)

    def seconds(self, backend: Backend, known: Known) -> float:
        """Returns the expected time to the request's first token."""
        return sum(self._seconds(backend, known))

    def _seconds(self, backend: Backend, known: Known) -> tuple[float, float]:
        """Returns the expected time to wait for other requests and fetched tokens, and the time to compute the prompt."""
        rates = [estimate.rate for estimate in known.estimates.values() if estimate.rate > 0]
        found = known.estimates.get(backend.url)
        rate = found.rate if found and found.rate > 0 else max(rates, default=_UNKNOWN_RATE)
        wait = backend.pending_tokens / rate
        if found is not None:
            wait = max(wait, found.wait_seconds) + found.fetch_seconds
        # The step that computes the prompt also computes a token of each request that is decoding.
        return wait + backend.in_flight / rate, known.computed(backend) / rate

    @staticmethod
    def _rank(backend: Backend, known: Known) -> tuple[Any, ...]:
        """Rendezvous hashing: if a backend fails, only its prompts move."""
        if not known.beginning:
            return backend.in_flight, backend.sent
        return (hashlib.sha256(known.beginning + backend.url.encode()).digest(),)

    def begin(self, backend: Backend, tokens: float) -> None:
        self._sent += 1
        backend.sent = self._sent
        backend.in_flight += 1
        backend.awaiting += 1
        backend.pending_tokens += tokens

    @staticmethod
    def first_byte(backend: Backend, tokens: float) -> None:
        backend.awaiting -= 1
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
