# SPDX-License-Identifier: Apache-2.0
"""Options of the connector: `kv_connector_extra_config` of vLLM's transfer config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ashlar.sockets import default_sockets

_RENAMED = {"least_tokens": "min_tokens", "saves_under_way": "saves_in_flight"}  # names of earlier releases
_REMOVED = {"compose_ms": "because segments are composed in ordinary steps, which do not wait"}

# staged: copied through host memory by torch, on any device. mapped: the daemon maps them, in a CPU's memory or, built
# with CUDA, on a GPU. auto: mapped on a CPU, staged elsewhere.
KV_MEMORY = ("auto", "staged", "mapped")


@dataclasses.dataclass(frozen=True)
class Options:
    """Times are milliseconds. Every wait of the connector ends by one of them."""

    rpc_socket: str = ""  # empty: as ashlar.sockets.default_sockets
    session_socket: str = ""
    weights_digest: str = ""  # empty: the checkpoint's files are hashed, whole
    model_id: str = ""  # empty: vLLM's name of the model
    call_ms: int = 1000  # limit of one call to the daemon
    # The scheduler waits this long for a plan, then continues and asks again. 0: 1 % of the prompt's prefill, at least 0.5
    # and at most 20 ms.
    lookup_wait_ms: float = 0.0
    lookup_ms: int = 200  # a plan that takes longer is a miss
    land_ms: int = 30000  # limit of a load; a load slower than computing is also abandoned, after at least 2 s
    quiet_ms: int = 500  # after land_ms: wait for the daemon to stop writing; the blocks stay unusable until it does
    reopen_ms: int = 2000  # interval of attempts to open a cache
    tokens_per_second: float = 0.0  # rate of prefill; 0: measured
    min_tokens: int = 16  # shorter hits and checkpoints are not worth their cost
    # Hybrids: prefill stops this number of tokens before a prompt's end, and where prompts diverge. 0: the
    # number of tokens that the model's chat template rewrites in the next turn.
    checkpoint_tokens: int = 0
    chat_template: str = ""  # the server's --chat-template: a file or the template; empty: the model's own
    saves_in_flight: int = 16  # further saves are dropped
    kv_memory: str = "auto"  # how the daemon reaches the engine's caches: see KV_MEMORY
    staging_bytes: int = 4 << 30  # size of the host memory through which caches are copied; longer texts are cut
    wait_for_saves: bool = False  # whether steps wait until their saves have ended
    segments: bool = False  # whether segments are taken from the cache; by default if the options declare boundaries
    segments_on_gpu: bool = False  # whether also on a GPU, where they have never run
    segment_separator: str | list[int] = ""  # text or token ids that end a segment if a request declares none
    # messages: each message is a segment. The chat template needs special tokens between messages.
    segment_boundaries: str = ""
    seam_head: int = 8  # first tokens of a segment that are computed in every prompt
    seam_tail: int = 8  # the same for last tokens
    segment_tokens: int = 0  # capacity for landed segments of all waiting prompts; 0: see segments.segment_tokens
    segment_dtype: str = "float16"  # of stored tuples; float32 takes twice the bytes
    serve_prefill: bool = False  # whether an idle engine computes segments for other engines and for `ashlarctl warm`
    cold_parallel: bool = False  # whether other engines compute a part of a cold prompt's segments
    min_segment_tokens: int = 0  # shorter hits are computed; 0: hits that cost more time than they save

    @property
    def declared(self) -> list[str]:
        """Returns the names of the given options that declare boundaries of segments."""
        return [name for name in ("segment_separator", "segment_boundaries") if getattr(self, name)]

    @staticmethod
    def read(given: Mapping[str, Any]) -> Options:
        """ValueError names an option that does not exist or has the wrong type."""
        known = {field.name: field for field in dataclasses.fields(Options)}
        defaults = Options()
        values: dict[str, Any] = {}
        values["rpc_socket"], values["session_socket"] = default_sockets()
        for name, value in given.items():
            if name in _REMOVED:
                raise ValueError(f"kv_connector_extra_config.{name}: removed, {_REMOVED[name]}; delete the option")
            if name in _RENAMED:
                raise ValueError(f"kv_connector_extra_config.{name}: renamed; use {_RENAMED[name]}")
            if name not in known:
                raise ValueError(
                    f"kv_connector_extra_config.{name}: unknown option; expected one of {', '.join(sorted(known))}"
                )
            kind = type(getattr(defaults, name))
            fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
            if name == "segment_separator" and isinstance(value, list):
                fits = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value)
            if not fits or (kind is not bool and isinstance(value, bool)):
                raise ValueError(f"kv_connector_extra_config.{name}: {value!r} was given; expected {kind.__name__}")
            if kind in (int, float) and value < 0:
                raise ValueError(f"kv_connector_extra_config.{name}: {value} is negative; expected 0 or more")
            values[name] = value
        options = Options(**values)
        if "segments" not in values and options.declared:
            options = dataclasses.replace(options, segments=True)
        for name, expected in (("kv_memory", KV_MEMORY), ("segment_dtype", ("float16", "float32"))):
            if (value := getattr(options, name)) not in expected:
                raise ValueError(
                    f"kv_connector_extra_config.{name}: {value!r} was given; expected one of {', '.join(expected)}"
                )
        return options
