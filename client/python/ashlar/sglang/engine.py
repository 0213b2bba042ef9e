# SPDX-License-Identifier: Apache-2.0
"""The model of this process's engine, the names of its pages, and the values that its ranks agree on."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import sglang

from ashlar import checkpoint

# Load formats that read the weights from the model's own folder; "": SGLang publishes no format. Other formats get them
# from another engine or process (remote_instance, ipc_cache, …), or from folders that the loader's settings name.
FROM_FOLDER = frozenset(
    """
    auto pt safetensors instanttensor npcache sharded_state gguf bitsandbytes mistral layered fastsafetensors runai_streamer
""".split()
) | {""}


def _named(place: str) -> str:
    """Returns the digest of a file's content, or its path if it cannot be read."""
    try:
        return (checkpoint.weights(place) if place else None) or place
    except OSError:
        return place


@dataclasses.dataclass(frozen=True)
class Engine:
    """SGLang's published configuration; empty if none is published."""

    model_path: str = ""
    revision: str = ""
    load_format: str = ""
    dtype: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    context_length: str = ""
    json_model_override_args: str = ""
    model_impl: str = ""
    quantization_param_path: str = ""
    decrypted_config_file: str = ""
    model_config_parser: str = ""
    modelopt_quant: str = ""
    modelopt_checkpoint_restore_path: str = ""

    @staticmethod
    def here() -> Engine:
        try:
            from sglang.srt.runtime_context import get_model

            bag: Any = get_model()
        except Exception:  # a program that uses only HiCache's classes publishes no configuration
            return Engine()
        found = {field.name: getattr(bag, field.name, None) for field in dataclasses.fields(Engine)}
        return Engine(**{name: str(value) for name, value in found.items() if value is not None})

    @property
    def content(self) -> str:
        """The settings that change the bytes of pages for the same weights."""
        return (
            f"sglang={sglang.__version__} dtype={self.dtype} quantization={self.quantization} "
            f"kv_cache_dtype={self.kv_cache_dtype} length={self.context_length} overrides={self.json_model_override_args} "
            f"impl={self.model_impl} scales={_named(self.quantization_param_path)} config={_named(self.decrypted_config_file)} "
            f"parser={self.model_config_parser} modelopt={self.modelopt_quant} {_named(self.modelopt_checkpoint_restore_path)}"
        )

    def model_id(self, name: str) -> str:
        """Returns the model's name. For a folder, this is its last component: its location does not identify
        the model."""
        place = self.model_path or name
        return pathlib.Path(place).resolve().name if pathlib.Path(place).exists() else place

    def weights(self, name: str, given: str) -> checkpoint.Weights | None:
        """Returns the weights' name: `given` if it is not empty, else the digest of the checkpoint's files, or a hub's
        commit. None: the weights have no name, and the cache is off."""
        place = self.model_path or name
        if given:
            return checkpoint.Weights(place, given)
        if self.load_format not in FROM_FOLDER:
            return None
        if pathlib.Path(place).exists():
            return checkpoint.Weights(place)
        commit = checkpoint.commit(self.revision)
        return None if commit is None else checkpoint.Weights(place, f"{place} {commit}")


def agreed(name: str) -> str:
    """Returns rank 0's name for ranks that share latents. All of them call this, on the threads of their schedulers."""
    try:
        from sglang.srt.runtime_context import get_parallel

        group: Any = get_parallel().attn_tp_group
    except Exception:  # a program that uses only HiCache's classes has no process group
        return name
    return str(group.broadcast_object(name, src=0))
