# SPDX-License-Identifier: Apache-2.0
"""The trained hybrid of docs/benchmarks/quality.md for vLLM: its gated delta nets' weights, named and ordered as Qwen3.5's."""

import json

import safetensors.torch
import torch

# Fields of the same name in both configs.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "rope_parameters", "max_position_embeddings", "rms_norm_eps",
    "hidden_act", "tie_word_embeddings",
)  # fmt: skip


def _linear(prefix, weights, config):
    """Transformers stores q, k, v, z of each head together, vLLM all heads of each."""
    heads, width = config.linear_num_key_heads, config.linear_key_head_dim  # the dimensions of values are equal

    def take(name):
        return weights.pop(prefix + name)

    projected = take("in_proj_qkvz.weight").view(heads, 4, width, config.hidden_size).unbind(1)
    q, k, v, z = (each.reshape(heads * width, config.hidden_size) for each in projected)
    b, a = take("in_proj_ba.weight").view(heads, 2, config.hidden_size).unbind(1)
    kept = ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight")
    return {
        "in_proj_qkv.weight": torch.cat([q, k, v]),
        "in_proj_z.weight": z,
        "in_proj_b.weight": b,
        "in_proj_a.weight": a,
        **{name: take(name) for name in kept},
    }


def convert(source, trained, folder):
    """Writes config and weights that vLLM loads. `trained`: the Transformers config of the weights."""
    weights = safetensors.torch.load_file(source)
    for layer in (number for number, kind in enumerate(trained.layer_types) if kind == "linear_attention"):
        prefix = f"model.layers.{layer}.linear_attn."
        weights |= {prefix + name: each for name, each in _linear(prefix, weights, trained).items()}
    kept = ("A_log",)
    weights = {
        name: each.float() if name.endswith(kept) else each.to(torch.bfloat16).contiguous()
        for name, each in weights.items()
    }
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        torch_dtype="bfloat16",
        **{name: getattr(trained, name) for name in SIZES},
    )
    (folder / "config.json").write_text(json.dumps(config))
