"""The trained hybrid of docs/benchmarks/quality.md for vLLM: its gated delta nets' weights, named and ordered as Qwen3.5's."""

import json

import safetensors.torch
import torch

HEADS, WIDTH, HIDDEN = 4, 64, 256
LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]


def _linear(prefix, weights):
    """Transformers keeps q, k, v, z of each head together, vLLM all heads of each."""

    def take(name):
        return weights.pop(prefix + name)

    projected = take("in_proj_qkvz.weight").view(HEADS, 4, WIDTH, HIDDEN).unbind(1)
    q, k, v, z = (each.reshape(HEADS * WIDTH, HIDDEN) for each in projected)
    b, a = take("in_proj_ba.weight").view(HEADS, 2, HIDDEN).unbind(1)
    kept = ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight")
    return {
        "in_proj_qkv.weight": torch.cat([q, k, v]),
        "in_proj_z.weight": z,
        "in_proj_b.weight": b,
        "in_proj_a.weight": a,
        **{name: take(name) for name in kept},
    }


def convert(source, folder):
    """Writes config and weights that vLLM loads."""
    weights = safetensors.torch.load_file(source)
    vocabulary = len(weights["model.embed_tokens.weight"])
    for layer in (number for number, kind in enumerate(LAYERS) if kind == "linear_attention"):
        prefix = f"model.layers.{layer}.linear_attn."
        weights |= {prefix + name: each for name, each in _linear(prefix, weights).items()}
    kept = ("A_log",)
    weights = {
        name: each.float() if name.endswith(kept) else each.to(torch.bfloat16).contiguous() for name, each in weights.items()
    }
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=WIDTH,
        linear_value_head_dim=WIDTH,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        torch_dtype="bfloat16",
        hidden_act="silu",
        tie_word_embeddings=True,
    )
    (folder / "config.json").write_text(json.dumps(config))
