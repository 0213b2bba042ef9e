# SPDX-License-Identifier: Apache-2.0
"""Digests of large files. Each is computed once and kept in a folder of the user, by the file's inode, size and
times."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import pathlib
import re
import tempfile
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger("ashlar")

_PART = 64 << 20  # bytes that one thread hashes at a time
_READ = 4 << 20  # bytes
_KEPT_FROM = 1 << 20  # bytes; smaller files are hashed every time
_THREADS = 4
_SETTLED_NS = 2_000_000_000  # a file that changed later than this before the read may change again within one timestamp
_MOST_ENTRIES = 4096
_ATTEMPTS = 3
_POLL = 0.05  # seconds
_LOCKED = 600  # seconds to wait for an entry's lock
_ENTRY = re.compile(rb"ashlar-digest-1 ([0-9a-f]{64})\n")


class Stopped(Exception):
    """The caller set `stop` before the digest was known."""


def _folders() -> list[pathlib.Path]:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [pathlib.Path(home) / "ashlar" / "digests", pathlib.Path(tempfile.gettempdir()) / f"ashlar-{os.geteuid()}"]


def _folder() -> pathlib.Path | None:
    """Returns the folder of kept digests, writable only by this user, or None if there is none."""
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if pathlib.Path(folder).is_dir() and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


def _key(found: os.stat_result) -> str:
    """Names one content of one file: any write changes the times, and a copy has a different inode."""
    named = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return hashlib.sha256(repr(named).encode()).hexdigest()


@contextlib.contextmanager
def _entry(key: str, stop: threading.Event) -> Iterator[int | None]:
    """Opens and locks the kept digest's file, or returns None if digests are not kept. Processes that want the same
    digest wait for the first one."""
    folder = _folder()
    if folder is None:
        yield None
        return
    try:
        entry = os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.debug("digests: %s", error)
        yield None
        return
    limit = time.monotonic() + _LOCKED
    try:
        while True:
            try:
                fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(_POLL):
                    raise Stopped from None
                # The lock's holder is stopped, or was forked from a process that has ended.
                if time.monotonic() > limit:
                    logger.warning("Ashlar: %s has been locked for %d s; hashing the weights again", key, _LOCKED)
                    break
            except OSError:  # a file system without locks: at worst the digest is computed twice
                break
        yield entry
    finally:
        with contextlib.suppress(OSError):  # a child that was forked meanwhile has the descriptor, too
            fcntl.flock(entry, fcntl.LOCK_UN)
        os.close(entry)


def _limit_entries(folder: pathlib.Path) -> None:
    """Removes the oldest entries beyond the limit."""
    with contextlib.suppress(OSError):
        entries = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime)
        for entry in entries[: max(0, len(entries) - _MOST_ENTRIES)]:
            entry.unlink(missing_ok=True)


def _hash_part(descriptor: int, begin: int, end: int, buffer: memoryview, stop: threading.Event) -> bytes:
    digest = hashlib.sha256()
    while begin < end:
        if stop.is_set():
            raise Stopped
        count = os.preadv(descriptor, [buffer[: min(len(buffer), end - begin)]], begin)
        if count == 0:
            break  # the file was truncated meanwhile; the caller detects it
        digest.update(buffer[:count])
        begin += count
    return digest.digest()


def _hash(descriptor: int, size: int, stop: threading.Event) -> str:
    """Returns SHA-256 over the digests of a file's parts, which several threads compute."""
    begins = range(0, size, _PART)
    digests = [b""] * len(begins)
    errors: list[BaseException] = []
    numbers = itertools.count()

    def work() -> None:
        with contextlib.suppress(OSError):  # the engine's own threads have priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        buffer = memoryview(bytearray(min(_READ, max(1, size))))
        try:
            while (number := next(numbers)) < len(begins) and not errors:
                begin = begins[number]
                digests[number] = _hash_part(descriptor, begin, min(size, begin + _PART), buffer, stop)
        except BaseException as error:
            errors.append(error)

    count = min(_THREADS, len(os.sched_getaffinity(0)), len(begins))
    threads = [threading.Thread(target=work, name="ashlar-digest", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return hashlib.sha256(f"{size};".encode() + b"".join(digests)).hexdigest()


def file_digest(path: pathlib.Path, stop: threading.Event | None = None) -> str:
    """Returns the digest of a file's whole content. OSError: it cannot be read, or changes while it is read. Stopped:
    `stop` is set."""
    stop = stop or threading.Event()
    for _ in range(_ATTEMPTS):
        with path.open("rb", buffering=0) as file:
            before, began = os.fstat(file.fileno()), time.time_ns()
            keep = before.st_size >= _KEPT_FROM
            with _entry(_key(before), stop) if keep else contextlib.nullcontext() as entry:
                known = None if entry is None else _ENTRY.fullmatch(os.pread(entry, 100, 0))
                if known is not None:
                    return known[1].decode()
                digest = _hash(file.fileno(), before.st_size, stop)
                if _key(os.stat(path)) != _key(before):
                    continue
                settled = began - max(before.st_mtime_ns, before.st_ctime_ns) > _SETTLED_NS
                if entry is not None and settled:
                    with contextlib.suppress(OSError):
                        os.ftruncate(entry, 0)
                        os.pwrite(entry, f"ashlar-digest-1 {digest}\n".encode(), 0)
                        if (folder := _folder()) is not None:
                            _limit_entries(folder)
                return digest
    raise OSError(f"{path}: changed while it was read; expected a checkpoint that does not change")
