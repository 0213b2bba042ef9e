# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernels that copy states of drafts between blocks, in Python: they have no version for CPUs.

They get the arguments of the kernels, addresses included, and follow their code.
"""

import ctypes

import vllm.v1.worker.mamba_utils as mamba_utils


class Kernel:
    """Calls a function for each pair of request and state: `kernel[requests, states, tiles](*args, **named)`."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        def run(*args, **named):
            for state in range(grid[1]):
                for row in range(grid[0]):
                    self._function(row, state, *args, **named)

        return run


def _copy(state, row, source, target, bias, tables, table_stride, bases, strides, sizes, inner, widths, groups, rows,
          row_strides, dim_first):  # fmt: skip
    def block(column):
        address = int(tables[int(groups[state])]) + 4 * (row * int(table_stride) + column)
        return ctypes.c_int32.from_address(address).value

    base, stride, width = int(bases[state]), int(strides[state]), int(widths[state])
    into = base + block(target) * stride
    if width == 0:
        ctypes.memmove(into, base + block(source + bias) * stride, int(inner[state]) * int(sizes[state]))
        return
    origin = base + block(source) * stride
    if not dim_first:
        token = int(inner[state]) * int(sizes[state])
        ctypes.memmove(into, origin + bias * token, (width - bias) * token)
        return
    for each in range(int(rows[state])):
        offset = each * int(row_strides[state])
        count = (width - bias) * int(sizes[state])
        ctypes.memmove(into + offset, origin + offset + bias * int(sizes[state]), count)


def _postprocess(row, state, accepted, columns, scheduled, computed, drafts, tables, table_stride, bases, strides, sizes,
                 inner, widths, groups, rows, row_strides, accepted_out, mapping, count, *, block_size,
                 CONV_STATE_DIM_FIRST, **_):  # fmt: skip
    running = int(computed[row]) + int(scheduled[row]) - int(drafts[row])
    end = (running + int(accepted[row]) - 1) // block_size * block_size
    if end < running:
        return
    bias, source, target = end - running, int(columns[row]), end // block_size - 1
    if source == target and state == 0:
        accepted_out[row] = 1
    if source != target or bias > 0:
        _copy(state, row, source, target, bias, tables, table_stride, bases, strides, sizes, inner, widths, groups,
              rows, row_strides, CONV_STATE_DIM_FIRST)  # fmt: skip


def _precopy(row, state, columns, sources, biases, tables, table_stride, bases, strides, sizes, inner, widths, groups,
             rows, row_strides, mapping, count, *, CONV_STATE_DIM_FIRST, **_):  # fmt: skip
    source, target = int(sources[row]), int(columns[row])
    if source >= 0 and source != target:
        _copy(state, row, source, target, int(biases[row]), tables, table_stride, bases, strides, sizes, inner, widths,
              groups, rows, row_strides, CONV_STATE_DIM_FIRST)  # fmt: skip


def _memcpy(sources, targets, sizes):
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist()):
        ctypes.memmove(target, source, size)


def run_on_cpu():
    mamba_utils.postprocess_mamba_fused_kernel = Kernel(_postprocess)
    mamba_utils.precopy_mamba_align_fused_kernel = Kernel(_precopy)
    mamba_utils.batch_memcpy = _memcpy
