# SPDX-License-Identifier: Apache-2.0
"""A private daemon for notebooks and tests.

    with ashlar.daemon.start(dram="1GiB") as daemon:
        cache = ashlar.Cache(model, daemon.rpc_socket, daemon.session_socket, pages=64)

`python -m ashlar.daemon` runs a daemon in the foreground, at the default sockets of engines of the same user, and
prints their paths.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Literal

from ashlar._ashlar import real, text, whole
from ashlar.sockets import user_folder

# Becomes the daemon, which gets SIGTERM when the thread that forked it ends (PR_SET_PDEATHSIG). It is a separate
# program because only exec is safe after a process with threads forks.
_BOUND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

_PACKAGED = pathlib.Path(__file__).parent / "bin" / "ashlard"


def program() -> str:
    """Returns the path of the daemon's program: $ASHLARD if it is set, else this package's, else the one in PATH.
    FileNotFoundError: there is none."""
    for candidate in (os.environ.get("ASHLARD"), str(_PACKAGED), shutil.which("ashlard")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise FileNotFoundError(
        "ashlard: not found in this package, in PATH or in the variable ASHLARD; install ashlar, or set ASHLARD"
    )


def _environment(program: str) -> dict[str, str]:
    """Returns the variables of a daemon. The UCX of a wheel must not load the modules of the machine's UCX."""
    bundled = _PACKAGED.parents[2] / "ashlar.libs"
    if program != str(_PACKAGED) or not bundled.is_dir():
        return dict(os.environ)
    return {"UCX_MODULE_DIR": str(bundled), **os.environ}


_Process = subprocess.Popen[bytes]
_Path = str | os.PathLike[str]
_Calls = queue.SimpleQueue[tuple[Callable[[], None], Future[None]]]


class _Forker:
    """Calls functions on one thread that runs until the process ends, even if the calling thread ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: _Calls | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Returns or raises once the function has ended or will not be called, even if the caller is interrupted."""
        future: Future[None] = Future()
        try:
            with self._lock:
                if self._calls is None:
                    calls: _Calls = queue.SimpleQueue()
                    threading.Thread(target=self._serve, args=(calls,), name="ashlar-fork", daemon=True).start()
                    self._calls = calls
                self._calls.put((function, future))
            future.result()
        except BaseException:
            if not future.cancel():
                concurrent.futures.wait([future])
            raise

    @staticmethod
    def _serve(calls: _Calls) -> None:
        while True:
            function, future = calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                function()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)


_forker = _Forker()
os.register_at_fork(after_in_child=_forker.__init__)  # type: ignore[misc]  # a child does not have the thread


def _yaml(value: object) -> str:
    """Formats a value in YAML's flow style. Plain words stay unquoted: 64MiB is a size, "64MiB" would be a string."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    return json.dumps(value)


def _answers(path: str) -> bool:
    """Returns whether a process listens at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


class Daemon:
    """A daemon that ends with `stop`, with its `with` block, or with the process that created this object.

    Only that process controls it: in a forked child `stop`, `kill` and the end of the `with` block do nothing. Create
    it with `ashlar.daemon.start`. `rpc_socket`, `session_socket`, `admin_socket`, `metrics_socket`: paths of its
    sockets. `log`: path of its log.
    """

    def __init__(self, folder: _Path, config: dict[str, object], log_level: str) -> None:
        folder = os.fsdecode(folder)
        self._owner = os.getpid()
        self.folder = folder
        self.rpc_socket = f"{folder}/rpc.sock"
        self.session_socket = f"{folder}/session.sock"
        self.admin_socket = f"{folder}/admin.sock"
        self.metrics_socket = f"{folder}/metrics.sock"  # HTTP: /metrics, /readyz
        self.log = f"{folder}/ashlard.log"
        listen = {
            "rpc_socket": self.rpc_socket,
            "session_socket": self.session_socket,
            "admin_socket": self.admin_socket,
            "metrics_socket": self.metrics_socket,
        }
        self._config = f"{folder}/ashlard.yaml"
        pathlib.Path(self._config).write_text(_yaml({"listen": listen, "log": {"level": log_level}, **config}) + "\n")
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """The daemon's process; None: it was stopped."""
        return None if self._process is None else self._process.pid

    def start(self, timeout: float = 30.0) -> None:
        """Starts the daemon again after `stop` or `kill`, and waits at most `timeout` seconds until it answers.

        RuntimeError: the daemon exited, or this is a forked child. TimeoutError: it did not answer. FileNotFoundError:
        there is no program. If this raises or is interrupted, no daemon keeps running.
        """
        if os.getpid() != self._owner:
            raise RuntimeError("start: the daemon belongs to the parent process; start one in this process")
        timeout = real("timeout", timeout)
        try:
            with open(self.log, "ab") as log:
                found = program()
                words = [sys.executable, "-ISc", _BOUND, str(os.getpid()), found, "--config", self._config]
                environment = _environment(found)

                def fork() -> None:
                    self._process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)

                _forker.call(fork)
            self._wait_for_answers(timeout)
        except BaseException:
            self.kill()
            raise

    def _wait_for_answers(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not _answers(self.admin_socket):
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"ashlard exited during startup:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"ashlard did not start within {timeout} s:\n{self.last_lines()}")
            time.sleep(0.02)

    def last_lines(self, count: int = 20) -> str:
        """Returns the last lines of the daemon's log."""
        return "\n".join(pathlib.Path(self.log).read_text(errors="replace").splitlines()[-count:])

    def wait(self) -> int | None:
        """Waits until the daemon exits by itself. Returns its exit status, below 0 for a signal; None: it was stopped."""
        return None if self._process is None else self._process.wait()

    def _running(self) -> _Process | None:
        """Returns the daemon's process if it runs and this process may stop it."""
        return self._process if os.getpid() == self._owner else None

    def stop(self, timeout: float = 30.0) -> None:
        """Stops the daemon by SIGTERM, and after `timeout` seconds by SIGKILL. Waits until it has ended."""
        timeout = real("timeout", timeout)
        process = self._running()
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def kill(self) -> None:
        """Stops the daemon by SIGKILL: it writes nothing more. Waits until it has ended."""
        process = self._running()
        if process is not None:
            process.kill()
            process.wait()
            self._process = None

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.stop()
        if self._temporary and os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)
        return False

    _temporary = False  # whether this object created the folder


def _size(name: str, given: object) -> str | int:
    """Returns a size as the configuration has it: bytes, or a string such as 64MiB, which the daemon parses."""
    return text(name, given) if isinstance(given, str) else whole(name, given)


def start(
    dram: str | int = "1GiB",
    *,
    ssd: str | int = "",
    folder: _Path | None = None,
    arena: str | int = "64MiB",
    admission: str = "second_use",
    log_level: str = "info",
    config: dict[str, object] | None = None,
) -> Daemon:
    """Starts a daemon and returns when it answers. Use the result in a `with` block, or call its `stop`.

    Sizes are numbers of bytes, or strings such as "64MiB". `dram`: capacity of the memory tier. `arena`: unit in which
    memory is assigned to a tenant. `ssd`: capacity of the disk tier; empty: no disk tier. `folder`: holds sockets, log
    and disk tier; by default a temporary folder that is deleted at the end of the `with` block. `admission`: the disk
    tier's admission policy. `log_level`, `config`: the log's level, and further sections of the configuration, as in
    ashlard.example.yaml.

    RuntimeError: the daemon exited, for example because of its configuration; the message has the log's last lines.
    TimeoutError: it did not answer. FileNotFoundError: there is no program. TypeError: an argument has the wrong type.
    """
    dram, ssd, arena = _size("dram", dram), _size("ssd", ssd), _size("arena", arena)
    if not isinstance(folder, (str, os.PathLike, type(None))):
        raise TypeError(f"folder: {type(folder).__name__} was given; expected a path: str or os.PathLike")
    if config is not None and not isinstance(config, dict):
        raise TypeError(f"config: {type(config).__name__} was given; expected a dict of sections")
    text("admission", admission)
    text("log_level", log_level)
    own = folder is None
    where = tempfile.mkdtemp(prefix="ashlar-") if folder is None else os.fsdecode(folder)
    os.makedirs(where, exist_ok=True)
    sections: dict[str, object] = {"dram": {"capacity_bytes": dram, "arena_bytes": arena}}
    if ssd:
        sections["ssd"] = {"folder": f"{where}/ssd", "capacity_bytes": ssd, "admission": admission}
    sections.update(config or {})
    daemon = Daemon(where, sections, log_level)
    daemon._temporary = own
    try:
        daemon.start()
    except BaseException:
        daemon.kill()
        if own:
            shutil.rmtree(where, ignore_errors=True)
        raise
    return daemon


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ashlar.daemon", description="Run a private cache daemon.")
    parser.add_argument("--dram", default="1GiB", help="capacity of the memory tier (default: 1GiB)")
    parser.add_argument("--ssd", default="", help="capacity of the disk tier (default: no disk tier); needs --folder")
    parser.add_argument(
        "--folder",
        help="directory for sockets, log and disk tier (default: where engines look for sockets, which is "
        "$XDG_RUNTIME_DIR/ashlar, and /run/ashlar for root; without XDG_RUNTIME_DIR a temporary directory)",
    )
    parser.add_argument(
        "--gpu", type=int, action="append", default=[], metavar="DEVICE", help="serve this GPU; may be repeated"
    )
    arguments = parser.parse_args()
    folder = arguments.folder or user_folder() or None
    if arguments.ssd and not arguments.folder:
        parser.error("--ssd: no directory for the disk tier; add --folder with a directory on the disk")
    if any(device < 0 for device in arguments.gpu):
        parser.error("--gpu: a device number below 0; expected 0 or more")
    if folder is not None and _answers(os.path.join(folder, "rpc.sock")):
        parser.error(f"--folder: a daemon already runs in {folder}; stop it or choose another directory")
    config: dict[str, object] = {}
    if arguments.gpu:
        config["gpu"] = [{"device": device} for device in arguments.gpu]
        config["sessions"] = {"region_bytes": "1TiB"}  # one region covers the engine's whole KV cache
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with start(arguments.dram, ssd=arguments.ssd, folder=folder, config=config) as daemon:
        print(
            json.dumps(
                {
                    "rpc_socket": daemon.rpc_socket,
                    "session_socket": daemon.session_socket,
                    "admin_socket": daemon.admin_socket,
                    "log": daemon.log,
                }
            ),
            flush=True,
        )
        try:
            status = daemon.wait()
        except KeyboardInterrupt:
            return 0
        if status:
            print(f"ashlard exited with status {status}:\n{daemon.last_lines()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
