# SPDX-License-Identifier: Apache-2.0
"""Runs the engine's own model on the tokens of one request, between two steps of the engine.

vLLM gives a connector its caches, but not the model. The model is found as the owner of a layer that vLLM names
(`static_forward_context`). Its forward is called as the runner calls it, with a forward context that says where the
tokens' keys are. Two parts of it are intercepted: the core of a linear layer, an operator or a method (method_cores.py),
whose tokens are passed to `at_linear`, and the writing of keys and values, which `at_keys` may observe. Rows of MLA are
read from the cache, because some layers write them by a kernel that also attends.

The metadata of both come from the engine's own builders, on the device of the engine's caches. The forward is neither
compiled nor part of a CUDA graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.utils.torch_utils import _encode_layer_name, _resolve_layer_name
from vllm.v1.attention.backend import CommonAttentionMetadata

import ashlar
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.method_cores import decays_of, intercepted, rotary_of, seen_calls
from ashlar.vllm.model import Described
from ashlar.vllm.ranks import Ranks
from ashlar.vllm.reloads import model_of

AtKeys = Callable[[str, torch.Tensor, torch.Tensor], None]
MetadataOf = Callable[[str, int, int, int], Any]  # by layer, first and last row, and block
# Attention back ends whose metadata a run of one prompt can get.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
MLA_BACKENDS = ("CPU_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA")
_TABLE_TOKENS = 128  # the tokens of a table of blocks are a multiple of it, as in vLLM
_TRIED = (1, 37, 1000)  # positions at which rotations are compared with the frequencies
_TRIED_TOKENS = 4
_TOLERANCE = 5e-2  # relative; bf16 keys have errors of about 5e-3


class Core(Protocol):
    """The core of one linear layer, with its arguments. It can compute ranges of rows from the state in a block."""

    name: str
    normalized: bool  # whether `run_seen` returns keys with the norms that the recurrence uses

    def run(self, begin: int, end: int, block: int) -> None:
        """Computes rows [begin, end) by the engine's kernels: from zero if the first one has position 0, else from the
        block's state and tail."""

    def inputs(self) -> torch.Tensor:
        """Returns the convolution's inputs, [tokens, channels]. They are valid until `at_linear` returns."""

    def run_seen(self, count: int, block: int) -> dict[str, torch.Tensor]:
        """Like `run` of the first rows. Returns the inputs of the recurrence, as `Cache.compute_alone` takes them, or
        as `tensors.segment_tuple` does if they are normalized."""


class _DeltaNet:
    """vLLM's operators for CPUs and for GPUs take the same arguments: mixed q, k and v, then b, a, the output and a
    name."""

    def __init__(self, operator: Any, arguments: Sequence[Any], metadata: MetadataOf) -> None:
        """`metadata`: the engine's metadata of a layer's rows."""
        *self._rows, self._out, name = arguments
        self.name, self._operator, self._metadata = _resolve_layer_name(name), operator, metadata
        self.normalized = operator in _operators("qwen_gdn_attention_core")

    def run(self, begin: int, end: int, block: int) -> None:
        get_forward_context().attn_metadata[self.name] = self._metadata(self.name, begin, end, block)
        rows = (each[begin:end].contiguous() for each in self._rows)
        out = torch.zeros_like(self._out[begin:end])
        self._operator(*rows, out, _encode_layer_name(self.name))
        self._out[begin:end] = out

    def inputs(self) -> torch.Tensor:
        return self._rows[0]

    def run_seen(self, count: int, block: int) -> dict[str, torch.Tensor]:
        """Returns rows of q and k, of v, g and beta."""
        layer = get_forward_context().no_compile_layers[self.name]
        with _rows_of_chunks(layer) if self.normalized else self._rows_of_cpus(layer, count) as seen:
            self.run(0, count, block)
        rows = {name: row.reshape(count, *row.shape[2:]) for name, row in seen.items()}
        return rows if self.normalized else {name: row.float().contiguous() for name, row in rows.items()}

    @contextlib.contextmanager
    def _rows_of_cpus(self, layer: Any, count: int) -> Iterator[dict[str, torch.Tensor]]:
        """Records the rows after the convolution, before the kernel normalizes q and k."""
        rows: dict[str, torch.Tensor] = {}
        layers, seen = get_forward_context().no_compile_layers, _Seen(layer)
        layers[self.name] = seen
        try:
            yield rows
        finally:
            layers[self.name] = layer
        b, a = (each[:count].contiguous() for each in self._rows[1:])
        g, beta = torch.ops._C.fused_gdn_gating_cpu(layer.A_log, a, b, layer.dt_bias)
        q, k, v = seen.rows
        rows |= {"q": q, "k": k, "v": v, "g": g.reshape(1, count, -1), "beta": beta.reshape(1, count, -1)}


@contextlib.contextmanager
def _rows_of_chunks(layer: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Records what a GPU's kernel for prompts gets: FLA's, FlashInfer's or another one, all of which take normalized
    keys."""
    rows: dict[str, torch.Tensor] = {}

    def see(module: Any, args: Any, given: dict[str, Any]) -> None:
        rows.update({name: given[name] for name in ("q", "k", "v", "g", "beta")})

    hook = layer.chunk_gated_delta_rule.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def _operators(*names: str) -> list[Any]:
    """Returns vLLM's operators of these names. vLLM registers most of them when it loads a model that needs them."""
    found = (getattr(torch.ops.vllm, name, None) for name in names)
    return [each.default for each in found if each is not None]


class _Mamba2:
    normalized = True  # its keys have no norm

    def __init__(self, name: str, projected: torch.Tensor, out: torch.Tensor, metadata: MetadataOf) -> None:
        self.name, self._projected, self._out, self._metadata = name, projected, out, metadata
        self._layer = get_forward_context().no_compile_layers[name]

    def run(self, begin: int, end: int, block: int) -> None:
        get_forward_context().attn_metadata[self.name] = self._metadata(self.name, begin, end, block)
        out = torch.zeros_like(self._out[begin:end])
        self._layer.conv_ssm_forward(projected_states=self._projected[begin:end].contiguous(), output=out)
        self._out[begin:end] = out

    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the convolution's inputs and the steps' inputs."""
        layer = self._layer
        sizes = [layer.tped_conv_size, layer.tped_dt_size]
        inputs, steps = self._projected[..., layer.tped_intermediate_size :].split(sizes, -1)
        return inputs, steps

    def inputs(self) -> torch.Tensor:
        return self._split()[0]

    def run_seen(self, count: int, block: int) -> dict[str, torch.Tensor]:
        """Returns rows of k (B), v (x) and beta (the steps)."""
        layer = self._layer
        with seen_calls(layer, "split_hidden_states_B_C_fn") as split:
            self.run(0, count, block)
        (((v, k, _), _),) = split
        steps = torch.nn.functional.softplus(self._split()[1][:count].float() + layer.dt_bias.float())
        return {
            "k": k.unflatten(1, (-1, layer.ssm_state_size)),
            "v": v.unflatten(1, (-1, layer.head_dim)),
            "beta": steps,
        }


def _rotary(module: Any) -> Any:
    return getattr(module, "rotary_emb", None)


def _rope(rotary: Any) -> ashlar.Rope:
    """Unsupported: the frequencies are not fixed."""
    kind, table = type(rotary).__name__, getattr(rotary, "cos_sin_cache", None)
    if getattr(rotary, "rotary_dim", 0) % 2 or not hasattr(rotary, "_compute_inv_freq") or table is None:
        raise Unsupported(f"segments: rotary embedding {kind} is not supported")
    # By class, the argument is a factor or the base. The factor is tried first: with the base in its place, YaRN's low
    # frequencies are almost 0, which at these positions looks right if the context is long. A scale of the table, as
    # YaRN has, is part of the stored keys.
    for argument in (getattr(rotary, "scaling_factor", None) or rotary.base, rotary.base):
        frequencies = rotary._compute_inv_freq(argument).double().cpu()
        if all(_turns(table[position], frequencies * position) for position in _TRIED if position < len(table)):
            style = ashlar.RopeStyle.HALF_SPLIT if rotary.is_neox_style else ashlar.RopeStyle.INTERLEAVED
            return ashlar.Rope(frequencies.tolist(), style)
    raise Unsupported(f"segments: {kind} does not rotate keys by fixed frequencies")


def _turns(row: torch.Tensor, angles: torch.Tensor) -> bool:
    """Returns whether a row of a table has the cosines and sines of these angles, times one scale."""
    row, wanted = row.double().cpu(), torch.cat([angles.cos(), angles.sin()])
    if row.shape != wanted.shape:
        return False
    scale = (row @ wanted) / (wanted @ wanted)
    return bool(scale > 0 and (row - scale * wanted).abs().max() <= 8e-3 * scale)  # the table may be in bf16


def _is_mla(layer: Any) -> bool:
    return hasattr(layer, "kv_lora_rank")


def _latent_rows(layer: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices in an MLA layer's cache, [blocks, tokens, latent and rotary part], of these slots."""
    tokens = layer.kv_cache.shape[1]
    return slots // tokens, slots % tokens


@contextlib.contextmanager
def _seen_latents(
    layers: Mapping[str, Any], slots: Mapping[str, torch.Tensor], at_keys: AtKeys | None
) -> Iterator[None]:
    """Within the block, the latents and rotary parts that MLA layers have written to their slots are passed to
    `at_keys`."""

    def hook(name: str, at_keys: AtKeys) -> Any:
        def see(layer: Any, *_: Any) -> None:
            rows = layer.kv_cache[_latent_rows(layer, slots[name])]
            at_keys(name, rows[:, : layer.kv_lora_rank], rows[:, layer.kv_lora_rank :])

        return see

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            if _is_mla(layer) and at_keys is not None:
                stack.callback(layer.register_forward_hook(hook(name, at_keys)).remove)
        yield


def rotate(keys: torch.Tensor, rope: ashlar.Rope | None, position: int) -> torch.Tensor:
    """Rotates keys, [rows, dim], by a number of positions."""
    if rope is None:
        return keys
    angles = torch.tensor(list(rope.frequencies), dtype=torch.float64) * position
    cos, sin, half = angles.cos(), angles.sin(), len(angles)
    rotated = keys.clone()
    if rope.style is ashlar.RopeStyle.HALF_SPLIT:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    rotated[:, first] = keys[:, first] * cos - keys[:, second] * sin
    rotated[:, second] = keys[:, second] * cos + keys[:, first] * sin
    return rotated


AtLinear = Callable[[Core], None]


class _Seen:
    """A linear layer that records the rows after its convolution."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def rearrange_mixed_qkv(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.rows = self._layer.rearrange_mixed_qkv(mixed)
        return self.rows


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, ranks: Ranks, at_linear: AtLinear, at_keys: AtKeys | None, metadata: MetadataOf) -> None:
        super().__init__()
        self._ranks, self._at_linear, self._at_keys, self._metadata = ranks, at_linear, at_keys, metadata
        self._delta_nets = _operators("cpu_gdn_attention_core", "qwen_gdn_attention_core")
        self._mamba2 = _operators("mamba_mixer2")
        self._keys = torch.ops.vllm.unified_kv_cache_update.default

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_linear = func in self._delta_nets or func in self._mamba2
        # Operators of linear layers are their cores, which have no collectives. Nor do PyTorch's own operators.
        self._ranks.enter(func.name(), is_linear or func is self._keys or func.namespace == "aten")
        found = self._run(func, args, kwargs or {})
        self._ranks.leave()
        return found

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in self._delta_nets:
            if kwargs.pop("use_aiter", False):
                raise Unsupported("segments: AITER's operator is not supported; set VLLM_ROCM_USE_AITER to 0")
            self._at_linear(_DeltaNet(func, [*args, *kwargs.values()], self._metadata))
            return None
        if func in self._mamba2:
            projected, out, name = args
            self._at_linear(_Mamba2(_resolve_layer_name(name), projected, out, self._metadata))
            return None
        if func is self._keys and self._at_keys is not None:
            key, value, name = args
            self._at_keys(_resolve_layer_name(name), key, value)
        return func(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Layers that share a table of blocks."""

    layers: list[str]
    builder: Any  # the engine's metadata builder
    parts: int = 1  # blocks of the kernels in one of the engine's blocks


class EngineModel:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, described: Described) -> None:
        """Raises Unsupported."""
        self.ranks = Ranks(described.model.tensor_parallel_size)
        self._config, self._block = vllm_config, described.block
        self._layers = layers = vllm_config.compilation_config.static_forward_context
        self._attention = {name: layers[name] for _, name, _ in described.keys}
        self._linear = {place.name: place.group for place in described.linear}
        a_layer = next(iter(self._attention.values()))
        self._model, self.device = model_of(a_layer), a_layer.kv_cache.device
        self._groups: dict[int, _Group] = {}
        for number, group in enumerate(kv_cache_config.kv_cache_groups):
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            names = [each for each in group.layer_names if each in self._attention or each in self._linear]
            if not names:
                continue
            spec = group.kv_cache_spec if specs is None else specs[names[0]]
            with set_current_vllm_config(vllm_config):
                self._groups[number] = self._group(names, spec)

    def _group(self, names: list[str], spec: Any) -> _Group:
        layer = self._layers[names[0]]
        backend, parts = layer.get_attn_backend(), 1
        if names[0] in self._attention:
            known = MLA_BACKENDS if _is_mla(layer) else BACKENDS
            if backend.get_name() not in known:
                raise Unsupported(
                    f"segments: the attention back end {backend.get_name()} is not supported; set attention_backend to "
                    f"{' or '.join(known[1:])}"
                )
            parts = self._block // layer.kv_cache.shape[-2]
            spec = spec.copy_with_new_block_size(self._block // parts)
        else:
            spec = dataclasses.replace(spec, num_prefill_checkpoint_blocks=0)  # the run's blocks have no place for them
        builder = backend.get_builder_cls()(spec, names, self._config, self.device)
        if hasattr(builder, "chunked_prefill_workspace"):  # for tokens of earlier parts, which it takes in pieces
            tokens = -(-self._config.scheduler_config.max_num_batched_tokens // self._block) * self._block
            builder.chunked_prefill_workspace = builder.chunked_prefill_workspace[:tokens].clone()
            builder.chunked_prefill_workspace_size = len(builder.chunked_prefill_workspace)
        return _Group(names, builder, parts)

    def has_tokens(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Returns whether the vocabulary has all these ids. On a GPU, running other ids aborts the process."""
        return bool(tokens.min() >= 0 and tokens.max() < self._config.model_config.get_vocab_size())

    def decays(self, name: str) -> torch.Tensor | None:
        """Returns the decay table of a linear layer, as in `ashlar.Linear`, on the layer's device; None: it has
        none."""
        layer = self._layers[name]
        table = layer.A.detach().float() if hasattr(layer, "conv_ssm_forward") else decays_of(layer)
        return None if table is None else table.to(self.device)

    def ropes(self, described: Described) -> dict[str, ashlar.Rope | None]:
        """Returns how each attention layer's keys rotate, by name; None: not at all. Linear layers that rotate keys are
        included. Call it before the engine's first step, because it runs the model in the engine's blocks.

        The rotation is read from the model's tables, and for attention layers checked by a run of few tokens at several
        positions. All ranks must call it. Unsupported: they differ. If it raises an error on one rank, the others may
        return.
        """
        known = [
            len(getattr(each.rotary_emb, "cos_sin_cache", ()))
            for each in self._model.modules()
            if _rotary(each) is not None
        ]
        found = self.ranks.agree(lambda: self._ropes_of_tables(bool(known)))
        most = min([self._config.model_config.max_model_len, *known])
        tried = {
            position: self._try(described, position) for position in (0, *_TRIED) if position < most or position == 0
        }
        self._check(found, tried)  # last: a rank whose check fails runs no trial after it
        return found

    def _ropes_of_tables(self, some_rotate: bool) -> dict[str, ashlar.Rope | None]:
        """`some_rotate`: whether the model has a rotary embedding."""
        parents = {id(child): each for each in self._model.modules() for child in each.children()}
        found: dict[str, ashlar.Rope | None] = {}
        has_states = bool(self._linear)
        for name, layer in self._attention.items():
            if id(layer) not in parents:
                raise Unsupported(
                    f"segments: {name}: layers of a draft model are not supported; remove speculative_config"
                )
            rotary = _rotary(layer) or _rotary(parents[id(layer)])
            if rotary is None and some_rotate:
                raise Unsupported(f"segments: {name}: has no rotary embedding, unlike other layers")
            # Without states, positions are known by embeddings or biases, which a segment's keys do not follow.
            biased = getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None
            if rotary is None and (biased or not has_states):
                raise Unsupported("segments: the model has no rotary embedding")
            found[name] = None if rotary is None else _rope(rotary)
        for name in self._linear:
            if (rotary := rotary_of(self._layers[name])) is not None:
                found[name] = _rope(rotary)
        return found

    def _check(self, found: Mapping[str, ashlar.Rope | None], tried: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Compares rotations with trials at several positions. Unsupported: they differ, or a layer was not observed."""
        for name in [*self._linear, *self._attention]:
            if any(name not in rows for rows in tried.values()):
                raise Unsupported(
                    f"segments: {name}: the operator of {type(self._layers[name]).__name__} is not supported"
                )
        for name in self._attention:
            straight = tried[0][name].double().cpu()
            for position, rows in tried.items():
                keys, wanted = rows[name].double().cpu(), rotate(straight, found[name], position)
                if (keys - wanted).norm() > _TOLERANCE * wanted.norm():
                    raise Unsupported(f"segments: {name}: its keys do not match its rotary embedding")

    def _try(self, described: Described, position: int) -> dict[str, torch.Tensor]:
        """Runs few tokens, which see only themselves, from this position on. Returns by layer what the check needs: keys of
        attention layers, [rows, dim], rotary parts of MLA, nothing of linear layers."""
        blocks = {group: 1 + number for number, group in enumerate(sorted({p.group for p in described.linear}))}
        pages = {group: [1 + len(blocks) + number] for number, group in enumerate(described.key_groups)}
        rows: dict[str, torch.Tensor] = {}

        def at_linear(core: Core) -> None:
            core.run(0, _TRIED_TOKENS, blocks[self._linear[core.name]])
            rows[core.name] = torch.empty(0)

        def at_keys(name: str, key: torch.Tensor, value: torch.Tensor) -> None:
            layer = self._attention[name]
            rows[name] = value.clone() if _is_mla(layer) else key.reshape(-1, layer.head_size).clone()

        tokens = np.arange(1, 1 + _TRIED_TOKENS, dtype=np.int32)
        self.run(tokens, pages, at_linear, at_keys, position)
        return rows

    def slots(self, pages: Sequence[int], begin: int, end: int) -> torch.Tensor:
        """Returns the places of positions in the engine's blocks, in CPU memory."""
        positions = np.arange(begin, end)
        return torch.from_numpy(
            np.asarray(pages, np.int64)[positions // self._block] * self._block + positions % self._block
        )

    def put_keys(self, name: str, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes keys and values, [tokens, heads, dim], by the engine's own writer, which knows the layout, or latents
        and rotary parts of MLA. It runs on the engine's stream; the arguments may be in CPU memory."""
        layer, slots = self._attention[name], slots.to(self.device)
        rows = [each.to(self.device) for each in (keys, values)]
        if _is_mla(layer):
            layer.kv_cache[_latent_rows(layer, slots)] = torch.cat(rows, -1).flatten(1)
        else:
            layer.impl.do_kv_cache_update(layer, *rows, layer.kv_cache, slots)

    def metadata(self, begin: int, end: int, tables: Mapping[int, Sequence[int]]) -> dict[str, Any]:
        """Returns the engine's metadata of a step with positions [begin, end) of one request, by layer. `tables`: the
        request's blocks, by group."""
        start, ends = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        found: dict[str, Any] = {}
        for number, table in tables.items():
            group = self._groups[number]
            parts = np.asarray(table, np.int32)[:, None] * group.parts + np.arange(group.parts, dtype=np.int32)
            multiple = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, self._block // group.parts)
            parts = np.pad(parts.ravel(), (0, -parts.size % multiple))
            common = CommonAttentionMetadata(
                query_start_loc=start.to(self.device),
                query_start_loc_cpu=start,
                seq_lens=ends.to(self.device),
                seq_lens_cpu_upper_bound=ends,
                num_reqs=1,
                num_actual_tokens=end - begin,
                max_query_len=end - begin,
                max_seq_len=end,
                block_table_tensor=torch.from_numpy(parts[None]).to(self.device),
                slot_mapping=self.slots(table, begin, end).to(self.device),
                is_prefilling=torch.tensor([True]),
            )
            found |= dict.fromkeys(group.layers, group.builder.build(0, common))
        return found

    def _metadata_of(self, name: str, begin: int, end: int, block: int, start: int = 0) -> Any:
        """Returns the metadata of a linear layer's rows [begin, end), whose state is in `block`. `start`: position of
        the first row."""
        begin, end = start + begin, start + end
        table = [0] * (-(-end // self._block) - 1) + [block]
        return self.metadata(begin, end, {self._linear[name]: table})[name]

    def _clear_ends(self, pages: Mapping[int, Sequence[int]], start: int) -> None:
        """Fills the last block of each group with zeros, as the engine does with the new blocks of requests, unless it
        has tokens before `start`.

        Kernels multiply the rows after the last token by zero. A former state in the block may be NaN if read as rows.
        """
        for number, table in pages.items():
            group = self._groups[number]
            for name in group.layers if start <= (len(table) - 1) * self._block else ():
                self._attention[name].kv_cache[table[-1] * group.parts : (table[-1] + 1) * group.parts].zero_()

    def run(
        self,
        tokens: npt.NDArray[np.int32],
        pages: Mapping[int, Sequence[int]],
        at_linear: AtLinear,
        at_keys: AtKeys | None = None,
        shift: int = 0,
        start: int = 0,
    ) -> None:
        """Runs a text through all layers, on the engine's stream, or a later part of it. All ranks must call it.

        `pages`: the text's blocks by group of attention layers. `shift`: is added to the positions by which keys and
        queries rotate. `start`: position of the first token; the blocks have the keys and values before it.
        """
        forward = self.ranks.agree(lambda: self.prepare(tokens, pages, at_linear, at_keys, shift, start))
        with self.ranks.together():
            forward()

    def prepare(
        self,
        tokens: npt.NDArray[np.int32],
        pages: Mapping[int, Sequence[int]],
        at_linear: AtLinear,
        at_keys: AtKeys | None = None,
        shift: int = 0,
        start: int = 0,
    ) -> Callable[[], None]:
        """As `run`, up to the model's forward, which the returned function calls. All collectives are in that
        function."""
        count = len(tokens)
        pages = {group: table[: -(-(start + count) // self._block)] for group, table in pages.items()}
        metadata = self.metadata(start, start + count, pages)
        metadata_of = functools.partial(self._metadata_of, start=start)
        slots = {name: each.slot_mapping for name, each in metadata.items()}
        where = torch.arange(shift + start, shift + start + count).to(self.device)
        if self._config.model_config.uses_mrope:  # text has the same position on each axis
            where = where.repeat(self._config.model_config.mrope_num_dims, 1)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        with torch.inference_mode():
            self._clear_ends(pages, start)

        def forward() -> None:
            with (
                torch.inference_mode(),
                set_forward_context(metadata, self._config, num_tokens=count, slot_mapping=slots, skip_compiled=True),
                intercepted({name: self._layers[name] for name in self._linear}, metadata_of, at_linear),
                _Watch(self.ranks, at_linear, at_keys, metadata_of),
                _seen_latents(self._attention, slots, at_keys),
            ):
                context = get_forward_context()
                context.no_compile_layers = dict(context.no_compile_layers)
                self._model(input_ids=ids, positions=where)
            self.ranks.enter("end", is_local=True)  # what follows has no collectives

        return forward
