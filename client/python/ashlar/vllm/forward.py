# SPDX-License-Identifier: Apache-2.0
"""The engine's own model, run by the connector on tokens of one request, between two steps of the engine.

vLLM hands a connector its caches, and no model. The model is found as the owner of a layer that vLLM names
(`static_forward_context`), and its forward is called as the runner calls it: with a forward context that says where the
tokens' keys lie. Two of its operators are seen on the way: the core of a linear layer, whose tokens are given to
`at_linear`, and the writing of keys and values, which `at_keys` may look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.utils.torch_utils import _encode_layer_name, _resolve_layer_name
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

import ashlar
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.model import Described
from ashlar.vllm.reloads import model_of

AtKeys = Callable[[str, torch.Tensor, torch.Tensor], None]
_TRIED = (1, 37, 1000)  # positions at which the model's table of rotations is held to the frequencies


class Core:
    """The core of one linear layer: what it was called with, rows of which it computes from a state in a block."""

    def __init__(self, name: str, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        self.name, self._mixed, self._b, self._a, self._out = name, mixed, b, a, out

    def run(self, begin: int, end: int, block: int, fresh: bool) -> None:
        """Computes rows [begin, end) by the engine's kernels; the block's state and tail are gone on from, or zero."""
        count = end - begin
        loc = torch.tensor([0, count], dtype=torch.int32)
        get_forward_context().attn_metadata[self.name] = GDNAttentionMetadata(
            num_prefills=1,
            num_prefill_tokens=count,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=count,
            has_initial_state=torch.tensor([not fresh]),
            non_spec_query_start_loc=loc,
            non_spec_state_indices_tensor=torch.tensor([block], dtype=torch.int32),
        )
        rows = (each[begin:end].contiguous() for each in (self._mixed, self._b, self._a))
        out = torch.zeros_like(self._out[begin:end])
        torch.ops.vllm.cpu_gdn_attention_core(*rows, out, _encode_layer_name(self.name))
        self._out[begin:end] = out

    def inputs_before(self, end: int, taps: int) -> torch.Tensor:
        """[taps, channels]: what the convolution took of the last rows before `end`; zeros before the first."""
        rows = self._mixed[max(0, end - taps) : end]
        return torch.nn.functional.pad(rows, (0, 0, taps - len(rows), 0)).contiguous()

    def run_seen(self, begin: int, end: int, block: int, fresh: bool) -> dict[str, torch.Tensor]:
        """As `run`. Returns what the recurrence took: rows of q and k before they are normalised, v, g and beta."""
        layers = get_forward_context().no_compile_layers
        layer = layers[self.name]
        seen = _Seen(layer)
        layers[self.name] = seen
        try:
            self.run(begin, end, block, fresh)
        finally:
            layers[self.name] = layer
        g, beta = torch.ops._C.fused_gdn_gating_cpu(
            layer.A_log, self._a[begin:end].contiguous(), self._b[begin:end].contiguous(), layer.dt_bias
        )
        q, k, v = (row.reshape(end - begin, *row.shape[-2:]) for row in seen.rows)
        found = {"q": q, "k": k, "v": v, "g": g.reshape(end - begin, -1), "beta": beta.reshape(end - begin, -1)}
        return {name: row.float().contiguous() for name, row in found.items()}


AtLinear = Callable[[Core], None]


class _Seen:
    """A linear layer that remembers the rows behind its convolution."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def rearrange_mixed_qkv(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.rows = self._layer.rearrange_mixed_qkv(mixed)
        return self.rows


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, at_linear: AtLinear, at_keys: AtKeys | None) -> None:
        super().__init__()
        self._at_linear, self._at_keys = at_linear, at_keys
        self._core = torch.ops.vllm.cpu_gdn_attention_core.default
        self._keys = torch.ops.vllm.unified_kv_cache_update.default

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._core:
            mixed, b, a, out, name = args
            self._at_linear(Core(_resolve_layer_name(name), mixed, b, a, out))
            return None
        if func is self._keys and self._at_keys is not None:
            key, value, name = args
            self._at_keys(_resolve_layer_name(name), key, value)
        return func(*args, **(kwargs or {}))


class EngineModel:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, described: Described) -> None:
        """Raises Unsupported."""
        self._config, self._block = vllm_config, described.block
        layers = vllm_config.compilation_config.static_forward_context
        self._attention = {name: layers[name] for _, name in described.attention}
        self._model = model_of(next(iter(self._attention.values())))
        group = kv_cache_config.kv_cache_groups[described.attention_group]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        names = list(self._attention)
        spec = group.kv_cache_spec if specs is None else specs[names[0]]
        builder = self._attention[names[0]].get_attn_backend().get_builder_cls()
        with set_current_vllm_config(vllm_config):
            self._builder = builder(spec, names, vllm_config, torch.device("cpu"))

    def rope(self) -> ashlar.Rope:
        """How keys turn, by the model's own table. Raises Unsupported: not by fixed frequencies."""
        found = [each.rotary_emb for each in self._model.modules() if hasattr(each, "rotary_emb")]
        if not found:
            raise Unsupported("segments: the model has no rotary embedding")
        rotary = found[0]
        if getattr(rotary, "rotary_dim", 0) % 2 or not hasattr(rotary, "_compute_inv_freq"):
            raise Unsupported(f"segments: rotary embedding {type(rotary).__name__} is not supported")
        frequencies = rotary._compute_inv_freq(rotary.base).double()
        for position in (each for each in _TRIED if each < len(rotary.cos_sin_cache)):
            row = rotary.cos_sin_cache[position].double()
            wanted = torch.cat([(frequencies * position).cos(), (frequencies * position).sin()])
            if row.shape != wanted.shape or (row - wanted).abs().max() > 8e-3:  # the table may be of 8 bits
                raise Unsupported(f"segments: {type(rotary).__name__} does not rotate keys by fixed frequencies")
        style = ashlar.RopeStyle.HALF_SPLIT if rotary.is_neox_style else ashlar.RopeStyle.INTERLEAVED
        return ashlar.Rope(frequencies.tolist(), style)

    def slots(self, pages: Sequence[int], begin: int, end: int) -> torch.Tensor:
        positions = np.arange(begin, end)
        return torch.from_numpy(
            np.asarray(pages, np.int64)[positions // self._block] * self._block + positions % self._block
        )

    def put_keys(self, name: str, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes keys and values, [tokens, heads, dim], by the engine's own writer: the layout is its own."""
        layer = self._attention[name]
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def run(
        self,
        tokens: npt.NDArray[np.int32],
        runs: Sequence[tuple[int, int]],
        pages: Sequence[int],
        at_linear: AtLinear,
        at_keys: AtKeys | None = None,
    ) -> None:
        """Runs the positions of `runs` through all layers in one batch. Each sees the keys of all positions before it.

        `pages`: the request's attention blocks, in which keys of positions that are not run stand already.
        """
        positions = np.concatenate([np.arange(begin, end) for begin, end in runs])
        slots = torch.cat([self.slots(pages, begin, end) for begin, end in runs])
        lengths = [end - begin for begin, end in runs]
        start = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)
        ends = torch.tensor([end for _, end in runs], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=ends,
            num_reqs=len(runs),
            num_actual_tokens=len(positions),
            max_query_len=max(lengths),
            max_seq_len=int(ends.max()),
            block_table_tensor=torch.tensor([list(pages)] * len(runs), dtype=torch.int32),
            slot_mapping=slots,
        )
        metadata = self._builder.build(0, common)
        where = torch.from_numpy(positions)
        if self._config.model_config.uses_mrope:
            where = where.expand(3, -1)
        ids = torch.from_numpy(tokens[positions].astype(np.int64))
        with (
            torch.inference_mode(),
            set_forward_context(
                {name: metadata for name in self._attention},
                self._config,
                num_tokens=len(positions),
                slot_mapping={name: slots for name in self._attention},
                skip_compiled=True,
            ),
            _Watch(at_linear, at_keys),
        ):
            context = get_forward_context()
            context.no_compile_layers = dict(context.no_compile_layers)
            self._model(input_ids=ids, positions=where)
