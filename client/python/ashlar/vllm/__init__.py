"""Ashlar as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "AshlarConnector",
        "kv_connector_module_path": "ashlar.vllm", "kv_role": "kv_both"}'

docs/vllm.md has the options, metrics and limits.
"""

from ashlar.vllm.connector import AshlarConnector

__all__ = ["AshlarConnector"]
