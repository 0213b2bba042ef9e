# SPDX-License-Identifier: Apache-2.0
"""vLLM's layer of Mamba-2 on a device that is not the CPU: its metadata, the connector's core and tuples, with torch in
place of the kernels. No part of this has run on a real GPU."""

import random
from unittest import mock

import gpu_layers
import lagging_device
import numpy as np
import torch
import vllm.model_executor.layers.mamba.mamba_mixer2 as mamba2
from driven_specs import be_far, in_child
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends import mamba2_attn, mamba_attn

import ashlar
from ashlar.tensors import compose, segment_tuple
from ashlar.vllm.forward import EngineModel
from ashlar.vllm.ranks import Ranks

NAME, BLOCK, BLOCKS, TOKENS = "model.layers.0.mixer", 128, 4, 90
BEGIN, END = 8, 82  # the interior


def device():
    return torch.device(lagging_device.NAME, 0)


def far(tensor):
    return tensor.detach().to(device(), non_blocking=True)


def convolve(
    x, weight, bias, *, conv_states, cache_indices, query_start_loc, has_initial_state, activation, metadata
):  # fmt: skip
    """Like `gpu_delta_nets.convolve`, for one sequence, without numbers in CPU memory."""
    before = torch.where(has_initial_state[:, None, None], conv_states[cache_indices], 0)[0]
    inputs = torch.cat([before, x], 1)
    conv_states[cache_indices] = inputs[None, :, -before.shape[1] :]
    sums = torch.nn.functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
    return torch.nn.functional.silu(sums)


chunks = []  # for each run of the scan: the ends of its chunks, the last chunk's index, and each chunk's sequence


def scan(
    x, dt, A, B, C, *, cu_chunk_seqlens, last_chunk_indices, seq_idx, out, dt_bias, initial_states, state_dtype,
    final_states_out=None, final_state_indices=None, **_,
):  # fmt: skip
    chunks.append((cu_chunk_seqlens, last_chunk_indices, seq_idx))
    steps = torch.nn.functional.softplus(dt + dt_bias)
    B, state = B.repeat_interleave(x.shape[1] // B.shape[1], 1), initial_states
    state = B.new_zeros(1, *x.shape[1:], B.shape[2]) if state is None else state
    for t in range(len(x)):
        update = (steps[t][:, None] * x[t])[:, :, None] * B[t][:, None]
        state = (A * steps[t]).exp()[:, None, None] * state + update
    out.zero_()
    if final_states_out is not None:
        final_states_out[final_state_indices] = state.to(state_dtype)
    return state.to(state_dtype)


def engine_on_the_device():
    """Returns an engine with one layer of Mamba-2, and the layer."""
    be_far()
    gpu_layers.emulate()
    for module in (mamba_attn, mamba2_attn):  # vLLM for CPUs copies nothing
        module.async_tensor_h2d = lambda data, dtype, device: far(torch.tensor(data, dtype=dtype))
    mamba2.causal_conv1d_fn, mamba2.mamba_chunk_scan_combined_varlen = convolve, scan
    engine = EngineModel.__new__(EngineModel)
    engine.ranks = Ranks(1)
    engine._config, engine._block, engine.device = gpu_layers.engine_config(), BLOCK, device()
    layer, _ = gpu_layers.build("granite", engine._config, NAME)
    spec = layer.get_kv_cache_spec(engine._config)
    for module in layer.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: far(each) for name, each in held.items() if each is not None})
    layer.bind_kv_cache(lagging_device.zeros((BLOCKS, 1, 1, spec.page_size_bytes)))
    engine._layers, engine._attention, engine._linear = {NAME: layer}, {}, {NAME: 0}
    with set_current_vllm_config(engine._config):
        engine._groups = {0: engine._group([NAME], spec)}
    return engine, layer


def computed(_, daemon, seed):
    """Returns the number of waits for the device, without copies of metadata; the chunks of each run; relative errors of
    states: of a run, of a run in ranges of rows, and of a composition from a random state; and the difference of the
    tails of both runs."""
    waits, found, stream = [], {}, lagging_device.Stream
    with lagging_device.stream(lagging_device.ENGINE):
        engine, layer = engine_on_the_device()
        torch.manual_seed(seed)
        width = layer.tped_intermediate_size + layer.tped_conv_size + layer.tped_dt_size
        projected, out = far(torch.randn(TOKENS, width)), far(torch.zeros(TOKENS, layer.tped_intermediate_size))
        heads, d_v, d_k = layer.kv_cache[1].shape[1:]
        shape = ashlar.Linear(
            ashlar.Family.MAMBA2, 2, heads, d_k, d_v, order=ashlar.StateOrder.VALUE_FIRST, decay_table=[-1.0] * heads
        )
        before = torch.randn(heads, d_v, d_k)

        def at_linear(core):
            own, copied = stream.run, engine._metadata_of
            core._metadata = lambda *given: mock.patch.object(stream, "run", own)(copied)(*given)
            stream.run = lambda *given: (waits.append(given), own(*given))
            rows, found["decays"] = core.run_seen(TOKENS, 1), engine.decays(NAME)
            part = {name: row[BEGIN:END] for name, row in rows.items()}
            update, transition = segment_tuple(shape, part, found["decays"])
            found["composed"] = far(before.clone())
            compose(found["composed"], transition, update, shape, found["decays"])
            for begin, end in ((0, 40), (40, 42), (42, TOKENS)):
                core.run(begin, end, 2)
            found.update(rows)
            stream.run = own

        def model(input_ids, positions):
            torch.ops.vllm.mamba_mixer2(projected, out, _encode_layer_name(NAME))

        engine._model = model
        engine.run(np.zeros(TOKENS, np.int32), {}, at_linear)
        tails, states = (each.cpu() for each in layer.kv_cache)
        near = {name: each.cpu() for name, each in found.items()}
        layouts = [[each.cpu().numpy().tolist() for each in run] for run in chunks]
    whole = recur(torch.zeros(before.shape), near, 0, TOKENS)
    errors = apart(states[1], whole), apart(states[2], whole), apart(near["composed"], recur(before, near, BEGIN, END))
    return len(waits), layouts, errors, apart(tails[2], tails[1].double())


def recur(state, rows, begin, end):
    """Returns the state after these tokens, in fp64: [heads, d_v, d_k]."""
    state, decays = state.double(), rows["decays"].double()
    k, v, steps = (rows[name].double() for name in ("k", "v", "beta"))
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    for t in range(begin, end):
        update = (steps[t][:, None] * v[t])[:, :, None] * k[t][:, None]
        state = (decays * steps[t]).exp()[:, None, None] * state + update
    return state


def apart(one, other):
    return float((one.double() - other).norm() / other.norm())


def test_a_layer_is_run_and_its_tuples_are_computed_on_the_device(shared_daemon):
    seed = random.randrange(1 << 30)
    waits, layouts, errors, tail = in_child(computed, None, shared_daemon, seed=seed)
    print(seed, waits, layouts, errors, tail)
    assert waits == 0 and tail == 0 and max(errors) <= 1e-5
    # Chunks end at multiples of 32 positions.
    assert [ends for ends, *_ in layouts] == [[0, 32, 64, 90], [0, 32, 40], [0, 2], [0, 22, 48]]
    assert all(last == [len(ends) - 2] and rows == [0] * (len(ends) - 1) for ends, last, rows in layouts)
