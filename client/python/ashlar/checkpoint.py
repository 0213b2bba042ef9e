# SPDX-License-Identifier: Apache-2.0
"""Names a checkpoint by its content: folders and nodes that have the same files get the same name."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import re
import stat
import threading
import time
from collections.abc import Mapping
from typing import Any

from ashlar.digests import Stopped, file_digest

logger = logging.getLogger("ashlar")

# Names of files that decide the weights. Code that ships with them is included.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".json", ".py")
_TOKENIZER = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|tekken|spiece|sentencepiece).*|.*\.(model|tiktoken)"
)
_START_WAIT = 0.5  # seconds: enough for a digest that was computed before
_CLOCK_NS = 20_000_000  # largest difference between the kernel's file times and process times
_COMMIT = re.compile(r"[0-9a-f]{40}")


def without_place(config: Any) -> Any:
    """Returns a model's configuration without the folder or name from which it was loaded, at any depth."""
    if isinstance(config, Mapping):
        return {name: without_place(value) for name, value in config.items() if name != "_name_or_path"}
    if isinstance(config, (list, tuple)):
        return [without_place(each) for each in config]
    return config


def config_text(config: Mapping[str, Any]) -> bytes:
    """Returns a configuration as bytes that are equal in every process."""
    return json.dumps(without_place(config), sort_keys=True, default=str).encode()


def model_name(place: str) -> str:
    """Returns the name of a model that is loaded from `place`. For a folder, this is its last component: its location
    does not identify the model."""
    path = pathlib.Path(place)
    return path.resolve().name if path.exists() else place


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())


def process_start() -> int | None:
    """Returns when this process began, in nanoseconds since 1970, or None if it is no child of `multiprocessing`.

    vLLM and SGLang load a model in such a child. A main process may itself have written the checkpoint.
    """
    if multiprocessing.parent_process() is None:
        return None
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine's start
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)


def _moved_since(path: pathlib.Path, since: int) -> pathlib.Path | None:
    """Returns a file, link or folder on the path that was written or replaced since then, if any."""
    resolved = path.resolve()
    for each in {path.absolute(), *path.absolute().parents, resolved, *resolved.parents}:
        found = each.lstat()
        # Adding an entry to a folder changes both of its times. Renaming a folder changes only its status time.
        entered = stat.S_ISDIR(found.st_mode) and found.st_ctime_ns == found.st_mtime_ns
        if found.st_ctime_ns > since and not entered:
            return each
    return None


def weights(place: str, stop: threading.Event | None = None) -> str | None:
    """Returns SHA-256 of all files of a checkpoint in hexadecimal digits, or None if `place` is neither a folder nor a
    file.

    OSError: a file cannot be read, or changes while it is read. Stopped: `stop` was set.
    """
    path, digest = pathlib.Path(place), hashlib.sha256()
    if path.is_file():
        return file_digest(path, stop)
    if not path.is_dir():
        return None
    for file in _files(path):
        digest.update(f"\0{file.name}:{file_digest(file, stop)}".encode())
    return digest.hexdigest()


class Weights:
    """A checkpoint's digest, computed on a separate thread. Until it is known, the engine serves without the cache."""

    def __init__(self, place: str, known: str | None = None, draft: str | None = None) -> None:
        """`known`: a digest that the caller gives, so that no file is read. `draft`: the checkpoint of a draft model.

        The engine has loaded the files before. If a file has changed since this process began, there is no digest,
        because the engine may have read other content.
        """
        self._digest = known
        self._since = process_start()
        self._stop, self._known = threading.Event(), threading.Event()
        if known is not None:
            self._known.set()
            return
        threading.Thread(target=self._compute, args=(place, draft), name="ashlar-weights", daemon=True).start()
        self._known.wait(_START_WAIT)

    def _compute(self, place: str, draft: str | None) -> None:
        began = time.monotonic()
        try:
            files = [file for each in (place, draft) if each is not None for file in _files(pathlib.Path(each))]
            size = sum(file.stat().st_size for file in files)
            digest = weights(place, self._stop)
            if draft is not None:
                digest = hashlib.sha256(f"{digest} {weights(draft, self._stop)}".encode()).hexdigest()
            since = self._since
            for file in files if since is not None else ():
                if since is not None and (moved := _moved_since(file, since + _CLOCK_NS)) is not None:
                    raise OSError(
                        f"{moved} has changed since the engine's process began, so the engine may have read other "
                        "weights; restart the engine, or give weights_digest"
                    )
            self._digest = digest
            took = time.monotonic() - began
            logger.info("Ashlar: hashed the weights in %s: %.2f GB in %.2f s", place, size / 1e9, took)
        except Stopped:
            pass
        except Exception as error:
            logger.warning("Ashlar: the cache is off: cannot hash the weights in %s: %s", place, error)
        self._known.set()

    def digest(self) -> str | None:
        """Returns the digest, or None while it is unknown. If it cannot be computed, it stays None, and the log has a
        warning."""
        return self._digest

    def wait(self, seconds: float | None = None) -> str | None:
        """Waits until the digest is known, cannot be computed, or `close` was called; at most `seconds`. Returns
        `digest()`."""
        self._known.wait(seconds)
        return self._digest

    def failed(self) -> bool:
        """Returns whether the digest cannot be computed."""
        return self._known.is_set() and self._digest is None and not self._stop.is_set()

    def close(self) -> None:
        """Stops the computation. Does not wait for its thread."""
        self._stop.set()
        self._known.set()


def tokenizer(place: str) -> str | None:
    """Returns SHA-256 of all files of a tokenizer in hexadecimal digits, or None if `place` is neither a folder nor a
    file. OSError: a file cannot be read."""
    path, digest = pathlib.Path(place), hashlib.sha256()
    if path.is_file():
        digest.update(path.read_bytes())
        return digest.hexdigest()
    if not path.is_dir():
        return None
    for file in sorted(path.iterdir()):
        if _TOKENIZER.fullmatch(file.name) and file.is_file():
            digest.update(f"\0{file.name}:{file.stat().st_size};".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def commit(revision: Any) -> str | None:
    """Returns the commit that a revision of a hub's repository names, or None if the revision may name another commit
    later.

    `revision` is a string, or huggingface_hub's ResolvedRevision: a string such as "main" together with its commit.
    """
    found = str(getattr(revision, "resolved", None) or revision or "")
    return found if _COMMIT.fullmatch(found) else None
