# SPDX-License-Identifier: Apache-2.0
"""States of Mamba-2 in the middle of a step, which vLLM 0.32 keeps only on a GPU.

With prefix caching, Mamba-2 layers ask the scan for the states after all chunks. The CPU scan returns only the last
one, so the layer fails. The kernel that writes a state to its block also needs a GPU.
"""

import torch
import vllm.model_executor.layers.mamba.mamba_mixer2 as mixer

_scan = mixer.mamba_chunk_scan_combined_varlen


def _scan_chunks(
    *rows, return_intermediate_states=False, cu_seqlens, cu_chunk_seqlens, initial_states, seq_idx, out, **rest
):
    """Runs the scan chunk by chunk if the states after all chunks are requested."""
    if not return_intermediate_states:
        return _scan(
            *rows, cu_seqlens=cu_seqlens, cu_chunk_seqlens=cu_chunk_seqlens, initial_states=initial_states, seq_idx=seq_idx,
            out=out, **rest,
        )  # fmt: skip
    x, dt, decays, keys, queries = rows
    found, kept, rest["state_dtype"] = [], rest["state_dtype"], torch.float32
    for chunk, sequence in enumerate(seq_idx.tolist()):
        begin, end = cu_chunk_seqlens[chunk : chunk + 2].tolist()
        if chunk > 0 and seq_idx[chunk - 1] == sequence:
            before = found[-1]
        else:
            before = None if initial_states is None else initial_states[sequence : sequence + 1]
        part = slice(begin, end)
        found.append(
            _scan(
                x[part],
                dt[part],
                decays,
                keys[part],
                queries[part],
                cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32),
                cu_chunk_seqlens=None,
                initial_states=before,
                seq_idx=seq_idx[:1],
                out=out[part],
                **rest,
            )  # fmt: skip
        )
    return torch.cat(found).to(kept)


def _store(checkpoint, chunks, x, conv_state, chunk_states, ssm_state, query_start_loc, *, state_len):
    for row, offset in enumerate(checkpoint.offsets):
        if offset > 0:
            block, end = checkpoint.state_indices[row], int(query_start_loc[row]) + offset
            conv_state[block] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunks[row]]


def run_on_cpu():
    mixer.mamba_chunk_scan_combined_varlen = _scan_chunks
    mixer.store_prefill_checkpoint = _store
