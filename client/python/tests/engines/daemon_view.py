# SPDX-License-Identifier: Apache-2.0
"""Reads a daemon's own metrics, and emulates a daemon of another version. For the tests of all engines."""

import http.client
import re
import socket
import threading


def scrape(path):
    """{name: sum over its labels} of a daemon's metrics, by its Unix socket."""

    class Connection(http.client.HTTPConnection):
        def connect(self):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(10)
            self.sock.connect(path)

    connection = Connection("localhost")
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    sums = {}
    for name, labels, value in re.findall(r"^(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE):
        for key in {name, name + labels}:
            sums[key] = sums.get(key, 0) + float(value)
    return sums


def held(path):
    """The resources that engines hold of a daemon."""
    found = scrape(path)
    return {name: found.get(f"ashlar_{name}", 0) for name in ("sessions", "leases", "regions", "region_bytes")}


def _number(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number, value):
    """One field of a protobuf message."""
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


FAILED_PRECONDITION = 9
REFUSAL = b"hello.protocol_max: no common version; the daemon speaks 98 to 99; the client speaks 2 to 4"
# SessionReply of proto/ashlar/v1/session.proto: the refusal of an older client by a newer daemon, and the welcome of a
# daemon that does not compare versions.
REFUSES = _field(1, FAILED_PRECONDITION) + _field(2, REFUSAL)
WELCOMES = _field(3, _field(1, 99) + _field(2, bytes(16)) + _field(4, 256 << 10) + _field(5, bytes(16))) + _field(6, 1)


class OtherVersion:
    """A daemon that speaks another version of the protocol. `reply`: its answer to a Hello."""

    def __init__(self, rpc_socket, session_socket, reply=REFUSES):
        self.reply, self.heard, self._ended = reply, [], threading.Event()
        self._rpc = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._rpc.bind(rpc_socket)
        self._rpc.listen()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(session_socket)
        self._listener.listen()
        self._listener.settimeout(0.1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while not self._ended.is_set():
            try:
                session, _ = self._listener.accept()
            except TimeoutError:
                continue
            with session:
                session.settimeout(2)
                try:
                    self.heard.append(session.recv(1 << 16))
                    session.send(self.reply)
                    session.recv(1)  # until the client has read it and disconnected
                except OSError:
                    continue

    def close(self):
        self._ended.set()
        self._thread.join()
        self._rpc.close()
        self._listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        return False
