#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Describes which signatures, fields and members of the installed vLLM the connector uses.

interfaces/VERSION.json holds the description of each supported version; test_vllm_interface.py compares the installed
vLLM with it. For a new version, run this file in its environment: it writes the file and prints the differences from
the newest older version. Judge each difference, then raise BELOW in ashlar/vllm/versions.py.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import pathlib
import re
import textwrap

FOLDER = pathlib.Path(__file__).parent / "interfaces"

# Classes whose public members are all described, because a new version may call an added member.
WHOLE = [
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats",
    "vllm.distributed.kv_events:BlockStored",
    "vllm.v1.core.sched.output:KVConnectorBlockState",
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "vllm.v1.kv_cache_interface:KVCacheConfig",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    "vllm.v1.kv_cache_interface:MambaSpec",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource",
    "vllm.v1.outputs:KVConnectorOutput",
]
# Classes of which the connector only uses these members.
PARTS = {
    "vllm.config.aux_output:AuxOutputConfig": "enabled",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": "_registry register_connector",
    "vllm.lora.model_manager:LoRAModelManager": "list_adapters",
    "vllm.lora.request:LoRARequest": "lora_name lora_int_id",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "data modality identifier mm_position",
    "vllm.multimodal.inputs:PlaceholderRange": "offset length is_embed",
    "vllm.sampling_params:SamplingParams": "prompt_logprobs",
    "vllm.v1.attention.backend:CommonAttentionMetadata": """query_start_loc query_start_loc_cpu seq_lens num_reqs
        num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping seq_lens_cpu_upper_bound is_prefilling""",
    "vllm.v1.attention.backend:AttentionBackend": "get_name get_builder_cls",
    "vllm.v1.attention.backend:AttentionMetadataBuilder": "__init__ build",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention": "kv_lora_rank kv_cache",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder": """chunked_prefill_workspace
        chunked_prefill_workspace_size""",
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn:KimiGatedDeltaNetAttention": """_forward A_log dt_bias
        gate_lower_bound""",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention": """chunk_gated_delta_rule
        rearrange_mixed_qkv A_log dt_bias""",
    "vllm.model_executor.layers.mamba.linear.bailing_linear_attn:BailingMoELinearAttention": """_forward tp_slope
        _prefill_and_mix_infer linear_rope rotary_emb""",
    "vllm.model_executor.layers.mamba.linear.minimax_linear_attn:MiniMaxText01LinearAttention": """_forward tp_slope
        _prefill_and_mix_infer""",
    "vllm.model_executor.layers.mamba.mamba_mixer:MambaMixer": "forward_impl _ssm_transform _time_proj_bias in_proj A",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2": """conv_ssm_forward split_hidden_states_B_C_fn A dt_bias
        head_dim ssm_state_size tped_conv_size tped_dt_size tped_intermediate_size""",
    "vllm.model_executor.models.bailing_moe_v3:BailingMoeV3KimiDeltaAttention": "_forward",
    "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper": "rotary_emb",
    "vllm.models.kimi_k3.nvidia.mla:MultiHeadLatentAttention": "kv_lora_rank kv_cache rotary_emb",
    "vllm.v1.core.block_pool:BlockPool": """blocks touch free_blocks evict_blocks get_cached_block get_new_blocks
        get_num_free_blocks null_block""",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "allocate_slots",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id block_hash is_null",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids num_computed_tokens",
    "vllm.v1.core.sched.output:NewRequestData": "req_id num_computed_tokens",
    "vllm.v1.core.sched.output:SchedulerOutput": """scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
        scheduled_spec_decode_tokens total_num_scheduled_tokens kv_connector_block_state has_sync_kv_loads""",
    "vllm.v1.core.sched.scheduler:Scheduler": """connector kv_cache_manager max_num_scheduled_tokens
        _mamba_block_aligned_split reset_prefix_cache""",
    "vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager": "get_num_skipped_tokens",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": "get_num_skipped_tokens",
    "vllm.v1.core.single_type_kv_cache_manager:MambaManager": "get_num_skipped_tokens",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "req_to_blocks",
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager": "get_num_skipped_tokens",
    "vllm.v1.metrics.stats:PrefillStats": "num_prompt_tokens num_local_cached_tokens num_external_cached_tokens set",
    "vllm.v1.engine:EngineCoreRequestType": "WAKEUP",
    "vllm.v1.engine.core:EngineCoreProc": "input_queue",
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": "attention_chunk_size unpadded_page_size_bytes",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size page_size_bytes prefix_cacheable",
    "vllm.v1.kv_cache_interface:KVQuantMode": "NONE FP8_PER_TENSOR",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": """cache_dtype_str cache_role copy_with_new_block_size dtype head_size
        kv_quant_mode model_version state_content_bytes tokens_per_state""",
    "vllm.v1.kv_cache_interface:SparseCacheRole": "INDEXER",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": "get_manager_class",
    "vllm.v1.request:Request": """request_id all_token_ids num_tokens num_prompt_tokens num_computed_tokens cache_salt
        block_hashes update_block_hashes kv_transfer_params lora_request mm_features pooling_params prompt_embeds
        skip_reading_prefix_cache status num_in_flight_tokens _block_hasher num_preemptions prefill_stats
        num_tokens_with_spec num_output_placeholders sampling_params""",
    "vllm.v1.request:RequestStatus": "RUNNING FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED",
    "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor": "gpu",
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor": "np",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "update_requests req_states",
    "vllm.v1.worker.gpu.states:RequestState": "req_id_to_index prefill_len num_computed_tokens",
}
FUNCTIONS = [
    "vllm.config:set_current_vllm_config",
    "vllm.distributed:get_tensor_model_parallel_rank",
    "vllm.envs:compile_factors",
    "vllm.forward_context:get_forward_context",
    "vllm.forward_context:set_forward_context",
    "vllm.logger:init_logger",
    "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first",
    "vllm.tokenizers:cached_tokenizer_from_config",
    "vllm.transformers_utils.config:get_config",
    "vllm.utils.torch_utils:_encode_layer_name",
    "vllm.utils.torch_utils:_resolve_layer_name",
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
    "vllm.v1.core.kv_cache_utils:maybe_convert_block_hash",
    "vllm.v1.core.kv_cache_utils:to_event_extra_keys",
]
OBJECTS = ["vllm.platforms:current_platform"]


def version() -> str:
    """The version in the form of the file names: "0.32"."""
    import vllm

    return ".".join(re.findall(r"\d+", vllm.__version__)[:2])


def _find(place):
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _plain(annotation) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text).replace('"', "").replace("'", "").replace("typing.", "")


def _signature(function) -> str:
    found = inspect.signature(function)
    parts = []
    for each in found.parameters.values():
        each = each.replace(annotation=inspect.Parameter.empty)
        kind = found.parameters[each.name].annotation
        default = each.default
        if default is not inspect.Parameter.empty and "0x" in repr(default):
            each = each.replace(default=...)
        parts.append(f"{each}: {_plain(kind)}" if kind is not inspect.Parameter.empty else str(each))
    answer = _plain(found.return_annotation)
    return f"({', '.join(parts)})" + (f" -> {answer}" if answer else "")


def _fields(kind) -> dict:
    if dataclasses.is_dataclass(kind):
        return {field.name: _plain(field.type) for field in dataclasses.fields(kind)}
    names = getattr(kind, "__struct_fields__", ())  # msgspec
    hints = {
        name: note for each in reversed(kind.__mro__) for name, note in vars(each).get("__annotations__", {}).items()
    }
    return {name: _plain(hints.get(name, "")) for name in names}


def _attributes(kind) -> set:
    """Returns the attributes that the constructor sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def _member(kind, name) -> str:
    fields = _fields(kind)
    if name in fields:
        return f"field: {fields[name]}"
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, property):
        return "property"
    if isinstance(found, (classmethod, staticmethod)):
        return f"{type(found).__name__} {_signature(found.__func__)}"
    if inspect.isfunction(found):
        return _signature(found)
    if isinstance(found, enum.Enum):
        return "member"
    if found is not None:
        return "attribute"
    return "attribute" if name in _attributes(kind) else "absent"


def _names(kind) -> list:
    """Returns public members, except members of Python's own classes."""
    if issubclass(kind, enum.Enum):
        return list(kind.__members__)
    found = dict.fromkeys(["__init__"] if inspect.isfunction(inspect.getattr_static(kind, "__init__")) else [])
    for each in kind.__mro__:
        if each.__module__.startswith("vllm"):
            found.update(dict.fromkeys(name for name in vars(each) if not name.startswith("_")))
    if dataclasses.is_dataclass(kind):
        found.pop("__init__", None)  # its fields contain the same information
    return [*dict.fromkeys([*_fields(kind), *found])]


def describe() -> dict:
    """{"module:Class.member": description}."""
    found = {}
    for place in WHOLE:
        kind = _find(place)
        found |= {f"{place}.{name}": _member(kind, name) for name in _names(kind)}
    for place, names in PARTS.items():
        kind = _find(place)
        found |= {f"{place}.{name}": _member(kind, name) for name in names.split()}
    found |= {place: _signature(_find(place)) for place in FUNCTIONS}
    found |= {place: "object" for place in OBJECTS if _find(place) is not None}
    return dict(sorted(found.items()))


def recorded(of: str) -> dict:
    return json.loads((FOLDER / f"{of}.json").read_text())


def differences(before: dict, now: dict) -> list:
    """Returns one line per member that differs."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name}: removed; was {before[name]}")
        elif name not in before:
            lines.append(f"{name}: new: {now[name]}")
        elif before[name] != now[name]:
            lines.append(f"{name}: now {now[name]}; was {before[name]}")
    return lines


def main() -> None:
    now, name = describe(), version()
    FOLDER.mkdir(exist_ok=True)
    number = lambda each: tuple(map(int, each.split(".")))
    older = sorted((path.stem for path in FOLDER.glob("*.json") if number(path.stem) < number(name)), key=number)
    (FOLDER / f"{name}.json").write_text(json.dumps(now, indent=1) + "\n")
    for line in differences(recorded(older[-1]), now) if older else ():
        print(line)


if __name__ == "__main__":
    main()
