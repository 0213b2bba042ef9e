# SPDX-License-Identifier: Apache-2.0
"""Digests of values in memory: of an adapter as it was loaded, of an image as the model gets it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def _array(digest: _Digest, values: np.ndarray[Any, Any], kind: str) -> None:
    digest.update(f"array {kind} {values.shape};".encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)  # releases the GIL


def _feed(digest: _Digest, value: Any) -> None:
    """Adds each value with its kind and length, so that different values give different bytes."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        plain = value.detach().contiguous()
        numbers = plain.reshape(-1).view(torch.uint8).numpy()
        digest.update(f"tensor {tuple(plain.shape)};".encode())
        _array(digest, numbers, str(plain.dtype))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        _array(digest, value, value.dtype.str)
    elif value is None or isinstance(value, (bool, int, float, str, np.generic, torch.dtype)):
        text = f"{type(value).__name__} {value!r}".encode()
        digest.update(f"{len(text)} ".encode() + text)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for name in sorted(value):
            _feed(digest, name)
            _feed(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)};".encode())
        for each in value:
            _feed(digest, each)
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor):
        _feed(digest, type(value).__qualname__)
        _feed(digest, vars(value))
    else:
        raise TypeError(f"{type(value).__qualname__}: cannot be hashed")


def content_digest(*values: Any) -> bytes:
    """Returns SHA-256 of all numbers and strings in the values. TypeError: a value has an unknown type, or is on a
    GPU."""
    digest = hashlib.sha256()
    _feed(digest, values)
    return digest.digest()
