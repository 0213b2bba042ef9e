# SPDX-License-Identifier: Apache-2.0
"""A checkpoint has one name, wherever it is stored, and different checkpoints have different names."""

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
from types import SimpleNamespace

import huggingface_hub
import interface
import pytest
import torch
import vllm
from tiny_engines import CONFIGS, Child, connector, model_folder, prompt, same, saved
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader
from vllm.transformers_utils import repo_utils

import ashlar.vllm
from ashlar.vllm import identity
from ashlar.vllm.identity import Unsupported, identify, tokenizer_digest
from ashlar.vllm.model import check_version
from ashlar.vllm.options import Options

VERSION = interface.version()
COMMITS = ["607a30d783dfa663caf39e06633721c8d4cfcd7e", "0123456789abcdef0123456789abcdef01234567"]


def folder(at, weights=b"weights", tokens="{}"):
    """A checkpoint with a file of weights and a tokenizer."""
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    (at / "model.safetensors").write_bytes(weights * 4096)
    (at / "tokenizer.json").write_text(tokens)
    return str(at)


def engine_config(place, **changes):
    return EngineArgs(model=place, skip_tokenizer_init=True, **{"dtype": "bfloat16", **changes}).create_engine_config()


def names(place, given="", **changes):
    found = identify(engine_config(place, **changes), Options(weights_digest=given), {})
    found.weights.wait(10)
    return found.model_id, found.weights_digest(), found.tokenizer


def test_a_checkpoint_has_one_name_in_every_folder(tmp_path):
    first = names(folder(tmp_path / "here" / "model"))
    assert names(folder(tmp_path / "there" / "model")) == first
    assert names(folder(tmp_path / "model of another name"))[1:] == first[1:], "model_id alone has to be given"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "here" / "model")
    assert names(str(link)) == first
    others = [
        names(folder(tmp_path / "1" / "model", weights=b"weighty")),
        names(folder(tmp_path / "2" / "model", tokens='{"a": 1}')),
        names(str(tmp_path / "here" / "model"), given="finetuned"),
    ]
    assert len({first, *others}) == 4
    assert others[1][2] != first[2] and others[0][2] == first[2]


def test_engines_with_the_model_in_different_folders_share(shared_daemon, engine, expected, tmp_path):
    text = prompt("folders", 600)
    engine("qwen3").generate([text])
    here = pathlib.Path(model_folder("qwen3"))
    shutil.copytree(here, tmp_path / here.name)
    with Child(str(tmp_path / here.name), connector(shared_daemon)) as child:
        same(child.generate([text]), expected("qwen3", [text]))
        assert saved(child) == 592


def hub(revision, given=""):
    load = SimpleNamespace(load_format="auto", model_loader_extra_config={})
    model = SimpleNamespace(model="org/name", revision=revision)
    config = SimpleNamespace(model_config=model, load_config=load, speculative_config=None)
    return identity._weights(config, given).digest()


def test_a_hub_model_is_named_by_the_resolved_commit(tmp_path, monkeypatch):
    """As from `vllm serve org/name`: the string "main", together with its commit."""
    folders = tmp_path / "models--org--name"
    (folders / "refs").mkdir(parents=True)
    found = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for commit in COMMITS:
        (folders / "refs" / "main").write_text(commit)
        (folders / "snapshots" / commit).mkdir(parents=True)
        revision = repo_utils.resolve_revision("org/name", None)
        assert revision == "main" and revision.resolved == commit, "vLLM's own way of resolving"
        found.append(hub(revision))
        assert hub(commit) == found[-1]
        model = SimpleNamespace(tokenizer="org/name", tokenizer_revision=revision)
        assert tokenizer_digest(model) == f"org/name {commit}"
    assert found[0] != found[1]
    for revision in (None, "main"):
        with pytest.raises(Unsupported, match="org/name: not a local directory, and the revision is not a commit"):
            hub(revision)
    assert hub(None, given="1") != hub(None, given="2")


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "dev"])
def test_other_versions_of_vllm_are_served_without_the_cache(version, monkeypatch, shared_daemon, expected):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(Unsupported, match=rf"vllm: version {version} is not supported; expected 0\.32 to below 0\.34"):
        check_version()
    if version == "0.34.0":
        text = prompt("other vllm", 600)
        with Child("qwen3", connector(shared_daemon)) as child:
            for _ in range(2):
                child.call("erase")
                same(child.generate([text]), expected("qwen3", [text]))
            assert child.call("metrics") == {}


def test_the_versions_that_the_page_names_are_accepted(monkeypatch):
    for version in ("0.32.0", "0.32.4.dev3+cpu", "0.33.0", vllm.__version__):
        monkeypatch.setattr(vllm, "__version__", version)
        check_version()


def test_a_vllm_without_the_connectors_interface_is_refused_with_the_range(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.20.0")

    def missing():
        raise ImportError("cannot import name 'SupportsHMA'")

    with pytest.raises(ImportError, match=r"vllm: version 0\.20\.0 is not supported; expected 0\.32"):
        ashlar.vllm._imported(missing)
    monkeypatch.undo()
    with pytest.raises(ImportError, match="cannot import name 'SupportsHMA'"):
        ashlar.vllm._imported(missing)


# Digests of everything that determines the models' names in the cache, by minor version of vLLM, because its
# configurations have different fields.
NAMES = {
    "qwen3": {"0.32": "bfac3f91260d6223", "0.33": "2d62308ce5f3dab4"},
    "qwen3_5": {"0.32": "cb97c1417144986e", "0.33": "fc41673fd213ac9d"},
    "qwen3_next": {"0.32": "eb3040817a3c5900", "0.33": "94d7d5c5e4198705"},
    "ministral": {"0.32": "0327e49d208bff9b", "0.33": "6165b7f1c399fe22"},
    "gpt_oss": {"0.32": "8f876c98abb6242b", "0.33": "be2006754ce17868"},
    "ministral_whole": {"0.32": "127ff3b4891b0d38", "0.33": "fb5d629b4c426673"},
    "granite": {"0.32": "7c172afcea5fea25", "0.33": "fcbfbf6911d71688"},
    "falcon_h1": {"0.32": "dbef9e9a4758ff2b", "0.33": "404b464f6e13ca0c"},
    "nemotron_h": {"0.32": "2406b83919b868b9", "0.33": "8b69f685b7beae45"},
    "lfm2": {"0.32": "34f72f571c9a0410", "0.33": "c1c94fa5f1383a0b"},
}
DESCRIBE = """
import dataclasses, json, unittest.mock as mock, torch, vllm
from ashlar.vllm import identity
from ashlar.vllm.model import describe
from ashlar.vllm.options import Options
with mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "of any processor"), \\
     mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False), \\
     mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", lambda: False), \\
     mock.patch.object(vllm, "__version__", "0.32.0"), mock.patch.object(identity, "variables", dict):
    described = describe(llm.llm_engine.vllm_config, server.core().scheduler.kv_cache_config, Options(), 0)
model = dataclasses.replace(described.model, flops_per_token_squared=0.0)  # a price, and no part of the name
server.name = repr(described.named(model)) + described.identity.text
"""


@pytest.mark.parametrize("model", NAMES)
def test_names_of_cached_models_stay_the_same(model, engine):
    """With another name, a release would not find what the previous one has cached."""
    child = engine(model)
    child.call("execute", DESCRIBE)
    text = child.call("evaluate", "server.name")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == NAMES[model][VERSION], text


def named(model="qwen3", changes={}, **arguments):  # noqa: B006
    return names(model_folder(model, **changes), load_format="dummy", **arguments)[1]


def scale(config):
    config.rms_norm_eps = 1e-5
    return config


@pytest.mark.parametrize(
    "arguments",
    [
        dict(dtype="float16"),
        dict(kv_cache_dtype="fp8"),
        dict(hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        dict(hf_overrides={"rms_norm_eps": 1e-5}),
        dict(hf_overrides=scale),
        dict(enforce_eager=True),
        dict(seed=1),
    ],
    ids=str,
)
def test_settings_that_change_numbers_are_part_of_the_name(arguments):
    assert named(**arguments) != named()


@pytest.mark.parametrize(
    "arguments",
    [
        dict(max_model_len=4096),
        dict(max_num_seqs=3),
        dict(mamba_ssm_cache_dtype="bfloat16"),  # the types of states are part of the layout, which `named` leaves out
        dict(num_gpu_blocks_override=100),
        dict(max_logprobs=7),
        dict(served_model_name="other"),
        dict(gpu_memory_utilization=0.3),
        dict(generation_config="vllm"),
        dict(max_num_batched_tokens=8192),
        dict(data_parallel_rpc_port=1234),
        dict(shutdown_timeout=9),
    ],
    ids=str,
)
def test_settings_that_change_no_numbers_are_not_part_of_the_name(arguments):
    assert named(**arguments) == named()


def test_max_model_len_is_part_of_the_name_if_rotations_depend_on_it():
    short, long = (named("phi3", max_model_len=length) for length in (1024, 4096))
    assert short != long
    yarn = dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768})
    assert named("qwen3", yarn, max_model_len=1024) == named("qwen3", yarn, max_model_len=4096)
    assert identity._length(SimpleNamespace(
        hf_config=SimpleNamespace(model_type="llama4"), hf_text_config=SimpleNamespace(model_type="llama4_text"),
        max_model_len=5), {}) == 5  # fmt: skip


def test_environment_variables_that_change_rounding_are_part_of_the_name(monkeypatch):
    before = named()
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_PORT", "1234")
    assert named() == before
    for name, value in (("VLLM_BATCH_INVARIANT", "1"), ("VLLM_CPU_ATTN_SPLIT_KV", "0"), ("NVIDIA_TF32_OVERRIDE", "1")):
        monkeypatch.setenv(name, value)
        assert named() != before, name
        monkeypatch.delenv(name)


def test_instructions_of_the_cpu_that_change_rounding_are_part_of_the_name(monkeypatch):
    before = named()
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        with monkeypatch.context() as patched:
            supported = getattr(torch.cpu, name)()
            patched.setattr(torch.cpu, name, lambda supported=supported: not supported)
            assert named() != before, name


@pytest.mark.parametrize(
    "format, extra",
    [
        ("tensorizer", {"tensorizer_config": {"tensorizer_uri": "s3://bucket/model.tensors"}}),
        ("tensorizer", {"tensorizer_config": {"tensorizer_dir": "/models/tensorized"}}),
        ("ipc_cache", {}),
        ("modelexpress", {}),
        ("format_of_a_plugin", {}),
    ],
)
def test_weights_from_elsewhere_need_weights_digest(tmp_path, format, extra):
    place = folder(tmp_path / "m")

    def digest(given):
        config = engine_config(place)
        config.load_config.load_format, config.load_config.model_loader_extra_config = format, extra
        return identify(config, Options(weights_digest=given), {}).weights_digest()

    with pytest.raises(
        Unsupported, match=f"load_format: {format}: the weights are not in the model's directory; set weights_digest"
    ):
        digest("")
    assert digest("1") != digest("2")


def test_every_load_format_of_vllm_is_classified():
    elsewhere = {"dummy", "ipc_cache", "modelexpress", "tensorizer"}
    assert identity.FROM_FOLDER | elsewhere == set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)


def test_a_model_that_writes_into_its_configuration_keeps_its_name():
    config = engine_config(model_folder("qwen3"), load_format="dummy")
    before = identify(config, Options(), {}).text
    config.model_config.hf_config.max_model_len = 4096
    config.model_config.hf_config.rms_norm_eps = 1.0
    assert identify(config, Options(), {}).text == before


def test_differences_of_identities_are_reported():
    one = identify(engine_config(model_folder("qwen3"), load_format="dummy"), Options(), {})
    two = identify(
        engine_config(model_folder("qwen3"), load_format="dummy", dtype="float16"), Options(model_id="m"), {}
    )
    assert identity.differences(one.text, one.text) == []
    assert identity.differences(one.text, two.text) == ["arguments.model.dtype", "model_id"]


# Fields and variables that are part of the name. A version of vLLM with other fields fails here: add each to this list
# or, with its reason, to the lists of identity.py.
NAMED_FIELDS = {
    "model": """dtype code_revision quantization quantization_config disable_sliding_window model_class_overrides
        model_impl""",
    "cache": """cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype replayssm_buffer_len use_replayssm
        use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay""",
    "load": "load_format model_loader_extra_config ignore_patterns",
    "parallel": "enable_hc_sp enable_expert_parallel all2all_backend",
    "attention": """backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version use_trtllm_attention
        disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype
        indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa minimax_m3_indexer_cp
        indexer_tp_shard_min_rows trtllm_ragged_backend""",
    "kernel": "monokernel ir_op_priority moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant",
    "mamba": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    "compilation": "mode backend custom_ops pass_config",
}
# The media or the adapter of a request's own name cover parts of these.
NAMED_WITH_A_REQUEST = {
    MultiModalConfig: (
        """mm_device_do_normalize mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin video_pruning_rate
        video_pruning_method""",
        identity.IRRELEVANT_ENCODERS,
    ),
    LoRAConfig: (
        """max_lora_rank fully_sharded_loras lora_dtype target_modules enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras""",
        identity.IRRELEVANT_ADAPTERS,
    ),
}
# Fields that vLLM 0.32 lacks.
SINCE_0_33 = {
    "watchdog_config", "cache.simple_cpu_offload_num_blocks", "attention.minimax_m3_indexer_cp",
    "attention.indexer_tp_shard_min_rows", "attention.trtllm_ragged_backend", "kernel.monokernel",
}  # fmt: skip
LATER = SINCE_0_33 if VERSION == "0.32" else set()
OTHERS = {"additional_config", "instance_id", "optimization_level", "performance_mode", "shutdown_timeout"}


def test_every_field_of_vllms_configuration_is_classified():
    fields = {field.name for field in dataclasses.fields(VllmConfig)}
    assert fields == ({f"{name}_config" for name in (*identity.READ, *identity.UNREAD)} | OTHERS) - LATER
    config = engine_config(model_folder("qwen3"), load_format="dummy")
    for name, named_ones in NAMED_FIELDS.items():
        there = {field.name for field in dataclasses.fields(getattr(config, f"{name}_config"))}
        left_out = identity.IRRELEVANT[name].split()
        later = {field.removeprefix(f"{name}.") for field in LATER}
        assert there == {*named_ones.split(), *left_out} - later, name
        assert not set(named_ones.split()) & set(left_out)
    for kind, (named_ones, left_out) in NAMED_WITH_A_REQUEST.items():
        assert {field.name for field in dataclasses.fields(kind)} == {*named_ones.split(), *left_out.split()}


def test_models_that_depend_on_max_model_len_are_classified():
    """Finds `max_model_len` in the models' sources. Most models use it for buffers, or for prompts with media."""
    package = pathlib.Path(vllm.__file__).parent
    found = {
        str(path.relative_to(models).with_suffix(""))
        for models in (package / "model_executor" / "models", package / "models")
        for path in models.rglob("*.py")
        if re.search(r"\bmax_model_len\b", path.read_text())
    }
    assert found == set(LENGTH.split()) - ({*GONE.split()} if VERSION != "0.32" else {*ADDED.split()})


# Between 0.32 and 0.33. Muse Spark and Step 5 are in LENGTH_COUNTS.
GONE = "minimax_m3/amd/indexer_aiter"
ADDED = """
deepseek_v4/amd/mono_decode deepseek_v41/amd/ops/sparse_indexer
deepseek_v41/nvidia/specialized_decode/attention/indexer
deepseek_v41/nvidia/specialized_decode/runtime/model_state deepseek_vl2
kimi_k3/nvidia/specialized_decode/runtime/__init__ minimax_m3/amd/indexer_context_parallel
minimax_m3/amd/indexer_msa minimax_m3/amd/ops/indexer_context_parallel muse_spark/amd/model muse_spark/nvidia/model
step5/nvidia/model step5/nvidia/sparse_attention transformers/utils
"""
LENGTH = (
    """
cohere_compass colpali config deepseek_ocr deepseek_v2 deepseek_v32/amd/rocm deepseek_v32/attention
deepseek_v4/amd/rocm deepseek_v4/attention deepseek_v4/common/ops/cache_utils deepseek_v4/compressor
deepseek_v4/cpu/cpu_sparse deepseek_v4/nvidia/flashinfer_sparse deepseek_v4/nvidia/flashmla deepseek_v4/sparse_mla
deepseek_v4/xpu/xpu_sparse deepseek_v41/amd/rocm deepseek_v41/attention deepseek_v41/common/vl_cudagraph
deepseek_v41/compressor deepseek_v41/nvidia/flash_mla_mega_attn deepseek_v41/nvidia/flashmla diffusion_gemma
dots3_note/common/processor embedding_gemma2 ernie45_vl gemma3_mm gemma4_mm glm4_1v glm5next/amd/sparse_indexer
glm5next/common/attention glm5next/nvidia/sparse_indexer hy_v4/nvidia/attention idefics3 inkling/amd/attention
inkling/nvidia/attention inkling/nvidia/ops/fa4_rel_attention internvl kimi_k25 kimi_k3/nvidia/model kimi_vl lfm2_vl
llama4 minicpmv minimax_m2 minimax_m3/amd/indexer_aiter minimax_m3/amd/sparse_attention_msa
minimax_m3/common/encoder_cudagraph minimax_m3/common/mm_preprocess mllama4 nano_nemotron_vl parakeet plamo3
qwen2_5_vl qwen2_vl qwen3_vl step3_vl voxtral voxtral_realtime
"""
    + ADDED
)
