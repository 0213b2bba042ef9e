# SPDX-License-Identifier: Apache-2.0
"""Whether the engine uses the cache, and if not, why: one log line per change, and a gauge."""

from __future__ import annotations

import errno
import socket
import threading

from vllm.logger import init_logger

logger = init_logger("vllm.ashlar")

SERVING = "serving"  # prompts are looked up
OPENING = "opening"  # the daemon or the weights' digest is awaited
OFF = "off"  # this engine never uses the cache

# reason: (state, remedy)
REASONS: dict[str, tuple[str, str]] = {
    "none": (SERVING, ""),
    "weights": (OPENING, "wait for hashing, or set weights_digest"),
    "no_daemon": (OPENING, "start the daemon, or set rpc_socket and session_socket to the sockets that it printed"),
    "permission": (OPENING, "run the engine as a user that may open the daemon's sockets (group ashlar)"),
    "refused": (OPENING, "read the daemon's log; check tenants[].uids and both versions"),
    "lost": (OPENING, "check the daemon; the connector reconnects by itself"),
    "unhashed": (OFF, "read the log, or set weights_digest"),
    "unsupported": (OFF, "remove the unsupported feature (docs/limitations.md)"),
    "disagreement": (OFF, "give the scheduler and the workers the same model configuration"),
    "error": (OFF, "report the exception in the engine's log with the engine's arguments"),
}


def why_unreachable(path: str) -> str:
    """Returns why no session can be opened at this socket: no_daemon, permission or refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            failed = probe.connect_ex(path)
        except OSError:  # the path is too long for a socket
            return "no_daemon"
    if failed in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return "no_daemon"
    return "permission" if failed in (errno.EACCES, errno.EPERM) else "refused"


class State:
    """The state of one connector. Thread-safe. `what`: the half that reports, for the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._reason = ""
        self._said: tuple[str, str] = ("", "")

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def name(self) -> str:
        return REASONS[self._reason][0] if self._reason else ""

    def set(self, reason: str, detail: str = "") -> None:
        """Logs a change: a WARNING with the reason and the remedy if the cache is not used. The state "off" is
        final."""
        state, remedy = REASONS[reason]
        with self._lock:
            if self.name == OFF or (reason, detail) == self._said:
                return
            before = self.name
            self._reason, self._said = reason, (reason, detail)
        if state == SERVING:
            if before != SERVING:
                logger.info("Ashlar (%s): the cache is open: %s", self._what, detail)
        elif reason == "weights":
            logger.info("Ashlar (%s): not serving yet (weights): reading the checkpoint's files", self._what)
        else:
            text = f"{detail}; {remedy}" if detail else remedy
            wording = "the cache is off in this engine" if state == OFF else "cannot open the cache yet"
            logger.warning("Ashlar (%s): %s (%s): %s", self._what, wording, reason, text)
