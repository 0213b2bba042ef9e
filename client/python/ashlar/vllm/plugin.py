# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

NAME = "AshlarConnector"


def register() -> None:
    """Makes the connector known by its name. Importing it waits until an engine asks for it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "ashlar.vllm", NAME)
