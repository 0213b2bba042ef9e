# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers that run only on GPUs (KDA, lightning attention, Mamba-1), Mamba-2 with the arguments of its kernels for
GPUs, and MLA of their models, built and run on CPUs with torch in place of the kernels, in fp64. No kernel of a GPU has
run here."""

import sys
import types

import gpu_delta_nets
import numpy as np
import torch
import vllm
import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as kimi
import vllm.model_executor.layers.mamba.linear.bailing_linear_attn as ring
import vllm.model_executor.layers.mamba.linear.minimax_linear_attn as minimax
import vllm.model_executor.layers.mamba.mamba_mixer as mamba
import vllm.model_executor.layers.mamba.mamba_mixer2 as mamba2
import vllm.model_executor.models.bailing_moe_linear as ring_model
import vllm.model_executor.models.bailing_moe_v3 as ling
from tiny_engines import settings_of
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

WIDTH, HEADS, DIM = 64, 4, 16
KDA = dict(head_dim=DIM, num_heads=HEADS, short_conv_kernel_size=4)
COMMON = dict(hidden_size=WIDTH, hidden_act="silu", rms_norm_eps=1e-6, num_attention_heads=HEADS)
LIGHTNING = COMMON | dict(
    num_hidden_layers=4, head_dim=64, max_position_embeddings=4096, use_bias=False, use_qkv_bias=False,
    use_qk_norm=True, rope_theta=10000.0, partial_rotary_factor=0.5,
)  # fmt: skip
MLA = dict(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, q_lora_rank=None, kv_lora_rank=32)
LING = COMMON | dict(head_dim=DIM, short_conv_kernel_size=4, no_kda_lora=True)
CHUNK = 32  # tokens of a chunk of Mamba-2

recorded = []  # for each run of a kernel: (state, begin, end) -> the state after these tokens of the run, in fp64


def _record(steps):
    """`steps`: functions of the state, one per token. Returns the whole recurrence."""

    def recur(state, begin=0, end=None):
        state = state.double()
        for step in steps[begin:end]:
            state = step(state)
        return state

    recorded.append(recur)
    return recur


def _delta_step(k, v, g, beta):
    """For states [heads, d_v, d_k]."""

    def step(state):
        state = state * g.exp()[:, None, :]
        write = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
        return state + write[:, :, None] * k[:, None, :]

    return step


def _kda(*, q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, **_):
    assert output_final_state and use_qk_l2norm_in_kernel and len(cu_seqlens) == 2
    out = v.contiguous()  # as in vLLM's kernels, the output is written to v if v is contiguous
    k, v, g, beta = (each[0].double() for each in (k, v, g, beta))
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    state = _record([_delta_step(*rows) for rows in zip(k, v, g, beta)])(initial_state[0])
    return out.zero_(), state[None].to(initial_state.dtype)


def _gates(raw, bias, A_log, lower_bound):
    raw = raw.double() + bias.double().view(raw.shape[-2:])
    scale = A_log.double().exp().view(-1, 1)
    if lower_bound is None:
        return -scale * torch.nn.functional.softplus(raw)
    return lower_bound * (scale * raw).sigmoid()


def _kda_with_gates(*, raw_g, raw_beta, A_log, g_bias, lower_bound, **rest):
    return _kda(g=_gates(raw_g, g_bias, A_log, lower_bound), beta=raw_beta.double().sigmoid(), **rest)


def _gate(raw, A_log, head_dim, g_bias, lower_bound):
    return _gates(raw.unflatten(-1, (-1, head_dim)), g_bias, A_log, lower_bound)


def _gather(state, indices, has_initial_state):
    return state[indices] * has_initial_state.view(-1, 1, 1, 1)


def _lightning(q, k, v, slopes, block_size, kv_history):
    decay = (-slopes.double()).exp()

    def step(k, v):
        return lambda state: decay * state + k[:, :, None] * v[:, None, :]

    rows = zip(*(each[0].double().transpose(0, 1) for each in (k, v)))
    state = _record([step(*each) for each in rows])(kv_history[0])
    return torch.zeros_like(q), state[None, :, None].to(kv_history.dtype)


def _scan(
    u, states, delta, A, B, C, D, z, bias, *, delta_softplus, cache_indices, has_initial_state, query_start_loc, **_
):
    assert delta_softplus and len(query_start_loc) == 2
    (block,), (later,) = cache_indices.tolist(), has_initial_state.tolist()
    dt, A = torch.nn.functional.softplus(delta.double() + bias.double()[:, None]), A.detach().double()

    def step(u, dt, B):
        return lambda state: (A * dt[:, None]).exp() * state + (dt * u)[:, None] * B[None]

    steps = [step(*each) for each in zip(u.double().T, dt.T, B.double().T)]
    states[block] = _record(steps)(states[block] * later).to(states.dtype)
    return torch.zeros_like(u)


def _chunk_scan(
    x, dt, A, B, C, *, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, out, dt_bias,
    initial_states, return_intermediate_states, dt_softplus, state_dtype, final_states_out=None,
    final_state_indices=None, **_,
):  # fmt: skip
    """vLLM 0.33 passes the cache of states and the place of the end state; 0.32 stores the returned state itself."""
    assert dt_softplus and not return_intermediate_states and len(cu_seqlens) == 2
    ends = cu_chunk_seqlens.tolist()
    assert chunk_size == CHUNK and (ends[0], ends[-1]) == (0, len(x)) and max(np.diff(ends)) <= CHUNK
    assert last_chunk_indices.tolist() == [len(ends) - 2] and seq_idx.tolist() == [0] * (len(ends) - 1)
    steps = torch.nn.functional.softplus(dt.double() + dt_bias.double())
    A, B = A.detach().double(), B.double().repeat_interleave(x.shape[1] // B.shape[1], 1)

    def step(x, dt, B):
        return lambda state: (A * dt).exp()[:, None, None] * state + (dt[:, None] * x)[:, :, None] * B[:, None]

    before = torch.zeros(*x.shape[1:], B.shape[2]) if initial_states is None else initial_states[0]
    after = _record([step(*each) for each in zip(x.double(), steps, B)])(before)[None].to(state_dtype)
    out.zero_()
    if final_states_out is not None:
        final_states_out[final_state_indices.long()] = after
    return after


def _insert(q, k_nope, k_pe, latents, cache, slots, positions, table):
    assert positions is None and table is None
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat([latents, k_pe.flatten(1)], -1)
    return torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], -1)


def _gather_context(src_cache, dst, block_table, num_tokens, seq_starts, **_):
    """Copies the latents of one request's earlier tokens."""
    (begin,), (table,), tokens = seq_starts.tolist(), block_table.long(), src_cache.shape[-2]
    positions = torch.arange(begin, begin + num_tokens)
    slots = table[positions // tokens] * tokens + positions % tokens
    dst[:num_tokens] = src_cache.reshape(-1, src_cache.shape[-1])[slots]


def _concat(k_nope, k_pe):
    return torch.cat([k_nope, k_pe.view(len(k_pe), 1, -1).expand(-1, k_nope.shape[1], -1)], -1)


def emulate():
    """For the rest of this process."""
    kernels = types.ModuleType("kda")
    kernels.chunk_kda_with_fused_gate = _kda_with_gates
    kernels.fused_recurrent_kda = kernels.fused_recurrent_kda_packed_decode = None
    sys.modules["vllm.models.kimi_k3.nvidia.ops.third_party.kda"] = kernels
    for module in (kimi, ling, mamba, mamba2):
        module.causal_conv1d_fn = gpu_delta_nets.convolve
    kimi.gather_initial_states = _gather
    MLACommonBackend.get_supported_head_sizes = classmethod(lambda cls: [])  # the configuration is another model's
    # vLLM's kernel for CPUs takes the stride of heads for that of tokens.
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    # In the child only: vLLM loads llvmlite with this module, and then no engine could start in this process.
    import vllm.models.kimi_k3.nvidia.mla as kimi_mla

    kimi_mla.fused_mla_key_concat_kv_cache_insert = _insert
    kimi_mla.ops.gather_and_maybe_dequant_cache, kimi_mla.fused_mla_kv_concat = _gather_context, _concat
    ling.chunk_kda, ling.fused_kda_gate = _kda, _gate
    minimax.lightning_attention, mamba.selective_scan_fn = _lightning, _scan
    mamba2.mamba_chunk_scan_combined_varlen = _chunk_scan
    ring.layernorm_fn = lambda x, weight, bias, eps, is_rms_norm: torch.nn.functional.rms_norm(
        x, x.shape[-1:], weight, eps
    )
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", backend="gloo")


def engine_config():
    config = vllm.EngineArgs(**settings_of("qwen3_5", dtype="float32")).create_engine_config()
    config.cache_config.mamba_cache_mode, config.cache_config.mamba_block_size = "align", 128
    config.cache_config.mamba_page_size_padded = None
    config.model_config.hf_text_config.mamba_chunk_size = CHUNK
    return config


def _of(given):
    return types.SimpleNamespace(**given)


# By name: the layer, and how its model calls it.
LAYERS = {
    "kimi": lambda config, name: kimi.KimiGatedDeltaNetAttention(_of(COMMON | dict(linear_attn_config=KDA)), config, name),
    "bounded": lambda config, name: kimi.KimiGatedDeltaNetAttention(
        _of(COMMON | dict(linear_attn_config=KDA | dict(gate_lower_bound=-5.0))), config, name
    ),
    "ling": lambda config, name: ling.BailingMoeV3KimiDeltaAttention(
        _of(LING), prefix=name, model_config=config.model_config, cache_config=config.cache_config
    ),
    "ring": lambda config, name: ring.BailingMoELinearAttention(_of(LIGHTNING), config, name),
    "minimax": lambda config, name: minimax.MiniMaxText01LinearAttention(_of(LIGHTNING), config, name),
    "jamba": lambda config, name: mamba.MambaMixer(
        WIDTH, 16, 4, 2 * WIDTH, 8, True, False, True, model_config=config.model_config,
        cache_config=config.cache_config, prefix=name,
    ),
    "granite": lambda config, name: mamba2.MambaMixer2(
        WIDTH, 32, 4, 2 * WIDTH, True, False, 2, 8, DIM, model_config=config.model_config,
        cache_config=config.cache_config, prefix=name,
    ),
}  # fmt: skip


def _kimi_mla(config, name):
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    return MultiHeadLatentAttention(_of(COMMON), WIDTH, HEADS, **MLA, cache_config=config.cache_config, prefix=name)


def _bailing_mla(kind):
    def make(config, name):
        given = COMMON | MLA | dict(rope_theta=10000.0, max_position_embeddings=4096)
        return kind(_of(given), prefix=name.removesuffix(".attn"), cache_config=config.cache_config)

    return make


# MLA of the models of these layers, by name.
LATENTS = {
    "kimi": _kimi_mla,
    "bounded": _kimi_mla,
    "ling": _bailing_mla(ling.BailingMoeV3MLAAttention),
    "ring": _bailing_mla(ring_model.BailingMoeV25MLAAttention),
}


def build(kind, config, name, layers=LAYERS):
    """Returns a layer with random weights, and its forward as a function of hidden states and positions."""
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            initialize_model_parallel()
        layer = layers[kind](config, name).eval()
    torch.manual_seed(1)
    for path, weight in layer.named_parameters():
        if path == "A":
            values = -torch.rand_like(weight)
        elif weight.dim() == 1 or path == "A_log":
            values = torch.randn_like(weight) / 4
        else:
            values = torch.randn_like(weight) * weight[0].numel() ** -0.5
        weight.data.copy_(values)  # in place: Mamba-2 also has a view of its convolution's weights
    for module in layer.modules():
        if hasattr(module, "quant_method"):
            module.cpu_linear = torch.nn.functional.linear  # vLLM sets it when it has loaded the weights
    for norm in ("g_norm", "norm"):
        if hasattr(layer, norm):
            getattr(layer, norm)._forward = getattr(layer, norm).forward = lambda hidden, *_: hidden

    def forward(hidden, positions):
        given = dict(hidden_states=hidden, positions=positions, output=torch.empty_like(hidden))
        code = type(layer).forward.__code__
        wanted = code.co_varnames[: code.co_argcount]
        return layer(**{name: each for name, each in given.items() if name in wanted})

    return layer, forward
