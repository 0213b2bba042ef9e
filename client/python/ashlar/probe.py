# SPDX-License-Identifier: Apache-2.0
"""Probes for routers: how much of a prompt nodes have cached, and how busy they are."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

from ashlar import _ashlar
from ashlar.sockets import default_sockets


@dataclasses.dataclass(frozen=True)
class NodeProbe:
    """Estimates of one node for a prompt, from measured rates. Unknown seconds and rates are 0."""

    node: str  # name in the cluster; empty without a cluster
    prompt_tokens: int
    prefix_tokens: int  # tokens of the exact prefix that a lookup would resume from
    segment_tokens: int  # tokens of cached segments after the prefix, without the seams that are computed
    tiers: Mapping[str, int]  # prefix_tokens and segment_tokens by tier
    fetch_seconds: float  # time to load and land the cached tokens
    compute_seconds: float  # time to compute the other tokens
    wait_seconds: float  # time until an engine of the node has computed the prompts that it has looked up
    queued_tokens: int  # tokens of those prompts, of all engines of the model
    tokens_per_second: float  # declared rate of prefill
    sessions: int  # sessions of engine processes with this model
    landings: int  # landings in flight, of all tenants
    draining: bool  # the node accepts no lookups

    @property
    def saved_tokens(self) -> int:
        """Tokens that an engine of the node need not compute."""
        return self.prefix_tokens + self.segment_tokens

    @property
    def first_token_seconds(self) -> float:
        """Estimated time to the first token, without decoding of other requests."""
        return self.wait_seconds + self.fetch_seconds + self.compute_seconds


@dataclasses.dataclass(frozen=True)
class Probed:
    """The result of a probe."""

    nodes: tuple[NodeProbe, ...]  # first the node of the daemon that was called
    cheapest: int  # index in `nodes` of the shortest expected time to the first token


class Prober:
    """A router's session with one daemon. Thread-safe. Reconnects by itself.

    `rpc_socket`, `session_socket`: paths of the daemon's sockets; empty: `ashlar.sockets.default_sockets`. `name`:
    shown in the daemon's logs. `timeout_ms`: limit of each call. ConnectionError: no daemon.
    """

    def __init__(
        self,
        rpc_socket: str | os.PathLike[str] = "",
        session_socket: str | os.PathLike[str] = "",
        name: str = "router",
        timeout_ms: int = 1000,
    ) -> None:
        defaults = default_sockets()
        self._prober = _ashlar.Prober.open(rpc_socket or defaults[0], session_socket or defaults[1], name, timeout_ms)

    def probe(
        self,
        tokens: Any,
        segments: Sequence[int] = (),
        *,
        model_id: str = "",
        namespace: str = "",
        conversation: bytes = b"",
        salt: str | bytes = b"",
        cluster: bool = False,
    ) -> Probed:
        """Estimates which tokens of a prompt the node would not compute, and the time to its first token. Takes no
        lease and changes nothing.

        `tokens`: [tokens]. `segments`: lengths of the prompt's segments, in tokens, from position 0. `model_id`,
        `namespace` (hexadecimal digits): the model as engines have opened it; needed only if the daemon has several.
        If an engine has opened the model twice, with `capture_tokens` for prefixes and without it for segments, both
        layouts are probed as one model. With tensor parallelism, only the segments of vLLM's rank 0 are probed.
        `conversation`, `salt`: as in `Cache.begin`. `cluster`: whether to probe the cluster's other nodes, too.

        ConnectionError: the daemon does not answer. RuntimeError: no engine has opened the model. ValueError: an
        argument is wrong; the message begins with its name.
        """
        secret = salt.encode() if isinstance(salt, str) else salt
        nodes, cheapest = self._prober.probe(tokens, segments, namespace, model_id, conversation, secret, cluster)
        return Probed(tuple(NodeProbe(**node) for node in nodes), cheapest)

    @property
    def connected(self) -> bool:
        """Whether the session is connected now."""
        return bool(self._prober.connected())

    def close(self) -> None:
        """Ends the session. Later calls raise RuntimeError."""
        self._prober.close()

    def __enter__(self) -> Prober:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()
