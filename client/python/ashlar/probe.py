# SPDX-License-Identifier: Apache-2.0
"""Probes for routers: what nodes would save of a prompt, and how busy they are."""

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
    """Estimates of one node, from measured rates. Seconds are 0 if they are not known."""

    node: str  # name in the cluster; empty without one
    prompt_tokens: int
    prefix_tokens: int  # of the exact prefix that a lookup would resume from
    segment_tokens: int  # of cached segments after it, without the seams that are computed
    tiers: Mapping[str, int]  # the same tokens by tier
    fetch_seconds: float  # to load and land them
    compute_seconds: float  # to compute the other tokens
    wait_seconds: float  # until an engine of the node has computed the prompts that it has looked up
    queued_tokens: int  # tokens of those prompts, of all engines of the model
    tokens_per_second: float  # declared rate of prefill
    sessions: int  # sessions of engine processes with this model
    landings: int  # landings in flight, of all tenants
    draining: bool  # the node accepts no lookups

    @property
    def saved_tokens(self) -> int:
        return self.prefix_tokens + self.segment_tokens

    @property
    def first_token_seconds(self) -> float:
        """Estimated time to the first token, without decoding of other requests."""
        return self.wait_seconds + self.fetch_seconds + self.compute_seconds


@dataclasses.dataclass(frozen=True)
class Probed:
    """The result of a probe."""

    nodes: tuple[NodeProbe, ...]  # the asked node is the first
    cheapest: int  # index of the node where the prompt's first token is expected first


class Prober:
    """A router's session with one daemon. Thread-safe. Reconnects by itself.

    Raises ConnectionError if no daemon is reached. `timeout_ms` limits each call.
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
        """Estimates what the node would save of a prompt; `cluster`: also the other nodes of the cluster.

        Takes no lease and changes nothing. `segments`: lengths of the prompt's segments, from its start. `model_id` and
        `namespace` (hexadecimal digits) name the model as engines have opened it; neither is needed if there is one.

        Raises ConnectionError without a daemon, RuntimeError if no engine has opened the model, and ValueError whose
        message begins with the wrong argument's name.
        """
        secret = salt.encode() if isinstance(salt, str) else salt
        nodes, cheapest = self._prober.probe(tokens, segments, namespace, model_id, conversation, secret, cluster)
        return Probed(tuple(NodeProbe(**node) for node in nodes), cheapest)

    @property
    def connected(self) -> bool:
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
