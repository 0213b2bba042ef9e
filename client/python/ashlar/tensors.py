# SPDX-License-Identifier: Apache-2.0
"""An engine's operations on cached segments, as torch operations on the device of its tensors.

`segment_tuple` computes a segment's tuple from the inputs of a layer's recurrence. `joined` composes the tuples of two
parts of a segment. `compose` applies a tuple to running states: it computes in float32 and writes in the type of the
engine's tensor. `scaled_half` makes the states of tuples in float16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

import ashlar

MATRIX = (ashlar.Family.DELTANET, ashlar.Family.GDN, ashlar.Family.KDA)  # [heads, d_k, d_k], in the state's order
SCALAR = (ashlar.Family.RETNET, ashlar.Family.LIGHTNING, ashlar.Family.MAMBA2)  # logarithms, [heads]

SEGMENT_TYPES = {"float16": ashlar.DType.F16, "float32": ashlar.DType.F32}  # types of tuples
EPSILON = {"float16": 3e-4, "float32": 1e-6}  # largest error of transitions in these types

_CHUNK, _CHANNEL_CHUNK = 64, 16  # tokens per chunk; the second is for decays per channel
_CHUNKS = 16  # number of chunks whose maps are in memory at once


def segment_tuple(
    layer: ashlar.Linear, rows: Mapping[str, torch.Tensor], decays: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Returns the state from zero and the transition of consecutive tokens, as in `ashlar.LinearTensors`, and for delta
    rules also the product of the decays; in float32, for all families but GLA.

    `rows`: k, v, g and beta as for `delta_tuple`. RetNet, Lightning: k and v, [tokens, heads, dim]. Mamba-2: k,
    [tokens, groups of heads, d_k], v, [tokens, heads, d_v], beta (dt), [tokens, heads]. Mamba-1: k, [tokens, d_k], v and
    beta (dt), [tokens, channels]. `decays`: the layer's decay table, in the shape of that field, on the device of the
    rows.
    """
    k, v = rows["k"], rows["v"]
    if layer.family in MATRIX:
        return delta_tuple(k.float(), v.float(), rows["g"], rows["beta"], layer.order)
    assert decays is not None
    if layer.family in SCALAR:
        steps = rows["beta"] if "beta" in rows else torch.ones_like(v[:, :, 0])
        state, sums = _scan(k, v, steps[:, :, None], decays[:, None, None], _CHUNKS * _CHUNK)
        transition = decays * sums[:, 0]
    else:
        v, steps = (each.unflatten(1, (layer.value_heads, -1)) for each in (v, rows["beta"]))
        state, transition = _scan(k[:, None], v, steps, decays, _CHUNK)
    return (state.transpose(1, 2) if layer.order is ashlar.StateOrder.VALUE_FIRST else state).contiguous(), transition


def _scan(
    k: torch.Tensor, v: torch.Tensor, steps: torch.Tensor, decays: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state, [heads, d_k, d_v], and the sums of the steps, in float32: S ← e^(decays · step) S + step k vᵀ.

    k: [tokens, groups of heads, d_k]; v: [tokens, heads, d_v]; steps: [tokens, heads, d_v or 1]; decays:
    [heads, d_k or 1, d_v or 1]. `chunk`: tokens whose float32 rows are in memory at once.
    """
    groups, heads = k.shape[1], v.shape[1]
    state = k.new_zeros(heads, k.shape[2], v.shape[2], dtype=torch.float32)
    total = torch.zeros_like(steps[0], dtype=torch.float32)
    for part in zip(*(each.split(chunk) for each in (k, v, steps))):
        k, v, steps = (each.float() for each in part)
        sums = steps.flip(0).cumsum(0).flip(0)  # from each token to the last
        later = torch.nn.functional.pad(sums[1:], (0, 0, 0, 0, 0, 1))
        left = (decays * later[:, :, None]).exp() * (steps * v)[:, :, None]
        update = torch.einsum("tghkv,tgk->ghkv", left.unflatten(1, (groups, -1)), k)
        state = state * (decays * sums[0, :, None]).exp() + update.flatten(0, 1)
        total = total + sums[0]
    return state, total


def delta_tuple(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, order: ashlar.StateOrder
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the state from zero, the transition and the product of the decays, [heads, d_k], of consecutive tokens of
    a gated delta rule, in float32: S ← e^g (1 − beta k kᵀ) S + beta k vᵀ.

    k: [tokens, key heads, d_k], as the rule uses them; v: [tokens, heads, d_v]; g and beta: [tokens, heads]. KDA's g:
    [tokens, heads, d_k], one decay for each row of S.
    """
    d_k, chunk = k.shape[2], _CHUNK if g.dim() == 2 else _CHANNEL_CHUNK
    both = torch.nn.functional.pad(torch.diag_embed(torch.ones_like(k[0, :1]).expand(v.shape[1], d_k)), (0, v.shape[2]))
    both = both.float()  # the transition and the state, side by side: [heads, d_k, d_k + d_v]
    for rows in zip(*(each.split(_CHUNKS * chunk) for each in (k, v, g, beta))):
        for each, update in zip(*_maps(chunk, *rows)):
            both = each @ both + torch.nn.functional.pad(update, (d_k, 0))
    transition, state = both.split([d_k, v.shape[2]], 2)
    if order is ashlar.StateOrder.VALUE_FIRST:
        transition, state = transition.transpose(1, 2), state.transpose(1, 2)
    decay = g.float().sum(0).exp().view(v.shape[1], -1).expand(-1, d_k)
    return state.contiguous(), transition.contiguous(), decay.contiguous()


def _maps(
    chunk: int, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what each chunk of tokens does to a state, [chunks, heads, d_k, …]: with c the sum of its g, and W and U
    from a triangular system, S ← (e^c − Kᵀ W) S + Kᵀ U."""
    heads, short = v.shape[1], -len(v) % chunk

    def by_chunk(rows: torch.Tensor) -> torch.Tensor:  # [chunks, heads, tokens, dim]
        padded = torch.nn.functional.pad(rows.float(), (0, 0) * (rows.dim() - 1) + (0, short))
        return padded.view(-1, chunk, heads, padded.numel() // len(padded) // heads).transpose(1, 2)

    k = by_chunk(k.repeat_interleave(heads // k.shape[1], 1))
    v, beta, sums = by_chunk(v), by_chunk(beta), by_chunk(g).cumsum(2)
    if sums.shape[3] == 1:
        below = (k @ k.transpose(2, 3)) * (sums - sums.transpose(2, 3)).tril(-1).exp()
    else:
        apart = (sums[:, :, :, None] - sums[:, :, None]).clamp(max=0).exp()
        below = (k[:, :, :, None] * k[:, :, None] * apart).sum(4)
    below = below.tril(-1) * beta
    right = torch.cat([k * sums.exp(), v], 3) * beta
    solved = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[3], v.shape[3]], 3)
    last = sums[:, :, -1:]
    k_left = (k * (last - sums).exp()).transpose(2, 3)
    return torch.diag_embed(last[:, :, 0].exp().expand(-1, -1, k.shape[3])) - k_left @ w, k_left @ u


def compose(
    state: torch.Tensor,
    transition: torch.Tensor,
    update: torch.Tensor,
    layer: ashlar.Linear,
    decays: torch.Tensor | None = None,
) -> None:
    """S ← T S + S_segment, in place. `state` and `update`: [heads, d_k, d_v], or [heads, d_v, d_k] by `layer.order`.

    `transition`: as in `ashlar.LinearTensors` and docs/formats.md, on the state's device. `decays`: Mamba-1's decay
    table on that device, [heads, d_k, d_v]; None: it is copied there.
    """
    value_first = layer.order is ashlar.StateOrder.VALUE_FIRST
    running, transition = state.float(), transition.float()
    if layer.family in MATRIX:
        carried = running @ transition if value_first else transition @ running
    elif layer.family in SCALAR:
        carried = transition.exp()[:, None, None] * running
    elif layer.family is ashlar.Family.GLA:
        factors = transition.exp()
        carried = running * (factors[:, None, :] if value_first else factors[:, :, None])
    else:  # Mamba-1: e^(A[d_k, d_v] Σ dt[d_v])
        if decays is None:
            assert layer.decay_table is not None
            decays = torch.tensor(list(layer.decay_table), dtype=torch.float32, device=state.device)
        factors = (decays.view(layer.value_heads, layer.d_k, layer.d_v) * transition[:, None, :]).exp()
        factors = factors.masked_fill(transition.isinf()[:, None, :], 0.0)  # covers A = 0, where the product is NaN
        carried = running * (factors.transpose(1, 2) if value_first else factors)
    state.copy_(carried + update.float())


def joined(
    layer: ashlar.Linear,
    first: tuple[torch.Tensor, ...],
    second: tuple[torch.Tensor, ...],
    decays: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the tuple of two consecutive parts: (T₂ S₁ + S₂, T₂ T₁, and the product of the decays), as
    `segment_tuple` does. Arguments on one device; `decays`: as for `segment_tuple`."""
    (state, transition, *decay), (update, after, *later) = first, second
    state = state.clone()
    compose(state, after, update, layer, decays)
    if layer.family not in MATRIX:  # logarithms, or sums of dt
        return state, transition + after
    value_first = layer.order is ashlar.StateOrder.VALUE_FIRST  # its transitions are transposed
    whole = transition @ after if value_first else after @ transition
    return state, whole, *(one * other for one, other in zip(decay, later))


def scaled_half(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a state in float16, and exponents, int32, [heads]: state ≈ half × 2^exponent, for a layer with
    `DType.F16`. `state`: [heads, …], of any floating type.

    States of layers that do not erase are unbounded. Scaling by powers of two keeps all 11 bits of each head.
    """
    largest = state.float().abs().flatten(1).amax(1)
    exponents = torch.frexp(largest).exponent.to(torch.int32)
    return torch.ldexp(state.float(), -exponents[:, None, None]).half(), exponents
