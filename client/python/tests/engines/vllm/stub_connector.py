# SPDX-License-Identifier: Apache-2.0
"""The connector's decisions by the configuration alone, without an engine."""

import types

import ashlar.vllm.connector as module
from ashlar.vllm.identity import Unsupported


def _refuse_to_describe(*_, **__):
    raise Unsupported("as this test has no model")


def configured(monkeypatch, given, device="cpu", ranks=1, role=module.KVConnectorRole.SCHEDULER, saves=True):
    """Returns the options that a connector uses, and its warnings. `given`: its kv_connector_extra_config. `saves`:
    whether its kv_role is that of a producer."""
    said = []
    transfer = types.SimpleNamespace(kv_connector_extra_config=given, is_kv_producer=saves)
    monkeypatch.setattr(module.logger, "warning", lambda text, *more: said.append(text % more if more else text))
    monkeypatch.setattr(
        module.KVConnectorBase_V1, "__init__", lambda self, *_: setattr(self, "_kv_transfer_config", transfer)
    )
    monkeypatch.setattr(module, "describe", _refuse_to_describe)
    monkeypatch.setattr(module, "find_boundaries", lambda options, model_config: None)
    config = types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type=device),
        lora_config=None,
        aux_output_config=types.SimpleNamespace(enabled=False),
        model_config=None,
        parallel_config=types.SimpleNamespace(data_parallel_size=1, tensor_parallel_size=ranks),
    )
    made = module.AshlarConnector(config, role, types.SimpleNamespace(kv_cache_groups=[1]))
    return made._options, said[:-1]  # the last one: there is no model
