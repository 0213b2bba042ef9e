"""Names a checkpoint by its content: one name in every folder, and on every node, that has the same files."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")
_TOKENIZER = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|tekken|spiece|sentencepiece).*|.*\.(model|tiktoken)"
)
_SAMPLE, _SAMPLES = 4096, 64  # bytes, and places in each file of weights
_COMMIT = re.compile(r"[0-9a-f]{40}")


def without_place(config: Any) -> Any:
    """A model's configuration without the folder or the name that it was loaded by."""
    if isinstance(config, Mapping):
        return {name: without_place(value) for name, value in config.items() if name != "_name_or_path"}
    if isinstance(config, (list, tuple)):
        return [without_place(each) for each in config]
    return config


def config_text(config: Mapping[str, Any]) -> bytes:
    return json.dumps(without_place(config), sort_keys=True, default=str).encode()


def _sample(path: pathlib.Path, digest: Any) -> None:
    size = path.stat().st_size
    digest.update(f"{size};".encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * i // max(1, _SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
            if size <= _SAMPLE:
                break


def weights(place: str) -> str | None:
    """Digest of samples of a checkpoint's files; None: `place` is neither a folder nor a file."""
    path, digest = pathlib.Path(place), hashlib.sha256()
    if path.is_file():
        _sample(path, digest)
        return digest.hexdigest()
    if not path.is_dir():
        return None
    for file in sorted(path.iterdir()):
        if file.suffix in _WEIGHTS and file.is_file():
            digest.update(f"\0{file.name}:".encode())
            _sample(file, digest)
    return digest.hexdigest()


def tokenizer(place: str) -> str | None:
    """Digest of a tokenizer's files, whole; None: `place` is neither a folder nor a file."""
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
    """Of a hub's repository: the commit that a revision names; None where it may name another one tomorrow.

    `revision` is a text, or a ResolvedRevision of huggingface_hub: a text such as "main", with its commit beside it.
    """
    found = str(getattr(revision, "resolved", None) or revision or "")
    return found if _COMMIT.fullmatch(found) else None
