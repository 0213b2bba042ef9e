# SPDX-License-Identifier: Apache-2.0
"""Tiny random models in fp32, one per family. Their heads remember 20 to 1,000 tokens."""

import torch
import transformers

COMMON = {"vocab_size": 256, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GDN = {
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 8192,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
MAMBA = {
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 32,
}  # fmt: skip
ATTENTION = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def _config(family):
    if family == "qwen3_next":
        return transformers.Qwen3NextConfig(**COMMON, **GDN, **MOE, **ROPE, mlp_only_layers=[0, 1, 2])
    if family == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**COMMON, **GDN, **ROPE)
    if family == "qwen3_5_moe":
        sizes = {name: value for name, value in GDN.items() if name != "intermediate_size"}
        return transformers.Qwen3_5MoeTextConfig(**COMMON, **sizes, **MOE, **ROPE)
    if family == "olmo_hybrid":
        return transformers.OlmoHybridConfig(**{**COMMON, **GDN, "num_key_value_heads": 4, "pad_token_id": 0})
    if family == "granitemoehybrid":
        return transformers.GraniteMoeHybridConfig(
            **COMMON, **MAMBA, num_hidden_layers=4, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])  # fmt: skip
    if family == "bamba":
        return transformers.BambaConfig(**COMMON, **MAMBA, num_hidden_layers=4, attn_layer_indices=[2])
    if family == "zamba2":
        return transformers.Zamba2Config(
            **{**COMMON, "pad_token_id": 0}, num_hidden_layers=4, num_attention_heads=4, mamba_d_state=8,
            n_mamba_heads=4, mamba_ngroups=2, mamba_expand=2, chunk_size=32, intermediate_size=64, num_mem_blocks=1, use_mem_rope=True,
            layers_block_type=["mamba", "mamba", "hybrid", "mamba"])  # fmt: skip
    if family == "falcon_h1":
        return transformers.FalconH1Config(
            **COMMON, **{**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True}, num_hidden_layers=3
        )
    if family == "nemotron_h":
        return transformers.NemotronHConfig(
            **COMMON, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64, ssm_state_size=8,
            mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=32)  # fmt: skip
    if family == "kimi_linear":
        return transformers.KimiLinearConfig(
            **COMMON, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            num_local_experts=4, num_experts_per_tok=2, linear_head_dim=16, linear_num_heads=2,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])  # fmt: skip
    if family == "jamba":
        return transformers.JambaConfig(
            **COMMON, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            num_experts=2, num_experts_per_tok=1, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=4,
            attn_layer_offset=2)  # fmt: skip
    if family == "minimax":
        return transformers.MiniMaxConfig(
            **COMMON, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, num_local_experts=2, num_experts_per_tok=1, block_size=32,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])  # fmt: skip
    if family == "qwen3":
        return transformers.Qwen3Config(
            **COMMON,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    if family == "llama":
        return transformers.LlamaConfig(
            **COMMON, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 512})  # fmt: skip
    if family == "mistral":
        return transformers.MistralConfig(**COMMON, **ATTENTION, num_hidden_layers=3, sliding_window=20)
    if family == "gemma3":
        return transformers.Gemma3TextConfig(
            **COMMON, **ATTENTION, num_hidden_layers=4, query_pre_attn_scalar=16, sliding_window=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})  # fmt: skip
    if family == "gpt_oss":
        return transformers.GptOssConfig(
            **COMMON, **ATTENTION, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
            layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    raise ValueError(family)


DELTA = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"]
SCALAR = ["granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "zamba2", "minimax"]
LINEAR = [*DELTA, *SCALAR, "jamba"]
PLAIN = ["qwen3", "llama"]
WINDOWED = ["mistral", "gemma3", "gpt_oss"]
FAMILIES = [*LINEAR, *PLAIN, *WINDOWED]


def build(family, seed=0):
    torch.manual_seed(seed)
    return tuned(transformers.AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32))


def tuned(model):
    """Changes weights so that states matter to a model's outputs."""
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "conv1d" in name:
                weight.normal_(0, 0.5)  # the usual 0.02 gives states too small for norms to restore
            elif weight.ndim >= 2:
                weight.mul_(2.5)  # outputs that differ from token to token
            # Steps of about 1, so that tokens write to the state, and decays that halve a state in 20 to 1,000 tokens.
            if name.endswith("A_log"):
                weight.copy_(-torch.logspace(1.3, 3.0, weight.numel()).log().view(weight.shape))
            if name.endswith(".D"):
                weight.zero_()  # the output of Mamba then depends only on its state
            if name.endswith(("dt_bias", "dt_proj.bias")):
                weight.copy_(0.54 + 0.3 * torch.randn_like(weight))
    return model


def tokens(count, seed):
    return torch.randint(1, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
