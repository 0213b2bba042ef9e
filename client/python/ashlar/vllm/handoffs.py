# SPDX-License-Identifier: Apache-2.0
"""Handoff of finished prompts: a prefill engine sends a prompt's states to the node of a decode engine, whose engines
then resume the same prompt, or its continuation, from their own memory.

A request names the node in its `kv_transfer_params`: {"ashlar_handoff": NODE}, where NODE is `cluster.node` of that
node's daemon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

import ashlar

logger = init_logger("vllm.ashlar")

PARAMETER = "ashlar_handoff"
_WAITING = 64  # texts that wait for the thread; further ones are not handed off
_SHUTDOWN = 3.0  # seconds


@dataclasses.dataclass
class Handoff:
    """A finished request's text, and the depths whose states the node gets. The last depth is the text's length."""

    node: str
    tokens: npt.NDArray[np.int32]
    depths: list[int]
    salt: str
    media: list[tuple[int, bytes]]  # position and digest


def node_of(request: Any) -> str:
    """Returns the node that a request names; empty: none. ValueError: the parameter is wrong."""
    given = (request.kv_transfer_params or {}).get(PARAMETER, "")
    if not isinstance(given, str):
        raise ValueError(f"kv_transfer_params.{PARAMETER}: {given!r} was given; expected a node's name (cluster.node)")
    return given


def handed_depths(known: list[int], prompt: int) -> list[int]:
    """Returns the deepest depth from which the prompt itself resumes, and all depths from which continuations resume.

    `known`: depths whose states the cache has. A prompt's last token is always computed.
    """
    inside = [depth for depth in known if depth < prompt]
    return ([max(inside)] if inside else []) + sorted(depth for depth in set(known) if depth >= prompt)


class Handoffs:
    """Hands texts off on a separate thread, because a slow node would delay saves."""

    def __init__(self, wait_ms: int) -> None:
        self._wait_ms = wait_ms
        self._given: queue.Queue[tuple[ashlar.Cache, Handoff] | None] = queue.Queue(_WAITING)
        self._outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, cache: ashlar.Cache | None, handoff: Handoff) -> None:
        """Starts a handoff. Call it after the save of the text has ended."""
        if cache is None:
            self._outcomes.put("unavailable")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="ashlar-handoff", daemon=True)
            self._thread.start()
        try:
            self._given.put_nowait((cache, handoff))
        except queue.Full:
            self._outcomes.put("busy")

    def take_outcomes(self) -> list[str]:
        """Returns one outcome per depth since the last call."""
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    def close(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._given.put(None, timeout=_SHUTDOWN)
            self._thread.join(timeout=_SHUTDOWN)

    def _serve(self) -> None:
        while (given := self._given.get()) is not None:
            cache, handoff = given
            for depth in handoff.depths:
                try:
                    media = [medium for medium in handoff.media if medium[0] < depth]
                    outcome = cache.handoff(
                        handoff.tokens[:depth], handoff.node, media=media, salt=handoff.salt, wait_ms=self._wait_ms
                    )
                except Exception as error:  # the decode engine computes the prompt, or fetches it when it is looked up
                    logger.warning("Ashlar: handoff to node %s failed: %s", handoff.node, error)
                    outcome = "unavailable"
                self._outcomes.put(outcome)
