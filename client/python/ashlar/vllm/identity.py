# SPDX-License-Identifier: Apache-2.0
"""Everything that decides an engine's keys, values and states: its model's configuration, weights, tokenizer, arguments
and environment.

Engines share cache entries if all of this agrees. Every field of vLLM's configuration, and every vLLM environment
variable that is set, is part of the identity unless it is listed here as one that changes no cached number.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import torch
import vllm
import vllm.envs
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config

from ashlar import checkpoint
from ashlar.vllm.options import Options


class Unsupported(Exception):
    """The cache cannot serve this engine, which runs without it."""


# Configurations of vLLM whose fields are read. The other ones do not change cached numbers, or `_check` refuses them.
READ = ("model", "cache", "load", "parallel", "attention", "kernel", "mamba", "engram", "compilation")
UNREAD = (
    "scheduler", "device", "offload", "aux_output", "lora", "speculative", "watermark", "diffusion", "structured_outputs",
    "observability", "logging", "quant", "profiler", "kv_transfer", "kv_events", "ec_transfer", "ec_manager", "reasoning",
    "weight_transfer", "watchdog",
)  # fmt: skip

# Fields that change no number that the cache keeps, by configuration and reason.
IRRELEVANT: dict[str, str] = {
    # Named by content instead: weights, tokenizer and configuration, wherever they are stored.
    "model": """model model_weights tokenizer tokenizer_mode tokenizer_revision revision hf_config hf_text_config
        hf_config_path hf_overrides is_submodel_config word_embeddings_untied_by_checkpoint seed config_format hf_token
        trust_remote_code served_model_name"""
    # max_model_len: named where the model's numbers depend on it, see `_length`.
    """ max_model_len spec_target_max_model_len"""
    # `_encoders` names what decides media. Prompt embeddings and pooling are not cached.
    """ runner convert allowed_local_media_path allowed_media_domains multimodal_config enable_prompt_embeds pooler_config
        io_processor_plugin renderer_num_workers skip_tokenizer_init"""
    # After the last layer: logits and sampling.
    """ return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay generation_config
        override_generation_config logits_processors"""
    # Memory, graphs, and fields that vLLM ignores.
    """ allow_deprecated_quantization enforce_eager disable_cascade_attn enable_sleep_mode
        sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend
        enable_cumem_allocator""",
    # The layout of blocks and the types of states are part of the model's layers. mamba_ssm_cache_dtype depends on the
    # CPU, even for models without states. The other fields decide the number of blocks and which ones are kept.
    "cache": """mamba_ssm_cache_dtype block_size user_specified_block_size kv_cache_layout prefix_match_unit
        gpu_memory_utilization is_attention_free num_gpu_blocks_override sliding_window enable_prefix_caching prefix_caching_hash_algo
        prefix_cache_retention_interval mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks effective_attention_block_size
        kv_cache_size_tokens kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens kv_cache_memory_bytes
        kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks _block_size_resolved""",
    # How and where the same files are read.
    "load": """download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        device use_tqdm_on_load pt_load_map_location""",
    # The ranks' number is part of the model's layout; stages and context parallelism are refused. The rest is where ranks
    # run and how they talk.
    "parallel": """pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size data_parallel_size
        data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_master_ip
        data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb is_moe_model enable_batch_sharded_sampling
        enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy max_parallel_loading_workers
        disable_custom_all_reduce enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization
        ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend worker_cls
        worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
        assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank
        _data_parallel_master_port_list _coord_store_port decode_context_parallel_size dcp_kv_cache_interleave_size
        dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size
        data_parallel_index _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config""",
    # Sizes of a kernel's work and of its memory.
    "attention": """flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
        flex_attn_kv_block_size""",
    "kernel": """enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
        enable_jit_warmup""",
    "mamba": "",
    "engram": "",
    # Fields that decide what is compiled are part of the identity (mode, backend, custom_ops, pass_config). Graphs
    # replay the same kernels.
    "compilation": """debug_dump_path cache_dir compile_cache_save_format ir_enable_torch_wrap splitting_ops
        compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets
        encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay
        decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints
        inductor_passes inductor_compile_config cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes
        cudagraph_copy_inputs cudagraph_specialize_lora use_inductor_graph_partition max_cudagraph_capture_size
        dynamic_shapes_config local_cache_dir fast_moe_cold_start enabled_custom_ops disabled_custom_ops traced_files
        compilation_time encoder_compilation_time static_forward_context static_all_moe_layers""",
}

# Fields of the encoders' configuration that change no number of a medium with named processed data.
IRRELEVANT_ENCODERS = """limit_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
    mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb interleave_mm_strings skip_mm_profiling
    mm_tensor_ipc mm_ipc_gpu_memory_gb enable_mm_embeds allow_missing_mm_embeddings language_model_only"""
# Fields of the adapters' configuration that change no number of one: how many there may be.
IRRELEVANT_ADAPTERS = "max_loras max_cpu_loras default_mm_loras max_lora_cls_labels"

# Environment variables of vLLM that change no cached number, besides the ones that vLLM itself leaves out of the names
# of compiled models: build options, paths, communication of processes, logging, and parsing of requests.
IRRELEVANT_VARIABLES = re.compile(
    "|".join([
        "VLLM_(BUILD|RAY|USE_RAY|DP|P2P|EC_SIDE|NIXL|MOONCAKE|LORA|LOG|DEBUG|ELASTIC|NIC|GPU_NIC|NCCL|GC|TOOL|XGRAMMAR"
        "|USE_RUST|RUST|GPT_OSS|KV|SSM|DEEPEP_BUFFER|ROCM_SLEEP|PROCESS|DOCKER|IMAGE|WSL2|MQ|MSGPACK|ALLOW)_.*",
        ".*_(TIMEOUT|TIMEOUT_S|TIMEOUT_SECONDS|PATH|DIR|IP|PORT|HOST|WARMUP|PROFILING)", "MOONCAKE_.*",
        "VLLM_MAX_(MEDIA_DOWNLOAD_SIZE_MB|N_SEQUENCES|COMPLETION_PROMPTS|STOP_STRINGS|NUM_BAD_WORDS|BAD_WORDS_TOTAL_TOKENS)",
        "VLLM_(TARGET_DEVICE|MAIN_CUDA_VERSION|USE_PRECOMPILED|USE_PRECOMPILED_RUST|SKIP_PRECOMPILED_VERSION_SUFFIX)",
        "VLLM_(GPU_SYNC_CHECK|USE_FASTOKENS|PATTERN_MATCH_DEBUG|USAGE_SOURCE|CONFIGURE_LOGGING|TRACE_FUNCTION|CPU_CI_ENV)",
        "VLLM_(CPU_OMP_THREADS_BIND|CPU_NUM_OF_RESERVED_CPU|PLUGINS|SKIP_P2P_CHECK|DISABLE_COMPILE_CACHE|DISABLE_LOG_LOGO)",
        "VLLM_(COMPILE_CACHE_SAVE_FORMAT|USE_FLASHINFER_SAMPLER|XPU_USE_SAMPLER_KERNEL|V1_USE_OUTLINES_CACHE)",
        "VLLM_(DISABLE_REQUEST_ID_RANDOMIZATION|COMPUTE_NANS_IN_LOGITS|RAISE_ON_LOGIT_NANS|ENFORCE_STRICT_TOOL_CALLING)",
        "VLLM_(ENABLE_CUDAGRAPH_GC|ENABLE_RESPONSES_API_STORE|ENABLE_COHERE_API|USE_EXPERIMENTAL_PARSER_CONTEXT)",
        "VLLM_(SYSTEM_START_DATE|USE_LAYERNAME|MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS|USE_SIMPLE_KV_OFFLOAD|USE_SPINLOOP_EXT)",
        "VLLM_(WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY|WEIGHT_OFFLOADING_DISABLE_UVA|FASTSAFETENSORS_QUEUE_SIZE)",
        "VLLM_(DISABLE_SHARED_EXPERTS_STREAM|FLASHINFER_WORKSPACE_BUFFER_SIZE|PP_LAYER_PARTITION|HAS_FLASHINFER_CUBIN)",
        "VLLM_(REGEX_COMPILATION_TIMEOUT_S|SPARSE_INDEXER_MAX_LOGITS_MB|ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN)",
        "NVCC_THREADS", "CMAKE_BUILD_TYPE", "VERBOSE", "CUDA_HOME", "RAY_.*",
    ])
)  # fmt: skip
_OTHERS_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")  # variables of other software

# Load formats that read the weights from the model's own folder. Other formats get them from a file that the loader's
# settings name (tensorizer), or from another process (ipc_cache, modelexpress, loaders of plugins).
FROM_FOLDER = frozenset(
    """
    auto hf pt safetensors npcache mistral sharded_state fastsafetensors instanttensor runai_streamer runai_streamer_sharded
""".split()
)

# Types of rotary positions whose frequencies depend only on the checkpoint. For other types they may depend on the
# engine's maximum length.
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn", "mrope", "ntk", "proportional", "deepseek_yarn"}
# Models that compute with max_model_len, besides the ones whose rotary positions depend on it.
LENGTH_COUNTS = (
    "llama4", "minimax_m2", "cohere_compass", "nomic", "embedding_gemma", "inkling", "muse_spark", "musespark", "step5",
)  # fmt: skip


def _plain(value: Any) -> Any:
    """Returns a value as numbers and strings that are equal in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(each)) for each in value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    if callable(value):
        named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return str(value)


def _fields(config: Any, left_out: str) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(config) if field.name not in left_out.split()]
    return {name: _plain(getattr(config, name, None)) for name in names}


def _encoders(vllm_config: Any) -> str | None:
    """Returns what decides a medium's numbers besides its processed data, or None if that cannot be named."""
    config, compilation = vllm_config.model_config.multimodal_config, vllm_config.compilation_config
    if config is None or config.mm_processor_cache_type == "shm" or vllm_config.ec_transfer_config is not None:
        return None
    if config.mm_encoder_attn_dtype is not None:  # scales that come from a file, or from earlier media
        return None
    compiled = {name: value for name, value in vars(compilation).items() if "encoder" in name and "time" not in name}
    named = [_fields(config, IRRELEVANT_ENCODERS), _plain(compiled), vllm_config.model_config.max_model_len]
    return json.dumps(named, sort_keys=True)


def _adapters(vllm_config: Any) -> str | None:
    """Returns what decides an adapter's numbers besides its weights, or None if the engine has no adapters."""
    config = vllm_config.lora_config
    return None if config is None else json.dumps(_fields(config, IRRELEVANT_ADAPTERS), sort_keys=True)


def _arguments(vllm_config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in READ:
        config: Any = getattr(vllm_config, f"{name}_config", None)
        left_out = IRRELEVANT[name].split()
        for field in () if config is None else dataclasses.fields(config):
            if field.name not in left_out:
                found[f"{name}.{field.name}"] = _plain(getattr(config, field.name, None))
    found["additional"] = _plain(vllm_config.additional_config or None)
    return found


def variables() -> dict[str, str]:
    """Returns the environment variables that are set and may decide the numbers."""
    known = [name for name in vllm.envs.compile_factors() if IRRELEVANT_VARIABLES.fullmatch(name) is None]
    return {name: os.environ[name] for name in (*known, *_OTHERS_VARIABLES) if name in os.environ}


def _config(model: Any) -> dict[str, Any]:
    """Returns the configuration before vLLM loaded the model: models change their configuration while they are
    loaded."""
    overrides, whole = model.hf_overrides, callable(model.hf_overrides)
    nested = {} if whole else {name: value for name, value in overrides.items() if isinstance(value, dict)}
    config = get_config(
        model.hf_config_path or model.model,
        model.trust_remote_code,
        getattr(model, "_hf_config_revision", None) or model.revision,
        model.code_revision,
        model.config_format,
        hf_overrides_kw={} if whole else {name: value for name, value in overrides.items() if name not in nested},
        hf_overrides_fn=overrides if whole else None,
        token=model.hf_token,
    )
    return {"config": checkpoint.without_place(config.to_dict()), "overrides": _plain(nested)}


def _rotations(config: Any, rotary: bool = False) -> set[str]:
    """Returns the types of rotary positions that a configuration names, at any depth."""
    found = set()
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if rotary and name in ("rope_type", "type") and isinstance(value, str):
            found.add(value)
        found |= _rotations(value, rotary or name in ("rope_parameters", "rope_scaling"))
    return found


def _length(model: Any, config: dict[str, Any]) -> int | None:
    """Returns the engine's maximum length if keys depend on it: LongRoPE chooses between two sets of frequencies by
    it."""
    names = {str(model.hf_config.model_type), str(model.hf_text_config.model_type)}
    counts = any(name.startswith(LENGTH_COUNTS) for name in names)
    return int(model.max_model_len) if counts or _rotations(config) - _FIXED_ROTATIONS else None


def _draft(vllm_config: Any) -> str | None:
    """Returns the directory of a draft model that is not part of the checkpoint. Its layers' caches are kept with the
    others."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or str(draft.model) == str(vllm_config.model_config.model):
        return None
    if not pathlib.Path(draft.model).exists():
        raise Unsupported(f"{draft.model}: the draft model is not a local directory; set weights_digest for both")
    return str(draft.model)


def _weights(vllm_config: Any, given: str) -> checkpoint.Weights:
    """Returns the name of the weights' source: the commit of a hub's model, or the content of a folder's files."""
    model, load = vllm_config.model_config, vllm_config.load_config
    place, load_format = str(model.model), str(getattr(load.load_format, "value", load.load_format))
    if given:
        return checkpoint.Weights(place, given)
    if load_format == "dummy":
        return checkpoint.Weights(place, f"dummy:{model.seed}")
    elsewhere = getattr(model, "model_weights", "")
    if load_format not in FROM_FOLDER or elsewhere:
        what = f"model: {elsewhere}" if elsewhere else f"load_format: {load_format}"
        raise Unsupported(
            f"{what}: the weights are not in the model's directory; set weights_digest in kv_connector_extra_config"
        )
    draft = _draft(vllm_config)
    if pathlib.Path(place).exists():
        return checkpoint.Weights(place, draft=draft)
    if draft is not None:
        raise Unsupported(f"{model.model}: not a local directory, but has a draft model; set weights_digest for both")
    commit = checkpoint.commit(model.revision)
    if commit is None:
        raise Unsupported(
            f"{model.model}: not a local directory, and the revision is not a commit; set revision to a commit of 40 digits, or "
            "weights_digest in kv_connector_extra_config"
        )
    return checkpoint.Weights(place, commit)


def tokenizer_digest(model: Any) -> str:
    """Returns the digest of the tokenizer's files, or name and commit for a hub's tokenizer."""
    name, revision = str(model.tokenizer), model.tokenizer_revision
    return checkpoint.tokenizer(name) or f"{name} {checkpoint.commit(revision) or revision or ''}"


def _processor(vllm_config: Any) -> dict[str, Any]:
    """Returns the device, which decides rounding, without CUDA, which a scheduler's process must not initialize."""
    found = {
        "vllm": vllm.__version__,
        "device": str(vllm_config.device_config.device_type),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
    }
    if found["device"] != "cpu":
        found["gpu"] = current_platform.get_device_name()
    return found


@dataclasses.dataclass(frozen=True)
class Identity:
    model_id: str
    parts: dict[str, Any]  # all but the weights' content, by name
    tokenizer: str
    weights: checkpoint.Weights
    encoders: str | None  # what decides the numbers of media; None: prompts with media have no name
    adapters: str | None  # what decides the numbers of adapters; None: there are no adapters
    adapted_encoders: bool  # adapters change encoders, too
    plain: bool  # prompts without an adapter are computed as in an engine without adapters

    @property
    def text(self) -> str:
        return json.dumps({"model_id": self.model_id, "tokenizer": self.tokenizer, **self.parts}, sort_keys=True)

    def weights_digest(self) -> str | None:
        """Returns the name of the weights' content and all that is computed with them, or None while the content is
        unknown."""
        content = self.weights.digest()
        if content is None:
            return None
        return hashlib.sha256(f"{json.dumps(self.parts, sort_keys=True)} {content}".encode()).hexdigest()


def identify(vllm_config: Any, options: Options, layout: dict[str, Any]) -> Identity:
    """`layout`: the layout of the caches. Raises Unsupported. The weights' files are hashed in the background."""
    model = vllm_config.model_config
    config, adapters = _config(model), _adapters(vllm_config)
    parts: dict[str, Any] = {
        "config": config,
        "max_model_len": _length(model, config),
        "arguments": _arguments(vllm_config),
        "environment": variables(),
        "processor": _processor(vllm_config),
        "layout": layout,
    }
    if adapters is not None and model.is_moe:  # experts then use different kernels
        parts["adapters"] = adapters
    # vLLM's CPU kernels apply the last adapter also to prompts without one in the same batch.
    plain = adapters is None or str(vllm_config.device_config.device_type) != "cpu"
    return Identity(
        options.model_id or checkpoint.model_name(str(model.model)),
        parts,
        tokenizer_digest(model),
        _weights(vllm_config, options.weights_digest),
        encoders=_encoders(vllm_config),
        adapters=adapters,
        adapted_encoders=adapters is not None and vllm_config.lora_config.enable_tower_connector_lora,
        plain=plain,
    )


def differences(one: str, other: str) -> list[str]:
    """Returns where two identities differ, by `Identity.text`."""

    def flat(value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            return {at: value}
        return {name: each for key in value for name, each in flat(value[key], f"{at}.{key}" if at else key).items()}

    first, second = flat(json.loads(one), ""), flat(json.loads(other), "")
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
