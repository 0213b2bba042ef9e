# SPDX-License-Identifier: Apache-2.0
"""Options of the connector: `kv_connector_extra_config` of vLLM's transfer config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ashlar.sockets import default_sockets

_RENAMED = {"least_tokens": "min_tokens", "saves_under_way": "saves_in_flight"}  # by names of earlier releases


@dataclasses.dataclass(frozen=True)
class Options:
    """Times are milliseconds. Every wait of the connector ends by one of them."""

    rpc_socket: str = ""  # empty: as ashlar.sockets.default_sockets
    session_socket: str = ""
    weights_digest: str = ""  # empty: the checkpoint's files are hashed, whole
    model_id: str = ""  # empty: vLLM's name of the model
    call_ms: int = 1000  # one call of the daemon
    lookup_wait_ms: float = 2.0  # the scheduler waits so long for a plan, then goes on and asks again
    lookup_ms: int = 200  # a plan that takes longer is a miss
    land_ms: int = 30000  # no load takes longer; one that takes longer than computing is computed, after 2 s at least
    quiet_ms: int = 500  # behind that: until the blocks are left to the daemon, and kept from use
    reopen_ms: int = 2000  # between attempts to open a cache
    tokens_per_second: float = 0.0  # of prefill; 0: as it is measured
    min_tokens: int = 16  # fewer are not worth a load, nor a checkpoint
    checkpoint_tokens: int = 0  # hybrids: prefill stops so many tokens before a prompt's end, and where prompts part
    saves_in_flight: int = 16  # further saves are dropped
    wait_for_saves: bool = False  # steps end when their saves have
    segments: bool = False  # prompts that declare segments are set from them
    seam_head: int = 8  # first tokens of a segment that are computed in every prompt
    seam_tail: int = 8  # last ones
    segment_tokens: int = 16384  # room for keys and values of one prompt that is set
    compose_ms: int = 10000  # a prompt that gets no further for so long is computed instead

    @staticmethod
    def read(given: Mapping[str, Any]) -> Options:
        """ValueError names an option that there is not, or that has the wrong type."""
        known = {field.name: field for field in dataclasses.fields(Options)}
        defaults = Options()
        values: dict[str, Any] = {}
        values["rpc_socket"], values["session_socket"] = default_sockets()
        for name, value in given.items():
            if name in _RENAMED:
                raise ValueError(f"kv_connector_extra_config.{name}: renamed; use {_RENAMED[name]}")
            if name not in known:
                raise ValueError(
                    f"kv_connector_extra_config.{name}: unknown option; expected one of {', '.join(sorted(known))}"
                )
            kind = type(getattr(defaults, name))
            fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
            if not fits or (kind is not bool and isinstance(value, bool)):
                raise ValueError(f"kv_connector_extra_config.{name}: {value!r} was given; expected {kind.__name__}")
            if kind in (int, float) and value < 0:
                raise ValueError(f"kv_connector_extra_config.{name}: {value} is negative; expected 0 or more")
            values[name] = value
        return Options(**values)
