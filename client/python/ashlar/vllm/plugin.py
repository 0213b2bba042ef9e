# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`, which vLLM calls in each of its processes."""

from __future__ import annotations

NAME = "AshlarConnector"


def register() -> None:
    """Registers the connector by name. The connector is imported when an engine uses it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "ashlar.vllm", NAME)
