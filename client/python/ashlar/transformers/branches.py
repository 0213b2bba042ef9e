# SPDX-License-Identifier: Apache-2.0
"""The depths inside a prompt at which its states are offered, besides its end and the depths that the daemon asks for.
Later prompts are likely to diverge there."""

from __future__ import annotations

from typing import Any

import numpy as np

from ashlar.model import Attention, Linear, Model
from ashlar.request import Plan, StepKind

_BLOCK_TOKENS = 256  # tokens per block of keys and values; tokens after the last whole block are stored with each state
# The last tokens of a prompt, which a chat template may rewrite in the next turn, such as `<think>`.
REWRITTEN_TOKENS = 8
_HEADER_TOKENS = 16  # largest length of a chat template's header before an answer
_MOST = 56  # depths of one commit, which may offer 64
_Tokens = np.ndarray[Any, np.dtype[np.int32]]


def _state_tokens(model: Model) -> int:
    """Returns the number of tokens whose keys and values take as many bytes as a prompt's states."""
    states, keys = 0, 0
    for layer in model.layers:
        if isinstance(layer, Attention):
            keys += layer.kv_heads * (layer.key_dim + layer.value_dim) * (4 if layer.dtype.name == "F32" else 2)
        elif isinstance(layer, Linear):
            states += (4 if layer.state_dtype.name == "F32" else 2) * (
                layer.value_heads * layer.d_k * layer.d_v + layer.conv_channels * max(0, layer.conv_kernel - 1)
            )
    return -(-states // max(1, keys))


def whole_blocks(model: Model, begin: int, end: int) -> list[int]:
    """Returns depths in (begin, end) that cost no state and store no key twice: a model of attention alone resumes at
    any depth."""
    if any(not isinstance(layer, Attention) for layer in model.layers):
        return []
    depths = list(range((begin // _BLOCK_TOKENS + 1) * _BLOCK_TOKENS, end, _BLOCK_TOKENS))
    return depths[:: -(-len(depths) // _MOST)] if depths else []


def branch(model: Model, plan: Plan, tokens: _Tokens, end: int, step: int, ends_of_messages: set[int]) -> int | None:
    """Returns the depth before `end` at which the next prompt most likely diverges from this one. Returns None if a
    state there is not worth its cost: there are whole blocks, the daemon asks for another depth, or little is computed.

    This is the beginning of the last message, found by the tokens that end messages, if it is in the second half.
    Otherwise it is one sixteenth before the end, the typical length of a question after a document, and at least `step`
    tokens.
    """
    begin = plan.steps[-1].begin if plan.steps else 0
    asked = any(step.capture and step.end < end for step in plan.steps)
    if (
        whole_blocks(model, begin, end)
        or asked
        or not plan.exact
        or plan.segments
        or end - begin < max(2 * step, _state_tokens(model))
    ):
        return None
    depth = (end - max(step, end // 16)) // step * step
    begins = [at + 1 for at in np.flatnonzero(np.isin(tokens, list(ends_of_messages))).tolist()]
    while begins and len(tokens) - begins[-1] <= _HEADER_TOKENS:
        begins.pop()  # the header of the answer
    if begins and begins[-1] > end // 2:
        depth = begins[-1]
    return depth if begin < depth < end else None


def computed_from(plan: Plan) -> int:
    """Returns the depth after which a plan takes nothing from the cache."""
    cached = [step.end for step in plan.steps if step.kind is not StepKind.COMPUTE]
    return max(cached, default=0)
