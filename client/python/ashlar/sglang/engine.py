# SPDX-License-Identifier: Apache-2.0
"""The model of this process's engine, the names of its pages, and the values that its ranks agree on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import huggingface_hub
import sglang

from ashlar import checkpoint

# Load formats that read the weights from the model's own folder; "": SGLang publishes no format. Other formats get them
# from another engine or process (remote_instance, ipc_cache, …), or from folders that the loader's settings name.
FROM_FOLDER = frozenset(
    """
    auto pt safetensors instanttensor npcache sharded_state gguf bitsandbytes mistral layered fastsafetensors runai_streamer
""".split()
) | {""}
_FLOPS_PER_SQUARED_WIDTH = 24  # per token and layer: two for each of the 12 w² weights of a layer of width w


def _config(place: str, revision: str) -> dict[str, Any]:
    """Returns a model's config.json, from its folder or the hub's local cache. OSError, ValueError: it is not there."""
    path = pathlib.Path(place)
    if not path.is_dir():
        found = huggingface_hub.try_to_load_from_cache(place, "config.json", revision=revision or None)
        if not isinstance(found, str):
            raise FileNotFoundError(place)
        path = pathlib.Path(found).parent
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config


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
    model_loader_extra_config: str = ""

    @staticmethod
    def here() -> Engine:
        return Engine(**_published("get_model", [field.name for field in dataclasses.fields(Engine)]))

    @property
    def content(self) -> str:
        """The settings that change the bytes of pages for the same weights."""
        return (
            f"sglang={sglang.__version__} dtype={self.dtype} quantization={self.quantization} "
            f"kv_cache_dtype={self.kv_cache_dtype} length={self.context_length} overrides={self.json_model_override_args} "
            f"impl={self.model_impl} scales={_named(self.quantization_param_path)} config={_named(self.decrypted_config_file)} "
            f"parser={self.model_config_parser} modelopt={self.modelopt_quant} {_named(self.modelopt_checkpoint_restore_path)} "
            f"loader={self.model_loader_extra_config}"
        )

    def flops_per_token(self, name: str) -> float:
        """Returns the FLOPs of prefill per token, estimated from the model's width as the daemon does. 0: the model's
        configuration cannot be read."""
        try:
            config = {
                **_config(self.model_path or name, self.revision),
                **json.loads(self.json_model_override_args or "{}"),
            }
            text = config.get("text_config", config)
            return float(_FLOPS_PER_SQUARED_WIDTH * text["num_hidden_layers"] * text["hidden_size"] ** 2)
        except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError):
            return 0.0

    def model_id(self, name: str) -> str:
        return checkpoint.model_name(self.model_path or name)

    def weights(self, name: str, given: str) -> checkpoint.Weights | None:
        """Returns the weights' name: `given` if it is not empty, else the digest of the checkpoint's files, or a hub's
        commit. None: the weights have no name, and the cache is off."""
        return _weights(self.model_path or name, self.revision, self.load_format, given)


@dataclasses.dataclass(frozen=True)
class Draft:
    """SGLang's published configuration of speculative decoding; empty if none is published."""

    speculative_draft_model_path: str = ""
    speculative_draft_model_revision: str = ""
    speculative_draft_load_format: str = ""
    speculative_draft_model_quantization: str = ""
    speculative_draft_kv_cache_dtype: str = ""
    speculative_algorithm: str = ""
    uno_lora_path: str = ""

    @staticmethod
    def here() -> Draft:
        return Draft(**_published("get_spec", [field.name for field in dataclasses.fields(Draft)]))

    @property
    def content(self) -> str:
        """The settings that change the bytes of a draft model's pages for the same weights."""
        return (
            f"algorithm={self.speculative_algorithm} quantization={self.speculative_draft_model_quantization} "
            f"kv_cache_dtype={self.speculative_draft_kv_cache_dtype} lora={_named(self.uno_lora_path)}"
        )

    def weights(self, engine: Engine, given: str) -> checkpoint.Weights | None:
        """Returns the name of the draft model's weights, like `Engine.weights`. The draft model's path and revision are
        appended to a given name."""
        place = self.speculative_draft_model_path
        if not place or place == engine.model_path:  # a part of the model's own checkpoint
            return checkpoint.Weights(place, "the model's own")
        named = f"{given} {place} {self.speculative_draft_model_revision}" if given else ""
        load_format = self.speculative_draft_load_format or engine.load_format
        return _weights(place, self.speculative_draft_model_revision, load_format, named)


def _published(bag: str, names: list[str]) -> dict[str, str]:
    """Returns those fields of one part of SGLang's configuration that have a value."""
    try:
        from sglang.srt import runtime_context

        values: Any = getattr(runtime_context, bag)()
    except Exception:  # a program that uses only HiCache's classes publishes no configuration
        return {}
    found = {name: getattr(values, name, None) for name in names}
    return {name: str(value) for name, value in found.items() if value is not None}


def _weights(place: str, revision: str, load_format: str, given: str) -> checkpoint.Weights | None:
    if given:
        return checkpoint.Weights(place, given)
    if load_format not in FROM_FOLDER:
        return None
    if pathlib.Path(place).exists():
        return checkpoint.Weights(place)
    commit = checkpoint.commit(revision)
    return None if commit is None else checkpoint.Weights(place, f"{place} {commit}")


def agreed(name: str) -> str:
    """Returns rank 0's name for ranks that share latents. All of them call this, on the threads of their schedulers."""
    try:
        from sglang.srt.runtime_context import get_parallel

        group: Any = get_parallel().attn_tp_group
    except Exception:  # a program that uses only HiCache's classes has no process group
        return name
    return str(group.broadcast_object(name, src=0))
