#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves published architectures from the cache in vLLM, and prints the result for each.

If vLLM's CPU build runs a model, a tiny one of the same classes with random weights is served by two engines: the first
computes and saves, the second loads, and tokens and log-probabilities are compared. Otherwise, the connector saves and
loads blocks of random bytes with the model's cache specs, and bytes are compared.

usage: vllm_models.py [--json FILE] [--only NAME ...]

Run it from a checkout, with PYTHONPATH at the built package, in an environment with vLLM's CPU build.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import types

TESTS = pathlib.Path(__file__).parents[2] / "client" / "python" / "tests" / "engines" / "vllm"
sys.path.insert(0, str(TESTS))

import tiny_engines as engines  # noqa: E402  the tiny models and engines of the tests
import tiny_models as tiny  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
from driven_specs import drive  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes  # noqa: E402
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

import ashlar.daemon  # noqa: E402
from ashlar.vllm.identity import Unsupported  # noqa: E402

ONE = 1  # rank
BF16, F32 = torch.bfloat16, torch.float32

# {architecture: published model, and the tiny model's configuration}
RUN = {
    "Qwen3ForCausalLM": ("Qwen/Qwen3-8B", tiny.CONFIGS["qwen3"]),
    "Qwen3NextForCausalLM": ("Qwen/Qwen3-Next-80B-A3B-Instruct", tiny.CONFIGS["qwen3_next"]),
    "Qwen3_5ForCausalLM": ("Qwen/Qwen3.5-27B, its text model", tiny.CONFIGS["qwen3_5"]),
    "GraniteMoeHybridForCausalLM": ("ibm-granite/granite-4.0-h-small", tiny.CONFIGS["granite"]),
    "FalconH1ForCausalLM": ("tiiuae/Falcon-H1-0.5B-Instruct", tiny.CONFIGS["falcon_h1"]),
    "NemotronHForCausalLM": ("nvidia/Nemotron-H-8B-Base-8K", tiny.CONFIGS["nemotron_h"]),
    "Lfm2ForCausalLM": ("LiquidAI/LFM2-1.2B", tiny.CONFIGS["lfm2"]),
    "GptOssForCausalLM": ("openai/gpt-oss-20b", tiny.CONFIGS["gpt_oss"]),
    "MistralForCausalLM": ("mistralai/Ministral-8B-Instruct-2410", tiny.CONFIGS["ministral"]),
    "Zamba2ForCausalLM": (
        "Zyphra/Zamba2-2.7B",
        dict(
            tiny.COMMON,
            architectures=["Zamba2ForCausalLM"],
            hidden_act="gelu",
            model_type="zamba2",
            num_hidden_layers=4,
            hybrid_layer_ids=[2],
            layers_block_type=["mamba", "mamba", "hybrid", "mamba"],
            num_attention_heads=4,
            num_key_value_heads=4,
            attention_head_dim=32,
            attention_hidden_size=128,
            n_mamba_heads=8,
            mamba_headdim=16,
            mamba_d_state=32,
            mamba_ngroups=2,
            mamba_d_conv=4,
            mamba_expand=2,
            chunk_size=64,
            num_mem_blocks=1,
            use_shared_attention_adapter=False,
            adapter_rank=8,
            use_mem_rope=True,
            rope_theta=10000.0,
        ),
    ),
    "Llama4ForCausalLM": (
        "meta-llama/Llama-4-Scout-17B-16E, its text model",
        dict(
            tiny.COMMON,
            architectures=["Llama4ForCausalLM"],
            model_type="llama4_text",
            num_hidden_layers=4,
            attention_chunk_size=256,
            no_rope_layers=[1, 1, 1, 0],
            layer_types=["chunked_attention"] * 3 + ["full_attention"],
            num_local_experts=2,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            moe_layers=[1, 3],
            intermediate_size_mlp=128,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            rope_theta=10000.0,
        ),
    ),
}
# A resumed prompt is computed in other steps, which round differently in bf16.
IN_FP32 = [f"{name}ForCausalLM" for name in ("GraniteMoeHybrid", "FalconH1", "NemotronH", "Lfm2", "Zamba2")]


def full(heads, size, **rest):
    return FullAttentionSpec(block_size=128, num_kv_heads=heads, head_size=size, dtype=BF16, **rest)


def latent(size=576, **rest):
    return MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=size, dtype=BF16, **rest)


def states(backend, shapes, *dtypes):
    return MambaSpec(block_size=128, shapes=shapes, dtypes=dtypes, mamba_type=backend, mamba_cache_mode="align")


def gdn(key_heads, heads, key_dim, dim):
    shapes = Shapes.gated_delta_net_state_shape(ONE, key_heads, heads, key_dim, dim, 4)
    return states(Backend.GDN_ATTN, shapes, BF16, F32)


def kda(heads):
    return states(Backend.GDN_ATTN, Shapes.kda_state_shape(ONE, heads, 128), BF16, F32)


def lightning(heads):
    return states(Backend.LINEAR, Shapes.linear_attention_state_shape(heads, ONE, 128), F32)


def mamba2(inner, groups, heads, dim, size):
    return states(Backend.MAMBA2, Shapes.mamba2_state_shape(ONE, inner, groups, heads, dim, size, 4), BF16, F32)


# {architecture: published model, and the specs of one layer of each kind, by its configuration}
SPECS = {
    "KimiLinearForCausalLM": ("moonshotai/Kimi-Linear-48B-A3B-Instruct", [kda(32), latent()]),
    "BailingMoeV3ForCausalLM": ("inclusionAI/Ling-3.0-Tiny", [kda(16), latent()]),
    "BailingMoeV2_5ForCausalLM": ("inclusionAI/Ring-2.5-1T", [lightning(64), latent()]),
    "BailingMoeLinearV2ForCausalLM": ("inclusionAI/Ring-mini-linear-2.0", [lightning(16), full(4, 128)]),
    "MiniMaxText01ForCausalLM": ("MiniMaxAI/MiniMax-Text-01", [lightning(64), full(8, 128)]),
    "JambaForCausalLM": (
        "ai21labs/Jamba-v0.1",
        [states(Backend.MAMBA1, Shapes.mamba1_state_shape(ONE, 8192, 16, 4), BF16, F32), full(8, 128)],
    ),
    "BambaForCausalLM": ("ibm-ai-platform/Bamba-9B", [mamba2(8192, 1, 128, 64, 128), full(8, 128)]),
    "Plamo2ForCausalLM": (
        "pfnet/plamo-2-1b",
        [
            mamba2(4096, 1, 32, 128, 64),
            SlidingWindowSpec(sliding_window=2048, block_size=128, num_kv_heads=1, head_size=128, dtype=BF16),
        ],
    ),
    "OlmoHybridForCausalLM": ("allenai/Olmo-Hybrid-7B", [gdn(30, 30, 96, 192), full(30, 128)]),
    "Qwen3_5ForConditionalGeneration": ("Qwen/Qwen3.5-27B", [gdn(16, 48, 128, 128), full(4, 256)]),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen/Qwen3.5-397B-A17B", [gdn(16, 64, 128, 128), full(2, 256)]),
    "DeepseekV3ForCausalLM": ("deepseek-ai/DeepSeek-V3", [latent()]),
    "DeepseekV32ForCausalLM": (
        "deepseek-ai/DeepSeek-V3.2, with the keys of its indexer",
        [latent(), MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=132, dtype=torch.uint8)],
    ),
    "Llama4ForConditionalGeneration": (
        "meta-llama/Llama-4-Scout-17B-16E",
        [
            ChunkedLocalAttentionSpec(
                attention_chunk_size=8192, block_size=128, num_kv_heads=8, head_size=128, dtype=BF16
            ),
            full(8, 128),
        ],
    ),
    "WhisperForConditionalGeneration": (
        "openai/whisper-large-v3",
        [full(20, 64), CrossAttentionSpec(block_size=128, num_kv_heads=20, head_size=64, dtype=BF16)],
    ),
    "PanguProMoEV2ForCausalLM": (
        "openPangu, whose attention has sinks",
        [SinkFullAttentionSpec(block_size=128, num_kv_heads=8, head_size=128, dtype=BF16, sink_len=4)],
    ),
}


# Fields of a configuration by which the connector recognizes a layer.
TEXTS = {
    "OlmoHybridForCausalLM": {"linear_num_key_heads": 30},
    "Qwen3_5ForConditionalGeneration": {"linear_num_key_heads": 16},
    "Qwen3_5MoeForConditionalGeneration": {"linear_num_key_heads": 16},
}


@dataclasses.dataclass
class Row:
    architecture: str
    config: str  # the published model
    engine: str
    ran: bool = False
    hits: int = 0
    equal_tokens: bool | None = None  # for an engine that ran
    max_logprob_diff: float | None = None
    equal_bytes: bool | None = None  # for blocks
    refused: str = ""


def run(name, daemon):
    """Runs two engines: the second loads what the first computes."""
    published, _ = RUN[name]
    row = Row(name, published, f"vLLM {vllm.__version__} on a CPU")
    options = {"dtype": "float32" if name in IN_FP32 else "bfloat16"}
    try:
        with engines.Child(name, engines.connector(daemon), **options) as child:
            block = child.call("block_size")
            texts = [engines.prompt(f"{name} {i}", length) for i, length in enumerate((block + 9, 2 * block + 50))]
            computed = [child.generate([text], 12)[0][:2] for text in texts]
        with engines.Child(name, engines.connector(daemon), **options) as child:
            loaded = [child.generate([text], 12)[0][:2] for text in texts]
            hits = sum(value for (what, _), value in child.call("metrics").items() if what == "hits")
    except (RuntimeError, TimeoutError) as error:
        row.refused = f"vLLM cannot run it here: {str(error).strip().splitlines()[-1][:200]}; run it on a GPU"
        return row
    row.ran, row.hits = True, int(hits)
    row.equal_tokens = all(one[0] == two[0] for one, two in zip(computed, loaded))
    pairs = (pair for one, two in zip(computed, loaded) for pair in zip(one[1], two[1]))
    row.max_logprob_diff = max(abs(a - b) for a, b in pairs)
    if row.hits == 0:
        row.refused = "no hit: see the warning of the connector above"
    return row


def drive_specs(name, daemon):
    published, specs = SPECS[name]
    row = Row(name, published, f"cache specs of vLLM {vllm.__version__}, no engine")
    try:
        layers = {f"model.layers.{i}.layer": spec for i, spec in enumerate(specs)}
        text = types.SimpleNamespace(**TEXTS.get(name, {}))
        found, row.equal_bytes = drive(layers, daemon, name=name, text=text)
        row.hits = int(found)
    except Unsupported as error:
        row.refused = str(error)
    return row


def main():
    parser = argparse.ArgumentParser(description="Serves published architectures from the cache in vLLM.")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--only", nargs="+", choices=[*RUN, *SPECS], metavar="NAME", help="architectures to try")
    given = parser.parse_args()
    names = given.only or [*RUN, *SPECS]
    tiny.CONFIGS.update({name: config for name, (_, config) in RUN.items() if name in names})
    if any(name in RUN for name in names):
        engines.import_once()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with ashlar.daemon.start(dram="1GiB", arena="16MiB", folder=folder) as daemon:
            for name in names:
                row = (run if name in RUN else drive_specs)(name, daemon)
                rows.append(row)
                said = {
                    key: value for key, value in dataclasses.asdict(row).items() if value is not None and value != ""
                }
                print(" ".join(f"{key}={value}" for key, value in said.items()), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"models": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n")
    wrong = [row.architecture for row in rows if row.equal_tokens is False or (row.hits and row.equal_bytes is False)]
    if wrong:
        sys.exit(f"wrong answers: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
