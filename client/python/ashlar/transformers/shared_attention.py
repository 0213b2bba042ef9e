# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values that several requests share in place (MEPIC).

Shared keys are rotated to slots of their pages, not to positions of the prompt. Rotations compose, so rotating a query
back by the difference gives the same scores as rotating the keys. Each span of shared rows, and the request's own rows,
are attended separately, and the outputs are merged by their log-sum-exp.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PREFIX = "ashlar_shared_"
_SERVED = ("sdpa", "eager")  # implementations of attention that can be extended by shared rows
_BLOCK = 256  # queries that are attended at once; bounds the memory for masks and partial outputs
# Arguments that change the scores, or which keys a query sees.
_UNSUPPORTED = ("position_bias", "s_aux", "sliding_window", "softcap")


class Span(NamedTuple):
    """Rows of consecutive tokens, in shared memory. Shape: [1, heads, tokens, dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    shift: int  # index into `SharedRows.shifts`


@dataclasses.dataclass(eq=False)
class SharedRows:
    """The spans of one attention layer of one request. Copies of the request's cache refer to the same object."""

    config: Any
    frequencies: torch.Tensor | None  # radians per position, fp64; None: keys are not rotated
    lease: Any = None  # keeps the pages until the last cache that refers to these rows is destroyed
    spans: list[Span] = dataclasses.field(default_factory=list)
    shifts: list[int] = dataclasses.field(default_factory=list)  # positions minus slots
    pages: dict[int, int] = dataclasses.field(default_factory=dict)  # address and bytes of each page that has a span
    tokens: int = 0
    attended: bool = False  # whether the model's attention has received these rows
    _turns: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines and sines of the shifts: [shifts, 1, 1, pairs]

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRows:
        return self

    def add(self, keys: torch.Tensor, values: torch.Tensor, shift: int) -> None:
        """`keys`, `values`: [tokens, heads, dim]. `shift`: position of a token minus the slot that its key has."""
        shift = 0 if self.frequencies is None else shift
        if shift not in self.shifts:
            self.shifts.append(shift)
            self._turns = None
        keys, values = (rows.transpose(0, 1).unsqueeze(0) for rows in (keys, values))
        self.spans.append(Span(keys, values, self.shifts.index(shift)))
        self.tokens += keys.shape[2]

    def queries(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Returns the query, [1, heads, tokens, dim], rotated back by each shift."""
        if self.frequencies is None:
            return [query] * len(self.shifts)
        if self._turns is None:
            angles = torch.tensor(self.shifts, dtype=torch.float64)[:, None] * self.frequencies
            self._turns = angles.cos().float()[:, None, None], angles.sin().float()[:, None, None]
        cos, sin = self._turns
        half = cos.shape[-1]
        first, second = query[..., :half], query[..., half : 2 * half]
        rest = query[..., 2 * half :].expand(len(self.shifts), -1, -1, -1)
        turned = torch.cat([first * cos + second * sin, second * cos - first * sin, rest], -1)
        return list(turned.split(1))


def check_implementation(model: Any) -> str:
    """Returns the name of the model's attention function. ValueError: shared rows cannot extend it."""
    own = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if not own.startswith(_PREFIX) and own not in _SERVED:
        raise ValueError(f"model.config._attn_implementation: {own}; shared_tokens needs one of {', '.join(_SERVED)}")
    return own


def implementation(model: Any) -> str:
    """Registers an attention function that extends the model's own by shared rows, and returns its name."""
    own = check_implementation(model)
    if own.startswith(_PREFIX):
        return own
    name = _PREFIX + own
    AttentionInterface.register(name, functools.partial(_forward, own))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


def is_active(config: Any) -> bool:
    return str(config._attn_implementation).startswith(_PREFIX)


def _own_function(own: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Returns the function that the module's model uses without shared rows."""
    scope = sys.modules[type(module).__module__]
    default = getattr(scope, "eager_attention_forward", None)
    functions = getattr(scope, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    function: Callable[..., Any] = functions.get(own, default)
    return function


def _forward(
    own: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shared: SharedRows | None = getattr(key, "ashlar_shared", None)
    if shared is None:
        result: tuple[torch.Tensor, torch.Tensor | None] = _own_function(own, module)(
            module, query, key, value, attention_mask, **options
        )
        return result
    given = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if given or options.get("dropout", 0.0) > 0:
        raise ValueError(f"{(given or ['dropout'])[0]}: not supported by shared attention; set shared_tokens to 0")
    if query.shape[0] != 1:
        raise ValueError(f"query: {query.shape[0]} sequences; a cache with shared rows has 1")
    shared.attended = True
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    output = attend(query, key, value, shared, scale)
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shared: SharedRows, scale: float
) -> torch.Tensor:
    """Attention of the last tokens of a sequence over shared rows, all of which they see, and over own rows, causally.

    `query`: [1, heads, tokens, dim], rotated to its positions. `keys`, `values`: own rows, [1, key heads, own tokens,
    dim]; the last ones are those of the query's tokens. Computed in float32: on CPUs without matrix instructions a
    single query over 16-bit rows takes several times longer than the conversion of the rows.
    """
    count = query.shape[2]
    before = keys.shape[2] - count
    blocks = []
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        block = query[:, :, begin:end].float()
        mask = None
        if count > 1:
            columns = torch.arange(before + end)
            hidden = columns[None, :] > torch.arange(before + begin, before + end)[:, None]
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        own = _part(block, keys[:, :, : before + end], values[:, :, : before + end], scale, mask)
        turned = shared.queries(block)
        parts = [own, *(_part(turned[span.shift], span.keys, span.values, scale) for span in shared.spans)]
        weights = torch.stack([sums for _, sums in parts]).softmax(0)
        blocks.append((torch.stack([output for output, _ in parts]) * weights.unsqueeze(-1)).sum(0))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output over these rows, [1, heads, tokens, dim], and the log-sum-exp of its scores, [1, heads,
    tokens]."""
    _, heads, count, dim = query.shape
    # The query heads of one key head are rows of one product, so that its keys are read once.
    group = heads // keys.shape[1]
    folded = query.reshape(1, keys.shape[1], group * count, dim)
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, keys.float(), values.float(), 0.0, False, attn_mask=mask, scale=scale
    )
    return output.reshape(1, heads, count, dim), sums.reshape(1, heads, count)
