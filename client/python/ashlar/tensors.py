# SPDX-License-Identifier: Apache-2.0
"""An engine's operations on cached segments, as torch operations on the device of its tensors.

`delta_tuple` computes a segment's tuple from the inputs of a gated delta rule. `compose` applies a tuple to running
states: it computes in float32 and writes in the type of the engine's tensor. `scaled_half` makes the states of tuples
in float16.
"""

from __future__ import annotations

import torch

import ashlar

MATRIX = (ashlar.Family.DELTANET, ashlar.Family.GDN, ashlar.Family.KDA)  # [heads, d_k, d_k], in the state's order
SCALAR = (ashlar.Family.RETNET, ashlar.Family.LIGHTNING, ashlar.Family.MAMBA2)  # logarithms, [heads]


_CHUNK = 64  # tokens
_PIECE = 1024  # tokens whose maps are in memory at once


def delta_tuple(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, order: ashlar.StateOrder
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the state from zero, the transition and the product of the decays, [heads, d_k], of consecutive tokens of
    a gated delta rule, in float32: S ← e^g (1 − beta k kᵀ) S + beta k vᵀ.

    k: [tokens, key heads, d_k], as the rule uses them; v: [tokens, heads, d_v]; g and beta: [tokens, heads].
    """
    d_k = k.shape[2]
    both = torch.nn.functional.pad(torch.diag_embed(torch.ones_like(k[0, :1]).expand(v.shape[1], d_k)), (0, v.shape[2]))
    both = both.float()  # the transition and the state, side by side: [heads, d_k, d_k + d_v]
    for rows in zip(*(each.split(_PIECE) for each in (k, v, g, beta))):
        for each, update in zip(*_maps(*rows)):
            both = each @ both + torch.nn.functional.pad(update, (d_k, 0))
    transition, state = both.split([d_k, v.shape[2]], 2)
    if order is ashlar.StateOrder.VALUE_FIRST:
        transition, state = transition.transpose(1, 2), state.transpose(1, 2)
    decay = g.float().sum(0).exp()[:, None].expand(-1, d_k)
    return state.contiguous(), transition.contiguous(), decay.contiguous()


def _maps(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what each chunk of tokens does to a state, [chunks, heads, d_k, …]: with c the sum of its g, and W and U
    from a triangular system, S ← (e^c − Kᵀ W) S + Kᵀ U."""
    heads, short = v.shape[1], -len(v) % _CHUNK

    def by_chunk(rows: torch.Tensor) -> torch.Tensor:  # [chunks, heads, tokens, dim]
        padded = torch.nn.functional.pad(rows.float(), (0, 0) * (rows.dim() - 1) + (0, short))
        return padded.view(-1, _CHUNK, heads, padded.numel() // len(padded) // heads).transpose(1, 2)

    k = by_chunk(k.repeat_interleave(heads // k.shape[1], 1))
    v, beta, sums = by_chunk(v), by_chunk(beta), by_chunk(g).cumsum(2)
    below = (k @ k.transpose(2, 3)).tril(-1) * (sums - sums.transpose(2, 3)).tril(-1).exp() * beta
    right = torch.cat([k * sums.exp(), v], 3) * beta
    solved = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[3], v.shape[3]], 3)
    last = sums[:, :, -1:]
    k_left = (k * (last - sums).exp()).transpose(2, 3)
    return torch.diag_embed(last[:, :, 0].exp().expand(-1, -1, k.shape[3])) - k_left @ w, k_left @ u


def compose(state: torch.Tensor, transition: torch.Tensor, update: torch.Tensor, layer: ashlar.Linear) -> None:
    """S ← T S + S_segment, in place. `state` and `update`: [heads, d_k, d_v], or [heads, d_v, d_k] by `layer.order`.

    `transition`: as in `ashlar.LinearTensors` and docs/formats.md, on the state's device.
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
        assert layer.decay_table is not None
        table = torch.tensor(list(layer.decay_table), dtype=torch.float32, device=state.device)
        factors = (table.view(layer.value_heads, layer.d_k, layer.d_v) * transition[:, None, :]).exp()
        factors = factors.masked_fill(transition.isinf()[:, None, :], 0.0)  # covers A = 0, where the product is NaN
        carried = running * (factors.transpose(1, 2) if value_first else factors)
    state.copy_(carried + update.float())


def scaled_half(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a state in float16, and exponents, int32, [heads]: state ≈ half × 2^exponent, for a layer with
    `DType.F16`. `state`: [heads, …], of any floating type.

    States of layers that do not erase are unbounded. Scaling by powers of two keeps all 11 bits of each head.
    """
    largest = state.float().abs().flatten(1).amax(1)
    exponents = torch.frexp(largest).exponent.to(torch.int32)
    return torch.ldexp(state.float(), -exponents[:, None, None]).half(), exponents
