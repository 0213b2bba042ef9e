"""The trained hybrid of docs/benchmarks/quality.md for vLLM, whose gated delta net has heads of 64 or 128 numbers: its
heads of 32 are padded with zeros, and its weights named as Qwen3.5's.

Padding changes nothing but rounding: rows of zeros stay zeros through convolution, SiLU, normalisation and recurrence.
The norm behind the recurrence averages over twice the numbers, half of them zero, so its weights are divided by √2; the
query's scale, too, is another one, and the norm takes that out again.
"""

import json

import safetensors.torch
import torch

HEADS, WAS, IS, HIDDEN = 2, 32, 64, 64


def _padded(rows):
    """[heads · 32, …] to [heads · 64, …]."""
    rows = rows.view(HEADS, WAS, *rows.shape[1:])
    return torch.cat([rows, torch.zeros_like(rows)], 1).flatten(0, 1).contiguous()


def _linear(prefix, weights):
    def take(name):
        return weights.pop(prefix + name).float()

    projected = take("in_proj_qkvz.weight").view(HEADS, 4, WAS, HIDDEN).unbind(1)
    q, k, v, z = (each.reshape(HEADS * WAS, HIDDEN) for each in projected)
    b, a = (each.contiguous() for each in take("in_proj_ba.weight").view(HEADS, 2, HIDDEN).unbind(1))
    conv = take("conv1d.weight").view(3, HEADS * WAS, 1, 4)
    norm = take("norm.weight") / 2**0.5
    return {
        "in_proj_qkv.weight": torch.cat([_padded(each) for each in (q, k, v)]),
        "in_proj_z.weight": _padded(z),
        "in_proj_b.weight": b,
        "in_proj_a.weight": a,
        "conv1d.weight": torch.cat([_padded(each) for each in conv]),
        "A_log": take("A_log"),
        "dt_bias": take("dt_bias"),
        "norm.weight": torch.cat([norm, torch.zeros_like(norm)]),
        "out_proj.weight": _padded(take("out_proj.weight").T).T.contiguous(),
    }


def convert(source, folder):
    """Writes config and weights that vLLM loads."""
    weights = safetensors.torch.load_file(source)
    vocabulary = len(weights["model.embed_tokens.weight"])
    for layer in (0, 2):
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
        intermediate_size=96,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=IS,
        linear_value_head_dim=IS,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        torch_dtype="bfloat16",
        hidden_act="silu",
        tie_word_embeddings=True,
    )
    (folder / "config.json").write_text(json.dumps(config))
