# SPDX-License-Identifier: Apache-2.0
"""The supported versions of vLLM. Segments rely on its internals, which may change in any version."""

from __future__ import annotations

import re

import vllm

OLDEST, BELOW = (0, 32), (0, 34)  # tests run with 0.32 and 0.33


def unknown_version() -> str | None:
    """Returns a message with the installed and the supported versions, or None if the installed one is supported."""
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) < BELOW:
        return None
    known = f"{OLDEST[0]}.{OLDEST[1]} to below {BELOW[0]}.{BELOW[1]}"
    return f"vllm: version {vllm.__version__} is not supported; expected {known}"
