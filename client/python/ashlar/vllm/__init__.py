# SPDX-License-Identifier: Apache-2.0
"""Ashlar as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "AshlarConnector", "kv_role": "kv_both"}'

The installed package registers the connector by vLLM's plugin entry point. From a source tree without the package's
metadata, add "kv_connector_module_path": "ashlar.vllm".

docs/vllm-options.md has the options and metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ashlar.vllm.versions import unknown_version


def _imported(connector: Callable[[], Any]) -> Any:
    """Imports the module that needs vLLM. With an unsupported version of vLLM, the error names the version before the
    missing name."""
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
