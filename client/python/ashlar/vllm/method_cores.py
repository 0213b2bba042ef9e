# SPDX-License-Identifier: Apache-2.0
"""Cores of linear layers that vLLM runs as methods of the layer: KDA, lightning attention and Mamba-1.

While a segment runs, each of these methods is replaced on its layer by a core, which calls it with ranges of its rows.
The inputs of the recurrence are observed where the layer computes them, so the kernels after them may differ. These
layers run only on GPUs. No GPU has run this code: the tests run vLLM's layers with torch in place of their kernels.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from ashlar.vllm.model import mamba1_width
from ashlar.vllm.segments import GPU_NORM_EPSILON


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, a layer or a module has this function. Only the engine's thread runs the model."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def seen_calls(
    owner: Any, name: str, copied: Callable[[Any], Any] = lambda result: result
) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Records the result and the positional arguments of each call of a function of a layer or a module. `copied`
    copies a result that is overwritten later."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    own = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        calls.append((copied(result), args))
        return result

    with _replaced(owner, name, call):
        yield calls


class _MethodCore:
    """A `forward.Core`. `given`: the method's arguments by name, with one row per token in their first dimension, or in
    the second one if the first one has one element. The method writes its output to one of them."""

    method = "_forward"
    normalized = True

    def __init__(self, name: str, layer: Any, given: dict[str, torch.Tensor], own: Any, metadata: Any) -> None:
        """`own`: the method. `metadata`: `forward.MetadataOf`."""
        self.name, self._layer, self._given = name, layer, given
        self._own, self._metadata = own, metadata

    def run(self, begin: int, end: int, block: int) -> None:
        get_forward_context().attn_metadata[self.name] = self._metadata(self.name, begin, end, block)
        count = max(len(each) for each in self._given.values())
        self._own(**{
            name: each.narrow(0 if len(each) == count else 1, begin, end - begin) for name, each in self._given.items()
        })  # fmt: skip

    def inputs(self) -> torch.Tensor:
        raise NotImplementedError


class _Kda(_MethodCore):
    """Kimi-Linear's layer, whose kernel computes the gates."""

    module = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"

    def inputs(self) -> torch.Tensor:
        return self._given["mixed_qkv"]

    def _gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns g, [tokens, heads, d_k], and beta, [tokens, heads]."""
        layer, raw = self._layer, self._given["g1"][0].float()
        raw, scale = raw + layer.dt_bias.view(raw.shape[1:]), layer.A_log.float().exp()[:, None]
        bound = layer.gate_lower_bound
        g = -scale * torch.nn.functional.softplus(raw) if bound is None else bound * (scale * raw).sigmoid()
        return g, self._given["beta"][0].float().sigmoid()

    def run_seen(self, count: int, block: int) -> dict[str, torch.Tensor]:
        """Returns rows of k, v, g and beta."""
        # The kernel for prompts writes its output to v.
        with seen_calls(sys.modules[self.module], "causal_conv1d_fn", torch.clone) as convolved:
            self.run(0, count, block)
        g, beta = (each[:count] for each in self._gates())
        _, k, v = (row.T.reshape(count, beta.shape[1], -1) for row, _ in convolved)
        size = k.float().square().sum(-1, keepdim=True) + GPU_NORM_EPSILON
        return {"k": (k.float() * size.rsqrt()).to(k.dtype), "v": v, "g": g, "beta": beta}


class _GatedKda(_Kda):
    """Ling 3's layer, whose gates are computed before its core."""

    module = "vllm.model_executor.models.bailing_moe_v3"

    def inputs(self) -> torch.Tensor:
        return torch.cat([self._given[f"{name}_proj_states"] for name in "qkv"], 1)

    def _gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._given["g1"][0], self._given["beta"][0]


class _Lightning(_MethodCore):
    def inputs(self) -> torch.Tensor:
        """Returns no channels: there is no convolution."""
        return self._given["hidden_states"][:, :0]

    def run_seen(self, count: int, block: int) -> dict[str, torch.Tensor]:
        """Returns rows of k and v, [tokens, heads, dim]."""
        with seen_calls(self._layer, "_prefill_and_mix_infer") as mixed:
            self.run(0, count, block)
        ((_, (_, k, v, *_)),) = mixed
        return {"k": k, "v": v}


class _Mamba1(_MethodCore):
    method = "forward_impl"

    def inputs(self) -> torch.Tensor:
        layer = self._layer
        return layer.in_proj(self._given["hidden_states"])[0][:, : len(layer.A)]

    def run_seen(self, count: int, block: int) -> dict[str, torch.Tensor]:
        """Returns rows of k (B), v (x) and beta (the steps)."""
        layer = self._layer
        with seen_calls(layer, "_ssm_transform") as transformed:
            self.run(0, count, block)
        (((steps, k, _), (v,)),) = transformed
        steps, bias = steps.T.float(), layer._time_proj_bias()
        return {"k": k, "v": v, "beta": torch.nn.functional.softplus(steps if bias is None else steps + bias)}


_KINDS: dict[str, type[_Kda | _Lightning | _Mamba1]] = {
    "KimiGatedDeltaNetAttention": _Kda,
    "BailingMoeV3KimiDeltaAttention": _GatedKda,
    "BailingMoELinearAttention": _Lightning,
    "MiniMaxText01LinearAttention": _Lightning,
    "MambaMixer": _Mamba1,
}


def _kind_of(layer: Any) -> type[_Kda | _Lightning | _Mamba1] | None:
    """Returns the class of the layer's core; None: the layer is not one of these."""
    return next((_KINDS[each.__name__] for each in type(layer).__mro__ if each.__name__ in _KINDS), None)


@contextlib.contextmanager
def intercepted(layers: Mapping[str, Any], metadata: Any, at_linear: Callable[[Any], None]) -> Iterator[None]:
    """Within the block, cores of these layers are passed to `at_linear`. `metadata`: `forward.MetadataOf`."""

    def replacement(name: str, layer: Any, kind: type[_Kda | _Lightning | _Mamba1]) -> Callable[..., None]:
        own = getattr(layer, kind.method)
        return lambda **given: at_linear(kind(name, layer, given, own, metadata))

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            kind = _kind_of(layer)
            if kind is not None:
                stack.enter_context(_replaced(layer, kind.method, replacement(name, layer, kind)))
        yield


def decays_of(layer: Any) -> torch.Tensor | None:
    """Returns the decay table of a lightning layer, [heads], or of Mamba-1, [heads, d_k, d_v]; None for others."""
    kind = _kind_of(layer)
    if kind is None or issubclass(kind, _Kda):
        return None
    if kind is _Lightning:
        return -layer.tp_slope.float().flatten()
    heads = layer.A.detach().float().unflatten(0, (-1, mamba1_width(len(layer.A))))
    return heads.transpose(1, 2).contiguous()


def rotary_of(layer: Any) -> Any:
    """Returns the module by which a lightning layer rotates its keys; None: it does not."""
    return layer.rotary_emb if getattr(layer, "linear_rope", False) else None
