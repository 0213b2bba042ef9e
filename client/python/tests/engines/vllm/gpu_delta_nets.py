# SPDX-License-Identifier: Apache-2.0
"""vLLM's code around its GPU kernels for gated delta nets, run on CPUs: its operator, its metadata and its order of
states, with torch in place of the kernels. No kernel of a GPU has run here."""

import torch
import vllm._custom_ops as engine_ops
import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as qwen

import ashlar.vllm.model


def emulate(monkeypatch):
    """For engines that are forked afterwards."""
    layer = qwen.QwenGatedDeltaNetAttention
    monkeypatch.setattr(layer, "forward_cpu", layer.forward_cuda)
    monkeypatch.setattr(layer, "_warmup_prefill_kernels", lambda *_: None)
    for name, kernel in {
        "causal_conv1d_fn": convolve,
        "causal_conv1d_update": _convolve_decodes,
        "fused_post_conv_prep": _prepare,
        "fla_chunk_gated_delta_rule": _prefill,
        "fused_sigmoid_gating_delta_rule_update": _decode,
        "fused_recurrent_gated_delta_rule_packed_decode": _decode_packed,
    }.items():
        monkeypatch.setattr(qwen, name, kernel)
    # CPU kernels for convolutions need packed weights.
    monkeypatch.setattr(engine_ops, "causal_conv1d_weight_pack", lambda weight: weight[:, None], raising=False)
    monkeypatch.setattr(ashlar.vllm.model, "_swaps_states", lambda: False)


def convolve(
    x, weight, bias, *, conv_states, cache_indices, query_start_loc, has_initial_state, activation="silu", metadata=None
):
    """x: [channels, tokens]; conv_states: [blocks, channels, taps]."""
    assert activation == "silu"
    out = torch.empty_like(x)
    for row, (begin, end) in enumerate(zip(query_start_loc.tolist(), query_start_loc.tolist()[1:])):
        state = conv_states[cache_indices[row]]
        inputs = torch.cat([state if has_initial_state[row] else torch.zeros_like(state), x[:, begin:end]], 1)
        state.copy_(inputs[:, inputs.shape[1] - state.shape[1] :])
        sums = torch.nn.functional.conv1d(inputs[None].float(), weight[:, None].float(), bias, groups=len(weight))[0]
        out[:, begin:end] = torch.nn.functional.silu(sums)
    return out


def _convolve_decodes(x, conv_states, weight, bias, activation, *, conv_state_indices, validate_data):
    return convolve(
        x.T, weight, bias, conv_states=conv_states, cache_indices=conv_state_indices,
        query_start_loc=torch.arange(len(x) + 1), has_initial_state=[True] * len(x), activation=activation,
    ).T  # fmt: skip


def _normalized(rows):
    return (rows.float() * torch.rsqrt(rows.float().square().sum(-1, keepdim=True) + 1e-6)).to(rows.dtype)


def _gates(a, b, A_log, dt_bias):
    return -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def _prepare(*, conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm, output_g_exp):
    assert apply_l2norm and not output_g_exp
    keys = num_k_heads * head_k_dim
    q, k, v = conv_output.split([keys, keys, conv_output.shape[1] - 2 * keys], 1)
    q, k = (_normalized(each.unflatten(1, (-1, head_k_dim))) for each in (q, k))
    return q, k, v.unflatten(1, (-1, head_v_dim)).contiguous(), *_gates(a, b, A_log, dt_bias)


def _recur(q, k, v, g, beta, state):
    """Returns the outputs, and the state after these tokens: [heads, d_v, d_k]."""
    q, k = (each.float().repeat_interleave(v.shape[1] // k.shape[1], 1) for each in (q, k))
    state, outputs = state.float(), []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        write = beta[t][:, None] * (v[t].float() - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + write[:, :, None] * k[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * q.shape[2] ** -0.5)
    return torch.stack(outputs).to(v.dtype), state


def _prefill(*, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, **_):
    assert output_final_state and not use_qk_l2norm_in_kernel
    outputs, states = [], []
    for row, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        rows = (each[0, begin:end] for each in (q, k, v, g, beta))
        output, state = _recur(*rows, initial_state[row])
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs)[None], torch.stack(states)


def _decode(
    *, A_log, a, b, dt_bias, q, k, v, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices,
    use_qk_l2norm_in_kernel,
):  # fmt: skip
    assert inplace_final_state and use_qk_l2norm_in_kernel
    q, k, (g, beta) = _normalized(q[0]), _normalized(k[0]), _gates(a, b, A_log, dt_bias)
    outputs = []
    for row in range(len(cu_seqlens) - 1):
        one = slice(row, row + 1)
        output, state = _recur(q[one], k[one], v[0, one], g[one], beta[one], initial_state[ssm_state_indices[row]])
        initial_state[ssm_state_indices[row]] = state.to(initial_state.dtype)
        outputs.append(output)
    return torch.cat(outputs)[None], initial_state


def _decode_packed(
    *, mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel
):
    _, heads, d_v, d_k = initial_state.shape
    keys = (mixed_qkv.shape[1] - heads * d_v) // 2
    q, k, v = mixed_qkv.split([keys, keys, heads * d_v], 1)
    q, k, v = (each.unflatten(1, (-1, size))[None] for each, size in ((q, d_k), (k, d_k), (v, d_v)))
    outputs, _ = _decode(
        A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, initial_state=initial_state, inplace_final_state=True,
        cu_seqlens=torch.arange(len(a) + 1), ssm_state_indices=ssm_state_indices,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    out.copy_(outputs[0][:, None])
