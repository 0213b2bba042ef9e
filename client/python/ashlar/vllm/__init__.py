# SPDX-License-Identifier: Apache-2.0
"""Ashlar as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "AshlarConnector", "kv_role": "kv_both"}'

The installed package registers the connector by vLLM's plugin entry point. From a source tree without the package's
metadata, add "kv_connector_module_path": "ashlar.vllm".

docs/vllm.md has the options, metrics and limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ashlar.vllm.versions import unknown_version


def _imported(connector: Callable[[], Any]) -> Any:
    """The module that needs vLLM. Of another vLLM the missing name matters less than its version."""
    try:
        return connector()
    except ImportError as error:
        unknown = unknown_version()
        if unknown is not None:
            raise ImportError(unknown) from error
        raise


def _connector() -> Any:
    from ashlar.vllm.connector import AshlarConnector

    return AshlarConnector


AshlarConnector = _imported(_connector)

__all__ = ["AshlarConnector"]
