# SPDX-License-Identifier: Apache-2.0
"""Configurations of the tiny models that vLLM's tests run."""

COMMON = dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=65536,
    rms_norm_eps=1e-6,
    torch_dtype="bfloat16",
    hidden_act="silu",
    tie_word_embeddings=False,
)
LINEAR = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
)
WINDOW, WHOLE = "sliding_attention", "full_attention"
CONFIGS = {
    "qwen3": dict(
        COMMON, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=2, rope_theta=10000.0
    ),
    "qwen3_5": dict(
        COMMON | LINEAR,
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
    "qwen3_next": dict(
        COMMON | LINEAR,
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        partial_rotary_factor=0.25,
        rope_theta=10000.0,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0, 1, 2],
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
    "mimo": dict(  # attention, and its own MTP head; vLLM recognizes the architecture by its name
        COMMON,
        architectures=["MiMoForCausalLM"],
        model_type="qwen2",
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 elements each
        num_key_value_heads=2,
        num_nextn_predict_layers=1,
        rope_theta=10000.0,
    ),
    # LongRoPE: one of two sets of frequencies, by the engine's length.
    "phi3": dict(
        COMMON,
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 elements each
        num_key_value_heads=2,
        original_max_position_embeddings=2048,
        max_position_embeddings=8192,
        rope_theta=10000.0,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0 + i for i in range(16)]},
        pad_token_id=0,
    ),
    # One group of full attention, and three of windows, with one layer each.
    "ministral": dict(
        COMMON,
        architectures=["MistralForCausalLM"],
        model_type="ministral",
        num_hidden_layers=4,
        layer_types=[WINDOW, WINDOW, WINDOW, WHOLE],
        sliding_window=200,
        rope_theta=10000.0,
    ),
    # One group of full attention and one of windows, with two layers each.
    "gpt_oss": dict(
        COMMON,
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        num_hidden_layers=4,
        layer_types=[WINDOW, WHOLE, WINDOW, WHOLE],
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_theta=10000.0,
    ),
}
MAMBA = dict(
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=32,
    mamba_n_groups=2,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=64,
)
CONFIGS |= {
    "granite": dict(
        COMMON | MAMBA,
        architectures=["GraniteMoeHybridForCausalLM"],
        model_type="granitemoehybrid",
        num_hidden_layers=4,
        num_attention_heads=2,  # of 32 elements each, whatever head_dim says
        num_key_value_heads=2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        position_embedding_type="nope",
        attention_multiplier=0.2,
    ),
    # Each layer has a state as well as keys and values.
    "falcon_h1": dict(
        COMMON | MAMBA,
        architectures=["FalconH1ForCausalLM"],
        model_type="falcon_h1",
        num_hidden_layers=3,
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        rope_theta=10000.0,
    ),
    "nemotron_h": dict(
        COMMON,
        architectures=["NemotronHForCausalLM"],
        model_type="nemotron_h",
        num_hidden_layers=5,
        hybrid_override_pattern="M-M*M",
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
        mlp_hidden_act="relu2",
    ),
    "lfm2": dict(
        COMMON,
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_attention_heads=2,
        num_key_value_heads=2,
        conv_L_cache=3,
        conv_dim=64,
        block_dim=64,
        block_multiple_of=32,
        rope_theta=10000.0,
    ),
}
# One config has three groups of full attention and one of windows; the other has one group of windows.
CONFIGS["ministral_whole"] = dict(CONFIGS["ministral"], layer_types=[WHOLE, WHOLE, WINDOW, WHOLE], sliding_window=300)
CONFIGS["ministral_windows"] = dict(CONFIGS["ministral"], layer_types=[WINDOW] * 2, num_hidden_layers=2)
WINDOWED = {name: CONFIGS[name]["sliding_window"] for name in ("ministral", "gpt_oss", "ministral_whole")}
STATES = ["granite", "falcon_h1", "nemotron_h", "lfm2"]  # hybrids of Mamba-2, and short convolutions
DTYPE = dict.fromkeys(STATES, "float32")  # a resumed prompt is computed in other steps, which round differently in bf16
MODELS = ["qwen3", "qwen3_5", "qwen3_next"]
PAIR = ["qwen3", "qwen3_5"]
CLOSE = 2e-2  # tolerance for log-probabilities of bf16 models computed in a batch of another shape
# Tokens per block. The engine chooses them, and a test checks these numbers.
BLOCK = {"qwen3": 128, "phi3": 128, "qwen3_5": 384, "qwen3_next": 384, **dict.fromkeys([*WINDOWED, *STATES], 128)}
